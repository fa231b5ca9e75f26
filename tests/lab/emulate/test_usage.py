"""Usage in every event, whatever writes it and however many tokens it shows."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, COMPLETIONS, Lab, emulated, play
from tests.support.site import Exchanged

from balanceroute.proxy.lab.emulate import EmulationSettings
from balanceroute.proxy.lab.emulate.answer import TOKEN_TEXTS_JSON, AnswerHead, Choice, Delta
from balanceroute.proxy.lab.emulate.formats import ChatFormat, CompletionFormat
from balanceroute.proxy.lab.emulate.request import read_generation
from balanceroute.proxy.lab.emulate.tokens import TOKEN_TEXTS

CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
OPTIONS = [None, {"include_usage": True}, {"continuous_usage_stats": True}, CONTINUOUS]


def streamed(path: str, prompt: str, **changes: Any) -> dict[str, Any]:
    """Return a request for a stream with usage in every event."""
    asked: dict[str, Any] = {"prompt": prompt}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    return asked | {"stream": True, "stream_options": CONTINUOUS, "ignore_eos": True} | changes


def random_requests(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield paths and requests of plain text."""
    for _ in range(60):
        path = rng.choice([CHAT, COMPLETIONS])
        prompt = " ".join(f"t{rng.randrange(99)}" for _ in range(rng.randint(1, 9)))
        yield (
            path,
            streamed(
                path,
                prompt,
                max_tokens=rng.randint(1, 60),
                ignore_eos=rng.random() < 0.5,
                stream_options=rng.choice(OPTIONS),
                n=rng.randint(1, 3),
                temperature=1.0,
            ),
        )


def writer(path: str, values: dict[str, Any], **changes: Any) -> tuple[Choice, Any]:
    """Return the first choice of a request's answer, and what writes it."""
    chat = path == CHAT
    request = read_generation(values, EmulationSettings(**changes), chat=chat)
    head = AnswerHead("cmpl-%d%%é", 1, 'a "model"', "print", report_cached=False)
    choice = Choice(request, 0, request.prompts[0], request.max_tokens[0], 1e9)
    return choice, (ChatFormat if chat else CompletionFormat)(request, head)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_plain_token_is_written_in_the_same_bytes_either_way(
    path: str, options: object
) -> None:
    values = streamed(path, "t1", stream_options=options)
    choice, form = writer(path, values)
    plain = form.plain(choice)
    assert plain is not None
    for choice.emitted, said in enumerate(TOKEN_TEXTS[:2000], start=1):
        event = plain(TOKEN_TEXTS_JSON[choice.emitted - 1], choice.emitted)
        assert event == form.event(choice, Delta(said, token_ids=(0,)))
        assert (b'"usage"' in event) == (options is CONTINUOUS)


@pytest.mark.parametrize(
    ("path", "parser", "details"),
    [
        (CHAT, False, ',"completion_tokens_details":null'),
        (CHAT, True, ',"completion_tokens_details":{"reasoning_tokens":0}'),
        (COMPLETIONS, False, ""),
        (COMPLETIONS, True, ""),
    ],
)
def test_usage_in_an_event_is_what_the_engine_writes(path: str, parser: bool, details: str) -> None:
    prompts = (f"t{number} b c" for number in range(1000))
    written = (writer(path, streamed(path, one), reasoning_parser=parser) for one in prompts)
    # The prompt decides whether the answer begins with reasoning.
    choice, form = next(one for one in written if one[0].plain)
    plain = form.plain(choice)
    assert plain is not None
    prompt = len(choice.prompt.tokens)
    usage = f'"prompt_tokens":{prompt},"total_tokens":{prompt + 20},"completion_tokens":20{details}'
    assert plain(b" a", 20).decode().endswith(f'"token_ids":null}}],"usage":{{{usage}}}}}\n\n')


def test_an_answer_has_the_same_bytes_with_and_without_the_fast_path() -> None:
    bodies: list[bytes] = []

    async def fast(lab: Lab) -> None:
        for path, values in random_requests(random.Random(3)):
            answer = await lab.post("decode/0", path, values)
            assert answer.done
            bodies.append(answer.body)

    async def slow(lab: Lab) -> None:
        # What waits for a certain token looks at all of them.
        lab.fleet.faults.set("decode/0", end_after_tokens=10**6)
        await fast(lab)

    play(fast, mean_output_tokens=30.0)
    play(slow, mean_output_tokens=30.0)
    assert bodies[60:] == bodies[:60]


def told_choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """Return the choice that an event tells tokens of, if it does."""
    choices = [one for one in chunk["choices"] if "role" not in one.get("delta", ())]
    return choices[0] if choices else None


def counted(answer: Exchanged) -> list[tuple[str, int, bool]]:
    """Return text, completion tokens and whether it is the last, of each event of the only choice."""
    found = []
    for chunk in answer.chunks:
        usage, choice = chunk["usage"], told_choice(chunk)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if choice is not None:
            delta = choice.get("delta", choice)
            text = delta.get("content", delta.get("text")) or ""
            found.append((text, usage["completion_tokens"], choice["finish_reason"] is not None))
    return found


@pytest.mark.parametrize("asked", [{}, {"stop": ["t16000", "t9"]}], ids=["plain", "stop"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "changes",
    [{"partial_utf8": 0.3}, {"merged_outputs": 0.3}, {"partial_utf8": 0.3, "merged_outputs": 0.5}],
    ids=str,
)
def test_text_and_totals_are_right_whatever_an_event_shows(
    changes: dict[str, float], path: str, asked: dict[str, Any]
) -> None:
    answers: list[list[Exchanged]] = []

    async def scenario(lab: Lab) -> None:
        answers.append(
            [
                await lab.post("decode/0", path, streamed(path, f"t{i}", max_tokens=40) | asked)
                for i in range(12)
            ]
        )

    play(scenario)
    play(scenario, **changes)
    events = 0
    for usual, odd in zip(*answers, strict=True):
        cut = "partial_utf8" in changes and odd.reasons()[0] == "length"
        assert usual.text.startswith(odd.text) if cut else odd.text == usual.text
        assert odd.reasons() == usual.reasons()
        assert odd.chunks[-1]["usage"] == usual.chunks[-1]["usage"]
        said = counted(odd)
        totals = [tokens for _, tokens, _ in said]
        assert totals == sorted(set(totals))
        assert totals[-1] == odd.chunks[-1]["usage"]["completion_tokens"]
        if path == CHAT:
            assert all(text or last for text, _, last in said)
        elif "merged_outputs" not in changes:
            assert totals == list(range(1, totals[-1] + 1))
        events += len(said) if path == CHAT else sum(bool(text) for text, _, _ in said)
    assert events < 0.8 * sum(len(counted(answer)) for answer in answers[0])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@emulated(partial_utf8=0.3, merged_outputs=0.3)
async def test_what_shows_late_carries_its_ids_and_logprobs(lab: Lab, path: str) -> None:
    logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 1}
    events = 0
    for number in range(9):
        asked = {"return_token_ids": True, "max_tokens": 20} | logprobs
        stream = await lab.post("decode/0", path, streamed(path, f"t{number} t2", **asked))
        values = streamed(path, f"t{number} t2", stream=False, stream_options=None, **asked)
        wanted = (await lab.post("decode/1", path, values)).json["choices"][0]
        ids: list[int] = []
        listed: dict[str, list[object]] = {}
        said = [chunk for chunk in stream.chunks if told_choice(chunk) is not None]
        for chunk in said:
            (choice,) = chunk["choices"]
            ids += choice["token_ids"]
            assert chunk["usage"]["completion_tokens"] == len(ids)
            for key, entries in choice["logprobs"].items():
                listed.setdefault(key, []).extend(entries)
        assert ids == wanted["token_ids"]
        assert listed == wanted["logprobs"]
        if path == COMPLETIONS:
            assert said[0]["choices"][0]["prompt_token_ids"] == wanted["prompt_token_ids"]
        events += len(said)
    assert events < 0.8 * 9 * 20


@emulated(partial_utf8=0.4, merged_outputs=0.4)
async def test_what_is_late_shows_when_an_answer_is_handed_back(lab: Lab) -> None:
    values = streamed(CHAT, "t1", max_tokens=40)
    whole = (await lab.post("decode/1", CHAT, values)).text
    for tokens in range(1, 12):
        lab.fleet.faults.set("decode/0", recomputed_after_tokens=tokens)
        begun = await lab.post("decode/0", CHAT, values)
        assert begun.reasons() == ("stop", "recomputed")
        assert len(begun.text.split()) == tokens
        assert whole.startswith(begun.text)
        assert counted(begun)[-1][1] == tokens


@emulated(reasoning_parser=True)
async def test_a_reasoning_parser_tells_how_many_tokens_were_reasoning(lab: Lab) -> None:
    seen = set()
    for number in range(20):
        values = streamed(CHAT, f"t{number}", max_tokens=12)
        stream = await lab.post("decode/0", CHAT, values)
        thought = ""
        tokens = 0
        for chunk in stream.chunks[:-1]:
            delta = chunk["choices"][0]["delta"]
            thought += delta.get("reasoning", "")
            tokens += "reasoning" in delta
            assert chunk["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
        final = json.dumps(stream.chunks[-1]["usage"], separators=(",", ":"))
        assert final.endswith(f'12,"completion_tokens_details":{{"reasoning_tokens":{tokens}}}}}')
        values |= {"stream": False, "stream_options": None}
        whole = (await lab.post("decode/1", CHAT, values)).json
        message = whole["choices"][0]["message"]
        assert message["reasoning"] == (thought or None)
        assert message["content"] == (stream.text or None)
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
        seen.add(tokens)
    assert {0, 12} < seen


@emulated(reasoning_parser=True)
async def test_only_a_chat_is_read_by_the_reasoning_parser(lab: Lab) -> None:
    stream = await lab.post("decode/0", COMPLETIONS, streamed(COMPLETIONS, "t1", max_tokens=9))
    assert len(stream.texts()) == 9
    assert b"_details" not in stream.body


@emulated(reasoning_parser=True)
async def test_an_answer_that_goes_on_does_not_reason_again(lab: Lab) -> None:
    for number in range(9):
        values = streamed(CHAT, f"t{number}", max_tokens=12)
        values["messages"].append({"role": "assistant", "content": "t7"})
        values |= {"add_generation_prompt": False, "continue_final_message": True}
        stream = await lab.post("decode/0", CHAT, values)
        assert len(stream.texts()) == 12
        details = stream.chunks[-1]["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 0}

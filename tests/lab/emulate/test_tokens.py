"""The tokeniser and the model: exact counts, and a text that goes on the same way everywhere."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.emulate.lab import CHAT, COMPLETIONS, Lab, emulated

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate import tokens
from balanceroute.proxy.lab.emulate.request import Prompt
from balanceroute.proxy.lab.emulate.tokens import (
    EOS,
    TOKEN_TEXTS,
    VOCABULARY_SIZE,
    WORDS,
    AnswerLengths,
    Sampler,
    decode,
    packed,
    render_chat,
    tokenise,
    word_of,
)

TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=5)), max_size=8).map(" ".join)


@pytest.mark.parametrize("count", [0, 1, 7, 500])
def test_n_words_are_n_tokens(count: int) -> None:
    rng = random.Random(count)
    words = [f"t{rng.randrange(10**6)}" for _ in range(count)]
    assert len(tokenise(" ".join(words))) == count


@given(st.lists(st.sampled_from(TOKEN_TEXTS), max_size=9))
def test_what_the_model_said_reads_as_the_tokens_it_said(said: list[str]) -> None:
    tokens = [TOKEN_TEXTS.index(one) for one in said]
    assert tokenise("".join(said)) == tokens


def test_the_vocabulary_has_no_word_twice_and_none_with_white_space() -> None:
    assert len(set(WORDS)) == VOCABULARY_SIZE
    assert all(word.split() == [word] for word in WORDS)


@given(TEXTS)
def test_decoding_gives_back_the_words(text: str) -> None:
    assert decode(tokenise(text)).split() == text.split()


NUMBERED = " ".join(f"t{7 * i % VOCABULARY_SIZE}" for i in range(3000))


def one_by_one(text: str) -> list[int]:
    return [token for word in text.split() for token in tokenise(word)]


@pytest.mark.parametrize(
    "end",
    [
        *["", " t0", " t31", " t16383", " t16384", " t016", " t00", " t99999999999999999999", "1"],
        *[" t", "t", " ", "  t5", " tt5", " t5t", " 5", " t5 6", "\tt5", " t-5", " t5.0", " é"],
    ],
)
def test_a_long_text_of_numbered_words_has_the_tokens_of_its_words(end: str) -> None:
    for text in (NUMBERED + end, end + " " + NUMBERED, end + NUMBERED, NUMBERED + end + NUMBERED):
        assert tokenise(text) == one_by_one(text)
        assert decode(tokenise(text)) == " ".join(text.split())


def test_words_that_are_spelled_in_another_way_are_remembered_for_ever() -> None:
    for i in range(1 << 18):
        tokenise(f"w{i}")
    assert decode(tokenise(NUMBERED)) == NUMBERED


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_the_chat_template_adds_a_fixed_number_of_tokens(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    words = sum(len(content.split()) for content in contents)
    assert len(tokenise(render_chat(messages))) == words + 2 + 2 * len(messages)


def say(sampler: Sampler, count: int) -> list[int]:
    return [sampler.next(may_end=False) for _ in range(count)]


@given(TEXTS, st.integers(0, 20))
def test_a_text_goes_on_the_same_way_from_any_point_of_it(prompt: str, cut: int) -> None:
    whole = say(Sampler(packed(tokenise(prompt)), b"key", 64.0), 25)
    begun = prompt + "".join(TOKEN_TEXTS[token] for token in whole[:cut])
    rest = say(Sampler(packed(tokenise(begun)), b"key", 64.0), 25 - cut)
    assert whole[cut:] == rest


def test_the_end_of_a_text_is_the_same_from_any_point_of_it() -> None:
    sampler = Sampler(packed(tokenise("a b")), b"key", 8.0)
    said: list[int] = []
    while (token := sampler.next(may_end=True)) != EOS:
        said.append(token)
    assert said
    text = "a b" + "".join(TOKEN_TEXTS[token] for token in said)
    assert Sampler(packed(tokenise(text)), b"key", 8.0).next(may_end=True) == EOS


def test_prompt_and_key_decide_the_text() -> None:
    first = say(Sampler(packed([1, 2]), b"key", 64.0), 5)
    assert say(Sampler(packed([1, 2]), b"key", 64.0), 5) == first
    assert say(Sampler(packed([1, 3]), b"key", 64.0), 5) != first
    assert say(Sampler(packed([1, 2]), b"other", 64.0), 5) != first


def test_texts_end_after_the_mean_number_of_tokens_on_average() -> None:
    lengths = []
    for number in range(400):
        sampler = Sampler(packed([number]), b"key", 20.0)
        length = 1
        while sampler.next(may_end=True) != EOS:
            length += 1
        lengths.append(length)
    assert sum(lengths) / len(lengths) == pytest.approx(20.0, rel=0.15)


def test_a_prompt_keeps_its_words_when_the_tokeniser_has_forgotten_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = Prompt(tokenise("canary-1  t31\nLöffel"), "canary-1  t31\nLöffel")
    monkeypatch.setattr(tokens, "_REMEMBERED_WORDS", len(tokens._IDS.words))
    tokenise("another")
    assert word_of(prompt.tokens[0]) != "canary-1"
    assert prompt.words == ["canary-1", "t31", "Löffel"]


# Lengths of answers that a load generator tells: who keeps to them, and what is refused.


VALUES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "t1 t2", "max_tokens": 40},
    CHAT: {"messages": [{"role": "user", "content": "t1 t2"}]},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}], ids=["plain", "not plain"])
@pytest.mark.parametrize("length", [1, 2, 39, 40])
@emulated()
async def test_an_answer_has_as_many_tokens_as_were_told_and_ends_by_itself(
    lab: Lab, path: str, extra: dict[str, Any], length: int
) -> None:
    answer = await lab.post("prefill/0", "/emulation/lengths", {"a-1": length, "b": 3})
    assert answer.json == {"lengths": 2}
    values = VALUES[path] | (extra if path == COMPLETIONS else {})
    for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        answer = await lab.post("decode/1", path, values | stream, {"X-Request-Id": "a-1"})
        usage = (answer.chunks[-1] if stream else answer.json)["usage"]
        assert usage["completion_tokens"] == length
        assert lab.fleet.idle
        chunks = [chunk for chunk in answer.chunks if chunk["choices"]] if stream else []
        ends = [one["choices"][0]["finish_reason"] for one in chunks or [answer.json]]
        assert ends[-1] == "stop"


@emulated()
async def test_a_limit_cuts_what_was_told(lab: Lab) -> None:
    lab.fleet.lengths.add({"a": 41})
    answer = await lab.post("decode/0", COMPLETIONS, VALUES[COMPLETIONS], {"X-Request-Id": "a"})
    assert answer.json["usage"]["completion_tokens"] == 40
    assert answer.reasons()[0] == "length"


@emulated(mean_output_tokens=2.0)
async def test_a_prefill_leaves_the_length_to_decode(lab: Lab) -> None:
    values = VALUES[COMPLETIONS]
    for number in range(60):  # Of mean length 2, half of all texts end with their first token.
        lab.fleet.lengths.add({f"a-{number}": 1 + number})
        values = {"prompt": f"t1 t{number}", "max_tokens": 100}
        decode = await lab.prefilled(COMPLETIONS, values, request_id=f"a-{number}")
        answer = await lab.post("decode/0", COMPLETIONS, decode, {"X-Request-Id": f"a-{number}"})
        assert answer.json["usage"]["completion_tokens"] == 1 + number


@emulated()
async def test_a_request_that_is_handed_back_goes_on_with_what_is_left(lab: Lab) -> None:
    lab.fleet.lengths.add({"a": 12})
    lab.fleet.faults.set("decode/0", recomputed_after_tokens=5)
    values, name = VALUES[COMPLETIONS], {"X-Request-Id": "a"}
    first = await lab.post("decode/0", COMPLETIONS, values, name)
    assert first.reasons() == ("stop", "recomputed")
    second = await lab.post("decode/1", COMPLETIONS, values, name)
    assert second.json["usage"]["completion_tokens"] == 12 - 5


@pytest.mark.parametrize("count", [0, -1, 2**31, True, 1.0, "7", None])
def test_a_length_that_is_none_is_refused_and_none_is_noted(count: object) -> None:
    table = AnswerLengths()
    with pytest.raises(ConfigError, match=r"'b': .* is not from 1 to 2147483647"):
        table.add({"a": 1, "b": count})
    assert table.of("a") is None


def test_the_oldest_lengths_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_LENGTHS", 2)
    table = AnswerLengths()
    table.add({"a": 1, "b": 2})
    table.add({"c": 3})
    assert [table.of(name) for name in "abc"] == [None, 2, 3]


@emulated()
async def test_a_length_is_found_behind_a_router_that_replaces_the_header(lab: Lab) -> None:
    lab.fleet.lengths.add({"a": 12})
    lab.fleet.faults.set("decode/0", recomputed_after_tokens=5)
    values = VALUES[COMPLETIONS] | {"request_id": "a"}
    first = await lab.post("decode/0", COMPLETIONS, values, {"X-Request-Id": "router-1"})
    assert first.json["id"] == "cmpl-router-1"  # As in vLLM the header goes first.
    assert first.json["usage"]["completion_tokens"] == 5
    second = await lab.post("decode/1", COMPLETIONS, values, {"X-Request-Id": "router-2"})
    assert second.json["usage"]["completion_tokens"] == 12 - 5

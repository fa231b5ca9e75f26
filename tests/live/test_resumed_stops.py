"""Streams with stop strings and log-probabilities that another rank continues."""

import json
from functools import partial
from typing import Any

import pytest
from tests.extended import usually
from tests.live.test_proxy_connectors import BODY, CHAT, COMPLETIONS, ID, TALK, alone, another
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.live.openai.continuation_stream import ContinuationStream
from balanceroute.proxy.live.openai.stream_reader import RepeatedText
from balanceroute.proxy.live.openai.token_counts import UsageRewrite
from balanceroute.proxy.live.openai.token_ids import Care, TokenIds, care_of
from balanceroute.proxy.live.openai.transcript import Logprobs, LogprobsError
from balanceroute.proxy.live.telemetry.record import Outcome

EXACT: dict[str, Any] = {"resume": "exact", "quarantine_failures": 1_000}
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
STREAMS = {COMPLETIONS: BODY | GREEDY, CHAT: TALK | GREEDY}
TOKENS = 20
LOGPROBS: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{"logprobs": 0}, {"logprobs": 3}],
    CHAT: [{"logprobs": True}, {"logprobs": True, "top_logprobs": 3}],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
ODD: list[dict[str, float]] = [
    {},
    {"merged_outputs": 0.4},
    {"partial_utf8": 0.4},
    {"merged_outputs": 0.3, "partial_utf8": 0.3},
]
# The first is the plain one, and the last has what each of the others has.
USUALLY_ODD = usually([str(ODD[0]), str(ODD[-1])], ODD, ids=map(str, ODD))


def _decoded_more(site: Site, than: int) -> bool:
    return len(site.received("decode")) > than


def meaning(answer: Exchanged) -> dict[str, Any]:
    """Return what a stream says, however it is cut into events."""
    said: dict[str, Any] = {"text": answer.text, "done": answer.done, "logprobs": []}
    for chunk in answer.chunks:
        said["usage"] = chunk.get("usage")
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason"):
                said["end"] = (choice["finish_reason"], choice.get("stop_reason"))
            told = choice.get("logprobs") or {}
            if "content" in told:
                said["logprobs"] += told["content"]
            elif told:
                names = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
                said["logprobs"] += zip(*(told[name] for name in names), strict=True)
    return said


async def cut_everywhere(
    site: Site, path: str, values: dict[str, Any], fault: str = "reset_after_tokens"
) -> int:
    """Check a stream that breaks behind each of its tokens; return how often it went on."""
    right = await alone(site, path, values)
    resumed = 0
    for tokens in range(1, TOKENS):
        site.fleet.faults.set("decode/0", **{fault: tokens})
        begun = len(site.world.ended)
        exchange = await site.send(path, another(values, tokens), headers=ID).end()
        (record,) = site.world.ended[begun:]
        if path == CHAT and not exchange.text:
            # Without text nobody knows that no reasoning is kept back.
            assert (exchange.done, record.outcome) == (False, Outcome.UPSTREAM_ERROR)
            continue
        assert meaning(exchange) == meaning(right), tokens
        assert record.outcome is Outcome.OK
        resumed += record.resumes + record.recomputes
    site.fleet.faults.clear()
    return resumed


@pytest.mark.parametrize("odd", USUALLY_ODD)
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("shown", [False, True], ids=["", "include"])
@served("**odd", flags=EXACT)
async def test_a_stop_string_is_found_wherever_the_stream_broke(
    site: Site, path: str, odd: dict[str, float], shown: bool
) -> None:
    text = (await alone(site, path, STREAMS[path])).text
    # Within a token, over two and over three of them, at the end; and one that never comes.
    for begin, length in ((60, 4), (58, 9), (50, 17), (len(text) - 6, 6)):
        stops = [text[begin : begin + length], "never said at all"[: length + 2]]
        more = {"stop": stops, "include_stop_str_in_output": shown}
        assert await cut_everywhere(site, path, STREAMS[path] | more) > 0


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EXACT)
async def test_a_stop_string_before_the_least_tokens_is_no_end(site: Site, path: str) -> None:
    text = (await alone(site, path, STREAMS[path])).text
    more = {"stop": [text[30:40], text[70:73]], "min_tokens": 9}
    assert await cut_everywhere(site, path, STREAMS[path] | more) > 0


@pytest.mark.parametrize("odd", USUALLY_ODD)
@pytest.mark.parametrize("path", STREAMS)
@served("**odd", flags=EXACT)
async def test_log_probabilities_go_on(site: Site, path: str, odd: dict[str, float]) -> None:
    for more in LOGPROBS[path]:
        values = STREAMS[path] | more
        assert await cut_everywhere(site, path, values) > 0
        stop = (await alone(site, path, values)).text[70:78]
        assert await cut_everywhere(site, path, values | {"stop": stop}) > 0


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fault", ["error_event_after_tokens", "stall_after_tokens"])
def test_a_stream_goes_on_several_times(path: str, fault: str) -> None:
    async def scenario(site: Site) -> None:
        text = (await alone(site, path, STREAMS[path])).text
        values = STREAMS[path] | {"stop": text[90:99]} | LOGPROBS[path][1]
        right = await alone(site, path, values)
        site.fleet.faults.set("decode", **{fault: 6})
        site.fleet.faults.set("decode/3", **{fault: None})
        exchange = await site.send(path, values, headers=ID).end()
        assert meaning(exchange) == meaning(right)
        assert site.world.ended[0].resumes == 3

    flags = EXACT | {"retry_attempts": 9, "policy": "fifo", "idle_stream_timeout_s": 2.0}
    play(scenario, flags=flags, ranks=4)


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EXACT | {"retry_attempts": 9, "policy": "fifo"}, ranks=4)
async def test_a_stream_under_which_engines_die_goes_on_once(site: Site, path: str) -> None:
    text = (await alone(site, path, STREAMS[path])).text
    values = STREAMS[path] | {"stop": text[90:99]} | LOGPROBS[path][1]
    right = meaning(await alone(site, path, values))
    site.fleet.faults.set("decode", reset_after_tokens=6)
    exchange = await site.send(path, values, headers=ID).end()
    assert not exchange.done
    assert exchange.error is not None
    assert b"two engines died" in exchange.events[-1]
    said = meaning(exchange)
    told = len(said["logprobs"])
    assert 6 < told < len(right["logprobs"])
    assert said["logprobs"] == right["logprobs"][:told]
    assert right["text"].startswith(said["text"])
    (record,) = site.world.ended
    assert (record.outcome, record.resumes) == (Outcome.UPSTREAM_ERROR, 1)
    assert len({leg.engine for leg in site.received("decode")}) == 2
    assert len(site.received("decode")) == 2


@pytest.mark.parametrize("path", STREAMS)
@served(connector="mooncake-ascend", flags=EXACT)
async def test_what_is_handed_back_goes_on_with_its_stop_strings(site: Site, path: str) -> None:
    text = (await alone(site, path, STREAMS[path])).text
    values = STREAMS[path] | {"stop": text[70:78]} | LOGPROBS[path][1]
    assert await cut_everywhere(site, path, values, "recomputed_after_tokens") > 0


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}], ids=["text", "tools"])
@served(connector="mooncake-ascend")
async def test_no_log_probability_comes_twice_from_what_text_continues(
    site: Site, more: dict[str, Any]
) -> None:
    """A token may come without text: the mark before a call, for example."""
    values = STREAMS[CHAT] | {"logprobs": True} | more
    right = meaning(await alone(site, CHAT, values))
    for tokens in range(1, len(right["logprobs"])):
        site.fleet.faults.set("decode", recomputed_after_tokens=tokens)
        begun = len(site.received("decode"))
        exchange = site.send(CHAT, values, headers=ID)
        await site.until(partial(_decoded_more, site, begun))
        site.fleet.faults.clear()
        said = meaning(await exchange.end())
        assert exchange.done is not bool(more)
        told = len(said["logprobs"])
        assert said["logprobs"] == right["logprobs"][:told], tokens
        assert not exchange.done or said == right


@pytest.mark.parametrize("more", [{}, {"seed": 3}], ids=str)
@served(flags={"resume": "valid"})
async def test_a_sample_that_could_stop_is_begun_again_with_its_seed(
    site: Site, more: dict[str, Any]
) -> None:
    site.fleet.faults.set("decode/0", reset_after_tokens=9)
    values = STREAMS[CHAT] | {"temperature": 0.7, "stop": "never said"} | more
    exchange = await site.post(CHAT, values)
    assert exchange.done
    (record,) = site.world.ended
    assert record.resumes == 1
    site.fleet.faults.clear()
    seed = more.get("seed", record.seed)
    assert seed is not None
    right = await site.post(CHAT, values | {"seed": seed})
    assert meaning(exchange) == meaning(right)


def continuing(candidates: int) -> ContinuationStream:
    return ContinuationStream(
        1,
        head=b'data: {"id":"x",',
        repeated=RepeatedText(),
        logprobs=Logprobs(0, candidates),
        resumes=True,
        usage=UsageRewrite(None, 3),
        asks_total=False,
        counts=None,
        transcript=None,
        ids=TokenIds(),
        expensive=lambda: None,
        may_abort=lambda: False,
    )


def test_candidates_that_cannot_be_told_end_the_stream() -> None:
    """Two candidates with the same text, which a completion tells as one."""
    told = {"text_offset": [0], "tokens": ["b"], "token_logprobs": [-1.0]}
    choice = {"index": 0, "text": "b", "finish_reason": None}
    choice["logprobs"] = told | {"top_logprobs": [{"b": -1.0}]}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    for candidates in (1, 2):
        stream = continuing(candidates)
        assert (stream.read(event) == b"", stream.over) == (candidates == 2, candidates == 2)
        assert (b"log-probabilities" in stream.first_error) == (candidates == 2)


def test_what_utf_8_cannot_encode_is_told_as_an_engine_tells_it() -> None:
    choice = {"index": 0, "text": "a\ud800b", "finish_reason": None}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    assert b'"content":"a?b"' in continuing(1).read(event)


@pytest.mark.parametrize(
    ("kept", "care"),
    [
        ({}, None),
        ({"stop": None, "logprobs": None}, None),
        ({"stop": [], "logprobs": False}, None),
        ({"stop": "abc"}, Care(2, 2)),
        ({"stop": ["a", "abcd"]}, Care(3, 3)),
        ({"stop": ["a", "abcd"], "include_stop_str_in_output": True}, Care(3, 0)),
        ({"logprobs": 0}, Care(0, 0, logprobs=True)),
        ({"logprobs": True}, Care(0, 0, logprobs=True)),
    ],
    ids=str,
)
def test_what_a_request_asks_for(kept: dict[str, Any], care: Care | None) -> None:
    assert care_of(kept) == care


def test_a_chats_list_needs_all_candidates() -> None:
    told = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}]}
    (entry,) = Logprobs(0, 2).as_chat(told)["content"]
    assert entry["bytes"] == [97]
    assert [one["token"] for one in entry["top_logprobs"]] == ["a", "b"]
    with pytest.raises(LogprobsError):
        Logprobs(0, 3).as_chat(told)

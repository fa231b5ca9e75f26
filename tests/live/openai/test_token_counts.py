"""Tokens by the engine's own count, which the client sees only as far as it asked."""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from tests.live.stream_client import (
    ALL,
    DONE,
    LAST,
    TOTAL,
    Client,
    asked,
    chat,
    chunk,
    counts,
    event,
    in_pieces,
    total,
    usage,
)
from tests.support.site import Site, served, transcript

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.legs import decode_body
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.openai.token_counts import (
    CountsAsked,
    PromptUsage,
    TokenCounts,
    UsageRewrite,
    ask_for_counts,
    asks_total,
    find_usage,
    with_prompt_usage,
)
from balanceroute.proxy.live.telemetry.record import Outcome

# What is asked.


def test_deep_options_are_written_again_or_left_alone() -> None:
    """Options may be nested as deep as a body may, and are the one value encoded again."""

    def encode(body: RequestBody, frames: int) -> bytes:
        if frames:  # A leg may be sent from further down than its request was read.
            return encode(body, frames - 1)
        wanted = ask_for_counts(read_shape(Api.CHAT, body, max_sequences=8), body.values)
        return bytes(decode_body(body, {}, None, wanted))

    encoded = 0
    for levels in range(1, 1_000, 7):
        nested = "[" * levels + "]" * levels
        text = f'{{"messages":[],"stream":true,"stream_options":{{"a":{nested}}}}}'
        try:
            body = RequestBody(text.encode())
        except BodyError:
            break
        assert nested in encode(body, 100).decode().replace(" ", "")
        encoded += 1
    assert encoded > 100


EACH_TOO = {"continuous_usage_stats": True}
NOT_EACH = TOTAL | {"continuous_usage_stats": False}


@pytest.mark.parametrize(
    ("options", "each", "expected"),
    [
        (None, True, CountsAsked(ALL, True, True, True)),
        ({}, True, CountsAsked(ALL, True, True, True)),
        ({"include_usage": False} | EACH_TOO, True, CountsAsked(ALL, True, True, True)),
        ({"include_usage": None}, True, CountsAsked(ALL, True, True, True)),
        (TOTAL, True, CountsAsked(ALL, True, True, False)),
        (NOT_EACH, True, CountsAsked(ALL, True, True, False)),
        (ALL, True, CountsAsked(ALL, True, False, False)),
        (ALL | {"more": 1}, True, CountsAsked(ALL | {"more": 1}, True, False, False)),
        # The total alone may be asked, or what the client asked for.
        (None, False, CountsAsked(NOT_EACH, False, True, True)),
        (EACH_TOO, False, CountsAsked(EACH_TOO | NOT_EACH, False, True, True)),
        (TOTAL, False, CountsAsked(NOT_EACH, False, True, False)),
        (ALL, False, CountsAsked(ALL, True, False, False)),
    ],
    ids=str,
)
def test_the_engine_is_asked_for_all_and_the_client_gets_what_it_asked(
    options: dict[str, object] | None, each: bool, expected: CountsAsked
) -> None:
    assert asked(options, each=each) == expected


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"include_usage": None}, False),
        ({"continuous_usage_stats": True}, False),
        (None, False),
    ],
)
def test_a_client_has_the_usage_at_the_end_only_if_it_asked(options: object, *, asks: bool) -> None:
    assert asks_total({"stream_options": options}) == asks


@pytest.mark.parametrize(
    "values",
    [
        {"options": "all"},
        {"options": []},
        {"options": {"include_usage": "yes"}},
        {"options": {"continuous_usage_stats": 1}},
        {"n": 2},
        {"stream": False},
        {"api": Api.RESPONSES},
        {"api": Api.COMPLETIONS, "prompt": ["a", "b"]},
    ],
)
def test_nothing_is_asked_where_it_would_not_do(values: dict[str, Any]) -> None:
    assert asked(**values) is None


# Real streams: the same request with and without the options.


def as_one(body: bytes) -> bytes:
    """Return a stream without what differs from one request to the next."""
    return re.sub(rb'"id":"[^"]*","object":"([^"]*)","created":\d+', rb'"object":"\1"', body)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (None, "solo_chat_stream"),
        (TOTAL, "solo_chat_stream_usage"),
        (ALL, "solo_chat_stream_usage_continuous"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 333, 1_000_000])
def test_a_client_gets_the_stream_that_it_asked_for(
    options: Mapping[str, bool] | None, same: str, size: int
) -> None:
    body = transcript("solo_chat_stream_usage_continuous.resp")
    client = Client(counts=counts(options)).answer(*in_pieces(body, size)).end()
    assert as_one(client.received) == as_one(transcript(f"{same}.resp"))
    assert client.tokens == client.usage_tokens == 8
    assert client.turns[-1] == "ended"


def test_it_does_not_matter_where_a_counted_stream_is_split() -> None:
    body = transcript("solo_chat_stream_usage_continuous.resp")
    right = Client(counts=counts()).answer(body).end().received
    for at in range(1, len(body)):
        client = Client(counts=counts()).answer(body[:at], body[at:]).end()
        assert client.received == right


# Counting.


def test_several_tokens_in_an_event_are_several() -> None:
    client = Client(counts=counts()).answer(chunk("a", **usage(1)), chunk("bcd", **usage(4)))
    assert client.tokens == 4
    client.leg.on_data(chunk("e", **usage(7)) + chunk("f", **usage(9)))
    assert client.tokens == 9
    assert client.received == chunk("a") + chunk("bcd") + chunk("e") + chunk("f")


def test_an_event_without_a_count_is_one_token() -> None:
    client = Client(counts=counts()).answer(chunk(), chunk(), chunk(usage=None))
    assert client.tokens == 3
    assert client.received == chunk() + chunk() + chunk(usage=None)


@pytest.mark.parametrize(
    "told",
    [
        usage(2),
        usage(-1),
        usage(10**9),
        {"usage": {"prompt_tokens": 3}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": "7"}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": None}},
    ],
    ids=str,
)
def test_a_count_that_goes_backwards_or_is_too_large_is_ignored(
    told: dict[str, Any],
) -> None:
    client = Client(counts=counts()).answer(chunk(**usage(5)))
    assert client.tokens == 5
    client.leg.on_data(chunk(**told))
    assert client.tokens == 5
    client.leg.on_data(chunk(**usage(8)))
    assert client.tokens == 8


def test_a_text_that_looks_like_a_count_is_the_clients() -> None:
    text = ',"usage":{"prompt_tokens":1,"total_tokens":1,"completion_tokens":77}'
    client = Client(counts=counts()).answer(chunk(text), chunk(text, **usage(3)))
    assert client.received == chunk(text) + chunk(text)
    assert client.tokens == 3


class Quick(TokenCounts):
    """Counts what it need not search."""

    def _count_slow(self, event: bytes) -> bytes:
        raise AssertionError(event)


COUNTED = b'],"usage":{"prompt_tokens":3,"total_tokens":%d,"completion_tokens":%d%b}'
LAST_EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}'


@pytest.mark.parametrize("details", [b"", b',"completion_tokens_details":null'])
@pytest.mark.parametrize("more", [b"", b',"kv_transfer_params":null'])
def test_each_end_that_vllm_writes_is_counted_without_a_search(more: bytes, details: bytes) -> None:
    """`kv_transfer_params` stands in every event of vLLM 0.33."""
    wanted = asked()
    assert wanted is not None
    quick, slow = Quick(wanted), TokenCounts(wanted)
    for tokens in (1, 2, 5):
        event = LAST_EVENT + COUNTED % (3 + tokens, tokens, details) + more + b"}\n\n"
        assert quick.take(event) == LAST_EVENT + b"]" + more + b"}\n\n"
        spaced = event.replace(b'"usage":', b'"usage": ')
        assert slow.take(spaced) == LAST_EVENT + b"]" + more + b"}\n\n"
        assert quick.read_tokens() == slow.read_tokens() == tokens


@pytest.mark.parametrize("more", [b',"kv_transfer_params":{"a":1}', b',"b":1', b" "])
def test_any_other_end_is_searched(more: bytes) -> None:
    wanted = asked()
    assert wanted is not None
    event = LAST_EVENT + COUNTED % (5, 2, b"") + more + b"}\n\n"
    with pytest.raises(AssertionError):
        Quick(wanted).take(event)
    counts = TokenCounts(wanted)
    assert counts.take(event) == LAST_EVENT + b"]" + more + b"}\n\n"
    assert counts.read_tokens() == 2


def test_spaces_and_details_do_not_hide_a_count() -> None:
    counted = (
        b'data: {"choices": [{"text": "a", "finish_reason":null}], "usage": {"prompt_tokens": 3, '
    )
    counted += b'"total_tokens": 5, "completion_tokens": 2, "details": {"a": 1}}, "b": 1}\n\n'
    client = Client(counts=counts()).answer(counted)
    assert client.tokens == 2
    assert client.received == (
        b'data: {"choices": [{"text": "a", "finish_reason":null}], "b": 1}\n\n'
    )


def test_counts_that_the_client_sees_are_those_of_the_whole_request() -> None:
    client = Client(counts=counts(ALL), resumed_tokens=4, keep_text=True)
    client.answer(chunk(**usage(1)), chunk(**usage(3)))
    assert client.tokens == 3
    seen = [json.loads(one)["usage"] for one in re.findall(rb"data: (.*)", client.received)]
    assert [(one["prompt_tokens"], one["completion_tokens"]) for one in seen] == [(5, 5), (5, 7)]


def test_a_total_that_the_client_sees_is_that_of_the_whole_request() -> None:
    client = Client(counts=counts(TOTAL), resumed_tokens=4)
    client.answer(chunk(**usage(1)), chunk("b", "stop", **usage(3)), total(3), DONE).end()
    assert client.received[: len(chunk() + chunk("b", "stop"))] == chunk() + chunk("b", "stop")
    assert b'"prompt_tokens":5,"total_tokens":12,"completion_tokens":7}' in client.received
    assert client.leg.count_tokens() == 3


def test_an_engine_that_counts_reasoning_is_told_of_once_for_each_opening() -> None:
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    details = usage(0, completion_tokens_details={"reasoning_tokens": 0})
    client = Client(counts=counts()).answer(event(choices=[role], **details), chunk())
    assert client.turns[0] == "expensive"
    assert client.received == event(choices=[role]) + chunk()


ODD = 'a "usage":{"completion_tokens":9},\\ {['
COUNTS = [("prompt_tokens", 9), ("completion_tokens", 1), ("total_tokens", 10)]
DETAILS: list[dict[str, object]] = [
    {},
    {"prompt_tokens_details": None},
    {"d": {"cached_tokens": 8}},
]


def spelled(
    place: int, order: tuple[int, ...], more: dict[str, object], gap: str, **choice: Any
) -> bytes:
    """Return the event of a token with its usage at a place among its members, spelled as by any engine."""
    members: list[tuple[str, Any]] = [
        ("id", "c"),
        ("object", "usage"),
        (
            "choices",
            [{"index": 0, "text": ODD, "finish_reason": None, "usage": {"a": 1}, **choice}],
        ),
        ("x", None),
    ]
    if place >= 0:
        members.insert(place, ("usage", dict(COUNTS[i] for i in order) | more))
    text = json.dumps(dict(members), separators=("," + gap, gap + ":" + gap))
    return b"data: " + text.encode() + b"\n\n"


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("gap", ["", " "])
def test_a_count_is_read_and_cut_wherever_it_stands(place: int, gap: str) -> None:
    for order, more in itertools.product(itertools.permutations(range(3)), DETAILS):
        check_spelling(place, order, more, gap)


def check_spelling(place: int, order: tuple[int, ...], more: dict[str, object], gap: str) -> None:
    told, bare = spelled(place, order, more, gap), spelled(-1, order, more, gap)
    for pieces in ([told] * 3, [told * 3], [one.replace(b"\n", b"\r\n") for one in [told] * 3]):
        client = Client(counts=counts()).answer(*pieces)
        assert client.received.replace(b"\r\n", b"\n") == bare * 3
        assert client.tokens == 1  # As the engine says.
    seen = Client(counts=counts(ALL), resumed_tokens=4).answer(told)
    (message,) = [json.loads(one) for one in re.findall(rb"data: (.*)", seen.received)]
    assert message["usage"]["prompt_tokens"] == 5
    assert message["usage"]["completion_tokens"] == 5
    assert message["choices"] == json.loads(bare[len(b"data: ") :])["choices"]


def test_the_only_member_is_cut_as_well() -> None:
    assert counts().hide(b'data: {"usage": {"completion_tokens": 1}}\n\n') == b"data: {}\n\n"


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("odd", [{}, {"choices": None}, {"choices": []}])
def test_a_total_that_was_not_asked_for_is_hidden_wherever_it_comes(
    at: int, odd: dict[str, object]
) -> None:
    sum_up = event(object="text_completion", **odd, **usage(3))
    events = [chunk(**usage(1)), chunk("b", **usage(2)), chunk("c", "stop", **usage(3))]
    events.insert(at, sum_up)
    client = Client(counts=counts()).answer(*events, DONE).end()
    assert client.received == chunk() + chunk("b") + chunk("c", "stop") + DONE
    assert client.leg.count_tokens() == 3
    assert client.turns[-1] == "ended"


def test_hostile_text_is_looked_at_once() -> None:
    """Quadratic, this would take hours."""
    text = b'"usage"' + b'\\"a' * 1_000_000
    assert find_usage(b'data: {"x":' + text[:-2]) is None
    assert find_usage(b'data: {"x":"' + text[7:]) is None


# Usage objects, as of one engine that did the whole request.


def usage_of(stream: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in re.findall(rb"data: (\{.*)", stream)]
    return [message["usage"] for message in found if message.get("usage")]


def with_details(body: bytes, cached: int) -> bytes:
    """Return a real stream as of an engine that tells cached tokens."""
    return body.replace(
        b',"completion_tokens"', b',"prompt_tokens_details":{"cached_tokens":%d},"completion_tokens"' % cached
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["solo_chat_stream_usage", "solo_chat_stream_usage_continuous", "solo_cmpl_stream_usage"],
)
@pytest.mark.parametrize("size", [1, 400, 10_000])
def test_cached_tokens_are_those_of_the_prefill(name: str, size: int) -> None:
    body = with_details(transcript(f"{name}.resp"), 51)
    client = Client(cached_tokens=16).answer(*in_pieces(body, size)).end()
    assert client.received == with_details(transcript(f"{name}.resp"), 16)
    assert client.usage_tokens == 8
    assert client.tokens == 8


def test_without_a_correction_every_byte_of_the_usage_stays() -> None:
    body = with_details(transcript("solo_chat_stream_usage_continuous.resp"), 51)
    assert Client().answer(body).end().received == body


@pytest.mark.parametrize("cached", [None, 16])
def test_usage_of_a_resumed_answer_is_that_of_the_whole(cached: int | None) -> None:
    body = with_details(transcript("solo_chat_stream_usage_continuous.resp"), 51)
    client = Client(resumed_tokens=5, cached_tokens=cached).answer(*in_pieces(body, 333)).end()
    before, after = usage_of(body), usage_of(client.received)
    del before[0]  # The opening's, which is not repeated.
    assert len(after) == len(before) == 9
    for was, now in zip(before, after, strict=True):
        assert now == was | {
            "prompt_tokens": was["prompt_tokens"] - 5,
            "completion_tokens": was["completion_tokens"] + 5,
            "prompt_tokens_details": {"cached_tokens": 51 if cached is None else cached},
        }
        assert now["total_tokens"] == now["prompt_tokens"] + now["completion_tokens"]
    # What this rank emitted, for the sum over all ranks.
    assert client.usage_tokens == 8


def test_the_correction_leaves_the_text_alone() -> None:
    text = '"usage":{"prompt_tokens":1,"cached_tokens":2}'
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    token = chat(text)
    last = event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}],
                 usage=usage)  # fmt: skip
    client = Client(cached_tokens=3).answer(token, token, last).end()
    assert client.received == token + token + last.replace(b":7}", b":3}")


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        "many",
        {},
        {"completion_tokens": None},
        {"completion_tokens": True},
        {"completion_tokens": -1},
        {"completion_tokens": 1.5},
        {"completion_tokens": 10**12},
    ],
)
def test_a_count_that_cannot_be_true_is_not_read(usage: object) -> None:
    client = Client(cached_tokens=1, resumed_tokens=1)
    client.answer(chat(), LAST, event(choices=[], usage=usage), DONE).end()
    assert client.usage_tokens is None
    assert client.turns[-1] == "ended"


def test_a_count_of_thousands_of_digits_is_harmless() -> None:
    last = b'data: {"choices":[],"usage":{"completion_tokens":' + b"9" * 5_000 + b"}}\n\n"
    client = Client(resumed_tokens=1).answer(chat(), LAST, last).end()
    assert client.received == chat() + LAST + last
    assert client.usage_tokens is None


def test_a_prefill_that_ends_behind_the_first_token_corrects_the_rest() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    token, last = chat(usage=usage), event(choices=[], usage=usage)
    seen = event(choices=[{"index": 0, "text": "a", "finish_reason": None}], usage=usage)
    client = Client().answer(token, seen)
    client.usage.correct_prompt(PromptUsage(3))
    for one in (seen, LAST, last):
        client.leg.on_data(one)
    right = [one.replace(b":7}", b":3}") for one in (seen, LAST, last)]
    assert client.received == b"".join([token, seen, *right])


@pytest.mark.parametrize("usage", [UsageRewrite(), UsageRewrite(None, 0)])
def test_nothing_known_changes_nothing(usage: UsageRewrite) -> None:
    told = event(usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}})
    assert not usage.changes
    assert usage.apply(told) is told


def test_no_count_gets_below_zero() -> None:
    told = event(usage={"prompt_tokens": 2, "completion_tokens": 1})
    assert UsageRewrite(None, 5).apply(told) == event(
        usage={"prompt_tokens": 0, "completion_tokens": 6}
    )


DETAILED = (
    b'{"choices":[{"message":{"content":"\\"usage\\":{\\"cached_tokens\\":1}"}}],'
    b'"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens": 8}}}'
)


def test_cached_tokens_of_a_whole_answer_are_those_of_the_prefill() -> None:
    corrected = with_prompt_usage(DETAILED, PromptUsage(5))
    assert corrected == DETAILED.replace(b'"cached_tokens": 8', b'"cached_tokens": 5')
    assert json.loads(corrected)["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_an_answer_without_cached_tokens_stays_as_it_is() -> None:
    for name in ("nixl_cmpl_nonstream_decode.resp", "solo_err_unknown_model.resp"):
        assert with_prompt_usage(transcript(name), PromptUsage(5)) == transcript(name)


def test_what_was_written_to_the_cache_is_what_the_prefill_wrote() -> None:
    usage = b'{"prompt_tokens_details":{"cached_tokens":8,"created_cache_tokens":1}}'
    assert PromptUsage(3, 5).apply(usage) == usage.replace(b"8", b"3").replace(b":1}", b":5}")
    assert PromptUsage(3).apply(usage) == usage.replace(b"8", b"3")


@pytest.mark.parametrize(
    ("told", "right"),
    [
        # input_tokens: all that was neither read nor written.
        ({"input_tokens": 1, "cache_read_input_tokens": 9}, {"input_tokens": 7}),
        (
            {"input_tokens": 0, "cache_read_input_tokens": 9, "cache_creation_input_tokens": 1},
            {"input_tokens": 2, "cache_creation_input_tokens": 5},
        ),
        ({"input_tokens": 10}, None),  # Nothing is told of the cache.
    ],
)
def test_a_message_counts_apart_what_was_cached(
    told: dict[str, int], right: dict[str, int] | None
) -> None:
    event = {"type": "message_delta", "delta": {"usage": 1}, "usage": told | {"output_tokens": 4}}
    made = json.loads(PromptUsage(3, 5).apply_within(json.dumps(event).encode()))
    wanted = told if right is None else {"cache_read_input_tokens": 3, **right}
    assert made == event | {"usage": wanted | {"output_tokens": 4}}


def test_the_usage_of_a_response_is_found_behind_what_its_client_called_so() -> None:
    details = {"cached_tokens": 9, "cache_write_tokens": 1, "cached_tokens_per_turn": [9]}
    theirs = {"usage": {"cached_tokens": 77, "cache_read_input_tokens": 77}}
    response = {"metadata": {"usage": "cached_tokens"}, "tools": [{"parameters": theirs}]}
    usage = {"input_tokens": 10, "input_tokens_details": details, "output_tokens": 4}
    for held in (
        response | {"usage": usage, "user": "u"},
        {"response": response | {"usage": usage}},
    ):
        made = PromptUsage(3, 5).apply_within(json.dumps(held).encode())
        right = {"cached_tokens": 3, "cache_write_tokens": 5, "cached_tokens_per_turn": [3]}
        inner = json.loads(made)
        inner = inner.get("response", inner)
        assert inner["usage"] == usage | {"input_tokens_details": right}
        assert inner["tools"] == response["tools"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'no json "usage"',
        b'{"usage":null}',
        b'{"response":5,"usage":{"cached_tokens":9}}',
        b'{"usage":[{"cached_tokens":9}]}',
        b'{"a":""usage":{"cached_tokens":9}"}',
    ],
)
def test_what_nobody_can_read_stays_as_it_is(data: bytes) -> None:
    assert PromptUsage(3, 5).apply_within(data) == data


# Engines that put several tokens into an event, or none: what the proxy makes of their streams.


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED = {"include_usage": True, "continuous_usage_stats": True}
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


def options_sent(site: Site) -> list[object]:
    """Return the `stream_options` of the decode legs."""
    return [json.loads(seen.request.body).get("stream_options") for seen in site.received("decode")]


@pytest.mark.parametrize(("count", "exact"), [("usage", True), ("events", False)])
@pytest.mark.parametrize("odd", [{"merged_outputs": 0.3}, {"partial_utf8": 0.3}], ids=str)
@served("**odd", flags=lambda count: {"count_tokens": count}, ranks=1)
async def test_the_tokens_of_a_stream_that_is_left(
    site: Site, count: str, odd: Mapping[str, float], *, exact: bool
) -> None:
    exchange = site.send(CHAT, LONG | {"messages": []})
    await exchange.until_events(100)
    emitted = site.fleet.stats()["output_tokens"]
    exchange.call.abort()
    await site.until(lambda: bool(site.world.ended))
    (record,) = site.world.ended
    assert record.outcome is Outcome.CANCELLED
    # A token may be on its way, or held for the next.
    assert (record.output_tokens >= emitted - 4) is exact


SENT: dict[str, dict[str, Any]] = {CHAT: {"messages": []}, COMPLETIONS: {"prompt": "a"}}
TOTAL_ALONE = ASKED | {"continuous_usage_stats": False}


@pytest.mark.parametrize(
    ("path", "stream", "options"),
    [
        (CHAT, True, [ASKED, TOTAL_ALONE, TOTAL_ALONE]),  # A rank with such a parser is asked once.
        (COMPLETIONS, True, [ASKED, ASKED, ASKED]),
        (CHAT, False, [None, None, None]),
    ],
)
@served(ranks=1, reasoning_parser=True)
async def test_no_engine_counts_its_reasoning_twice(
    site: Site, path: str, stream: bool, options: list[object]
) -> None:
    for _ in options:
        answer = await site.post(path, SENT[path] | {"max_tokens": 5, "stream": stream})
        assert (b"usage" in answer.body) is not stream
    assert options_sent(site) == options

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
    TOTAL,
    Client,
    asked,
    chunk,
    counts,
    event,
    in_pieces,
    total,
    usage,
)
from tests.support.site import transcript

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.legs import decode_body
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.openai.token_counts import (
    CountsAsked,
    TokenCounts,
    ask_for_counts,
    asks_total,
    find_usage,
)

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


@pytest.mark.parametrize(
    ("options", "hide_each", "hide_total"),
    [
        (None, True, True),
        ({}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, True, True),
        ({"include_usage": None}, True, True),
        (TOTAL, True, False),
        (TOTAL | {"continuous_usage_stats": False}, True, False),
        (ALL, False, False),
        (ALL | {"more": 1}, False, False),
    ],
)
def test_the_engine_is_asked_for_all_and_the_client_gets_what_it_asked(
    options: dict[str, object] | None, *, hide_each: bool, hide_total: bool
) -> None:
    wanted = asked(options)
    assert wanted == CountsAsked((options or {}) | ALL, True, hide_each, hide_total)


@pytest.mark.parametrize("options", [None, {"continuous_usage_stats": True}, TOTAL])
def test_the_total_alone_may_be_asked(options: dict[str, object] | None) -> None:
    wanted = asked(options, each=False)
    assert wanted is not None
    assert wanted.options == TOTAL | {"continuous_usage_stats": False}
    assert not wanted.each


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


def test_what_the_client_asked_for_is_asked() -> None:
    assert asked(ALL, each=False) == CountsAsked(ALL, True, False, False)


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
LAST = b'data: {"choices":[{"text":"a","finish_reason":null}'


@pytest.mark.parametrize("details", [b"", b',"completion_tokens_details":null'])
@pytest.mark.parametrize("more", [b"", b',"kv_transfer_params":null'])
def test_each_end_that_vllm_writes_is_counted_without_a_search(more: bytes, details: bytes) -> None:
    """`kv_transfer_params` stands in every event of vLLM 0.33."""
    wanted = asked()
    assert wanted is not None
    quick, slow = Quick(wanted), TokenCounts(wanted)
    for tokens in (1, 2, 5):
        event = LAST + COUNTED % (3 + tokens, tokens, details) + more + b"}\n\n"
        assert quick.take(event) == LAST + b"]" + more + b"}\n\n"
        spaced = event.replace(b'"usage":', b'"usage": ')
        assert slow.take(spaced) == LAST + b"]" + more + b"}\n\n"
        assert quick.read_tokens() == slow.read_tokens() == tokens


@pytest.mark.parametrize("more", [b',"kv_transfer_params":{"a":1}', b',"b":1', b" "])
def test_any_other_end_is_searched(more: bytes) -> None:
    wanted = asked()
    assert wanted is not None
    event = LAST + COUNTED % (5, 2, b"") + more + b"}\n\n"
    with pytest.raises(AssertionError):
        Quick(wanted).take(event)
    counts = TokenCounts(wanted)
    assert counts.take(event) == LAST + b"]" + more + b"}\n\n"
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

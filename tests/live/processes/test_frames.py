"""Frames of the relay protocol, and what its page says of the messages."""

import re
from itertools import product
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace
from tests.script import ROOT

from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Role, Status
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.frames import (
    MAX_FRAME_BYTES,
    FrameError,
    encode,
    for_relay,
    for_scheduler,
)
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

SHAPE = Shape(Api.CHAT, "m", True, 2, "", None, 70, 0, 16)
RECORD = RequestRecord(
    *("r-1", "/v1/chat/completions", 10**18, 1.5), outcome=Outcome.OK, keys=(2**64 - 1,)
)
ARRIVAL = from_relay.Arrival(7, SHAPE, None, -1, 10**18, "t", (2**64 - 1, 0), RECORD)
P, R = PrefillerId(1), RankId(2)
FROM_RELAY: list[from_relay.FromRelay] = [
    from_relay.Hello(1, 0, "digest"),
    from_relay.Live(
        *(ARRIVAL, "r-1", "admitted", 7, 5, 2, True, P, 10**18, 10**18, True, R, 10**18),
        *(None, False, 1, (P,), (R,)),
    ),
    ARRIVAL,
    from_relay.PrefillDone(7, 1, 12, 10**18, True, 0),
    from_relay.LegFailed(Role.DECODE, "http://d", Fault.RESET, "gone"),
    from_relay.AskPrefiller(1, 7, None),
    from_relay.Progress(b"\1\0\0\0", b"\5\0\0\0"),
    from_relay.LegSucceeded(Role.DECODE, "http://d", (P, R)),
    from_relay.SessionEnded(7, RECORD, "finished", True),
    from_relay.Drained(),
    from_relay.Resumed(),
]
TO_RELAY: list[to_relay.ToRelay] = [
    to_relay.Welcome(1, "s", 2, True),
    to_relay.PrefillerState(P, "http://p", "http://p", Status.UP, ("e", "p:1"), 0),
    to_relay.RankState(R, "http://d@2", "http://d", Status.DRAINING, b"2"),
    to_relay.Models(((Role.PREFILL, "http://p", (to_relay.Model("m", None, 9, b"{}"),)),)),
    to_relay.StartDecode(7, 1, R),
    to_relay.PrefillerChosen(1, None),
    to_relay.Drain(),
]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_frames_are_read_in_pieces_of_any_size(size: int) -> None:
    sent = bytes(encode(FROM_RELAY[:4]) + encode([]) + encode(FROM_RELAY[4:]))
    reader = for_scheduler()
    read: list[from_relay.FromRelay] = []
    for at in range(0, len(sent), size):
        read += reader.feed(sent[at : at + size])
    assert read == FROM_RELAY
    assert for_relay().feed(bytes(encode(TO_RELAY))) == TO_RELAY


def test_a_record_arrives_as_a_record() -> None:
    read = for_scheduler().feed(bytes(encode([from_relay.SessionEnded(1, RECORD)])))[0]
    assert isinstance(read, from_relay.SessionEnded)
    assert read.record.outcome is Outcome.OK
    assert read.record.keys == RECORD.keys


def test_half_a_surrogate_pair_arrives_as_a_question_mark() -> None:
    half = replace(RECORD, model="m\ud800", reason="\udfff is no model")
    sent = encode([from_relay.Progress(b"\xff", b"\1"), from_relay.SessionEnded(1, half)])
    whole = replace(RECORD, model="m?", reason="? is no model")
    assert for_scheduler().feed(bytes(sent)) == [
        from_relay.Progress(b"\xff", b"\1"),
        from_relay.SessionEnded(1, whole),
    ]


def frame(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4) + body


def test_a_later_version_may_append_fields() -> None:
    read = for_relay().feed(frame([[111, 7, False, "new"], [109, 7, 0, 1, None]]))
    assert read == [to_relay.LeaseEnded(7, False), to_relay.StartPrefill(7, 0, P)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4), "at most 67,108,864"),
        (frame([[1, 1, 0, "x"]]), "none of the protocol"),  # Of the other direction.
        (frame([[111, "7", False]]), "Expected `int`"),
        (frame([[999]]), "none of the protocol"),
        (frame({}), "Expected `array`"),
        (b"\0\0\0\1\xc1", "none of the protocol"),
        (frame([[111, 7]]), "none of the protocol"),
        (b"\0\0\0\6\x91\x92\x6a\xa2\xff\xff", "none of the protocol"),  # No UTF-8.
        (b"\0\0\4\0\x91\x93\x7a\0" + b"\x91" * 1020, "none of the protocol: maximum recursion"),
    ],
)
def test_what_is_no_frame_is_an_error_that_says_why(data: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        for_relay().feed(data)


@pytest.mark.parametrize("message", [*FROM_RELAY, *TO_RELAY], ids=lambda one: type(one).__name__)
def test_a_spoiled_frame_is_another_message_or_an_error_that_says_why(message: Any) -> None:
    reader = for_relay if message in TO_RELAY else for_scheduler
    body = bytes(encode([message]))[4:]
    spoiled = [body[:end] for end in range(len(body))]
    for place, bit in product(range(len(body)), range(8)):
        spoiled.append(body[:place] + bytes([body[place] ^ 1 << bit]) + body[place + 1 :])
    errors = 0
    for one in spoiled:
        try:
            reader().feed(len(one).to_bytes(4) + one)
        except FrameError:
            errors += 1
    assert errors >= len(body)  # No truncated body is a frame.


def messages(union: object) -> list[Any]:
    return list(get_args(union))


def test_the_page_has_every_message_with_its_fields() -> None:
    page = (ROOT / "docs" / "relay_protocol.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (\d+) \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    there_are = [
        (str(one.__struct_config__.tag), one.__name__, ", ".join(one.__struct_fields__) or "none")
        for one in messages(from_relay.FromRelay) + messages(to_relay.ToRelay)
    ]
    assert told == there_are


def test_no_two_messages_have_one_tag() -> None:
    tags = [
        one.__struct_config__.tag
        for one in messages(from_relay.FromRelay) + messages(to_relay.ToRelay)
    ]
    assert len(tags) == len(set(tags)) > 40

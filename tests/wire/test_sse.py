"""The event scanner: boundaries wherever the bytes are cut, and no byte changed."""

import re
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.wire.messages import WireError, WireFault
from balanceroute.proxy.wire.sse import EventScanner, event_data, whole_events


def scan(segments: list[bytes]) -> tuple[list[bytes], bytes]:
    scanner = EventScanner()
    events = [event for segment in segments for event in scanner.feed(segment)]
    return events, bytes(scanner.tail)


def each_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def reference(stream: bytes) -> tuple[list[bytes], bytes]:
    """Cut a stream line by line, as the standard reads it."""
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z", stream)
    events, event = [], b""
    for line in lines:
        event += line
        if line in (b"\r\n", b"\r", b"\n"):
            events.append(event)
            event = b""
    if not event and stream.endswith(b"\r"):
        event = events.pop()  # The CR may be half of a CRLF.
    return events, event


STREAMS = {
    "one event": b"data: a\n\n",
    "several events": b"data: a\n\ndata: b\n\ndata: [DONE]\n\n",
    "CRLF": b"data: a\r\n\r\ndata: b\r\n\r\n",
    "CR": b"data: a\r\rdata: b\r\r",
    "mixed line ends": b"data: a\r\n\ndata: b\n\r\ndata: c\r\n\rdata: d\r\r\ndata: e\n\rx",
    "a byte order mark": b"\xef\xbb\xbfdata: a\n\n",
    "comments and other fields": b": ping\n\nevent: x\nid: 1\nretry: 5\ndata: a\ndata: b\n\n",
    "blank lines between events": b"\n\ndata: a\n\n\n\ndata: b\n\n\n",
    "a blank line first": b"\ndata: a\n\n",
    "blank lines first": b"\n\ndata: a\n\n",
    "NUL and invalid UTF-8": b"data: \x00\xff\xc3\n\n",
    "a tail": b"data: a\n\ndata: b\n",
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_events_end_at_blank_lines_whole_or_byte_by_byte(stream: bytes) -> None:
    expected = reference(stream)
    assert scan([stream]) == expected
    assert scan(each_byte(stream)) == expected
    for i in range(len(stream)):
        assert scan([stream[:i], stream[i:]]) == expected


@given(st.lists(st.sampled_from([b"d", b"data: x", b"\n", b"\r", b"\r\n", b"\n\n"]), max_size=30))
def test_any_pieces_give_the_events_of_the_whole(pieces: list[bytes]) -> None:
    events, tail = scan(pieces)
    assert (events, tail) == reference(b"".join(pieces))
    assert b"".join(events) + tail == b"".join(pieces)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\r\n\n", b"\n\r"])
def test_whole_events_are_cut_apart_whatever_their_lines_end_with(end: bytes) -> None:
    events = [b"data: a" + end, b": b" + end, b"data: [DONE]" + end]
    assert whole_events(b"".join(events)) == events
    assert [whole_events(event) for event in events] == [[event] for event in events]
    assert whole_events(b"") == []


def test_a_hundred_events_in_one_segment_are_a_hundred_events() -> None:
    events = [b"data: %d\n\n" % i for i in range(100)]
    assert scan([b"".join(events)]) == (events, b"")


def test_an_event_shows_with_its_last_byte() -> None:
    scanner = EventScanner()
    assert scanner.feed(b"data: a\n") == []
    assert scanner.feed(b"\n") == [b"data: a\n\n"]
    assert scanner.tail == b""


def test_an_empty_feed_changes_nothing() -> None:
    scanner = EventScanner()
    assert scanner.feed(b"") == []
    assert scanner.feed(b"data") == []
    assert scanner.feed(b"") == []
    assert scanner.tail == b"data"


def test_a_large_event_in_pieces_comes_whole() -> None:
    scanner = EventScanner()
    piece = b"x" * 65_536
    scanner.feed(b"data: ")
    for _ in range(128):
        assert scanner.feed(piece) == []
    assert scanner.feed(b"\n\n") == [b"data: " + piece * 128 + b"\n\n"]


@pytest.mark.parametrize("end", [b"", b"\n\n"])
@pytest.mark.parametrize("whole", [True, False])
def test_an_event_past_the_cap_is_refused(end: bytes, *, whole: bool) -> None:
    scanner = EventScanner(max_event_bytes=100)
    assert scanner.feed(b"x" * 98 + b"\n\n") == [b"x" * 98 + b"\n\n"]
    event = b"x" * 101 + end
    segments = [event] if whole else each_byte(event)
    with pytest.raises(WireError, match="100 bytes") as raised:
        deque(map(scanner.feed, segments), maxlen=0)
    assert raised.value.kind is WireFault.TOO_LARGE


@pytest.mark.parametrize(
    ("event", "value"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\r\n\r\n", b" a"),
        (b"data: a\rdata:b\r\r", b"a\nb"),
        (b"data: a: b\n\n", b"a: b"),
        (b"data\n\n", b""),
        (b"data: a\ndata\ndata: b\n\n", b"a\n\nb"),
        (b"\xef\xbb\xbfdata: a\n\n", b"a"),
        (b": comment\nid: 1\n\n", b""),
        (b"database: a\n\n", b""),
        (b" data: a\n\n", b""),
        (b"\n", b""),
        (b"event: x\ndata: {}\n\n", b"{}"),
    ],
)
def test_the_data_of_an_event(event: bytes, value: bytes) -> None:
    assert event_data(event) == value

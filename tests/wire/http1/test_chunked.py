"""The chunked decoder: any split gives the same, and nothing but the grammar passes."""

import itertools

import httptools
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.messages import MalformedError
from balanceroute.proxy.wire.sse import EventScanner

END = b"0\r\n\r\n"


def decode(segments: list[bytes]) -> tuple[bytes, bool, bytes]:
    """Return the payload, whether it is complete, and what followed."""
    decoder = ChunkedDecoder()
    payload = b""
    rest = b""
    for segment in segments:
        if decoder.finished:
            rest += segment
        else:
            payload += decoder.feed(segment)
    return payload, decoder.finished, decoder.rest + rest


def encode(chunks: list[bytes], form: bytes = b"%x", extension: bytes = b"") -> bytes:
    return b"".join(form % len(c) + extension + b"\r\n" + c + b"\r\n" for c in chunks) + END


# RFC 9112 §7.1.1: white space may stand around `;` and `=`. Some senders pad the size, too.
BLANKS = [b" ;a", b"\t; a=b", b'; a = "b;c"', b" ;a\t ;b =c ", b"  ", b"\t"]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def test_a_segment_of_one_whole_chunk_is_its_payload() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(b"c\r\ndata: token\n\r\n") == b"data: token\n"
    assert decoder.feed(b"1A4\r\n%b\r\n" % bytes(420)) == bytes(420)
    assert not decoder.finished


def test_the_payloads_of_several_chunks_in_a_segment_come_joined() -> None:
    assert ChunkedDecoder().feed(encode([b"one", b"two", b"three"])) == b"onetwothree"


def test_an_event_of_one_line_in_a_chunk_of_its_own_is_taken_as_a_line() -> None:
    decoder = ChunkedDecoder()
    for line in (b"x", b"data: token", b": " + b"p" * 4_000):
        chunk = b"%x\r\n%b\n\n\r\n" % (len(line) + 2, line)
        assert decoder.take_line(chunk) == line
    assert decoder.feed(b"3\r\nab") == b"ab"
    assert decoder.take_line(b"3\r\nx\n\n\r\n") == b""  # In the midst of a chunk.
    assert decoder.feed(b"c\r\n5;") == b"c"
    assert decoder.take_line(b"3\r\nx\n\n\r\n") == b""  # In the midst of a size line.


def test_events_of_one_line_in_chunks_of_their_own_are_taken_as_lines() -> None:
    decoder = ChunkedDecoder()
    lines = [b"x", b"data: token", b": " + b"p" * 4_000]
    segment = b"".join(b"%x\r\n%b\n\n\r\n" % (len(line) + 2, line) for line in lines)
    assert decoder.take_lines(segment) == lines
    for odd in (segment[:-1], segment + END, segment + b"3\r\nab\n\r\n", b"\r\n" + segment):
        assert decoder.take_lines(odd) == []
    assert decoder.feed(b"3\r\nab") == b"ab"
    assert decoder.take_lines(segment) == []


@given(st.text("\n\r 02345ax;", max_size=24))
def test_a_line_is_what_a_segment_says_without_its_framing(text: str) -> None:
    segment = text.encode()
    line = ChunkedDecoder().take_line(segment)
    lines = ChunkedDecoder().take_lines(segment)
    assert not line or lines == [line]
    if lines:
        decoder = ChunkedDecoder()
        payload = decoder.feed(segment)
        assert payload == b"".join(line + b"\n\n" for line in lines)
        assert EventScanner().feed(payload) == [line + b"\n\n" for line in lines]
        assert decoder.feed(END) == b""
        assert (decoder.finished, decoder.rest) == (True, b"")


def test_payload_is_given_as_it_comes() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(b"a\r\n0123") == b"0123"
    assert decoder.expected == 6
    assert decoder.feed(b"45") == b"45"
    assert decoder.feed(b"6789\r") == b"6789"
    assert decoder.feed(b"\n0\r\n\r") == b""
    assert not decoder.finished
    assert decoder.feed(b"\n") == b""
    assert decoder.finished


@given(
    st.lists(st.binary(min_size=1, max_size=300) | st.sampled_from([b"\r\n", b"a\r\nb\r\n"])),
    st.sampled_from([b"%x", b"%X", b"%05x"]),
    st.sampled_from([b"", b";a", b";a=b", b';a="b;\\"c"', b";a;b=c", *BLANKS]),
    st.binary(max_size=8),
    st.lists(st.integers(min_value=0)),
)
def test_every_split_decodes_alike(
    chunks: list[bytes], form: bytes, extension: bytes, rest: bytes, places: list[int]
) -> None:
    coded = encode(chunks, form, extension) + rest
    assert decode(cut(coded, places)) == (b"".join(chunks), True, rest)


def test_every_byte_may_come_alone() -> None:
    coded = b"5;x=y\r\nhello\r\nB\r\n, \r\nworld!\n\r\n0\r\nx-checksum: 1\r\ny:\r\n\r\nGET"
    alone = [coded[i : i + 1] for i in range(len(coded))]
    assert decode(alone) == (b"hello, \r\nworld!\n", True, b"GET")


MALFORMED = {
    "no digit": b"\r\n",
    "white space before the size": b" 5\r\nhello\r\n",
    "white space within the size": b"5 5\r\nhello\r\n",
    "white space for an extension's name": b"5; =a\r\nhello\r\n",
    "white space for an extension's value": b"5;a= \r\nhello\r\n",
    "white space within an extension's name": b"5;a b\r\nhello\r\n",
    "endless white space": b"5" + b" " * 5000,
    "other white space": b"5\v;a\r\nhello\r\n",
    "a sign": b"+5\r\nhello\r\n",
    "a minus": b"-5\r\nhello\r\n",
    "a hexadecimal prefix": b"0x5\r\nhello\r\n",
    "an underscore": b"0_5\r\nhello\r\n",
    "sixteen digits": b"0000000000000005\r\nhello\r\n",
    "an overflow": b"fffffffffffffffff\r\n",
    "a size line that ends with LF": b"5\nhello\r\n",
    "a size line that ends with CR": b"5\rhello\r\n",
    "an extension without a name": b"5;\r\nhello\r\n",
    "an unfinished quote": b'5;a="b\r\nhello\r\n',
    "a raw byte in an extension": b"5;a=\x80\r\nhello\r\n",
    "LF in an extension": b"5;a\nb\r\nhello\r\n",
    "CR in an extension": b"5;a\rb\r\nhello\r\n",
    "NUL in an extension": b"5;a\0\r\nhello\r\n",
    "an endless extension": b"5;" + b"a" * 5000,
    "a long extension in one segment": b"5;" + b"a" * 5000 + b"\r\nhello\r\n",
    "a chunk longer than its size": b"5\r\nhello!\r\n",
    "other bytes for the CRLF after a chunk": b"5\r\nhelloXY",
    "a chunk shorter than its size": b"5\r\nhell\r\n0\r\n\r\n",
    "a chunk that ends with LF": b"5\r\nhello\n",
    "a blank line between chunks": b"5\r\nhello\r\n\r\n",
    "a last chunk that ends with LF": b"0\n\r\n",
    "a trailer without a colon": b"0\r\nno trailer\r\n\r\n",
    "a trailer that ends with LF": b"0\r\na: b\n\r\n",
    "a trailer with NUL": b"0\r\na: \0\r\n\r\n",
    "a folded trailer": b"0\r\na: b\r\n c\r\n\r\n",
    "endless trailers": b"0\r\n" + b"a: b\r\n" * 5000,
    "an endless trailer": b"0\r\na: " + b"b" * 20000,
}


@pytest.mark.parametrize("coded", MALFORMED.values(), ids=MALFORMED)
def test_it_is_refused_whole_or_byte_by_byte(coded: bytes) -> None:
    with pytest.raises(MalformedError):
        decode([coded])
    with pytest.raises(MalformedError):
        decode([coded[i : i + 1] for i in range(len(coded))])


def test_garbage_is_refused_before_its_line_ends() -> None:
    with pytest.raises(MalformedError):
        ChunkedDecoder().feed(b"<")


class _Llhttp:
    def __init__(self) -> None:
        self.payload = b""
        self.finished = False

    def on_body(self, body: bytes) -> None:
        self.payload += body

    def on_message_complete(self) -> None:
        self.finished = True


def llhttp(coded: bytes) -> tuple[bytes, bool] | None:
    """Return payload and whether it is complete, as llhttp decodes; None if it refuses."""
    seen = _Llhttp()
    parser = httptools.HttpResponseParser(seen)
    parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    try:
        parser.feed_data(coded)
    except httptools.HttpParserError:
        if not seen.finished:
            return None
    return seen.payload, seen.finished


def chunks(lines: list[bytes], line_end: bytes) -> bytes:
    return b"".join(b"%b\r\nhello%b" % (line, line_end) for line in lines) + b"0\r\na: b\r\n\r\n"


size_lines = st.lists(
    st.sampled_from([b"5", b"5", b"0", b";", b"x", b"=", b'"', b"\\", b" ", b"\t", b"\0", b"\x80"]),
    max_size=6,
).map(b"".join)


@given(
    st.lists(st.sampled_from([b"5", b"5;x", b"5;x=x", b'5;x="x"']) | size_lines, max_size=4),
    st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r"]),
)
def test_what_it_accepts_llhttp_decodes_alike(lines: list[bytes], line_end: bytes) -> None:
    coded = chunks(lines, line_end)
    try:
        payload, finished, rest = decode([coded])
    except MalformedError:
        event("refused")
        return
    if rest:  # llhttp goes on with it as the next message.
        return
    event("accepted")
    # llhttp refuses the white space that a recipient must read; nothing else that is accepted has any.
    bare = [line.replace(b" ", b"").replace(b"\t", b"") for line in lines]
    expected = llhttp(coded) or llhttp(chunks(bare, line_end))
    assert expected == (payload, finished)


@given(st.binary(max_size=100), st.lists(st.integers(min_value=0)))
def test_garbage_is_decoded_or_refused_alike_however_it_is_split(
    garbage: bytes, places: list[int]
) -> None:
    def outcome(segments: list[bytes]) -> tuple[bytes, bool, bytes] | None:
        try:
            return decode(segments)
        except MalformedError:
            return None

    assert outcome(cut(garbage, places)) == outcome([garbage])

"""Spoiled messages are framed as h11 and llhttp frame them, or refused: request smuggling needs a difference."""

import random
import re
from collections.abc import Callable, Iterable
from contextlib import suppress

import h11
import httptools
import pytest

from balanceroute.proxy.wire.http1.incoming_request import IncomingRequest
from balanceroute.proxy.wire.messages import BodyBudget, MalformedError, ServerLimits

# Method, target, body.
Message = tuple[bytes, bytes, bytes]

CASES = 1_500
REQUESTS = (
    b"POST /a?b HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello",
    b"POST /a HTTP/1.1\r\nHost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nt: u\r\n\r\n",
    b"GET /g HTTP/1.1\r\nhost: h\r\nx: y\r\n\r\n",
    b"PUT /p HTTP/1.1\r\nhost: q\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok",
)
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b";a", b";=b", b"; a=b", b'"'),
    *(
        b"+5\r\n",
        b"0x5\r\n",
        b"-1\r\n",
        b"1_0",
        b"f" * 16 + b"\r\n",
        b"0\r\n\r\n",
        b"\x80",
        b"\xff",
    ),
    *(b"content-length: 3\r\n", b"Content-Length: 11, 11\r\n", b"content-length : 4\r\n"),
    *(b"content-length: +2\r\n", b"content-length: 5 \r\n", b"content-length: \r\n"),
    *(b"content-length: 1\x0b\r\n", b"content-length: 005\r\n", b"host: b\r\n", b"x: y\r\n"),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n"),
    *(b"Transfer-Encoding: \x0bchunked\r\n", b"transfer-encoding: identity\r\n"),
    *(b"transfer-encoding: chunked\t\r\n", b"transfer-encoding: chunked \r\n"),
    *(b"Transfer-Encoding:\tchunked\r\n", b" folded\r\n", b"\tfolded: 2\r\n", b"HTTP/1.0"),
    *(b"connection: close\r\n", b"expect: 100-continue\r\n", b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"),
)


def spoiled(rng: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        lines = [at + 2 for at in range(len(data) - 1) if data[at : at + 2] == b"\r\n"]
        at = rng.choice(lines) if lines and rng.random() < 0.6 else rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind <= 1:
            data[at:at] = rng.choice(PIECES)
        elif kind == 2:
            data[at : at + 1] = rng.randbytes(1)
        else:
            del data[at : at + rng.choice((1, 1, 2, 5))]
    return bytes(data)


def drawn(seed: int) -> Iterable[tuple[random.Random, bytes]]:
    rng = random.Random(seed)
    for _ in range(CASES):
        count = rng.choice((1, 2, 3))
        some = [rng.choice(REQUESTS) for _ in range(count)]
        yield rng, b"".join(spoiled(rng, one) if rng.random() < 0.7 else one for one in some)


def ours(pieces: Iterable[bytes]) -> list[Message]:
    """Return the requests that reach the application, in order."""
    incoming = IncomingRequest(ServerLimits(), BodyBudget(None), clock=lambda: 0.0)
    read: list[Message] = []
    try:
        for piece in pieces:
            body = None
            if incoming.head is None:
                incoming.buffer += piece
            else:
                body = incoming.feed_body(piece)
            while True:
                if incoming.head is None and incoming.buffer:
                    if not incoming.begun:
                        incoming.begin()
                    if incoming.take_head() is not None:
                        body = incoming.begin_body()
                if body is None or incoming.head is None:
                    break
                head = incoming.head
                target = head.path + b"?" + head.query if head.query else head.path
                read.append((head.method, target, body))
                incoming.finish()
                body = None
                if not head.keep_alive:
                    return read
    except MalformedError:
        pass
    return read


def by_h11(data: bytes) -> list[Message]:
    connection, read = h11.Connection(h11.SERVER), list[Message]()
    connection.receive_data(data)
    connection.receive_data(b"")
    method, target, body = b"", b"", b""
    try:
        while True:
            event = connection.next_event()
            match event:
                case h11.Request():
                    method, target, body = event.method, event.target, b""
                case h11.Data():
                    body += event.data
                case h11.EndOfMessage():
                    read.append((method, target.removesuffix(b"?"), body))
                    connection.send(h11.Response(status_code=204, headers=[]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is h11.MUST_CLOSE:
                        return read
                    connection.start_next_cycle()
                case _:
                    return read
    except h11.ProtocolError:
        return read


def by_llhttp(data: bytes) -> list[Message]:
    return _ByLlhttp(data).read


class _ByLlhttp:
    def __init__(self, data: bytes) -> None:
        self.read: list[Message] = []
        self._target = self._body = b""
        self._parser = httptools.HttpRequestParser(self)
        with suppress(httptools.HttpParserError):
            self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        target = self._target.removesuffix(b"?")
        self.read.append((self._parser.get_method(), target, self._body))
        self._target = self._body = b""


@pytest.mark.parametrize("seed", range(2))
def test_how_a_spoiled_request_is_cut_does_not_matter(seed: int) -> None:
    for rng, data in drawn(seed):
        whole = ours([data])
        assert ours(data[at : at + 1] for at in range(len(data))) == whole, data
        at = rng.randrange(len(data) + 1)
        assert ours([data[:at], data[at:]]) == whole, data


# What one of them refuses, and a recipient may take: a keep-alive of HTTP/1.0, a blank line before a
# request, white space in the line of a chunk's size, and trailers, which are dropped, with names of
# fields that say something of the connection.
EXCUSE = re.compile(
    rb"HTTP/1\.0\r\n|\A\r\n|\r\n\r\n\r\n|\r\n[0-9A-Fa-f]+(?:;[^\r]*)?[ \t]|"
    rb"\r\n0(?:;[^\r]*)?\r\n(?:\S+:.*\r\n)*?(?i:content-length|transfer-encoding|connection)"
)


@pytest.mark.parametrize("seed", range(2, 4))
@pytest.mark.parametrize("reader", [by_h11, by_llhttp])
def test_what_is_accepted_is_what_others_read(
    seed: int, reader: Callable[[bytes], list[Message]]
) -> None:
    accepted = 0
    for _, data in drawn(seed):
        mine, theirs = ours([data]), reader(data)
        accepted += len(mine)
        if len(mine) > len(theirs) and EXCUSE.search(data):
            mine = mine[: len(theirs)]
        assert mine == theirs[: len(mine)], data
    assert accepted > CASES // 3

"""A request as it arrives, without a connection."""

import random
import re
from collections.abc import Callable, Iterable
from contextlib import suppress

import h11
import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.wire.http1.heads import RequestHead, parse_request_head
from balanceroute.proxy.wire.http1.incoming_request import IncomingRequest, RepeatedHead
from balanceroute.proxy.wire.messages import BodyBudget, MalformedError, ServerLimits

LIMITS = ServerLimits(
    header_limit_bytes=200, body_limit_bytes=64, body_timeout_s=60.0, body_bytes_per_s=2
)
HEAD = b"POST /a?b HTTP/1.1\r\nhost: h\r\n"
WHOLE = HEAD + b"content-length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
NEXT = b"GET /next"


def incoming(budget: BodyBudget | None = None, *, now_s: float = 1000.0) -> IncomingRequest:
    return IncomingRequest(LIMITS, budget or BodyBudget(None), clock=lambda: now_s)


def read(request: IncomingRequest, data: bytes, size: int) -> bytes | None:
    """Feed data in pieces of `size` bytes; return the body once it is complete."""
    body = None
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        if request.head is not None and body is None:
            body = request.feed_body(piece)
            continue
        request.buffer += piece
        if request.head is None and request.take_head() is not None:
            body = request.begin_body()
    return body


@pytest.mark.parametrize(
    "data", [WHOLE, CHUNKED, b"\r\n" + WHOLE], ids=["length", "chunked", "blank"]
)
def test_how_a_request_is_cut_does_not_matter(data: bytes) -> None:
    for size in range(1, len(data) + len(NEXT) + 1):
        budget = BodyBudget(None)
        request = incoming(budget)
        assert read(request, data + NEXT, size) == b"hello"
        assert request.head is not None
        assert (request.head.path, request.head.query) == (b"/a", b"b")
        assert request.buffer == NEXT
        assert budget.used == 5
        request.finish()
        assert budget.used == 0
        assert not request.begun


def test_a_further_request_begins_with_nothing_of_the_last_one() -> None:
    request = incoming()
    read(request, WHOLE + b"\r\n" + WHOLE, 7)
    request.finish()
    request.begin()
    assert request.head is None
    assert request.begun
    assert request.take_head() is not None
    assert request.begin_body() == b"hello"
    assert request.buffer == b""


@pytest.mark.parametrize(("arrived", "skipped"), [(b"hello" + NEXT, True), (b"hell", False)])
def test_a_body_is_skipped_only_as_a_whole(arrived: bytes, skipped: bool) -> None:
    request = incoming()
    request.buffer = HEAD + b"content-length: 5\r\n\r\n" + arrived
    request.take_head()
    assert request.skip_body() == skipped
    assert request.buffer == (NEXT if skipped else arrived)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"x: " + b"a" * 200, 431),
        (HEAD + b"x: " + b"a" * 200 + b"\r\n\r\n", 431),
        (b"GET\n", 400),
        (HEAD + b"content-length: 65\r\n\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n41\r\n", 413),
    ],
)
def test_what_is_not_accepted(data: bytes, status: int) -> None:
    with pytest.raises(MalformedError) as caught:
        read(incoming(), data, len(data))
    assert caught.value.rejection.status == status


def test_a_body_earns_time_with_the_bytes_that_arrive() -> None:
    request = incoming(now_s=1000.0)
    read(request, HEAD + b"content-length: 5\r\n\r\n", 100)
    assert request.body_deadline_s == 1060.0
    request.feed_body(b"hell")
    assert request.body_deadline_s == 1062.0


def test_what_is_dropped_is_released() -> None:
    budget = BodyBudget(None)
    request = incoming(budget)
    read(request, WHOLE[:-1], 9)
    assert budget.used == 4
    request.drop()
    assert (budget.used, request.buffer) == (0, b"")


# What is not parsed again is read as if it were.


HEAD_LIMITS = {"max_target_bytes": 100, "max_headers": 10}


def text(length: str, *, name: str = "Content-Length", more: str = "", path: str = "/v1") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{name}: {length}\r\nX-Id: 7\r\n{more}\r\n".encode()


def read_repeated(heads: RepeatedHead, head: bytes) -> RequestHead:
    return heads.parse(head, **HEAD_LIMITS)


texts = st.builds(
    text,
    st.integers(0, 1200).map(str) | st.sampled_from(["007", "+5", "1 2", "9" * 18, "9" * 19, ""]),
    name=st.sampled_from(
        ["Content-Length", "content-length", "CONTENT-LENGTH", "X-Content-Length"]
    ),
    more=st.sampled_from(
        ["", "X-A: b\r\n", "Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"]
    ),
    path=st.sampled_from(["/v1", "/v2?Content-Length:1"]),
)


@given(st.lists(texts, max_size=8))
def test_every_head_is_read_as_if_it_were_the_first(drawn: list[bytes]) -> None:
    heads = RepeatedHead()
    for one in drawn:
        try:
            expected = parse_request_head(one, **HEAD_LIMITS)
        except MalformedError as error:
            with pytest.raises(MalformedError, match=str(error)):
                read_repeated(heads, one)
        else:
            assert read_repeated(heads, one) == expected


def test_what_is_said_again_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = RepeatedHead()
    first = read_repeated(heads, text("12"))
    monkeypatch.setattr("balanceroute.proxy.wire.http1.incoming_request.parse_request_head", None)
    assert read_repeated(heads, text("12")) is first
    second = read_repeated(heads, text("345"))
    assert second.content_length == 345
    assert second.headers == [(b"host", b"a"), (b"content-length", b"345"), (b"x-id", b"7")]
    # What others may still look at stays as it was.
    assert first.content_length == 12
    assert (b"content-length", b"12") in first.headers


def test_a_long_head_is_not_kept() -> None:
    heads = RepeatedHead()
    long = text("12", more=f"X-A: {'b' * 4096}\r\n")
    first = read_repeated(heads, long)
    assert read_repeated(heads, long) == first
    assert read_repeated(heads, long) is not first


def test_a_head_that_is_refused_leaves_nothing_behind() -> None:
    heads = RepeatedHead()
    read_repeated(heads, text("12"))
    with pytest.raises(MalformedError):
        read_repeated(heads, text("12", more="Content-Length: 12\r\n"))
    assert read_repeated(heads, text("13")).content_length == 13


def test_what_is_learned_of_a_head_goes_on_while_it_is_repeated() -> None:
    heads = RepeatedHead()
    first = read_repeated(heads, text("12"))
    first.learned.facts = "whose it is"
    assert read_repeated(heads, text("12")).learned.facts == "whose it is"
    assert read_repeated(heads, text("345")).learned.facts == "whose it is"
    # Nothing of it is true of another.
    other = read_repeated(heads, text("345", more="Authorization: Bearer a\r\n"))
    assert other.learned.facts is None
    assert read_repeated(heads, text("345")).learned.facts is None


# Spoiled messages are framed as h11 and llhttp frame them, or refused: request smuggling needs a difference.


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

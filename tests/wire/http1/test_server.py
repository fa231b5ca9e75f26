"""The server over real sockets: what it serves, and what it refuses."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.wire.raw_bytes import Desk, connect, serving, until

from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import (
    Headers,
    HttpRequest,
    Rejection,
    ServerLimits,
    UnsafeHeaderError,
)

if TYPE_CHECKING:
    from tests.wire.conftest import Run

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def echo(request: HttpRequest, reply: Reply) -> None:
    """Answer with what was understood."""
    head = b"%b %b?%b " % (request.method, request.path, request.query)
    reply.send(200, [(b"content-type", b"text/plain")], head + request.body)


def post(body: bytes, *fields: bytes) -> bytes:
    lines = b"".join(field + b"\r\n" for field in (b"Host: a", *fields))
    return b"POST /p HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (lines, len(body), body)


def chunked(*chunks: bytes) -> bytes:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"POST /p HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % coded


@pytest.mark.both_loops
async def test_a_request_reaches_the_application_whole() -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(
            b"POST /v1/x?a=1&b=%20 HTTP/1.1\r\nHost: a\r\nX-One: 1\r\nx-one: 2\r\n"
            b"Content-Length: 5\r\n\r\nhe"
        )
        client.send(b"llo")
        await desk.reply()
        (request,) = desk.requests
        assert (request.method, request.path, request.query) == (
            b"POST",
            b"/v1/x",
            b"a=1&b=%20",
        )
        assert request.body == b"hello"
        assert request.header(b"x-one") == b"1"
        assert request.header(b"x-two") is None
        assert (b"x-one", b"2") in request.headers
        local = client.writer.get_extra_info("sockname")
        assert request.peer == f"{local[0]}:{local[1]}"
        desk.replies[0].send(201, [(b"x-id", b"7")], b"{}")
        answer = await client.answer()
        assert (answer.status, answer.body) == (201, b"{}")
        assert answer.headers == {"x-id": "7", "content-length": "2"}


BODY = bytes(range(256)) * 4
WHOLE = {
    "no body": (GET, b"GET /? "),
    "a length": (post(BODY), b"POST /p? " + BODY),
    "chunks": (chunked(b"x", BODY, b"y" * 20), b"POST /p? x" + BODY + b"y" * 20),
    "trailers": (
        chunked(b"abc")[:-2] + b"X-Sum: 1\r\nContent-Length: 9\r\n\r\n",
        b"POST /p? abc",
    ),
    "white space in extensions": (
        chunked(b"abc").replace(b"3\r\n", b'3 ;a = "b"\r\n').replace(b"0\r\n", b"0\t\r\n"),
        b"POST /p? abc",
    ),
    "a leading blank line": (b"\r\n" + GET, b"GET /? "),
    "an offered upgrade": (
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /? ",
    ),
    "a length of zero": (post(b""), b"POST /p? "),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", b"OPTIONS *? "),
}


@pytest.mark.parametrize(("raw", "echoed"), WHOLE.values(), ids=WHOLE)
async def test_it_is_understood_whole_or_byte_by_byte(raw: bytes, echoed: bytes) -> None:
    async with serving(echo) as server, connect(server.port) as client:
        for pieces in ([raw], [raw[i : i + 1] for i in range(len(raw))]):
            await client.send_each(pieces)
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, echoed)
        assert server.connections == 1


@pytest.mark.parametrize(
    ("line", "understood"),
    [
        (b"GET http://b:1/p?q=http://c HTTP/1.1", b"GET /p?q=http://c b:1"),
        (b"GET HTTPS://b HTTP/1.1", b"GET /? b"),
        (b"GET http://b?q HTTP/1.1", b"GET /?q b"),
        (b"OPTIONS http://b:1 HTTP/1.1", b"OPTIONS *? b:1"),
        (b"GET http://[::1]:2/p HTTP/1.0", b"GET /p? [::1]:2"),
    ],
)
async def test_a_target_may_be_a_url_and_goes_before_host(line: bytes, understood: bytes) -> None:
    """Targets in absolute form were refused, which a server must accept."""

    def tell(request: HttpRequest, reply: Reply) -> None:
        hosts = b",".join(value for name, value in request.headers if name == b"host")
        text = b"%b %b?%b %b" % (request.method, request.path, request.query, hosts)
        reply.send(200, [], text)

    async with serving(tell) as server, connect(server.port) as client:
        client.send(line + b"\r\nHost: a\r\n\r\n")
        assert (await client.answer()).body == understood


@pytest.mark.both_loops
async def test_who_speaks_tls_to_a_plain_port_is_told_so() -> None:
    async with serving(echo) as server, connect(server.port) as client:
        client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert b"this is TLS" in (await client.answer()).body


@pytest.mark.both_loops
async def test_a_large_body_comes_through() -> None:
    body = bytes(range(256)) * 32_768
    assert len(body) == 8 << 20

    async with serving(echo) as server, connect(server.port) as client:
        for raw in (
            post(body),
            chunked(*[body[i : i + 100_000] for i in range(0, 8 << 20, 100_000)]),
        ):
            client.send(raw)
            answer = await client.answer()
            assert answer.body == b"POST /p? " + body


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
REFUSED = {
    "length and chunks": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "chunks and length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
    "one length twice": (HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n", 400),
    "a list of lengths": (HEAD + b"Content-Length: 3, 4\r\n\r\n", 400),
    "a signed length": (HEAD + b"Content-Length: +3\r\n\r\n", 400),
    "a negative length": (HEAD + b"Content-Length: -3\r\n\r\n", 400),
    "a hexadecimal length": (HEAD + b"Content-Length: 0x3\r\n\r\n", 400),
    "an empty length": (HEAD + b"Content-Length:\r\n\r\n", 400),
    "a huge length": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
    "another coding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "another coding first": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    "another coding last": (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n", 400),
    "chunked twice": (
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    "a disguised coding": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n", 400),
    "a tab in a coding": (HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
    "an empty coding": (HEAD + b"Transfer-Encoding:\r\n\r\n", 400),
    "chunks in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    "no Host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    "two Hosts in HTTP/1.0": (b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    "a Host with a path": (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "a Host with a user": (b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
    "a folded header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
    "a folded first header": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "LF after the request line": (b"GET / HTTP/1.1\nHost: a\r\n\r\n", 400),
    "LF after a header": (b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
    "LF alone": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "LF in the blank line": (b"GET / HTTP/1.1\r\nHost: a\r\n\n", 400),
    "CR after a header": (b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", 400),
    "CR before CRLF": (b"GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", 400),
    "white space before a colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "a header without a colon": (b"GET / HTTP/1.1\r\nHost: a\r\nX\r\n\r\n", 400),
    "a header without a name": (b"GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n", 400),
    "NUL in a header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", 400),
    "a control byte in a header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x1b[m\r\n\r\n", 400),
    "DEL in a header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x7f\r\n\r\n", 400),
    "a quote in a name": (b'GET / HTTP/1.1\r\nHost: a\r\n"X": b\r\n\r\n', 400),
    "another scheme": (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a URL without a host": (b"GET http:///b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a URL with a user": (b"GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a URL and no Host": (b"GET http://a/ HTTP/1.1\r\n\r\n", 400),
    "an unknown method": (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "a relative target": (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "* without OPTIONS": (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a fragment": (b"GET /#a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "raw bytes in the target": (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a space in the target": (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "two spaces in the request line": (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a tab in the request line": (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a space after the version": (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    "a method that is no token": (b"G{}T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no version": (b"GET /\r\nHost: a\r\n\r\n", 400),
    "a lower-case version": (b"GET / http/1.1\r\nHost: a\r\n\r\n", 400),
    "two blank lines first": (b"\r\n\r\n" + GET, 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    "CONNECT": (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "TRACE": (b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "another expectation": (HEAD + b"Expect: 200-ok\r\nContent-Length: 3\r\n\r\n", 417),
    "two expectations": (HEAD + b"Expect: 100-continue\r\nExpect: 100-continue\r\n\r\n", 417),
    "a broken chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n", 400),
    "a bare LF in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n", 400),
    "a chunk of negative size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
    "a long target": (b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a" * 8192), 414),
    "an endless target": (b"GET /" + b"a" * 9000, 414),
    "a long head": (b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"a" * 33_000), 431),
    "an endless head": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 6000, 431),
    "too many headers": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 100 + b"\r\n", 431),
    "a large body": (HEAD + b"Content-Length: 1001\r\n\r\n", 413),
    "a large body that waits": (
        HEAD + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n",
        413,
    ),
    "a large chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n", 413),
    "too many chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1f4\r\n%b\r\n" % bytes(500) * 2 + b"1\r\n",
        413,
    ),
}


@pytest.mark.parametrize(("raw", "status"), REFUSED.values(), ids=REFUSED)
async def test_it_is_refused_and_the_connection_closed(raw: bytes, status: int) -> None:
    desk = Desk()
    async with serving(desk, body_limit_bytes=1000) as server:
        pieces = [raw[i : i + 1] for i in range(len(raw))] if len(raw) < 300 else [raw]
        for attempt in ([raw], pieces):
            async with connect(server.port) as client:
                await client.send_each(attempt)
                answer = await client.answer()
                assert answer.status == status
                assert answer.headers["connection"] == "close"
                assert json.loads(answer.body)["error"]["code"] == status
                assert await client.rest() == b""
    assert not desk.requests


async def test_the_refusals_are_the_embedders() -> None:
    def refuse(rejection: Rejection, head: RequestHead | None, peer: str) -> tuple[Headers, bytes]:
        assert head is None
        assert peer.startswith("127.0.0.1:")
        return [(b"x-refused", b"yes")], f"{rejection.status} {rejection.message}".encode()

    server = Server(echo, refuse=refuse)
    await server.start("127.0.0.1", 0)
    async with connect(server.port) as client:
        client.send(b"nonsense\r\n\r\n")
        answer = await client.answer()
        assert answer.headers["x-refused"] == "yes"
        assert answer.body == b"400 the request line is malformed"
    server.close()
    await server.drain()


@pytest.mark.both_loops
async def test_it_serves_on_sockets_that_are_bound_already() -> None:
    places = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    server = Server(echo)
    await server.start_on(places)
    assert server.addresses == [one.getsockname() for one in places]
    assert server.listening == [one.fileno() for one in places]
    for _, port in server.addresses:
        async with connect(port) as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await client.answer()).status == 200
    server.close()
    await server.drain()
    assert server.listening == []
    for _, port in server.addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.both_loops
async def test_who_connects_while_it_is_paused_waits() -> None:
    server = Server(echo, limits=ServerLimits(connection_limit=5))
    await server.start_on([socket.create_server(("127.0.0.1", 0)) for _ in range(2)])
    server.keep_spares()
    ports = [port for _, port in server.addresses]
    async with connect(ports[0]) as old:
        old.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await old.answer()).status == 200
        for _ in range(2):
            server.pause()
            assert server.listening == []
            await asyncio.sleep(0.05)
            assert server.connections == 1  # It was idle for less than a second.
            async with connect(ports[0]) as first, connect(ports[1]) as second:
                for client in (first, second):
                    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.sleep(0.05)
                assert server.connections == 1
                await server.resume()
                await server.resume()
                assert len(server.listening) == 2
                for client in (first, second):
                    assert (await client.answer()).status == 200
    server.pause()
    server.close()
    await server.resume()
    await server.drain()
    await asyncio.sleep(0)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def no_posts(head: RequestHead, peer: str) -> Rejection | None:
    assert peer.startswith("127.0.0.1:")
    return Rejection(405, "no", ((b"allow", b"GET"),)) if head.method == b"POST" else None


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 1000000",
        b"Content-Length: 1000000\r\nExpect: 100-continue",
        b"Transfer-Encoding: chunked",
    ],
)
async def test_a_head_that_is_rejected_is_answered_before_its_body(framing: bytes) -> None:
    desk = Desk()
    server = Server(desk, admit=no_posts)
    await server.start("127.0.0.1", 0)
    async with connect(server.port) as client:
        client.send(b"POST /p?q HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["allow"]) == (405, "GET")
        assert answer.headers["connection"] == "close"
        assert json.loads(answer.body)["error"] == {"code": 405, "message": "no"}
        client.send(bytes(1 << 20))
        assert await client.rest() == b""
        await client.writer.drain()
    assert not desk.requests
    server.close()
    await server.drain()


async def test_a_rejected_request_that_came_whole_leaves_its_connection_usable() -> None:
    server = Server(echo, admit=no_posts)
    await server.start("127.0.0.1", 0)
    async with connect(server.port) as client:
        client.send(post(b"body") * 2 + GET)
        assert [(await client.answer()).status for _ in range(3)] == [405, 405, 200]
        client.send(post(b"body", b"Connection: close"))
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.rest() == b""
    server.close()
    await server.drain()


async def test_a_refused_client_reads_its_answer_while_it_still_sends() -> None:
    async with serving(echo, body_limit_bytes=1000) as server, connect(server.port) as client:
        client.send(post(bytes(4 << 20)))
        assert (await client.answer()).status == 413
        await client.writer.drain()


@pytest.mark.parametrize("option", [b"", b"Connection: close\r\n"])
async def test_a_client_cut_off_behind_its_answer_may_finish_sending(option: bytes) -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET[:-2] + option + b"\r\n" + b"nonsense" + bytes(16 << 20))
        await until(lambda: bool(desk.replies))
        for _ in range(20):
            await asyncio.sleep(0)
        desk.replies.pop().send(200, [], b"answer")
        assert (await client.answer()).body == b"answer"
        if not option:
            assert (await client.answer()).status == 400
        assert await client.rest() == b""
        await client.writer.drain()


async def test_continue_is_sent_before_the_body_and_only_then() -> None:
    async with serving(echo) as server, connect(server.port) as client:
        raw = post(b"hello", b"Expect: 100-Continue")
        client.send(raw[:-5])
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hello")
        assert (await client.answer()).body == b"POST /p? hello"
        client.send(raw)
        assert (await client.answer()).body == b"POST /p? hello"
        await client.send_each([raw[:-2], raw[-2:]])
        assert (await client.answer()).body == b"POST /p? hello"
        client.send(post(b"", b"Expect: 100-continue"))
        assert (await client.answer()).body == b"POST /p? "


async def test_pipelined_requests_are_answered_in_order_and_one_at_a_time() -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(post(b"1") + chunked(b"2") + GET + b"GET nonsense")
        for body in (b"1", b"2", b""):
            await until(lambda: bool(desk.requests))
            assert [request.body for request in desk.requests] == [body]
            desk.requests.clear()
            desk.replies.pop().send(200, [], b"answer to " + body)
            assert (await client.answer()).body == b"answer to " + body
        client.send(b" HTTP/1.1\r\n\r\n")
        assert (await client.answer()).status == 400
        assert await client.rest() == b""


async def test_what_is_pipelined_waits_outside_past_a_bound() -> None:
    many = 12_000
    bound = 32_768 + 262_144  # The limit, and what one read can bring.
    assert len(GET) * many > bound

    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET * many)
        await until(lambda: bool(desk.replies))
        for _ in range(100):
            await asyncio.sleep(0)
        connection: Any = next(iter(server._service.connections))  # type: ignore[union-attr]
        assert 0 < len(connection._incoming.buffer) <= bound
        answered = 0

        def answer() -> None:
            nonlocal answered
            while desk.replies:
                desk.replies.pop().send(200, [], b"")
                answered += 1

        while answered < many:
            answer()
            await asyncio.sleep(0)
        assert (await client.exactly(38 * many)).count(b"200") == many


@pytest.mark.parametrize(
    ("raw", "connection"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", "close"),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", "close"),
        (GET, None),
    ],
)
async def test_the_client_decides_whether_its_connection_lives(
    raw: bytes, connection: str | None
) -> None:
    async with serving(echo) as server, connect(server.port) as client:
        client.send(raw)
        assert (await client.answer()).headers.get("connection") == connection
        if connection == "close":
            assert await client.rest() == b""
        else:
            client.send(raw)
            assert (await client.answer()).status == 200


def stream(request: HttpRequest, reply: Reply) -> None:
    reply.start(200, [(b"content-type", b"text/event-stream")])
    reply.write(b"data: 1\n\n")
    reply.write(b"")
    reply.write(b"data: 2\n\n")
    reply.end()


async def test_each_piece_of_a_streamed_answer_is_a_chunk() -> None:
    async with serving(stream) as server, connect(server.port) as client:
        client.send(GET + GET)
        for _ in range(2):
            assert await client.until(b"\r\n\r\n") == (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            chunks = b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"
            assert await client.exactly(len(chunks)) == chunks


async def test_a_streamed_answer_in_http_1_0_ends_with_the_connection() -> None:
    async with serving(stream) as server, connect(server.port) as client:
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert await client.rest() == (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            b"data: 1\n\ndata: 2\n\n"
        )


def comment(request: HttpRequest, reply: Reply) -> None:
    late = b"late %d %b\n\n"
    head: Headers = [(b"content-type", b"text/event-stream")]
    for _ in range(2):
        reply.comment(head, b": a\n\n", lambda status, body: late % (status, body))
        assert (reply.commented, reply.started) == (True, False)
    if request.path == b"/begins":
        reply.start(200, [(b"x-too", b"late")])
        reply.write(b"data: 1\n\n")
        reply.end()
    elif request.path == b"/fails":
        reply.send(503, [(b"retry-after", b"1")], b"why")
    else:
        reply.abort()
    assert reply.closed
    reply.comment(head, b"behind", lambda status, body: body)


HEAD_OF_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (b"/begins", b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"),
        (b"/fails", b"e\r\nlate 503 why\n\n\r\n"),  # Cut: it must not look complete.
        (b"/aborts", b""),
    ],
)
async def test_a_comment_begins_a_stream_whose_answer_may_be_any(path: bytes, rest: bytes) -> None:
    async with serving(comment) as server, connect(server.port) as client:
        client.send(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)
        expected = HEAD_OF_STREAM + b"transfer-encoding: chunked\r\n\r\n"
        expected += b"5\r\n: a\n\n\r\n" * 2 + rest
        if path == b"/begins":
            assert await client.exactly(len(expected)) == expected
        else:
            assert await client.rest() == expected


async def test_a_comment_over_http_1_0_begins_a_stream_too() -> None:
    async with serving(comment) as server, connect(server.port) as client:
        client.send(b"GET /begins HTTP/1.0\r\n\r\n")
        expected = HEAD_OF_STREAM + b"connection: close\r\n\r\n: a\n\n: a\n\ndata: 1\n\n"
        assert await client.rest() == expected
    async with serving(comment) as server, connect(server.port) as client:
        client.send(b"GET /fails HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):  # Nothing else tells that it is cut.
            await client.rest()


@pytest.mark.parametrize("application", [echo, stream])
async def test_head_is_answered_without_a_body(
    application: Callable[[HttpRequest, Reply], None],
) -> None:
    async with serving(application) as server, connect(server.port) as client:
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
        for _ in range(2):
            assert (await client.answer(to_head=True)).status == 200


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_status_without_a_body_has_none(status: int, *, streamed: bool) -> None:
    def application(request: HttpRequest, reply: Reply) -> None:
        if streamed:
            reply.start(status, [])
            reply.write(b"never")
            reply.end()
        else:
            reply.send(status, [], b"never")

    async with serving(application) as server, connect(server.port) as client:
        client.send(GET + GET)
        for _ in range(2):
            answer = await client.answer()
            assert (answer.status, answer.headers) == (status, {})


async def test_the_application_cannot_frame_or_split_an_answer() -> None:
    refused: list[Exception] = []

    def application(request: HttpRequest, reply: Reply) -> None:
        for value in (b"a\r\nset-cookie: b", b"a\nb", b"\0"):
            with pytest.raises(UnsafeHeaderError) as raised:
                reply.send(200, [(b"x", value)], b"")
            refused.append(raised.value)
            with pytest.raises(UnsafeHeaderError):
                reply.start(200, [(b"x", value)])
        reply.send(
            200,
            [(b"content-length", b"99"), (b"transfer-encoding", b"chunked"), (b"x", b"y")],
            b"ok",
        )

    async with serving(application) as server, connect(server.port) as client:
        client.send(GET)
        answer = await client.answer()
        assert answer.headers == {"x": "y", "content-length": "2"}
        assert answer.body == b"ok"
    assert len(refused) == 3


async def test_an_application_that_raises_is_a_logged_500(caplog: pytest.LogCaptureFixture) -> None:
    def application(request: HttpRequest, reply: Reply) -> None:
        if request.path != b"/early":
            reply.start(200, [])
            reply.write(b"begun")
        if request.path == b"/late":
            reply.end()
        raise RuntimeError("told so")

    async with serving(application) as server:
        for path, end in ((b"early", b"}}"), (b"begun", b"begun\r\n"), (b"late", b"0\r\n\r\n")):
            async with connect(server.port) as client:
                client.send(GET.replace(b"/ ", b"/%b " % path))
                answer = await client.rest()
                assert answer.startswith(b"HTTP/1.1 " + (b"500" if path == b"early" else b"200"))
                assert answer.endswith(end)
    assert caplog.text.count("\nRuntimeError: told so") == 3


async def test_a_reply_is_dead_after_its_answer() -> None:
    desk = Desk()

    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET + GET)
        await until(lambda: bool(desk.replies))
        (reply,) = desk.replies
        reply.on_closed = pytest.fail
        reply.send(200, [], b"first")
        for _ in range(2):
            assert reply.closed
            reply.send(200, [], b"second")
            reply.start(200, [])
            reply.write(b"third")
            reply.end()
            reply.abort()
            await until(lambda: len(desk.replies) == 2)
        desk.replies[1].send(200, [], b"answer")
        assert (await client.answer()).body == b"first"
        assert (await client.answer()).body == b"answer"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    st.lists(
        st.sampled_from(
            [
                GET,
                b"POST / HTTP/1.1\r\nHost: a\r\n",
                b"Transfer-Encoding: chunked\r\n",
                b"Content-Length: 5\r\n",
                b"\r\n",
                b"\n",
                b"\r",
                b"5\r\nhello\r\n",
                b"0\r\n\r\n",
                b"\0",
                b":",
            ]
        )
        | st.binary(max_size=30),
        max_size=12,
    )
)
def test_garbage_is_answered_in_http_or_not_at_all(run: "Run", pieces: list[bytes]) -> None:
    async def main() -> None:
        async with serving(echo) as server, connect(server.port) as client:
            await client.send_each(pieces)
            client.finish()
            answers = await client.rest()
            assert answers.startswith(b"HTTP/1.1 ") or not answers

    run(main())

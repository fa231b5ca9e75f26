"""Clients that leave, stop reading or shut half of their connection; and the server's own end."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, ServerLimits
from balanceroute.proxy.wire.turn_writes import held_by_kernel

if TYPE_CHECKING:
    from ssl import SSLContext

    from tests.wire.conftest import Connect, Serving

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
PARTIAL = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\npart"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (What is waited for sets no event.)
        await asyncio.sleep(0)


@asynccontextmanager
async def _client() -> AsyncIterator[socket.socket]:
    """Give a socket, and close it before its server is."""
    with socket.socket() as client:
        yield client


class Desk:
    """An application that keeps its replies and counts their calls."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.closed = self.paused = self.resumed = 0

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        reply.on_closed = self._on_closed
        reply.on_pause = self._on_pause
        reply.on_resume = self._on_resume
        self.replies.append(reply)

    def _on_closed(self) -> None:
        assert self.replies[-1].closed
        self.closed += 1

    def _on_pause(self) -> None:
        assert self.replies[-1].paused
        self.paused += 1

    def _on_resume(self) -> None:
        assert not self.replies[-1].paused
        self.resumed += 1

    async def reply(self, number: int = 1) -> Reply:
        await until(lambda: len(self.replies) >= number)
        return self.replies[number - 1]


@pytest.mark.parametrize("how", ["close", "finish", "reset"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.both_loops
async def test_a_client_that_leaves_closes_its_reply_once(
    serving: "Serving", connect: "Connect", how: str, *, begun: bool
) -> None:
    desk = Desk()
    async with serving(desk) as server:
        async with connect(server.port) as client:
            client.send(GET)
            reply = await desk.reply()
            if begun:
                reply.start(200, [])
                reply.write(b"data")
                await client.until(b"data\r\n")
            if how == "reset":
                client.reset()
            elif how == "finish":
                client.finish()
            else:
                client.writer.close()
            await until(lambda: reply.closed)
        await until(lambda: server.connections == 0)
        reply.write(b"nobody")
        reply.end()
        assert desk.closed == 1
        assert reply.on_closed is None


@pytest.mark.parametrize("raw", [b"", b"GET / HT", PARTIAL, b"nonsense\r\n\r\n"])
async def test_a_client_that_leaves_early_is_forgotten(
    serving: "Serving", connect: "Connect", raw: bytes
) -> None:
    desk = Desk()
    async with serving(desk) as server:
        for leave in ("close", "reset"):
            async with connect(server.port) as client:
                await until(lambda: server.connections == 1)
                client.send(raw)
                await client.writer.drain()
                if leave == "reset":
                    client.reset()
            await until(lambda: server.connections == 0)
    assert not desk.replies


@pytest.mark.both_loops
async def test_with_half_close_the_answer_is_still_sent(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk, half_close=True) as server, connect(server.port) as client:
        client.send(GET + GET + PARTIAL)
        client.finish()
        for number in (1, 2):
            reply = await desk.reply(number)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reply.closed
            reply.start(200, [])
            reply.write(b"%d" % number)
            reply.end()
            assert (await client.answer()).body == b"%d" % number
        assert await client.rest() == b""
        assert desk.closed == 0
        assert len(desk.replies) == 2


async def test_with_half_close_a_client_that_is_gone_shows_when_written_to(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk, half_close=True) as server:
        async with connect(server.port) as client:
            client.send(GET)
            reply = await desk.reply()
            reply.start(200, [])
            client.finish()
            for _ in range(20):
                await asyncio.sleep(0)
            assert desk.closed == 0
            client.reset()
        for _ in range(1000):
            reply.write(b"anyone?")
            await asyncio.sleep(0)
        assert desk.closed == 1


@pytest.mark.both_loops
async def test_a_client_that_stops_reading_pauses_its_reply_at_the_limit(
    serving: "Serving", connect: "Connect"
) -> None:
    piece = bytes(10_000)
    pieces = 3_000
    limit = 65_536

    desk = Desk()
    async with (
        serving(desk, write_buffer_bytes=limit) as server,
        connect(server.port) as client,
    ):
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(GET)
        reply = await desk.reply()
        reply.start(200, [])
        connection: Any = next(iter(server._service.connections))  # type: ignore[union-attr]
        largest = written = 0
        # The sockets take some megabytes; when they are full the reply stays paused.
        stuck = 0
        while stuck < 50:
            if reply.paused:
                stuck += 1
            else:
                stuck = 0
                reply.write(piece)
                written += 1
                waiting = connection._transport.get_write_buffer_size()
                largest = max(largest, waiting)
            await asyncio.sleep(0)
        assert limit < largest <= limit + len(piece) + 10
        assert 0 < written < pieces
        assert desk.paused == desk.resumed + 1
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = asyncio.create_task(client.answer())
        while written < pieces:
            await until(lambda: not reply.paused)
            reply.write(piece)
            written += 1
        reply.end()
        assert len((await answer).body) == pieces * len(piece)
        assert desk.paused == desk.resumed >= 1
        assert desk.closed == 0


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell what a peer has taken"
)
async def test_a_client_that_reads_slowly_is_not_taken_for_one_that_does_not(
    serving: "Serving",
) -> None:
    """The kernel takes no more of an answer until a third of its megabytes has gone."""
    loop, desk = asyncio.get_running_loop(), Desk()
    async with serving(desk, write_timeout_s=8.0) as server, _client() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, GET)
        reply = await desk.reply()
        connection: Any = next(iter(server._service.connections))  # type: ignore[union-attr]
        transport = connection._transport
        reply.send(200, [], bytes(20_000_000))
        waiting = transport.get_write_buffer_size()
        held = held_by_kernel(transport.get_extra_info("socket"))
        assert min(waiting, held) > 0
        now_s = loop.time()
        for _ in range(5):
            connection.expire(now_s)
            now_s += 10.0
            before = held_by_kernel(transport.get_extra_info("socket"))
            while held_by_kernel(transport.get_extra_info("socket")) == before:
                await loop.sock_recv(client, 4_096)
        assert transport.get_write_buffer_size() == waiting
        assert not transport.is_closing()
        connection.expire(now_s)
        connection.expire(now_s + 10.0)
        assert transport.is_closing()


async def test_requests_behind_answers_that_nobody_reads_wait_outside_past_a_bound(
    serving: "Serving", connect: "Connect"
) -> None:
    page = bytes(1_000_000)
    bound = 32_768 + 262_144  # The limit, and what one read can bring.
    many = 10 * bound // len(GET)

    def answer(request: HttpRequest, reply: Reply) -> None:
        reply.send(200, [], page)

    async with serving(answer) as server, connect(server.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(GET * many)
        await until(lambda: server.connections == 1)
        connection: Any = next(iter(server._service.connections))  # type: ignore[union-attr]
        await until(lambda: connection.paused)
        sizes: list[int] = []
        while len(sizes) < 100 or sizes[-1] != sizes[-100]:
            await asyncio.sleep(0)
            sizes.append(len(connection._incoming.buffer))
        assert 0 < sizes[-1] <= bound
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(20):
            assert len((await client.answer()).body) == len(page)


@pytest.mark.both_loops
async def test_an_aborted_stream_is_flushed_and_visibly_cut(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET)
        reply = await desk.reply()
        reply.start(200, [])
        reply.write(b"data: {}\n\n")
        reply.abort()
        assert reply.closed
        assert (await client.rest()).endswith(b"\r\n\r\na\r\ndata: {}\n\n\r\n")
        assert desk.closed == 0


async def test_an_aborted_stream_in_http_1_0_ends_in_a_reset(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        reply = await desk.reply()
        reply.start(200, [])
        reply.write(b"data")
        await client.until(b"data")
        reply.abort()
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_reply_aborted_before_it_began_closes_without_a_byte(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET)
        (await desk.reply()).abort()
        assert await client.rest() == b""
        assert desk.closed == 0


@pytest.mark.both_loops
async def test_a_server_that_stops_closes_the_idle_and_answers_the_busy(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with (
        serving(desk) as server,
        connect(server.port) as fresh,
        connect(server.port) as idle,
        connect(server.port) as reading,
        connect(server.port) as busy,
        connect(server.port) as streaming,
    ):
        idle.send(GET)
        (await desk.reply()).send(200, [], b"")
        assert (await idle.answer()).status == 200
        reading.send(PARTIAL.replace(b"\r\n\r\npart", b"\r\nExpect: 100-continue\r\n\r\n"))
        await reading.until(b"100 Continue\r\n\r\n")
        busy.send(GET)
        reply = await desk.reply(2)
        streaming.send(GET)
        stream = await desk.reply(3)
        stream.start(200, [])
        await until(lambda: server.connections == 5)
        server.stop_accepting()
        server.stop_accepting()
        assert await fresh.rest() == b""
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        drained = asyncio.create_task(server.drain())
        reply.send(200, [], b"busy")
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"busy", "close")
        stream.end()
        assert (await streaming.answer()).status == 200
        assert await streaming.rest() == b""
        reading.send(b"partwhole")
        assert not drained.done()
        (await desk.reply(4)).send(200, [], b"read")
        answer = await reading.answer()
        assert (answer.body, answer.headers["connection"]) == (b"read", "close")
        await drained
        assert server.connections == 0


@pytest.mark.both_loops
async def test_a_connection_accepted_just_before_the_stop_is_answered_once(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk) as server:
        server._service.stopping = True  # type: ignore[union-attr]
        async with connect(server.port) as client:
            client.send(GET)
            (await desk.reply()).send(200, [], b"")
            assert (await client.answer()).headers["connection"] == "close"


async def test_close_aborts_everything_and_tells_the_replies(
    serving: "Serving", connect: "Connect"
) -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET)
        reply = await desk.reply()
        server.close()
        assert reply.closed
        assert desk.closed == 1
        await server.drain()
        assert server.connections == 0
        assert await client.rest() == b""


async def test_a_server_that_was_never_started_drains_and_closes() -> None:
    server = Server(Desk())
    server.stop_accepting()
    await server.drain()
    server.close()
    assert server.connections == 0


@pytest.mark.both_loops
async def test_over_tls_a_fin_is_a_client_that_leaves_even_with_half_close(
    contexts: "tuple[SSLContext, SSLContext]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    server = Server(desk, limits=ServerLimits(half_close=True))
    await server.start("127.0.0.1", 0, ssl=contexts[0])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=contexts[1], server_hostname="localhost"
    )
    writer.write(GET)
    (await desk.reply()).send(200, [], b"secret")
    assert (await reader.readuntil(b"secret")).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.write(b"nonsense\r\n\r\n")
    assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await writer.wait_closed()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=contexts[1], server_hostname="localhost"
    )
    writer.write(GET)
    reply = await desk.reply(2)
    writer.close()
    await writer.wait_closed()
    await until(lambda: reply.closed)
    assert desk.closed == 1
    server.stop_accepting()
    await server.drain()
    assert not caplog.text

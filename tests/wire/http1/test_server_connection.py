"""Clients that leave, stop reading or shut half of their connection; and the server's own end."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.played import played_by
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run
from tests.wire.raw_bytes import Desk, connect, serving, until

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, ServerLimits
from balanceroute.proxy.wire.turn_writes import held_by_kernel

if TYPE_CHECKING:
    from ssl import SSLContext


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
PARTIAL = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\npart"


@asynccontextmanager
async def _client() -> AsyncIterator[socket.socket]:
    """Give a socket, and close it before its server is."""
    with socket.socket() as client:
        yield client


@pytest.mark.parametrize("how", ["close", "finish", "reset"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.both_loops
async def test_a_client_that_leaves_closes_its_reply_once(how: str, *, begun: bool) -> None:
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
        assert len(desk.closed) == 1
        assert reply.on_closed is None


@pytest.mark.parametrize("raw", [b"", b"GET / HT", PARTIAL, b"nonsense\r\n\r\n"])
async def test_a_client_that_leaves_early_is_forgotten(raw: bytes) -> None:
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
async def test_with_half_close_the_answer_is_still_sent() -> None:
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
        assert not desk.closed
        assert len(desk.replies) == 2


async def test_with_half_close_a_client_that_is_gone_shows_when_written_to() -> None:
    desk = Desk()
    async with serving(desk, half_close=True) as server:
        async with connect(server.port) as client:
            client.send(GET)
            reply = await desk.reply()
            reply.start(200, [])
            client.finish()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not desk.closed
            client.reset()
        for _ in range(1000):
            reply.write(b"anyone?")
            await asyncio.sleep(0)
        assert len(desk.closed) == 1


@pytest.mark.both_loops
async def test_a_client_that_stops_reading_pauses_its_reply_at_the_limit() -> None:
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
        assert not desk.closed


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell what a peer has taken"
)
async def test_a_client_that_reads_slowly_is_not_taken_for_one_that_does_not() -> None:
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


async def test_requests_behind_answers_that_nobody_reads_wait_outside_past_a_bound() -> None:
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
async def test_an_aborted_stream_is_flushed_and_visibly_cut() -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET)
        reply = await desk.reply()
        reply.start(200, [])
        reply.write(b"data: {}\n\n")
        reply.abort()
        assert reply.closed
        assert (await client.rest()).endswith(b"\r\n\r\na\r\ndata: {}\n\n\r\n")
        assert not desk.closed


async def test_an_aborted_stream_in_http_1_0_ends_in_a_reset() -> None:
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


async def test_a_reply_aborted_before_it_began_closes_without_a_byte() -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET)
        (await desk.reply()).abort()
        assert await client.rest() == b""
        assert not desk.closed


@pytest.mark.both_loops
async def test_a_server_that_stops_closes_the_idle_and_answers_the_busy() -> None:
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
async def test_a_connection_accepted_just_before_the_stop_is_answered_once() -> None:
    desk = Desk()
    async with serving(desk) as server:
        server._service.stopping = True  # type: ignore[union-attr]
        async with connect(server.port) as client:
            client.send(GET)
            (await desk.reply()).send(200, [], b"")
            assert (await client.answer()).headers["connection"] == "close"


async def test_close_aborts_everything_and_tells_the_replies() -> None:
    desk = Desk()
    async with serving(desk) as server, connect(server.port) as client:
        client.send(GET)
        reply = await desk.reply()
        server.close()
        assert reply.closed
        assert len(desk.closed) == 1
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
    assert len(desk.closed) == 1
    server.stop_accepting()
    await server.drain()
    assert not caplog.text


# The server's deadlines, in virtual time: every second of them is waited for, at once.


POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"


class SlowDesk:
    """An application that keeps its replies and says when they are closed."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.replies: list[Reply] = []
        self.closed_at_s: list[float] = []
        self._loop = loop

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        reply.on_closed = lambda: self.closed_at_s.append(self._loop.time())
        self.replies.append(reply)


class Scene:
    """A server, one client that has connected, and the time since the last one did."""

    def __init__(self, loop: VirtualLoop, limits: ServerLimits | None) -> None:
        self.loop = loop
        self.desk = SlowDesk(loop)
        self.server = Server(self.desk, limits=limits)
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._begin_s = self.loop.time()
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    def elapsed_s(self) -> float:
        return self.loop.time() - self._begin_s


def play(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    link: Link | None = None,
    limits: ServerLimits | None = None,
) -> None:
    """Play a scenario in virtual time; in the end nothing may be open or wait."""

    async def main(loop: VirtualLoop) -> None:
        scene = Scene(loop, limits)
        await scene.server.start("127.0.0.1", 0)
        scene.reader, scene.writer = await scene.open()
        await scenario(scene)
        scene.writer.close()
        scene.server.stop_accepting()
        await scene.server.drain()
        assert scene.server.connections == 0
        await asyncio.sleep(0.1)  # The last segment is delivered by a timer too.
        assert loop.pending_timers == 0

    run(main, seed=0, link=link)


in_scene = played_by(play)


@pytest.mark.both_loops
@in_scene()
async def test_a_connection_without_a_request_is_closed_silently(scene: Scene) -> None:
    assert await scene.reader.read() == b""
    assert 10 <= scene.elapsed_s() <= 11.1


@in_scene()
async def test_after_a_hand_over_an_idle_connection_has_a_last_answer_or_a_last_moment(
    scene: Scene,
) -> None:
    unused, other = await scene.open()
    for is_last in (False, True):
        scene.writer.write(GET)
        await asyncio.sleep(0.1)
        scene.desk.replies[-1].send(200, [], b"here")
        assert (b"connection: close" in await scene.reader.readuntil(b"here")) == is_last
        scene.server.hand_over(idle_s=2.0)
    assert await scene.reader.read() == b""
    assert scene.elapsed_s() < 1
    assert await unused.read() == b""
    assert 2 <= scene.elapsed_s() <= 3.2
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", scene.server.port)
    other.close()


@in_scene()
async def test_after_a_hand_over_an_answer_that_had_begun_is_not_the_last_without_saying_so(
    scene: Scene,
) -> None:
    scene.writer.write(GET)
    await asyncio.sleep(0.1)
    scene.desk.replies[-1].start(200, [])
    scene.server.hand_over(idle_s=2.0)
    await asyncio.sleep(30)
    scene.desk.replies[-1].end()
    assert b"connection: close" not in await scene.reader.readuntil(b"0\r\n\r\n")
    await asyncio.sleep(1)
    scene.writer.write(GET)
    await asyncio.sleep(0.1)
    scene.desk.replies[-1].send(200, [], b"here")
    assert b"connection: close" in await scene.reader.read()


@in_scene(limits=ServerLimits(header_timeout_s=0.1))
async def test_a_shorter_limit_is_checked_more_often(scene: Scene) -> None:
    assert await scene.reader.read() == b""
    assert 0.1 <= scene.elapsed_s() <= 0.13


@pytest.mark.parametrize("every_s", [0.3, 9.0])
@in_scene()
async def test_a_head_that_trickles_is_refused(scene: Scene, every_s: float) -> None:

    async def trickle() -> None:
        for byte in b"GET / HTTP/1.1\r\nHost: " + b"a" * 1000:
            scene.writer.write(bytes([byte]))
            await asyncio.sleep(every_s)

    task = asyncio.create_task(trickle())
    assert (await scene.reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 10 <= scene.elapsed_s() <= 11.1
    task.cancel()


@in_scene()
async def test_the_next_head_has_its_own_time(scene: Scene) -> None:
    for _ in range(3):
        scene.writer.write(GET[:5])
        await asyncio.sleep(9)
        scene.writer.write(GET[5:])
        await asyncio.sleep(1)
        scene.desk.replies.pop().send(200, [], b"")
        await scene.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(60)
    scene.writer.write(GET[:5])
    begin_s = scene.loop.time()
    assert (await scene.reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 10 <= scene.loop.time() - begin_s <= 11.1


@in_scene()
async def test_an_idle_connection_is_closed_silently(scene: Scene) -> None:
    scene.writer.write(GET)
    await asyncio.sleep(1)
    scene.desk.replies.pop().send(200, [], b"")
    await scene.reader.readuntil(b"\r\n\r\n")
    assert await scene.reader.read() == b""
    assert 76 <= scene.elapsed_s() <= 77.1


@in_scene()
async def test_a_body_that_stops_is_refused(scene: Scene) -> None:
    scene.writer.write(POST + b"begun")
    assert (await scene.reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 60 <= scene.elapsed_s() <= 61.1


@pytest.mark.parametrize("coding", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
@in_scene()
async def test_a_body_that_trickles_is_refused_though_it_never_stops(
    scene: Scene, coding: bytes
) -> None:
    scene.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % coding)

    async def trickle() -> None:
        while True:
            scene.writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(1)

    task = asyncio.create_task(trickle())
    assert (await scene.reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 60 <= scene.elapsed_s() <= 62
    task.cancel()


@in_scene(limits=ServerLimits(body_limit_bytes=20_000_000))
async def test_a_large_body_may_take_longer_than_a_small_one(scene: Scene) -> None:
    scene.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20000000\r\n\r\n")
    for _ in range(200):
        scene.writer.write(bytes(100_000))
        await asyncio.sleep(1)
    assert len(scene.desk.replies) == 1
    assert scene.elapsed_s() > 180
    scene.desk.replies.pop().send(200, [], b"")


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.both_loops
@in_scene()
async def test_a_client_that_stops_reading_is_cut(scene: Scene, *, streamed: bool) -> None:
    scene.writer.transport.pause_reading()  # type: ignore[attr-defined]
    scene.writer.write(GET)
    await asyncio.sleep(1)
    (reply,) = scene.desk.replies
    if streamed:
        reply.start(200, [])
        # Less than what pauses a reply, over what the wire holds.
        reply.write(bytes(100_000))
        await asyncio.sleep(50)
        reply.write(b"x")
    else:
        reply.send(200, [], bytes(1_000_000))
        await asyncio.sleep(50)
    assert scene.server.connections == 1
    await scene.server.drain()
    assert 61 <= scene.elapsed_s() <= 61 + 2 * 16
    assert len(scene.desk.closed_at_s) == streamed


@pytest.mark.parametrize("streamed", [True, False])
@in_scene(link=Link(bytes_per_s=2_000))
async def test_a_client_that_reads_slowly_is_not_cut(scene: Scene, *, streamed: bool) -> None:
    scene.writer.write(GET)
    await asyncio.sleep(1)
    (reply,) = scene.desk.replies
    if streamed:
        reply.start(200, [])
        reply.write(bytes(1_000_000))
        reply.end()
    else:
        reply.send(200, [], bytes(1_000_000))
    size = 0
    while size < 1_000_000:
        size += len(await scene.reader.read(65_536))
    assert scene.elapsed_s() > 400
    assert scene.server.connections == 1


@pytest.mark.parametrize("then", [GET, b"half a head", b""])
@pytest.mark.parametrize("option", [b"", b"Connection: close\r\n"])
@in_scene(link=Link(bytes_per_s=2_000))
async def test_what_is_pipelined_behind_a_slow_answer_does_not_cut_it(
    scene: Scene, then: bytes, option: bytes
) -> None:
    scene.writer.write(GET[:-2] + option + b"\r\n" + then)
    await asyncio.sleep(1)
    scene.desk.replies.pop().send(200, [], b"-" * 1_000_000)
    await scene.reader.readuntil(b"\r\n\r\n")
    size = 0
    while size < 1_000_000:
        piece = await scene.reader.read(65_536)
        assert set(piece) == set(b"-")
        size += len(piece)
    assert scene.elapsed_s() > 400
    if then == GET and not option:
        await asyncio.sleep(0.1)
        scene.desk.replies.pop().send(200, [], b"")
        assert (await scene.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")


@in_scene()
async def test_a_stream_that_rests_is_not_cut(scene: Scene) -> None:
    scene.writer.write(GET)
    await asyncio.sleep(1)
    (reply,) = scene.desk.replies
    reply.start(200, [])
    for _ in range(3):
        await asyncio.sleep(500)
        reply.write(b"token")
        await scene.reader.readuntil(b"token\r\n")
    reply.end()


@in_scene()
async def test_a_refused_client_that_stays_is_cut_soon(scene: Scene) -> None:
    scene.writer.write(b"nonsense\r\n\r\n")
    assert (await scene.reader.read()).startswith(b"HTTP/1.1 400 ")
    await scene.server.drain()
    assert scene.elapsed_s() <= 3.1


@in_scene()
async def test_an_aborted_reply_to_a_client_that_stopped_reading_ends_too(
    scene: Scene,
) -> None:
    scene.writer.transport.pause_reading()  # type: ignore[attr-defined]
    scene.writer.write(GET)
    await asyncio.sleep(1)
    (reply,) = scene.desk.replies
    reply.start(200, [])
    reply.write(bytes(1_000_000))
    reply.abort()
    await scene.server.drain()
    assert 61 <= scene.elapsed_s() <= 61 + 2 * 16
    assert not scene.desk.closed_at_s


@in_scene()
async def test_a_server_without_connections_has_no_timer(scene: Scene) -> None:
    for _ in range(2):
        await asyncio.sleep(0.1)
        assert scene.loop.pending_timers == 1
        scene.writer.close()
        await asyncio.sleep(0.1)
        assert scene.loop.pending_timers == 0
        _, scene.writer = await scene.open()

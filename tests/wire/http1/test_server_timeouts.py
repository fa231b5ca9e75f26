"""The server's deadlines, in virtual time: every second of them is waited for, at once."""

import asyncio

import pytest
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, ServerLimits

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"


class Desk:
    """An application that keeps its replies and says when they are closed."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.replies: list[Reply] = []
        self.closed_at_s: list[float] = []
        self._loop = loop

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        reply.on_closed = lambda: self.closed_at_s.append(self._loop.time())
        self.replies.append(reply)


class Scene:
    """A server with default limits, one client, and the time since it connected."""

    def __init__(self, loop: VirtualLoop, limits: ServerLimits | None = None) -> None:
        self._loop = loop
        self.desk = Desk(loop)
        self.server = Server(self.desk, limits=limits)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.server.addresses:
            await self.server.start("127.0.0.1", 0)
        self._begin_s = self._loop.time()
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    def elapsed_s(self) -> float:
        return self._loop.time() - self._begin_s

    async def end(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        self.server.stop_accepting()
        await self.server.drain()
        assert self.server.connections == 0
        await asyncio.sleep(0.1)  # The last segment is delivered by a timer too.
        assert self._loop.pending_timers == 0


@pytest.mark.both_loops
@in_virtual_time(seed=0)
async def test_a_connection_without_a_request_is_closed_silently(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    assert await reader.read() == b""
    assert 10 <= scene.elapsed_s() <= 11.1
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_after_a_hand_over_an_idle_connection_has_a_last_answer_or_a_last_moment(
    loop: VirtualLoop,
) -> None:
    scene = Scene(loop)
    used, writer = await scene.open()
    unused, other = await scene.open()
    for is_last in (False, True):
        writer.write(GET)
        await asyncio.sleep(0.1)
        scene.desk.replies[-1].send(200, [], b"here")
        assert (b"connection: close" in await used.readuntil(b"here")) == is_last
        scene.server.hand_over(idle_s=2.0)
    assert await used.read() == b""
    assert scene.elapsed_s() < 1
    assert await unused.read() == b""
    assert 2 <= scene.elapsed_s() <= 3.2
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", scene.server.port)
    writer.close()
    await scene.end(other)


@in_virtual_time(seed=0)
async def test_after_a_hand_over_an_answer_that_had_begun_is_not_the_last_without_saying_so(
    loop: VirtualLoop,
) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(GET)
    await asyncio.sleep(0.1)
    scene.desk.replies[-1].start(200, [])
    scene.server.hand_over(idle_s=2.0)
    await asyncio.sleep(30)
    scene.desk.replies[-1].end()
    assert b"connection: close" not in await reader.readuntil(b"0\r\n\r\n")
    await asyncio.sleep(1)
    writer.write(GET)
    await asyncio.sleep(0.1)
    scene.desk.replies[-1].send(200, [], b"here")
    assert b"connection: close" in await reader.read()
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_a_shorter_limit_is_checked_more_often(loop: VirtualLoop) -> None:
    scene = Scene(loop, ServerLimits(header_timeout_s=0.1))
    reader, writer = await scene.open()
    assert await reader.read() == b""
    assert 0.1 <= scene.elapsed_s() <= 0.13
    await scene.end(writer)


@pytest.mark.parametrize("every_s", [0.3, 9.0])
@in_virtual_time(seed=0)
async def test_a_head_that_trickles_is_refused(loop: VirtualLoop, every_s: float) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()

    async def trickle() -> None:
        for byte in b"GET / HTTP/1.1\r\nHost: " + b"a" * 1000:
            writer.write(bytes([byte]))
            await asyncio.sleep(every_s)

    task = asyncio.create_task(trickle())
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 10 <= scene.elapsed_s() <= 11.1
    task.cancel()
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_the_next_head_has_its_own_time(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    for _ in range(3):
        writer.write(GET[:5])
        await asyncio.sleep(9)
        writer.write(GET[5:])
        await asyncio.sleep(1)
        scene.desk.replies.pop().send(200, [], b"")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(60)
    writer.write(GET[:5])
    begin_s = loop.time()
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 10 <= loop.time() - begin_s <= 11.1
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_an_idle_connection_is_closed_silently(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(GET)
    await asyncio.sleep(1)
    scene.desk.replies.pop().send(200, [], b"")
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.read() == b""
    assert 76 <= scene.elapsed_s() <= 77.1
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_a_body_that_stops_is_refused(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(POST + b"begun")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 60 <= scene.elapsed_s() <= 61.1
    await scene.end(writer)


@pytest.mark.parametrize("coding", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
@in_virtual_time(seed=0)
async def test_a_body_that_trickles_is_refused_though_it_never_stops(
    loop: VirtualLoop, coding: bytes
) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % coding)

    async def trickle() -> None:
        while True:
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(1)

    task = asyncio.create_task(trickle())
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    assert 60 <= scene.elapsed_s() <= 62
    task.cancel()
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_a_large_body_may_take_longer_than_a_small_one(loop: VirtualLoop) -> None:
    scene = Scene(loop, ServerLimits(body_limit_bytes=20_000_000))
    _, writer = await scene.open()
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20000000\r\n\r\n")
    for _ in range(200):
        writer.write(bytes(100_000))
        await asyncio.sleep(1)
    assert len(scene.desk.replies) == 1
    assert scene.elapsed_s() > 180
    scene.desk.replies.pop().send(200, [], b"")
    await scene.end(writer)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.both_loops
@in_virtual_time(seed=0)
async def test_a_client_that_stops_reading_is_cut(loop: VirtualLoop, *, streamed: bool) -> None:
    scene = Scene(loop)
    _, writer = await scene.open()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET)
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
    await scene.end(writer)


@pytest.mark.parametrize("streamed", [True, False])
@in_virtual_time(seed=0, link=Link(bytes_per_s=2_000))
async def test_a_client_that_reads_slowly_is_not_cut(loop: VirtualLoop, *, streamed: bool) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(GET)
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
        size += len(await reader.read(65_536))
    assert scene.elapsed_s() > 400
    assert scene.server.connections == 1
    await scene.end(writer)


@pytest.mark.parametrize("then", [GET, b"half a head", b""])
@pytest.mark.parametrize("option", [b"", b"Connection: close\r\n"])
@in_virtual_time(seed=0, link=Link(bytes_per_s=2_000))
async def test_what_is_pipelined_behind_a_slow_answer_does_not_cut_it(
    loop: VirtualLoop, then: bytes, option: bytes
) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(GET[:-2] + option + b"\r\n" + then)
    await asyncio.sleep(1)
    scene.desk.replies.pop().send(200, [], b"-" * 1_000_000)
    await reader.readuntil(b"\r\n\r\n")
    size = 0
    while size < 1_000_000:
        piece = await reader.read(65_536)
        assert set(piece) == set(b"-")
        size += len(piece)
    assert scene.elapsed_s() > 400
    if then == GET and not option:
        await asyncio.sleep(0.1)
        scene.desk.replies.pop().send(200, [], b"")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_a_stream_that_rests_is_not_cut(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(GET)
    await asyncio.sleep(1)
    (reply,) = scene.desk.replies
    reply.start(200, [])
    for _ in range(3):
        await asyncio.sleep(500)
        reply.write(b"token")
        await reader.readuntil(b"token\r\n")
    reply.end()
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_a_refused_client_that_stays_is_cut_soon(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    reader, writer = await scene.open()
    writer.write(b"nonsense\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    await scene.server.drain()
    assert scene.elapsed_s() <= 3.1
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_an_aborted_reply_to_a_client_that_stopped_reading_ends_too(
    loop: VirtualLoop,
) -> None:
    scene = Scene(loop)
    _, writer = await scene.open()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET)
    await asyncio.sleep(1)
    (reply,) = scene.desk.replies
    reply.start(200, [])
    reply.write(bytes(1_000_000))
    reply.abort()
    await scene.server.drain()
    assert 61 <= scene.elapsed_s() <= 61 + 2 * 16
    assert not scene.desk.closed_at_s
    await scene.end(writer)


@in_virtual_time(seed=0)
async def test_a_server_without_connections_has_no_timer(loop: VirtualLoop) -> None:
    scene = Scene(loop)
    _, writer = await scene.open()
    for _ in range(2):
        await asyncio.sleep(0.1)
        assert loop.pending_timers == 1
        writer.close()
        await asyncio.sleep(0.1)
        assert loop.pending_timers == 0
        _, writer = await scene.open()
    await scene.end(writer)

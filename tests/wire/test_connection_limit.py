"""The server's bound on connections, in virtual time: who is served, evicted, answered and cut."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run as run_virtually
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import Request, ServerLimits

if TYPE_CHECKING:
    from ssl import SSLContext


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Desk:
    """An application that answers at once, or keeps the replies of /wait."""

    def __init__(self) -> None:
        self.kept: list[Reply] = []

    def __call__(self, request: Request, reply: Reply) -> None:
        if request.path == b"/wait":
            self.kept.append(reply)
        else:
            reply.send(200, [], b"")


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, path: bytes = b"/") -> bytes:
        """Return the head of the answer."""
        self.writer.write(GET.replace(b"/", path, 1))
        return await self.reader.readuntil(b"\r\n\r\n")

    async def wait(self, desk: Desk) -> None:
        """Begin a request that is kept."""
        count = len(desk.kept)
        self.writer.write(GET.replace(b"/", b"/wait", 1))
        while len(desk.kept) == count:  # noqa: ASYNC110 (What is waited for sets no event.)
            await asyncio.sleep(0.001)


Connect = Callable[[], Awaitable[Client]]
Scenario = Callable[[VirtualLoop, Server, Desk, Connect], Awaitable[None]]


def play(scenario: Scenario, **limits: Any) -> None:
    """Play a scenario; in the end the server must know no connection."""

    async def main(loop: VirtualLoop) -> None:
        desk = Desk()
        server = Server(desk, limits=ServerLimits(**limits))
        await server.start("127.0.0.1", 0)
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> Client:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writers.append(writer)
            await asyncio.sleep(0.01)  # Accepted by now.
            return Client(reader, writer)

        await scenario(loop, server, desk, connect)
        for writer in writers:
            writer.close()
        server.stop_accepting()
        await server.drain()
        assert server.connections == 0
        await asyncio.sleep(0.1)
        assert loop.pending_timers == 0

    run_virtually(main, seed=1)


def test_beyond_the_limit_a_newcomer_is_told_to_come_again() -> None:
    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        busy = [await connect() for _ in range(8)]
        for client in busy:
            await client.wait(desk)
        late = [await connect() for _ in range(2)]
        for client in late:
            head = await client.ask()
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in head
            assert b"\r\nconnection: close\r\n" in head
            assert b"too many connections" in await client.reader.read()
            client.writer.close()
        assert server.limit.rejected == {"limit": 2, "peer": 0}
        # Those that are served are not disturbed, and a place that is left is free again.
        for reply in desk.kept:
            reply.send(200, [], b"")
        for client in busy:
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        busy[0].writer.close()
        await asyncio.sleep(0.1)
        assert (await (await connect()).ask()).startswith(b"HTTP/1.1 200 ")
        assert server.limit.rejected == {"limit": 2, "peer": 0}

    play(scenario, connection_limit=8)


def test_a_rejected_newcomer_that_asks_nothing_is_answered_and_closed() -> None:
    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        for _ in range(4):
            await (await connect()).wait(desk)
        begin_s = loop.time()
        silent = await connect()
        assert (await silent.reader.read()).startswith(b"HTTP/1.1 503 ")
        assert loop.time() - begin_s < 4.0
        left = await connect()
        left.writer.close()
        await asyncio.sleep(5.0)
        assert server.connections == 4

    play(scenario, connection_limit=4)


def test_few_newcomers_wait_for_their_rejection_and_the_others_are_cut() -> None:
    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        for _ in range(8):
            await (await connect()).wait(desk)
        answered = [await connect() for _ in range(2)]
        for _ in range(100):
            cut = await connect()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await cut.ask()
        assert server.connections == 10
        for client in answered:
            assert (await client.ask()).startswith(b"HTTP/1.1 503 ")
        assert server.limit.rejected == {"limit": 102, "peer": 0}

    play(scenario, connection_limit=8)


def test_the_connection_that_is_idle_for_longest_makes_room() -> None:
    """Finding H5: silent connections kept everybody out."""

    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        silent = await connect()
        used = await connect()
        busy = await connect()
        await busy.wait(desk)
        half = await connect()
        half.writer.write(GET[:10])
        await asyncio.sleep(1.0)
        assert (await used.ask()).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(1.0)
        assert (await (await connect()).ask()).startswith(b"HTTP/1.1 200 ")
        assert await silent.reader.read() == b""
        newest = await connect()
        assert await used.reader.read() == b""
        await newest.wait(desk)
        await asyncio.sleep(1.0)
        await (await connect()).wait(desk)  # In the place of the one before the newest.
        # Everybody left is at work.
        assert (await (await connect()).ask()).startswith(b"HTTP/1.1 503 ")
        assert server.limit.evicted == 3
        half.writer.write(GET[10:])
        assert (await half.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert len(desk.kept) == 3

    play(scenario, connection_limit=4)


def test_for_want_of_descriptors_those_that_are_idle_for_a_while_are_closed() -> None:
    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        silent, busy = await connect(), await connect()
        await busy.wait(desk)
        await asyncio.sleep(1.0)
        young = await connect()
        server.pause()
        assert await silent.reader.read() == b""
        assert server.limit.evicted == 1
        assert (await young.ask()).startswith(b"HTTP/1.1 200 ")
        assert len(desk.kept) == 1

    play(scenario)


def test_an_address_may_be_bounded_by_itself() -> None:
    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        first, second = await connect(), await connect()
        refused = await connect()
        head = await refused.ask()
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert (await second.ask()).startswith(b"HTTP/1.1 200 ")
        first.writer.close()
        await asyncio.sleep(0.1)
        assert (await (await connect()).ask()).startswith(b"HTTP/1.1 200 ")
        assert server.limit.rejected == {"limit": 0, "peer": 1}

    play(scenario, peer_connection_limit=2)


def test_rejections_are_logged_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: VirtualLoop, server: Server, desk: Desk, connect: Connect) -> None:
        await (await connect()).wait(desk)
        for _ in range(30):
            (await connect()).writer.close()
            await asyncio.sleep(3.0)

    with caplog.at_level(logging.WARNING):
        play(scenario, connection_limit=1)
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert [one["count"] for one in fields] == [1, 20]
    assert fields[0] == {"reason": "limit", "count": 1, "open": 1, "peer": "127.0.0.1"}


async def test_over_tls_a_client_that_does_not_help_to_close_is_evicted_all_the_same(
    contexts: "tuple[SSLContext, SSLContext]",
) -> None:
    server = Server(Desk(), limits=ServerLimits(connection_limit=1))
    await server.start("127.0.0.1", 0, ssl=contexts[0])

    async def connect() -> Client:
        client = Client(
            *await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=contexts[1], server_hostname="localhost"
            )
        )
        assert (await client.ask()).startswith(b"HTTP/1.1 200 ")
        return client

    clients: list[Client] = []
    try:
        clients.append(await connect())
        clients[0].writer.transport.pause_reading()  # type: ignore[attr-defined]
        clients.append(await connect())
        while server.connections > 1:  # noqa: ASYNC110 (What is waited for sets no event.)
            await asyncio.sleep(0)
        assert server.limit.evicted == 1
    finally:
        for client in clients:
            client.writer.transport.abort()
        server.close()
        await server.drain()

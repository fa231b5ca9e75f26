"""The server's bound on connections, in virtual time: who is served, evicted, answered and cut."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from tests.support.played import played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run as run_virtually

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.http1.service import ConnectionLimit, Loss, Service
from balanceroute.proxy.wire.messages import HttpRequest, ServerLimits

if TYPE_CHECKING:
    from ssl import SSLContext


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Desk:
    """An application that answers at once, or keeps the replies of /wait."""

    def __init__(self) -> None:
        self.kept: list[Reply] = []

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        if request.path == b"/wait":
            self.kept.append(reply)
        else:
            reply.send(200, [], b"")


class Client:
    """One connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, desk: Desk | None = None
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._desk = desk

    async def ask(self, path: bytes = b"/") -> bytes:
        """Return the head of the answer."""
        self.writer.write(GET.replace(b"/", path, 1))
        return await self.reader.readuntil(b"\r\n\r\n")

    async def is_closed(self) -> bool:
        """Return whether the server has closed it, whatever it said before."""
        if self.reader.at_eof() or self.writer.transport.is_closing():
            return True
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.01):
                while await self.reader.read(1000):
                    pass
            return True
        return self.reader.at_eof() or self.reader.exception() is not None

    async def wait(self) -> None:
        """Begin a request that is kept."""
        assert self._desk is not None
        desk, count = self._desk, len(self._desk.kept)
        self.writer.write(GET.replace(b"/", b"/wait", 1))
        async with asyncio.timeout(5.0):
            while len(desk.kept) == count:  # noqa: ASYNC110 (What is waited for sets no event.)
                await asyncio.sleep(0.001)


class Site:
    """A server in virtual time, and connections to it."""

    def __init__(self, loop: VirtualLoop, limits: ServerLimits) -> None:
        self.loop = loop
        self.desk = Desk()
        self.server = Server(self.desk, limits=limits)
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, host: str = "127.0.0.1") -> Client:
        """Open a connection from an address; the server has accepted it then."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.server.port, local_addr=(host, 0)
        )
        self.writers.append(writer)
        await asyncio.sleep(0.01)  # Accepted by now.
        return Client(reader, writer, self.desk)

    async def ask(self, host: str = "127.0.0.1") -> int:
        """Return the status that a new connection's request gets."""
        return int((await (await self.connect(host)).ask()).split(b" ")[1])


def play(scenario: Callable[[Site], Awaitable[None]], **limits: Any) -> None:
    """Play a scenario; in the end the server must know no connection."""

    async def main(loop: VirtualLoop) -> None:
        site = Site(loop, ServerLimits(**limits))
        await site.server.start("127.0.0.1", 0)
        await scenario(site)
        for writer in site.writers:
            writer.close()
        site.server.stop_accepting()
        await site.server.drain()
        assert site.server.connections == 0
        await asyncio.sleep(0.1)
        assert loop.pending_timers == 0

    run_virtually(main, seed=1)


played = played_by(play, places=1)


@pytest.mark.both_loops
@played(connection_limit=8)
async def test_beyond_the_limit_a_newcomer_is_told_to_come_again(site: Site) -> None:
    busy = [await site.connect() for _ in range(8)]
    for client in busy:
        await client.wait()
    late = [await site.connect() for _ in range(2)]
    for client in late:
        head = await client.ask()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert b"\r\nconnection: close\r\n" in head
        assert b"too many connections" in await client.reader.read()
        client.writer.close()
    assert site.server.limit.rejected == {"limit": 2, "peer": 0}
    # Those that are served are not disturbed, and a place that is left is free again.
    for reply in site.desk.kept:
        reply.send(200, [], b"")
    for client in busy:
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    busy[0].writer.close()
    await asyncio.sleep(0.1)
    assert await site.ask() == 200
    assert site.server.limit.rejected == {"limit": 2, "peer": 0}


@played(connection_limit=4)
async def test_a_rejected_newcomer_that_asks_nothing_is_answered_and_closed(site: Site) -> None:
    for _ in range(4):
        await (await site.connect()).wait()
    begin_s = site.loop.time()
    silent = await site.connect()
    assert (await silent.reader.read()).startswith(b"HTTP/1.1 503 ")
    assert site.loop.time() - begin_s < 4.0
    left = await site.connect()
    left.writer.close()
    await asyncio.sleep(5.0)
    assert site.server.connections == 4


@played(connection_limit=8)
async def test_few_newcomers_wait_for_their_rejection_and_the_others_are_cut(site: Site) -> None:
    for _ in range(8):
        await (await site.connect()).wait()
    answered = [await site.connect() for _ in range(2)]
    for _ in range(100):
        cut = await site.connect()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await cut.ask()
    assert site.server.connections == 10
    for client in answered:
        assert (await client.ask()).startswith(b"HTTP/1.1 503 ")
    assert site.server.limit.rejected == {"limit": 102, "peer": 0}


@played(connection_limit=3)
async def test_the_connection_that_is_idle_for_longest_makes_room(site: Site) -> None:
    """Silent connections kept everybody out."""
    first, second, busy = [await site.connect() for _ in range(3)]
    for client in (first, second):
        assert (await client.ask()).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(1.0)
    await busy.wait()
    for oldest in (first, second):
        await (await site.connect()).wait()
        assert await oldest.reader.read() == b""
    # Everybody left is at work.
    assert await site.ask() == 503
    assert site.server.limit.evicted == 2
    assert len(site.desk.kept) == 3


HALF = GET[:-2]
UPLOAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n{"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_nobody_gives_way_whose_request_was_not_read(run: Callable[..., None]) -> None:
    """They are accepted all at once, in one turn of the loop."""

    async def main() -> None:
        desk = Desk()
        server = Server(desk, limits=ServerLimits(connection_limit=8))
        await server.start("127.0.0.1", 0)
        sockets = []
        for _ in range(9):  # The kernel's queue has room for them.
            sockets.append(socket.create_connection(("127.0.0.1", server.port)))
            sockets[-1].sendall(GET)
        clients = [Client(*await asyncio.open_connection(sock=one)) for one in sockets]
        for client in clients:
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
        assert (server.limit.evicted, server.limit.rejected["limit"]) == (1, 0)
        for client in clients:
            client.writer.transport.abort()
        server.close()
        await server.drain()

    run(main())


@played(connection_limit=1, half_close=True)
async def test_what_a_newcomer_sends_while_it_waits_for_a_place_is_served_in_order(
    site: Site,
) -> None:
    holder = await site.connect()
    placed = ServerConnection.placed
    arrived: list[bytes] = []

    def late(connection: ServerConnection, *, is_served: bool) -> None:
        arrived.append(bytes(connection._incoming.buffer))
        placed(connection, is_served=is_served)

    late_by = Service.after_reads

    def much_later(service: Service, *args: Any) -> None:
        site.loop.call_later(0.5, late_by, service, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerConnection, "placed", late)
        patch.setattr(Service, "after_reads", much_later)
        newcomer, leaves = await site.connect(), await site.connect()
        newcomer.writer.write(GET + GET)
        newcomer.writer.write_eof()
        leaves.writer.write(GET)
        leaves.writer.transport.abort()
        await asyncio.sleep(1.0)
    assert arrived == [GET + GET]
    answer = await newcomer.reader.read()
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert await holder.is_closed()
    assert (site.server.limit.evicted, site.server.connections) == (1, 0)


@pytest.mark.parametrize("age_s", [0.0, 0.5])
@played(connection_limit=8)
async def test_a_head_in_pieces_stays_beside_those_who_send_nothing(
    site: Site, age_s: float
) -> None:
    slow, *_ = await asyncio.gather(*[site.connect() for _ in range(8)])
    slow.writer.write(HALF)
    await asyncio.sleep(age_s)
    for _ in range(3):
        assert (await (await site.connect()).ask(b"/")).startswith(b"HTTP/1.1 200 ")
        await site.connect()
    slow.writer.write(GET[-2:])
    assert (await slow.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begun", [b"", b"G", HALF, UPLOAD, UPLOAD[:-1]])
@played(connection_limit=16)
async def test_who_leaves_a_request_unfinished_keeps_nobody_out(site: Site, begun: bytes) -> None:
    used = await site.connect()
    assert (await used.ask()).startswith(b"HTTP/1.1 200 ")
    holders = [await site.connect() for _ in range(15)]
    for holder in holders:
        holder.writer.write(begun)
    await asyncio.sleep(1.5)
    upload = begun.startswith(b"POST")
    for count in range(30):
        client = await site.connect()
        assert (await client.ask()).startswith(b"HTTP/1.1 200 ")
        # Half a body is worth more than a connection without a request, half a head is not.
        assert await used.is_closed() is upload
        assert (sum([await one.is_closed() for one in holders]) > 0) is not upload or count
        client.writer.close()
        # Renewed for ever.
        holders.append(await site.connect())
        holders[-1].writer.write(begun)
        await asyncio.sleep(0.1)
    assert site.server.limit.rejected == {"limit": 0, "peer": 0}


@played(connection_limit=8)
async def test_a_head_that_comes_byte_by_byte_keeps_nobody_out(site: Site) -> None:
    holders = [await site.connect() for _ in range(8)]
    for byte in HALF[:20]:
        for holder in holders:
            if not holder.writer.is_closing():
                holder.writer.write(bytes([byte]))
        await asyncio.sleep(0.3)
        client = await site.connect()
        assert (await client.ask()).startswith(b"HTTP/1.1 200 ")
        client.writer.close()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("begun", "told"), [(HALF, b""), (UPLOAD, b"HTTP/1.1 503 ")])
@played(connection_limit=1)
async def test_a_request_that_gives_way_is_told_so_if_it_is_known(
    site: Site, begun: bytes, told: bytes
) -> None:
    half = await site.connect()
    half.writer.write(begun)
    await asyncio.sleep(1.5)
    assert await site.ask() == 200
    answer = await half.reader.read()
    assert answer[:13] == told
    assert not told or b"\r\nretry-after: 1\r\n" in answer
    assert not told or b"too many connections, and the request's body is late" in answer
    assert (site.server.limit.evicted, site.server.limit.rejected["limit"]) == (1, 0)


@played(connection_limit=6)
async def test_what_is_on_its_way_stays_while_others_are_late(site: Site) -> None:
    refused, half, used, trickle, upload = [await site.connect() for _ in range(5)]
    trickle.writer.write(UPLOAD)
    upload.writer.write(UPLOAD + bytes(200_000))  # Three seconds' worth.
    half.writer.write(HALF)
    refused.writer.write(b"\0")
    assert (await used.ask()).startswith(b"HTTP/1.1 200 ")
    await asyncio.sleep(1.5)
    fresh = await site.connect()
    fresh.writer.write(HALF)
    await asyncio.sleep(0.01)
    for gone in (refused, half, used, trickle, fresh):
        assert not await upload.is_closed()
        await (await site.connect()).wait()
        assert await gone.is_closed(), site.server.limit.evicted
    assert await site.ask() == 503
    await asyncio.sleep(4.0)
    await (await site.connect()).wait()  # The rest of the upload has become late, too.
    assert await upload.is_closed()


@played(connection_limit=1)
async def test_who_waits_for_100_continue_has_a_second_more(site: Site) -> None:
    waits = await site.connect()
    waits.writer.write(UPLOAD[:-3] + b"Expect: 100-continue\r\n\r\n")
    assert (await waits.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    await asyncio.sleep(0.8)
    assert await site.ask() == 503
    await asyncio.sleep(0.4)
    assert await site.ask() == 200
    assert (await waits.reader.read()).startswith(b"HTTP/1.1 503 ")


@pytest.mark.both_loops
@played(connection_limit=1)
async def test_a_refusal_that_is_on_its_way_arrives(site: Site) -> None:
    """A reset overtook it where somebody else wanted the place."""
    refused = await site.connect()
    refused.writer.write(b"\0" + bytes(20_000))
    await asyncio.sleep(0.5)
    assert await site.ask() == 503
    assert (await refused.reader.readline()).startswith(b"HTTP/1.1 400 ")
    await asyncio.sleep(0.6)
    assert await site.ask() == 200


@played(connection_limit=8)
async def test_those_of_the_busiest_address_give_way_first(site: Site) -> None:
    slow = await site.connect("127.0.0.2")
    slow.writer.write(HALF)
    await asyncio.sleep(1.0)
    holders = [await site.connect("127.0.0.3") for _ in range(7)]
    for holder in holders:
        holder.writer.write(HALF)
    await asyncio.sleep(1.5)
    for _ in range(20):
        client = await site.connect("127.0.0.4")
        assert (await client.ask()).startswith(b"HTTP/1.1 200 ")
        client.writer.close()
        (await site.connect("127.0.0.3")).writer.write(HALF)
    slow.writer.write(b"\r\n")
    assert (await slow.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@played(connection_limit=16)
async def test_an_address_beyond_its_share_takes_no_place_of_one_within(site: Site) -> None:
    others = [await site.connect(f"127.0.1.{n}") for n in range(8)]
    for one in others:
        assert (await one.ask()).startswith(b"HTTP/1.1 200 ")
    await asyncio.sleep(2.0)
    busy = [await site.connect("127.0.0.2") for _ in range(8)]
    for one in busy:
        await one.wait()
    for _ in range(3):  # The limit is reached, and 8 are more than a quarter of it.
        assert await site.ask("127.0.0.2") == 503
    assert not any([await one.is_closed() for one in others])
    # Somebody else does get the place of an idle one.
    assert await site.ask("127.0.0.3") == 200
    assert site.server.limit.evicted == 1


@played(connection_limit=16)
async def test_one_address_may_have_all_places_while_nobody_else_wants_them(site: Site) -> None:
    """As behind a gateway, where it stands for all clients."""
    kept = [await site.connect() for _ in range(16)]
    for one in kept[:15]:
        await one.wait()
    assert (await kept[15].ask()).startswith(b"HTTP/1.1 200 ")
    await (await site.connect()).wait()  # In the place of the gateway's own idle one.
    assert site.server.limit.rejected == {"limit": 0, "peer": 0}
    assert len(site.desk.kept) == 16


@pytest.mark.parametrize("bound", [0, 12])
@played(connection_limit=16, peer_connection_limit=lambda bound: bound)
async def test_an_own_limit_per_address_takes_the_place_of_the_share(
    site: Site, bound: int
) -> None:
    other = await site.connect("127.0.0.3")
    assert (await other.ask()).startswith(b"HTTP/1.1 200 ")
    await asyncio.sleep(2.0)
    for _ in range(15):
        client = await site.connect("127.0.0.2")
        if len(site.desk.kept) == bound > 0:
            assert (await client.ask()).startswith(b"HTTP/1.1 429 ")
        else:
            await client.wait()
    assert not await other.is_closed()
    if not bound:
        await (await site.connect("127.0.0.2")).wait()
        assert await other.is_closed()


@pytest.mark.parametrize("gives_way", [False, True])
@played(connection_limit=4, unread_gives_way=lambda gives_way: gives_way)
async def test_an_unread_answer_gives_way_only_if_it_may_be_asked_for_again(
    site: Site, gives_way: bool
) -> None:
    for _ in range(4):
        client = await site.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(GET * 40_000)
    await asyncio.sleep(1.0)
    assert await site.ask() == (200 if gives_way else 503)


def test_searches_do_not_grow_with_the_newcomers() -> None:
    """Among many connections that are at work a few are looked for, not once for each newcomer."""
    looks = 0

    class Busy:
        def gives_way(self, now_s: float) -> None:
            nonlocal looks
            looks += 1

        def evict(self) -> bool:
            raise AssertionError("it is at work")

    now_s = 0.0
    limit = ConnectionLimit(1000, None, clock=lambda: now_s)
    open_ones = [Busy() for _ in range(1000)]
    for one in open_ones:
        assert limit.take(one, "a", open_ones)
    for _ in range(10_000):
        assert not limit.take(Busy(), "b", open_ones)
        now_s += 0.0001
    assert looks <= 5 * 1000


def test_all_who_came_since_the_last_search_are_looked_at_at_once() -> None:
    """Who holds all places, leaves, and comes again before the next search is due keeps nobody out."""

    class Silent:
        def gives_way(self, now_s: float) -> tuple[Loss, float]:
            return Loss.NEW, now_s

        def evict(self) -> bool:
            limit.leave(self, served=True)
            here.remove(self)
            return True

    def come() -> bool:
        here.append(Silent())
        return limit.take(here[-1], "a", here)

    limit, here = ConnectionLimit(1000, None, clock=lambda: 7.0), list[Silent]()
    for _ in range(2):
        assert all(come() for _ in range(1100))
        while here:
            limit.leave(here.pop(), served=True)
    assert limit.rejected == {"limit": 0, "peer": 0}


@played()
async def test_for_want_of_descriptors_those_that_are_idle_for_a_while_are_closed(
    site: Site,
) -> None:
    silent, busy = await site.connect(), await site.connect()
    await busy.wait()
    await asyncio.sleep(1.0)
    young = await site.connect()
    site.server.pause()
    assert await silent.reader.read() == b""
    assert site.server.limit.evicted == 1
    assert (await young.ask()).startswith(b"HTTP/1.1 200 ")
    assert len(site.desk.kept) == 1


@played(peer_connection_limit=2)
async def test_an_address_may_be_bounded_by_itself(site: Site) -> None:
    first, second = await site.connect(), await site.connect()
    refused = await site.connect()
    head = await refused.ask()
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 1\r\n" in head
    assert (await second.ask()).startswith(b"HTTP/1.1 200 ")
    first.writer.close()
    await asyncio.sleep(0.1)
    assert await site.ask() == 200
    assert site.server.limit.rejected == {"limit": 0, "peer": 1}


def test_rejections_are_logged_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> None:
        await (await site.connect()).wait()
        for _ in range(30):
            (await site.connect()).writer.close()
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


@pytest.mark.parametrize(
    "begun", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03"]
)
@pytest.mark.both_loops
async def test_half_tls_handshakes_keep_nobody_out(
    contexts: "tuple[SSLContext, SSLContext]", begun: bytes
) -> None:
    desk = Desk()
    server = Server(desk, limits=ServerLimits(connection_limit=4))
    await server.start("127.0.0.1", 0, ssl=contexts[0])
    holders: list[asyncio.StreamWriter] = []

    async def hold() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(begun)
        holders.append(writer)

    try:
        for _ in range(12):
            await hold()
        for _ in range(6):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=contexts[1], server_hostname="localhost"
            )
            assert (await Client(reader, writer).ask()).startswith(b"HTTP/1.1 200 ")
            writer.transport.abort()
            await hold()
        assert server.limit.rejected == {"limit": 0, "peer": 0}
        assert server.limit.evicted >= 12
        assert server.connections <= 5
    finally:
        for one in holders:
            one.transport.abort()
        server.close()
        await server.drain()


@pytest.mark.parametrize("spoiled", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x04abcd", None])
async def test_a_handshake_that_fails_leaves_nothing(
    contexts: "tuple[SSLContext, SSLContext]", spoiled: bytes | None
) -> None:
    server = Server(Desk(), limits=ServerLimits(header_timeout_s=0.4))
    await server.start("127.0.0.1", 0, ssl=contexts[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(spoiled or b"")  # Nothing: it takes too long.
    with suppress(ConnectionError):
        await reader.read()
    while server.connections:  # noqa: ASYNC110 (What is waited for sets no event.)
        await asyncio.sleep(0)
    writer.transport.abort()
    server.close()
    await server.drain()

"""The in-memory network of a virtual loop: listeners, connects, outages, counters.

Every literal address exists and is this machine. A connect takes a round trip; the accepting side
has its connection half a round trip later, as with TCP's three-way handshake.
"""

import asyncio
import errno
import random
from collections.abc import Callable
from contextvars import Context, copy_context
from enum import Enum
from typing import TypeVar

from tests.support.virtual.addresses import (
    Address,
    Connect,
    Link,
    Traffic,
    VirtualServer,
    resolve,
)
from tests.support.virtual.pipe import Pipe
from tests.support.virtual.transport import MemoryTransport, streaming

# The two ends of one in-memory connection and the pipes between them.


class Connection:
    """One connection, for tests that draw their own faults."""

    __slots__ = (
        "_forget",
        "client",
        "dialled",
        "download",
        "listening",
        "number",
        "server",
        "upload",
    )

    def __init__(
        self,
        traffic: Traffic,
        link: Link,
        *,
        number: int,
        local: Address,
        dialled: Address,
        listening: Address,
        contexts: tuple[Context, Context],
        forget: Callable[["Connection"], None],
    ) -> None:
        self._forget = forget  # Called once both ends are shut.
        self.number = number  # Counts connections from 1, in the order of their making.
        self.dialled = dialled  # What the client connected to.
        # What the server had bound: other than `dialled` for a wildcard.
        self.listening = listening
        # From client to server.
        self.upload = Pipe(
            traffic,
            self,
            link,
            reset_after=link.reset_after_upload_bytes,
            stall_after=link.stall_after_upload_bytes,
        )
        # From server to client.
        self.download = Pipe(
            traffic,
            self,
            link,
            reset_after=link.reset_after_download_bytes,
            stall_after=link.stall_after_download_bytes,
        )
        # The end that connected.
        self.client = MemoryTransport(
            traffic,
            self,
            "client",
            incoming=self.download,
            outgoing=self.upload,
            sockname=local,
            peername=dialled,
            context=contexts[0],
        )
        # The end that accepted.
        self.server = MemoryTransport(
            traffic,
            self,
            "server",
            incoming=self.upload,
            outgoing=self.download,
            sockname=dialled,
            peername=local,
            context=contexts[1],
        )

    def opposite(self, pipe: Pipe) -> Pipe:
        return self.download if pipe is self.upload else self.upload

    def reset(self) -> None:
        """Reset both ends; of what is on its way, a tail of drawn length is lost."""
        self.upload.reset(lose=True)
        self.download.reset(lose=True)

    def end_shut(self) -> None:
        if self.client.is_shut and self.server.is_shut:
            self._forget(self)

    def kill(self) -> None:
        """Reset both ends, the accepting one at once: its host is gone. Ends a black hole."""
        self.set_silent(False)
        self.reset()
        self.server.crash()

    def stall(
        self, seconds: float | None = None, *, upload: bool = True, download: bool = True
    ) -> None:
        """Deliver nothing for so long: no bytes, no FIN and no reset. None is for ever."""
        if upload:
            self.upload.stall(seconds)
        if download:
            self.download.stall(seconds)

    def set_silent(self, silent: bool) -> None:
        """Start or end a black hole in both directions."""
        self.upload.set_silent(silent)
        self.download.set_silent(silent)


P = TypeVar("P", bound=asyncio.BaseProtocol)

LISTENING_PORTS = range(20_000, 32_768)
EPHEMERAL_PORTS = range(32_768, 61_000)  # Linux's.
# Linux tries seven times (tcp_syn_retries = 6), first after 1 s, each wait twice the last: 127 s.
SYN_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 (no real interface is bound)


class Outage(Enum):
    """What is wrong with a listener."""

    KILLED = "killed"
    SILENT = "silent"


class Network:
    """The network of one loop.

    Attributes:
        traffic: What its connections share: the counters and the journal too.
        denies: Returns why the system of the connecting side gives it no socket now; None if it does.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        link: Link | None = None,
        abort_resets: bool = True,
        journal: bool = False,
    ) -> None:
        """Make a network; `VirtualLoop.attach` takes it.

        Args:
            loop: The loop.
            rng: Seeded by the caller.
            link: Of every connection that no rule covers.
            abort_resets: See `Traffic`.
            journal: Whether to keep one.
        """
        self.loop = loop
        self.denies: Callable[[], OSError | None] = lambda: None
        self.traffic = Traffic(loop, rng, abort_resets=abort_resets, journal=journal)
        self._link = link or Link()
        self._listeners: dict[Address, VirtualServer] = {}
        self._rules: dict[Address, Link | Callable[[], Link]] = {}
        self._outages: dict[Address, Outage] = {}
        self._connections: dict[int, Connection] = {}
        self._connected = 0
        self._next_port = LISTENING_PORTS.start

    # Faults

    def rule(self, host: str, port: int, link: Link | Callable[[], Link] | None) -> None:
        """Set what connections made from now on to a listener are like.

        Args:
            host: A literal address, or localhost.
            port: The port; it needs no listener.
            link: One link for all; or a callable that makes one for each connect, from the
                caller's generator; None removes the rule.
        """
        if link is None:
            self._rules.pop((resolve(host), port), None)
        else:
            self._rules[resolve(host), port] = link

    def kill(self, host: str, port: int) -> None:
        """Reset every connection of a listener and refuse connects, until restore().

        Its own ends are lost at once, those of its clients when the reset arrives.
        """
        self._outages[resolve(host), port] = Outage.KILLED
        for connection in self.connections(host, port):
            connection.kill()

    def silence(self, host: str, port: int) -> None:
        """Make a listener a black hole both ways, until restore(): nothing arrives or answers."""
        self._outages[resolve(host), port] = Outage.SILENT
        for connection in self.connections(host, port):
            connection.set_silent(True)

    def restore(self, host: str, port: int) -> None:
        """End an outage. What silence() held back then arrives, as TCP sends it again."""
        self._outages.pop((resolve(host), port), None)
        for connection in self.connections(host, port):
            connection.set_silent(False)

    def connections(self, host: str | None = None, port: int | None = None) -> list[Connection]:
        """Return the connections open at an end, oldest first; those of one listener if given."""
        every = list(self._connections.values())
        if host is None or port is None:
            return every
        address = (resolve(host), port)
        return [one for one in every if address in {one.dialled, one.listening}]

    @property
    def listeners(self) -> list[Address]:
        return list(self._listeners)

    # What the loop calls

    def listen(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        hosts: list[str | None],
        port: int,
    ) -> VirtualServer:
        """Bind.

        Raises:
            OSError: An address is in use, or no port is free.
        """
        addresses = [(resolve(host), port or self._free_port()) for host in hosts]
        for address in addresses:
            if address in self._listeners:
                msg = (
                    f"error while attempting to bind on address {address!r}: address already in use"
                )
                raise OSError(errno.EADDRINUSE, msg)
        server = VirtualServer(self.loop, factory, addresses, unlisten=self._unlisten)
        for address in addresses:
            self._listeners[address] = server
        return server

    async def connect(
        self,
        factory: Callable[[], P],
        host: str,
        port: int,
        *,
        local_addr: Address | None = None,
    ) -> tuple[asyncio.Transport, P]:
        """Connect.

        Raises:
            ConnectionRefusedError: No listener is there, or a rule or an outage refuses.
            TimeoutError: No answer in 127 s, the kernel's patience.
            socket.gaierror: The host is a name.
            OSError: What `denies` says.
        """
        if (denied := self.denies()) is not None:
            raise denied
        dialled = (resolve(host), port)
        link = self._link_to(dialled)
        bound = await self._shake_hands(dialled, link)
        server = self._listeners[bound]
        protocol = factory()
        stream = streaming(protocol)
        self._connected += 1
        connection = Connection(
            self.traffic,
            link,
            number=self._connected,
            local=self._local(local_addr, dialled),
            dialled=dialled,
            listening=bound,
            contexts=(copy_context(), server.context),
            forget=self._forget,
        )
        self._connections[connection.number] = connection
        self.traffic.record("connect", connection.number, "client")
        waiter: asyncio.Future[None] = self.loop.create_future()
        connection.client.start(stream, waiter=waiter)
        self.loop.call_later(
            link.latency_s, self._accept, connection, server, context=server.context
        )
        try:
            await waiter
        except BaseException:
            connection.client.close()
            raise
        return connection.client, protocol

    async def _shake_hands(self, dialled: Address, link: Link) -> Address:
        """Wait for the answer to a SYN; return the bound address that gave it."""
        round_trip_s = 2 * link.latency_s
        if link.jitter_s:
            round_trip_s += self.traffic.rng.uniform(0.0, link.jitter_s)
        for wait_s in SYN_WAITS_S:
            await asyncio.sleep(round_trip_s)
            bound = self._bound(dialled)
            outage = self._outages.get(dialled) or self._outages.get(bound or dialled)
            if outage is Outage.SILENT or link.connect is Connect.HANG:
                await asyncio.sleep(max(0.0, wait_s - round_trip_s))
                continue
            if bound is None or outage is Outage.KILLED or link.connect is Connect.REFUSE:
                self.traffic.record("refused", 0, "client")
                raise ConnectionRefusedError(
                    errno.ECONNREFUSED, f"Connect call failed {dialled!r} on the virtual network"
                )
            return bound
        self.traffic.record("unreachable", 0, "client")
        raise TimeoutError(errno.ETIMEDOUT, f"no answer from {dialled!r} on the virtual network")

    def _accept(self, connection: Connection, server: VirtualServer) -> None:
        """Give the accepting end its protocol, half a round trip after the connecting one."""
        if connection.upload.is_reset:
            connection.server.discard()
            return
        if not server.is_serving():
            connection.server.discard()
            connection.download.reset(lose=True)
            return
        try:
            protocol = streaming(server.factory())
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # As asyncio does: reported, and the listener goes on.
            self.loop.call_exception_handler(
                {
                    "message": "Error on transport creation for incoming connection",
                    "exception": error,
                }
            )
            connection.server.discard()
            connection.download.reset(lose=True)
            return
        self.traffic.record("accept", connection.number, "server")
        connection.server.start(protocol, server=server)

    def _link_to(self, dialled: Address) -> Link:
        rule = self._rules.get(dialled)
        if rule is None:
            rule = self._rules.get(self._bound(dialled) or dialled, self._link)
        return rule if isinstance(rule, Link) else rule()

    def _bound(self, dialled: Address) -> Address | None:
        """Return the listening address that takes a connect, if any does."""
        host, port = dialled
        for candidate in (host, *WILDCARDS):
            server = self._listeners.get((candidate, port))
            if server is not None and server.is_serving():
                return candidate, port
        return None

    def _local(self, local_addr: Address | None, dialled: Address) -> Address:
        port = EPHEMERAL_PORTS[self._connected % len(EPHEMERAL_PORTS)]
        if local_addr is None:
            return dialled[0], port
        return resolve(local_addr[0]), local_addr[1] or port

    def _free_port(self) -> int:
        taken = {port for _, port in self._listeners}
        for _ in LISTENING_PORTS:
            port = self._next_port
            self._next_port = port + 1 if port + 1 in LISTENING_PORTS else LISTENING_PORTS.start
            if port not in taken:
                return port
        raise OSError(errno.EADDRINUSE, "no listening port is free on the virtual network")

    def _unlisten(self, server: VirtualServer) -> None:
        for address in server.addresses:
            del self._listeners[address]

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)

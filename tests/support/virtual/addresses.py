"""Addresses of the in-memory network, and what stands for a socket."""

import asyncio
import errno
import ipaddress
import random
import socket
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

Address = tuple[str, int]


def resolve(host: str | None) -> str:
    """Return the literal address of a host; every literal address exists.

    Raises:
        socket.gaierror: A name other than localhost.
    """
    if not host:
        return "0.0.0.0"  # noqa: S104 (no real interface is bound)
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise socket.gaierror(
            socket.EAI_NONAME, f"{host!r}: the virtual network has no names but localhost"
        ) from None


def infos(addresses: Iterable[str], port: int) -> list[Any]:
    """Return IPv4 addresses as getaddrinfo does."""
    kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
    return [(*kind, (one, port)) for one in addresses]


class VirtualSocket:
    """The socket of a transport or listener, as far as it can be asked.

    It knows its names, and that of a transport what the kernel would answer to a poll.
    """

    __slots__ = ("_has_arrived", "_own", "_peer")

    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(
        self,
        own: Address,
        peer: Address | None = None,
        has_arrived: Callable[[], bool] = lambda: False,
    ) -> None:
        self._own = own
        self._peer = peer
        self._has_arrived = has_arrived

    @property
    def readable(self) -> bool:
        """Whether something has arrived that was not read, as in a process that stood still."""
        return self._has_arrived()

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self._own[0] else socket.AF_INET

    def getsockname(self) -> Address:
        return self._own

    def getpeername(self) -> Address:
        if self._peer is None:
            raise OSError(errno.ENOTCONN, "a listener has no peer")
        return self._peer

    def fileno(self) -> int:
        """Return -1: there is nothing to select on."""
        return -1

    def setsockopt(self, *_option: object) -> None:
        """Accept any option; none changes the in-memory network."""


# What one connection's wire is like: delays, limits, and the faults planned for it.


class Connect(Enum):
    """What becomes of a connect."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    HANG = "hang"  # No answer: the caller's timeout decides, or the kernel's after 127 s.


@dataclass(frozen=True, slots=True)
class Link:
    """The wire of the connections to one listener.

    Download is towards the side that connected (answers), upload towards the side that accepted.
    """

    latency_s: float = 50e-6  # One-way delay of every byte.
    # Each segment is up to this much later still, drawn uniformly; order is kept.
    jitter_s: float = 0.0
    bytes_per_s: float | None = None  # Line rate of each direction; None is infinite.
    # What one direction holds, in flight or arrived and not read by the peer; beyond it a write
    # stays in the writer's buffer.
    window_bytes: int = 65_536
    # Segments are cut in pieces of 1 to this many bytes, drawn uniformly, each delivered by itself.
    # None: a segment is what one write handed over, and segments that arrived before the reader
    # looks are read as one.
    split_bytes: int | None = None
    # Segments arrive only at multiples of this, those of one period together.
    coalesce_s: float = 0.0
    connect: Connect = Connect.ACCEPT  # What becomes of a connect.
    # Reset the connection once this many bytes were read.
    reset_after_download_bytes: int | None = None
    reset_after_upload_bytes: int | None = None  # The same, of the other direction.
    # Deliver nothing, no FIN and no RST either, once this many bytes were read.
    stall_after_download_bytes: int | None = None
    stall_after_upload_bytes: int | None = None  # The same, of the other direction.
    stall_s: float | None = None  # How long such a stall lasts; None is for ever.

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.jitter_s < 0 or self.coalesce_s < 0:
            raise ValueError(f"a delay is negative: {self}")
        if self.window_bytes < 1 or (self.split_bytes is not None and self.split_bytes < 1):
            raise ValueError(f"a window or a split is under one byte: {self}")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"a line rate is not positive: {self}")


# What the connections of one network share.


class NetworkEvent(NamedTuple):
    """One line of the journal."""

    time_s: float  # Virtual time.
    kind: str  # connect, accept, refused, unreachable, bytes, eof, reset or closed.
    connection: int  # Its number; 0 for a connect that failed.
    end: str  # "client" or "server": the end that noticed.
    num_bytes: int  # Bytes delivered, or 0.


class Traffic:
    """The clock, the random numbers, the counters and the journal of one network."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        abort_resets: bool,
        journal: bool,
    ) -> None:
        self.loop = loop  # Its clock and its timers.
        self.rng = rng  # Draws delays, splits and losses; nothing else does.
        # Whether abort() sends a reset, as with SO_LINGER 0. False is what Linux does by default: a
        # FIN, unless bytes that arrived were not read.
        self.abort_resets = abort_resets
        # Ends of connections that have a protocol and are not lost: a connection open at both ends
        # counts two.
        self.open_connections = 0
        self.bytes_sent = 0  # Bytes taken from writers.
        self.bytes_delivered = 0  # Bytes given to readers.
        # What happened, if asked for.
        self.journal: list[NetworkEvent] | None = [] if journal else None

    def record(self, kind: str, connection: int, end: str, num_bytes: int = 0) -> None:
        """Write a line of the journal, if there is one; see `NetworkEvent`."""
        if self.journal is not None:
            self.journal.append(NetworkEvent(self.loop.time(), kind, connection, end, num_bytes))


# A listener of the in-memory network.


class VirtualServer(asyncio.Server):
    """See asyncio.Server for the public methods; there is no serve_forever().

    wait_closed() waits for the connections too, as in Python 3.12 and later; Python 3.11 returns
    at once, so code that relies on either is wrong on the other, and a wait shows here.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        addresses: list[Address],
        *,
        unlisten: Callable[["VirtualServer"], None],
    ) -> None:
        self._loop = loop
        self._unlisten = unlisten
        self.addresses = addresses
        self.factory = factory
        self.context = copy_context()  # Of the listener.
        self._bound = True
        self._accepting = False
        self._connections = 0
        self._closed: list[asyncio.Future[None]] = []

    def attach(self) -> None:
        self._connections += 1

    def detach(self) -> None:
        self._connections -= 1
        self._wake_if_over()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def is_serving(self) -> bool:
        return self._accepting

    @property
    def sockets(self) -> tuple[Any, ...]:
        """What is bound, each with getsockname(); empty after close()."""
        if not self._bound:
            return ()
        return tuple(VirtualSocket(address) for address in self.addresses)

    async def start_serving(self) -> None:
        if not self._bound:
            raise RuntimeError(f"server {self!r} is closed")
        self._accepting = True
        await asyncio.sleep(0)

    def close(self) -> None:
        """Stop accepting; accepted connections stay."""
        if not self._bound:
            return
        self._bound = self._accepting = False
        self._unlisten(self)
        self._wake_if_over()

    async def wait_closed(self) -> None:
        """Wait until close() was called and the last accepted connection is lost."""
        if self._bound or self._connections:
            waiter = self._loop.create_future()
            self._closed.append(waiter)
            await waiter

    def _wake_if_over(self) -> None:
        if not self._bound and not self._connections:
            for waiter in self._closed:
                if not waiter.done():
                    waiter.set_result(None)
            self._closed.clear()

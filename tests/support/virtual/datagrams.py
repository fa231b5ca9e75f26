"""Datagrams in virtual time, over thin links."""

import asyncio
import errno
import random
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tests.support.virtual.addresses import Address, resolve

# A thin link: a rate, a delay, losses from a seed, and a queue in front of it.


@dataclass(frozen=True, slots=True)
class ThinLinkSettings:
    """One direction of a link."""

    bits_per_s: float = 5e6  # Its rate.
    delay_s: float = 0.025  # From the end of a packet's transmission to its arrival.
    loss: float = 0.005  # The probability that a packet is lost on its way.
    queue_bytes: int = 64_000  # What waits for transmission at most; more is dropped.
    # What the link carries of each packet beside its payload: for UDP over IPv4, 28.
    overhead_bytes: int = 28


class ThinLink:
    """One direction of a link; it knows no clock and sends nothing.

    Attributes:
        carried: Packets that arrive.
        lost: Packets lost on their way.
        dropped: Packets that found the queue full.
    """

    def __init__(self, settings: ThinLinkSettings, rng: random.Random) -> None:
        self.carried = self.lost = self.dropped = 0
        self._settings = settings
        self._rng = rng
        self._free_s = 0.0

    def heal(self) -> None:
        """Lose nothing on the way any more."""
        self._settings = replace(self._settings, loss=0.0)

    def offer(self, size: int, now_s: float) -> float | None:
        """Return when a packet of so many bytes arrives; None if it never does."""
        settings = self._settings
        begin_s = max(now_s, self._free_s)
        if (begin_s - now_s) * settings.bits_per_s / 8 + size > settings.queue_bytes:
            self.dropped += 1
            return None
        self._free_s = begin_s + 8 * (size + settings.overhead_bytes) / settings.bits_per_s
        if self._rng.random() < settings.loss:
            self.lost += 1
            return None
        self.carried += 1
        return self._free_s + settings.delay_s


P = TypeVar("P", bound=asyncio.DatagramProtocol)

_FIRST_PORT = 40_000


class DatagramNetwork:
    """The sockets of one loop.

    Args:
        loop: The loop.
        up: The link from each socket that connects to one that does not.
        down: The link back.
        rng: Decides what is lost.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        up: ThinLinkSettings,
        down: ThinLinkSettings,
    ) -> None:
        self.loop = loop
        self.up, self.down = ThinLink(up, rng), ThinLink(down, rng)
        self._sockets: dict[Address, VirtualDatagrams] = {}
        self._next_port = _FIRST_PORT

    def bind(
        self, protocol: P, local: tuple[str, int] | None, remote: tuple[str, int] | None
    ) -> "tuple[VirtualDatagrams, P]":
        """Open a socket.

        Raises:
            OSError: The address is in use.
        """
        host, port = ("127.0.0.1", 0) if local is None else local[:2]
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        address = (resolve(host), port)
        if address in self._sockets:
            raise OSError(errno.EADDRINUSE, f"{address} is in use")
        to = None if remote is None else (resolve(remote[0]), remote[1])
        transport = self._sockets[address] = VirtualDatagrams(self, protocol, address, to)
        protocol.connection_made(transport)
        return transport, protocol

    def carry(self, data: bytes, sender: "VirtualDatagrams", to: Address) -> None:
        link = self.down if sender.remote is None else self.up
        arrival_s = link.offer(len(data), self.loop.time())
        if arrival_s is not None:
            self.loop.call_at(arrival_s, self._deliver, data, sender.local, to)

    def forget(self, transport: "VirtualDatagrams") -> None:
        self._sockets.pop(transport.local, None)

    def _deliver(self, data: bytes, sender: Address, to: Address) -> None:
        transport = self._sockets.get(to)
        if transport is not None:
            transport.protocol.datagram_received(data, sender)


class VirtualDatagrams(asyncio.DatagramTransport):
    """One socket."""

    def __init__(
        self,
        network: DatagramNetwork,
        protocol: asyncio.DatagramProtocol,
        local: Address,
        remote: Address | None,
    ) -> None:
        super().__init__()
        self.protocol = protocol
        self.local = local  # Its address.
        self.remote = remote  # The only one that it sends to; None for any.
        self._network = network
        self._closing = False

    def sendto(self, data: Any, addr: Any = None) -> None:
        to = addr or self.remote
        assert to is not None, "no address"
        if not self._closing:
            self._network.carry(bytes(data), self, to)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return its own address, or that of the other side."""
        return {"sockname": self.local, "peername": self.remote}.get(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self._network.forget(self)

    def abort(self) -> None:
        self.close()


# A thin link on a real machine: a relay between clients and one UDP port.

UdpAddress = tuple[Any, ...]


class UdpRelay(asyncio.DatagramProtocol):
    """Relays datagrams to a port and back, as late and as seldom as a link would.

    Args:
        port: Where they are sent to, on loopback.
        seed: Decides what is lost.
        up: The link to the port.
        down: The link back.
    """

    def __init__(
        self, port: int, *, seed: int, up: ThinLinkSettings, down: ThinLinkSettings
    ) -> None:
        rng = random.Random(seed)
        self.up, self.down = ThinLink(up, rng), ThinLink(down, rng)
        self._to = port
        self._loop = asyncio.get_running_loop()
        self._own: asyncio.DatagramTransport
        self._clients: dict[UdpAddress, _Onward] = {}

    async def start(self) -> int:
        transport, _ = await self._loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self._own = transport
        port: int = transport.get_extra_info("sockname")[1]
        return port

    def close(self) -> None:
        for onward in self._clients.values():
            onward.close()
        self._own.close()

    def datagram_received(self, data: bytes, addr: UdpAddress) -> None:
        onward = self._clients.get(addr)
        if onward is None:
            onward = self._clients[addr] = _Onward(self, addr)
            onward.opening = self._loop.create_task(self._open(onward))
        arrival_s = self.up.offer(len(data), self._loop.time())
        if arrival_s is not None:
            self._loop.call_at(arrival_s, onward.send, data)

    def back(self, data: bytes, client: UdpAddress) -> None:
        arrival_s = self.down.offer(len(data), self._loop.time())
        if arrival_s is not None:
            self._loop.call_at(arrival_s, self._send_back, data, client)

    def _send_back(self, data: bytes, client: UdpAddress) -> None:
        if not self._own.is_closing():
            self._own.sendto(data, client)

    async def _open(self, onward: "_Onward") -> None:
        await self._loop.create_datagram_endpoint(
            lambda: onward, remote_addr=("127.0.0.1", self._to)
        )


class _Onward(asyncio.DatagramProtocol):
    """The relay's socket for one client."""

    opening: asyncio.Task[None]

    def __init__(self, relay: UdpRelay, client: UdpAddress) -> None:
        self._relay = relay
        self._client = client
        self._transport: asyncio.DatagramTransport | None = None
        self._waiting: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        for data in self._waiting:
            transport.sendto(data)
        self._waiting.clear()

    def datagram_received(self, data: bytes, addr: UdpAddress) -> None:
        del addr
        self._relay.back(data, self._client)

    def send(self, data: bytes) -> None:
        if self._transport is None:
            self._waiting.append(data)
        elif not self._transport.is_closing():
            self._transport.sendto(data)

    def close(self) -> None:
        self.opening.cancel()
        if self._transport is not None:
            self._transport.close()

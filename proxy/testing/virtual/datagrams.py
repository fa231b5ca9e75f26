"""Datagrams in virtual time, over thin links."""

import asyncio
import errno
import random
from typing import Any, TypeVar

from balanceroute.proxy.testing.virtual.address import Address, resolve
from balanceroute.proxy.testing.virtual.thin_link import ThinLink, ThinLinkSettings

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
        """Send a datagram on its way."""
        link = self.down if sender.remote is None else self.up
        arrival_s = link.offer(len(data), self.loop.time())
        if arrival_s is not None:
            self.loop.call_at(arrival_s, self._deliver, data, sender.local, to)

    def forget(self, transport: "VirtualDatagrams") -> None:
        """Close a socket."""
        self._sockets.pop(transport.local, None)

    def _deliver(self, data: bytes, sender: Address, to: Address) -> None:
        transport = self._sockets.get(to)
        if transport is not None:
            transport.protocol.datagram_received(data, sender)


class VirtualDatagrams(asyncio.DatagramTransport):
    """One socket.

    Attributes:
        local: Its address.
        remote: The only one that it sends to; None for any.
    """

    def __init__(
        self,
        network: DatagramNetwork,
        protocol: asyncio.DatagramProtocol,
        local: Address,
        remote: Address | None,
    ) -> None:
        super().__init__()
        self.protocol = protocol
        self.local = local
        self.remote = remote
        self._network = network
        self._closing = False

    def sendto(self, data: Any, addr: Any = None) -> None:
        """Send a datagram."""
        to = addr or self.remote
        assert to is not None, "no address"
        if not self._closing:
            self._network.carry(bytes(data), self, to)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return its own address, or that of the other side."""
        return {"sockname": self.local, "peername": self.remote}.get(name, default)

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self._closing

    def close(self) -> None:
        """Close it."""
        self._closing = True
        self._network.forget(self)

    def abort(self) -> None:
        """Close it."""
        self.close()

"""A thin link on a real machine: a relay between clients and one UDP port."""

import asyncio
import random
from typing import Any

from balanceroute.proxy.testing.virtual.thin_link import ThinLink, ThinLinkSettings

Address = tuple[Any, ...]


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
        self._clients: dict[Address, _Onward] = {}

    async def start(self) -> int:
        """Listen on loopback; return the port."""
        transport, _ = await self._loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self._own = transport
        port: int = transport.get_extra_info("sockname")[1]
        return port

    def close(self) -> None:
        """Close every socket."""
        for onward in self._clients.values():
            onward.close()
        self._own.close()

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Take a datagram of a client."""
        onward = self._clients.get(addr)
        if onward is None:
            onward = self._clients[addr] = _Onward(self, addr)
            onward.opening = self._loop.create_task(self._open(onward))
        arrival_s = self.up.offer(len(data), self._loop.time())
        if arrival_s is not None:
            self._loop.call_at(arrival_s, onward.send, data)

    def back(self, data: bytes, client: Address) -> None:
        """Take a datagram for a client."""
        arrival_s = self.down.offer(len(data), self._loop.time())
        if arrival_s is not None:
            self._loop.call_at(arrival_s, self._send_back, data, client)

    def _send_back(self, data: bytes, client: Address) -> None:
        if not self._own.is_closing():
            self._own.sendto(data, client)

    async def _open(self, onward: "_Onward") -> None:
        await self._loop.create_datagram_endpoint(
            lambda: onward, remote_addr=("127.0.0.1", self._to)
        )


class _Onward(asyncio.DatagramProtocol):
    """The relay's socket for one client."""

    opening: asyncio.Task[None]

    def __init__(self, relay: UdpRelay, client: Address) -> None:
        self._relay = relay
        self._client = client
        self._transport: asyncio.DatagramTransport | None = None
        self._waiting: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        for data in self._waiting:
            transport.sendto(data)
        self._waiting.clear()

    def datagram_received(self, data: bytes, addr: Address) -> None:
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

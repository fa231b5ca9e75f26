"""A listener of the in-memory network."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from balanceroute.proxy.testing.virtual.address import Address, VirtualSocket


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
        self.context = copy_context()  # Of who listens.
        self._bound = True
        self._accepting = False
        self._connections = 0
        self._closed: list[asyncio.Future[None]] = []

    def attach(self) -> None:
        """Count an accepted connection."""
        self._connections += 1

    def detach(self) -> None:
        """Count a lost connection."""
        self._connections -= 1
        self._wake_if_over()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop."""
        return self._loop

    def is_serving(self) -> bool:
        """Return whether connections are accepted."""
        return self._accepting

    @property
    def sockets(self) -> tuple[Any, ...]:
        """What is bound, each with getsockname(); empty after close()."""
        if not self._bound:
            return ()
        return tuple(VirtualSocket(address) for address in self.addresses)

    async def start_serving(self) -> None:
        """Accept connections from now on."""
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

"""httpx as the proxy uses it: one client for all small exchanges, replaced when it may have a leak.

An exchange that is cancelled can leave a connection in httpx's pool that nothing takes out again
(https://github.com/encode/httpcore/issues/1093, seen with httpcore 1.0.9); once the pool is full of
them, no exchange begins any more. And every probe that takes too long is cancelled. So after a
cancellation a fresh client is used, and the old one closes when its other exchanges are over.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.live.engines.http_client import fetch_body, fetch_status

if TYPE_CHECKING:
    import httpx


@dataclass(slots=True, eq=False)
class _Borrowed:
    """A client, and the exchanges that use it now."""

    client: "httpx.AsyncClient"
    exchanges: int = 0


class HttpxFetcher:
    """Fetches with httpx: not hot, and well kept.

    Args:
        make_client: Makes a client.
    """

    def __init__(self, make_client: Callable[[], "httpx.AsyncClient"]) -> None:
        self._make_client = make_client
        self._current = _Borrowed(make_client())
        self._closing: set[asyncio.Task[None]] = set()

    async def status(self, url: str) -> int:
        """GET a page; return its status. Raises FetchError."""
        async with self._borrow() as client:
            return await fetch_status(client, url)

    async def body(self, url: str, *, max_bytes: int) -> bytes:
        """GET a page; return its body. Raises FetchError."""
        async with self._borrow() as client:
            return await fetch_body(client, url, max_bytes=max_bytes)

    def renew(self) -> None:
        """Use a fresh client from the next exchange on."""
        before, self._current = self._current, _Borrowed(self._make_client())
        self._close_if_left(before)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._current.client.aclose()
        await asyncio.gather(*self._closing)

    @asynccontextmanager
    async def _borrow(self) -> AsyncIterator["httpx.AsyncClient"]:
        borrowed = self._current
        borrowed.exchanges += 1
        try:
            yield borrowed.client
        except asyncio.CancelledError:
            if borrowed is self._current:
                self._current = _Borrowed(self._make_client())
            raise
        finally:
            borrowed.exchanges -= 1
            self._close_if_left(borrowed)

    def _close_if_left(self, borrowed: _Borrowed) -> None:
        if borrowed is not self._current and not borrowed.exchanges:
            # A task: this one may be cancelled.
            task = asyncio.get_running_loop().create_task(borrowed.client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

"""How the proxy makes its small exchanges with engines: health probes, scrapes, discovery."""

from typing import Protocol


class Fetcher(Protocol):
    """The client for the small exchanges with engines."""

    async def status(self, url: str) -> int:
        """GET a page; return its status. Raises FetchError."""
        ...

    async def body(self, url: str, *, max_bytes: int) -> bytes:
        """GET a page; return its body. Raises FetchError."""
        ...

"""Looks at all engines, again and again; nothing is ever sent to a model."""

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from balanceroute.proxy.audit.observation import Look
from balanceroute.proxy.audit.pages import PageError, RankPage, read_page
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import WireError

_MAX_PAGE_BYTES = 16 << 20
_MOST_FAILURES = 10
"""Looks in a row that may fail."""


class Watcher:
    """Looks at a fleet."""

    async def watch(
        self, *, seconds: float, interval_s: float, progress: Callable[[int], None]
    ) -> list[Look]:
        """Look every so often for some time; a look that fails does not count.

        Raises:
            ConfigError: The fleet cannot be read.
        """
        loop = asyncio.get_running_loop()
        begin_s, looks, failures = loop.time(), list[Look](), 0
        while loop.time() - begin_s < seconds:
            next_s = loop.time() + interval_s
            try:
                looks.append(await self.look())
                failures = 0
            except (TimeoutError, OSError, WireError, PageError) as error:
                failures += 1
                if not looks or failures >= _MOST_FAILURES:
                    raise ConfigError(str(error) or "no answer in time") from error
            progress(len(looks))
            await asyncio.sleep(max(0.0, next_s - loop.time()))
        return looks

    async def look(self) -> Look:
        """Look once. Raises TimeoutError, OSError, WireError, PageError."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""
        raise NotImplementedError


class Engines(Watcher):
    """The engines of a fleet.

    Args:
        prefill: Addresses of prefillers, http://host:port, with or without /metrics.
        decode: Those of decode engines; their ranks in the order of the pages are the fleet's.
        timeout_s: Of one page.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], *, timeout_s: float) -> None:
        self._prefill = {url: endpoint_of(url) for url in prefill}
        self._decode = {url: endpoint_of(url) for url in decode}
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Close the connections."""
        for endpoint in (*self._prefill.values(), *self._decode.values()):
            endpoint.close()

    async def look(self) -> Look:
        """Look at all engines once."""
        decode, prefill = await asyncio.gather(
            self._pages(self._decode), self._pages(self._prefill)
        )
        return Look(asyncio.get_running_loop().time(), decode, prefill)

    async def _pages(self, endpoints: dict[str, Endpoint]) -> dict[str, RankPage]:
        pages = await asyncio.gather(
            *(self._page(url, endpoint) for url, endpoint in endpoints.items())
        )
        return {
            url if len(page) == 1 else f"{url}@{rank}": told
            for url, page in zip(endpoints, pages, strict=True)
            for rank, told in page.items()
        }

    async def _page(self, url: str, endpoint: Endpoint) -> dict[str, RankPage]:
        body = await metrics_page(url, endpoint, self._timeout_s)
        try:
            return read_page(body)
        except PageError as error:
            raise PageError(f"{url}: {error}") from None


async def metrics_page(url: str, endpoint: Endpoint, timeout_s: float) -> bytes:
    """Return the page at a URL, or at its /metrics if it has no path.

    Raises:
        TimeoutError, OSError, WireError: It does not come.
        PageError: Its status is not 200.
    """
    path = urlsplit(url).path.rstrip("/") or "/metrics"
    answer = await fetch(
        endpoint, b"GET", path.encode(), [], b"", timeout_s=timeout_s, max_bytes=_MAX_PAGE_BYTES
    )
    if answer.status != 200:
        raise PageError(f"{url}: status {answer.status}")
    return answer.body


def endpoint_of(url: str) -> Endpoint:
    """Return the connections to a URL. Raises ConfigError: it is none."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"{url!r} is not http://host:port or http://host:port/metrics")
    try:
        return Endpoint(parts.hostname, parts.port or 80)
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from None

"""Looks at all engines, again and again; nothing is ever sent to a model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from balanceroute.proxy.audit.observation import Look
from balanceroute.proxy.audit.pages import PageError, RankPage, read_page
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.page_client import UnansweredError, root_of

if TYPE_CHECKING:
    from balanceroute.proxy.page_client import PageClient

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
            except PageError as error:
                failures += 1
                if not looks or failures >= _MOST_FAILURES:
                    raise ConfigError(str(error)) from error
            progress(len(looks))
            await asyncio.sleep(max(0.0, next_s - loop.time()))
        return looks

    async def look(self) -> Look:
        """Look once. Raises PageError."""
        raise NotImplementedError


class Engines(Watcher):
    """The engines of a fleet.

    Args:
        prefill: Addresses of prefillers, http://host:port, with or without /metrics.
        decode: Those of decode engines; their ranks in the order of the pages are the fleet's.
        pages: Asks them.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], pages: "PageClient") -> None:
        self._prefill = {url: metrics_url("--prefill", url) for url in prefill}
        self._decode = {url: metrics_url("--decode", url) for url in decode}
        self._pages = pages

    async def look(self) -> Look:
        """Look at all engines once."""
        decode, prefill = await asyncio.gather(self._look(self._decode), self._look(self._prefill))
        return Look(asyncio.get_running_loop().time(), decode, prefill)

    async def _look(self, urls: Mapping[str, str]) -> dict[str, RankPage]:
        pages = await asyncio.gather(*(self._page(*one) for one in urls.items()))
        return {
            url if len(page) == 1 else f"{url}@{rank}": told
            for url, page in zip(urls, pages, strict=True)
            for rank, told in page.items()
        }

    async def _page(self, url: str, at: str) -> dict[str, RankPage]:
        try:
            return read_page(await self._pages.page(at))
        except (UnansweredError, PageError) as error:
            raise PageError(f"{url}: {error}") from None


def metrics_url(flag: str, url: str) -> str:
    """Return where a server's metrics are: at its URL, or at /metrics if that has no path.

    Raises:
        ConfigError: It is none.
    """
    try:
        root = root_of(url)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None
    return root if urlsplit(root).path else f"{root}/metrics"

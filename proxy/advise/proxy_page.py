"""A fleet as the proxy before it tells of it, in place of the pages of all its engines."""

import asyncio
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from balanceroute.proxy.audit.looking import Watcher, metrics_url
from balanceroute.proxy.audit.observation import Look
from balanceroute.proxy.audit.pages import PageError, RankPage, checked
from balanceroute.proxy.page_client import UnansweredError

if TYPE_CHECKING:
    from balanceroute.proxy.page_client import PageClient

_PREFIX = "balanceroute_"
_BATCH = "batch_limit"
# By our field, the metric of each rank.
_RANK = {"kv_tokens": "rank_kv_tokens", "running": "rank_bound_requests"}
_PREFILLER = "prefiller_probes"
_WAITING = "live_requests"
_WANTED = tuple(
    (_PREFIX + name).encode() for name in (*_RANK.values(), _PREFILLER, _WAITING, _BATCH)
)


class ProxyPages(Watcher):
    """The metrics of a proxy, at its public or its admin address.

    Attributes:
        batch: Slots of a rank, once it was looked at.
    """

    def __init__(self, url: str, pages: "PageClient") -> None:
        self.batch = 1
        self._url, self._at = url, metrics_url("--proxy", url)
        self._pages = pages

    async def look(self) -> Look:
        """Look at the page once."""
        try:
            page = await self._pages.page(self._at)
            look, self.batch = read_proxy_page(page, asyncio.get_running_loop().time())
        except (UnansweredError, PageError) as error:
            raise PageError(f"{self._url}: {error}") from None
        return look


def read_proxy_page(page: bytes, time_s: float) -> tuple[Look, int]:
    """Return what a page of /metrics says of the fleet at a time, and the slots of a rank.

    What waits in the proxy counts as waiting at the engines, in equal parts. Pooled requests wait for
    ranks. Those before prefill wait for prefillers if all of these have work, else for ranks: the pool
    is full.

    Raises:
        PageError: It is not a page of this proxy.
    """
    lines = [line for line in page.splitlines() if line.startswith(_WANTED)]
    decode: dict[str, RankPage] = {}
    prefill: dict[str, RankPage] = {}
    waiting: dict[str, float] = {}
    batch = 0
    try:
        for family in text_string_to_metric_families(b"\n".join(lines).decode() + "\n"):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                value = checked(sample.name, sample.value)
                if name == _BATCH:
                    batch = int(value)
                elif name == _WAITING:
                    waiting[sample.labels.get("state", "")] = value
                elif name == _PREFILLER:
                    prefill[sample.labels["name"]] = RankPage(running=value)
                for field, metric in _RANK.items():
                    if name == metric:
                        told = decode.setdefault(sample.labels["name"], RankPage())
                        setattr(told, field, value)
    except (ValueError, KeyError) as error:
        raise PageError(f"not a page of the proxy's metrics: {error}") from error
    if not decode or not batch or any(one.kv_tokens is None for one in decode.values()):
        raise PageError(
            "not a page of the proxy's metrics: it tells no ranks (balanceroute_rank_..)"
        )
    pooled, queued = waiting.get("pooled", 0.0), waiting.get("queued", 0.0)
    if not all(told.running for told in prefill.values()):
        pooled, queued = pooled + queued, 0.0
    for told in decode.values():
        told.waiting = pooled / len(decode)
    for told in prefill.values():
        told.waiting = queued / len(prefill)
    return Look(time_s, decode, prefill), batch

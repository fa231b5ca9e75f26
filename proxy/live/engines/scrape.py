"""How full the engines' KV caches are, by their /metrics pages.

Rules:
- An instance whose scrape fails, or whose last good one is older than three intervals, counts as
  full: a 1.0 keeps new work away from an engine of which nothing is known.
- Of a new instance nothing is known yet. It counts as empty until three intervals have passed, so
  that the start is not held up.
- If no instance of a role can be scraped, the fault is the scraping's. They then count as empty: the
  scheduler's ledger goes on limiting what it sends, where a 1.0 would stop all service. Health
  checks find out whether an engine lives.
- A value that does not change is as good as any.
- At most 500 scrapes begin in a second. Of more instances each is scraped less often, and the interval
  in these rules is that longer one.

Times are float seconds of the clock given.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from heapq import nsmallest
from operator import attrgetter

from balanceroute.proxy.core.setting import seconds
from balanceroute.proxy.live.engines.engine_gauges import (
    EngineGauges,
    MetricsPageError,
    parse_engine_gauges,
)
from balanceroute.proxy.live.engines.engine_url import FetchError
from balanceroute.proxy.live.engines.instances import Target

STALE_INTERVALS = 3
"""A scrape older than this many intervals says nothing any more."""

_UNKNOWN_UTILISATION = 1.0
# Of the interval, so that scrapes of many instances do not fall together.
_JITTER = 0.1
_TICK_S = 0.1
# Scrapes that begin in a tick, so that the loop is free between them, and with that in a second.
_MOST_DUE = 50
_MOST_IN_S = _MOST_DUE / _TICK_S


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How instances are scraped."""

    scrape_interval_s: float = seconds(1.0, "between two readings of an engine's metrics")
    scrape_timeout_s: float = seconds(1.0, "for such a reading")


@dataclass(slots=True, eq=False)
class _Watch:
    """One instance. `known_s` is when something was last known, `gauges` what, if it still holds."""

    target: Target
    next_scrape_s: float
    known_s: float
    gauges: EngineGauges | None = None
    scraping: bool = False
    new: bool = True
    reported: float = 0.0
    late_pulls: int | None = None


class Scraper:
    """Scrapes instances. `run` does it for ever; `on_utilisation` is called with every new value.

    Args:
        fetch: GETs a URL and returns the body of a 200; raises FetchError if there is none.
        on_utilisation: Called when the utilisation of an instance changes; it begins at 0.
        on_gauges: Called with the gauges of every good scrape, and with how many KV caches of the instance
            were pulled after their lease had ended, since the scrape before.
        on_error: Called with what a scrape raised beyond `FetchError`; it counts as failed.
    """

    def __init__(
        self,
        settings: ScrapeSettings,
        *,
        fetch: Callable[[str], Awaitable[bytes]],
        on_utilisation: Callable[[Target, float], None],
        on_gauges: Callable[[Target, EngineGauges, int], None],
        on_failure: Callable[[Target, str], None],
        on_error: Callable[[str, Exception], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._on_utilisation = on_utilisation
        self._on_gauges = on_gauges
        self._on_failure = on_failure
        self._on_error = on_error
        self._clock = clock
        self._rng = rng
        self._watches: dict[Target, _Watch] = {}
        self._ticked_s: float | None = None  # None until `run` ticks.

    def add(self, target: Target) -> None:
        assert target not in self._watches
        now_s = self._clock()
        self._watches[target] = _Watch(target, now_s, known_s=now_s)

    def remove(self, target: Target) -> None:
        self._watches.pop(target, None)

    def gauges(self) -> dict[Target, EngineGauges]:
        """Return the gauges of the instances that were scraped well and lately."""
        watches = self._watches.values()
        return {watch.target: watch.gauges for watch in watches if watch.gauges is not None}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as scrapes:
            while True:
                for target in self.due():
                    scrapes.create_task(self._scrape(target))
                await asyncio.sleep(_TICK_S)

    def due(self) -> list[Target]:
        """Return the instances to scrape now, each of which then awaits its `scraped` or `failed`.

        Changes of utilisation are reported here, not in those, so that the cost of a scrape does not
        grow with the number of instances.
        """
        now_s = self._clock()
        if self._ticked_s is not None:
            # While this process stood still it could not scrape: that time ages nothing.
            lost_s = now_s - self._ticked_s - _TICK_S
            if lost_s > _TICK_S:
                for watch in self._watches.values():
                    watch.known_s += lost_s
        self._ticked_s = now_s
        interval_s = max(self._settings.scrape_interval_s, len(self._watches) / _MOST_IN_S)
        due = []
        for watch in self._watches.values():
            if now_s - watch.known_s > STALE_INTERVALS * interval_s:
                watch.new = False
                watch.gauges = None
            if not watch.scraping and watch.next_scrape_s <= now_s:
                due.append(watch)
        if len(due) > _MOST_DUE:
            due = nsmallest(_MOST_DUE, due, key=attrgetter("next_scrape_s"))
        for watch in due:
            watch.scraping = True
        self._report()
        return [watch.target for watch in due]

    async def again(self, target: Target) -> None:
        """Scrape an instance now, and take nothing of a scrape that began earlier."""
        watch = self._watches.get(target)
        if watch is not None:
            self._watches[target] = replace(watch, scraping=True)
            await self._scrape(target)

    async def _scrape(self, target: Target) -> None:
        watch = self._watches.get(target)
        if watch is None:  # Removed since it was due.
            return
        gauges: EngineGauges | None = None
        reason = ""
        try:
            async with asyncio.timeout(self._settings.scrape_timeout_s):
                page = await self._fetch(f"{target.url}/metrics")
            gauges = parse_engine_gauges(page)
        except TimeoutError:
            reason = f"no page within {self._settings.scrape_timeout_s:g} s"
        except (FetchError, MetricsPageError) as error:
            reason = str(error)
        except asyncio.CancelledError:
            watch.scraping = False
            raise
        except Exception as error:
            # Whatever it is, it must not end the scrapes of all other instances.
            reason = str(error)
            self._on_error("scrape", error)
        # It may have been removed meanwhile, and even added again.
        if self._watches.get(target) is watch:
            try:
                if gauges is None:
                    self.failed(target, reason)
                else:
                    self.scraped(target, gauges)
            except Exception as error:
                self._on_error("scrape", error)

    def scraped(self, target: Target, gauges: EngineGauges) -> None:
        watch = self._watches[target]
        watch.new = False
        watch.gauges = gauges
        watch.known_s = self._clock()
        self._schedule(watch)
        count, before, late = gauges.late_pulls, watch.late_pulls, 0
        watch.late_pulls = count
        # Those of before this proxy, if any, are not its own.
        if count is not None and before is not None:
            # A count that shrank began again with its engine.
            late = count - before if count >= before else count
        self._on_gauges(target, gauges, late)

    def failed(self, target: Target, reason: str) -> None:
        watch = self._watches[target]
        watch.gauges = None
        self._schedule(watch)
        self._on_failure(target, reason)

    def _schedule(self, watch: _Watch) -> None:
        watch.scraping = False
        spread = self._rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        watch.next_scrape_s = self._clock() + self._settings.scrape_interval_s * spread

    def _report(self) -> None:
        """Report every utilisation that has changed since it was reported last."""
        seeing = {watch.target.role for watch in self._watches.values() if watch.gauges is not None}
        for watch in list(self._watches.values()):
            if watch.gauges is not None:
                value = watch.gauges.kv_cache_usage
            elif watch.new or watch.target.role not in seeing:
                value = 0.0
            else:
                value = _UNKNOWN_UTILISATION
            if value != watch.reported:
                watch.reported = value
                try:
                    self._on_utilisation(watch.target, value)
                except Exception as error:
                    self._on_error("scrape", error)

"""The slots of the decode ranks: what the settings say, and what the engines' metrics show."""

import logging
from typing import TYPE_CHECKING, NamedTuple

from balanceroute.proxy.live.engines.instances import Role, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.engine_gauges import EngineGauges

_log = logging.getLogger(__name__)

# Scrapes in a row at which an engine runs equally many while others wait in it.
_SCRAPES = 5
# Above it, memory may be what they wait for.
_FULL = 0.8
_MESSAGE = (
    "a decode rank runs fewer requests than --batch while others wait in it: "
    "its max_num_seqs must be smaller"
)


class _Seen(NamedTuple):
    running: float
    scrapes: int


class RankSlots:
    """Warns once of each engine whose ranks run fewer requests at a time than they are sent.

    vLLM's metrics do not tell `max_num_seqs`. But a rank that has reached it runs as many requests at
    every scrape, while others wait and blocks are free. Requests whose KV cache is on its way wait as
    well; then those that run change from one scrape to the next.

    Args:
        batch: `--batch`.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._seen: dict[Target, _Seen] = {}
        self._told: set[Target] = set()

    def scraped(self, target: Target, gauges: "EngineGauges") -> None:
        """Take in what an engine says."""
        if target.role is not Role.DECODE or target in self._told:
            return
        full = gauges.waiting >= 1.0 and 0.0 < gauges.running < self._batch
        if not full or gauges.kv_cache_usage > _FULL:
            self._seen.pop(target, None)
            return
        before = self._seen.get(target)
        same = before is not None and before.running == gauges.running
        scrapes = before.scrapes + 1 if before is not None and same else 1
        self._seen[target] = _Seen(gauges.running, scrapes)
        if scrapes >= _SCRAPES:
            self._told.add(target)
            del self._seen[target]
            fields = {"url": target.url, "batch": self._batch, "running": gauges.running}
            _log.warning(_MESSAGE, extra={"fields": fields | {"waiting": gauges.waiting}})

"""The KV memory of the engines: what the settings say, and what the engines' metrics say."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Role, Target

_log = logging.getLogger(__name__)
# Another limit makes all decisions begin anew, and an engine may report one at each scrape. The least time
# between two limits bounds that: when less fits, and when more does.
_LESS_S, _MORE_S = 0.5, 5.0


class KvCapacity:
    """How many KV tokens fit on a rank, and on a prefiller.

    Args:
        given: `--rank-kv-tokens`; None if it is not given.
        used: Whether what the ranks say is used where nothing is given.
        prefiller_share: How full a prefiller may be; None for no limit by it.

    Attributes:
        prefiller_tokens: KV tokens that each prefiller may hold: the least that one says, times that
            share. None if none says.
        tokens: KV tokens that fit on each rank: the given number, or the least that an engine says. None
            for no limit.
        least_tokens: The least that a rank's engine says, else the given number. It limits nothing.
    """

    def __init__(
        self, given: int | None, *, used: bool, prefiller_share: float | None = None
    ) -> None:
        self.tokens = self.least_tokens = given
        self.prefiller_tokens: int | None = None
        self._prefiller_share = prefiller_share
        self._given = given
        self._used = used and given is None
        self._sizes: dict[Target, int] = {}
        self._warned: set[Target] = set()
        self._settled_s = -_MORE_S
        self._new = self._less = False

    def scraped(self, target: Target, gauges: EngineGauges) -> None:
        """Take in what an engine says; see `settle`."""
        tokens, before = gauges.kv_tokens, self._sizes.get(target)
        if tokens is None or tokens == before:
            return
        self._sizes[target] = tokens
        self._new, self._less = True, self._less or before is None or tokens < before
        too_much = self._given is not None and self._given > tokens
        if too_much and target.role is Role.DECODE and target not in self._warned:
            self._warned.add(target)
            fields = {"url": target.url, "kv_tokens": tokens, "rank_kv_tokens": self._given}
            message = "a decode rank holds less than --rank-kv-tokens, and will preempt requests"
            _log.warning(message, extra={"fields": fields})

    def is_due(self, now_s: float) -> bool:
        """Return whether to `settle`: some time after the last time, if an engine has reported something new."""
        wait_s = _LESS_S if self._less else _MORE_S
        if not self._new or now_s < self._settled_s + wait_s:
            return False
        self._settled_s, self._new, self._less = now_s, False, False
        return True

    def settle(self, is_there: Callable[[Target], bool]) -> bool:
        """Find what fits by the reports of the engines that are there; return whether that has changed."""
        self._sizes = {one: size for one, size in self._sizes.items() if is_there(one)}
        self._warned = set(filter(is_there, self._warned))
        before = self.tokens, self.prefiller_tokens
        self.least_tokens = self._least(Role.DECODE, self.least_tokens)
        if self._used:
            self.tokens = self.least_tokens
        if self._prefiller_share is not None:
            least = self._least(Role.PREFILL, None)
            share = None if least is None else max(1, int(self._prefiller_share * least))
            self.prefiller_tokens = self.prefiller_tokens if share is None else share
        if self.tokens != before[0]:
            _log.info("a decode rank's KV tokens", extra={"fields": {"kv_tokens": self.tokens}})
        return (self.tokens, self.prefiller_tokens) != before

    def _least(self, role: Role, unknown: int | None) -> int | None:
        return min((size for one, size in self._sizes.items() if one.role is role), default=unknown)


# The slots of the decode ranks: what the settings say, and what the engines' metrics show.

# Scrapes in a row at which an engine runs equally many requests while more wait in it.
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

    vLLM's metrics do not have `max_num_seqs`. But a rank that has reached it runs as many requests at
    every scrape, while more wait and blocks are free. Requests whose KV cache is on its way wait as
    well; then those that run change from one scrape to the next.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._seen: dict[Target, _Seen] = {}
        self._warned: set[Target] = set()

    def scraped(self, target: Target, gauges: EngineGauges) -> None:
        if target.role is not Role.DECODE or target in self._warned:
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
            self._warned.add(target)
            del self._seen[target]
            fields = {"url": target.url, "batch": self._batch, "running": gauges.running}
            _log.warning(_MESSAGE, extra={"fields": fields | {"waiting": gauges.waiting}})

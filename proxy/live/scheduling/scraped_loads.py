"""What scrapes report to the scheduler: foreign requests on the decode ranks, and the loads of prefillers.

A request is foreign if another proxy or client sent it. A page of metrics is a little older than this proxy's
ledger, and an engine may run a request for a moment after its client has left. So this proxy's own requests
count as of this reading or the one before, whichever were more. While it has any, foreign ones count only once
three readings in a row show some, and a change of them once two do. While it has none, the first reading of a
rank counts, and later ones once two in a row show some. A proxy that is alone finds nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from balanceroute.proxy.core.events import EngineLoad, Event, ForeignLoad, PrefillerScraped, RankId
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Target
from balanceroute.proxy.live.engines.scrape import STALE_INTERVALS

_log = logging.getLogger(__name__)
_UNKNOWN = 1 << 62
_READINGS = 3  # Until foreign requests count.
_CHANGED = 2  # Until a change of their number does.


@dataclass(slots=True)
class _Reading:
    """The latest reading of one rank."""

    own: int = 0  # Slots of this proxy's requests then.
    # Slots beyond those of this proxy, at the latest readings, the last one last.
    beyond: tuple[int, ...] = (_UNKNOWN,) * _READINGS
    reported: int = 0  # The foreign slots that the scheduler got last.
    failed: int = 0  # Readings that failed since.


class ForeignLoadMeter:
    """Reports the foreign load of each rank to the scheduler, at every reading while there is some."""

    def __init__(
        self,
        instances: Instances,
        own_slots: Callable[[RankId], int],
        feed: Callable[[Event], None],
    ) -> None:
        self._instances = instances
        self._own_slots = own_slots
        self._feed = feed
        self._readings: list[_Reading] = []
        # The ranks that the scheduler knows to have foreign load.
        self._shared: set[RankId] = set()

    def scraped(self, target: Target, gauges: EngineGauges) -> None:
        for rank in self._ranks_of(target):
            load = load_of(rank, gauges)
            if load is None:
                continue
            slots = round(load.running + load.waiting)
            foreign = self._foreign_slots(rank.id, slots)
            kv_tokens = 0
            if foreign and gauges.kv_tokens is not None:
                # Those of the last readings may be more than are there now.
                share = foreign / max(foreign, slots)
                kv_tokens = round(load.kv_usage * gauges.kv_tokens * share)
            self._report(rank, foreign, kv_tokens)

    def forget(self) -> None:
        """Let the next reading of each rank count by itself: all its load was foreign until now."""
        for reading in self._readings:
            reading.own, reading.beyond = 0, (_UNKNOWN,) * _READINGS

    def failed(self, target: Target) -> None:
        """Note that an engine could not be read; its last report holds for some readings."""
        for rank in self._ranks_of(target):
            reading = self._readings[rank.id]
            reading.failed += 1
            if reading.failed >= STALE_INTERVALS:
                reading.beyond = (_UNKNOWN,) * _READINGS
                self._report(rank, 0, 0)

    def _foreign_slots(self, rank: RankId, slots: int) -> int:
        reading, own = self._readings[rank], self._own_slots(rank)
        most = max(own, reading.own)
        beyond = max(0, slots - most)
        reading.own, reading.beyond, reading.failed = own, (*reading.beyond[1:], beyond), 0
        if not most:
            # A short request of its own may have come and gone since, and still be on the page.
            return min(reading.beyond[-_CHANGED:])
        latest = reading.beyond[-_CHANGED:] if reading.reported else reading.beyond
        # Between the least and the most of them it may be as before.
        return min(max(reading.reported, min(latest)), max(latest))

    def _report(self, rank: Rank, slots: int, kv_tokens: int) -> None:
        reading = self._readings[rank.id]
        if not slots and not reading.reported:
            return
        reading.reported = slots
        self._feed(ForeignLoad(rank.id, slots, kv_tokens))
        before = bool(self._shared)
        (self._shared.add if slots else self._shared.discard)(rank.id)
        shared = bool(self._shared)
        if shared != before:
            message = "others send to the decode ranks too: their slots are shared"
            fields = {"fields": {"rank": rank.name, "requests": slots}}
            _log.warning(message if shared else "no others send to the decode ranks", extra=fields)

    def _ranks_of(self, target: Target) -> list[Rank]:
        new = len(self._instances.ranks) - len(self._readings)
        self._readings += [_Reading() for _ in range(new)]
        return [rank for rank in self._instances.of(target) if isinstance(rank, Rank)]


def load_of(rank: Rank, gauges: EngineGauges) -> EngineLoad | None:
    """Return a rank's load on a page; None if the page does not tell the ranks apart."""
    if rank.header is not None:
        return gauges.loads.get(rank.header.decode())
    # It may have any number: that in its data-parallel group.
    return next(iter(gauges.loads.values())) if len(gauges.loads) == 1 else None


def feed_loads(
    instances: Instances, feed: Callable[[Event], None], target: Target, gauges: EngineGauges
) -> None:
    """Report to the scheduler how busy a prefiller is; do nothing for a decode engine."""
    load = EngineLoad(gauges.waiting, gauges.running, gauges.kv_cache_usage)
    for instance in instances.of(target):
        if isinstance(instance, Prefiller):
            feed(PrefillerScraped(instance.id, load))


# How far the ranks are, for requests whose tokens this proxy does not see: by the counters of their engines.

_STALE_S = 5.0  # A reading says nothing of the time beyond this.
_EMPTY = 3  # Readings without a request until it is believed that there is none.


@dataclass(slots=True)
class RankPace:
    """Counts the rounds of one rank, see `RankPaces`."""

    output_tokens: float = -1.0  # As read last; negative before.
    running: float = 0.0
    read_s: float = 0.0
    rounds: float = 0.0  # Made since this process began to read.
    rounds_per_s: float = 0.0
    empty_s: tuple[float, ...] = ()  # When the latest readings without a request were.

    def read(self, output_tokens: float, running: float, now_s: float) -> None:
        """Take in what the rank has made in all, and how many sequences it runs."""
        made, elapsed_s = output_tokens - self.output_tokens, now_s - self.read_s
        if self.output_tokens >= 0.0 and made >= 0.0 and elapsed_s > 0.0:
            # At least what runs had a token each; requests that came and ended are not seen.
            rounds = made / max(1.0, (self.running + running) / 2)
            self.rounds += rounds
            self.rounds_per_s = rounds / elapsed_s
        self.output_tokens, self.running, self.read_s = output_tokens, running, now_s

    def rounds_at(self, now_s: float) -> float:
        return self.rounds + self.rounds_per_s * min(now_s - self.read_s, _STALE_S) * (
            self.running > 0.0
        )


class RankPaces:
    """Counts the rounds of each rank: in a round every sequence that it runs emits one token.

    Between two readings a rank goes on as it did before the last one.
    """

    def __init__(self, instances: Instances, clock: Callable[[], float]) -> None:
        self._instances = instances
        self._clock = clock
        self.block_tokens: int | None = None  # Tokens of a KV block, as the ranks report.
        self._paces: dict[RankId, RankPace] = {}

    def scraped(self, target: Target, gauges: EngineGauges) -> None:
        """Take in a page of metrics."""
        now_s = self._clock()
        for rank in self._instances.of(target):
            if not isinstance(rank, Rank):
                continue
            self.block_tokens = gauges.block_tokens
            load, total = load_of(rank, gauges), _output_of(rank, gauges)
            if load is None or total is None:
                continue
            pace = self._paces.setdefault(rank.id, RankPace())
            busy = load.running + load.waiting > 0.0
            pace.empty_s = () if busy else (*pace.empty_s[1 - _EMPTY :], now_s)
            pace.read(total, load.running, now_s)

    def rounds(self, rank: RankId) -> float:
        """Return how many rounds a rank has made, since it was first read; 0 if it reports nothing."""
        pace = self._paces.get(rank)
        return 0.0 if pace is None else pace.rounds_at(self._clock())

    def empty_since_s(self, rank: RankId) -> float | None:
        """Return since when a rank has no request, by three readings in a row; None if it may have one."""
        pace = self._paces.get(rank)
        return None if pace is None or len(pace.empty_s) < _EMPTY else pace.empty_s[0]


def _output_of(rank: Rank, gauges: EngineGauges) -> float | None:
    if rank.header is not None:
        return gauges.output_tokens.get(rank.header.decode())
    counts = gauges.output_tokens
    return next(iter(counts.values())) if len(counts) == 1 else None

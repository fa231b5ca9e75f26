"""The bound of a fleet, and how many instances of each role its load needs.

`balanceroute advise` asks it of a fleet that was seen for some minutes, or simulated, and a proxy of its own
fleet once a second.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import ceil, exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from balanceroute.proxy.core.events import PrefillerId, RankId
    from balanceroute.proxy.core.scheduler import Scheduler

# Beyond these shares a role has no reserve, or the barrier's loss is worth a change.
_BUSY = 0.9
_WORTH_IT = 0.1


class Bound(Enum):
    """The scarce resource."""

    PREFILL = "prefill"
    DECODE = "decode"
    MEMORY = "memory"  # Ranks have free slots, and no room for KV caches.
    BARRIER = "barrier"  # Ranks are full, and wait for one another.
    NOTHING = "nothing"


MEANINGS = {
    Bound.PREFILL: "prefill: prefillers are busy, and ranks have free slots",
    Bound.MEMORY: "KV memory: the ranks have free slots, and are full of KV caches",
    Bound.DECODE: "decode: the ranks are full and evenly loaded",
    Bound.BARRIER: "the barrier: the ranks are full, and wait for the fullest at every step",
    Bound.NOTHING: "nothing: both roles have reserves",
}
"""In words."""


@dataclass(frozen=True, slots=True)
class BoundVerdict:
    """The bound of a fleet, and the ratio of its roles that would balance it."""

    bound: Bound
    # At which both roles would be equally busy; None where one did nothing.
    prefillers_per_rank: float | None


def judge(
    *,
    prefillers: int,
    ranks: int,
    prefill_busy: float | None,
    slots_share: float,
    idle: float,
    kv_share: float = 0.0,
) -> BoundVerdict:
    """Return the bound of a fleet.

    `prefill_busy` is the mean share of prefillers that have work, None if unknown; `slots_share` that of the
    slots in use; `idle` the share of rank time lost at the barrier; `kv_share` the share of the KV memory in
    use, 0 if unknown.
    """
    if slots_share >= _BUSY:
        bound = Bound.BARRIER if idle >= _WORTH_IT else Bound.DECODE
    elif kv_share >= _BUSY:
        bound = Bound.MEMORY
    elif prefill_busy is not None and prefill_busy >= _BUSY:
        bound = Bound.PREFILL
    else:
        bound = Bound.NOTHING
    wanted = None
    if prefill_busy and slots_share:
        wanted = prefillers * prefill_busy / (ranks * slots_share)
    return BoundVerdict(bound, wanted)


# How many instances of each role a load needs, from how busy those are that there are.


@dataclass(frozen=True, slots=True)
class Need:
    """Of one role."""

    now: int  # Instances that there are.
    # Instances that the present load keeps busy all the time; None if unknown.
    work: float | None
    # Instances that it would keep busy for the share that is aimed at; None likewise.
    wanted: int | None
    at_least: bool  # Whether more may be needed: the role is full, so its load is not seen whole.


@dataclass(frozen=True, slots=True)
class Needs:
    """Of both roles, with the present bound of the fleet."""

    verdict: BoundVerdict
    prefillers: Need
    ranks: Need


def needs(
    verdict: BoundVerdict,
    *,
    prefillers: int,
    ranks: int,
    prefill_work: float | None,
    decode_work: float,
    busy: float,
) -> Needs:
    """Return how many instances are wanted, of which a share `busy` of the time or slots is used.

    `prefill_work` and `decode_work` are the prefillers that the load keeps busy all the time, and the
    ranks that what runs and waits keeps full.
    """
    return Needs(
        verdict,
        _need_of(prefillers, prefill_work, busy, full=verdict.bound is Bound.PREFILL),
        _need_of(ranks, decode_work, busy, full=verdict.bound in (Bound.DECODE, Bound.MEMORY)),
    )


def _need_of(now: int, work: float | None, busy: float, *, full: bool) -> Need:
    if work is None:
        return Need(now, None, None, at_least=False)
    wanted = max(1, ceil(round(work / busy, 6)))
    return Need(now, work, max(wanted, now + 1) if full else wanted, at_least=full)


# The needs of a changing load: they follow averages, grow at once, and shrink late.

_AVERAGED_S = 45.0
# The needs are the highest of the last so many seconds; the bound changes once a new one has held for so
# long.
_HELD_S, _SETTLED_S = 180.0, 15.0


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The load of a scheduler at an instant."""

    time_s: float
    prefillers: int  # Those that are there, and likewise ranks.
    ranks: int
    batch: int  # Slots of a rank.
    busy: int  # Prefillers that have work.
    arrived: int  # Requests so far.
    requests: int  # Those that have not ended.
    before: int  # Those of them that are not prefilled.
    running: int  # Slots in use.
    kv_share: float  # Of the ranks' KV memory in use; 0 if its size is unknown.
    idle: float  # Share of rank time lost at the barrier.


def sample_of(
    scheduler: "Scheduler",
    *,
    time_s: float,
    arrived: int,
    prefillers: "Collection[PrefillerId]",
    ranks: "Collection[RankId]",
    kv_tokens: int | None,
    idle: float,
) -> FleetSample:
    """Return the present load of a scheduler.

    Args:
        scheduler: The scheduler.
        time_s: By any clock.
        arrived: Requests so far.
        prefillers: Those that are there.
        ranks: Likewise.
        kv_tokens: That fit on a rank; None if unknown.
        idle: Share of rank time lost at the barrier.
    """
    budgets, ledger = scheduler.prefillers, scheduler.ledger
    used = sum(int(ledger.loads[rank]) for rank in ranks)
    return FleetSample(
        time_s,
        len(prefillers),
        len(ranks),
        scheduler.config.batch_limit,
        sum(budgets.prefills[one] > 0 or budgets.direct[one] > 0 for one in prefillers),
        arrived,
        len(scheduler.requests),
        scheduler.prefill_queue.waiting + budgets.prefilling,
        sum(int(ledger.bound[rank]) for rank in ranks),
        used / (kv_tokens * len(ranks)) if kv_tokens and ranks else 0.0,
        idle,
    )


class _Average:
    """The exponential average of the latest values, from the first one on."""

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float, seconds: float) -> None:
        kept = exp(-seconds / _AVERAGED_S)
        self._sum = kept * self._sum + (1.0 - kept) * value
        self._weight = kept * self._weight + (1.0 - kept)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


class _Held:
    """The most that was wanted lately."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, int]] = deque()

    def most(self, time_s: float, wanted: int) -> int:
        latest = self._latest
        while latest and latest[-1][1] <= wanted:
            latest.pop()
        latest.append((time_s, wanted))
        while latest[0][0] < time_s - _HELD_S:
            latest.popleft()
        return latest[0][1]


class LoadFollower:
    """Follows the load of one fleet.

    Where a role is full, the needed work is the work at it, times the rate of arrivals over the rate at which
    the role takes requests (Little's law), however many wait. The target share leaves room to work off the
    waiting ones.

    Args:
        busy: The target share of the time, or of the slots.

    Attributes:
        bound: The bound of the fleet.
        prefillers: Those that are wanted; None before the first look.
        ranks: Likewise.
        flips: Prefillers that should be decode engines; negative for the other way round.
    """

    def __init__(self, busy: float = 0.8) -> None:
        self.bound = Bound.NOTHING
        self.prefillers: int | None = None
        self.ranks: int | None = None
        self.flips = 0
        self._share = busy
        self._before: FleetSample | None = None
        self._arriving, self._begun, self._bound = _Average(), _Average(), _Average()
        self._busy, self._running, self._kv = _Average(), _Average(), _Average()
        self._held = _Held(), _Held()
        self._other, self._other_s = Bound.NOTHING, 0.0

    def look(self, now: FleetSample) -> None:
        """Follow the present load."""
        last, self._before = self._before, now
        if last is None or now.time_s <= last.time_s or not (now.prefillers and now.ranks):
            return
        seconds = now.time_s - last.time_s
        arrived = now.arrived - last.arrived
        ended = arrived - (now.requests - last.requests)
        prefilled = arrived - (now.before - last.before)
        for average, value in (
            (self._arriving, arrived / seconds),
            # Requests that fill an idle role are no more than it can do.
            (self._bound, max(0, ended + now.running - last.running) / seconds),
            (self._begun, max(0, prefilled + now.busy - last.busy) / seconds),
            (self._busy, now.busy),
            (self._running, now.running),
            (self._kv, now.kv_share),
        ):
            average.add(value, seconds)
        self._judge(now)

    def _judge(self, now: FleetSample) -> None:
        arriving, busy, running = self._arriving.value, self._busy.value, self._running.value
        slots = now.ranks * now.batch
        verdict = judge(
            prefillers=now.prefillers,
            ranks=now.ranks,
            prefill_busy=busy / now.prefillers,
            slots_share=running / slots,
            idle=now.idle,
            kv_share=self._kv.value,
        )
        prefill_work, decode_work = busy, running
        if verdict.bound is Bound.PREFILL and self._begun.value:
            prefill_work *= max(1.0, arriving / self._begun.value)
        if verdict.bound in (Bound.DECODE, Bound.BARRIER, Bound.MEMORY) and self._bound.value:
            decode_work *= max(1.0, arriving / self._bound.value)
        # As many ranks as the KV caches fill, if these fill them first.
        of_slots = decode_work / now.batch
        of_memory = self._kv.value * now.ranks * decode_work / running if running else 0.0
        wanted = needs(
            verdict,
            prefillers=now.prefillers,
            ranks=now.ranks,
            prefill_work=prefill_work,
            decode_work=max(of_slots, of_memory),
            busy=self._share,
        )
        assert wanted.prefillers.wanted is not None
        assert wanted.ranks.wanted is not None
        self.prefillers = self._held[0].most(now.time_s, wanted.prefillers.wanted)
        self.ranks = self._held[1].most(now.time_s, wanted.ranks.wanted)
        spare, lacking = now.prefillers - self.prefillers, self.ranks - now.ranks
        self.flips = max(0, min(spare, lacking)) - max(0, min(-spare, -lacking))
        if verdict.bound is not self._other:
            self._other, self._other_s = verdict.bound, now.time_s
        if now.time_s - self._other_s >= _SETTLED_S:
            self.bound = self._other

"""The two-stage rule that BR-0 and BR-H share.

One call per round: Stage 1 while slots abound, where only the rank of each request is chosen;
Stage 2 once slots are scarce, where each rank chooses its requests. `two_stage_round` has what the
stages share, `reservation` the subsets and the ranks that make room for a large request that is
late.

docs/scheduling.md explains the rule, and gives the reason of each difference from the paper.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import compress
from operator import attrgetter

import numpy as np

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.policies.reservation import Reservations, best_choice
from balanceroute.proxy.core.policies.two_stage_round import Round, TwoStageSettings, sizes
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.ranks import Assignment, Fleet
from balanceroute.proxy.core.subset import discounts, lasting_discount
from balanceroute.proxy.core.waiting import Pool, PoolEntry

# The paper's stages, where ours differ. Paper: Algorithms 2 and 3.


def fill_longest_queues(work: Round) -> None:
    """Stage 1: the rank with most free slots takes the entry with the best F."""
    fleet = work.fleet
    while len(work.pool) and fleet.free_slots.sum() > work.settings.theta:
        rank = int(fleet.free_slots.argmax())  # On a tie the lowest.
        room = fleet.room(rank)
        candidates = [e for e in work.allowed(rank) if e.kv_tokens <= room]
        if not candidates:
            return
        scores = work.balance.scores(rank, sizes(candidates))
        work.admit(candidates[int(scores.argmax())], rank)


def largest(work: Round, rank: int) -> list[PoolEntry]:
    """Return the candidates of Stage 2: the K largest entries that may go to `rank`."""
    by_size = sorted(work.allowed(rank), key=lambda e: (-e.kv_tokens, e.request))
    return by_size[: work.settings.window]


# Below saturation: a large newcomer waits a moment if it would overflow every rank.
#
# While slots are free, nobody behind it has to wait for it, and what it costs is its own moment.
# What it saves is the step time of everybody: a rank often frees the room within some steps. Many
# requests with long steps fill the slots in the end, so that without the hold all of them would
# wait.
#
# So it pays where slots are about to run out; where they never do, it only lengthens TTFT. A
# burst fills most slots for a moment at either load: what tells the two apart is how full the
# fleet was lately.

# Decisions that the mean covers: with 8 ranks x 16 slots two turnovers of the fleet.
_LATELY = 256
# Weight of the mean beside the moment. At 1.2 and 1.0 of the Mooncake trace's rate, two prefillers: the
# moment alone, from 3/4 on, leaves 20.1 % of idle time and a p99 wait of 0.12 s; from 2/3 on 18.8 % and
# 0.39 s. The mean alone comes too late for what it should prevent.
_MEAN_SHARE = 0.7
_BUSY = 2 / 3


class RankOccupancy:
    """The share of the open ranks' slots that is taken, now and over the latest decisions."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._decisions = 0

    def is_high(self, fleet: Fleet) -> bool:
        """Note a decision; return whether holds pay."""
        is_open: list[bool] = fleet.is_open.tolist()
        if sum(is_open) < 2:
            return False  # It makes no other rank wait.
        taken: int = sum(compress(fleet.bound.tolist(), is_open))
        slots = taken + fleet.free
        if not slots:
            return False
        self._decisions = min(self._decisions + 1, _LATELY)
        self._mean += (taken / slots - self._mean) / self._decisions
        return _MEAN_SHARE * self._mean + (1.0 - _MEAN_SHARE) * taken / slots > _BUSY


def is_held(work: Round, entry: PoolEntry, rank: int, now_ns: int) -> bool:
    """Return whether `entry` waits: on `rank`, its best one, it costs more than it fills."""
    if now_ns >= entry.since_ns + work.settings.hold_ns:
        return False
    (score,) = work.balance.scores_to_envelope(rank, np.array([entry.kv_tokens], np.float64))
    return bool(score < 0.0)


# Stage 1, slots abound: only the rank of each request is open.
#
# Every pooled request gets a slot now, or in a moment, see `hold`. The largest goes first, the
# classic rule for even sums, each to the rank where its F is best.


def place_overdue(work: Round, now_ns: int) -> None:
    """Admit entries past their deadline, oldest first, each where it scores best."""
    # The deadline bounds the wait of entries that never fit, whatever it costs in balance; near the
    # end of a lease it does so only up to what a repeated prefill costs. Affinity may not raise that.
    work.place(work.pool.overdue(now_ns))


def place_all(work: Round, now_ns: int, *, may_hold: bool) -> int | None:
    """Admit the oldest entries, the largest of them first.

    Returns:
        When the first hold ends; None if no entry is held.
    """
    free = work.fleet.free
    # If all entries fit, there is nothing to choose. Otherwise the last theta slots are left to
    # Stage 2, which chooses the entries as well.
    fits = work.pool.slots <= free
    entries = _oldest(work, free if fits else max(0, free - work.settings.theta))
    entries.sort(key=largest_first)
    if not (fits and may_hold):
        work.place(entries, affinity=work.affinity)
        return None
    held = work.place(
        entries, lambda entry, rank: is_held(work, entry, rank, now_ns), work.affinity
    )
    if not held:
        return None
    return min(entry.since_ns for entry in held) + work.settings.hold_ns


def largest_first(entry: PoolEntry) -> tuple[int, int]:
    """Return the key of the order of placement; ties go by arrival."""
    return -entry.kv_tokens, entry.request


def _oldest(work: Round, slots: int) -> list[PoolEntry]:
    """Return the oldest entries that together need at most `slots` slots."""
    entries: list[PoolEntry] = []
    for entry in work.pool.first(slots):
        slots -= entry.slots
        if slots < 0:
            break
        entries.append(entry)
    return entries


# No choice: one rank has free slots, and there is room on it for everything that waits.
#
# So it is in a fleet of one rank until its slots are taken. Stage 1 would come to the same, at
# the cost of projected loads that decide nothing.

_KV_TOKENS, _RESTRICTED = attrgetter("kv_tokens"), attrgetter("restricted")


def fill_only_rank(fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment] | None:
    """Admit everything that waits; None, with nothing admitted, if there is a choice.

    Not where requests may be held.

    Args:
        fleet: The ranks; at least one has a free slot.
        pool: What waits.
        now_ns: For deadlines: an entry that is late may have to go first, or not at all.
    """
    (ranks,) = fleet.free_slots.nonzero()
    if len(ranks) > 1 or fleet.room_after is not None:
        return None
    rank = RankId(ranks.item(0))
    if pool.slots > fleet.free_slots.item(rank) or pool.overdue(now_ns):
        return None
    entries = pool.first(len(pool.entries))
    fits = sum(map(_KV_TOKENS, entries)) <= fleet.free_kv_tokens.item(rank)
    if not fits or any(map(_RESTRICTED, entries)):
        return None
    if len(entries) > 1:
        entries.sort(key=largest_first)
    requests = [entry.request for entry in entries]
    pool.admit_all(requests)
    return [Assignment(request, rank) for request in requests]


# Stage 2, slots are scarce: the ranks with a free slot choose, in order of their safe margin.
#
# Each takes the subset of the K oldest entries that maximises F. If no subset scores above 0, it
# takes the best single entry anyway. A rank that is reserved makes room instead, see
# `reservation`.


def choose_subsets(work: Round, reservations: Reservations) -> None:
    """Serve the ranks in order of safe margin until slots or entries run out.

    Paper: Algorithms 2 and 3.
    """
    if not len(work.pool):
        return  # Stage 1 took everything; the order of the ranks costs a look at each.
    fleet = work.fleet
    order = _Order(work)
    while len(work.pool) and (rank := order.roomiest()) is not None:
        chosen = _choose(work, rank, order, reservations)
        for entry in chosen:
            # Entries of several slots each may need more than are free, and entries that grow more
            # memory than they hold now.
            if fleet.free_slots[rank] > 0 and entry.kv_tokens <= fleet.room(rank):
                work.admit(entry, rank)
        # A rank that takes nothing is done: room only shrinks during a round.
        if chosen and fleet.free_slots[rank] > 0:
            order.serve_again(rank)


def _choose(work: Round, rank: int, order: "_Order", reservations: Reservations) -> list[PoolEntry]:
    if work.settings.paper:
        room = work.fleet.room(rank)
        candidates = [e for e in largest(work, rank) if e.kv_tokens <= room]
        if not candidates:
            return []
        free = np.ones(len(candidates), np.bool_)
        return best_choice(
            work, rank, candidates, work.balance.scores(rank, sizes(candidates)), free
        )
    return reservations.choose(work, rank, order.upcoming)


class _Order:
    """The ranks to serve: the largest safe margin first, then most free slots, then the lowest.

    An admission changes the margin of its rank alone, unless it raises the envelope.
    """

    def __init__(self, work: Round) -> None:
        self._work = work
        self._margins = work.balance.safe_margins
        self._heap = [self._place(rank) for rank in work.fleet.free_slots.nonzero()[0].tolist()]
        heapify(self._heap)

    def roomiest(self) -> int | None:
        """Take out the first rank; None if no rank is left."""
        if self._margins is not self._work.balance.safe_margins:
            self._margins = self._work.balance.safe_margins
            self._heap = [self._place(rank) for _, _, rank in self._heap]
            heapify(self._heap)
        return heappop(self._heap)[2] if self._heap else None

    def upcoming(self, count: int) -> list[int]:
        """Return about the next `count` ranks, in any order."""
        # The first places of a heap hold no others for long.
        return [rank for _, _, rank in self._heap[:count]]

    def serve_again(self, rank: int) -> None:
        """Put back a rank that took something."""
        heappush(self._heap, self._place(rank))

    def _place(self, rank: int) -> tuple[float, int, int]:
        return -self._margins.item(rank), -self._work.fleet.free_slots.item(rank), rank


# One call per round: the stages in their order, and the discount that follows the turnover.


def ignore_stage(stage: str) -> None:
    """Do nothing: the stages are not timed."""
    del stage


class TwoStage:
    """BR-0 without a projection, BR-H with one.

    Args:
        settings: The parameters; `settings.weights.steps` has one weight per projected step.
        projection: The projected loads; None for the present step only.
        on_stage: Called with the name of each stage as it ends, so that a driver can time them.

    Attributes:
        reservations: The reserved ranks.
    """

    slots_beyond_batch = 0

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        on_stage: Callable[[str], None] = ignore_stage,
    ) -> None:
        self.projection = projection
        self.next_decision_ns: int | None = None
        self._settings = settings
        self._gamma = settings.gamma  # As lowered last, at this turnover.
        self._per_step = -1.0
        self.reservations = Reservations()
        self._on_stage = on_stage
        self._occupancy = RankOccupancy()

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        self.next_decision_ns = None
        may_hold = self._settings.hold_ns > 0 and self._occupancy.is_high(fleet)
        # The usual case in saturation; it costs no projection.
        if not len(fleet.free_slots.nonzero()[0]):  # A third of what `count_nonzero` takes.
            return []
        if not (self._settings.paper or may_hold):
            forced = fill_only_rank(fleet, pool, now_ns)
            if forced is not None:
                self._on_stage("stage_1")
                return forced
        self._discount(fleet)
        work = Round(self._settings, self.projection, fleet, pool)
        self._on_stage("projection")
        if self._settings.paper:
            fill_longest_queues(work)
        else:
            # Overdue entries first, while every rank still has its slots.
            place_overdue(work, now_ns)
            self.next_decision_ns = place_all(work, now_ns, may_hold=may_hold)
            self.reservations.prune(work)
        self._on_stage("stage_1")
        # The free slots would go to the entries that are held.
        if self.next_decision_ns is None:
            choose_subsets(work, self.reservations)
        self._on_stage("stage_2")
        return work.assignments

    def _discount(self, fleet: Fleet) -> None:
        """Make the weights follow the turnover."""
        base = self._settings.gamma
        if base is None:
            return
        assert self.projection is not None
        per_step = fleet.turnover.per_step
        if per_step == self._per_step:
            return
        self._per_step = per_step
        # Rounded to hundredths, so most rounds change nothing.
        gamma = lasting_discount(base, per_step / len(fleet.loads))
        if gamma != self._gamma:
            self._gamma = gamma
            steps = discounts(self.projection.horizon_steps, gamma)
            weights = replace(self._settings.weights, steps=steps)
            self._settings = replace(self._settings, weights=weights)


__all__ = ["TwoStage", "TwoStageSettings", "ignore_stage"]

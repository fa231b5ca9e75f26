"""Ranks that make room for a large entry that is late.

A request that overflows a rank makes all the others wait until the rank has shed the overflow, or
the request has left. It costs less to make room on one rank first: a **reserved** rank takes only the
smallest entries until the overflow is tolerable. While it does so, it alone is idle.

**When is an overflow tolerable?** Let a reserved rank shed v tokens per step (its slots are freed, and
replaced by small entries). To shed one token more of the overflow x takes 1 / v steps, in which the
rank stands s - x below the others. It spares each of the G - 1 others a token for as long as the
overflow would have lasted: x / v steps if the request stays, its residence R if that is shorter, and
with exponential residences R (1 - exp(-x / (v R))). So both together cost least where

    (G - 1) v R (1 - exp(-x / (v R))) = s - x.

The entry is admitted once the left side is no more than the right side and the entry's credit. With a
long residence and no credit that is x <= s / G: F without the target is not negative. With a short
one, as on traces whose large prompts have short outputs, the overflow is gone before room could be
made, and the entry is admitted at once. The credit grows with every overtaking, so that no entry
waits for ever, however large.

**Who may reserve?** An entry is **late** by the admissions beyond its turn, first come, first served,
in lengths of the pool. From a quarter of a pool on it may reserve the rank that has most room at the
moment, provided that this is enough of its size: all of it, less 40 % per pool of lateness. An empty
rank has all the room that it will ever have, so it takes a late entry at once.
"""

from collections.abc import Callable
from functools import partial
from math import exp
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.policies.two_stage_round import Candidates, Round
from balanceroute.proxy.core.subset import best_subset
from balanceroute.proxy.core.waiting import PoolEntry

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.core.projection import Outlook


# Stage 2's choice for one rank: the best subset of the candidates, else the best single one.


def best_choice(
    work: Round,
    rank: int,
    candidates: list[PoolEntry],
    scores: NDArray[np.float64],
    free: NDArray[np.bool_],
) -> list[PoolEntry]:
    """Return what `rank` takes of the candidates; [] if none may be taken.

    Args:
        work: The round.
        rank: Has a free slot.
        candidates: In order of the pool.
        scores: float64[n], F of each alone, with its credit and affinity.
        free: bool[n], which of them fit and may be taken.
    """
    fleet = work.fleet
    slots = fleet.free_slots.item(rank)
    if slots > 1:
        places = free.nonzero()[0]
        taken = [candidates[place] for place in places.tolist()]
        room = int(fleet.free_kv_tokens[rank])
        # A candidate larger than the free memory is possible only on an empty rank; then just one
        # entry is admitted.
        if len(taken) > 1 and room >= max(entry.kv_tokens for entry in taken):
            choice = _Choice(work, rank, taken, min(slots, len(taken)), room)
            chosen = choice.best(scores[places])
            if chosen:
                return chosen
    # Also if the best score is negative: a free slot left empty would starve the entries that never
    # fit. On a tie `argmax` returns the first candidate.
    best = int(np.where(free, scores, -np.inf).argmax())
    return [candidates[best]] if free[best] else []


class _Choice:
    """Subsets of the candidates of one rank.

    F depends on the sum alone, and a solver that knows only sums cannot weigh what else an entry counts.
    But the oldest entry has been overtaken at least as often as any other, so its credit is the largest.
    So two calls are enough: one for the best subset, one for the best subset with the oldest entry and
    its credit. Where tokens that a rank need not pull have a price there is a third one, with the entry that
    scores most alone.
    """

    def __init__(
        self, work: Round, rank: int, candidates: list[PoolEntry], slots: int, room: int
    ) -> None:
        self._credit = work.credit_each * candidates[0].overtaken
        self._candidates = candidates
        self._totals = [entry.kv_tokens for entry in candidates]
        self._score = partial(work.balance.score, rank)
        self._peak = work.balance.peak(rank)
        self._slots, self._room = slots, room
        affinity = work.affinity
        self._worth = None if affinity is None else affinity.on(rank, candidates)

    def best(self, scores: NDArray[np.float64]) -> list[PoolEntry]:
        """Return the subset with the best F, or [] if none scores above 0.

        `scores` are float64[n], those of the entries alone.
        """
        free = best_subset(self._totals, self._slots, self._peak, self._score, max_total=self._room)
        best = self._score(free.total) + self._worth_of(free.indices)
        indices = free.indices
        for place, credit in self._forced(scores):
            value, others = self._with(place, credit)
            if value > 0.0 and value > best:
                best, indices = value, (place, *others)
        return [self._candidates[index] for index in indices]

    def _forced(self, scores: NDArray[np.float64]) -> list[tuple[int, float]]:
        """Return the entries that a subset is tried with, and their credit."""
        forced = [(0, self._credit)] if self._credit > 0.0 else []
        if self._worth is not None and self._worth.max() > 0.0:
            best = int(scores.argmax())
            credit = scores.item(best) - self._score(self._totals[best]) - self._worth.item(best)
            forced.append((best, credit))
        return forced

    def _with(self, place: int, credit: float) -> tuple[float, tuple[int, ...]]:
        """Return the value of the best subset with an entry, and the other entries of it."""
        # F relative to that entry alone: its size shifts the peak and reduces the room.
        totals, score = self._totals, self._score
        first = totals[place]
        alone = score(first)
        rest = best_subset(
            totals[:place] + totals[place + 1 :],
            self._slots - 1,
            max(self._peak - first, 0.0),
            lambda total: score(first + total) - alone,
            max_total=self._room - first,
        )
        others = tuple(index + (index >= place) for index in rest.indices)
        worth = self._worth_of((place, *others))
        return score(first + rest.total) + credit + worth, others

    def _worth_of(self, indices: tuple[int, ...]) -> float:
        return 0.0 if self._worth is None else float(self._worth[list(indices)].sum())


# In lengths of the pool; any value from 0.15 to 0.35 gives the same results within their errors.
_LATE = 0.25
# Lateness at which an entry may reserve any rank. Flat in idle time from 2 to 3; the p99 wait rises by
# a tenth from one to the other.
_ANY_RANK = 2.5


class Reservations:
    """The reserved ranks. They outlast a round; each ends when its entry leaves the pool.

    Attributes:
        of_rank: The entry for which each reserved rank makes room.
    """

    def __init__(self) -> None:
        self.of_rank: dict[int, RequestId] = {}
        # The same entries, another set after each change.
        self._reserved: frozenset[RequestId] = frozenset()

    def prune(self, work: Round) -> None:
        """End the reservations whose entry has left the pool, or whose rank is closed."""
        if not self.of_rank:
            return
        is_open = work.fleet.is_open
        self.of_rank = {
            rank: request
            for rank, request in self.of_rank.items()
            if request in work.pool and rank < len(is_open) and is_open[rank]
        }
        self._reserved = frozenset(self.of_rank.values())

    def choose(
        self, work: Round, rank: int, upcoming: Callable[[int], list[int]]
    ) -> "list[PoolEntry]":
        """Return what `rank` takes of its candidates; [] for nothing.

        Args:
            work: The round.
            rank: Has a free slot.
            upcoming: Returns about the next so many ranks that choose.
        """
        candidates = work.candidates(rank)
        entries = candidates.entries
        if not entries:
            return []
        own = self.of_rank.get(rank)
        # One that avoids the rank now, or is no candidate any more, has no use for it.
        if own is not None and candidates.place_of(own) is None:
            del self.of_rank[rank]
            self._reserved = frozenset(self.of_rank.values())
        reserved = work.among(candidates, self._reserved)
        view = _View(work, rank, candidates, work.outlook(rank, candidates, upcoming), reserved)
        if rank not in self.of_rank and not self._reserve(work, rank, view):
            return view.best(work, rank)
        place = candidates.place_of(self.of_rank[rank])
        assert place is not None
        entry = entries[place]
        # An empty rank has nothing left to shed.
        if entry.kv_tokens <= view.room and (
            not work.fleet.bound[rank] or _tolerable(work, entry, view.overflow(place))
        ):
            return [entry]
        others = view.free_of_others()
        # The smallest, so that the departures make room.
        smallest = int(np.where(others, candidates.sizes, np.inf).argmin())
        return [entries[smallest]] if others[smallest] else []

    def _reserve(self, work: Round, rank: int, view: "_View") -> bool:
        """Reserve `rank` for the latest candidate that may; return whether there is one."""
        if not np.count_nonzero(view.is_late):
            return False
        # True above False: late, and neither.
        wanting = view.is_late > (view.reserved | view.fills())
        if not np.count_nonzero(wanting):
            return False
        late = view.candidates.beyond_turn / len(work.pool)
        enough = (1.0 - late / _ANY_RANK) * view.candidates.sizes
        wanting &= work.balance.safe_margins[rank] >= enough
        if not np.count_nonzero(wanting):
            return False
        latest = int(np.where(wanting, late, -np.inf).argmax())
        request = self.of_rank[rank] = view.candidates.entries[latest].request
        self._reserved |= {request}
        # A copy: what it was is used again for other ranks.
        view.reserved = view.reserved.copy()
        view.reserved[latest] = True
        return True


class _View:
    """The n candidates of one rank, in order of the pool.

    Args:
        work: The round.
        rank: Has a free slot.
        candidates: What it chooses from.
        outlook: F of each, and of some behind them.
        reserved: bool[n], whether a rank is reserved for each.

    Attributes:
        is_late: bool[n], whether each still waits and is late enough to reserve a rank.
        scores: float64[n], F with the credit and what it is worth to need no pull.
        room: KV tokens of the largest one that fits.
    """

    def __init__(
        self,
        work: Round,
        rank: int,
        candidates: Candidates,
        outlook: "Outlook",
        reserved: "NDArray[np.bool_]",
    ) -> None:
        self.candidates = candidates
        self.reserved = reserved
        # Admissions beyond the turn, in lengths of the pool.
        self.is_late = candidates.beyond_turn >= _LATE * len(work.pool)
        self._outlook = outlook
        count = len(reserved)
        self._to_envelope = outlook.to_envelope[:count]
        self.scores = np.where(self.is_late, self._to_envelope, outlook.to_target[:count])
        self.scores += work.credit_each * candidates.overtaken
        if work.affinity is not None:
            self.scores += work.affinity.on(rank, candidates.entries)
        self.room = work.fleet.room(rank)

    def overflow(self, index: int) -> float:
        """Return the tokens of a candidate that are beyond the rank's margin."""
        return self._outlook.overflow.item(index)

    def fills(self) -> "NDArray[np.bool_]":
        """Return bool[n], whether F without the target is not negative."""
        return np.asarray(self._to_envelope >= 0.0)

    def fits(self) -> "NDArray[np.bool_]":
        """Return bool[n], which still wait and fit."""
        return np.asarray(self.candidates.sizes <= self.room)

    def free_of_others(self) -> "NDArray[np.bool_]":
        """Return bool[n], which of those have no rank reserved."""
        return np.asarray(self.fits() > self.reserved)

    def _within_shares(self, work: Round, free: "NDArray[np.bool_]") -> "NDArray[np.bool_]":
        """Return bool[n], those of `free` whose tenants need not wait; all if none of them is nearly as good."""
        waits = self.candidates.held_back
        if waits is None:
            return free
        scores = np.where(free, self.scores, -np.inf)
        others = (scores >= scores.max() - work.share_price) & (free > waits)
        return others if np.count_nonzero(others) else free

    def best(self, work: Round, rank: int) -> "list[PoolEntry]":
        """Return the best choice of what has no other rank to itself, or fills this one as well.

        An empty rank waits for nobody: it takes what has another rank to itself, too.
        """
        free = self.fits()
        if work.fleet.bound[rank] and np.count_nonzero(self.reserved):
            free = free > (self.reserved > self.fills())
        free = self._within_shares(work, free)
        return best_choice(work, rank, self.candidates.entries, self.scores, free)


def _tolerable(work: Round, entry: "PoolEntry", overflow: float) -> bool:
    """Return whether it costs no more to admit `entry` now than to make more room."""
    others = len(work.fleet.loads) - 1
    credit = work.credit_each * entry.overtaken / float(work.settings.weights.steps.sum())
    return others * _lasting_tokens(work, entry, overflow) <= entry.kv_tokens - overflow + credit


def _lasting_tokens(work: Round, entry: "PoolEntry", overflow: float) -> float:
    """Return the overflow without the share that ends with its request before it could be shed."""
    turnover = work.fleet.turnover
    stay_steps = turnover.stay_steps(entry.kv_tokens)
    if stay_steps is None:
        return overflow
    # Of one rank, during the stay.
    shed = turnover.per_step / len(work.fleet.loads) * work.pool.mean_prompt_tokens * stay_steps
    return shed * (1.0 - exp(-overflow / shed)) if shed > 0.0 else 0.0

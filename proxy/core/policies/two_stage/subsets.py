"""Stage 2's choice for one rank: the best subset of the candidates, else the best single one."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.pool import PoolEntry
from balanceroute.proxy.core.subset import best_subset


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

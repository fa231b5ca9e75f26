"""Stage 2's choice for one rank: the best subset of the candidates, else the best single one."""

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
        scores: float64[n], F of each alone, with its credit.
        free: bool[n], which of them fit and may be taken.
    """
    fleet = work.fleet
    slots = fleet.free_slots.item(rank)
    if slots > 1:
        taken = [candidates[place] for place in free.nonzero()[0].tolist()]
        room = int(fleet.free_kv_tokens[rank])
        # A candidate larger than the free memory is possible only on an empty rank; then just one
        # entry is admitted.
        if len(taken) > 1 and room >= max(entry.kv_tokens for entry in taken):
            chosen = _best_subset(work, rank, taken, min(slots, len(taken)), room)
            if chosen:
                return chosen
    # Also if the best score is negative: a free slot left empty would starve the entries that never
    # fit. On a tie `argmax` returns the first candidate.
    best = int(np.where(free, scores, -np.inf).argmax())
    return [candidates[best]] if free[best] else []


def _best_subset(
    work: Round, rank: int, candidates: list[PoolEntry], slots: int, room: int
) -> list[PoolEntry]:
    """Return the subset with the best F, or [] if none scores above 0.

    F depends on the sum alone, and a solver that knows only sums cannot weigh credits. But the oldest
    entry has been overtaken at least as often as any other. So two calls are enough: one for the best
    subset, one for the best subset with the oldest entry and its credit.
    """
    totals = [entry.kv_tokens for entry in candidates]
    peak = work.balance.peak(rank)

    def score(total: int) -> float:
        return work.balance.score(rank, total)

    free = best_subset(totals, slots, peak, score, max_total=room)
    credit = work.credit_each * candidates[0].overtaken
    if credit > 0.0:
        # F relative to the oldest entry alone: its size shifts the peak and reduces the room.
        first = totals[0]
        alone = score(first)
        rest = best_subset(
            totals[1:],
            slots - 1,
            max(peak - first, 0.0),
            lambda total: score(first + total) - alone,
            max_total=room - first,
        )
        value = score(first + rest.total) + credit
        if value > 0.0 and value > score(free.total):
            return [candidates[0], *(candidates[1 + index] for index in rest.indices)]
    return [candidates[index] for index in free.indices]

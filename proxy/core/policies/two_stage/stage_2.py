"""Stage 2, slots are scarce: the ranks with a free slot choose, in order of their safe margin.

Each takes the subset of the K oldest entries that maximises F. If no subset scores above 0, it takes
the best single entry anyway. A rank that is reserved makes room instead, see `reservation`.
"""

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.policies.two_stage.candidates import sizes
from balanceroute.proxy.core.policies.two_stage.paper import largest
from balanceroute.proxy.core.policies.two_stage.reservation import Reservations
from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.policies.two_stage.subsets import best_choice
from balanceroute.proxy.core.pool import PoolEntry


def choose_subsets(work: Round, reservations: Reservations) -> None:
    """Serve the ranks in order of safe margin until slots or entries run out.

    Paper: Algorithms 2 and 3, whose priority queue of ranks is a search here: margins change with
    every admission.
    """
    fleet = work.fleet
    open_ranks = fleet.free_slots > 0
    while len(work.pool) and open_ranks.any():
        rank = _roomiest(work, open_ranks)
        chosen = _choose(work, rank, reservations)
        for entry in chosen:
            # Entries of several slots each may need more than are free, and entries that grow more
            # memory than they hold now.
            if fleet.free_slots[rank] > 0 and entry.kv_tokens <= fleet.room(rank):
                work.admit(entry, rank)
        # A rank that takes nothing is done: room only shrinks during a round.
        open_ranks[rank] = bool(chosen) and fleet.free_slots[rank] > 0


def _choose(work: Round, rank: int, reservations: Reservations) -> list[PoolEntry]:
    if work.settings.paper:
        room = work.fleet.room(rank)
        candidates = [e for e in largest(work, rank) if e.kv_tokens <= room]
        return best_choice(work, rank, candidates, work.balance.scores(rank, sizes(candidates)))
    return reservations.choose(work, rank)


def _roomiest(work: Round, open_ranks: NDArray[np.bool_]) -> int:
    """Return the open rank with the largest safe margin, then most free slots, then lowest."""
    margins = np.where(open_ranks, work.balance.safe_margins, -1.0)
    # Not `max` and `flatnonzero`, which wrap these in Python code.
    (ties,) = (margins == margins[margins.argmax()]).nonzero()
    if len(ties) == 1:
        return int(ties[0])
    return int(ties[int(work.fleet.free_slots[ties].argmax())])

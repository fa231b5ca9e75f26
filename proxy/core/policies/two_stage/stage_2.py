"""Stage 2, slots are scarce: the ranks with a free slot choose, in order of their safe margin.

Each takes the subset of the K oldest entries that maximises F. If no subset scores above 0, it takes
the best single entry anyway. A rank that is reserved makes room instead, see `reservation`.
"""

from heapq import heapify, heappop, heappush

import numpy as np

from balanceroute.proxy.core.policies.two_stage.candidates import sizes
from balanceroute.proxy.core.policies.two_stage.paper import largest
from balanceroute.proxy.core.policies.two_stage.reservation import Reservations
from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.policies.two_stage.subsets import best_choice
from balanceroute.proxy.core.pool import PoolEntry


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

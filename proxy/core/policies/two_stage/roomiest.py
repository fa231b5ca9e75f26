"""The rank with most room, while Stage 1 places one entry after the other.

Most entries of a burst overflow nowhere on the rank with most room over the horizon, and so go there
(`Balance.best_rank`). A heap finds it without a look at the other ranks.
"""

from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.core.balance import Balance
    from balanceroute.proxy.core.policies.base import Fleet
    from balanceroute.proxy.core.pool import PoolEntry


class Roomiest:
    """The ranks with a free slot, by the tokens that fill them over the horizon.

    Args:
        fleet: The ranks.
        balance: Of the same ranks.
    """

    def __init__(self, fleet: "Fleet", balance: "Balance") -> None:
        self._fleet = fleet
        self._balance = balance
        (ranks,) = fleet.free_slots.nonzero()
        if fleet.speeds is not None:
            # The tokens of ranks of other speeds do not compare.
            ranks = ranks[:0]
        filled = balance.filled[ranks]
        order = filled.argsort()
        # In order of their tokens, the ranks that are not in the heap yet: few get there at all.
        self._ranks: list[int] = ranks[order].tolist()
        self._filled: list[float] = [*filled[order].tolist(), inf]
        self._next = 0
        # (tokens, rank). A rank that was charged is there again, and its older places are stale.
        self._heap: list[tuple[float, int]] = []

    def rank_for(self, entry: "PoolEntry") -> int | None:
        """Return the rank with most room if `entry` overflows at no step there.

        None if it does, if it may not go there, or if another rank has as much room: then all ranks
        have to be compared.
        """
        self._bring_first()
        heap, balance = self._heap, self._balance
        if not heap:
            return None
        filled, rank = heap[0]
        # One of the two behind the first place is next, or the next rank that is not in the heap.
        as_much = filled + balance.rounding
        if self._filled[self._next] <= as_much or any(one <= as_much for one, _ in heap[1:3]):
            return None
        if entry.restricted or entry.kv_tokens > self._fleet.room(rank):
            return None
        return rank if balance.has_margin(rank, entry.kv_tokens) else None

    def charged(self, rank: int) -> None:
        """Note an admission to `rank`."""
        if self._ranks:
            heappush(self._heap, (self._balance.filled.item(rank), rank))

    def _bring_first(self) -> None:
        """Bring the rank with the fewest tokens to the top of the heap."""
        heap = self._heap
        while True:
            while heap and self._is_stale(*heap[0]):
                heappop(heap)
            place = self._next
            if place == len(self._ranks) or (heap and heap[0][0] <= self._filled[place]):
                return
            heappush(heap, (self._filled[place], self._ranks[place]))
            self._next += 1

    def _is_stale(self, filled: float, rank: int) -> bool:
        """Return whether a rank is fuller by now, or has no free slot."""
        free_slots = self._fleet.free_slots.item(rank)
        return not free_slots or filled != self._balance.filled.item(rank)

"""`power-of-two`: the shorter queue of two ranks drawn at random, bound at once."""

from typing import TYPE_CHECKING

from balanceroute.proxy.core.policies.base import Assignment, Fleet, bind_oldest_first
from balanceroute.proxy.core.pool import Pool, PoolEntry

if TYPE_CHECKING:
    import random


class PowerOfTwo:
    """Draws two different ranks and takes the one with fewer requests, on a tie the lower."""

    slots_beyond_batch = None
    projection = None

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind everything in the pool."""
        del now_ns
        return bind_oldest_first(fleet, pool, self._choose)

    def _choose(self, fleet: Fleet, entry: PoolEntry) -> int:
        del entry
        ranks = range(len(fleet.bound))
        drawn = self._rng.sample(ranks, min(2, len(ranks)))
        return min(drawn, key=lambda rank: (int(fleet.bound[rank]), rank))

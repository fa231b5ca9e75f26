"""`power-of-two`: the shorter queue of two ranks drawn at random."""

from typing import TYPE_CHECKING

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry

if TYPE_CHECKING:
    import random


class PowerOfTwo:
    """Draws two different ranks and takes the one with fewer requests, on a tie the lower."""

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int:
        """Return the rank with fewer requests of two."""
        del entry
        ranks = range(len(fleet.bound))
        drawn = self._rng.sample(ranks, min(2, len(ranks)))
        return min(drawn, key=lambda rank: (int(fleet.bound[rank]), rank))

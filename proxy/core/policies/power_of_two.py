"""`power-of-two`: the shorter queue of two ranks drawn at random."""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry

if TYPE_CHECKING:
    import random


class PowerOfTwo:
    """Draws two different ranks and takes the one with fewer taken slots; on a tie the lower."""

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        """Return the rank with the shorter queue of two; None if all are closed."""
        ranks: list[int] = np.flatnonzero(fleet.allowed(entry)).tolist()
        drawn = self._rng.sample(ranks, min(2, len(ranks)))
        return min(drawn, key=lambda rank: (int(fleet.bound[rank]), rank), default=None)

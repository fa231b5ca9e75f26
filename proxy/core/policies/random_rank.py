"""`random`: every rank with the same probability."""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry

if TYPE_CHECKING:
    import random


class RandomRank:
    """Draws a rank uniformly for each request."""

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        """Return a rank; None if all are closed."""
        ranks = np.flatnonzero(fleet.allowed(entry))
        return int(ranks[self._rng.randrange(len(ranks))]) if len(ranks) else None

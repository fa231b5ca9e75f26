"""`round-robin`: the ranks in turn."""

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry


class RoundRobin:
    """Names rank n modulo G for request n; a rank that is closed to it loses its turn."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        """Return the first open rank after the last one; None if all are closed."""
        is_allowed = fleet.allowed(entry)
        ranks = len(is_allowed)
        for turn in range(self._next, self._next + ranks):
            rank = turn % ranks
            if is_allowed[rank]:
                self._next = (rank + 1) % ranks
                return rank
        return None

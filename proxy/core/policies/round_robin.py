"""`round-robin`: the ranks in turn."""

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry


class RoundRobin:
    """Takes the ranks in turn; one that is closed to a request is skipped."""

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

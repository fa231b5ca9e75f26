"""`round-robin`: the ranks in turn."""

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry


class RoundRobin:
    """Names rank n modulo G for request n."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int:
        """Return the rank after the last one."""
        del entry
        rank = self._next
        self._next = (rank + 1) % len(fleet.loads)
        return rank

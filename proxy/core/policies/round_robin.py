"""`round-robin`: the ranks in turn, bound at once."""

from balanceroute.proxy.core.policies.base import Assignment, Fleet, bind_oldest_first
from balanceroute.proxy.core.pool import Pool, PoolEntry


class RoundRobin:
    """Sends request n to rank n modulo G."""

    slots_beyond_batch = None
    projection = None

    def __init__(self) -> None:
        self._next = 0

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind everything in the pool."""
        del now_ns
        return bind_oldest_first(fleet, pool, self._choose)

    def _choose(self, fleet: Fleet, entry: PoolEntry) -> int:
        del entry
        rank = self._next
        self._next = (rank + 1) % len(fleet.loads)
        return rank

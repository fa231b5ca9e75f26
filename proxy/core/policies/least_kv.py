"""`least-kv`: the rank with the fewest KV tokens, bound at once."""

from balanceroute.proxy.core.policies.base import Assignment, Fleet, bind_oldest_first
from balanceroute.proxy.core.pool import Pool, PoolEntry


class LeastKV:
    """Sends each request to the rank with the least load, on a tie the lowest."""

    slots_beyond_batch = None
    projection = None

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind everything in the pool."""
        del now_ns
        return bind_oldest_first(fleet, pool, self._choose)

    def _choose(self, fleet: Fleet, entry: PoolEntry) -> int:
        del entry
        return int(fleet.loads.argmin())

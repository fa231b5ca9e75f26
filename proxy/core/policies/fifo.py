"""`fifo`: late binding without a choice of request: the oldest goes to the least-loaded rank.

It has the pool of BR-0 and its view of the loads, but takes the requests as they come. What BR-0
wins over it is the value of choosing.
"""

from balanceroute.proxy.core.policies.base import Assignment, Fleet, bind_oldest_first
from balanceroute.proxy.core.pool import Pool, PoolEntry


class Fifo:
    """Sends the oldest request to the rank with the least load among those with room."""

    slots_beyond_batch = 0
    projection = None

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind the oldest requests until no rank has room for the next."""
        del now_ns
        return bind_oldest_first(fleet, pool, self._choose)

    def _choose(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        ranks = [g for g in range(len(fleet.loads)) if fleet.fits(g, entry.prompt_tokens)]
        return min(ranks, key=lambda g: (int(fleet.loads[g]), g), default=None)

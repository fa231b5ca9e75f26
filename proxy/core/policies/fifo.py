"""`fifo`: late binding without a choice of request: the oldest goes to the least-loaded rank.

It has the pool of BR-0 and its view of the loads, but takes the requests as they come. What BR-0
wins over it is the value of choosing.
"""

from balanceroute.proxy.core.policies.base import Fleet, lowest
from balanceroute.proxy.core.pool import PoolEntry


def least_kv_with_room(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the rank with the least load of those that can take the entry, on a tie the lowest."""
    return lowest(fleet.loads, fleet.open_to(entry))

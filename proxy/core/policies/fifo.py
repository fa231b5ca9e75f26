"""`fifo`: late binding without a choice of request: the oldest goes to the least-loaded rank.

It has the pool of BR-0 and its view of the loads, but admits requests in order. So the difference to
BR-0 is the value of choosing the request.
"""

from balanceroute.proxy.core.policies.base import Fleet, lowest
from balanceroute.proxy.core.pool import PoolEntry


def least_kv_with_room(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the least-loaded rank that is open to the entry; on a tie the lowest."""
    return lowest(fleet.loads, fleet.open_to(entry))

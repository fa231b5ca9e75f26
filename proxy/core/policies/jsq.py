"""`jsq`: join the shortest queue, the default of the serving stacks."""

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry


def shortest_queue(fleet: Fleet, entry: PoolEntry) -> int:
    """Return the rank with the fewest requests, on a tie the lowest."""
    del entry
    return int(fleet.bound.argmin())

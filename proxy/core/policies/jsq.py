"""`jsq`: join the shortest queue, the default of the serving stacks."""

from balanceroute.proxy.core.policies.base import Fleet, lowest
from balanceroute.proxy.core.pool import PoolEntry


def shortest_queue(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the rank with the fewest slots taken, on a tie the lowest."""
    return lowest(fleet.bound, fleet.allowed(entry))

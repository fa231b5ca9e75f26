"""`least-kv`: the rank with the fewest KV tokens."""

from balanceroute.proxy.core.policies.base import Fleet, lowest
from balanceroute.proxy.core.pool import PoolEntry


def least_kv(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the rank with the least load, on a tie the lowest."""
    return lowest(fleet.loads, fleet.allowed(entry))

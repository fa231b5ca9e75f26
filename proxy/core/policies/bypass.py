"""`br-0-bypass`: BR-0 without the pool, for the earliest start of the KV transfer.

When its prefill ends the request goes to a rank at once, scored on the virtual load: all bound
requests, running or not. A rank may hold a few requests beyond its batch, so that their KV transfer
overlaps with the decoding of the others. With one request at a time there is no subset to choose, and
the rule is Stage 1 of BR-0. Paper: §D.6.
"""

import numpy as np

from balanceroute.proxy.core.balance import Balance, Weights
from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.pool import PoolEntry


def best_score(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the rank with room where BR-0's F is best."""
    open_ranks = fleet.open_to(entry)
    if not open_ranks.any():
        return None
    weights = Weights(np.ones(1), alpha=1.0, beta=float(len(fleet.loads)))
    ahead = fleet.loads.astype(np.float64)[:, None]
    balance = Balance(ahead, weights, np.ones(1), speeds=fleet.speeds)
    return balance.best_rank(entry.kv_tokens, open_ranks)

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


class BestScore:
    """Chooses the rank with room where BR-0's F is best.

    Args:
        prefix_affinity: See `PolicySettings`.
    """

    def __init__(self, prefix_affinity: float = 0.0) -> None:
        self._prefix_affinity = prefix_affinity

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        """Return the rank; None if there is none."""
        open_ranks = fleet.open_to(entry)
        if not open_ranks.any():
            return None
        weights = Weights(np.ones(1), alpha=1.0, beta=float(len(fleet.loads)))
        ahead = fleet.loads.astype(np.float64)[:, None]
        balance = Balance(ahead, weights, np.ones(1), speeds=fleet.speeds)
        worth = None
        if self._prefix_affinity and fleet.keeping is not None:
            worth = self._prefix_affinity * np.array(fleet.keeping.of(entry).tokens, np.float64)
        return balance.best_rank(entry.kv_tokens, open_ranks, worth)

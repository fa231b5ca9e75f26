"""`br-0-bypass`: BR-0 without the pool, for the earliest start of the KV transfer.

On prefill completion the request goes to a rank at once, scored on the virtual load: everything
bound, running or not. A rank may hold a few requests beyond its batch, whose transfer then overlaps
with the decoding of the others. With one request at a time there is no subset to choose, so the rule
is Stage 1 of BR-0. Paper: §D.6.
"""

import numpy as np

from balanceroute.proxy.core.balance import Balance, Weights
from balanceroute.proxy.core.policies.base import Assignment, Fleet, bind_oldest_first
from balanceroute.proxy.core.pool import Pool, PoolEntry


class Br0Bypass:
    """Binds each request at once to the rank with the best F.

    Args:
        ranks: G.
        slots_beyond_batch: How many requests beyond its batch limit a rank may be sent.
    """

    projection = None

    def __init__(self, ranks: int, slots_beyond_batch: int) -> None:
        self.slots_beyond_batch = slots_beyond_batch
        self._weights = Weights(np.ones(1), alpha=1.0, beta=float(ranks))

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind the oldest requests until every rank is at its limit."""
        del now_ns
        return bind_oldest_first(fleet, pool, self._choose)

    def _choose(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        fitting = (fleet.free_kv_tokens >= entry.prompt_tokens) | (fleet.bound == 0)
        open_ranks = (fleet.free_slots > 0) & fitting
        if not open_ranks.any():
            return None
        balance = Balance(fleet.loads.astype(np.float64)[:, None], self._weights, np.ones(1))
        return balance.best_rank(entry.prompt_tokens, open_ranks)

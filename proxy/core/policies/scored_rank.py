"""`s1-enhanced`, `s2-enhanced`, `s2-dynamic-waiting`: TBLB's scores, of the ledger's own loads.

A rank is drawn with the probability of its score's share; see `proxy/core/prefill/scored.py`. Requests
beyond a rank's batch count as waiting. The ledger is never old, so there is nothing to add to it.

Source: https://github.com/f5devcentral/llm-inference-lb, core/scheduler.py at f254c3e.
"""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.events import EngineLoad
from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.policies.jsq import shortest_queue
from balanceroute.proxy.core.pool import PoolEntry
from balanceroute.proxy.core.prefill.tblb_scores import Scores

if TYPE_CHECKING:
    import random


class ScoredRank:
    """Draws a rank by its score for each request; the shortest queue if none scores above 0."""

    def __init__(self, scores: Scores, rng: "random.Random", batch_limit: int) -> None:
        self._scores = scores
        self._rng = rng
        self._batch_limit = batch_limit

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        """Return a rank; None if all are closed."""
        ranks = np.flatnonzero(fleet.allowed(entry)).tolist()
        if not ranks:
            return None
        bound = [int(fleet.bound[rank]) for rank in ranks]
        loads = [
            EngineLoad(
                waiting=max(0, slots - self._batch_limit),
                running=min(slots, self._batch_limit),
                # Only its relation to the others matters.
                kv_usage=float(fleet.loads[rank]),
            )
            for rank, slots in zip(ranks, bound, strict=True)
        ]
        scores = self._scores(loads)
        if not any(scores):
            return shortest_queue(fleet, entry)
        rank: int = self._rng.choices(ranks, scores)[0]
        return rank

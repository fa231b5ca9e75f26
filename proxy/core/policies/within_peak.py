"""Any late-binding policy, on ranks that take a request only if their KV peak is expected to fit.

It shows the policy less free memory than there is; all else is the policy's. An empty rank takes any
request, so nothing waits for ever.
"""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.kv_peak import PeakRoom, Residents
from balanceroute.proxy.core.policies.own_trajectory import OwnTrajectory

if TYPE_CHECKING:
    from balanceroute.proxy.core.policies.base import Assignment, Fleet, Policy
    from balanceroute.proxy.core.pool import Pool
    from balanceroute.proxy.core.prediction import Predictor

# The candidates whose mean stands for the next request.
_WINDOW = 64


class WithinPeak:
    """Decides as `rule` does.

    Args:
        rule: Binds late, or at most some slots beyond the batch.
        ranks: G.
        capacity: KV tokens that fit on a rank.
        quantile: See `PeakRoom`.
        predictor: Asked for each candidate once.
    """

    def __init__(
        self,
        rule: "Policy",
        predictor: "Predictor",
        *,
        ranks: int,
        capacity: int,
        quantile: float,
    ) -> None:
        self._rule = rule
        self.slots_beyond_batch = rule.slots_beyond_batch
        self.projection = Residents(ranks, rule.projection)
        self._room = PeakRoom(self.projection, predictor, capacity=capacity, quantile=quantile)

    @property
    def skill_share(self) -> float | None:
        """See `OwnTrajectory`; None for other rules."""
        return self._rule.skill_share if isinstance(self._rule, OwnTrajectory) else None

    @property
    def next_decision_ns(self) -> int | None:
        """See `Policy`."""
        return self._rule.next_decision_ns

    def dispatch(self, fleet: "Fleet", pool: "Pool", now_ns: int) -> "list[Assignment]":
        """Admit what fits."""
        free = fleet.free_slots > 0
        if free.any():
            entries = pool.first(_WINDOW + fleet.free)
            room = self._room.of_ranks(free, entries, pool)
            if fleet.others_kv_tokens is not None:
                room = room - fleet.others_kv_tokens
            fleet.free_kv_tokens = np.minimum(fleet.free_kv_tokens, room)
            fleet.room_after = self._room.admit
        return self._rule.dispatch(fleet, pool, now_ns)

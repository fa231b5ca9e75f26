"""The base of other routers' rules: each request is charged to its rank, the cheapest rank is next.

These rules bind early and take requests in order. Their charges need facts of single requests that
`Fleet` does not sum: it offers the bound requests, and each round sums its own charge. That costs
O(bound requests) a round, more than our own policies, which these are compared with.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.ledger import BoundRequest
from balanceroute.proxy.core.policies.base import Assignment, Fleet, OldestFirst, lowest
from balanceroute.proxy.core.pool import Pool, PoolEntry

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.core.prediction import Predictor

# Steps ahead that are asked for; a request that probably runs longer has no known end.
_MOST_STEPS = 8_192

Charge = Callable[[BoundRequest, float | None], float]
"""What a request costs its rank, given its expected output tokens; None if they are unknown."""


class LeastCharged:
    """Takes the rank with the lowest sum of charges; on a tie the lowest rank.

    Args:
        charge: The charge of each bound request.
        predictor: Stands for the output length that a client of such a router states; None if the
            charge does not depend on it.
        pressure: Returns float64[G], what each rank costs besides; None for nothing.
    """

    projection = None
    next_decision_ns = None
    slots_beyond_batch = None

    def __init__(
        self,
        charge: Charge,
        *,
        predictor: "Predictor | None" = None,
        pressure: Callable[[Fleet], NDArray[np.float64]] | None = None,
    ) -> None:
        self._charge = charge
        self._predictor = predictor
        self._pressure = pressure
        # Of the requests that were bound in the last round, or are offered in this one.
        self._expected: dict[RequestId, float | None] = {}

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind entries in order of arrival."""
        charges = np.zeros(len(fleet.loads))
        before, self._expected = self._expected, {}
        for bound in fleet.requests():
            if bound.request in before:
                self._expected[bound.request] = before[bound.request]
            charges[bound.rank] += self._charge_of(bound)

        def choose(fleet: Fleet, entry: PoolEntry) -> int | None:
            costs = charges if self._pressure is None else charges + self._pressure(fleet)
            rank = lowest(costs, fleet.allowed(entry))
            if rank is not None:
                slots = entry.slots
                bound = BoundRequest(
                    entry.request, RankId(rank), entry.kv_tokens, slots, entry.age, started=False
                )
                charges[rank] += self._charge_of(bound)
            return rank

        in_order = OldestFirst(choose, slots_beyond_batch=self.slots_beyond_batch)
        return in_order.dispatch(fleet, pool, now_ns)

    def _charge_of(self, bound: BoundRequest) -> float:
        return self._charge(bound, self._expected_output(bound))

    def _expected_output(self, bound: BoundRequest) -> float | None:
        if self._predictor is None:
            return None
        # Once for each request, as a client states it once.
        if bound.request not in self._expected:
            ages = np.array([bound.age])
            survival = self._predictor.survival([bound.request], ages, _MOST_STEPS)[0]
            ends = survival[-1] <= 0.5
            expected = bound.age + float(survival[:-1].sum()) if ends else None
            self._expected[bound.request] = expected
        return self._expected[bound.request]

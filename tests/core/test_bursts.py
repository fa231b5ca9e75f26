"""A decision that fills many slots asks the predictor in few calls."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.predictors import Survival
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry

RANKS, BATCH = 20, 30


class Counted(Survival):
    """Counts the calls, and about how many requests they asked."""

    def __init__(self) -> None:
        super().__init__([3, 7, 20])
        self.asked: list[int] = []

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.asked.append(len(requests))
        return super().survival(requests, ages, steps)


# Stage 1 admits all of them; or all but as many as there are ranks, and Stage 2 the rest.
@pytest.mark.parametrize("waiting", [RANKS * BATCH, 2 * RANKS * BATCH])
def test_a_burst_asks_in_few_calls(waiting: int) -> None:
    predictor, rng, pool = Counted(), random.Random(1), Pool(Fcfs())
    for number in range(waiting):
        tokens = rng.randint(100, 9_000)
        pool.add(PoolEntry(RequestId(number), Ticket(tokens), tokens, 0, None, None, None))
    inputs = PolicyInputs(RANKS, BATCH, PolicySettings(), rng, predictor)
    none = np.zeros(RANKS, np.int64)
    free, memory = np.full(RANKS, BATCH), np.full(RANKS, UNLIMITED)
    fleet = Fleet(np.ones(RANKS, np.bool_), none.copy(), none, free, memory)
    assert len(make_policy("br-h", inputs).dispatch(fleet, pool, 0)) == RANKS * BATCH
    assert len(predictor.asked) <= 5
    assert sum(predictor.asked) <= RANKS * BATCH + 200

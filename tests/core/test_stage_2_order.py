"""The order in which stage 2 serves the ranks, against a search of all of them before each turn."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.policies.stage_2 import _Order
from balanceroute.proxy.core.projection import Balance, Weights

if TYPE_CHECKING:
    from balanceroute.proxy.core.policies.two_stage import Round

RANK = st.tuples(st.integers(0, 300), st.integers(0, 3))


@given(
    ranks=st.lists(RANK, min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 200), min_size=18, max_size=18),
)
def test_the_rank_with_most_room_is_next_also_when_the_envelope_rises(
    ranks: list[tuple[int, int]], sizes: list[int]
) -> None:
    loads = np.array([[load] for load, _ in ranks], np.float64)
    free = np.array([slots for _, slots in ranks])
    balance = Balance(loads, Weights(np.ones(1), 1.0, 2.0), np.ones(1))
    order = _Order(
        cast("Round", SimpleNamespace(balance=balance, fleet=SimpleNamespace(free_slots=free)))
    )
    for size in sizes:
        rank = order.roomiest()
        is_open = [g for g in range(len(ranks)) if free[g] > 0]
        if not is_open:
            assert rank is None
            return
        margins = balance.safe_margins
        assert rank == max(is_open, key=lambda g: (margins[g], free[g], -g))
        balance.admit(rank, np.array([float(size)]))
        free[rank] -= 1
        if free[rank] > 0:
            order.serve_again(rank)

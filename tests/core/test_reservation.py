"""Reservations: who gets a rank, what the rank takes meanwhile, and when they end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies.stage_2 import choose_subsets
from balanceroute.proxy.core.policies.two_stage import TwoStage, TwoStageSettings
from balanceroute.proxy.core.projection import Weights
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Fleet, Turnover
from balanceroute.proxy.core.waiting import Pool, PoolEntry

RANKS = 4
LARGE = RequestId(0)


def policy(*, patience: float = 1e9) -> TwoStage:
    weights = Weights(np.ones(1), alpha=1.0, beta=float(RANKS))
    return TwoStage(
        TwoStageSettings(weights, theta=RANKS, window=64, patience=patience), None, choose_subsets
    )


def entry(number: int, prompt_tokens: int, *, overtaken: int = 0) -> PoolEntry:
    return PoolEntry(
        RequestId(number),
        Ticket(prompt_tokens),
        prompt_tokens,
        age=0,
        deadline_ns=None,
        expires_ns=None,
        lease_ends_ns=None,
        overtaken=overtaken,
    )


def pool_of(*entries: PoolEntry) -> Pool:
    pool = Pool(Fcfs())
    for one in entries:
        pool.add(one)
    return pool


def fleet(
    loads: list[int],
    free: list[int],
    *,
    turnover: Turnover | None = None,
    closed: int | None = None,
) -> Fleet:
    is_open = np.array([rank != closed for rank in range(RANKS)])
    return Fleet(
        is_open,
        np.array(loads),
        np.full(RANKS, 9),
        np.array(free) * is_open,
        np.full(RANKS, UNLIMITED),
        turnover=turnover or Turnover(),
    )


def late_large(overtaken: int, size: int = 8_000) -> Pool:
    """Return a pool of ten: a large entry first, then entries of 200 to 1000 tokens."""
    return pool_of(
        entry(0, size, overtaken=overtaken), *(entry(i, 100 * (11 - i)) for i in range(1, 10))
    )


def admitted(rule: TwoStage, view: Fleet, pool: Pool) -> list[tuple[int, int]]:
    return [(int(request), int(rank)) for request, rank in rule.dispatch(view, pool, 0)]


def test_a_reserved_rank_takes_the_smallest_until_the_large_one_is_tolerable() -> None:
    rule, pool = policy(), late_large(overtaken=20)
    # Rank 1 has a margin of 4000: the large one would overflow it by 4000.
    assert admitted(rule, fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [(9, 1)]
    # Another rank does not take it either, and chooses freely.
    assert admitted(rule, fleet([9_000, 5_200, 8_000, 9_000], [0, 0, 1, 0]), pool) == [(1, 2)]
    assert admitted(rule, fleet([9_000, 3_100, 9_000, 9_000], [0, 1, 0, 0]), pool) == [(8, 1)]
    # An overflow of 2000 costs the three others 6000, as much as the rank lacks.
    assert admitted(rule, fleet([9_000, 3_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [(0, 1)]


def test_where_it_fits_a_large_one_goes_though_another_rank_is_reserved_for_it() -> None:
    rule, pool = policy(), late_large(overtaken=20)
    admitted(rule, fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool)
    assert admitted(rule, fleet([9_000, 5_000, 1_000, 9_000], [0, 0, 1, 0]), pool) == [(0, 2)]
    # Rank 1 is free of the reservation: it fills its margin.
    assert admitted(rule, fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [(1, 1)]


@pytest.mark.parametrize("empty", [1, 2])
def test_an_empty_rank_takes_a_large_one_whatever_rank_is_reserved_for_it(empty: int) -> None:
    """It can shed nothing more, and while other ranks admit nothing no credit grows."""
    rule, pool = policy(), pool_of(entry(0, 30_000, overtaken=20), entry(1, 100))
    assert admitted(rule, fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [(1, 1)]
    assert rule.reserved == {1: LARGE}
    pool.add(entry(2, 40_000))
    loads, free = [9_000] * RANKS, [0] * RANKS
    loads[empty], free[empty] = 0, 1
    view = fleet(loads, free)
    view.bound[empty] = 0
    assert admitted(rule, view, pool) == [(0, empty)]


@pytest.mark.parametrize(
    ("overtaken", "margin", "reserved"),
    [
        (7, 5_700, False),  # Late by 0.7 pools: 72 % of its size are needed.
        (7, 5_800, True),
        (20, 1_500, False),  # By 2: a fifth.
        (20, 1_600, True),
        (25, 0, True),
    ],
)
def test_the_later_an_entry_is_the_less_room_it_needs(
    overtaken: int, margin: int, *, reserved: bool
) -> None:
    rule, pool = policy(), late_large(overtaken)
    loads = [9_000, 9_000 - margin, 9_000, 9_000]
    (choice,) = admitted(rule, fleet(loads, [0, 1, 0, 0]), pool)
    # A rank that is not reserved takes the entry that fills it best.
    assert choice[0] in ({9, 0} if reserved else {1})


def test_a_late_entry_may_fill_a_rank_beyond_the_target() -> None:
    # With the slot taken the ranks would hold some 8000 tokens each.
    loads = [9_000, 6_500, 7_000, 7_000]
    for overtaken, first in ((2, 1), (3, 0)):
        pool = late_large(overtaken, size=2_500)
        assert admitted(policy(), fleet(loads, [0, 1, 0, 0]), pool) == [(first, 1)]


def test_a_closed_rank_loses_its_reservation() -> None:
    rule, pool = policy(), late_large(overtaken=20)
    loads = [9_000, 5_000, 9_000, 9_000]
    assert admitted(rule, fleet(loads, [0, 1, 0, 0]), pool) == [(9, 1)]
    admitted(rule, fleet(loads, [0, 0, 0, 1], closed=1), pool)
    # Meanwhile another rank has more room.
    loads = [9_000, 5_000, 4_000, 9_000]
    assert admitted(rule, fleet(loads, [0, 0, 1, 0]), pool)[0][0] in {7, 8}


def test_a_rank_is_free_again_when_its_entry_avoids_it() -> None:
    rule, pool = policy(), late_large(overtaken=20)
    loads = [9_000, 5_000, 9_000, 9_000]
    assert admitted(rule, fleet(loads, [0, 1, 0, 0]), pool) == [(9, 1)]
    pool.remove(LARGE)
    lost = entry(0, 8_000, overtaken=21)
    lost.lost_on, lost.restricted = (RankId(1),), True
    pool.add(lost)
    assert admitted(rule, fleet(loads, [0, 1, 0, 0]), pool) == [(1, 1)]


def test_a_large_one_that_stays_only_briefly_is_admitted_at_once() -> None:
    brief, lasting = Turnover(), Turnover()
    for turnover, steps in ((brief, 1), (lasting, 1_000)):
        for _ in range(40):
            turnover.leave(8_000, steps)
        turnover.per_step = 0.4
    loads = [9_000, 5_000, 9_000, 9_000]
    for turnover, first in ((brief, 0), (lasting, 9)):
        view = fleet(loads, [0, 1, 0, 0], turnover=turnover)
        assert admitted(policy(), view, late_large(overtaken=20)) == [(first, 1)]


@given(size=st.integers(10_000, 1_000_000), patience=st.integers(1, 40))
def test_no_entry_is_too_large_to_be_admitted_in_the_end(size: int, patience: int) -> None:
    rule, pool = policy(patience=float(patience)), late_large(overtaken=0, size=size)
    for number in range(10, 10_000):
        view = fleet([9_000, 8_500, 9_000, 9_000], [0, 1, 0, 0])
        if (0, 1) in admitted(rule, view, pool):
            return
        pool.add(entry(number, 300))
    pytest.fail("it is still there")

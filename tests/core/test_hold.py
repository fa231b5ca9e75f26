"""The hold: which newcomer waits for a moment, and until when."""

import numpy as np
import pytest

from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.policies.stage_2 import choose_subsets
from balanceroute.proxy.core.policies.two_stage import TwoStage, TwoStageSettings
from balanceroute.proxy.core.projection import Weights
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry

RANKS, SLOTS = 4, 10
HOLD_NS = 1_000
LOADS = (5_000, 5_000, 5_000, 4_000)


def policy(*, hold_ns: int = HOLD_NS, paper: bool = False) -> TwoStage:
    weights = Weights(np.ones(1), alpha=1.0, beta=float(RANKS))
    settings = TwoStageSettings(
        weights, theta=RANKS, window=64, patience=40.0, hold_ns=hold_ns, paper=paper
    )
    return TwoStage(settings, None, choose_subsets)


def fleet(taken: int) -> Fleet:
    bound = np.full(RANKS, taken)
    return Fleet(
        np.ones(RANKS, np.bool_),
        np.array(LOADS),
        bound,
        SLOTS - bound,
        np.full(RANKS, UNLIMITED),
    )


def pool_of(*prompts: int, since_ns: int = 0) -> Pool:
    pool = Pool(Fcfs())
    for number, tokens in enumerate(prompts):
        ticket = Ticket(tokens)
        times = (None, None, None)
        pool.add(PoolEntry(RequestId(number), ticket, tokens, 0, *times, since_ns=since_ns))
    return pool


def admitted(rule: TwoStage, view: Fleet, pool: Pool, now_ns: int) -> list[tuple[int, int]]:
    return [(int(request), int(rank)) for request, rank in rule.dispatch(view, pool, now_ns)]


def test_a_large_newcomer_waits_for_its_moment_and_small_ones_pass_it() -> None:
    rule, pool = policy(), pool_of(20_000, 500, since_ns=7)
    assert admitted(rule, fleet(taken=8), pool, 8) == [(1, 3)]
    assert rule.next_decision_ns == 7 + HOLD_NS
    assert admitted(rule, fleet(taken=8), pool, 6 + HOLD_NS) == []
    assert admitted(rule, fleet(taken=8), pool, 7 + HOLD_NS) == [(0, 3)]
    assert rule.next_decision_ns is None


@pytest.mark.parametrize(
    ("tokens", "is_held"),
    # Three ranks wait for what is beyond the 1000 tokens of margin: at 4/3 F is 0.
    [(1_000, False), (1_333, False), (1_334, True)],
)
def test_what_fills_more_than_it_costs_is_not_held(tokens: int, *, is_held: bool) -> None:
    rule, pool = policy(), pool_of(tokens)
    assert admitted(rule, fleet(taken=8), pool, 1) == ([] if is_held else [(0, 3)])
    assert (rule.next_decision_ns is not None) == is_held


@pytest.mark.parametrize(("taken", "is_held"), [(6, False), (7, True)])
def test_nothing_is_held_while_a_third_of_the_slots_is_free(taken: int, *, is_held: bool) -> None:
    rule, pool = policy(), pool_of(20_000)
    assert bool(admitted(rule, fleet(taken), pool, 1)) != is_held


@pytest.mark.parametrize(
    ("lately", "now", "is_held"),
    # 0.7 of what it was lately and 0.3 of what it is now, against two thirds.
    [(5, 9, False), (6, 8, False), (6, 9, True), (8, 3, False), (8, 4, True)],
)
def test_a_fleet_that_was_less_full_lately_holds_less(
    lately: int, now: int, *, is_held: bool
) -> None:
    rule = policy()
    for _ in range(2_000):
        admitted(rule, fleet(lately), pool_of(10), 1)
    assert bool(admitted(rule, fleet(now), pool_of(20_000), 1)) != is_held


def test_a_fleet_without_an_open_rank_says_nothing_about_its_slots() -> None:
    rule, closed = policy(), fleet(0)
    closed.is_open[:] = False
    closed.free_slots[:] = 0
    for _ in range(2_000):
        admitted(rule, closed, pool_of(10), 1)
    assert admitted(rule, fleet(taken=8), pool_of(20_000), 1) == []


def test_nothing_is_held_while_slots_are_scarce() -> None:
    rule, pool = policy(), pool_of(*[20_000] * 5)
    assert len(admitted(rule, fleet(taken=9), pool, 1)) == RANKS
    assert rule.next_decision_ns is None


def test_a_hold_is_over_when_no_slot_is_free() -> None:
    rule, pool = policy(), pool_of(20_000)
    admitted(rule, fleet(taken=8), pool, 1)
    admitted(rule, fleet(taken=SLOTS), pool, 2)
    assert rule.next_decision_ns is None


def test_the_paper_holds_nothing() -> None:
    rule, pool = policy(paper=True), pool_of(20_000)
    assert len(admitted(rule, fleet(taken=8), pool, 1)) == 1


def test_without_a_hold_a_large_newcomer_goes_at_once() -> None:
    rule, pool = policy(hold_ns=0), pool_of(20_000)
    assert len(admitted(rule, fleet(taken=8), pool, 0)) == 1
    assert rule.next_decision_ns is None

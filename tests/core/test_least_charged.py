"""The rules of other routers, against what their sources say of one request at a time."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import NoPrediction, Oracle
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies.baselines import (
    BLOCK_TOKENS,
    Charge,
    LeastCharged,
    bucket_tokens,
    decayed_blocks,
    kv_pressure,
    queued_s,
)
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import BoundRequest, Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry


def bound(
    number: int = 0,
    rank: int = 0,
    prompt: int = 100,
    *,
    age: int = 0,
    slots: int = 1,
    started: bool = True,
) -> BoundRequest:
    kv_tokens = (prompt + age) * slots
    return BoundRequest(RequestId(number), RankId(rank), kv_tokens, slots, age, started)


def fleet_of(ranks: int, requests: Sequence[BoundRequest]) -> Fleet:
    loads, count = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for one in requests:
        loads[one.rank] += one.kv_tokens
        count[one.rank] += one.slots
    room = np.full(ranks, UNLIMITED)
    is_open = np.ones(ranks, np.bool_)
    return Fleet(is_open, loads, count, room, room.copy(), lambda: list(requests))


def decide(
    policy: LeastCharged, ranks: int, requests: Sequence[BoundRequest], prompts: Sequence[int]
) -> list[int]:
    """Return the ranks of newcomers, whose ids follow those that are bound."""
    pool = Pool(Fcfs())
    for number, prompt in enumerate(prompts, len(requests)):
        pool.add(PoolEntry(RequestId(number), Ticket(prompt), prompt, 0, None, None, None))
    return [rank for _, rank in policy.dispatch(fleet_of(ranks, requests), pool, 0)]


@pytest.mark.parametrize("charge", [decayed_blocks, queued_s, bucket_tokens])
@given(
    prompts=st.lists(st.integers(1, 3_000), max_size=12),
    outputs=st.lists(st.integers(1, 5_000), min_size=20, max_size=20),
    ages=st.lists(st.integers(0, 3_000), min_size=12, max_size=12),
    newcomers=st.lists(st.integers(1, 3_000), min_size=1, max_size=8),
)
def test_each_newcomer_goes_where_the_charges_add_up_to_least(
    charge: Charge, prompts: list[int], outputs: list[int], ages: list[int], newcomers: list[int]
) -> None:
    ranks = 3
    requests = [
        bound(i, i % ranks, prompt, age=min(age, outputs[i] - 1), started=age % 2 == 0)
        for i, (prompt, age) in enumerate(zip(prompts, ages, strict=False))
    ]
    oracle = Oracle({RequestId(i): tokens for i, tokens in enumerate(outputs)})
    policy = LeastCharged(charge, predictor=oracle)
    chosen = decide(policy, ranks, requests, newcomers)
    everyone = list(requests)
    for prompt in newcomers:
        costs = [
            sum(charge(one, float(outputs[one.request])) for one in everyone if one.rank == rank)
            for rank in range(ranks)
        ]
        best = min(range(ranks), key=lambda rank: costs[rank])
        assert costs[chosen[0]] == pytest.approx(costs[best], abs=1e-6)
        everyone.append(bound(len(everyone), chosen.pop(0), prompt, started=False))


def test_ties_go_to_the_lowest_rank() -> None:
    assert decide(LeastCharged(bucket_tokens), 3, [bound(rank=0)], [5, 5, 5]) == [1, 2, 0]


def test_a_predictor_is_asked_once_for_each_request_and_forgets_those_that_left() -> None:
    asked: list[int] = []

    class Counting(NoPrediction):
        def survival(self, requests, ages, steps):  # type: ignore[no-untyped-def]
            asked.extend(requests)
            return super().survival(requests, ages, steps)

    policy = LeastCharged(bucket_tokens, predictor=Counting())
    decide(policy, 2, [bound(0), bound(1, 1)], [7])
    decide(policy, 2, [bound(0), bound(1, 1), bound(2)], [7])
    assert asked == [0, 1, 2, 3]
    decide(policy, 2, [bound(0)], [7])
    decide(policy, 2, [bound(0), bound(1, 1), bound(2)], [7])
    assert asked == [0, 1, 2, 3, 1, 2, 3]


# Dynamo.


def their_blocks(prompt: int, age: int, expected: float | None) -> float:
    """Return the cost of a request, token by token, as their router keeps it."""
    blocks, weight = -(-prompt // BLOCK_TOKENS), 1.0
    for emitted in range(1, age + 1):
        if -(-(prompt + emitted) // BLOCK_TOKENS) > blocks:
            blocks += 1
            if expected is not None:
                weight = max(0.0, 1.0 - emitted / max(expected, 1.0))
    return blocks * weight


@given(st.integers(1, 100), st.integers(0, 100), st.none() | st.integers(1, 120), st.integers(1, 3))
def test_blocks_decay_whenever_one_is_added(
    prompt: int, age: int, expected: int | None, slots: int
) -> None:
    cost = decayed_blocks(bound(prompt=prompt, age=age, slots=slots), expected)
    assert cost == pytest.approx(slots * their_blocks(prompt, age, expected))


def test_a_request_of_unknown_length_never_decays() -> None:
    assert decayed_blocks(bound(prompt=16, age=1_600), None) == 101
    policy = LeastCharged(decayed_blocks, predictor=NoPrediction())
    assert decide(policy, 2, [bound(0, 0, 16, age=1_600), bound(1, 1, 1_600)], [5]) == [1]


def test_a_nearly_finished_request_counts_little() -> None:
    oracle = Oracle({RequestId(0): 1_700, RequestId(1): 1_700, RequestId(2): 1})
    requests = [bound(0, 0, 5_000, age=1_690), bound(1, 1, 1_000)]
    assert decide(LeastCharged(decayed_blocks, predictor=oracle), 2, requests, [5]) == [0]


# SMG.


def test_only_requests_that_wait_for_the_batch_are_queued() -> None:
    assert queued_s(bound(prompt=4_000, started=True), None) == 0.0
    assert queued_s(bound(prompt=4_000, started=False), None) == 2.0


@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=5), st.none() | st.just(120_000))
def test_between_equal_queues_the_emptier_cache_wins(
    loads: list[int], capacity: int | None
) -> None:
    requests = [bound(i, i, tokens) for i, tokens in enumerate(loads)]
    policy = LeastCharged(queued_s, pressure=kv_pressure(capacity))
    assert decide(policy, len(loads), requests, [5]) == [loads.index(min(loads))]


def test_a_nearly_full_cache_outweighs_a_short_queue() -> None:
    # 0.15 s x 0.98 / 0.02 = 7.35 s, against 10,000 tokens / 2,000 tokens/s = 5 s and its own 0.17 s.
    requests = [bound(0, 0, 98_000), bound(1, 1, 10_000, started=False)]
    assert decide(LeastCharged(queued_s, pressure=kv_pressure(100_000)), 2, requests, [5]) == [1]
    assert decide(LeastCharged(queued_s, pressure=kv_pressure(None)), 2, requests, [5]) == [0]


def test_a_cache_beyond_its_limit_still_has_a_finite_cost() -> None:
    pressure = kv_pressure(100)(fleet_of(2, [bound(prompt=100), bound(1, 1, 500)]))
    assert pressure.tolist() == pytest.approx([149.85, 149.85])


# llm-d.


@pytest.mark.parametrize(
    ("expected", "tokens"),
    [(None, 1_000), (1, 100), (499.9, 100), (500, 1_000), (1_999.9, 1_000), (2_000, 4_096)],
)
def test_a_request_is_charged_by_its_bucket_whatever_its_prompt_and_age(
    expected: float | None, tokens: int
) -> None:
    for one in (bound(), bound(prompt=90_000), bound(age=400), bound(started=False)):
        assert bucket_tokens(one, expected) == tokens
    assert bucket_tokens(bound(slots=3), expected) == 3 * tokens

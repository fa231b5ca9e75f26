"""Requests that some instances alone can serve."""

import random
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn_deeds import INSTANCES, DrawnDeeds
from tests.core.driver import Driver
from tests.extended import USUAL_POLICIES, usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.errors import PolicyError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    Eligible,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    RankId,
    RequestArrived,
    RequestId,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import (
    POLICIES,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Assignment, Fleet
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig, decide
from balanceroute.proxy.core.waiting import Pool, PoolEntry

A, B, C, D = (RequestId(number) for number in range(4))


def only(prefillers: Collection[int], ranks: Collection[int]) -> Eligible:
    return Eligible(frozenset(map(PrefillerId, prefillers)), frozenset(map(RankId, ranks)))


ALPHA, BETA = only([0], [0]), only([1], [1])


def arrive(number: RequestId, eligible: Eligible | None, tokens: int = 10) -> RequestArrived:
    return RequestArrived(number, Ticket(tokens, eligible=eligible))


def test_a_full_prefiller_holds_up_only_those_that_need_it() -> None:
    driver = Driver(prefillers=2, ranks=2, probe_limit=1)
    assert driver(arrive(A, ALPHA)) == [StartPrefill(A, PrefillerId(0), 10)]
    assert driver(arrive(B, ALPHA)) == []
    assert driver(arrive(C, BETA)) == [StartPrefill(C, PrefillerId(1), 10)]
    assert driver(PrefillDone(C, 10)) == []
    # Who can go anywhere may go past B, but not where B waits.
    assert driver(arrive(D, None)) == [StartPrefill(D, PrefillerId(1), 10)]
    assert driver(PrefillDone(A, 10)) == [StartPrefill(B, PrefillerId(0), 10)]


def test_a_small_prompt_does_not_pass_a_large_one_over() -> None:
    driver = Driver(prefillers=2, ranks=2, prefiller_kv_tokens=100)
    driver(arrive(A, ALPHA, 50), PrefillerClosed(PrefillerId(1)))
    assert driver(arrive(B, ALPHA, 80)) == []
    assert driver(arrive(C, None, 10)) == [], "prefiller 0 has room, but B waits for it"
    opened = driver(PrefillerOpened(PrefillerId(1)))
    assert opened == [StartPrefill(C, PrefillerId(1), 10)]


@pytest.mark.parametrize("policy", ["br-0", "br-h", "br-0-bypass", "fifo"])
def test_a_full_rank_holds_up_only_those_that_need_it(policy: str) -> None:
    driver = Driver(policy, prefillers=2, ranks=2, batch_limit=20)
    numbers = [RequestId(number) for number in range(400)]
    for number in numbers[:-1]:
        driver(arrive(number, ALPHA), PrefillDone(number, 10))
    driver(Tick())
    driver(arrive(numbers[-1], BETA), PrefillDone(numbers[-1], 10))
    assert driver(Tick()) == [Admit(numbers[-1], RankId(1))]


def test_an_answer_that_names_an_ineligible_rank_is_not_obeyed() -> None:
    class Wrong:
        slots_beyond_batch = 0
        projection = None
        next_decision_ns = None

        def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
            pool.admit(A)
            return [Assignment(A, RankId(0))]

    def make_fleet() -> Fleet:
        zeros = np.zeros(2, np.int64)
        free = np.ones(2, np.int64)
        return Fleet(np.ones(2, np.bool_), zeros, zeros.copy(), free, free * UNLIMITED)

    errors: list[Exception] = []
    pool = Pool(Fcfs())
    ticket = Ticket(10, eligible=Eligible(frozenset(), frozenset([RankId(1)])))
    pool.add(PoolEntry(A, ticket, 10, 0, None, None, None))
    made = decide(Wrong(), make_fleet, pool, 0, on_failure=lambda _, error: errors.append(error))
    assert made == [Assignment(A, RankId(1))]
    (error,) = errors
    assert isinstance(error, PolicyError)


SETS = st.frozensets(st.integers(0, INSTANCES - 1), min_size=1)
WHO = st.none() | st.builds(only, SETS, SETS)
DEEDS = st.sampled_from(
    ["prefill", "lose prefill", "tick", "join", "bounce", "finish", "recompute", "close", "open"]
)


class _World(DrawnDeeds):
    def look_at(self, action: Action) -> None:
        match action:
            case StartPrefill(number, prefiller, _):
                who = self.who[number]
                assert who is None or prefiller in who.prefillers
            case Admit(number, rank):
                who = self.who[number]
                assert who is None or rank in who.ranks
            case _:
                pass


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("name", usually(USUAL_POLICIES, sorted(POLICIES)))
@given(
    deeds=st.lists(
        st.tuples(DEEDS, st.integers(0, 999)) | st.tuples(WHO, st.integers(1, 60)), max_size=40
    ),
    batch_limit=st.integers(1, 3),
    kv_tokens=st.none() | st.integers(40, 150),
)
def test_no_request_goes_to_an_ineligible_instance(
    name: str,
    paper: bool,
    deeds: list[tuple[str | Eligible | None, int]],
    batch_limit: int,
    kv_tokens: int | None,
) -> None:
    """Whatever happens, in whatever order."""
    config = SchedulerConfig(
        ranks=INSTANCES,
        prefillers=INSTANCES,
        batch_limit=batch_limit,
        probe_limit=2,
        direct_limit=2,
        rank_kv_tokens=kv_tokens,
        prefiller_kv_tokens=kv_tokens,
    )
    chosen = PolicySettings(paper=paper, window=2)
    inputs = PolicyInputs(INSTANCES, batch_limit, chosen, random.Random(1), NoPrediction())
    world = _World(Scheduler(config, make_policy(name, inputs)))
    for deed, value in deeds:
        if isinstance(deed, str):
            world.do(deed, value)
        else:
            world.arrive(deed, value)
    world.bring_to_an_end()

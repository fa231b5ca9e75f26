"""Candidates scored by their own trajectories, where outputs are long beside prompts."""

import random
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

from balanceroute.predictors import Oracle, Survival
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies import (
    Assignment,
    Fleet,
    PolicyInputs,
    PolicySettings,
    make_policy,
    skill_share,
)
from balanceroute.proxy.core.policies.own_trajectory import OwnTrajectory, Skill
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.waiting import Pool, PoolEntry
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import FORECASTS, make_simulation
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

PROMPT = 100


def build(outputs: dict[int, int], *, ranks: int = 2) -> TwoStage:
    """Return the policy of some ranks that knows these outputs."""
    oracle = Oracle({RequestId(number): tokens for number, tokens in outputs.items()})
    inputs = PolicyInputs(ranks, 4, PolicySettings(), random.Random(1), oracle)
    policy = make_policy("br-h", inputs)
    assert isinstance(policy, TwoStage)
    return policy


def own(policy: TwoStage) -> OwnTrajectory:
    assert policy.own_trajectory is not None
    return policy.own_trajectory


def running(policy: TwoStage) -> Projection:
    assert policy.projection is not None
    return policy.projection


def see_leave(policy: TwoStage, output_tokens: int, count: int = 64) -> None:
    """Let requests of one prompt and output leave."""
    for _ in range(count):
        own(policy).slots.leave(PROMPT, output_tokens)


def pooled(*numbers: int) -> Pool:
    pool = Pool(Fcfs())
    for number in numbers:
        pool.add(PoolEntry(RequestId(number), Ticket(PROMPT), PROMPT, 0, None, None, None))
    return pool


def fleet(loads: list[int], free: list[int]) -> Fleet:
    slots = np.array(free)
    return Fleet(
        np.ones(len(loads), np.bool_), np.array(loads), 4 - slots, slots, np.full(len(loads), 2**40)
    )


def run_on(policy: TwoStage, rank: int, number: int, age: int) -> None:
    """Bind a request that was a candidate before, and let it have emitted `age` tokens."""
    running(policy).bind(RequestId(number), RankId(rank), PROMPT + age, age)
    running(policy).start(RequestId(number))


def test_the_two_stage_rule_decides_while_prompts_are_long() -> None:
    policy = build({1: 50, 2: 50})
    see_leave(policy, 149)
    own(policy).dispatch = by_trajectory = Mock()  # type: ignore[method-assign]
    # Late enough for the rule to hold no request.
    assert len(policy.dispatch(fleet([0, 0], [1, 1]), pooled(1, 2), 10**10)) == 2
    by_trajectory.assert_not_called()
    assert skill_share(policy) is None


def test_without_skill_the_oldest_goes_first() -> None:
    policy = build({1: 10, 2: 3_000, 3: 500})
    see_leave(policy, 500)
    assignments = policy.dispatch(fleet([0, 0], [1, 1]), pooled(1, 2, 3), 0)
    assert [one.request for one in assignments] == [1, 2]


def test_without_skill_rounding_puts_nobody_first() -> None:
    rng = random.Random(3)
    for _ in range(40):
        inputs = PolicyInputs(2, 4, PolicySettings(), random.Random(1), Survival(range(200, 900)))
        policy = make_policy("br-h", inputs)
        assert isinstance(policy, TwoStage)
        see_leave(policy, 500)
        for number in range(1_000, 1_000 + rng.randrange(1, 12)):
            run_on(policy, rng.randrange(2), number, rng.randrange(900))
        pool = Pool(Fcfs())
        for number in range(rng.randrange(2, 70)):
            prompt = rng.randrange(1, 300)
            pool.add(PoolEntry(RequestId(number), Ticket(prompt), prompt, 0, None, None, None))
        assignments = policy.dispatch(fleet([0, 0], [1, 1]), pool, 0)
        assert [one.request for one in assignments] == [0, 1]


def test_a_fleet_of_one_rank_is_asked_for_no_prediction_while_all_fits() -> None:
    policy = build({1: 10, 2: 3_000, 3: 500}, ranks=1)
    see_leave(policy, 500)
    ask = Mock(wraps=own(policy)._curves.ask)
    own(policy)._curves.ask = ask  # type: ignore[method-assign]
    assignments = policy.dispatch(fleet([0], [3]), pooled(1, 2, 3), 0)
    assert sorted(one.request for one in assignments) == [1, 2, 3]
    ask.assert_not_called()
    assert [one.request for one in policy.dispatch(fleet([0], [1]), pooled(1, 2, 3), 0)] == [1]
    ask.assert_called_once()


def test_a_rank_that_empties_soon_takes_the_long_request() -> None:
    outputs = {1: 100, 2: 2_000, 3: 2_000, 4: 2_000, 5: 2_000, 6: 2_000, 7: 2_000, 8: 1_000}
    policy = build(outputs)
    see_leave(policy, 1_000)
    own(policy).skill.share = 1.0
    # All running requests have been candidates; rank 0 has old ones, rank 1 young ones.
    policy.dispatch(fleet([0, 0], [3, 3]), pooled(3, 4, 5, 6, 7, 8), 0)
    for number in (3, 4, 5):
        run_on(policy, 0, number, 1_900)
    for number in (6, 7, 8):
        run_on(policy, 1, number, 100)
    own(policy)._ranks.forget()
    assignments = policy.dispatch(fleet([6_000, 600], [1, 1]), pooled(1, 2), 0)
    assert sorted(assignments) == [
        Assignment(RequestId(1), RankId(1)),
        Assignment(RequestId(2), RankId(0)),
    ]


def test_an_entry_that_others_overtook_goes_at_last() -> None:
    policy = build({1: 10, 2: 2_000, 3: 2_000})
    see_leave(policy, 1_000)
    own(policy).skill.share = 1.0
    run_on(policy, 1, 3, 0)
    pool = pooled(1, 2)
    pool.first(1)[0].overtaken = 10_000
    assignments = policy.dispatch(fleet([0, 100], [1, 0]), pool, 0)
    assert assignments[0].request == 1


def test_each_stage_is_reported_as_it_ends() -> None:
    policy, stages = build({1: 10}), list[str]()
    own(policy)._on_stage = stages.append
    see_leave(policy, 1_000)
    policy.dispatch(fleet([0, 0], [1, 0]), pooled(1), 0)
    assert stages == ["projection", "stage_1", "stage_2"]


def test_an_overdue_entry_goes_first() -> None:
    policy = build({1: 10, 2: 2_000, 3: 400})
    see_leave(policy, 1_000)
    pool = pooled(1, 2, 3)
    pool.replace(replace(pool.first(3)[2], deadline_ns=5))
    assignments = policy.dispatch(fleet([0, 0], [1, 0]), pool, 5)
    assert assignments == [(RequestId(3), RankId(0))]


def test_a_request_that_never_decoded_teaches_nothing() -> None:
    policy = build({1: 100})
    see_leave(policy, 1_000)
    policy.dispatch(fleet([0, 0], [1, 0]), pooled(1), 0)
    ratio = own(policy).slots.output_ratio
    running(policy).bind(RequestId(1), RankId(0), PROMPT, 0)
    running(policy).unbind(RequestId(1))
    assert own(policy).slots.output_ratio == ratio
    assert own(policy).skill.share == 0.0
    assert not own(policy)._predicted


def test_an_answer_of_one_token_counts() -> None:
    policy = build({1: 1})
    see_leave(policy, 1_000)
    ratio = own(policy).slots.output_ratio
    run_on(policy, 0, 1, 0)
    running(policy).unbind(RequestId(1))
    assert own(policy).slots.output_ratio < ratio


def test_a_faster_rank_may_hold_more() -> None:
    policy = build({1: 1_000, 2: 1_000, 3: 1_000})
    see_leave(policy, 1_000)
    run_on(policy, 0, 2, 0)
    run_on(policy, 0, 3, 0)
    run_on(policy, 1, 4, 0)
    equal, unequal = fleet([200, 100], [1, 1]), fleet([200, 100], [1, 1])
    unequal.speeds = np.array([1.6, 0.4])
    assert policy.dispatch(equal, pooled(1), 0)[0].rank == 1
    assert policy.dispatch(unequal, pooled(1), 0)[0].rank == 0


def test_no_rank_gets_more_than_its_slots() -> None:
    policy = build(dict.fromkeys(range(100), 700))
    see_leave(policy, 500)
    assignments = policy.dispatch(fleet([0, 0], [3, 2]), pooled(*range(100)), 0)
    ranks = [one.rank for one in assignments]
    assert (ranks.count(RankId(0)), ranks.count(RankId(1))) == (3, 2)


def test_a_prediction_is_compared_with_what_the_request_did() -> None:
    policy = build({1: 100, 2: 3_000})
    see_leave(policy, 1_000)
    for round_ in range(200):
        number = 1 + round_ % 2
        policy.dispatch(fleet([0, 0], [2, 0]), pooled(1, 2), 0)
        own(policy)._leave(RequestId(number), PROMPT, (100, 3_000)[number - 1])
        own(policy)._leave(RequestId(3 - number), PROMPT, (3_000, 100)[number - 1])
    assert own(policy).skill.share > 0.8
    assert skill_share(policy) == own(policy).skill.share


def test_prompts_that_differ_are_no_skill() -> None:
    # What a slot holds follows from the prompt in part, which every predictor knows.
    rng = random.Random(7)
    inputs = PolicyInputs(2, 4, PolicySettings(), random.Random(1), Survival(range(200, 600)))
    policy = make_policy("br-h", inputs)
    assert isinstance(policy, TwoStage)
    see_leave(policy, 400)
    for round_ in range(200):
        pool, number = Pool(Fcfs()), 2 * round_
        prompts = [rng.randrange(1, 400) for _ in range(2)]
        for place, prompt in enumerate(prompts):
            entry = PoolEntry(
                RequestId(number + place), Ticket(prompt), prompt, 0, None, None, None
            )
            pool.add(entry)
        policy.dispatch(fleet([0, 0], [2, 0]), pool, 0)
        for place, prompt in enumerate(prompts):
            own(policy)._leave(RequestId(number + place), prompt, rng.randrange(200, 600))
    assert own(policy).skill.share < 0.05


@pytest.fixture(scope="module")
def long_outputs() -> Workload:
    rng = random.Random("long outputs")
    requests = [
        TraceRequest(number, 20, 1 + round(rng.expovariate(1 / 200))) for number in range(1_000)
    ]
    return Workload(requests, requests[:300], backlog=32)


def idle(workload: Workload, policy: str, forecast: str) -> float:
    simulation = make_simulation(
        SimulatedDeployment(4, 8),
        workload,
        policy,
        PolicySettings(),
        FORECASTS[forecast],
        seed="0",
        clock_ns=lambda: 0,
    )
    return simulation.run().metrics().idle_fraction


def test_an_oracle_removes_most_of_the_idle_time(long_outputs: Workload) -> None:
    assert idle(long_outputs, "br-h", "oracle") < 0.5 * idle(long_outputs, "fifo", "oracle")


def test_predictors_that_cannot_tell_requests_apart_leave_it_as_with_fifo(
    long_outputs: Workload,
) -> None:
    first_come = idle(long_outputs, "fifo", "none")
    assert idle(long_outputs, "br-h", "survival") == pytest.approx(first_come, rel=0.1)
    assert idle(long_outputs, "br-h", "none") == pytest.approx(first_come, rel=0.1)


# How far predictions of single requests come true.


def learned(scale: float, noise: float, count: int = 2_000) -> float:
    rng = random.Random(count)
    skill = Skill()
    for _ in range(count):
        predicted = rng.gauss(0.0, 1.0)
        skill.learn(scale * predicted, predicted + noise * rng.gauss(0.0, 1.0))
    return skill.share


def test_nothing_is_believed_at_first() -> None:
    assert Skill().share == 0.0
    assert learned(1.0, 0.0, count=8) < 0.5


def test_what_comes_true_is_believed() -> None:
    assert learned(1.0, 0.0) > 0.9


def test_an_exaggerating_predictor_is_believed_by_its_slope() -> None:
    assert learned(4.0, 1.0) == pytest.approx(0.25, abs=0.05)


def test_a_predictor_that_is_wrong_is_not_believed() -> None:
    assert learned(-1.0, 0.5) == 0.0


def test_a_predictor_that_hardly_tells_requests_apart_is_not_believed() -> None:
    # It is right on average, but explains a thousandth of the variance.
    rng = random.Random(3)
    skill = Skill()
    for _ in range(2_000):
        predicted = 0.03 * rng.gauss(0.0, 1.0)
        skill.learn(predicted, predicted + rng.gauss(0.0, 1.0))
    assert skill.share < 0.2


def test_equal_requests_teach_nothing() -> None:
    skill = Skill()
    for _ in range(100):
        skill.learn(0.0, 0.0)
    assert skill.share == 0.0


def test_a_predictor_that_fails_fades_out() -> None:
    rng = random.Random(5)
    skill = Skill()
    for _ in range(1_000):
        predicted = rng.gauss(0.0, 1.0)
        skill.learn(predicted, predicted)
    for _ in range(1_000):
        skill.learn(rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0))
    assert skill.share < 0.2

"""Learning which model answers: the network, the environment, and what a short training gains."""

from itertools import repeat

import numpy as np
import pytest

from balanceroute.proxy.lab.model_choice.environment import (
    GroupModel,
    Scenario,
    TrainingEnvironment,
    bursty,
    paper_scenario,
    stable,
)
from balanceroute.proxy.lab.model_choice.training import (
    ChoiceJudgement,
    Trainer,
    TrainingWindow,
    judge,
)
from balanceroute.proxy.model_choice import ArrivalRate, Greedy, QNetwork, Static, Targets

LENGTHS = [(1_000, 200)]


def test_the_gradient_is_that_of_the_loss() -> None:
    random = np.random.default_rng(0)
    states = random.normal(size=(16, 5)).astype(np.float32)
    actions = random.integers(3, size=16)
    network = QNetwork.drawn(5, 8, 3, random)
    targets = network.values(states)[np.arange(16), actions] + random.uniform(-0.4, 0.4, 16)

    def loss() -> float:
        error = network.values(states)[np.arange(16), actions] - targets
        return float(np.mean(error**2) / 2)

    before, first = loss(), {name: one.copy() for name, one in network.parameters.items()}
    slopes = {}
    for name, weights in network.parameters.items():
        place = (0,) * weights.ndim
        weights[place] += np.float32(1e-2)
        slopes[name] = loss() - before
        weights[place] = first[name][place]
    network.learn(states, actions, targets.astype(np.float32), 1e-4)
    for name, slope in slopes.items():
        place = (0,) * first[name].ndim
        moved = float(network.parameters[name][place] - first[name][place])
        # The first step of Adam has the learning rate's length and the gradient's direction.
        if abs(slope) > 1e-6:
            assert moved == pytest.approx(-np.sign(slope) * 1e-4, rel=1e-2), name
    assert loss() < before


def test_a_network_learns_which_action_is_better() -> None:
    random = np.random.default_rng(1)
    network = QNetwork.drawn(2, 32, 2, random)
    for _ in range(2_000):
        states = random.uniform(-1, 1, (64, 2)).astype(np.float32)
        actions = random.integers(2, size=64)
        targets = states[np.arange(64), actions]
        network.learn(states, actions, targets, 1e-3)
    states = random.uniform(-1, 1, (1_000, 2)).astype(np.float32)
    right = np.argmax(network.values(states), axis=1) == np.argmax(states, axis=1)
    assert right.mean() > 0.97


def test_every_request_is_settled_once_and_worth_its_score() -> None:
    scenario = paper_scenario()
    judgement = judge(scenario, LENGTHS, Static(2), repeat(1_000.0, 300), 0)
    assert judgement.scores == (1.0,) * 300
    judgement = judge(scenario, LENGTHS, Static(1), repeat(1_000.0, 300), 0)
    assert judgement.scores == tuple(scenario.scores[task][1] for task in judgement.tasks)
    # Ten requests a millisecond keep no target.
    assert judge(scenario, LENGTHS, Static(2), repeat(0.1, 2_000), 0).mean == 0


def test_the_same_seed_draws_the_same_requests_for_each_choice() -> None:
    gaps = [list(bursty(500, np.random.default_rng(3))) for _ in range(2)]
    assert gaps[0] == gaps[1]
    one = judge(paper_scenario(), LENGTHS, Static(0), iter(gaps[0]), 5)
    other = judge(paper_scenario(), LENGTHS, Greedy(), iter(gaps[0]), 5)
    assert one.tasks == other.tasks


def test_a_request_must_be_under_way_to_be_sent() -> None:
    environment = TrainingEnvironment(paper_scenario(), LENGTHS, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no request"):
        environment.step(0)
    with pytest.raises(ValueError, match="no request"):
        environment.reset(iter(()))


def test_windows_count_runs_of_twenty() -> None:
    judgement = ChoiceJudgement((1.0,) * 20 + (0.8,) + (1.0,) * 19, (0,) * 40, (0,) * 40)
    # The first window is perfect; each of the 20 others holds the 0.8, a mean of 0.99.
    assert judgement.windows() == (1, 21, 21, 21, 21)
    assert judgement.shares(2) == (1.0, 0.0)


def test_the_rate_follows_the_last_arrivals() -> None:
    rate = ArrivalRate()
    assert rate.observe(0.0) == 0.0
    assert [rate.observe(100.0 * number) for number in range(1, 200)][-1] == pytest.approx(10)
    seen = [rate.observe(20_000 + 10.0 * number) for number in range(200)]
    assert seen[-1] == pytest.approx(100, rel=0.01)


def test_a_stable_rate_is_that_rate() -> None:
    gaps = list(stable(8.0, 20_000, np.random.default_rng(0)))
    assert np.mean(gaps) == pytest.approx(125, rel=0.03)


def test_a_short_training_finds_what_greedy_cannot_see() -> None:
    # The large model is worth nothing for one of the tasks, and greedy does not look at tasks.
    scenario = Scenario(
        groups=(
            GroupModel(name="small", ranks=4, slots=64, step_base_ms=8, step_us_per_token=0.05),
            GroupModel(name="large", ranks=4, slots=64, step_base_ms=20, step_us_per_token=0.2),
        ),
        tasks=("code", "chat"),
        scores=((1.0, 0.0), (0.2, 1.0)),
        targets=Targets(tpot_ms=40),
    )
    windows: list[TrainingWindow] = []
    trainer = Trainer(scenario, LENGTHS, steps=6_000, seed=0)
    learned = trainer.train(windows.append, windows=6)
    assert [window.step for window in windows] == [1_000, 2_000, 3_000, 4_000, 5_000, 6_000]
    assert windows[-1].reward > 0.9 > windows[0].reward
    gaps = list(stable(4.0, 500, np.random.default_rng(9)))
    assert judge(scenario, LENGTHS, Greedy(), iter(gaps), 2).mean < 0.6
    assert judge(scenario, LENGTHS, learned, iter(gaps), 2).mean > 0.95

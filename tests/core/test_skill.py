"""How far predictions of single requests come true."""

import random

import pytest

from balanceroute.proxy.core.policies.own_trajectory import Skill


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

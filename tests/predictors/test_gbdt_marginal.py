"""The marginal's tables: smoothed frequencies of what ended, by age."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import Survival
from balanceroute.predictors.gbdt_features import Marginal
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import two_stage_estimate

histories = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def chance(marginal: Marginal, age: int) -> float:
    return float(1.0 / (1.0 + np.exp(-marginal.log_odds(np.array([age]))[0])))


def test_worked_example() -> None:
    marginal = Marginal(2, [1, 2, 2, 5])
    # Longer than age 0, 1, .. 5: 4, 3, 1, 1, 1, 0; of these end within 2 steps: 3, 2, 0, 1, 1, 0.
    prior = 7.5 / 11.0
    expected = [
        (ended + 2 * prior) / (running + 2)
        for ended, running in [(3, 4), (2, 3), (0, 1), (1, 1), (1, 1), (0, 0)]
    ]
    assert [chance(marginal, age) for age in range(6)] == pytest.approx(expected)
    # Their steps left sum to 1 + 2 + 2, 1 + 1, 0, 2, 1, 0: 10 of 7.
    expected = [
        (steps + 2 * 10 / 7) / (ended + 2)
        for steps, ended in [(5, 3), (2, 2), (0, 0), (2, 1), (1, 1), (0, 0)]
    ]
    assert marginal.remaining(np.arange(6)) == pytest.approx(expected)


@given(history=histories, horizon=st.integers(1, 70))
def test_many_alike_outweigh_the_smoothing(history: list[int], horizon: int) -> None:
    marginal = Marginal(horizon, history * 200)
    ages = np.arange(max(history))
    survival = Survival(history, half_life=None).survival([RequestId(0)] * len(ages), ages, horizon)
    finish, mean = two_stage_estimate(survival, horizon)
    chances = 1.0 / (1.0 + np.exp(-marginal.log_odds(ages)))
    assert chances == pytest.approx(finish, abs=0.011)
    assert marginal.remaining(ages)[finish > 0] == pytest.approx(
        mean[finish > 0], rel=0.011 * horizon
    )


@given(history=histories, horizon=st.integers(1, 70), ages=st.lists(st.integers(0, 90), max_size=5))
def test_nothing_is_ever_certain(history: list[int], horizon: int, ages: list[int]) -> None:
    marginal = Marginal(horizon, history)
    asked = np.array(ages, np.int64)
    assert np.isfinite(marginal.log_odds(asked)).all()
    remaining = marginal.remaining(asked)
    assert ((remaining > 0) & (remaining <= horizon)).all()


def test_without_a_history_both_sides_are_equally_likely() -> None:
    marginal = Marginal(40)
    assert chance(marginal, 0) == chance(marginal, 999) == 0.5
    assert marginal.remaining(np.array([7])).tolist() == [20.0]


@given(history=histories, ages=st.lists(st.integers(0, 80), max_size=5), steps=st.integers(0, 80))
def test_its_survival_is_the_empirical_one(history: list[int], ages: list[int], steps: int) -> None:
    asked = np.array(ages, np.int64)
    rows = Marginal(40, history).survival(asked, steps)
    expected = Survival(history, half_life=None).survival([RequestId(0)] * len(ages), asked, steps)
    assert np.array_equal(rows, expected)


@given(st.lists(st.integers(1, 50), max_size=150))
def test_it_changes_when_it_says_so_and_knows_all_then(outputs: list[int]) -> None:
    marginal = Marginal(10)
    ages = np.arange(60)
    for observed, output in enumerate(outputs, start=1):
        due, before = marginal.about_to_change, marginal.log_odds(ages)
        marginal.observe(output)
        if due:
            fresh = Marginal(10, outputs[:observed])
            assert np.array_equal(marginal.log_odds(ages), fresh.log_odds(ages))
            assert np.array_equal(marginal.remaining(ages), fresh.remaining(ages))
        else:
            assert np.array_equal(marginal.log_odds(ages), before)
    assert marginal.history == outputs

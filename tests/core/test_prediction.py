"""The paper's two stages and their gated composite, against sums over explicit distributions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors.base import check_survival
from balanceroute.proxy.core.errors import PredictorError
from balanceroute.proxy.core.prediction import composite_steps, two_stage_estimate

HORIZON = 10
# Weight of each number of remaining steps, from 1 on.
Weights = list[int]


def survival_row(weights: Weights, steps: int) -> NDArray[np.float64]:
    """Return float64[1, steps + 1]: Pr[remaining > h]."""
    total = sum(weights)
    return np.array([[sum(weights[h:]) / total for h in range(steps + 1)]])


def p_and_mu(weights: Weights, horizon: int) -> tuple[Fraction, Fraction]:
    """Return Pr[R <= H] and E[R | R <= H] by enumeration."""
    inside = weights[:horizon]
    if sum(inside) == 0:
        return Fraction(0), Fraction(horizon)
    mass = sum(steps * weight for steps, weight in enumerate(inside, start=1))
    return Fraction(sum(inside), sum(weights)), Fraction(mass, sum(inside))


def only(**weights: int) -> Weights:
    """Return a distribution from `r3=1, r12=4`: the weight of 3 and of 12 remaining steps."""
    row = [0] * 40
    for name, weight in weights.items():
        row[int(name.removeprefix("r")) - 1] = weight
    return row


some_weights = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any)


@given(some_weights, st.integers(1, 20))
def test_p_and_mu_equal_their_definitions(weights: Weights, horizon: int) -> None:
    finish, mean = two_stage_estimate(survival_row(weights, horizon + 5), horizon)
    p, mu = p_and_mu(weights, horizon)
    assert finish[0] == pytest.approx(float(p), abs=1e-12)
    assert mean[0] == pytest.approx(float(mu), rel=1e-9)


@given(some_weights, st.integers(1, 20))
def test_the_composite_equals_its_definition_behind_the_gate(
    weights: Weights, horizon: int
) -> None:
    steps = composite_steps(survival_row(weights, horizon), horizon)
    p, mu = p_and_mu(weights, horizon)
    exact = p * mu + (1 - p) * horizon if p >= Fraction(1, 2) else Fraction(horizon)
    assert 1 <= steps[0] <= horizon
    # Rounded to the nearest; which way a half goes is left to the last bit.
    assert abs(Fraction(int(steps[0])) - exact) <= Fraction(1, 2)


@pytest.mark.parametrize(
    ("weights", "steps"),
    [
        pytest.param(only(r3=1), 3, id="certain-departure"),
        pytest.param(only(r1=1), 1, id="next-step"),
        pytest.param(only(r10=1), 10, id="at-the-horizon-is-stays"),
        pytest.param(only(r11=1), 10, id="beyond-the-horizon"),
        pytest.param(only(r2=1, r4=1), 3, id="mean-of-two"),
        pytest.param(only(r2=3, r20=1), 4, id="three-quarters-at-2-the-rest-at-H"),
        pytest.param(only(r2=1, r20=1), 6, id="gate-open-at-one-half"),
        pytest.param(only(r2=49, r20=51), 10, id="gate-shut-below-one-half"),
        pytest.param(only(r1=9, r10=1), 2, id="rounded-to-the-nearest"),
    ],
)
def test_worked_examples(weights: Weights, steps: int) -> None:
    assert composite_steps(survival_row(weights, HORIZON), HORIZON).tolist() == [steps]


def test_without_the_gate_an_unlikely_departure_would_be_invented() -> None:
    # The negative control of the gate: p = 0.4 at 1 step would make the composite 6.4.
    weights = only(r1=4, r30=6)
    p, mu = p_and_mu(weights, HORIZON)
    assert float(p * mu + (1 - p) * HORIZON) == pytest.approx(6.4)
    assert composite_steps(survival_row(weights, HORIZON), HORIZON).tolist() == [HORIZON]


def test_a_horizon_of_one_step_always_answers_one() -> None:
    rows = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.3]])
    assert composite_steps(rows, 1).tolist() == [1, 1, 1]


def test_every_row_is_answered_for_itself() -> None:
    several = [only(r3=1), only(r2=1, r20=1), only(r11=1), only(r1=1)]
    rows = np.concatenate([survival_row(weights, HORIZON) for weights in several])
    assert composite_steps(rows, HORIZON).tolist() == [3, 6, 10, 1]


def test_columns_beyond_the_horizon_do_not_matter() -> None:
    short = survival_row(only(r2=3, r20=1), HORIZON)
    long = survival_row(only(r2=3, r20=1), 35)
    assert composite_steps(short, HORIZON).tolist() == composite_steps(long, HORIZON).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.1, -0.1])
@pytest.mark.parametrize("place", [(0, 0), (1, 2), (2, 3)])
def test_a_survival_that_is_no_probability_is_refused_wherever_it_stands(
    bad: float, place: tuple[int, int]
) -> None:
    survival = np.tile(np.linspace(1.0, 0.0, 4), (3, 1))
    check_survival(survival, 3, 3)
    check_survival(survival[:0], 0, 3)
    survival[place] = bad
    with pytest.raises(PredictorError):
        check_survival(survival, 3, 3)
    with pytest.raises(PredictorError):
        check_survival(np.asfortranarray(survival), 3, 3)

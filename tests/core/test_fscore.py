"""The F-score against brute force, hand-computed rows and the laws it must obey."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from balanceroute.proxy.core.subset import (
    FCurve,
    discounts,
    excess,
    f_score,
    idle_tokens,
    imbalance_tokens,
    lasting_discount,
)

TOKENS = st.integers(0, 200_000)
LOADS = st.lists(TOKENS, min_size=1, max_size=12)
MARGINS = st.lists(TOKENS | st.integers(0, 5), min_size=1, max_size=21)
# Not next to 0, where products lose their precision to underflow.
COEFFICIENTS = st.just(0.0) | st.floats(1e-3, 64.0)
DISCOUNTS = st.floats(0.0, 1.0)


def score_of(
    totals: ArrayLike,
    margins: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    alpha: float,
    beta: float,
) -> NDArray[np.float64]:
    """F as the paper writes it: a reward and a penalty per weighted step."""
    return f_score(totals, margins, beta * weights, reward=alpha * float(weights.sum()))


def peak_of(
    margins: NDArray[np.float64], weights: NDArray[np.float64], *, alpha: float, beta: float
) -> float:
    return FCurve(margins, beta * weights, reward=alpha * float(weights.sum())).peak


def margin(loads: Sequence[int], rank: int) -> int:
    return max(loads) - loads[rank]


def br0_score(total: int, loads: Sequence[int], rank: int) -> float:
    """F with horizon 0, reward 1 and one penalty per rank: BR-0."""
    margins = np.array([margin(loads, rank)], np.float64)
    return float(score_of([total], margins, np.ones(1), alpha=1.0, beta=len(loads))[0])


def exact_score(
    total: Fraction, margins: Sequence[int], weights: NDArray[np.float64], alpha: float, beta: float
) -> Fraction:
    """F by its definition, in rational numbers."""
    score = Fraction(0)
    for limit, weight in zip(margins, weights, strict=True):
        overflow = max(total - limit, Fraction(0))
        score += Fraction(float(weight)) * (Fraction(alpha) * total - Fraction(beta) * overflow)
    return score


@pytest.mark.parametrize(
    ("loads", "imbalance", "idle"),
    [
        ([7], 0, 0),
        ([5, 5, 5], 0, 0),
        ([100, 40, 70], 60, 90),
        ([0, 0, 0, 8], 8, 24),
    ],
)
def test_imbalance_and_idle_of_known_loads(loads: list[int], imbalance: int, idle: int) -> None:
    for form in (loads, np.array(loads)):
        assert imbalance_tokens(form) == imbalance
        assert idle_tokens(form) == idle
    assert type(imbalance_tokens(np.array(loads))) is int
    assert type(idle_tokens(np.array(loads))) is int


@pytest.mark.parametrize(
    ("horizon_steps", "gamma", "weights"),
    [
        (0, 0.9, [1.0]),
        (3, 0.5, [1.0, 0.5, 0.25, 0.125]),
        (2, 1.0, [1.0, 1.0, 1.0]),
        (2, 0.0, [1.0, 0.0, 0.0]),
    ],
)
def test_discounts_are_powers(horizon_steps: int, gamma: float, weights: list[float]) -> None:
    assert discounts(horizon_steps, gamma).tolist() == weights


@pytest.mark.parametrize(("horizon_steps", "gamma"), [(-1, 0.9), (3, -0.1), (3, 1.1)])
def test_discounts_refuse_what_is_none(horizon_steps: int, gamma: float) -> None:
    with pytest.raises(AssertionError):
        discounts(horizon_steps, gamma)


@pytest.mark.parametrize(
    ("gamma", "departures", "lasting"),
    [
        (0.8, 0.0, 0.8),
        (0.8, 0.047, 0.8),  # Mooncake, batches of 16.
        (0.8, 0.076, 0.8),  # Azure conversation, batches of 16.
        (0.8, 0.57, 0.32),  # Azure code, batches of 16.
        (0.8, 4.6, 0.0),  # Azure code, batches of 128.
        (0.2, 0.57, 0.2),
        (1.0, 0.1, 0.82),
    ],
)
def test_the_lasting_discount_of_known_rates(
    gamma: float, departures: float, lasting: float
) -> None:
    assert lasting_discount(gamma, departures) == lasting


@given(gamma=st.floats(0.0, 1.0), rates=st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)))
def test_the_lasting_discount_falls_with_the_turnover(
    gamma: float, rates: tuple[float, float]
) -> None:
    slow, fast = sorted(rates)
    assert 0.0 <= lasting_discount(gamma, fast) <= lasting_discount(gamma, slow) <= gamma


@pytest.mark.parametrize(
    ("total", "score"),
    # Rank 1 of loads (100, 40, 70): margin 60, then each token costs 3 - 1.
    [(0, 0), (30, 30), (60, 60), (61, 58), (90, 0), (100, -20)],
)
def test_br0_score_of_known_totals(total: int, score: int) -> None:
    assert br0_score(total, (100, 40, 70), 1) == score


@pytest.mark.parametrize(
    ("total", "score"),
    # Reward 2 x 1.75 a token; overflows of 8: (0, 4, 8), of 20: (10, 16, 20).
    [
        (0, 0.0),
        (3, 10.5 - 3 * 0.25 * 3),
        (8, 28.0 - 3 * (0.5 * 4 + 0.25 * 8)),
        (20, 70.0 - 3 * (10 + 0.5 * 16 + 0.25 * 20)),
    ],
)
def test_horizon_score_of_known_totals(total: int, score: float) -> None:
    margins = np.array([10.0, 4.0, 0.0])
    scores = score_of([total], margins, discounts(2, 0.5), alpha=2.0, beta=3.0)
    assert scores.tolist() == [score]


@given(loads=LOADS, data=st.data(), sizes=st.lists(st.integers(1, 100_000), max_size=6))
def test_br0_score_is_the_fall_of_total_imbalance(
    loads: list[int], data: st.DataObject, sizes: list[int]
) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    after = loads.copy()
    after[rank] += sum(sizes)
    assert br0_score(sum(sizes), loads, rank) == idle_tokens(loads) - idle_tokens(after)


@given(loads=LOADS, data=st.data())
def test_br0_slope_is_one_and_then_one_less_the_ranks(
    loads: list[int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    kink = margin(loads, rank)
    safe = data.draw(st.integers(0, kink))
    overflow = data.draw(TOKENS)
    assert br0_score(safe, loads, rank) == safe
    assert br0_score(kink + overflow, loads, rank) == kink + (1 - len(loads)) * overflow


@given(loads=LOADS, shift=TOKENS, total=TOKENS, data=st.data())
def test_adding_the_same_load_to_every_rank_changes_nothing(
    loads: list[int], shift: int, total: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    shifted = [load + shift for load in loads]
    assert imbalance_tokens(shifted) == imbalance_tokens(loads)
    assert idle_tokens(shifted) == idle_tokens(loads)
    assert br0_score(total, shifted, rank) == br0_score(total, loads, rank)


@given(
    margins=MARGINS,
    gamma=DISCOUNTS,
    alpha=COEFFICIENTS,
    beta=COEFFICIENTS,
    totals=st.lists(st.integers(0, 400_000), max_size=8),
)
def test_score_is_its_definition(
    margins: list[int], gamma: float, alpha: float, beta: float, totals: list[int]
) -> None:
    weights = discounts(len(margins) - 1, gamma)
    limits = np.array(margins, np.float64)
    expected = [
        float(exact_score(Fraction(total), margins, weights, alpha, beta)) for total in totals
    ]
    scale = (alpha + beta) * len(margins) * 400_000
    for form in (np.array(totals, np.int64), np.array(totals, np.float64)):
        scores = score_of(form, limits, weights, alpha=alpha, beta=beta)
        assert scores.dtype == np.float64
        assert scores.shape == (len(totals),)
        np.testing.assert_allclose(scores, expected, rtol=0.0, atol=1e-13 * scale)
    curve = FCurve(limits, beta * weights, reward=alpha * float(weights.sum()))
    one_by_one = [curve.score(total) for total in totals]
    np.testing.assert_allclose(one_by_one, expected, rtol=0.0, atol=1e-13 * scale)


@given(
    rows=st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=4),
    weights=st.tuples(*[st.integers(0, 64)] * 3),
    totals=st.lists(TOKENS, max_size=8).map(sorted),
)
def test_the_excess_over_some_rows_is_its_definition(
    rows: list[tuple[int, int, int]], weights: tuple[int, int, int], totals: list[int]
) -> None:
    found = excess(
        np.array(totals, np.float64), np.array(rows, np.float64), np.array(weights, np.float64)
    )
    # Whole numbers, so that there is no rounding.
    assert found.tolist() == [
        [
            sum(weight * max(total - kink, 0) for kink, weight in zip(row, weights, strict=True))
            for total in totals
        ]
        for row in rows
    ]


@given(total=TOKENS, kink=TOKENS, alpha=st.integers(0, 64), beta=st.integers(0, 64))
def test_a_horizon_of_equal_steps_scores_like_one_step(
    total: int, kink: int, alpha: int, beta: int
) -> None:
    one = score_of([total], np.array([float(kink)]), np.ones(1), alpha=alpha, beta=beta)
    two = score_of([total], np.full(2, float(kink)), np.full(2, 0.5), alpha=alpha, beta=beta)
    assert one == two


@given(
    margins=MARGINS, alpha=st.integers(0, 64), beta=st.integers(0, 64), start=TOKENS, step=TOKENS
)
def test_score_is_concave(margins: list[int], alpha: int, beta: int, start: int, step: int) -> None:
    # Whole numbers throughout, so that no rounding blurs the comparison.
    totals = np.array([start, start + step, start + 2 * step])
    weights = discounts(len(margins) - 1, 1.0)
    low, middle, high = score_of(
        totals, np.array(margins, np.float64), weights, alpha=alpha, beta=beta
    )
    assert low + high <= 2 * middle


@pytest.mark.parametrize(
    ("margins", "alpha", "beta", "peak"),
    [
        ([60.0], 1.0, 3.0, 60.0),
        ([0.0], 1.0, 3.0, 0.0),
        ([60.0], 1.0, 1.0, np.inf),  # A plateau without end.
        ([60.0], 2.0, 1.0, np.inf),
        ([30.0, 10.0, 20.0], 1.0, 2.0, 20.0),  # Slopes 3, 1, -1, -3.
        ([30.0, 10.0, 20.0], 1.0, 3.0, 20.0),  # Slopes 3, 0, ...: the plateau from 10 to 20.
        ([30.0, 10.0, 20.0], 1.0, 3.5, 10.0),
        ([30.0, 10.0, 20.0], 1.0, 1.25, 30.0),
        ([30.0, 10.0, 20.0], 1.0, 1.0, np.inf),
        ([30.0, 10.0, 20.0], 0.0, 1.0, 10.0),
        ([5.0, 5.0, 5.0], 1.0, 8.0, 5.0),
    ],
)
def test_peak_of_known_margins(
    margins: list[float], alpha: float, beta: float, peak: float
) -> None:
    weights = np.ones(len(margins))
    assert peak_of(np.array(margins), weights, alpha=alpha, beta=beta) == peak


def test_peak_follows_the_weights() -> None:
    margins = np.array([10.0, 20.0, 30.0])
    heavy_first, heavy_last = np.array([1.0, 0.1, 0.1]), np.array([0.1, 0.1, 1.0])
    assert peak_of(margins, heavy_first, alpha=1.0, beta=2.0) == 10.0
    assert peak_of(margins, heavy_last, alpha=1.0, beta=2.0) == 30.0
    # A step without weight has no say.
    assert peak_of(margins, np.array([0.0, 1.0, 0.0]), alpha=1.0, beta=2.0) == 20.0


@given(
    margins=MARGINS,
    alpha=st.integers(0, 64),
    beta=st.integers(0, 64),
    others=st.lists(st.integers(0, 400_000), max_size=8),
)
def test_nothing_scores_above_the_peak_and_nothing_larger_as_high(
    margins: list[int], alpha: int, beta: int, others: list[int]
) -> None:
    # With discount 1 all is whole numbers, so that plateaus are exact.
    weights = discounts(len(margins) - 1, 1.0)
    limits = np.array(margins, np.float64)
    peak = peak_of(limits, weights, alpha=alpha, beta=beta)
    far = 1_000_000.0
    if np.isinf(peak):
        at_far, beyond = score_of([far, far + 1], limits, weights, alpha=alpha, beta=beta)
        assert beyond >= at_far
        peak = far
    else:
        at_peak, beyond = score_of([peak, peak + 1], limits, weights, alpha=alpha, beta=beta)
        assert beyond < at_peak
    scores = score_of([peak, 0, *margins, *others], limits, weights, alpha=alpha, beta=beta)
    assert scores[0] == scores.max()


@given(margins=MARGINS, gamma=DISCOUNTS, alpha=COEFFICIENTS, beta=COEFFICIENTS, other=TOKENS)
def test_peak_is_a_maximiser_under_any_discount(
    margins: list[int], gamma: float, alpha: float, beta: float, other: int
) -> None:
    weights = discounts(len(margins) - 1, gamma)
    peak = peak_of(np.array(margins, np.float64), weights, alpha=alpha, beta=beta)
    at_peak = Fraction(min(peak, 1_000_000.0))
    best = exact_score(at_peak, margins, weights, alpha, beta)
    for total in (0, other, *margins):
        score = exact_score(Fraction(total), margins, weights, alpha, beta)
        # The peak is found in floats, so a slope of about 0 may be taken for its neighbour.
        assert float(score - best) <= 1e-13 * (alpha + beta) * len(margins) * 1_000_000


@given(margins=MARGINS, gamma=DISCOUNTS, coefficient=COEFFICIENTS)
def test_a_penalty_equal_to_the_reward_has_no_peak(
    margins: list[int], gamma: float, coefficient: float
) -> None:
    weights = discounts(len(margins) - 1, gamma)
    limits = np.array(margins, np.float64)
    assert peak_of(limits, weights, alpha=coefficient, beta=coefficient) == np.inf

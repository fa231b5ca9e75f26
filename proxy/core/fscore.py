"""The F-score: what admitting more load to one rank does to imbalance.

Pure functions on primitives and arrays. A *total* is the summed load of the admitted set and a
*margin* the distance of a rank's load below the envelope; both are KV tokens and never negative.
F depends on a set only through its total, and in the total it is concave and piecewise linear:
the subset solvers rely on nothing else.

Paper: §3.1, Eq. 1 (one step); §4.1, Eq. 2 (horizon).
"""

from collections.abc import Sequence
from math import exp

import numpy as np
from numpy.typing import ArrayLike, NDArray

Loads = NDArray[np.int64] | Sequence[int]


def imbalance_tokens(loads: Loads) -> int:
    """Return how far the heaviest rank is above the lightest, in KV tokens.

    Args:
        loads: int64[ranks], KV tokens; at least one rank.
    """
    return int(max(loads) - min(loads))


def idle_tokens(loads: Loads) -> int:
    """Return the KV tokens that the ranks lack, summed, compared with the heaviest rank.

    Divided by ranks x heaviest it is the share of rank time that is idle at the barrier. It is the
    paper's total imbalance I (§3.1); the F-score of an admission is minus its change.

    Args:
        loads: int64[ranks], KV tokens; at least one rank.
    """
    return int(len(loads) * max(loads) - sum(loads))


def discounts(horizon_steps: int, gamma: float) -> NDArray[np.float64]:
    """Return float64[horizon_steps + 1], the weight gamma**h of each step ahead.

    Args:
        horizon_steps: H, at least 0.
        gamma: In [0, 1]; 0 leaves the present step only.
    """
    assert horizon_steps >= 0
    assert 0.0 <= gamma <= 1.0
    return np.power(gamma, np.arange(horizon_steps + 1, dtype=np.float64))


def lasting_discount(gamma: float, departures_per_rank_step: float) -> float:
    """Return gamma, or the probability that a margin lasts one more step if that is lower.

    A margin is the difference of two ranks' loads. The projection of it holds only until one of them
    frees a slot: from then on it depends on a request that has not been chosen yet. With Poisson
    departures at rate a, neither frees a slot in one step with probability e**(-2 a). Rounded to
    hundredths, so that it rarely changes.

    Args:
        gamma: In [0, 1].
        departures_per_rank_step: At least 0.
    """
    assert departures_per_rank_step >= 0.0
    return min(gamma, round(exp(-2.0 * departures_per_rank_step), 2))


def f_score(
    totals: ArrayLike,
    margins: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    alpha: float,
    beta: float,
) -> NDArray[np.float64]:
    """Score admitting each of `totals` to one rank; O(n x H).

    F(s) = sum over h of weights[h] * (alpha * s - beta * max(s - margins[h], 0)). BR-0 is H = 0,
    weight 1, alpha = 1, beta = number of ranks: then F is minus the change of `idle_tokens`.
    Paper: §3.1, Eq. 1; §4.1, Eq. 2.

    Args:
        totals: float64[n] or int64[n], KV tokens.
        margins: float64[H + 1], KV tokens, none negative.
        weights: float64[H + 1], none negative.
        alpha: Reward per token, at least 0.
        beta: Penalty per token beyond a margin, at least 0.

    Returns:
        float64[n]. One step is exact for whole tokens and coefficients; over a horizon the order of
        summation is the linear-algebra library's, so the last bit may depend on n.
    """
    admitted = np.asarray(totals, dtype=np.float64)
    # BR-0's case, and the one that has to be exact: no sum over steps.
    if len(margins) == 1:
        overflow = np.maximum(admitted - margins, 0.0)
        return np.multiply(weights, alpha * admitted - beta * overflow)
    overflow = np.subtract.outer(admitted, margins)
    np.maximum(overflow, 0.0, out=overflow)
    score: NDArray[np.float64] = alpha * weights.sum() * admitted - beta * (overflow @ weights)
    return score


def f_peak(
    margins: NDArray[np.float64], weights: NDArray[np.float64], *, alpha: float, beta: float
) -> float:
    """Return the total at which `f_score` is largest; O(H log H).

    Right of s the slope of F is alpha * sum(weights) - beta * (weight of the margins <= s). It only
    falls, so F peaks where it first turns negative: at a weighted quantile of the margins.

    Args:
        margins: float64[H + 1], KV tokens, none negative.
        weights: float64[H + 1], none negative.
        alpha: Reward per token, at least 0.
        beta: Penalty per token beyond a margin, at least 0.

    Returns:
        KV tokens, at least 0. On a plateau its right end, so that "the largest reachable total up
        to the peak" is also the fullest of the best ones. inf where the slope never turns negative.
    """
    if len(margins) == 1:
        return float(margins[0]) if beta * weights[0] > alpha * weights[0] else float("inf")
    # Past each margin, in ascending order, the slope falls by beta times that step's weight.
    order = np.argsort(margins)
    weight_passed = np.cumsum(weights[order])
    # The last cumulative sum, not weights.sum(): with alpha = beta the slope past the last margin is
    # then exactly 0, however the order of summation rounds.
    kink = int(np.searchsorted(beta * weight_passed, alpha * weight_passed[-1], side="right"))
    return float(margins[order[kink]]) if kink < len(margins) else float("inf")

"""The F-score: what admitting more load to one rank does to imbalance.

Pure functions on primitives and arrays. A *total* is the summed load of the admitted set, a *margin*
the distance of a rank's load below the envelope; both are KV tokens and never negative.
F depends on a set only through its total, and in the total it is concave and piecewise linear:
the subset solvers rely on nothing else.

Paper: §3.1, Eq. 1 (one step); §4.1, Eq. 2 (horizon).
"""

from collections.abc import Sequence
from math import exp, inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Of a sum of some hundred floats, relative.
_ROUNDING = 1e-12

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
    totals: ArrayLike, kinks: NDArray[np.float64], penalties: NDArray[np.float64], *, reward: float
) -> NDArray[np.float64]:
    """Score admitting each of `totals` to one rank; O(n x k).

    F(s) = reward * s - sum over k of penalties[k] * max(s - kinks[k], 0). The paper's F has one kink
    per step, the margin; the kink of BR-0 has one penalty per rank, and F is minus the change of
    `idle_tokens`. Paper: §3.1, Eq. 1; §4.1, Eq. 2.

    Args:
        totals: float64[n] or int64[n], KV tokens.
        kinks: float64[k], KV tokens, none negative.
        penalties: float64[k], how much the slope falls at each kink, none negative.
        reward: The slope at 0, at least 0.

    Returns:
        float64[n]. One kink is exact for whole tokens and coefficients; with more the order of
        summation is the linear-algebra library's, so the last bit may depend on n.
    """
    admitted = np.asarray(totals, dtype=np.float64)
    # The paper's BR-0, and the case that has to be exact: no sum over kinks.
    if len(kinks) == 1:
        overflow = np.maximum(admitted - kinks, 0.0)
        return np.asarray(reward * admitted - penalties * overflow)
    overflow = np.subtract.outer(admitted, kinks)
    np.maximum(overflow, 0.0, out=overflow)
    score: NDArray[np.float64] = reward * admitted - overflow @ penalties
    return score


class FCurve:
    """F of one rank, as `f_score` has it, for one total at a time.

    O(k log k) to make, O(log k) for each total. The sums are those of the kinks below a total, so the
    last bits may differ from `f_score`; with whole tokens and coefficients both are exact.

    Args:
        kinks: float64[k], KV tokens, none negative.
        penalties: float64[k], none negative.
        reward: At least 0.

    Attributes:
        peak: The total at which F is largest, at least 0. On a plateau its right end, so that "the
            largest reachable total up to the peak" is also the fullest of the best ones. inf where
            the slope never turns negative.
    """

    def __init__(
        self, kinks: NDArray[np.float64], penalties: NDArray[np.float64], *, reward: float
    ) -> None:
        order = kinks.argsort()
        kinks, penalties = kinks[order], penalties[order]
        passed = penalties.cumsum()
        self._reward = reward
        # Arrays: a few totals are scored, and lists of all kinks would cost more than that.
        self._kinks = kinks
        self._passed: NDArray[np.float64] = passed
        self._moments: NDArray[np.float64] = (penalties * kinks).cumsum()
        # Right of s the slope of F is the reward minus the penalties of the kinks <= s. It only falls,
        # so F peaks where it first turns negative: at a weighted quantile of the kinks. A slope that
        # is 0 but for rounding is 0, in whatever order the penalties were summed.
        kink = int(passed.searchsorted(reward * (1.0 + _ROUNDING), side="right"))
        self.peak = kinks.item(kink) if kink < len(kinks) else inf

    def score(self, total: float) -> float:
        """Return F of `total` KV tokens."""
        last = int(self._kinks.searchsorted(total)) - 1
        if last < 0:
            return self._reward * total
        return self._reward * total - (self._passed.item(last) * total - self._moments.item(last))


def excess(
    totals: NDArray[np.float64], kinks: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by how much each total exceeds each row's kinks, a weighted sum; O(r (n + k log n)).

    That is the sum over k of weights[k] * max(s - kinks[r, k], 0), from two sums over the kinks below
    each total: of the weights, and of their products with the kinks.

    Args:
        totals: float64[n], KV tokens, ascending.
        kinks: float64[r, k], KV tokens, none negative.
        weights: float64[k], none negative.

    Returns:
        float64[r, n]; 0 without rounding where no kink with a weight is below the total.
    """
    rows, places = len(kinks), len(totals) + 1
    # The first total that reaches each kink; the last place is that of the kinks beyond all totals.
    first = totals.searchsorted(kinks)
    first += np.arange(0, rows * places, places)[:, None]
    counted = first.ravel()
    of_kinks = np.empty_like(kinks)
    of_kinks[:] = weights
    sums = [
        np.bincount(counted, values.ravel(), rows * places).reshape(rows, places)[:, :-1]
        for values in (of_kinks, kinks * weights)
    ]
    slopes, moments = (one.cumsum(axis=1) for one in sums)
    slopes *= totals
    slopes -= moments
    return slopes

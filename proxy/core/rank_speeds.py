"""How fast each rank reads its KV cache, as far as the times of the fleet's steps tell.

A step takes T = a + b x max_g c_g L_g, with c_g the **slowness** of rank g. A balanced fleet tells
little of it: the slow ranks set every time, and how much faster the others are does not show. So the
latest steps are kept, and for one rank after the other the times are explained anew with another c_g.
If that explains them better for certain, the rank gets the value nearest to the old one that does as
well as the best. If any smaller one did as well, the rank set no step, and it gets a little less than
that: the policy then gives it more, until it sets some.

The steps that were kept stay valid whatever is believed. Their errors may be correlated, as where
another process takes the machine for a while: both sides are differenced by that correlation.
While no other c_g explains more, all ranks count as equally fast, and every decision is as without.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

# Steps that are kept, one of each so many.
_SAMPLES = 256
_EVERY = 2
# Samples between two reviews, and those before the first.
_REVIEW = 8
_LEAST_SAMPLES = 64
# Samples that are kept back until nothing of that time turned out to be behind, and steps that are
# passed over after that: the live proxy corrects a request once it is five tokens off.
_KEPT_BACK = 4
_PASSED_OVER = 8
# Ranks of one review, which takes some 60 us for each.
_RANKS = 8
# What is tried in place of a c_g, relative to it. The middle one keeps it.
_FACTORS = np.linspace(0.75, 1.25, 21)
_KEPT = len(_FACTORS) // 2
# By how much less the squared errors have to be, in mean squared errors; the square of 5.5 standard
# errors, as many values are tried for many ranks. And by how much they may be more than the least.
_CERTAIN = 30.0
_AS_GOOD = 6.0
# How far below the smallest value that is known to matter.
_BEYOND = 0.05
# Errors below that share of a step are none.
_LEAST_ERROR = 1e-3


class LearnedSpeeds:
    """Learns from the steps of one fleet.

    Args:
        ranks: G, at least 2.

    Attributes:
        speeds: float64[G], 1 on average; None while all count as equally fast.
    """

    def __init__(self, ranks: int) -> None:
        self.speeds: NDArray[np.float64] | None = None
        self._slowness = np.ones(ranks)
        # Rings of the same steps: KV tokens of the ranks, and times.
        self._loads = np.zeros((_SAMPLES, ranks))
        self._times_ns = np.zeros(_SAMPLES)
        self._steps = self._samples = self._passed_over = 0
        self._latest: deque[tuple[NDArray[np.int64], float]] = deque()
        self._next = 0  # The rank that is reviewed next.

    def observe(self, loads: NDArray[np.int64], step_ns: float) -> None:
        """Learn from a step: int64[G], KV tokens of the ranks, and its time."""
        self._steps += 1
        if self._passed_over:
            self._passed_over -= 1
            return
        if self._steps % _EVERY:
            return
        self._latest.append((loads, step_ns))
        if len(self._latest) > _KEPT_BACK:
            self._take(*self._latest.popleft())

    def fell_behind(self) -> None:
        """Note that a request was behind the steps: they did not read all that they seemed to."""
        self._latest.clear()
        self._passed_over = _PASSED_OVER

    def _take(self, loads: NDArray[np.int64], step_ns: float) -> None:
        place = self._samples % _SAMPLES
        self._loads[place] = loads
        self._times_ns[place] = step_ns
        self._samples += 1
        if self._samples >= _LEAST_SAMPLES and self._samples % _REVIEW == 0:
            self._review()

    def _review(self) -> None:
        # In order of time.
        count, place = min(self._samples, _SAMPLES), self._samples % _SAMPLES
        loads = np.roll(self._loads, -place, axis=0)[-count:]
        times = np.roll(self._times_ns, -place)[-count:]
        ranks = len(self._slowness)
        changed = False
        for rank in (np.arange(min(_RANKS, ranks)) + self._next) % ranks:
            factor = self._better(int(rank), loads, times)
            if factor is not None:
                self._slowness[rank] *= factor
                changed = True
        self._next = (self._next + _RANKS) % ranks
        if changed:
            speeds = 1.0 / self._slowness
            self.speeds = speeds / speeds.mean()

    def _better(
        self, rank: int, loads: NDArray[np.float64], times: NDArray[np.float64]
    ) -> float | None:
        """Return what to multiply a rank's slowness by; None to keep it."""
        levels = loads * self._slowness
        correlation = _correlation(levels.max(axis=1), times)
        own = levels[:, rank].copy()
        levels[:, rank] = 0.0
        envelopes = np.maximum(levels.max(axis=1), np.multiply.outer(_FACTORS, own))
        squares = _squares(envelopes, times, correlation)
        squares += len(times) * (_LEAST_ERROR * (1.0 - correlation) * times.mean()) ** 2
        least = squares.min()
        if squares[_KEPT] - least < _CERTAIN * least / len(times):
            return None
        good = squares <= least * (1.0 + _AS_GOOD / len(times))
        factor = float(_FACTORS[good][np.abs(_FACTORS[good] - 1.0).argmin()])
        return factor - _BEYOND if good[0] and factor < 1.0 else factor


def _fit(
    envelopes: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return both sides without their means, and the slope, at least 0, of each row of envelopes."""
    envelopes = envelopes - envelopes.mean(axis=-1, keepdims=True)
    times = times - times.mean()
    spread = np.maximum((envelopes**2).sum(axis=-1), 1.0)
    return envelopes, times, np.maximum(envelopes @ times, 0.0) / spread


def _correlation(envelopes: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    """Return how errors follow those before them, 0 to 0.99."""
    envelopes, times, slope = _fit(envelopes, times)
    errors = times - slope * envelopes
    total = float(errors @ errors)
    if total <= 1e-6 * float(times @ times):
        return 0.0
    return min(max(float(errors[1:] @ errors[:-1]) / total, 0.0), 0.99)


def _squares(
    envelopes: NDArray[np.float64], times: NDArray[np.float64], correlation: float
) -> NDArray[np.float64]:
    """Return the squared errors of a line through the times over each row of envelopes, summed."""
    envelopes = envelopes[:, 1:] - correlation * envelopes[:, :-1]
    envelopes, times, slope = _fit(envelopes, times[1:] - correlation * times[:-1])
    return np.asarray(((times - slope[:, None] * envelopes) ** 2).sum(axis=1))

"""Empirical survival: the distribution of past output lengths, conditioned on the age alone.

Pr[output > a + h | output > a] is a ratio of two counts of the history. Paper: §C.2.1. Beyond the
longest output seen there is nothing to condition on, and the request is taken to stay: the
conservative anchor.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.predictors.base import RequestFeatures
from balanceroute.proxy.core.events import RequestId

# The counts are rebuilt when the history has grown by one part in so many.
_REBUILD_PARTS = 50


class Survival:
    """Learns from every finished request; remembers the latest `capacity` of them.

    Args:
        history: Output lengths known beforehand, oldest first.
        capacity: Bound of the history.
    """

    def __init__(self, history: Iterable[int] = (), *, capacity: int = 20_000) -> None:
        self._history: deque[int] = deque(history, maxlen=capacity)
        self._unseen = 0
        # _running[a] is the number of outputs longer than a.
        self._running: NDArray[np.float64] = self._count()
        self._padded = self._running

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the conditional survival of each age; O(n x steps)."""
        del requests
        # Zeros follow the counts, so that every window of steps + 1 counts exists.
        shortfall = len(self._running) + steps - len(self._padded)
        if shortfall > 0:
            self._padded = np.concatenate([self._padded, np.zeros(shortfall)])
        starts = np.minimum(ages, len(self._running) - 1)
        survival: NDArray[np.float64]
        if len(starts) == 1:  # Every admission asks for one; a slice is a tenth of the cost.
            survival = self._padded[None, starts[0] : starts[0] + steps + 1].copy()
        else:
            survival = sliding_window_view(self._padded, steps + 1)[starts]
        now = survival[:, 0].copy()
        known = now > 0
        now[~known] = 1.0
        survival /= now[:, None]
        survival[~known] = 1.0
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Add one output length to the history."""
        del request
        self._history.append(output_tokens)
        self._unseen += 1
        if self._unseen * _REBUILD_PARTS > len(self._history):
            self._running = self._padded = self._count()
            self._unseen = 0

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""

    def _count(self) -> NDArray[np.float64]:
        if not self._history:
            return np.zeros(1)
        lengths = np.bincount(np.fromiter(self._history, np.int64))
        return np.asarray(lengths[::-1].cumsum()[::-1] - lengths, np.float64)

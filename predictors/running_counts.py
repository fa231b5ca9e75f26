"""How many of the past outputs are longer than each age: what conditional survival is read off.

Weights may stand for counts, and several groups of outputs lie side by side, a row each.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray


class RunningCounts:
    """Weights of the outputs longer than each age, by group.

    Args:
        lengths: float64[groups, longest + 1], the weight of the outputs of each length.
    """

    def __init__(self, lengths: NDArray[np.float64]) -> None:
        self._groups, self._width = len(lengths), len(lengths[0])
        # _longer[group, a] is the weight of the outputs longer than a, and 0 at the longest.
        self._longer = np.zeros_like(lengths)
        self._longer[:, :-1] = lengths[:, :0:-1].cumsum(axis=1)[:, ::-1]
        # The rows in one line, zeros after each, so that every window of the asked width exists.
        self._stride = self._width
        self._line = self._longer.ravel()
        # Of the line, by the steps asked for, which are few numbers: a view costs 20 µs to make.
        self._windows: dict[int, NDArray[np.float64]] = {}

    @property
    def longest(self) -> int:
        """The longest output counted."""
        return self._width - 1

    def after(
        self, groups: NDArray[np.int64], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the weight of the outputs longer than age + h, float64[n, steps + 1]; O(n x steps).

        Args:
            groups: int64[n], or one group for all.
            ages: int64[n].
            steps: h goes from 0 to it.
        """
        if len(ages) == 1:
            return self.after_one(groups.item(), ages.item(), steps)[None].copy()
        if self._stride < self._width + steps:
            self._reach(steps)
        starts = groups * self._stride + np.minimum(ages, self._width - 1)
        windows = self._windows.get(steps)
        if windows is None:
            windows = self._windows[steps] = sliding_window_view(self._line, steps + 1)
        return windows[starts]

    def after_one(self, group: int, age: int, steps: int) -> NDArray[np.float64]:
        """Return what `after` does for one age, float64[steps + 1], in a tenth of the time. Read-only."""
        if self._stride < self._width + steps:
            self._reach(steps)
        start = group * self._stride + min(age, self._width - 1)
        return self._line[start : start + steps + 1]

    def _reach(self, steps: int) -> None:
        """Have as many zeros after each row as windows of so many steps need."""
        self._stride = self._width + steps
        line = np.zeros((self._groups, self._stride))
        line[:, : self._width] = self._longer
        self._line = line.ravel()
        self._windows.clear()

    def share_longer(self, output_tokens: int) -> float:
        """Return the share of the first group's weight that is longer than an output."""
        everything = float(self._longer[0, 0])
        if output_tokens >= self._width or not everything:
            return 0.0
        return float(self._longer[0, output_tokens]) / everything


def recency_weights(count: int, half_life: float | None) -> NDArray[np.float64]:
    """Return float64[count], the weights of a history, oldest first: 1 for the latest.

    Args:
        count: Length of the history.
        half_life: Every so many entries the weight halves; None weighs all alike.
    """
    if half_life is None:
        return np.ones(count)
    return np.exp2(np.arange(1 - count, 1) / half_life)


def shrunk(
    counts: NDArray[np.float64], fallback: NDArray[np.float64], weight: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Return the survival that a group's counts suggest, drawn towards a fallback.

    (N(a + h) + c S(h | a)) / (N(a) + c): of the outputs that reached the age, c more are imagined that
    go on as the fallback says. Beyond the group's longest output only the fallback is left.

    Args:
        counts: float64[n, steps + 1], N(a + h); the result takes its place.
        fallback: float64[n, steps + 1], S(h | a).
        weight: c, positive; one for all, or float64[n, 1].
    """
    reached = counts[:, :1] + weight
    counts += weight * fallback
    counts /= reached
    return counts

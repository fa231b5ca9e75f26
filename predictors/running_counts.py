"""How many of the past outputs are longer than each age: what conditional survival is read off.

Weights may stand for counts, and several groups of outputs lie side by side, a row each.
"""

from bisect import bisect_left

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


# Survival by prompt length: requests with prompts of about the same length are taken to be alike.
#
# The buckets are quantiles of the prompt lengths seen, moved as the history moves. Paper: §C.2.1,
# per-prompt-class memorisation.
#
# How far they are trusted is measured: where prompts say nothing of outputs, two outputs in a row
# lie as far apart within a bucket as anywhere, in ranks, and the fallback is left to speak.

# Outputs longer than that are not counted by age: the counts take 8 bytes per bucket and age.
LONGEST = 2**16
# The buckets are made anew when the history has grown by one part in so many.
_REBUILD_PARTS = 50
_FIRST_PAIRS = 1_024
# So many of the latest pairs decide how far the buckets are trusted, and never less than by this.
_JUDGED = 2_000
_IMAGINED = 50.0
_LEAST_LIKENESS = 0.01


class LengthBuckets:
    """Learns pairs of prompt and output lengths; remembers the latest `capacity` of them.

    Memory: 16 bytes a pair, and 8 bytes x buckets x the longest output, at most `LONGEST`.

    Args:
        buckets: How many, at least 1.
        weight: How many outputs the fallback stands for where a bucket's outputs are all alike, see
            `shrunk`; the more of them, the less alike they are.
        capacity: Bound of the history.
        half_life: Every so many requests a pair's weight halves.
        judged: Whether it is measured how much alike they are; else they are taken to be.

    Attributes:
        fallback_weight: How many outputs the fallback stands for now.
    """

    def __init__(
        self,
        *,
        buckets: int,
        weight: float,
        capacity: int,
        half_life: float,
        judged: bool = True,
    ) -> None:
        self._buckets = buckets
        self._weight = weight
        self._capacity = capacity
        self._half_life = half_life
        self._judged = judged
        # A ring of (prompt, output); `_added` in all.
        self._pairs = np.zeros((min(_FIRST_PAIRS, capacity), 2), np.int64)
        self._added = 0
        self._unseen = 0
        # The longest prompt of each bucket but the last.
        self._edges: NDArray[np.int64] = np.zeros(0, np.int64)
        self._edge_list: list[int] = []  # To look one up takes a tenth of the time.
        self._counts = RunningCounts(np.zeros((1, 1)))
        self.fallback_weight = weight

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn of a request that ended by itself."""
        place = self._added % self._capacity
        if place == len(self._pairs):
            more = min(len(self._pairs), self._capacity - len(self._pairs))
            self._pairs = np.concatenate([self._pairs, np.zeros((more, 2), np.int64)])
        # One by one: a pair would be made an array first.
        self._pairs[place, 0] = prompt_tokens
        self._pairs[place, 1] = output_tokens
        self._added += 1
        self._unseen += 1
        if self._unseen * _REBUILD_PARTS > min(self._added, self._capacity):
            self._rebuild()

    def extend(self, pairs: NDArray[np.int64]) -> None:
        """Learn many pairs at once, int64[n, 2], the oldest first; instead of what was known."""
        pairs = pairs[-self._capacity :]
        room = max(len(pairs), min(_FIRST_PAIRS, self._capacity))
        self._pairs = np.zeros((room, 2), np.int64)
        self._pairs[: len(pairs)] = pairs
        self._added = len(pairs)
        if self._added:
            self._rebuild()

    def history(self) -> NDArray[np.int64]:
        """Return the pairs remembered, int64[n, 2], oldest first."""
        if self._added <= self._capacity:
            return self._pairs[: self._added].copy()
        return np.roll(self._pairs, -(self._added % self._capacity), axis=0)

    def survival(
        self,
        prompts: NDArray[np.int64],
        ages: NDArray[np.int64],
        steps: int,
        fallback: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the survival of each request, float64[n, steps + 1].

        Args:
            prompts: int64[n], prompt lengths.
            ages: int64[n].
            steps: h goes from 0 to it.
            fallback: float64[n, steps + 1], the survival regardless of the prompt.
        """
        buckets = self._edges.searchsorted(prompts)
        counts = self._counts.after(buckets, ages, steps)
        if self._counts.longest == LONGEST:
            # The counts end before the outputs do: no word on windows that reach over the end.
            counts[ages + steps >= LONGEST] = 0.0
        return shrunk(counts, fallback, self.fallback_weight)

    def survival_of_one(
        self, prompt: int, age: int, steps: int, fallback: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what `survival` does for one request, float64[steps + 1], as is `fallback`."""
        weight = self.fallback_weight
        survival = weight * fallback
        if self._counts.longest < LONGEST or age + steps < LONGEST:
            bucket = bisect_left(self._edge_list, prompt)
            counts = self._counts.after_one(bucket, age, steps)
            survival += counts
            weight += counts.item(0)
        survival /= weight
        return survival

    def _rebuild(self) -> None:
        self._unseen = 0
        history = self.history()
        prompts, outputs = history[:, 0], np.minimum(history[:, 1], LONGEST)
        # Quantiles among the lengths themselves; equal ones leave some buckets empty.
        ranks = np.arange(1, self._buckets) * len(prompts) // self._buckets
        self._edges = np.sort(prompts)[ranks]
        self._edge_list = self._edges.tolist()
        buckets = np.searchsorted(self._edges, prompts)
        width = int(outputs.max()) + 1
        lengths = np.bincount(
            buckets * width + outputs,
            recency_weights(len(history), self._half_life),
            minlength=self._buckets * width,
        )
        self._counts = RunningCounts(lengths.reshape(-1, width).astype(np.float64, copy=False))
        if self._judged:
            alike = _likeness(buckets[-_JUDGED:], outputs[-_JUDGED:])
            self.fallback_weight = self._weight / max(alike, _LEAST_LIKENESS)


def _likeness(buckets: NDArray[np.int64], outputs: NDArray[np.int64]) -> float:
    """Return how much closer in rank two outputs in a row lie within a bucket than anywhere, 0 to 1."""
    ranks = np.searchsorted(np.sort(outputs), outputs)
    order = np.argsort(buckets, kind="stable")
    within = np.abs(np.diff(ranks[order]))[np.diff(buckets[order]) == 0]
    anywhere = np.abs(np.diff(ranks))
    # A few pairs imagined that are as far apart as any.
    apart = within.sum() + _IMAGINED * anywhere.mean() if anywhere.any() else 0.0
    if not apart:
        return 1.0
    return float(1.0 - apart / ((len(within) + _IMAGINED) * anywhere.mean()))

"""The distribution of past outputs as tables over the age: what the trees correct, and fall back on.

Both stages of the learned predictor start from what the age alone tells, and where the features tell
nothing they stay there. Counts are smoothed towards those of the average age, so that a tail of few
outputs is not taken for certainty.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.running_counts import RunningCounts
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS

CAPACITY = 20_000
"""Outputs remembered."""

# The tables are rebuilt when the history has grown by one part in so many.
_REBUILD_PARTS = 50
# How many requests of the average age are added to those of each age.
_PRIOR_REQUESTS = 2.0
_ONE_GROUP = np.zeros(1, np.int64)


class Marginal:
    """Learns from every finished request; remembers the latest `CAPACITY` of them.

    Args:
        horizon_steps: H, at least 1.
        history: Output lengths known beforehand, oldest first.
    """

    def __init__(self, horizon_steps: int, history: Iterable[int] = ()) -> None:
        self.horizon_steps = horizon_steps
        self._history: deque[int] = deque(history, maxlen=CAPACITY)
        self._unseen = 0
        self._rebuild()

    @property
    def history(self) -> list[int]:
        """The output lengths remembered, oldest first."""
        return list(self._history)

    @property
    def about_to_change(self) -> bool:
        """Whether the next output changes the answers; between such outputs they stay the same."""
        held = min(len(self._history) + 1, CAPACITY)
        return (self._unseen + 1) * _REBUILD_PARTS > held

    def observe(self, output_tokens: int) -> None:
        """Add one output length to the history."""
        due = self.about_to_change
        self._history.append(min(output_tokens, MAX_OUTPUT_TOKENS))
        self._unseen += 1
        if due:
            self._rebuild()

    def log_odds(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[n], the log odds of finishing within H more steps."""
        return np.asarray(self._log_odds[np.minimum(ages, len(self._log_odds) - 1)])

    def remaining(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[n], the mean steps left of those that finish within H, in (0, H]."""
        return np.asarray(self._remaining[np.minimum(ages, len(self._remaining) - 1)])

    def running(self, ages: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Return float64[n, steps + 1], how many outputs are longer than age + 0, 1, .. steps."""
        return self._counts.after(_ONE_GROUP, ages, steps)

    def survival(self, ages: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Return float64[n, steps + 1], the conditional survival; beyond all outputs seen it is 1."""
        running = self.running(ages, steps)
        now = running[:, :1]
        survival = np.ones_like(running)
        np.divide(running, now, out=survival, where=now > 0)
        return survival

    def _rebuild(self) -> None:
        self._unseen = 0
        horizon = self.horizon_steps
        outputs = np.fromiter(self._history, np.int64) if self._history else np.zeros(1, np.int64)
        self._counts = RunningCounts(np.bincount(outputs).astype(np.float64)[None])
        ages = self._counts.longest + 1
        running = self.running(np.zeros(1, np.int64), ages + horizon)[0]
        ended = running[:ages] - running[horizon : horizon + ages]
        # E[R; R <= H] is the sum over h < H of Pr[h < R <= H].
        sums = np.concatenate([[0.0], running.cumsum()])
        steps = sums[horizon : horizon + ages] - sums[:ages]
        steps -= horizon * running[horizon : horizon + ages]
        all_ended = ended.sum()
        # Half a request on each side, so that neither chance is ever 0.
        prior_chance = (all_ended + 0.5) / (running.sum() + 1.0)
        prior_mean = steps.sum() / all_ended if all_ended else horizon / 2
        chance = (ended + _PRIOR_REQUESTS * prior_chance) / (running[:ages] + _PRIOR_REQUESTS)
        self._log_odds = np.asarray(np.log(chance / (1.0 - chance)), np.float64)
        self._remaining = np.asarray(
            (steps + _PRIOR_REQUESTS * prior_mean) / (ended + _PRIOR_REQUESTS), np.float64
        )

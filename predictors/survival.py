"""Empirical survival: the distribution of past output lengths, conditioned on the age alone.

Pr[output > a + h | output > a] is a ratio of two weights of the history. Paper: §C.2.1. Beyond the
longest output seen there is nothing to condition on, and the request is taken to stay: the
conservative anchor.

The history is bounded and decayed: a latest output weighs most. On the public traces a half-life of
1,000 requests lowers the Brier score by 4 % where the outputs drift (Azure's conversations) and costs
at most 0.4 % where they do not.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import PastRequest, RequestFeatures
from balanceroute.predictors.running_counts import RunningCounts, recency_weights
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, State
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

KIND = "survival"
MAX_CAPACITY = 1_000_000
MAX_HALF_LIFE = 1e9

# The counts are rebuilt when the history has grown by one part in so many.
_REBUILD_PARTS = 50
_ONE_GROUP = np.zeros(1, np.int64)


class Survival:
    """Learns from every finished request; remembers the latest `capacity` of them.

    Args:
        history: Output lengths known beforehand, oldest first.
        capacity: Bound of the history.
        half_life: Every so many requests an output's weight halves; None weighs all of the history
            alike.

    Raises:
        ConfigError: An option is out of range.
    """

    uses_keys: ClassVar[bool] = False

    def __init__(
        self,
        history: Iterable[int] = (),
        *,
        capacity: int = 20_000,
        half_life: float | None = 1_000.0,
    ) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"capacity must be in 1..{MAX_CAPACITY}, not {capacity}")
        if half_life is not None and not 0 < half_life <= MAX_HALF_LIFE:
            raise ConfigError(f"half_life must be in 0..{MAX_HALF_LIFE:g}, not {half_life}")
        bounded = (min(output_tokens, MAX_OUTPUT_TOKENS) for output_tokens in history)
        self._history: deque[int] = deque(bounded, maxlen=capacity)
        self._capacity = capacity
        self._half_life = half_life
        self._unseen = 0
        self._counts = self._count()

    @classmethod
    def of_past(cls, past: Iterable[PastRequest]) -> Self:
        """Return one that has learned from requests, in the order in which they ended."""
        ended = sorted(past, key=attrgetter("finished_s"))
        return cls(request.output_tokens for request in ended)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the conditional survival of each age; O(n x steps)."""
        del requests
        if len(ages) == 1:  # Every admission asks for one.
            of_one = self._counts.after_one(0, ages.item(), steps)
            alone = of_one.item(0)
            return (of_one / alone if alone > 0 else np.ones(steps + 1))[None]
        survival = self._counts.after(_ONE_GROUP, ages, steps)
        now = survival[:, 0].copy()
        known = now > 0
        now[~known] = 1.0
        survival /= now[:, None]
        survival[~known] = 1.0
        return survival

    def share_longer(self, output_tokens: int) -> float:
        """Return the share of the history that is longer than an output; its age plays no part."""
        return self._counts.share_longer(output_tokens)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Add one output length to the history."""
        del request
        self._history.append(min(output_tokens, MAX_OUTPUT_TOKENS))
        self._unseen += 1
        if self._unseen * _REBUILD_PARTS > len(self._history):
            self._counts = self._count()
            self._unseen = 0

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""

    def state(self) -> State:
        """Return the history."""
        return State(
            KIND,
            {
                "capacity": self._capacity,
                "half_life": self._half_life,
                "history": list(self._history),
            },
        )

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return a predictor with the same history.

        Raises:
            StateError: The state cannot be of this predictor.
        """
        half_life = None
        if state.value("half_life") is not None:
            half_life = state.number("half_life", least=1e-9, most=MAX_HALF_LIFE)
        return cls(
            state.outputs("history").tolist(),
            capacity=state.integer("capacity", least=1, most=MAX_CAPACITY),
            half_life=half_life,
        )

    def _count(self) -> RunningCounts:
        if not self._history:
            return RunningCounts(np.zeros((1, 1)))
        history = np.fromiter(self._history, np.int64, len(self._history))
        weights = recency_weights(len(history), self._half_life)
        return RunningCounts(np.bincount(history, weights)[None].astype(np.float64, copy=False))

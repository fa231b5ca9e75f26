"""What clients expect of their own requests, set against what such requests emitted.

A **hint** is a number of tokens that the client states. It need not be right: it only has to tell
requests apart. Requests with hints of about one size are taken to be alike, drawn towards what another
predictor says, and how far they are believed is measured (`LengthBuckets`). So classes (100 for short,
5,000 for long) do as well as estimates, and hints that tell nothing leave the other predictor to speak.

Without one, a request's `max_tokens` is its hint where answers alike habitually reach it
(`LimitHabits`). Those are judged apart, among themselves: what clients state is of another kind.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import PastRequest, Predictor, RequestFeatures
from balanceroute.predictors.running_counts import LengthBuckets
from balanceroute.proxy.core.events import RequestId

# Whether answers habitually reach the limits that their requests set.
#
# Most clients set `max_tokens` far above what they expect, so a limit says little. Some set it to
# what they get: rollouts of a fixed length, completions of a line, benchmarks. Which of the two
# it is shows in the answers to requests alike: with the same limit, and the same key if requests
# have keys.

# Answers alike before anything is assumed of the next one.
LEAST_ANSWERS = 8
# A limit counts from this share of answers on that reached it.
_LEAST_SHARE = 0.5
# Latest answers alike that the share is of, about.
_LATEST = 64
# Most groups of requests alike; that which was not used for longest yields. Some 300 bytes each.
_GROUPS = 20_000
# As of `ExactMatch`: of more keys, the least specific are left out.
_MAX_KEYS = 8
_NO_KEYS = (None,)


class LimitHabits:
    """Counts the answers that reached their limits, by limit and key and by limit alone."""

    def __init__(self) -> None:
        # How many answers, and the share that reached the limit. A limit alone has key None.
        self._groups: OrderedDict[tuple[int, int | None], tuple[int, float]] = OrderedDict()

    def is_habit(self, max_tokens: int, keys: tuple[int, ...]) -> bool:
        """Return whether at least half of the recent answers alike reached this limit.

        The most specific key of which enough answers are known decides, else the limit alone.

        Args:
            max_tokens: The limit.
            keys: Of the request, the most specific first.
        """
        for key in (*keys[:_MAX_KEYS], None) if keys else _NO_KEYS:
            group = self._groups.get((max_tokens, key))
            if group is not None and group[0] >= LEAST_ANSWERS:
                return group[1] >= _LEAST_SHARE
        return False

    def learn(self, max_tokens: int, keys: tuple[int, ...], output_tokens: int) -> None:
        """Learn from an answer that ended by itself, or at its limit."""
        reached = float(output_tokens >= max_tokens)
        for key in (*keys[:_MAX_KEYS], None) if keys else _NO_KEYS:
            group = max_tokens, key
            answers, share = self._groups.pop(group, (0, 0.0))
            answers = min(answers + 1, _LATEST)
            self._groups[group] = answers, share + (reached - share) / answers
        while len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)


# As of `ExactMatch` for the lengths of prompts.
_BUCKETS = 32
_BUCKET_WEIGHT = 3.0
_HALF_LIFE = 3_000.0
_HISTORY = 20_000


HintSource = Literal["client", "limit"]
"""Where a hint comes from."""


class Hint(NamedTuple):
    """A number of tokens that tells requests apart."""

    tokens: int
    source: HintSource


class Hinted:
    """Corrects another predictor by hints; without any it only passes on.

    What it learned is not part of a predictor's file.

    Args:
        predictor: The other one; knows `past` already.
        past: Requests known beforehand; learned in their order.
    """

    def __init__(self, predictor: Predictor, past: Iterable[PastRequest] = ()) -> None:
        self._predictor = predictor
        self._habits = LimitHabits()
        # Of the active requests with a limit, and of those with a hint.
        self._limited: dict[RequestId, RequestFeatures] = {}
        self._hints: dict[RequestId, Hint] = {}
        self._outputs: dict[HintSource, LengthBuckets] = {}
        for request in past:
            features = request.features
            self._learn(features, self._hint(features), request.output_tokens)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note the hint, and pass on what is known of a request."""
        self._predictor.begin(request, features)
        if features.max_tokens is None:
            self._limited.pop(request, None)
        else:
            self._limited[request] = features
        hint = self._hint(features)
        if hint is None:
            self._hints.pop(request, None)
        else:
            self._hints[request] = hint

    def hint_of(self, request: RequestId) -> Hint | None:
        """Return the hint of an active request, if it has any."""
        return self._hints.get(request)

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the other's answer, corrected for the requests with a hint."""
        survival = self._predictor.survival(requests, ages, steps)
        hints = self._hints
        if not hints:
            return survival
        if len(requests) == 1:  # Every admission asks for one, of which no rows are to be picked.
            hint = hints.get(requests[0])
            alike = None if hint is None else self._outputs.get(hint.source)
            if hint is not None and alike is not None:
                of_one = alike.survival_of_one(hint.tokens, ages.item(), steps, survival[0])
                survival = of_one[None]
            return survival
        for source, outputs in self._outputs.items():
            rows = [
                row
                for row, request in enumerate(requests)
                if request in hints and hints[request].source == source
            ]
            if rows:
                stated = np.array([hints[requests[row]].tokens for row in rows], np.int64)
                survival[rows] = outputs.survival(stated, ages[rows], steps, survival[rows])
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn what a hint came to, and let the other learn."""
        self._predictor.observe(request, output_tokens)
        features, hint = self._limited.pop(request, None), self._hints.pop(request, None)
        self._learn(features, hint, output_tokens)

    def forget(self, request: RequestId) -> None:
        """Pass on that a request ended otherwise."""
        self._predictor.forget(request)
        self._limited.pop(request, None)
        self._hints.pop(request, None)

    def learn(self, hint: Hint, output_tokens: int) -> None:
        """Learn what came of a hint, of a request that ended by itself."""
        outputs = self._outputs.get(hint.source)
        if outputs is None:
            outputs = self._outputs[hint.source] = LengthBuckets(
                buckets=_BUCKETS,
                weight=_BUCKET_WEIGHT,
                capacity=_HISTORY,
                half_life=_HALF_LIFE,
                # That a limit tells something is known from how often it was reached. Usually there
                # is but one, which has nothing to be told apart from.
                judged=hint.source == "client",
            )
        outputs.add(hint.tokens, output_tokens)

    def _hint(self, features: RequestFeatures) -> Hint | None:
        if features.expected_tokens is not None:
            return Hint(features.expected_tokens, "client")
        limit = features.max_tokens
        if limit is not None and self._habits.is_habit(limit, features.keys):
            return Hint(limit, "limit")
        return None

    def _learn(
        self, features: RequestFeatures | None, hint: Hint | None, output_tokens: int
    ) -> None:
        if features is not None and features.max_tokens is not None:
            self._habits.learn(features.max_tokens, features.keys, output_tokens)
        if hint is not None:
            self.learn(hint, output_tokens)

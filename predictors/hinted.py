"""What clients expect of their own requests, set against what such requests emitted.

A hint is a number of tokens that the client states. It need not be right: it only has to tell requests
apart. Requests with hints of about one size are taken to be alike, drawn towards what another predictor
says, and how far they are believed is measured (`LengthBuckets`). So classes (100 for short, 5,000 for
long) do as well as estimates, and hints that tell nothing leave the other predictor to speak.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import Predictor, RequestFeatures
from balanceroute.predictors.length_buckets import LengthBuckets
from balanceroute.proxy.core.events import RequestId

# As of `ExactMatch` for the lengths of prompts.
_BUCKETS = 32
_BUCKET_WEIGHT = 3.0
_HALF_LIFE = 3_000.0
_HISTORY = 20_000


class Hinted:
    """Corrects another predictor by `expected_tokens`; without any hint it only passes on.

    What it learned is not part of a predictor's file.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        # Of the active requests with a hint.
        self._hints: dict[RequestId, int] = {}
        self._outputs: LengthBuckets | None = None

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note the hint, and pass on what is known of a request."""
        self._predictor.begin(request, features)
        if features.expected_tokens is None:
            self._hints.pop(request, None)
        else:
            self._hints[request] = features.expected_tokens

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the other's answer, corrected for the requests with a hint."""
        survival = self._predictor.survival(requests, ages, steps)
        hints = self._hints
        if self._outputs is None or not hints:
            return survival
        rows = [row for row, request in enumerate(requests) if request in hints]
        if rows:
            stated = np.array([hints[requests[row]] for row in rows], np.int64)
            survival[rows] = self._outputs.survival(stated, ages[rows], steps, survival[rows])
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn what a hint came to, and let the other learn."""
        self._predictor.observe(request, output_tokens)
        hint = self._hints.pop(request, None)
        if hint is not None:
            self.learn(hint, output_tokens)

    def learn(self, expected_tokens: int, output_tokens: int) -> None:
        """Learn of a request that ended by itself."""
        if self._outputs is None:
            self._outputs = LengthBuckets(
                buckets=_BUCKETS, weight=_BUCKET_WEIGHT, capacity=_HISTORY, half_life=_HALF_LIFE
            )
        self._outputs.add(expected_tokens, output_tokens)

    def forget(self, request: RequestId) -> None:
        """Pass on that a request ended otherwise."""
        self._predictor.forget(request)
        self._hints.pop(request, None)

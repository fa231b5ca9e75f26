"""A request's own bound on its output, applied to what another predictor says of it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import Predictor, RequestFeatures
from balanceroute.proxy.core.events import RequestId


class Capped:
    """Says that a request is gone once it has emitted `max_tokens`; else what another says.

    A request that has emitted them all and yet runs is taken to end with its next token.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        # Of the active requests that have a bound.
        self._caps: dict[RequestId, int] = {}

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note the bound, and pass on what is known of a request."""
        self._predictor.begin(request, features)
        if features.max_tokens is None:
            self._caps.pop(request, None)
        else:
            self._caps[request] = features.max_tokens

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the other's answer, 0 from each request's bound on."""
        survival = self._predictor.survival(requests, ages, steps)
        caps = self._caps
        if not caps:
            return survival
        if len(requests) == 1:  # Every admission asks for one: a slice is cheaper.
            cap = caps.get(requests[0])
            if cap is not None:
                survival[0, max(cap - ages.item(), 1) :] = 0.0
            return survival
        bounded = [(row, caps[request]) for row, request in enumerate(requests) if request in caps]
        if bounded:
            rows, most = np.array(bounded, np.int64).T
            # Never now: the request runs.
            left = np.maximum(most - ages[rows], 1)
            # Most requests end far from their bounds.
            near = left <= steps
            rows, left = rows[near], left[near]
            survival[rows] *= np.arange(steps + 1) < left[:, None]
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Let the other learn of an output."""
        self._predictor.observe(request, output_tokens)
        self._caps.pop(request, None)

    def forget(self, request: RequestId) -> None:
        """Pass on that a request ended otherwise."""
        self._predictor.forget(request)
        self._caps.pop(request, None)

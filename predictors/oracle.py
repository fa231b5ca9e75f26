"""The oracle: knows every output length. Replay only; it bounds what a predictor can bring."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import RequestFeatures
from balanceroute.proxy.core.events import RequestId


class Oracle:
    """Answers with certainty.

    Args:
        output_tokens: The output length of every request that will be asked about.
    """

    def __init__(self, output_tokens: Mapping[RequestId, int]) -> None:
        self._output_tokens = output_tokens

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return 1 up to the last step of each request, 0 from its end on."""
        outputs = np.array([self._output_tokens[request] for request in requests])
        remaining = np.maximum(outputs - ages, 1)
        return (np.arange(steps + 1) < remaining[:, None]).astype(np.float64)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn nothing."""

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""

"""No prediction: every request stays. BR-H then sees only the growth of the loads."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import RequestFeatures
from balanceroute.proxy.core.events import RequestId


class NoPrediction:
    """Says that every request outlives every horizon."""

    uses_keys: ClassVar[bool] = False

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return ones."""
        del ages
        return np.ones((len(requests), steps + 1))

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn nothing."""

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""

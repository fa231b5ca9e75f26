"""A predictor under observation: how much it is asked, what that costs, and how wrong it is.

The error is that of the tokens expected within the horizon. A request's windows follow one another
without overlap: the first prediction opens one, and it comes due when the request ends or, at a later
prediction, has emitted the whole horizon.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from balanceroute.predictors import Predictor, RequestFeatures
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.metrics import Metrics


class MeasuredPredictor:
    """Asks another predictor; see `Predictor`.

    Args:
        predictor: The one that knows.
        metrics: Told of refreshes and errors.
        stopwatch: Seconds of real time.
    """

    def __init__(
        self, predictor: "Predictor", metrics: "Metrics", stopwatch: Callable[[], float]
    ) -> None:
        self._predictor = predictor
        self._metrics = metrics
        self._stopwatch = stopwatch
        # Per request: the age at which its window opened, its length and the tokens expected in it.
        self._windows: dict[RequestId, tuple[int, int, float]] = {}

    def begin(self, request: "RequestId", features: "RequestFeatures") -> None:
        """Pass on what is known of a request."""
        self._predictor.begin(request, features)

    def survival(
        self, requests: "Sequence[RequestId]", ages: "NDArray[np.int64]", steps: int
    ) -> "NDArray[np.float64]":
        """Return the other's answer."""
        begin_s = self._stopwatch()
        answer = self._predictor.survival(requests, ages, steps)
        self._metrics.predictor_refreshed(len(requests), self._stopwatch() - begin_s)
        # E[min(remaining, steps)] is the sum of Pr[remaining > h] over h < steps.
        expected = answer[:, :-1].sum(axis=1).tolist()
        for request, age, tokens in zip(requests, ages.tolist(), expected, strict=True):
            window = self._windows.get(request)
            if window is None or age >= window[0] + window[1]:
                if window is not None:
                    self._metrics.predictor_error(abs(window[2] - window[1]))
                self._windows[request] = (age, steps, tokens)
        return answer

    def observe(self, request: "RequestId", output_tokens: int) -> None:
        """Learn of an output, and judge the window that it ends."""
        self._predictor.observe(request, output_tokens)
        window = self._windows.pop(request, None)
        if window is not None:
            emitted = min(window[1], max(0, output_tokens - window[0]))
            self._metrics.predictor_error(abs(window[2] - emitted))

    def forget(self, request: "RequestId") -> None:
        """Judge nothing: the request did not end by itself."""
        self._predictor.forget(request)
        self._windows.pop(request, None)

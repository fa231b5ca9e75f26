"""Predictors from outside this package: a function that takes nothing and returns a `Predictor`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import Predictor, RequestFeatures
from balanceroute.proxy.core.errors import PredictorError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.outside import made
from balanceroute.proxy.core.prediction import check_survival

_Result = TypeVar("_Result")
_MEMBERS = ("survival", "begin", "observe", "forget")


def outside_predictor(name: str) -> Predictor:
    """Return what `module:function` makes.

    Raises:
        ConfigError: There is no such function, or it makes no predictor.
    """
    predictor: Predictor = made("predictor", name, _MEMBERS)
    return predictor


class Checked:
    """A predictor from outside, whose answers and failures are told as its own.

    The live proxy does without: it checks each answer, and goes on without a predictor that fails.

    Args:
        name: Of the predictor, `module:function`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._predictor = outside_predictor(name)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Pass on what is known of a request."""
        self._told("begin", lambda: self._predictor.begin(request, features))

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return its answer.

        Raises:
            PredictorError: It fails, or answers what cannot be used.
        """

        def answer() -> NDArray[np.float64]:
            survival = np.asarray(self._predictor.survival(requests, ages, steps), np.float64)
            check_survival(survival, len(requests), steps)
            return survival

        return self._told("survival", answer)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Let it learn of an output."""
        self._told("observe", lambda: self._predictor.observe(request, output_tokens))

    def forget(self, request: RequestId) -> None:
        """Pass on that a request ended otherwise."""
        self._told("forget", lambda: self._predictor.forget(request))

    def _told(self, method: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        # Any exception: the predictor is third-party code.
        except Exception as error:
            reason = error if isinstance(error, PredictorError) else f"{method}: {error!r}"
            raise PredictorError(f"predictor {self._name!r}: {reason}") from error

"""The contract between a predictor and its drivers, which report to it and ask it.

The core only asks (`balanceroute.proxy.core.prediction.Predictor`); the driver of the core reports the
begin and the end of every request to the predictor. No report lies in the future of a question: features
are known before a request's first token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from balanceroute.proxy.core import prediction
from balanceroute.proxy.core.config import made
from balanceroute.proxy.core.errors import PredictorError
from balanceroute.proxy.core.events import RequestId


class RequestFeatures(Struct, frozen=True):
    """The facts of a request before it decodes."""

    prompt_tokens: int  # Length of its prompt.
    # The most tokens that each of its sequences may emit, below 2**31; None if there is no bound.
    max_tokens: int | None = None
    # The properties that recurring requests share, as 64-bit hashes, the most specific first: the whole
    # request, then ever shorter beginnings of its prompt. Empty if unknown.
    keys: tuple[int, ...] = ()
    # What the client expects each sequence to emit; None if it does not say.
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that ran to its own end: the unit of training and evaluation."""

    arrival_s: float  # When it came, in seconds of any one clock.
    finished_s: float  # When it ended, of the same clock: only then is its length known.
    features: RequestFeatures  # Known before it decoded.
    output_tokens: int  # Tokens that each of its sequences emitted, at least 1.


class Predictor(prediction.OutputPredictor, Protocol):
    """Predicts how long active requests go on, and learns from those that end."""

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note the facts of a request, before the first question about it.

        Called again when more is known, its true prompt length for example; the latest counts.
        """

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn that a request ended by itself after `output_tokens` tokens a sequence."""

    def forget(self, request: RequestId) -> None:
        """Note that a request ended otherwise: how long it would have gone on stays unknown."""


# No prediction: every request stays. BR-H then sees only the growth of the loads.


class NoPrediction:
    """Says that every request outlives every horizon."""

    uses_keys: ClassVar[bool] = False

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        del ages
        return np.ones((len(requests), steps + 1))

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn nothing."""

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""


# The oracle: knows every output length. Replay only; it bounds the gain of any predictor.


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


# A request's own bound on its output, applied to another predictor's answer.


class Capped:
    """Says that a request is gone once it has emitted `max_tokens`; else what another says.

    A request that has emitted them all and yet runs is taken to end with its next token.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        # Of the active requests that have a bound.
        self._caps: dict[RequestId, int] = {}

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
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
        self._predictor.observe(request, output_tokens)
        self._caps.pop(request, None)

    def forget(self, request: RequestId) -> None:
        self._predictor.forget(request)
        self._caps.pop(request, None)


# How far rounding may take a probability out of its range.
_ROUNDING = 1e-3


def check_survival(survival: NDArray[np.float64], requests: int, steps: int) -> None:
    """Reject a result of `OutputPredictor.survival` that cannot be used.

    Raises:
        PredictorError: The shape is wrong, or a value is no probability.
    """
    if survival.shape != (requests, steps + 1):
        raise PredictorError(f"survival is {survival.shape}, not {(requests, steps + 1)}")
    # Indexing by `argmin` costs a quarter of `min`. Both find a NaN, which satisfies no comparison.
    if requests and not (
        survival.item(survival.argmin()) >= -_ROUNDING
        and survival.item(survival.argmax()) <= 1.0 + _ROUNDING
    ):
        raise PredictorError("survival is not in 0..1")


# Predictors from outside this package: a function that takes nothing and returns a `Predictor`.

_Result = TypeVar("_Result")
_MEMBERS = ("survival", "begin", "observe", "forget")


def outside_predictor(name: str) -> Predictor:
    """Return the predictor that `module:function` makes.

    Raises:
        ConfigError: There is no such function, or it makes no predictor.
    """
    predictor: Predictor = made("predictor", name, _MEMBERS)
    return predictor


class Checked:
    """A predictor from outside, whose failures are errors that name it.

    The live proxy does without: it checks each answer, and goes on without a predictor that fails.

    Args:
        name: Of the predictor, `module:function`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._predictor = outside_predictor(name)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        self._call("begin", lambda: self._predictor.begin(request, features))

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return its answer.

        Raises:
            PredictorError: It fails, or its answer is unusable.
        """

        def answer() -> NDArray[np.float64]:
            survival = np.asarray(self._predictor.survival(requests, ages, steps), np.float64)
            check_survival(survival, len(requests), steps)
            return survival

        return self._call("survival", answer)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        self._call("observe", lambda: self._predictor.observe(request, output_tokens))

    def forget(self, request: RequestId) -> None:
        self._call("forget", lambda: self._predictor.forget(request))

    def _call(self, method: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        # Any exception: the predictor is third-party code.
        except Exception as error:
            reason = error if isinstance(error, PredictorError) else f"{method}: {error!r}"
            raise PredictorError(f"predictor {self._name!r}: {reason}") from error

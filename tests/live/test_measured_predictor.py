"""What is measured of a predictor while it is asked."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors import RequestFeatures
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.measured_predictor import MeasuredPredictor


class Certain:
    """Predicts that every request ends at one age."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.observed: list[tuple[int, int]] = []
        self.begun: list[tuple[int, RequestFeatures]] = []
        self.forgotten: list[int] = []

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        self.begun.append((request, features))

    def forget(self, request: RequestId) -> None:
        self.forgotten.append(request)

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        del requests
        alive = ages[:, None] + np.arange(steps + 1) < self.end
        alive[:, 0] = True
        return alive.astype(np.float64)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        self.observed.append((request, output_tokens))


class Counts:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.refreshes: list[tuple[int, float]] = []
        self.errors: list[float] = []

    def predictor_refreshed(self, count: int, seconds: float) -> None:
        self.refreshes.append((count, seconds))

    def predictor_error(self, abs_tokens: float) -> None:
        self.errors.append(abs_tokens)


def measured(end: int) -> tuple[MeasuredPredictor, Certain, Counts]:
    times = iter(range(100))
    certain, counts = Certain(end), Counts()
    return MeasuredPredictor(certain, counts, lambda: float(next(times))), certain, counts  # type: ignore[arg-type]


def ask(predictor: MeasuredPredictor, *ages: int, steps: int = 10) -> NDArray[np.float64]:
    requests = [RequestId(number) for number in range(len(ages))]
    return predictor.survival(requests, np.array(ages), steps)


def test_the_answer_is_the_other_predictors_and_its_cost_is_told() -> None:
    predictor, certain, counts = measured(end=5)
    assert np.array_equal(ask(predictor, 0, 3), ask(predictor, 0, 3))
    assert np.array_equal(ask(predictor, 0), certain.survival([RequestId(0)], np.array([0]), 10))
    assert counts.refreshes == [(2, 1.0), (2, 1.0), (1, 1.0)]


def test_an_exact_prediction_has_no_error() -> None:
    predictor, certain, counts = measured(end=5)
    ask(predictor, 0)
    predictor.observe(RequestId(0), 5)
    assert counts.errors == [0.0]
    assert certain.observed == [(0, 5)]


def test_a_request_that_outlives_its_window_is_judged_by_the_whole_window() -> None:
    predictor, _, counts = measured(end=3)
    ask(predictor, 0)
    ask(predictor, 4)
    assert counts.errors == []
    ask(predictor, 10)
    assert counts.errors == [7.0]


def test_a_request_that_was_cut_off_is_not_judged() -> None:
    predictor, certain, counts = measured(end=5)
    features = RequestFeatures(7)
    predictor.begin(RequestId(0), features)
    ask(predictor, 0)
    predictor.forget(RequestId(0))
    predictor.observe(RequestId(0), 9)
    assert counts.errors == []
    assert certain.begun == [(0, features)]
    assert certain.forgotten == [0]

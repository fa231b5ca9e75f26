"""Survival curves that are asked for once."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.predictors import Oracle
from balanceroute.proxy.core.curves import POINTS, Curves
from balanceroute.proxy.core.events import RequestId

WIDTH = 10


def ids(*numbers: int) -> list[RequestId]:
    return [RequestId(number) for number in numbers]


class Counting(Oracle):
    """Counts the requests that it is asked about."""

    asked = 0

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.asked += len(requests)
        return super().survival(requests, ages, steps)


def knowing(outputs: dict[int, int]) -> Counting:
    return Counting({RequestId(number): tokens for number, tokens in outputs.items()})


def at(curves: Curves, request: int, age: int, width: int) -> NDArray[np.float64]:
    """Return the survival of one request at an age."""
    row = curves.row_of(RequestId(request))
    return curves.survival(np.array([row]), np.array([age]), width)


def test_each_request_is_asked_about_once() -> None:
    predictor = knowing({1: 50, 2: 90})
    curves = Curves(predictor)
    curves.ask(ids(1), WIDTH)
    curves.ask(ids(1, 2), WIDTH)
    assert predictor.asked == 2


@pytest.mark.parametrize(("age", "ends_at"), [(0, 5), (20, 3), (40, 1)])
def test_a_curve_is_read_from_the_requests_age_on(age: int, ends_at: int) -> None:
    curves = Curves(knowing({1: 45}))
    curves.ask(ids(1), WIDTH)
    survival = at(curves, 1, age, WIDTH)
    assert survival[0].tolist() == [1.0] * ends_at + [0.0] * (POINTS - ends_at)


@pytest.mark.parametrize(
    ("output", "width", "survival"), [(52, 10, 0.7), (45, 10, 0.0), (54, 9, 1.0), (6, 1, 1.0)]
)
def test_it_is_kept_where_between_two_points_a_request_ends(
    output: int, width: int, survival: float
) -> None:
    curves = Curves(knowing({1: output}))
    curves.ask(ids(1), width)
    ahead = at(curves, 1, 0, width)[0]
    assert ahead[5] == pytest.approx(survival)
    assert ahead[:5].tolist() == [1.0] * 5


def test_what_outlives_its_curve_is_taken_to_stay() -> None:
    curves = Curves(knowing({1: 50}))
    curves.ask(ids(1), WIDTH)
    assert at(curves, 1, 70, WIDTH).tolist() == [[1.0] * POINTS]
    assert at(curves, 1, 10**6, WIDTH).tolist() == [[1.0] * POINTS]


def test_a_request_never_asked_about_has_the_mean_of_the_latest() -> None:
    curves = Curves(knowing({1: 15, 2: 35}))
    curves.ask(ids(1, 2), WIDTH)
    survival = at(curves, 9, 0, WIDTH)[0]
    assert survival[:5].tolist() == [1.0, 1.0, 0.5, 0.5, 0.0]


def test_curves_follow_the_grid() -> None:
    curves = Curves(knowing({1: 95, 2: 45}))
    curves.ask(ids(1), WIDTH)
    curves.stretch(2.5)
    survival = at(curves, 1, 0, 25)[0]
    assert survival[:6].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    curves.ask(ids(2), 25)
    assert at(curves, 2, 0, 25)[0, :4].tolist() == [1.0, 1.0, 0.28, 0.0]


def test_requests_that_are_gone_make_room() -> None:
    predictor = knowing(dict.fromkeys(range(2_000), 30))
    curves = Curves(predictor)
    for number in range(0, 2_000, 50):
        batch = ids(*range(number, number + 50))
        curves.make_room(len(batch), set(batch).__contains__)
        curves.ask(batch, WIDTH)
    assert len(curves) <= 512
    curves.ask(ids(1_999), WIDTH)
    assert predictor.asked == 2_000


def test_the_lasting_output_weighs_a_request_by_how_long_it_stays() -> None:
    curves = Curves(knowing({1: 200, 2: 600}))
    curves.ask(ids(1, 2), WIDTH)
    assert curves.lasting_output(WIDTH) == pytest.approx((200**2 + 600**2) / 800, rel=0.05)

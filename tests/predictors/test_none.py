"""Without a prediction every request stays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import composite_steps


@given(ages=st.lists(st.integers(0, 10**6), max_size=5), steps=st.integers(0, 40))
def test_every_request_outlives_every_horizon(ages: list[int], steps: int) -> None:
    predictor = NoPrediction()
    requests = [RequestId(number) for number in range(len(ages))]
    predictor.observe(RequestId(0), 1)
    rows = predictor.survival(requests, np.array(ages, np.int64), steps)
    assert rows.shape == (len(ages), steps + 1)
    assert (rows == 1.0).all()


def test_the_composite_of_no_prediction_is_stays() -> None:
    rows = NoPrediction().survival([RequestId(0)], np.array([0]), 30)
    assert composite_steps(rows, 30).tolist() == [30]

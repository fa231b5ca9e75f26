"""The oracle answers with certainty, and never that an active request has ended."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import Oracle
from balanceroute.proxy.core.events import RequestId


def test_a_request_runs_up_to_its_last_token() -> None:
    oracle = Oracle({RequestId(3): 5, RequestId(8): 2})
    rows = oracle.survival([RequestId(8), RequestId(3)], np.array([0, 3]), 4)
    assert rows.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0]]


def test_a_request_past_its_last_token_is_about_to_leave() -> None:
    oracle = Oracle({RequestId(0): 5})
    assert oracle.survival([RequestId(0)], np.array([5]), 2).tolist() == [[1.0, 0.0, 0.0]]
    assert oracle.survival([RequestId(0)], np.array([9]), 2).tolist() == [[1.0, 0.0, 0.0]]


def test_observing_changes_nothing() -> None:
    oracle = Oracle({RequestId(0): 3})
    oracle.observe(RequestId(0), 1)
    assert oracle.survival([RequestId(0)], np.array([0]), 3).tolist() == [[1.0, 1.0, 1.0, 0.0]]


@given(
    outputs=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    age=st.integers(0, 30),
    steps=st.integers(0, 30),
)
def test_rows_are_certain_start_at_one_and_never_rise(
    outputs: list[int], age: int, steps: int
) -> None:
    requests = [RequestId(number) for number in range(len(outputs))]
    oracle = Oracle(dict(zip(requests, outputs, strict=True)))
    rows = oracle.survival(requests, np.full(len(outputs), age), steps)
    assert rows.shape == (len(outputs), steps + 1)
    assert set(np.unique(rows)) <= {0.0, 1.0}
    assert (rows[:, 0] == 1.0).all()
    assert (np.diff(rows, axis=1) <= 0.0).all()
    for row, output in zip(rows, outputs, strict=True):
        if output > age:
            assert row.tolist() == [float(age + ahead < output) for ahead in range(steps + 1)]

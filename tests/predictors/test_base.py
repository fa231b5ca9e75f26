"""A request's own bound applies whatever another predictor says, and never to the present step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import Capped, NoPrediction, Oracle, RequestFeatures, Survival
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import composite_steps


def request(number: int) -> RequestId:
    return RequestId(number)


def features(max_tokens: int | None) -> RequestFeatures:
    return RequestFeatures(10, max_tokens)


@given(
    caps=st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=1, max_size=8),
    age=st.integers(0, 60),
    steps=st.integers(0, 40),
)
def test_survival_is_zero_from_the_bound_on_and_the_others_until_then(
    caps: list[int | None], age: int, steps: int
) -> None:
    requests = [request(number) for number in range(len(caps))]
    capped, other = Capped(Survival([5, 20, 90])), Survival([5, 20, 90])
    for number, cap in zip(requests, caps, strict=True):
        capped.begin(number, features(cap))
    ages = np.full(len(caps), age)
    rows, others = (one.survival(requests, ages, steps) for one in (capped, other))
    for row, plain, cap in zip(rows.tolist(), others.tolist(), caps, strict=True):
        for ahead in range(steps + 1):
            gone = cap is not None and ahead > 0 and age + ahead >= cap
            assert row[ahead] == (0.0 if gone else plain[ahead])


def test_the_latest_bound_counts() -> None:
    capped = Capped(NoPrediction())
    capped.begin(request(1), features(3))
    capped.begin(request(1), features(2))
    assert capped.survival([request(1)], np.array([0]), 3).tolist() == [[1.0, 1.0, 0.0, 0.0]]
    capped.begin(request(1), features(None))
    assert capped.survival([request(1)], np.array([0]), 3).tolist() == [[1.0] * 4]


def test_a_bound_ends_with_its_request() -> None:
    capped = Capped(NoPrediction())
    for number in (1, 2):
        capped.begin(request(number), features(1))
    capped.observe(request(1), 1)
    capped.forget(request(2))
    capped.forget(request(3))
    rows = capped.survival([request(1), request(2)], np.array([0, 0]), 2)
    assert (rows == 1.0).all()


def test_the_other_is_told_of_everything() -> None:
    told: list[tuple[object, ...]] = []

    class Other(NoPrediction):
        def begin(self, request: RequestId, features: RequestFeatures) -> None:
            told.append(("begin", request, features))

        def observe(self, request: RequestId, output_tokens: int) -> None:
            told.append(("observe", request, output_tokens))

        def forget(self, request: RequestId) -> None:
            told.append(("forget", request))

    capped = Capped(Other())
    capped.begin(request(1), features(7))
    capped.observe(request(1), 5)
    capped.forget(request(2))
    assert told == [
        ("begin", 1, features(7)),
        ("observe", 1, 5),
        ("forget", 2),
    ]


# Without a prediction every request stays.


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


# The oracle answers with certainty, and never that an active request has ended.


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

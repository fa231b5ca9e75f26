"""Empirical survival: conditional frequencies of a bounded history that grows with what ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import Survival
from balanceroute.proxy.core.events import RequestId


def curve(predictor: Survival, age: int, steps: int) -> list[float]:
    row: list[float] = predictor.survival([RequestId(0)], np.array([age]), steps)[0].tolist()
    return row


def frequencies(history: list[int], age: int, steps: int) -> list[float]:
    """Return the share of the outputs longer than `age` that are longer than age + h."""
    longer = [output for output in history if output > age]
    if not longer:
        return [1.0] * (steps + 1)
    return [
        sum(output > age + ahead for output in longer) / len(longer) for ahead in range(steps + 1)
    ]


histories = st.lists(st.integers(1, 30), max_size=60)


@given(
    history=histories,
    ages=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    steps=st.integers(0, 40),
)
def test_survival_is_the_conditional_frequency_of_the_history(
    history: list[int], ages: list[int], steps: int
) -> None:
    requests = [RequestId(number) for number in range(len(ages))]
    rows = Survival(history).survival(requests, np.array(ages), steps)
    assert rows.shape == (len(ages), steps + 1)
    assert rows.tolist() == [frequencies(history, age, steps) for age in ages]


@given(history=histories, ages=st.lists(st.integers(0, 60), max_size=5), steps=st.integers(0, 40))
def test_rows_start_at_one_and_never_rise(history: list[int], ages: list[int], steps: int) -> None:
    requests = [RequestId(number) for number in range(len(ages))]
    rows = Survival(history).survival(requests, np.array(ages, np.int64), steps)
    assert rows.dtype == np.float64
    assert (rows[:, 0] == 1.0).all()
    assert (np.diff(rows, axis=1) <= 0.0).all()
    assert (rows >= 0.0).all()


def test_worked_example() -> None:
    predictor = Survival([1, 2, 2, 4])
    assert curve(predictor, 0, 4) == [1.0, 0.75, 0.25, 0.25, 0.0]
    assert curve(predictor, 1, 3) == [1.0, 1 / 3, 1 / 3, 0.0]
    assert curve(predictor, 2, 2) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("age", [4, 5, 1_000_000])
def test_beyond_the_longest_output_seen_a_request_stays(age: int) -> None:
    assert curve(Survival([1, 2, 2, 4]), age, 3) == [1.0] * 4


def test_without_a_history_every_request_stays() -> None:
    assert curve(Survival(), 0, 3) == [1.0] * 4


def test_observing_teaches() -> None:
    predictor = Survival()
    for output in (2, 4):
        predictor.observe(RequestId(0), output)
    assert curve(predictor, 0, 4) == [1.0, 1.0, 0.5, 0.5, 0.0]


def test_the_history_forgets_what_is_older_than_its_capacity() -> None:
    predictor = Survival([9] * 10, capacity=4)
    for output in (2, 2, 2):
        predictor.observe(RequestId(0), output)
    assert curve(predictor, 0, 9) == frequencies([9, 2, 2, 2], 0, 9)
    predictor.observe(RequestId(0), 2)
    assert curve(predictor, 0, 2) == [1.0, 1.0, 0.0]
    # The nines are gone: nothing is known beyond age 2.
    assert curve(predictor, 2, 2) == [1.0] * 3


@given(st.lists(st.integers(1, 20), max_size=120), st.integers(1, 40))
def test_a_small_history_is_never_stale(outputs: list[int], capacity: int) -> None:
    predictor = Survival(capacity=capacity)
    for observed, output in enumerate(outputs, start=1):
        predictor.observe(RequestId(0), output)
        # Windows of all lengths in turn, so that none relies on the one before.
        age, steps = observed % 7, observed * 5 % 23
        known = outputs[:observed][-capacity:]
        assert curve(predictor, age, steps) == frequencies(known, age, steps)


def test_a_large_history_is_stale_by_one_part_in_fifty_at_most() -> None:
    predictor = Survival([1] * 1_000, capacity=1_000)
    for observed in range(1, 1_001):
        predictor.observe(RequestId(0), 5)
        seen = curve(predictor, 0, 1)[1]
        assert abs(round(seen * 1_000) - observed) <= 1_000 // 50

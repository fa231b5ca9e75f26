"""Empirical survival: conditional frequencies of a bounded, decayed history that grows with what ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import State, StateError, Survival
from balanceroute.proxy.core.errors import ConfigError
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
    rows = Survival(history, half_life=None).survival(requests, np.array(ages), steps)
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
    predictor = Survival([1, 2, 2, 4], half_life=None)
    assert curve(predictor, 0, 4) == [1.0, 0.75, 0.25, 0.25, 0.0]
    assert curve(predictor, 1, 3) == [1.0, 1 / 3, 1 / 3, 0.0]
    assert curve(predictor, 2, 2) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("age", [4, 5, 1_000_000])
def test_beyond_the_longest_output_seen_a_request_stays(age: int) -> None:
    assert curve(Survival([1, 2, 2, 4]), age, 3) == [1.0] * 4


def test_without_a_history_every_request_stays() -> None:
    assert curve(Survival(), 0, 3) == [1.0] * 4


def test_observing_teaches() -> None:
    predictor = Survival(half_life=None)
    for output in (2, 4):
        predictor.observe(RequestId(0), output)
    assert curve(predictor, 0, 4) == [1.0, 1.0, 0.5, 0.5, 0.0]


def test_the_history_forgets_what_is_older_than_its_capacity() -> None:
    predictor = Survival([9] * 10, capacity=4, half_life=None)
    for output in (2, 2, 2):
        predictor.observe(RequestId(0), output)
    assert curve(predictor, 0, 9) == frequencies([9, 2, 2, 2], 0, 9)
    predictor.observe(RequestId(0), 2)
    assert curve(predictor, 0, 2) == [1.0, 1.0, 0.0]
    # The nines are gone: nothing is known beyond age 2.
    assert curve(predictor, 2, 2) == [1.0] * 3


@given(st.lists(st.integers(1, 20), max_size=120), st.integers(1, 40))
def test_a_small_history_is_never_stale(outputs: list[int], capacity: int) -> None:
    predictor = Survival(capacity=capacity, half_life=None)
    for observed, output in enumerate(outputs, start=1):
        predictor.observe(RequestId(0), output)
        # Windows of all lengths in turn, so that none relies on the one before.
        age, steps = observed % 7, observed * 5 % 23
        known = outputs[:observed][-capacity:]
        assert curve(predictor, age, steps) == frequencies(known, age, steps)


def test_a_large_history_is_stale_by_one_part_in_fifty_at_most() -> None:
    predictor = Survival([1] * 1_000, capacity=1_000, half_life=None)
    for observed in range(1, 1_001):
        predictor.observe(RequestId(0), 5)
        seen = curve(predictor, 0, 1)[1]
        assert abs(round(seen * 1_000) - observed) <= 1_000 // 50


def test_an_output_weighs_half_after_a_half_life() -> None:
    # Weights 1, 2 and 4 in units of the oldest; those over 2 tokens are 2 + 4, and 1 + 2.
    assert curve(Survival([2, 4, 4], half_life=1.0), 0, 2)[2] == pytest.approx(6 / 7)
    assert curve(Survival([4, 4, 2], half_life=1.0), 0, 2)[2] == pytest.approx(3 / 7)


def test_after_a_drift_the_new_outputs_soon_outweigh_the_old() -> None:
    predictors = {half_life: Survival(half_life=half_life) for half_life in (None, 100.0)}
    for predictor in predictors.values():
        for output in [10] * 1_000 + [100] * 300:
            predictor.observe(RequestId(0), output)
    ends_soon = {half_life: 1 - curve(one, 0, 50)[50] for half_life, one in predictors.items()}
    assert ends_soon[None] > 0.7
    assert ends_soon[100.0] < 0.2


@given(history=histories, half_life=st.one_of(st.none(), st.floats(0.01, 1e6)))
def test_decayed_rows_start_at_one_and_never_rise(
    history: list[int], half_life: float | None
) -> None:
    ages = np.arange(40)
    requests = [RequestId(number) for number in range(40)]
    rows = Survival(history, half_life=half_life).survival(requests, ages, 40)
    assert (rows[:, 0] == 1.0).all()
    assert (np.diff(rows, axis=1) <= 0.0).all()
    assert (rows >= 0.0).all()


@given(history=histories, output=st.integers(0, 40))
def test_the_share_that_is_longer_is_a_frequency(history: list[int], output: int) -> None:
    share = Survival(history, half_life=None).share_longer(output)
    assert share == sum(one > output for one in history) / max(1, len(history))


def test_one_request_is_predicted_as_among_many() -> None:
    predictor = Survival([3, 7, 20, 60])
    requests = [RequestId(number) for number in range(80)]
    rows = predictor.survival(requests, np.arange(80), 30)
    for age, row in enumerate(rows.tolist()):
        assert curve(predictor, age, 30) == row


@given(history=histories, half_life=st.one_of(st.none(), st.floats(0.5, 1e6)))
def test_a_restored_predictor_says_and_learns_the_same(
    history: list[int], half_life: float | None
) -> None:
    predictor = Survival(history, capacity=40, half_life=half_life)
    restored = Survival.from_state(predictor.state())
    for output in (5, 9):
        assert curve(restored, 2, 40) == curve(predictor, 2, 40)
        for one in (predictor, restored):
            one.observe(RequestId(0), output)
    assert restored.state() == predictor.state()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0),
        ("capacity", 2_000_000),
        ("capacity", 10.0),
        ("half_life", 0),
        ("half_life", "long"),
        ("half_life", float("nan")),
        ("history", [1, -1]),
        ("history", [1, 2**40]),
        ("history", [True]),
        ("history", "12"),
    ],
)
def test_a_foreign_state_is_refused_by_field(name: str, value: object) -> None:
    fields = {**Survival([1, 2]).state().fields, name: value}
    with pytest.raises(StateError, match=name):
        Survival.from_state(State("survival", fields))
    del fields[name]
    with pytest.raises(StateError, match=f"{name!r} is missing"):
        Survival.from_state(State("survival", fields))


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity must be in 1"):
        Survival(capacity=0)
    for half_life in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="half_life must be"):
            Survival(half_life=half_life)

"""The learned predictor keeps its contract, says what its stages say, and outlives its process."""

import subprocess
import sys
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import PastRequest, RequestFeatures
from balanceroute.predictors.gbdt import Gbdt
from balanceroute.predictors.gbdt_features import Features, Marginal
from balanceroute.predictors.gbdt_training import train
from balanceroute.predictors.state import State, StateError
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import two_stage_estimate

if TYPE_CHECKING:
    from pathlib import Path

    from lightgbm import Booster

H = 40


class Constant:
    """Trees that add the same to every row, and count the rows."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.rows = 0

    def predict(self, matrix: NDArray[np.float64], **_options: object) -> NDArray[np.float64]:
        self.rows += len(matrix)
        return np.full(len(matrix), self.value)


def past() -> list[PastRequest]:
    """Return requests whose first key tells about how long they get."""
    rng = np.random.default_rng(5)
    requests = []
    for number in range(400):
        key = int(rng.integers(4))
        output_tokens = int(20 + 60 * key + rng.integers(20))
        features = RequestFeatures(int(rng.integers(1, 2_000)), keys=(key, 99))
        requests.append(PastRequest(number * 0.1, number * 0.1 + 2.0, features, output_tokens))
    return requests


PAST = past()
STATE = train(PAST).state()


def trained() -> Gbdt:
    return Gbdt.from_state(STATE)


def stub(history: list[int], finish: Constant, remaining: Constant, horizon: int = H) -> Gbdt:
    features = Features(horizon)
    for output in history:
        features.observe(RequestFeatures(1), output)
    return Gbdt(features, cast("Booster", finish), cast("Booster", remaining))


def ids(count: int) -> list[RequestId]:
    return [RequestId(number) for number in range(count)]


def row(predictor: Gbdt, age: int, steps: int, request: int = 0) -> NDArray[np.float64]:
    curve: NDArray[np.float64] = predictor.survival([RequestId(request)], np.array([age]), steps)[0]
    return curve


@given(
    questions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), max_size=8),
    steps=st.integers(0, 100),
)
def test_rows_start_at_one_and_never_rise(questions: list[tuple[int, int]], steps: int) -> None:
    predictor = SHARED
    requests = [RequestId(request) for request, _ in questions]
    ages = np.array([age for _, age in questions], np.int64)
    rows = predictor.survival(requests, ages, steps)
    assert rows.shape == (len(questions), steps + 1)
    assert rows.dtype == np.float64
    assert (rows[:, 0] == 1.0).all()
    assert (np.diff(rows, axis=1) <= 0.0).all()
    assert (rows >= 0.0).all()
    # Looking less far ahead, or at one request alone, changes nothing.
    if questions:
        alone = predictor.survival(requests[:1], ages[:1], steps)
        assert alone[0] == pytest.approx(rows[0], abs=1e-12)
        assert predictor.survival(requests, ages, steps // 2) == pytest.approx(
            rows[:, : steps // 2 + 1], abs=1e-12
        )


# Requests 0 to 7 are announced, 8 and 9 are not.
SHARED = trained()
for number in range(8):
    SHARED.begin(RequestId(number), RequestFeatures(100 * number, keys=(number % 5, 99)))


def test_the_features_tell_more_than_the_age() -> None:
    predictor = trained()
    for key in range(4):
        predictor.begin(RequestId(key), RequestFeatures(100, keys=(key, 99)))
    survival = predictor.survival(ids(4), np.array([0, 60, 120, 180]), H)
    assert (survival[:, H] < 0.2).all()
    survival = predictor.survival(ids(4), np.zeros(4, np.int64), H)
    assert survival[0, H] < 0.1
    assert (survival[1:, H] > 0.9).all()


@given(
    history=st.lists(st.integers(1, 100), max_size=60),
    log_odds=st.floats(-9.0, 9.0),
    age=st.integers(0, 120),
    horizon=st.integers(1, 60),
)
def test_the_curve_has_the_chance_that_stage_1_says(
    history: list[int], log_odds: float, age: int, horizon: int
) -> None:
    predictor = stub(history, Constant(log_odds), Constant(), horizon)
    predictor.begin(RequestId(0), RequestFeatures(1))
    stays = row(predictor, age, horizon + 20)[horizon]
    marginal = Marginal(horizon, history).log_odds(np.array([age]))[0]
    assert stays == pytest.approx(1.0 / (1.0 + np.exp(marginal + log_odds)), abs=1e-12)


@given(
    remaining=st.floats(-12.0, 12.0),
    log_odds=st.floats(-3.0, 3.0),
    age=st.sampled_from([0, 70, 999]),
)
def test_the_curve_has_the_mean_that_stage_2_says(
    remaining: float, log_odds: float, age: int
) -> None:
    history = np.random.default_rng(0).geometric(0.01, size=5_000).tolist()
    predictor = stub(history, Constant(log_odds), Constant(remaining))
    predictor.begin(RequestId(0), RequestFeatures(1))
    _, mean = two_stage_estimate(row(predictor, age, H)[None], H)
    wanted = Marginal(H, history).remaining(np.array([age]))[0] + remaining
    assert mean[0] == pytest.approx(wanted, abs=0.2)


@given(remaining=st.floats(-99.0, 99.0), history=st.lists(st.integers(1, 100), max_size=9))
def test_a_mean_out_of_reach_is_met_as_nearly_as_may_be(
    remaining: float, history: list[int]
) -> None:
    predictor = stub(history, Constant(), Constant(remaining))
    predictor.begin(RequestId(0), RequestFeatures(1))
    curve = row(predictor, 0, H)
    assert np.isfinite(curve).all()
    _, mean = two_stage_estimate(curve[None], H)
    wanted = Marginal(H, history).remaining(np.array([0]))[0] + remaining
    if wanted < 1.0:
        assert mean[0] < 10.0
    if wanted > H:
        assert mean[0] > H - 4.0


def test_trees_that_add_nothing_leave_the_marginal() -> None:
    history = np.random.default_rng(0).geometric(0.01, size=5_000).tolist()
    predictor = stub(history, Constant(), Constant())
    predictor.begin(RequestId(0), RequestFeatures(1))
    for age in (0, 35, 200):
        expected = Marginal(H, history).survival(np.array([age]), 60)[0]
        assert row(predictor, age, 60) == pytest.approx(expected, abs=0.012)


def test_a_request_that_was_never_announced_gets_the_marginal() -> None:
    history = [10, 20, 30, 90]
    predictor = stub(history, Constant(9.0), Constant())
    predictor.begin(RequestId(1), RequestFeatures(1))
    rows = predictor.survival([RequestId(7), RequestId(1)], np.array([5, 5]), 50)
    expected = Marginal(H, history).survival(np.array([5]), 50)[0]
    assert np.array_equal(rows[0], expected)
    assert rows[1, H] < 0.01
    assert np.array_equal(row(predictor, 5, 50, request=7), expected)


def test_a_repeated_question_costs_no_tree() -> None:
    finish = Constant()
    predictor = stub([5, 50], finish, Constant())
    for request in ids(3):
        predictor.begin(request, RequestFeatures(1))
    first = predictor.survival(ids(3), np.array([0, 0, 0]), H)
    assert finish.rows == 3
    assert np.array_equal(predictor.survival(ids(3), np.array([0, 0, 0]), H), first)
    predictor.survival(ids(3), np.array([0, 20, 0]), 60)
    assert finish.rows == 4
    # Told again, its features may be others.
    predictor.begin(RequestId(0), RequestFeatures(2))
    predictor.survival(ids(3), np.array([0, 20, 0]), 60)
    assert finish.rows == 5


def test_the_latest_word_on_a_request_counts() -> None:
    predictor, other = trained(), trained()
    predictor.begin(RequestId(0), RequestFeatures(100, keys=(3, 99)))
    predictor.begin(RequestId(0), RequestFeatures(100, keys=(0, 99)))
    other.begin(RequestId(0), RequestFeatures(100, keys=(0, 99)))
    assert np.array_equal(row(predictor, 0, H), row(other, 0, H))
    predictor.observe(RequestId(0), 25)
    other.observe(RequestId(0), 25)
    assert predictor.state().fields == other.state().fields


def test_it_learns_from_what_ends_and_not_from_what_is_forgotten() -> None:
    predictor = stub([], Constant(), Constant())
    predictor.begin(RequestId(0), RequestFeatures(5))
    predictor.begin(RequestId(1), RequestFeatures(5))
    predictor.forget(RequestId(0))
    assert predictor._features.fields()["history"] == []
    predictor.observe(RequestId(1), 30)
    # Of a request that was never announced only the length is known.
    predictor.observe(RequestId(2), 40)
    predictor.forget(RequestId(3))
    assert predictor._features.fields()["history"] == [30, 40]
    assert predictor._features.fields()["window_outputs"] == [30]


def test_places_are_used_again() -> None:
    predictor = trained()
    many = ids(200)
    for request in many:
        predictor.begin(request, RequestFeatures(int(request), keys=(int(request) % 4, 99)))
    ages = np.arange(200)
    before = predictor.survival(many, ages, H)
    for request in many[::2]:
        predictor.forget(request)
    for request in many[::2]:
        predictor.begin(request, RequestFeatures(int(request), keys=(int(request) % 4, 99)))
    assert np.array_equal(predictor.survival(many, ages, H), before)
    assert len(predictor._age) == 256


def test_a_restored_predictor_answers_the_same() -> None:
    predictor = train(PAST)
    restored = Gbdt.from_state(predictor.state())
    assert restored.horizon_steps == H
    assert restored.state() == predictor.state()
    for it in (predictor, restored):
        for request in ids(20):
            features = PAST[int(request)].features
            it.begin(request, features)
    ages = np.arange(0, 200, 10)
    answers = [it.survival(ids(20), ages, 60) for it in (predictor, restored)]
    assert answers[0] == pytest.approx(answers[1], abs=0.02)
    # Once both have counted their whole history they are the same.
    for it in (predictor, restored):
        for output in range(1, 400):
            it.observe(RequestId(1_000), output)
            it.begin(RequestId(0), PAST[0].features)
    again = Gbdt.from_state(restored.state())
    assert again.state().fields == predictor.state().fields


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"feature_names": ["age"]}, "train it again"),
        ({"feature_names": None}, "train it again"),
        ({"history": "none"}, "history"),
    ],
)
def test_fields_of_another_predictor_are_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        Gbdt.from_state(State("gbdt", STATE.fields | change, STATE.texts))


@pytest.mark.parametrize("name", ["finish", "remaining"])
def test_texts_that_are_no_trees_are_refused(name: str) -> None:
    with pytest.raises(StateError, match=f"text '{name}': no LightGBM model"):
        Gbdt.from_state(State("gbdt", STATE.fields, STATE.texts | {name: "tree"}))
    del (texts := dict(STATE.texts))[name]
    with pytest.raises(StateError, match=name):
        Gbdt.from_state(State("gbdt", STATE.fields, texts))


def test_without_lightgbm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[gbdt\]'"):
        Gbdt.from_state(STATE)
    with pytest.raises(ConfigError, match=r"pip install '\.\[gbdt\]'"):
        train(PAST)


def test_lightgbm_is_not_loaded_before_it_is_needed(tmp_path: "Path") -> None:
    program = "import sys, balanceroute.predictors.gbdt_training; print('lightgbm' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout == "False\n"

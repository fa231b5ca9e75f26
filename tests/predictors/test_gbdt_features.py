"""Causal features: the same in training and serving, and never of the future."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import (
    PastRequest,
    RequestFeatures,
    Survival,
    gbdt_features,
    gbdt_training,
)
from balanceroute.predictors.gbdt import Gbdt
from balanceroute.predictors.gbdt_features import NAMES, SNAPSHOT_WIDTH, Features, Marginal
from balanceroute.predictors.gbdt_training import walk
from balanceroute.predictors.state import State, StateError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import two_stage_estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightgbm import Booster

H = 8


class Recorder:
    """Trees that add nothing and remember their input."""

    def __init__(self) -> None:
        self.inputs: list[NDArray[np.float64]] = []

    def predict(self, matrix: NDArray[np.float64], **_options: object) -> NDArray[np.float64]:
        self.inputs.append(matrix.copy())
        return np.zeros(len(matrix))


@st.composite
def pasts(draw: st.DrawFn) -> list[PastRequest]:
    """Return requests that overlap in time and recur in length and keys."""
    past = []
    arrival_s = 0.0
    for _ in range(draw(st.integers(1, 25))):
        arrival_s += draw(st.sampled_from([0.0, 0.25, 3.0]))
        output_tokens = draw(st.integers(1, 30))
        keys = tuple(draw(st.lists(st.integers(0, 3), max_size=3, unique=True)))
        bound = draw(st.sampled_from([None, 30, 64]))
        features = RequestFeatures(draw(st.integers(0, 5)), bound, keys)
        finished_s = arrival_s + output_tokens * draw(st.sampled_from([0.0, 0.1, 1.0]))
        past.append(PastRequest(arrival_s, finished_s, features, output_tokens))
    return past


def values(features: Features, known: RequestFeatures, age: int) -> dict[str, float]:
    """Return the features of one question by name."""
    snapshot = np.array([features.snapshot(known)])
    return dict(zip(NAMES, features.matrix(snapshot, np.array([age]))[0].tolist(), strict=True))


def questions_of(past: list[PastRequest]) -> gbdt_training.Questions:
    outputs = np.array([request.output_tokens for request in past])
    return gbdt_training.Questions(
        np.repeat(np.arange(len(past)), outputs),
        np.concatenate([np.arange(output) for output in outputs]),
    )


@given(past=pasts())
def test_training_sees_what_serving_sees(past: list[PastRequest]) -> None:
    questions = questions_of(past)
    learned, rows = walk(past, questions, H, lambda _what, _share: None)
    # The same events, one by one, through the predictor itself.
    trees = Recorder()
    served = Features(H)
    predictor = Gbdt(served, cast("Booster", trees), cast("Booster", trees))
    events = [(request.arrival_s, 0, number, 0) for number, request in enumerate(past)]
    events += [(request.finished_s, 2, number, 0) for number, request in enumerate(past)]
    for number, age in zip(questions.request.tolist(), questions.age.tolist(), strict=True):
        request = past[number]
        token_s = (request.finished_s - request.arrival_s) / request.output_tokens
        events.append((min(request.arrival_s + age * token_s, request.finished_s), 1, number, age))
    seen = {}
    for _, kind, number, age in sorted(events):
        if kind == 0:
            predictor.begin(RequestId(number), past[number].features)
        elif kind == 1:
            predictor.survival([RequestId(number)], np.array([age]), H)
            seen[number, age] = trees.inputs[-1][0]
        else:
            predictor.observe(RequestId(number), past[number].output_tokens)
    asked = zip(questions.request.tolist(), questions.age.tolist(), strict=True)
    assert np.array_equal(rows, [seen[question] for question in asked], equal_nan=True)
    assert learned.fields() == served.fields()


@given(past=pasts(), data=st.data())
def test_nothing_depends_on_the_future(past: list[PastRequest], data: st.DataObject) -> None:
    moment = data.draw(st.sampled_from([request.arrival_s for request in past]))
    # What has not ended by then ends otherwise.
    other = [
        request
        if request.finished_s < moment
        else replace(request, finished_s=request.finished_s + 900 * 3.0, output_tokens=900)
        for request in past
    ]
    asked = [number for number, request in enumerate(past) if request.arrival_s <= moment]
    questions = gbdt_training.Questions(np.array(asked), np.zeros(len(asked), np.int64))
    _, rows = walk(past, questions, H, lambda _what, _share: None)
    _, others = walk(other, questions, H, lambda _what, _share: None)
    assert np.array_equal(rows, others, equal_nan=True)


def test_where_nothing_is_known_there_is_nothing() -> None:
    found = values(Features(H), RequestFeatures(100), 3)
    assert found["age"] == 3.0
    assert found["prompt_tokens"] == 100.0
    assert found["key_count"] == found["known_keys"] == found["length_longer"] == 0.0
    for name in ("tokens_allowed", "output_ewma_16", "output_mean", "key_mean", "length_last"):
        assert np.isnan(found[name])


def test_worked_example() -> None:
    features = Features(H)
    features.observe(RequestFeatures(100, keys=(7, 8)), 10)
    features.observe(RequestFeatures(100, keys=(9, 8)), 20)
    features.observe(RequestFeatures(5_000, keys=(9,)), 60)
    found = values(features, RequestFeatures(100, 50, (6, 7, 8)), 12)
    assert found["tokens_allowed"] == 38.0
    assert found["output_mean"] == 30.0
    assert found["prompt_mean"] == pytest.approx(5_200 / 3)
    assert found["output_std"] == pytest.approx(np.std([10, 20, 60]))
    assert found["known_keys"] == 2.0
    # Its most specific known key is 7, of the first request alone; the next is 8, of two.
    assert (found["key_count"], found["key_mean"], found["key_last"]) == (1.0, 10.0, 10.0)
    assert (found["next_key_count"], found["next_key_mean"]) == (2.0, 15.0)
    assert (found["next_key_std"], found["next_key_last"]) == (5.0, 20.0)
    # At age 12 only the second still ran, and it ended 8 steps later.
    assert (found["key_longer"], found["next_key_longer"], found["length_longer"]) == (0, 1, 1)
    chance = 1.0 / (1.0 + np.exp(-found["marginal_log_odds"]))
    assert found["next_key_finish"] == pytest.approx((1 + 2 * chance) / 3)
    assert found["key_finish"] == pytest.approx(chance)
    assert found["next_key_remaining"] == pytest.approx((8 + 2 * found["marginal_remaining"]) / 3)


def test_the_latest_count_most_in_a_weighted_mean() -> None:
    features = Features(H)
    features.observe(RequestFeatures(1), 100)
    assert values(features, RequestFeatures(1), 0)["output_ewma_16"] == 100.0
    for _ in range(16):
        features.observe(RequestFeatures(1), 0)
    weights = 0.5 ** (np.arange(17) / 16)
    expected = 100 * weights[-1] / weights.sum()
    assert values(features, RequestFeatures(1), 0)["output_ewma_16"] == pytest.approx(expected)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gbdt_features, "_GROUPS", 3)
    monkeypatch.setattr(gbdt_features, "_WINDOW", 5)
    features = Features(H)
    for output in range(1, 101):
        # Key 1 is used again and again, and stays.
        features.observe(RequestFeatures(output, keys=(1, 1_000 + output)), output)
    fields = cast("Mapping[str, list[int]]", features.fields())
    assert fields["key_groups"] == [1_099, 1, 1_100]
    assert fields["key_counts"] == [1, 32, 1]
    assert fields["length_groups"] == [98, 99, 100]
    assert fields["window_outputs"] == [96, 97, 98, 99, 100]
    assert values(features, RequestFeatures(1), 0)["output_mean"] == 98.0
    assert len(features.snapshot(RequestFeatures(1, keys=(1,)))) == SNAPSHOT_WIDTH


@given(before=pasts(), after=pasts())
def test_restored_features_go_on_as_if_nothing_had_happened(
    before: list[PastRequest], after: list[PastRequest]
) -> None:
    features = Features(H)
    for request in before:
        features.observe(request.features, request.output_tokens)
    saved = json.loads(json.dumps(features.fields()))
    restored = Features.from_state(State("gbdt", saved))
    assert restored.fields() == features.fields()
    for request in after:
        ours, theirs = (it.snapshot(request.features) for it in (features, restored))
        assert np.array_equal(ours, theirs, equal_nan=True)
        for it in (features, restored):
            it.observe(request.features, request.output_tokens)
    assert restored.fields() == features.fields()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("horizon_steps", 0, "horizon_steps"),
        ("horizon_steps", "8", "must be an integer"),
        ("history", [1, 2.5], "integers only"),
        ("history", [1] * 20_001, "over 20000"),
        ("window_outputs", [-1], "window_outputs"),
        ("window_outputs", [1] * 513, "over 512"),
        ("window_prompts", [], "equally long"),
        ("ewma_16_total", None, "must be a number"),
        ("ewma_256_weight", -1.0, "ewma_256_weight"),
        ("key_groups", [5, 5], "twice"),
        ("key_groups", [5], "do not match"),
        ("key_groups", [2**64, 1], "key_groups"),
        ("key_counts", [0, 2], "key_counts"),
        ("key_counts", [1, 33], "key_counts"),
        ("length_outputs", [1, 2, 3], "do not match"),
        ("bucket_groups", {}, "must be a list"),
    ],
)
def test_fields_that_cannot_be_are_refused(name: str, value: object, reason: str) -> None:
    features = Features(H)
    features.observe(RequestFeatures(100, keys=(7, 8)), 10)
    fields = features.fields()
    with pytest.raises(StateError, match=reason):
        Features.from_state(State("gbdt", fields | {name: value}))
    del fields[name]
    with pytest.raises(StateError, match=name):
        Features.from_state(State("gbdt", fields))


# The marginal's tables: smoothed frequencies of what ended, by age.


histories = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def chance(marginal: Marginal, age: int) -> float:
    return float(1.0 / (1.0 + np.exp(-marginal.log_odds(np.array([age]))[0])))


def test_worked_example_of_the_marginal() -> None:
    marginal = Marginal(2, [1, 2, 2, 5])
    # Longer than age 0, 1, .. 5: 4, 3, 1, 1, 1, 0; of these end within 2 steps: 3, 2, 0, 1, 1, 0.
    prior = 7.5 / 11.0
    expected = [
        (ended + 2 * prior) / (running + 2)
        for ended, running in [(3, 4), (2, 3), (0, 1), (1, 1), (1, 1), (0, 0)]
    ]
    assert [chance(marginal, age) for age in range(6)] == pytest.approx(expected)
    # Their steps left sum to 1 + 2 + 2, 1 + 1, 0, 2, 1, 0: 10 of 7.
    expected = [
        (steps + 2 * 10 / 7) / (ended + 2)
        for steps, ended in [(5, 3), (2, 2), (0, 0), (2, 1), (1, 1), (0, 0)]
    ]
    assert marginal.remaining(np.arange(6)) == pytest.approx(expected)


@given(history=histories, horizon=st.integers(1, 70))
def test_many_alike_outweigh_the_smoothing(history: list[int], horizon: int) -> None:
    marginal = Marginal(horizon, history * 200)
    ages = np.arange(max(history))
    survival = Survival(history, half_life=None).survival([RequestId(0)] * len(ages), ages, horizon)
    finish, mean = two_stage_estimate(survival, horizon)
    chances = 1.0 / (1.0 + np.exp(-marginal.log_odds(ages)))
    assert chances == pytest.approx(finish, abs=0.011)
    assert marginal.remaining(ages)[finish > 0] == pytest.approx(
        mean[finish > 0], rel=0.011 * horizon
    )


@given(history=histories, horizon=st.integers(1, 70), ages=st.lists(st.integers(0, 90), max_size=5))
def test_nothing_is_ever_certain(history: list[int], horizon: int, ages: list[int]) -> None:
    marginal = Marginal(horizon, history)
    asked = np.array(ages, np.int64)
    assert np.isfinite(marginal.log_odds(asked)).all()
    remaining = marginal.remaining(asked)
    assert ((remaining > 0) & (remaining <= horizon)).all()


def test_without_a_history_both_sides_are_equally_likely() -> None:
    marginal = Marginal(40)
    assert chance(marginal, 0) == chance(marginal, 999) == 0.5
    assert marginal.remaining(np.array([7])).tolist() == [20.0]


@given(history=histories, ages=st.lists(st.integers(0, 80), max_size=5), steps=st.integers(0, 80))
def test_its_survival_is_the_empirical_one(history: list[int], ages: list[int], steps: int) -> None:
    asked = np.array(ages, np.int64)
    rows = Marginal(40, history).survival(asked, steps)
    expected = Survival(history, half_life=None).survival([RequestId(0)] * len(ages), asked, steps)
    assert np.array_equal(rows, expected)


@given(st.lists(st.integers(1, 50), max_size=150))
def test_it_changes_when_it_says_so_and_knows_all_then(outputs: list[int]) -> None:
    marginal = Marginal(10)
    ages = np.arange(60)
    for observed, output in enumerate(outputs, start=1):
        due, before = marginal.about_to_change, marginal.log_odds(ages)
        marginal.observe(output)
        if due:
            fresh = Marginal(10, outputs[:observed])
            assert np.array_equal(marginal.log_odds(ages), fresh.log_odds(ages))
            assert np.array_equal(marginal.remaining(ages), fresh.remaining(ages))
        else:
            assert np.array_equal(marginal.log_odds(ages), before)
    assert marginal.history == outputs

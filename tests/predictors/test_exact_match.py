"""Exact match: keys tell more than the prompt's length, that more than nothing, and all is bounded."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import (
    ExactMatch,
    PastRequest,
    Predictor,
    RequestFeatures,
    State,
    StateError,
    Survival,
)
from balanceroute.predictors.state import packed
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

HORIZON = 40


def past(output_tokens: int, *keys: int, prompt_tokens: int = 100) -> PastRequest:
    return PastRequest(0.0, 1.0, RequestFeatures(prompt_tokens, keys=keys), output_tokens)


def ask(
    predictor: ExactMatch, *keys: int, age: int = 0, steps: int = HORIZON, prompt_tokens: int = 100
) -> NDArray[np.float64]:
    request = RequestId(-1)
    predictor.begin(request, RequestFeatures(prompt_tokens, keys=keys))
    rows = predictor.survival([request], np.array([age]), steps)
    predictor.forget(request)
    return np.asarray(rows[0])


def brier(make: Callable[[], Predictor], requests: list[PastRequest]) -> float:
    """Return the score of a causal replay, one request after the other, over its second half."""
    predictor, errors = make(), []
    for number, one in enumerate(requests):
        request = RequestId(number)
        predictor.begin(request, one.features)
        for age in range(0, one.output_tokens, 20):
            stays = float(predictor.survival([request], np.array([age]), HORIZON)[0, HORIZON])
            errors.append((number, (stays - (one.output_tokens > age + HORIZON)) ** 2))
        predictor.observe(request, one.output_tokens)
    return float(np.mean([error for number, error in errors if number > len(requests) // 2]))


def test_a_recurring_request_is_predicted_from_its_own_past() -> None:
    others = [past(output, 1_000 + output) for output in range(1, 200)]
    predictor = ExactMatch([*others, *[past(30, 7)] * 10])
    assert ask(predictor, 7)[29] > 0.9
    assert ask(predictor, 7)[30] < 0.2
    assert ask(predictor, 8)[30] > 0.5


def test_once_it_outlived_its_own_past_the_others_speak() -> None:
    others = [past(output) for output in range(1, 200)]
    predictor = ExactMatch([*others, *[past(30, 7)] * 10])
    # The first of them was spread to 36.
    assert not np.allclose(ask(predictor, 7, age=35), ask(predictor, age=35))
    assert np.allclose(ask(predictor, 7, age=36), ask(predictor, age=36))


def test_without_keys_the_prompts_length_tells() -> None:
    pairs = [past(10, prompt_tokens=1), past(90, prompt_tokens=1_000)] * 400
    predictor = ExactMatch(pairs)
    assert ask(predictor, prompt_tokens=1)[20] < 0.1
    assert ask(predictor, prompt_tokens=1_000)[20] > 0.9


def test_without_a_past_every_request_stays() -> None:
    assert ask(ExactMatch(), 1, 2).tolist() == [1.0] * (HORIZON + 1)


def test_a_request_that_was_never_begun_is_predicted_and_teaches_nothing() -> None:
    predictor = ExactMatch([past(10)] * 20)
    before = predictor.state()
    row = predictor.survival([RequestId(5)], np.array([0]), HORIZON)[0]
    assert row[HORIZON] == 0.0
    predictor.observe(RequestId(5), 900)
    predictor.forget(RequestId(5))
    assert predictor.state() == before


def test_the_latest_features_count() -> None:
    others = [past(output, 1_000 + output) for output in range(1, 200)]
    predictor = ExactMatch([*others, *[past(5, 7)] * 10])
    request = RequestId(1)
    predictor.begin(request, RequestFeatures(100, keys=(7,)))
    predictor.begin(request, RequestFeatures(100, keys=(8,)))
    row = predictor.survival([request], np.array([0]), HORIZON)[0]
    assert np.array_equal(row, ask(predictor, 9))


def test_a_key_that_yielded_is_not_mistaken_for_the_one_that_took_its_place() -> None:
    predictor = ExactMatch([past(5, 7)] * 10, capacity=1)
    request = RequestId(1)
    predictor.begin(request, RequestFeatures(100, keys=(7,)))
    predictor.begin(RequestId(2), RequestFeatures(100, keys=(8,)))
    row = predictor.survival([request], np.array([0]), HORIZON)[0]
    assert np.array_equal(row, ask(ExactMatch([past(5)] * 10)))


def test_a_key_is_heard_from_its_least_count_on() -> None:
    others = [past(output) for output in range(1, 200)]
    for heard, count in ((False, 2), (True, 3)):
        predictor = ExactMatch([*others, *[past(5, 7)] * count], least=3)
        assert bool(ask(predictor, 7)[5] < ask(predictor, 8)[5]) is heard


def test_a_less_specific_key_is_heard_if_it_has_twice_the_outputs() -> None:
    others = [past(100 + output) for output in range(1, 200)]
    alike = [past(50, 1, 2)] * 3
    for heard, count in ((False, 2), (True, 3)):
        predictor = ExactMatch([*others, *alike, *[past(10, 5, 2)] * count])
        # The broad key's short outputs show in what the specific one says, or do not.
        assert bool(ask(predictor, 1, 2)[20] < ask(predictor, 1, 3)[20]) is heard


def test_recurring_requests_are_predicted_better_than_by_survival() -> None:
    rng = random.Random(1)
    typical = [rng.randint(5, 400) for _ in range(30)]
    requests = []
    for _ in range(600):
        key = rng.randrange(30)
        requests.append(past(max(1, round(rng.gauss(typical[key], 5))), key, 99))
    assert brier(ExactMatch, requests) < 0.5 * brier(Survival, requests)


def test_keys_that_tell_nothing_cost_little() -> None:
    rng = random.Random(2)
    requests = [
        past(rng.randint(1, 400), number, 1_000 + rng.randrange(5), 99, prompt_tokens=number % 7)
        for number in range(1_500)
    ]
    assert brier(ExactMatch, requests) < 1.03 * brier(Survival, requests)


features = st.builds(
    RequestFeatures,
    st.integers(0, 50),
    st.none(),
    st.lists(st.integers(0, 12), max_size=10, unique=True).map(tuple),
)
requests_of_the_past = st.lists(
    st.builds(PastRequest, st.just(0.0), st.just(0.0), features, st.integers(1, 60)), max_size=60
)


@given(
    history=requests_of_the_past,
    asked=st.lists(st.tuples(features, st.integers(0, 80)), min_size=1, max_size=6),
    steps=st.integers(0, 50),
)
def test_rows_start_at_one_never_rise_and_are_as_each_alone(
    history: list[PastRequest], asked: list[tuple[RequestFeatures, int]], steps: int
) -> None:
    predictor = ExactMatch(history, capacity=20, depth=9)
    requests = [RequestId(number) for number in range(len(asked))]
    for request, (known, _) in zip(requests, asked, strict=True):
        predictor.begin(request, known)
    ages = np.array([age for _, age in asked])
    together = predictor.survival(requests, ages, steps)
    assert together.shape == (len(asked), steps + 1)
    assert together.dtype == np.float64
    assert (together[:, 0] == 1.0).all()
    assert (np.diff(together, axis=1) <= 1e-12).all()
    assert (together >= 0.0).all()
    for number, request in enumerate(requests):
        alone = predictor.survival([request], ages[number : number + 1], steps)
        assert np.array_equal(alone[0], together[number])


@given(history=requests_of_the_past, more=requests_of_the_past)
def test_a_restored_predictor_says_and_learns_the_same(
    history: list[PastRequest], more: list[PastRequest]
) -> None:
    predictor = ExactMatch(history[:40], capacity=20, depth=9)
    restored = ExactMatch.from_state(predictor.state())
    assert restored.state() == predictor.state()
    for number, one in enumerate(more[:9]):
        for each in (predictor, restored):
            each.begin(RequestId(number), one.features)
        rows = [
            each.survival([RequestId(number)], np.array([3]), 40) for each in (predictor, restored)
        ]
        assert np.array_equal(rows[0], rows[1])
        for each in (predictor, restored):
            each.observe(RequestId(number), one.output_tokens)
    assert restored.state() == predictor.state()


def test_more_requests_than_a_block_are_predicted_as_each_alone() -> None:
    rng = random.Random(3)
    requests = [past(rng.randint(1, 300), rng.randrange(90), 7) for _ in range(700)]
    predictor = ExactMatch(requests)
    numbers = [RequestId(number) for number in range(700)]
    for number, one in zip(numbers, requests, strict=True):
        predictor.begin(number, one.features)
    ages = np.array([rng.randrange(300) for _ in numbers])
    together = predictor.survival(numbers, ages, 60)
    alone = [
        predictor.survival([number], ages[[place]], 60)[0] for place, number in enumerate(numbers)
    ]
    assert np.array_equal(together, np.array(alone))


def test_no_requests_are_predicted_as_none() -> None:
    assert ExactMatch([past(5)]).survival([], np.zeros(0, np.int64), 8).shape == (0, 9)


def test_what_is_kept_of_active_requests_goes_with_them() -> None:
    predictor = ExactMatch(capacity=100)
    for number in range(5_000):
        predictor.begin(RequestId(number), RequestFeatures(10, keys=(number,)))
        if number >= 10:
            (predictor.observe if number % 2 else lambda request, _: predictor.forget(request))(
                RequestId(number - 10), 5
            )
    assert len(predictor._row_of) == len(predictor._features) == 10
    assert len(predictor._prompts) < 100
    assert len(predictor._table) == 100


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("capacity", 0, "capacity"),
        ("depth", 257, "depth"),
        ("least", "1", "least"),
        ("prompts", [1], "same length"),
        ("outputs", [1.5, 2, 3], "outputs"),
        ("moves", float("inf"), "moves"),
        ("moved", 0, "moved"),
        ("rank", 2, "rank"),
        ("keys", [7, 8], "keys"),
        ("keys", packed(np.array([7, 7], np.uint64)), "twice"),
        ("keys", packed(np.array([7], np.uint64)), "differ in length"),
        ("key_held", packed(np.array([2, 0], np.int32)), "key_held"),
        ("key_held", packed(np.array([2, 33], np.int32)), "key_held"),
        ("key_held", packed(np.array([2, 2], np.int32)), "as long as"),
        ("key_outputs", packed(np.array([5, 6], np.int32)), "as long as"),
        ("key_outputs", packed(np.array([5, 6, -7], np.int32)), "key_outputs"),
        ("key_spreads", packed(np.array([5, 6, 7, 8], np.int32)), "as long as"),
        ("key_moves", packed(np.array([1.0, np.nan])), "key_moves"),
        ("key_moved", packed(np.array([0.0, 1.0])), "key_moved"),
    ],
)
def test_a_foreign_state_is_refused_by_field(name: str, value: object, reason: str) -> None:
    fields = ExactMatch([past(5, 7), past(6, 7), past(7, 8)]).state().fields
    with pytest.raises(StateError, match=reason):
        ExactMatch.from_state(State("exact-match", {**fields, name: value}))
    del fields[name]
    with pytest.raises(StateError, match=f"{name!r} is missing"):
        ExactMatch.from_state(State("exact-match", fields))


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity must be in 1"):
        ExactMatch(capacity=0)
    with pytest.raises(ConfigError, match="depth must be in 1"):
        ExactMatch(depth=257)
    with pytest.raises(ConfigError, match="least must be in 1"):
        ExactMatch(least=0)

"""Exact match: keys tell more than the prompt's length, that more than nothing, and all is bounded."""

import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import (
    PastRequest,
    Predictor,
    RequestFeatures,
    State,
    StateError,
    Survival,
)
from balanceroute.predictors.exact_match import ExactMatch, KeyRecordTable
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


# The table of keys: bounded, the longest unused yields, and outputs are counted as points.


def still(_: int) -> float:
    return 1.0


def rows(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def counts(table: KeyRecordTable, key: int, age: int, steps: int) -> list[float]:
    row: list[float] = table.counts(rows(table.use(key)), rows(age), steps)[0].tolist()
    return row


def points(outputs: list[int], depth: int) -> list[float]:
    """Return what the outputs of one key count as, and how much each of them."""
    kept: list[tuple[int, int]] = []
    for place, output in enumerate(outputs):
        spread = int(output * 0.2)
        if place:
            spread = min(spread, abs(output - outputs[place - 1]))
        kept.append((output, spread))
    number = 8 if len(outputs) <= 8 else 4
    return [
        output + spread * (2 * point / (number - 1) - 1)
        for output, spread in kept[-depth:]
        for point in range(number)
    ]


@given(
    outputs=st.lists(st.integers(1, 120), min_size=1, max_size=30),
    depth=st.sampled_from([8, 9, 32]),
    age=st.integers(0, 140),
    steps=st.integers(0, 40),
)
def test_outputs_count_as_points_around_them(
    outputs: list[int], depth: int, age: int, steps: int
) -> None:
    table = KeyRecordTable(capacity=4, depth=depth)
    for output in outputs:
        table.add(7, output, still)
    spread = points(outputs, depth)
    each = len(spread) // min(len(outputs), depth)
    found = counts(table, 7, age, steps)
    # Points on the edge between two tokens may be rounded either way.
    for ahead, count in enumerate(found):
        least = sum(point > age + ahead + 0.501 for point in spread) / each
        most = sum(point > age + ahead + 0.499 for point in spread) / each
        assert least - 1e-9 <= count <= most + 1e-9


def test_many_slots_are_counted_as_each_alone() -> None:
    table = KeyRecordTable(capacity=100, depth=16)
    for number in range(300):
        table.add(number % 40, 1 + number * 7 % 90, still)
        table.add(99, 1 + number * 7 % 90, still)
    keys = [*range(50), 99, 99, 99]
    slots = rows(*(table.use(key) for key in keys))
    ages = np.arange(len(keys)) % 60
    together = table.counts(slots, ages, 30).tolist()
    assert together == [
        counts(table, key, age, 30) for key, age in zip(keys, ages.tolist(), strict=True)
    ]


def test_a_key_whose_answers_are_always_the_same_is_trusted_to_the_token() -> None:
    table = KeyRecordTable(capacity=4, depth=4)
    for _ in range(5):
        table.add(7, 100, lambda _: 0.0)
    assert counts(table, 7, 98, 3) == [4.0, 4.0, 0.0, 0.0]
    assert table.trust(rows(table.use(7)))[0] > 1.4


def test_a_key_that_moves_as_all_outputs_do_is_hardly_trusted() -> None:
    table = KeyRecordTable(capacity=4, depth=4)
    assert table.trust(rows(table.use(7))) == pytest.approx(1.0)
    for _ in range(3_000):
        table.add(7, 100, lambda _: 1.0)
    assert table.trust(rows(table.use(7)))[0] < 0.03


def test_the_slot_of_no_key_stays_empty() -> None:
    table = KeyRecordTable(capacity=2, depth=8)
    for key in range(10):
        table.add(key, 50, still)
    assert table.counts(rows(0), rows(0), 2).tolist() == [[0.0] * 3]
    assert table.added(rows(0)).tolist() == [0]


@given(
    operations=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 99))),
    capacity=st.integers(1, 5),
    depth=st.integers(1, 4),
)
def test_the_longest_unused_key_yields(
    operations: list[tuple[bool, int, int]], capacity: int, depth: int
) -> None:
    table = KeyRecordTable(capacity=capacity, depth=depth)
    model: OrderedDict[int, list[int]] = OrderedDict()
    for adds, key, output in operations:
        if key not in model and len(model) == capacity:
            model.popitem(last=False)
        model.setdefault(key, [])
        model.move_to_end(key)
        if adds:
            table.add(key, output, still)
            model[key].append(output)
        else:
            slot = table.use(key)
            assert table.keys_of(rows(slot)).tolist() == [key]
            assert table.added(rows(slot)).tolist() == [len(model[key])]
        assert len(table) == len(model)
    records = table.records()
    known = {key: outputs[-depth:] for key, outputs in model.items() if outputs}
    assert records.keys.tolist() == list(known)
    assert records.held.tolist() == [len(outputs) for outputs in known.values()]
    assert records.outputs.tolist() == [one for outputs in known.values() for one in outputs]


@given(
    operations=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=40),
    capacity=st.integers(1, 12),
    depth=st.integers(1, 12),
)
def test_a_restored_table_goes_on_as_the_one_before(
    operations: list[tuple[int, int]], capacity: int, depth: int
) -> None:
    table, restored = (KeyRecordTable(capacity=capacity, depth=depth) for _ in range(2))
    for key, output in operations:
        table.add(key, output, still)
    restored.restore(table.records())
    for key, output in operations[:7]:
        assert counts(restored, key, 10, 50) == counts(table, key, 10, 50)
        for one in (table, restored):
            one.add(key + 5, output, still)
    for one, other in zip(
        (getattr(table.records(), name) for name in table.records().__slots__),
        (getattr(restored.records(), name) for name in table.records().__slots__),
        strict=True,
    ):
        assert one.tolist() == other.tolist()


def test_a_smaller_table_takes_the_latest_of_a_larger_one() -> None:
    table, small = KeyRecordTable(capacity=10, depth=4), KeyRecordTable(capacity=2, depth=2)
    for key in range(5):
        for output in (10, 20, 30):
            table.add(key, output + key, still)
    small.restore(table.records())
    records = small.records()
    assert records.keys.tolist() == [3, 4]
    assert records.outputs.tolist() == [23, 33, 24, 34]

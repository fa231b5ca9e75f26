"""Empirical survival: conditional frequencies of a bounded, decayed history that grows with what ends."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import (
    Hinted,
    PastRequest,
    RequestFeatures,
    State,
    StateError,
    Survival,
    survival,
)
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.survival import (
    LEAST_ANSWERS,
    Hint,
    LengthBuckets,
    LimitHabits,
    RunningCounts,
)
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


# Clients' hints, set against what such requests emitted.


OTHER = Survival([10] * 50 + [1_000] * 50)
FIRST, SECOND = RequestId(1), RequestId(2)


def hint(tokens: int | None) -> RequestFeatures:
    return RequestFeatures(100, expected_tokens=tokens)


def running(predictor: Hinted, request: RequestId, age: int = 0, steps: int = 500) -> float:
    return float(predictor.survival([request], np.array([age]), steps)[0, -1])


def taught(outputs: dict[int, int]) -> Hinted:
    predictor = Hinted(OTHER)
    for _ in range(200):
        for expected, output in outputs.items():
            predictor.learn(Hint(expected, "client"), output)
    return predictor


def test_classes_tell_short_from_long() -> None:
    predictor = taught({1: 10, 2: 1_000})
    predictor.begin(FIRST, hint(1))
    predictor.begin(SECOND, hint(2))
    assert running(predictor, FIRST) < 0.05
    assert running(predictor, SECOND) > 0.95


def test_a_hint_need_not_be_right() -> None:
    predictor = taught({5_000: 10, 3: 1_000})
    predictor.begin(FIRST, hint(5_000))
    assert running(predictor, FIRST) < 0.05


def test_a_hint_that_tells_nothing_leaves_the_other_to_speak() -> None:
    predictor, rng = Hinted(OTHER), random.Random(4)
    for _ in range(2_000):
        told = Hint(rng.choice([1, 2]), "client")
        predictor.learn(told, rng.choice([10, 1_000]))
    predictor.begin(FIRST, hint(1))
    assert running(predictor, FIRST) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("expected", [None, 7])
def test_without_a_hint_or_a_past_the_other_speaks(expected: int | None) -> None:
    predictor = Hinted(OTHER) if expected else taught({1: 10})
    predictor.begin(FIRST, hint(expected))
    ask = [FIRST, SECOND], np.array([0, 3]), 20
    assert predictor.survival(*ask).tolist() == OTHER.survival(*ask).tolist()


def test_a_request_has_the_same_answer_alone_as_among_others() -> None:
    predictor = taught({1: 10, 2: 1_000, 9: 40})
    told = [RequestFeatures(100, expected_tokens=tokens) for tokens in (2, None, 1, 9, 5)]
    # Of a limit that is a habit, of which nothing was learned yet.
    for _ in range(LEAST_ANSWERS):
        predictor.begin(FIRST, RequestFeatures(100, 30))
        predictor.observe(FIRST, 30)
    told.append(RequestFeatures(100, 30))
    requests = [RequestId(number) for number in range(len(told))]
    for request, features in zip(requests, told, strict=True):
        predictor.begin(request, features)
    ages = np.array([0, 3, 12, 0, 2_000, 1])
    together = predictor.survival(requests, ages, 50)
    for request, age, among in zip(requests, ages, together, strict=True):
        alone = predictor.survival([request], np.array([age]), 50)
        assert np.array_equal(alone, among[None])
    assert len({row.tobytes() for row in together}) > 3


def test_the_latest_hint_counts() -> None:
    predictor = taught({1: 10, 2: 1_000})
    predictor.begin(FIRST, hint(1))
    predictor.begin(FIRST, hint(2))
    assert running(predictor, FIRST) > 0.95
    predictor.begin(FIRST, hint(None))
    assert running(predictor, FIRST) == running(Hinted(OTHER), FIRST)


def test_it_learns_from_requests_that_end_by_themselves_alone() -> None:
    predictor = Hinted(Survival([10] * 50 + [1_000] * 50))
    for number in range(400):
        predictor.begin(RequestId(number), hint(1 + number % 2))
        if number % 4 < 2:
            predictor.observe(RequestId(number), (10, 1_000)[number % 2])
        else:
            predictor.forget(RequestId(number))
    predictor.begin(FIRST, hint(1))
    assert running(predictor, FIRST) < 0.1
    assert predictor._hints == {FIRST: Hint(1, "client")}
    assert predictor._limited == {}


# A limit where it is habitually reached.


def limited(tokens: int | None, *keys: int, expected: int | None = None) -> RequestFeatures:
    return RequestFeatures(100, tokens, keys, expected)


def served(outputs: list[tuple[RequestFeatures, int]]) -> Hinted:
    """Return a predictor that requests went through."""
    predictor = Hinted(Survival([10] * 50 + [1_000] * 50))
    for number, (features, output) in enumerate(outputs):
        predictor.begin(RequestId(number), features)
        predictor.observe(RequestId(number), output)
    return predictor


def hint_of(predictor: Hinted, features: RequestFeatures) -> Hint | None:
    predictor.begin(FIRST, features)
    return predictor.hint_of(FIRST)


def test_a_limit_counts_once_enough_answers_reached_it() -> None:
    for answers in range(12):
        predictor = served([(limited(600), 600)] * answers)
        hint = Hint(600, "limit") if answers >= LEAST_ANSWERS else None
        assert hint_of(predictor, limited(600)) == hint
        assert hint_of(predictor, limited(601)) is None
        assert hint_of(predictor, limited(None)) is None


@pytest.mark.parametrize(("reaching", "counts"), [(3, False), (5, True)])
def test_a_limit_counts_if_half_of_the_answers_reached_it(reaching: int, counts: bool) -> None:
    outputs = [600 if number % 8 < reaching else 20 for number in range(160)]
    predictor = served([(limited(600), output) for output in outputs])
    assert (hint_of(predictor, limited(600)) is not None) == counts


def test_what_reached_its_limit_is_expected_to_reach_it_again() -> None:
    predictor = served([(limited(600), 600), (limited(None), 10)] * 60)
    predictor.begin(FIRST, limited(600))
    predictor.begin(SECOND, limited(None))
    assert running(predictor, FIRST) > 0.95
    assert running(predictor, SECOND) == pytest.approx(0.5, abs=0.01)


def test_a_habit_is_forgotten_when_answers_end_before() -> None:
    habit, none = [(limited(600), 600)] * 200, [(limited(600), 30)] * 100
    assert hint_of(served(habit), limited(600)) is not None
    assert hint_of(served(habit + none), limited(600)) is None


def test_requests_alike_by_key_have_their_own_habits() -> None:
    reached, not_reached = (limited(600, 7, 1), 600), (limited(600, 8, 1), 20)
    predictor = served([reached, not_reached, reached] * 20)
    assert hint_of(predictor, limited(600, 7, 1)) == Hint(600, "limit")
    assert hint_of(predictor, limited(600, 8, 1)) is None
    # A prompt that is not known yet: most of those that begin so reached it.
    assert hint_of(predictor, limited(600, 9, 1)) == Hint(600, "limit")
    assert hint_of(predictor, limited(600)) == Hint(600, "limit")


def test_what_the_client_says_goes_first_and_is_judged_apart() -> None:
    predictor = served([(limited(600), 600)] * 60)
    assert hint_of(predictor, limited(600, expected=40)) == Hint(40, "client")
    # Nothing is known of such hints yet.
    predictor.begin(SECOND, limited(None))
    assert running(predictor, FIRST) == running(predictor, SECOND)


def test_a_limit_that_is_rarely_reached_changes_nothing() -> None:
    rng = random.Random(3)
    past = [(limited(600), min(600, round(rng.expovariate(1 / 200)) + 1)) for _ in range(800)]
    predictor, other = served(past), Survival([10] * 50 + [1_000] * 50)
    for number, (features, output) in enumerate(past):
        other.begin(RequestId(number), features)
        other.observe(RequestId(number), output)
    predictor.begin(FIRST, limited(600))
    ask = [FIRST], np.array([0]), 500
    assert predictor.survival(*ask).tolist() == other.survival(*ask).tolist()


def test_a_predictor_that_knows_the_prompt_is_not_overruled() -> None:
    # Half of all reach the limit, and the prompt tells which.
    predictor = Hinted(ExactMatch())
    for number in range(400):
        features, output = limited(600, number % 2), (40, 600)[number % 2]
        predictor.begin(RequestId(number), features)
        predictor.observe(RequestId(number), output)
    predictor.begin(FIRST, limited(600, 0))
    assert running(predictor, FIRST, steps=100) < 0.05


def test_the_past_is_known() -> None:
    past = [PastRequest(float(n), n + 1.0, limited(600), 600) for n in range(40)]
    predictor = Hinted(OTHER, past)
    predictor.begin(FIRST, limited(600))
    assert predictor.hint_of(FIRST) == Hint(600, "limit")
    assert running(predictor, FIRST) > 0.9


# Buckets of prompt length: quantiles of a bounded history, each with its own outputs.


Pairs = list[tuple[int, int]]
pairs_of_lengths = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=80)


def make(*, buckets: int = 4, weight: float = 2.0, capacity: int = 1_000) -> LengthBuckets:
    # So long a half-life that all weigh the same.
    return LengthBuckets(buckets=buckets, weight=weight, capacity=capacity, half_life=1e12)


def stays(count: int, steps: int) -> NDArray[np.float64]:
    return np.ones((count, steps + 1))


@given(pairs=pairs_of_lengths, prompt=st.integers(0, 70), age=st.integers(0, 50))
def test_a_request_is_predicted_from_the_outputs_of_its_bucket(
    pairs: Pairs, prompt: int, age: int
) -> None:
    lengths = make(buckets=3)
    # The buckets are made anew with each of a small history; the last few only once in a while.
    known = pairs[:50]
    for pair in known:
        lengths.add(*pair)
    (row,) = lengths.survival(np.array([prompt]), np.array([age]), 20, stays(1, 20)).tolist()
    prompts = sorted(one for one, _ in known)
    edges = [prompts[rank * len(prompts) // 3] for rank in (1, 2)] if prompts else []
    bucket = sum(edge < prompt for edge in edges)
    alike = [output for one, output in known if sum(edge < one for edge in edges) == bucket]
    longer = [sum(output > age + ahead for output in alike) for ahead in range(21)]
    weight = lengths.fallback_weight
    assert np.allclose(row, [(count + weight) / (longer[0] + weight) for count in longer])


@given(
    pairs=pairs_of_lengths,
    asked=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 50)), min_size=1, max_size=9),
)
def test_rows_start_at_one_never_rise_and_are_as_each_alone(pairs: Pairs, asked: Pairs) -> None:
    lengths = make()
    for pair in pairs:
        lengths.add(*pair)
    prompts, ages = np.array(asked).T
    together = lengths.survival(prompts, ages, 20, stays(len(asked), 20))
    assert (together[:, 0] == 1.0).all()
    assert (np.diff(together, axis=1) <= 0.0).all()
    for number, row in enumerate(together):
        prompt, age = asked[number]
        one = slice(number, number + 1)
        assert np.array_equal(lengths.survival(prompts[one], ages[one], 20, stays(1, 20))[0], row)
        assert np.array_equal(lengths.survival_of_one(prompt, age, 20, stays(1, 20)[0]), row)


@given(pairs=pairs_of_lengths, capacity=st.integers(1, 30))
def test_the_history_is_bounded_and_can_be_restored(pairs: Pairs, capacity: int) -> None:
    lengths, restored = make(capacity=capacity), make(capacity=capacity)
    for pair in pairs:
        lengths.add(*pair)
    assert [tuple(pair) for pair in lengths.history().tolist()] == pairs[-capacity:]
    restored.extend(lengths.history())
    for one in (lengths, restored):
        one.add(30, 20)
    asked = (np.array([5, 30, 60]), np.array([0, 1, 2]), 20, stays(3, 20))
    assert np.array_equal(restored.survival(*asked), lengths.survival(*asked))
    assert np.array_equal(restored.history(), lengths.history())


def test_requests_with_equal_prompts_share_a_bucket() -> None:
    lengths = make()
    for output in range(1, 41):
        lengths.add(100, output)
    rows = lengths.survival(np.array([1, 100, 101]), np.zeros(3, np.int64), 10, stays(3, 10))
    weight = lengths.fallback_weight
    assert rows[1, 10] == pytest.approx((30 + weight) / (40 + weight))
    assert rows[0, 10] == rows[1, 10]
    assert rows[2, 10] == 1.0


def test_where_prompts_tell_all_buckets_are_trusted_and_where_they_say_nothing_hardly() -> None:
    rng = random.Random(1)
    prompts = [rng.randint(1, 4_000) for _ in range(1_000)]
    told, untold, constant = make(), make(), make()
    for prompt in prompts:
        told.add(prompt, prompt // 1_000 * 100 + rng.randint(1, 9))
        untold.add(prompt, rng.randint(1, 400))
        constant.add(prompt, 7)
    # Of four buckets with outputs apart, two in a row lie four times closer.
    assert 2.0 < told.fallback_weight < 3.2
    assert untold.fallback_weight > 30.0
    # Nothing is known of how far apart outputs may lie, and nothing depends on it.
    assert constant.fallback_weight == 2.0


def test_beyond_the_longest_counted_output_only_the_fallback_is_left() -> None:
    lengths = make(buckets=1)
    edge = survival.LONGEST
    for output in (edge - 30, edge + 5, edge + 900):
        lengths.add(10, output)
    fallback = np.linspace(1.0, 0.5, 21)[None]

    def ask(age: int) -> NDArray[np.float64]:
        return lengths.survival(np.array([10]), np.array([age]), 20, fallback)

    assert ask(edge - 31)[0, 1] < fallback[0, 1]
    for age in (edge - 20, edge - 1, edge, edge + 100):
        assert np.allclose(ask(age), fallback)
        assert lengths.survival_of_one(10, age, 20, fallback[0]).tolist() == ask(age)[0].tolist()


# Whether limits are habitually reached: groups of answers alike, and the bound on them.


def test_nothing_is_assumed_before_enough_answers() -> None:
    habits = LimitHabits()
    for _ in range(LEAST_ANSWERS):
        assert not habits.is_habit(100, ())
        habits.learn(100, (), 100)
    assert habits.is_habit(100, ())


def test_an_answer_beyond_its_limit_reached_it() -> None:
    habits = LimitHabits()
    for _ in range(LEAST_ANSWERS):
        habits.learn(100, (), 101)
    assert habits.is_habit(100, ())


def test_a_key_with_too_few_answers_leaves_the_word_to_the_next() -> None:
    habits = LimitHabits()
    for number in range(LEAST_ANSWERS):
        habits.learn(100, (number, 1), 100)
    for _ in range(3 * LEAST_ANSWERS):
        habits.learn(100, (50,), 3)
    assert habits.is_habit(100, (0, 1))
    assert not habits.is_habit(100, (0,))


def test_the_group_that_was_not_used_for_longest_yields() -> None:
    habits = LimitHabits()
    for _ in range(LEAST_ANSWERS):
        habits.learn(100, (5,), 100)
    for key in range(10, 10 + survival._GROUPS):
        habits.learn(200, (key,), 1)
    assert not habits.is_habit(100, (5,))
    assert len(habits._groups) == survival._GROUPS


# What the counts say is the same whatever was asked before.


# Outputs of 0 to 3 tokens, in two groups.
LENGTHS = np.array([[0.0, 1.0, 2.0, 4.0], [1.0, 0.0, 0.0, 8.0]])


@pytest.mark.parametrize("asked_before", [(), (1,), (5,), (1, 5), (5, 1)])
def test_an_answer_does_not_depend_on_earlier_ones(asked_before: tuple[int, ...]) -> None:
    counts = RunningCounts(LENGTHS)
    groups, ages = np.array([0, 1, 1]), np.array([0, 0, 2])
    for steps in asked_before:
        counts.after(groups, ages, steps)
    assert counts.after(groups, ages, 1).tolist() == [[7.0, 6.0], [8.0, 8.0], [8.0, 0.0]]
    assert counts.after(groups, ages, 2)[:, -1].tolist() == [4.0, 8.0, 0.0]

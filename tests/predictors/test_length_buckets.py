"""Buckets of prompt length: quantiles of a bounded history, each with its own outputs."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import survival
from balanceroute.predictors.survival import LengthBuckets

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

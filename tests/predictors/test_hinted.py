"""Clients' hints, set against what such requests emitted."""

import random

import numpy as np
import pytest

from balanceroute.predictors import Hinted, RequestFeatures, Survival
from balanceroute.proxy.core.events import RequestId

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
            predictor.learn(expected, output)
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
        predictor.learn(rng.choice([1, 2]), rng.choice([10, 1_000]))
    predictor.begin(FIRST, hint(1))
    assert running(predictor, FIRST) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("expected", [None, 7])
def test_without_a_hint_or_a_past_the_other_speaks(expected: int | None) -> None:
    predictor = Hinted(OTHER) if expected else taught({1: 10})
    predictor.begin(FIRST, hint(expected))
    ask = [FIRST, SECOND], np.array([0, 3]), 20
    assert predictor.survival(*ask).tolist() == OTHER.survival(*ask).tolist()


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
    assert predictor._hints == {FIRST: 1}

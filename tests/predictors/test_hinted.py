"""Clients' hints, set against what such requests emitted."""

import random

import numpy as np
import pytest

from balanceroute.predictors import ExactMatch, Hinted, PastRequest, RequestFeatures, Survival
from balanceroute.predictors.survival import LEAST_ANSWERS, Hint
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

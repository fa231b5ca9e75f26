"""Whether limits are habitually reached: groups of answers alike, and the bound on them."""

from balanceroute.predictors import survival
from balanceroute.predictors.survival import LEAST_ANSWERS, LimitHabits


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

"""Prefiller budgets: the emptiest open prefiller takes the prefill, and nothing is released twice."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill import (
    FewestTokens,
    Prefillers,
    PrefillRequest,
    PrefillView,
)

P0, P1, P2 = (PrefillerId(number) for number in range(3))


def of(tokens: int) -> PrefillRequest:
    return PrefillRequest(RequestId(0), Ticket(1), tokens, 0)


def test_the_prefiller_with_the_fewest_held_tokens_is_chosen() -> None:
    prefillers = Prefillers(3, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 50)
    prefillers.begin_prefill(PrefillerId(1), 20)
    prefillers.begin_prefill(PrefillerId(2), 30)
    assert prefillers.choose(of(1)) == 1


def test_equal_prefillers_take_turns() -> None:
    prefillers = Prefillers(3, choice=FewestTokens())
    assert [prefillers.choose(of(10)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_turn_is_that_of_the_equal_one_chosen_least_recently() -> None:
    prefillers = Prefillers(3, choice=FewestTokens())
    chosen = []
    for busy in (P1, P1, P0, P2):
        prefillers.begin_prefill(busy, 10)
        chosen.append(prefillers.choose(of(10)))
        prefillers.release(busy, 10)
    assert chosen == [0, 2, 1, 0]


def test_a_turn_comes_only_among_those_that_hold_fewest() -> None:
    prefillers = Prefillers(2, choice=FewestTokens())
    assert prefillers.choose(of(10)) == 0
    prefillers.begin_prefill(P1, 1)
    assert prefillers.choose(of(10)) == 0


def test_a_prefiller_at_its_limit_is_closed_until_a_prefill_ends() -> None:
    prefillers = Prefillers(2, probe_limit=1, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 5)
    assert prefillers.choose(of(5)) == 1
    prefillers.begin_prefill(PrefillerId(1), 9)
    assert prefillers.choose(of(5)) is None
    prefillers.end_prefill(PrefillerId(1))
    # Its tokens are still held, but it is the only open one.
    assert prefillers.held_tokens == [5, 9]
    assert prefillers.choose(of(5)) == 1


def test_a_prompt_goes_only_where_its_kv_tokens_fit() -> None:
    prefillers = Prefillers(2, kv_capacity_tokens=100, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 60)
    prefillers.begin_prefill(PrefillerId(1), 70)
    assert prefillers.choose(of(40)) == 0
    assert prefillers.choose(of(41)) is None
    prefillers.release(PrefillerId(1), 70)
    assert prefillers.choose(of(41)) == 1


def test_an_oversized_prompt_goes_to_an_empty_prefiller_only() -> None:
    prefillers = Prefillers(2, kv_capacity_tokens=100, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 1)
    assert prefillers.choose(of(1_000)) == 1
    prefillers.begin_prefill(PrefillerId(1), 1_000)
    assert prefillers.choose(of(1_000)) is None
    assert prefillers.choose(of(99)) == 0


def test_tokens_outlive_the_prefill() -> None:
    prefillers = Prefillers(1, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 8)
    prefillers.end_prefill(PrefillerId(0))
    assert (prefillers.prefills, prefillers.held_tokens) == ([0], [8])
    prefillers.release(PrefillerId(0), 8)
    assert (prefillers.prefills, prefillers.held_tokens) == ([0], [0])


def test_a_second_release_asserts() -> None:
    prefillers = Prefillers(1, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 8)
    prefillers.release(PrefillerId(0), 8)
    with pytest.raises(AssertionError, match="released twice"):
        prefillers.release(PrefillerId(0), 8)


def test_a_second_end_of_a_prefill_asserts() -> None:
    prefillers = Prefillers(1, choice=FewestTokens())
    prefillers.begin_prefill(PrefillerId(0), 8)
    prefillers.end_prefill(PrefillerId(0))
    with pytest.raises(AssertionError, match="no prefill to end"):
        prefillers.end_prefill(PrefillerId(0))


def test_the_number_of_running_prefills_is_kept() -> None:
    prefillers = Prefillers(2, choice=FewestTokens())
    for prefiller in (P0, P1, P1):
        prefillers.begin_prefill(prefiller, 1)
    assert prefillers.prefilling == 3
    prefillers.end_prefill(P1)
    assert (prefillers.prefilling, prefillers.prefills) == (2, [1, 1])


def test_a_closed_prefiller_takes_no_prefill() -> None:
    prefillers = Prefillers(2, choice=FewestTokens())
    prefillers.is_open[0] = False
    assert prefillers.choose(of(1)) == 1
    prefillers.is_open[1] = False
    assert prefillers.choose(of(1)) is None


def test_a_prefiller_that_lost_the_request_is_avoided_though_the_others_are_full() -> None:
    prefillers = Prefillers(2, probe_limit=1, choice=FewestTokens())
    assert prefillers.choose(of(1), [P0]) == 1
    prefillers.begin_prefill(P1, 1)
    assert prefillers.choose(of(1), [P0]) is None


def test_a_prefiller_that_lost_the_request_takes_it_again_when_the_others_are_closed() -> None:
    prefillers = Prefillers(3, choice=FewestTokens())
    prefillers.begin_prefill(P0, 1)
    prefillers.is_open[1] = prefillers.is_open[2] = False
    assert prefillers.choose(of(1), [P0]) == 0
    prefillers.is_open[2] = True
    # Both open ones lost it: it goes to the one that did so longer ago, though that holds more.
    assert prefillers.choose(of(1), [P0, P2]) == 0
    assert prefillers.choose(of(1), [P2, P0]) == 2


def test_new_prefillers_are_open_and_the_new_limits_hold() -> None:
    prefillers = Prefillers(1, probe_limit=1, choice=FewestTokens())
    prefillers.begin_prefill(P0, 50)
    prefillers.is_open[0] = False
    prefillers.reconfigure(2, probe_limit=None, kv_capacity_tokens=60, direct_limit=None)
    assert prefillers.is_open == [False, True]
    assert (prefillers.prefills, prefillers.held_tokens) == ([1, 0], [50, 0])
    prefillers.begin_prefill(P1, 55)
    assert prefillers.choose(of(10)) is None
    prefillers.is_open[0] = True
    assert prefillers.choose(of(10)) == 0


def test_prefillers_cannot_shrink() -> None:
    with pytest.raises(AssertionError, match="cannot shrink"):
        Prefillers(2, choice=FewestTokens()).reconfigure(
            1, probe_limit=None, kv_capacity_tokens=None, direct_limit=None
        )


class Scripted:
    """Returns a given choice, and records its arguments."""

    observer = None

    def __init__(self, answer: PrefillerId) -> None:
        self.answer = answer
        self.asked: list[tuple[PrefillRequest, list[PrefillerId], list[int]]] = []

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        self.asked.append((request, list(candidates), list(view.held_tokens)))
        return self.answer


def test_another_choice_is_asked_among_the_prefillers_with_room() -> None:
    choice = Scripted(P2)
    prefillers = Prefillers(4, probe_limit=1, choice=choice)
    prefillers.begin_prefill(P0, 5)
    prefillers.is_open[1] = False
    assert prefillers.choose(of(9)) == 2
    assert choice.asked == [(of(9), [P2, PrefillerId(3)], [5, 0, 0, 0])]


def test_nobody_is_asked_when_there_is_no_room() -> None:
    choice = Scripted(P0)
    prefillers = Prefillers(1, probe_limit=1, choice=choice)
    prefillers.begin_prefill(P0, 5)
    assert prefillers.choose(of(9)) is None
    assert choice.asked == []


def test_a_choice_without_room_asserts() -> None:
    prefillers = Prefillers(2, choice=Scripted(P1))
    prefillers.is_open[1] = False
    with pytest.raises(AssertionError, match="prefiller 1 has no room or is closed"):
        prefillers.choose(of(9))


@given(
    held=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    running=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    closed=st.sets(st.integers(0, 3), max_size=2),
    probe_limit=st.none() | st.integers(1, 3),
    capacity=st.none() | st.integers(1, 60),
    prompt_tokens=st.integers(1, 70),
)
def test_choose_is_the_first_minimum_over_the_open_prefillers(
    held: list[int],
    running: list[int],
    closed: set[int],
    probe_limit: int | None,
    capacity: int | None,
    prompt_tokens: int,
) -> None:
    choice = FewestTokens()
    prefillers = Prefillers(
        len(held), probe_limit=probe_limit, kv_capacity_tokens=capacity, choice=choice
    )
    prefillers.held_tokens[:] = held
    prefillers.prefills[:] = running[: len(held)]
    prefillers.is_open[:] = [prefiller not in closed for prefiller in range(len(held))]
    open_ones = [
        (tokens, prefiller)
        for prefiller, tokens in enumerate(held)
        if prefiller not in closed
        and (probe_limit is None or running[prefiller] < probe_limit)
        and (capacity is None or tokens == 0 or tokens + prompt_tokens <= capacity)
    ]
    assert prefillers.choose(of(prompt_tokens)) == (min(open_ones)[1] if open_ones else None)


def test_a_prefiller_on_trial_takes_one_request_at_a_time() -> None:
    prefillers = Prefillers(2, choice=FewestTokens())
    prefillers.on_trial[0] = True
    prefillers.held_tokens[1] = 50
    assert prefillers.choose(of(9)) == 0
    prefillers.begin_prefill(P0, 9)
    assert prefillers.choose(of(9)) == 1
    # It is held until a rank has pulled it.
    prefillers.end_prefill(P0)
    assert prefillers.choose(of(9)) == 1
    prefillers.release(P0, 9)
    assert prefillers.choose(of(9)) == 0


def test_who_lost_a_request_is_not_replaced_by_one_on_trial_while_another_is_open() -> None:
    prefillers = Prefillers(3, choice=FewestTokens())
    prefillers.on_trial[1] = True
    assert prefillers.choose(of(9), [P0]) == 2
    prefillers.is_open[2] = False
    # The loss is forgiven before a second one is risked.
    assert prefillers.choose(of(9), [P0]) == 0
    prefillers.is_open[0] = False
    assert prefillers.choose(of(9), [P0]) == 1
    prefillers.begin_prefill(P1, 9)
    assert prefillers.choose(of(9), [P0]) is None


def test_nobody_waits_for_a_trial_to_end_while_another_prefiller_is_open() -> None:
    prefillers = Prefillers(2, choice=FewestTokens())
    prefillers.on_trial[1] = True
    prefillers.begin_prefill(P1, 9)
    assert prefillers.choose(of(9), [P0]) == 0

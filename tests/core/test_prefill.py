"""Prefiller budgets: the emptiest open prefiller takes the probe, and nothing is released twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill import Prefillers


def test_the_prefiller_with_the_fewest_held_tokens_is_chosen() -> None:
    prefillers = Prefillers(3)
    prefillers.begin_probe(PrefillerId(0), 50)
    prefillers.begin_probe(PrefillerId(1), 20)
    prefillers.begin_probe(PrefillerId(2), 30)
    assert prefillers.choose(1) == 1


def test_ties_go_to_the_lowest_prefiller() -> None:
    prefillers = Prefillers(3)
    assert prefillers.choose(10) == 0
    prefillers.begin_probe(PrefillerId(0), 10)
    assert prefillers.choose(10) == 1


def test_a_prefiller_at_its_probe_limit_is_closed_until_a_probe_ends() -> None:
    prefillers = Prefillers(2, probe_limit=1)
    prefillers.begin_probe(PrefillerId(0), 5)
    assert prefillers.choose(5) == 1
    prefillers.begin_probe(PrefillerId(1), 9)
    assert prefillers.choose(5) is None
    prefillers.end_probe(PrefillerId(1))
    # Its tokens are still held, but it is the only open one.
    assert prefillers.held_tokens == [5, 9]
    assert prefillers.choose(5) == 1


def test_a_prompt_goes_only_where_its_kv_tokens_fit() -> None:
    prefillers = Prefillers(2, kv_capacity_tokens=100)
    prefillers.begin_probe(PrefillerId(0), 60)
    prefillers.begin_probe(PrefillerId(1), 70)
    assert prefillers.choose(40) == 0
    assert prefillers.choose(41) is None
    prefillers.release(PrefillerId(1), 70)
    assert prefillers.choose(41) == 1


def test_an_oversized_prompt_goes_to_an_empty_prefiller_only() -> None:
    prefillers = Prefillers(2, kv_capacity_tokens=100)
    prefillers.begin_probe(PrefillerId(0), 1)
    assert prefillers.choose(1_000) == 1
    prefillers.begin_probe(PrefillerId(1), 1_000)
    assert prefillers.choose(1_000) is None
    assert prefillers.choose(99) == 0


def test_tokens_outlive_the_probe() -> None:
    prefillers = Prefillers(1)
    prefillers.begin_probe(PrefillerId(0), 8)
    prefillers.end_probe(PrefillerId(0))
    assert (prefillers.probes, prefillers.held_tokens) == ([0], [8])
    prefillers.release(PrefillerId(0), 8)
    assert (prefillers.probes, prefillers.held_tokens) == ([0], [0])


def test_a_second_release_asserts() -> None:
    prefillers = Prefillers(1)
    prefillers.begin_probe(PrefillerId(0), 8)
    prefillers.release(PrefillerId(0), 8)
    with pytest.raises(AssertionError, match="released twice"):
        prefillers.release(PrefillerId(0), 8)


def test_a_second_end_of_a_probe_asserts() -> None:
    prefillers = Prefillers(1)
    prefillers.begin_probe(PrefillerId(0), 8)
    prefillers.end_probe(PrefillerId(0))
    with pytest.raises(AssertionError, match="no probe to end"):
        prefillers.end_probe(PrefillerId(0))


@given(
    held=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    running=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    probe_limit=st.none() | st.integers(1, 3),
    capacity=st.none() | st.integers(1, 60),
    prompt_tokens=st.integers(1, 70),
)
def test_choose_is_the_first_minimum_over_the_open_prefillers(
    held: list[int],
    running: list[int],
    probe_limit: int | None,
    capacity: int | None,
    prompt_tokens: int,
) -> None:
    prefillers = Prefillers(len(held), probe_limit=probe_limit, kv_capacity_tokens=capacity)
    prefillers.held_tokens[:] = held
    prefillers.probes[:] = running[: len(held)]
    open_ones = [
        (tokens, prefiller)
        for prefiller, tokens in enumerate(held)
        if (probe_limit is None or running[prefiller] < probe_limit)
        and (capacity is None or tokens == 0 or tokens + prompt_tokens <= capacity)
    ]
    assert prefillers.choose(prompt_tokens) == (min(open_ones)[1] if open_ones else None)

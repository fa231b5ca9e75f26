"""The measured turnover: what counts, how fast it is known, how fast it is forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.ranks import Ledger, Turnover


def advance(turnover: Turnover, departures: int) -> None:
    for _ in range(departures):
        turnover.leave(1, 1)
    turnover.step()


def test_nothing_turns_over_before_the_first_step() -> None:
    turnover = Turnover()
    turnover.leave(1, 1)
    assert turnover.per_step == 0.0


def test_the_first_steps_count_alike() -> None:
    turnover = Turnover()
    for departures in (0, 6, 2, 0):
        advance(turnover, departures)
    assert turnover.per_step == pytest.approx(8 / 4)


def test_the_past_is_forgotten() -> None:
    turnover = Turnover()
    for _ in range(1000):
        advance(turnover, 1)
    for _ in range(1000):
        advance(turnover, 0)
    assert 0.0 < turnover.per_step < 0.001


@given(departures=st.lists(st.integers(0, 20), min_size=1, max_size=300))
def test_the_rate_is_between_the_least_and_the_most(departures: list[int]) -> None:
    turnover = Turnover()
    for count in departures:
        advance(turnover, count)
        assert min(departures) <= turnover.per_step + 1e-9
        assert turnover.per_step <= max(departures) + 1e-9


def test_a_stay_is_the_mean_of_its_size() -> None:
    turnover = Turnover()
    assert turnover.stay_steps(1000) is None
    for kv_tokens, steps in ((1000, 10), (600, 30), (50_000, 7)):
        turnover.leave(kv_tokens, steps)
    assert turnover.stay_steps(1023) == 20.0
    assert turnover.stay_steps(40_000) == 7.0
    # No request of these sizes has left: the nearest size, of two the smaller.
    assert turnover.stay_steps(1) == 20.0
    assert turnover.stay_steps(5_000) == 20.0
    assert turnover.stay_steps(1 << 40) == 7.0


def test_a_stay_follows_a_change() -> None:
    turnover = Turnover()
    for steps in [100] * 500 + [10] * 200:
        turnover.leave(5, steps)
    assert turnover.stay_steps(5) == pytest.approx(10.0, abs=0.5)


def test_the_ledger_counts_departures_of_what_had_started() -> None:
    ledger = Ledger(2)
    for number in range(6):
        ledger.bind(RequestId(number), RankId(number % 2), 10, age=2)
        if number:
            ledger.start(RequestId(number))
    ledger.step()
    assert ledger.turnover.per_step == 0.0
    ledger.step()
    for number in range(4):
        ledger.unbind(RequestId(number))
    ledger.step()
    # The first one never joined its batch.
    assert ledger.turnover.per_step == pytest.approx(3 / 3)
    # Of prompts of 8 tokens: the tokens emitted are not part of the size.
    assert ledger.turnover.stay_steps(8) == 2.0

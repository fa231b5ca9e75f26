"""Decode engines that die under greedy streams."""

from statistics import median

import pytest
from tests.support.chaos.deaths import freeze_ranks, kill_decoders

from balanceroute.proxy.live.request.shared import MOST_DEATHS


@pytest.mark.parametrize(
    ("seed", "twice"), [pytest.param(1, 0, marks=pytest.mark.extended), (20, 1)]
)
def test_every_stream_goes_on_once_and_is_exact(seed: int, twice: int) -> None:
    found = kill_decoders(seed, requests=200)
    assert found.hit > 5
    assert (found.exact, found.wrong, found.held) == (200 - twice, [], 0)
    assert (found.failed, found.twice) == (twice, twice)
    assert max(found.under.values()) == (MOST_DEATHS if twice else 1)
    # What its rank had not told yet, a prefill and two steps, and no wait for anything.
    assert max(found.gaps_s) < 0.25


def test_streams_of_agents_go_on_and_are_exact() -> None:
    found = kill_decoders(2, requests=200, agents=1.0)
    assert found.hit > 5
    assert (found.exact, found.failed, found.twice, found.wrong, found.held) == (200, 0, 0, [], 0)
    # Another engine says all of it again, a token in a step of 0.01 s, of which a parser may tell none.
    assert 0.3 < median(found.gaps_s) < 2.5
    assert max(found.gaps_s) < 14.0


def test_without_the_setting_each_that_was_hit_ends_with_an_error() -> None:
    found = kill_decoders(1, requests=200, resume="off")
    assert found.failed == found.hit > 5
    assert (found.exact + found.failed, found.wrong, found.held) == (200, [], 0)


@pytest.mark.extended
def test_what_agents_asked_for_ends_after_a_right_beginning() -> None:
    found = kill_decoders(2, requests=200, resume="off", agents=1.0)
    assert found.failed > 2
    assert (found.exact + found.failed, found.wrong, found.held) == (200, [], 0)


# Decode ranks that freeze beside others that are slow, send in bursts, and pause.


def test_frozen_ranks_are_left_out_in_time_and_no_others() -> None:
    found = freeze_ranks(0, seconds=120)
    assert found.frozen
    assert found.paused + found.held + found.stood
    assert (found.missed, found.false, found.wrong, found.left) == ([], [], [], 0)
    assert len(found.found_s) == found.frozen
    assert found.gaps_s

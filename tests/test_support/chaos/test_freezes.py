"""Decode ranks that freeze beside others that are slow, send in bursts, and pause."""

from tests.support.chaos.deaths import freeze_ranks


def test_frozen_ranks_are_left_out_in_time_and_no_others() -> None:
    found = freeze_ranks(0, seconds=120)
    assert found.frozen
    assert found.paused + found.held + found.stood
    assert (found.missed, found.false, found.wrong, found.left) == ([], [], [], 0)
    assert len(found.found_s) == found.frozen
    assert found.gaps_s

"""Decode ranks that freeze beside others that are slow, send in bursts, and pause."""

import pytest

from balanceroute.proxy.testing.chaos.freezes import freeze_ranks


@pytest.mark.parametrize("relays", [0, 2], ids=["one process", "two relays"])
def test_frozen_ranks_are_left_out_in_time_and_no_others(relays: int) -> None:
    found = freeze_ranks(0, seconds=120, relays=relays)
    assert found.frozen
    assert found.paused + found.held + found.stood
    assert (found.missed, found.false, found.wrong, found.left) == ([], [], [], 0)
    assert len(found.found_s) == found.frozen
    assert found.gaps_s

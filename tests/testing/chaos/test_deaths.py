"""Decode engines that die under greedy streams."""

from balanceroute.proxy.testing.chaos.deaths import kill_decoders


def test_every_stream_goes_on_and_is_exact() -> None:
    found = kill_decoders(1, requests=200)
    assert found.hit > 5
    assert (found.exact, found.failed, found.wrong, found.held) == (200, 0, [], 0)
    # A prefill and a step, and no wait for anything.
    assert max(found.gaps_s) < 0.1


def test_without_the_setting_each_that_was_hit_ends_with_an_error() -> None:
    found = kill_decoders(1, requests=200, resume="off")
    assert found.failed == found.hit > 5
    assert (found.exact + found.failed, found.wrong, found.held) == (200, [], 0)

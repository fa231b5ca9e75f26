"""The phases of a request: what leads where."""

from balanceroute.proxy.live.request.phases import TRANSITIONS, Phase


def test_every_phase_can_be_reached_and_may_end_at_once() -> None:
    reached, found = {Phase.QUEUED}, {Phase.QUEUED}
    while found:
        found = {to for phase in found for to in TRANSITIONS[phase]} - reached
        reached |= found
    assert reached == set(Phase)
    assert all(Phase.ENDED in ways for phase, ways in TRANSITIONS.items() if ways)


def test_nothing_comes_after_the_end() -> None:
    assert not TRANSITIONS[Phase.ENDED]


def test_only_an_attempt_fails_into_a_backoff_and_no_stream_that_began_does() -> None:
    sources = {phase for phase, ways in TRANSITIONS.items() if Phase.BACKOFF in ways}
    assert sources == {Phase.PREFILLING, Phase.DECODING}

"""The phases of a request: what leads where."""

import pytest

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.request.phases import TRANSITIONS, Phase, check_move


def test_a_move_is_allowed_if_and_only_if_it_is_in_the_table() -> None:
    for phase in Phase:
        for to in Phase:
            if to in TRANSITIONS[phase]:
                check_move(RequestId(3), phase, to)
            else:
                with pytest.raises(LifecycleError, match=f"{phase.name} to {to.name}"):
                    check_move(RequestId(3), phase, to)


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

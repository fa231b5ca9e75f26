"""Since when something that is read now may have been waiting."""

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.live.request.prefill_attempt import PrefillAttempt
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import StallWatch

INTERVAL_S = 0.25
BODY = {"prompt": "t1 t2 t3", "max_tokens": 3, "ignore_eos": True}


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def watched(*ticks_s: float) -> tuple[StallWatch, Clock]:
    clock = Clock()
    stalls = StallWatch(INTERVAL_S, clock)
    for clock.now_s in ticks_s:
        stalls.tick()
    return stalls, clock


@pytest.mark.parametrize("now_s", [101.0, 101.2, 101.49])
def test_what_comes_to_a_process_that_runs_is_new(now_s: float) -> None:
    stalls, clock = watched(100.25, 100.5, 100.75, 101.0)
    clock.now_s = now_s
    assert stalls.waiting_since_s() == now_s


def test_what_is_read_before_the_late_tick_may_have_waited() -> None:
    stalls, clock = watched(100.25, 100.5)
    clock.now_s = 131.0
    assert stalls.waiting_since_s() == 100.5


def test_what_is_read_soon_after_the_late_tick_may_have_waited_too() -> None:
    stalls, clock = watched(100.25, 100.5, 131.0)
    for clock.now_s in (131.0, 131.25, 131.49):
        stalls.tick()
        assert stalls.waiting_since_s() == 100.5
    clock.now_s = 131.5
    assert stalls.waiting_since_s() == 131.5


def test_a_time_without_ticks_is_no_stall() -> None:
    stalls, clock = watched(100.25)
    clock.now_s = 500.0
    stalls.begin()
    stalls.tick()
    assert stalls.waiting_since_s() == 500.0


@served()
async def test_a_prefill_answer_that_waited_longer_than_its_lease_is_not_used(site: Site) -> None:
    """A proxy that stood still pulls nothing that may be another prompt's by now."""
    stalls = site.world.proxy.deployment.driver.context.stalls
    exchange = site.send("/v1/completions", BODY)
    await site.until(lambda: len(site.received("prefill")) == 1)
    # As after 40 s, which began when the leg had been sent.
    now_s = stalls._clock()
    stalls._stalled_s, stalls._over_s = now_s - 40.0, now_s + 0.2
    session = next(iter(site.world.proxy.deployment.driver.sessions.values()))
    assert isinstance(session, Session)
    attempt = session.work
    assert isinstance(attempt, PrefillAttempt)
    attempt.sent_s -= 40.0
    await exchange.end()
    assert exchange.status == 200
    (record,) = site.world.ended
    assert record.lease_lapses == 1  # The second prefill was sent after the stall.
    assert len(site.received("prefill")) == 2
    assert len(site.received("decode")) == 1
    assert site.fleet.misreads == []


def test_the_first_tick_after_a_standstill_is_known_and_never_two_in_a_row() -> None:
    woke = []
    stalls, clock = watched(100.25)
    for clock.now_s in (100.5, 131.0, 131.25, 161.0, 191.0, 221.0, 221.25):
        stalls.tick()
        woke.append(stalls.woke)
    assert woke == [False, True, False, True, False, True, False]

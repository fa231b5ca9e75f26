"""What is measured of a deployment: departures, prefills and steps, as worked out by hand."""

from math import exp

import numpy as np
import pytest

from balanceroute.proxy.core.events import (
    Event,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    Ticket,
)
from balanceroute.proxy.core.policies.oldest_first import OldestFirst, least_kv_with_room
from balanceroute.proxy.core.resources import Pace
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

WINDOW_NS = 1_000
A, B = (RequestId(number) for number in range(2))
FIRST, SECOND = PrefillerId(0), PrefillerId(1)


def scheduler_with_leases() -> tuple[Scheduler, Pace]:
    """Return a scheduler of one prefiller and one rank, and its pace."""
    config = SchedulerConfig(
        ranks=1, batch_limit=4, prefillers=1, rank_kv_tokens=None, lease_ns=WINDOW_NS
    )
    scheduler = Scheduler(config, OldestFirst(least_kv_with_room, slots_beyond_batch=0))
    assert scheduler.leases.pace is not None
    return scheduler, scheduler.leases.pace


def test_a_prefillers_speed_is_its_tokens_over_the_time_in_which_it_was_busy() -> None:
    pace = Pace(WINDOW_NS)
    assert pace.prefill_ns_per_token is None
    pace.prefill_began(A, FIRST, 100, 0)
    pace.prefill_began(B, FIRST, 100, 0)
    assert pace.prefilling_tokens == 200
    pace.prefill_ended(A, 300, 120)
    pace.prefill_ended(B, 400, 80)  # They shared one prefiller, which was busy for 400 ns.
    pace.tick(5_000, waiting=True)
    assert pace.prefill_ns_per_token == pytest.approx(2.0, rel=0.02)
    assert pace.prefill_ns == pytest.approx(350.0, rel=0.02)
    assert pace.prefilling_tokens == 0


def test_old_prefills_are_forgotten() -> None:
    pace, now_ns = Pace(WINDOW_NS), 0
    for duration_ns in [1_000] * 300 + [10] * 1_500:
        pace.prefill_began(A, FIRST, 100, now_ns)
        now_ns += duration_ns
        pace.prefill_ended(A, now_ns, 100)
    assert pace.prefill_ns == pytest.approx(10.0, rel=0.01)
    assert pace.prefill_ns_per_token == pytest.approx(0.1, rel=0.01)


def test_prefills_on_two_prefillers_take_the_time_of_both() -> None:
    pace = Pace(WINDOW_NS)
    pace.prefill_began(A, FIRST, 100, 0)
    pace.prefill_began(B, SECOND, 100, 0)
    pace.prefill_ended(A, 200, 100)
    pace.prefill_ended(B, 200, 100)
    assert pace.prefill_ns_per_token == pytest.approx(2.0, rel=0.02)
    assert pace.busy_prefillers == pytest.approx(2.0)
    pace.prefill_began(A, FIRST, 100, 600)
    pace.prefill_ended(A, 800, 100)
    # 600 ns of 800 ns x 2.
    assert pace.busy_prefillers == pytest.approx(600 / 800, rel=0.03)


def test_a_prefill_that_was_lost_teaches_nothing() -> None:
    pace = Pace(WINDOW_NS)
    pace.prefill_began(A, FIRST, 100, 0)
    pace.prefill_ended(A, 100)
    assert pace.prefilling_tokens == 0
    assert pace.prefill_ns_per_token is None
    pace.prefill_ended(A, 200)


@pytest.mark.parametrize(
    ("event", "tokens"),
    [
        (PrefillDone(A, 80), 0),
        (PrefillLost(A), 100),  # It starts again at once.
        (RequestFailed(A), 0),
        (RequestCancelled(A), 0),
        (RequestFinished(A), 0),
    ],
)
def test_the_scheduler_tells_of_prefills_that_begin_and_end(event: Event, tokens: int) -> None:
    scheduler, pace = scheduler_with_leases()
    scheduler.handle(RequestArrived(A, Ticket(100)), now_ns=0)
    assert pace.prefilling_tokens == 100
    scheduler.handle(event, now_ns=300)
    assert pace.prefilling_tokens == tokens
    assert pace.prefill_ns == (300.0 if isinstance(event, PrefillDone) else 0.0)


def test_a_direct_request_is_no_prefill() -> None:
    scheduler, pace = scheduler_with_leases()
    scheduler.handle(RequestArrived(A, Ticket(100, decode=False)), now_ns=0)
    assert pace.prefilling_tokens == 0


def test_the_rate_of_departures_is_known_after_a_window() -> None:
    pace = Pace(WINDOW_NS)
    for now_ns in range(0, 5_001, 50):
        pace.tick(now_ns, waiting=True)
        if now_ns < WINDOW_NS:
            assert pace.departures_per_ns is None
        if now_ns < 2 * WINDOW_NS:
            assert pace.steady_departures_per_ns is None
        pace.left(10)
    # The last departure counts in full, and the time since it not at all.
    assert pace.departures_per_ns == pytest.approx(1 / 50, rel=0.06)
    pace.tick(5_000 + WINDOW_NS, waiting=True)
    assert pace.departures_per_ns == pytest.approx(exp(-1) / 50, rel=0.06)
    assert pace.steady_departures_per_ns == pace.departures_per_ns


def test_while_no_request_waits_departures_say_nothing() -> None:
    """An idle night does not make the pool shallow for those who come in the morning."""
    pace = Pace(WINDOW_NS)
    for now_ns in range(0, 5_001, 50):
        pace.tick(now_ns, waiting=True)
        pace.left(10)
    rate = pace.departures_per_ns
    pace.tick(5_001, waiting=False)
    pace.left(10)
    pace.tick(100 * WINDOW_NS, waiting=False)
    pace.left(10)
    pace.tick(200 * WINDOW_NS, waiting=True)
    assert pace.departures_per_ns == pytest.approx(rate, rel=0.01)


def test_tokens_that_leave_are_counted_by_step() -> None:
    pace = Pace(WINDOW_NS)
    assert pace.tokens_left_per_step is None
    pace.left(0)  # Before any step, as requests that fail at once do.
    pace.left(1)
    assert pace.tokens_left_per_step is None
    for step in range(40):
        pace.step(1_000, np.array([300, 100]))
        if step % 4 == 0:
            pace.left(100)
    assert pace.tokens_left_per_step == pytest.approx(25.0, rel=0.05)


def test_a_step_is_learnt_with_the_load_of_the_heaviest_rank() -> None:
    pace = Pace(WINDOW_NS)
    for step in range(200):
        pace.step(1_000 + 30 * step, np.array([10 * step, step]))
    assert pace.step_model.ns_per_token == pytest.approx(3.0)


def test_a_step_that_was_not_measured_teaches_nothing() -> None:
    pace = Pace(WINDOW_NS)
    for step in range(200):
        pace.step(None, np.array([10 * step, step]))
    assert pace.step_model.ns_per_token is None

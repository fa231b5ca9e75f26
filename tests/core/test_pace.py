"""What is measured of a deployment: departures, prefills and steps, as worked out by hand."""

from math import exp

import numpy as np
import pytest

from balanceroute.proxy.core.events import (
    Event,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.pace import Pace

WINDOW_NS = 1_000
A, B, C = (RequestId(number) for number in range(3))
LOADS = np.array([300, 100])


class Site:
    """A pace, and requests of 100 tokens; C is direct."""

    def __init__(self) -> None:
        tickets = {A: Ticket(100), B: Ticket(100), C: Ticket(100, decode=False)}
        self.requests = {number: Request(number, one, 0) for number, one in tickets.items()}
        self.pace = Pace(self.requests, WINDOW_NS)

    def start(self, number: RequestId, now_ns: int, prefiller: int = 0) -> None:
        self.pace.observe(
            *(Tick(), [StartPrefill(number, PrefillerId(prefiller), 100)], LOADS, now_ns),
            waiting=True,
        )

    def hear(self, event: Event, now_ns: int, *, waiting: bool = True) -> None:
        self.pace.observe(event, [], LOADS, now_ns, waiting=waiting)


def test_a_prefillers_speed_is_its_tokens_over_the_time_in_which_it_was_busy() -> None:
    site = Site()
    assert site.pace.prefill_ns_per_token is None
    site.start(A, 0)
    site.start(B, 0)
    assert site.pace.prefilling_tokens == 200
    site.hear(PrefillDone(A, 120), 300)
    site.hear(PrefillDone(B, 80), 400)  # They shared one prefiller, which was busy for 400 ns.
    site.hear(Tick(), 5_000)
    assert site.pace.prefill_ns_per_token == pytest.approx(2.0, rel=0.02)
    assert site.pace.prefill_ns == pytest.approx(350.0, rel=0.02)
    assert site.pace.prefilling_tokens == 0


def test_prefills_on_two_prefillers_take_the_time_of_both() -> None:
    site = Site()
    site.start(A, 0, prefiller=0)
    site.start(B, 0, prefiller=1)
    site.hear(PrefillDone(A, 100), 200)
    site.hear(PrefillDone(B, 100), 200)
    assert site.pace.prefill_ns_per_token == pytest.approx(2.0, rel=0.02)
    assert site.pace.busy_prefillers == pytest.approx(2.0)
    site.start(A, 600)
    site.hear(PrefillDone(A, 100), 800)
    # 600 ns of 800 ns x 2.
    assert site.pace.busy_prefillers == pytest.approx(600 / 800, rel=0.03)


@pytest.mark.parametrize(
    "event", [PrefillLost(A), RequestFailed(A), RequestCancelled(A), RequestFinished(A)]
)
def test_a_prefill_that_ends_otherwise_runs_no_longer(event: Event) -> None:
    site = Site()
    site.start(A, 0)
    site.hear(event, 100)
    assert site.pace.prefilling_tokens == 0
    assert site.pace.prefill_ns_per_token is None
    site.hear(event, 200)


def test_a_direct_request_is_no_prefill() -> None:
    site = Site()
    site.start(C, 0)
    assert site.pace.prefilling_tokens == 0


def test_the_rate_of_departures_is_known_after_a_window() -> None:
    site = Site()
    for now_ns in range(0, 5_001, 50):
        site.hear(Tick(), now_ns)
        if now_ns < WINDOW_NS:
            assert site.pace.departures_per_ns is None
        if now_ns < 2 * WINDOW_NS:
            assert site.pace.steady_departures_per_ns is None
        site.pace.left(10)
    # The last departure counts in full, and the time since it not at all.
    assert site.pace.departures_per_ns == pytest.approx(1 / 50, rel=0.06)
    site.hear(Tick(), 5_000 + WINDOW_NS)
    assert site.pace.departures_per_ns == pytest.approx(exp(-1) / 50, rel=0.06)
    assert site.pace.steady_departures_per_ns == site.pace.departures_per_ns


def test_while_no_request_waits_departures_say_nothing() -> None:
    """An idle night does not make the pool shallow for those who come in the morning."""
    site = Site()
    for now_ns in range(0, 5_001, 50):
        site.hear(Tick(), now_ns)
        site.pace.left(10)
    rate = site.pace.departures_per_ns
    site.hear(Tick(), 5_001, waiting=False)
    site.pace.left(10)
    site.hear(Tick(), 100 * WINDOW_NS, waiting=False)
    site.pace.left(10)
    site.hear(Tick(), 200 * WINDOW_NS)
    assert site.pace.departures_per_ns == pytest.approx(rate, rel=0.01)


def test_tokens_that_leave_are_counted_by_step() -> None:
    site = Site()
    assert site.pace.tokens_left_per_step is None
    site.pace.left(0)  # Before any step, as requests that fail at once do.
    site.pace.left(1)
    assert site.pace.tokens_left_per_step is None
    for step in range(40):
        site.hear(StepCompleted(1_000), step)
        if step % 4 == 0:
            site.pace.left(100)
    assert site.pace.tokens_left_per_step == pytest.approx(25.0, rel=0.05)


def test_a_step_is_learnt_with_the_load_of_the_heaviest_rank() -> None:
    site = Site()
    for step in range(200):
        site.pace.observe(
            *(StepCompleted(1_000 + 30 * step), [], np.array([10 * step, step]), step), waiting=True
        )
    assert site.pace.step_model.ns_per_token == pytest.approx(3.0)


def test_a_step_that_was_not_measured_teaches_nothing() -> None:
    site = Site()
    for step in range(200):
        site.pace.observe(*(StepCompleted(), [], np.array([10 * step, step]), step), waiting=True)
    assert site.pace.step_model.ns_per_token is None

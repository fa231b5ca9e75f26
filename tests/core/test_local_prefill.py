"""Who computes a prompt: the worked sums of delays, and what they are measured from."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import structs

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import (
    Admit,
    DecodeStarted,
    Eligible,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillLost,
    RankId,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    StepCompleted,
    Ticket,
)
from balanceroute.proxy.core.local_prefill import FleetState, LocalPrefill
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig, placed

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import Event

TOKEN_NS = 1_000
STEP_NS = 100_000
IDLE = FleetState((PrefillerId(0),), 0, np.full(2, 50), np.zeros(2, np.int64), 0, 1.0)


class Site:
    """A scheduler with ranks that may compute prompts of up to 1,000 tokens."""

    def __init__(self, *, prefillers: int = 1, always: bool = False) -> None:
        config = SchedulerConfig(ranks=2, batch_limit=2, prefillers=prefillers)
        inputs = PolicyInputs(2, 2, PolicySettings(), random.Random(0), NoPrediction())
        self.local = LocalPrefill(1_000, always=always)
        self.scheduler = Scheduler(
            config, make_policy("fifo", inputs), intake=Intake(local_prefill=self.local)
        )
        self.now_ns = 0
        self.sent = 0

    def feed(self, *events: "Event", after_ns: int = 0) -> None:
        self.now_ns += after_ns
        for event in events:
            self.scheduler.handle(event, now_ns=self.now_ns)
            self.scheduler.check()

    def arrive(self, tokens: int) -> RequestId:
        request = RequestId(self.sent)
        self.sent += 1
        self.feed(RequestArrived(request, Ticket(tokens)))
        return request

    def prefill(self, tokens: int) -> None:
        """Measure a prefill: `TOKEN_NS` for each token."""
        request = self.arrive(tokens)
        self.feed(PrefillDone(request, tokens), after_ns=TOKEN_NS * tokens)
        self.feed(RequestCancelled(request))

    def place(self, tokens: int) -> bool:
        """Return whether a rank takes the prompt."""
        ticket = placed(self.scheduler, Ticket(tokens), self.now_ns)
        assert structs.replace(ticket, prefill=True) == Ticket(tokens)
        return not ticket.prefill


def warm() -> Site:
    site = Site()
    for tokens in [200, 400] * 20:
        site.prefill(tokens)
    site.feed(*[StepCompleted(STEP_NS)] * 3)
    return site


def test_without_measurements_prefillers_compute_all() -> None:
    assert not Site().place(1)


def test_a_rank_takes_what_delays_all_less() -> None:
    local = warm().local
    # C (1 + N) against R (1 + 4 s / m) with R = s = C, m = 300: up to N = 4 s / m.
    assert not local.placed(Ticket(300), replace(IDLE, bound=3), 10**9).prefill
    assert local.placed(Ticket(300), replace(IDLE, bound=5), 10**9).prefill
    assert not local.placed(Ticket(600), replace(IDLE, bound=7), 10**9).prefill
    assert local.placed(Ticket(600), replace(IDLE, bound=9), 10**9).prefill


def test_who_waits_for_a_rank_is_delayed_too() -> None:
    state = replace(IDLE, bound=1, waiting_slots=4)
    assert warm().local.placed(Ticket(300), state, 10**9).prefill


def test_the_work_before_a_prefiller_counts() -> None:
    site = warm()
    busy = replace(IDLE, bound=20)
    assert site.local.placed(Ticket(100), busy, site.now_ns).prefill
    running = [site.arrive(500), site.arrive(500)]
    # 11 s (1 + 4/3) against 21 s.
    assert not site.local.placed(Ticket(100), busy, site.now_ns).prefill
    site.feed(*(RequestCancelled(request) for request in running))
    assert site.local.placed(Ticket(100), busy, site.now_ns).prefill


def test_a_wait_for_a_slot_hides_a_prefill() -> None:
    local = warm().local
    full = replace(IDLE, free_slots=np.zeros(2, np.int64), departures_per_step=0.1)
    # A slot is free in ten steps, a millisecond: a prefill of less than that delays nobody.
    assert local.placed(Ticket(900), full, 10**9).prefill
    assert local.placed(Ticket(900), replace(full, departures_per_step=0.0), 10**9).prefill
    assert not local.placed(Ticket(900), replace(full, departures_per_step=1.0), 10**9).prefill


def test_a_transfer_counts() -> None:
    site = warm()
    state = replace(IDLE, bound=5)
    assert site.local.placed(Ticket(300), state, site.now_ns).prefill
    for tokens in [200, 400] * 20:
        request = site.arrive(tokens)
        site.feed(PrefillDone(request, tokens), after_ns=TOKEN_NS * tokens)
        site.local.observe(StepCompleted(), [], site.now_ns)
        site.local._act(Admit(request, RankId(0)), site.now_ns)
        site.now_ns += STEP_NS + 2 * TOKEN_NS * tokens
        site.local.observe(DecodeStarted(request), [], site.now_ns)
        site.feed(RequestCancelled(request))
    # 2 s more for the way over the prefiller.
    assert not site.local.placed(Ticket(300), state, site.now_ns).prefill


def test_a_slow_rank_is_measured() -> None:
    site = warm()
    state = replace(IDLE, bound=3)
    assert not site.local.placed(Ticket(300), state, site.now_ns).prefill
    for tokens in [200, 400] * 20:
        request = RequestId(site.sent)
        site.sent += 1
        site.feed(RequestArrived(request, Ticket(tokens, prefill=False)))
        site.local._act(Admit(request, RankId(0)), site.now_ns)
        site.now_ns += round(1.5 * STEP_NS) + 4 * TOKEN_NS * tokens
        site.local.observe(DecodeStarted(request), [], site.now_ns)
        site.feed(RequestCancelled(request))
    assert site.local.placed(Ticket(300), state, site.now_ns).prefill


def test_the_limit_holds_whatever_it_costs() -> None:
    assert not warm().local.placed(Ticket(1_000), IDLE, 10**9).prefill
    assert warm().local.placed(Ticket(1_001), IDLE, 10**9).prefill
    always = LocalPrefill(1_000, always=True)
    assert not always.placed(Ticket(1_000), replace(IDLE, bound=10**6), 0).prefill
    assert always.placed(Ticket(1_001), IDLE, 0).prefill


@pytest.mark.parametrize("ticket", [Ticket(10, prefill=False), Ticket(10, decode=False)])
def test_requests_of_one_engine_stay_as_they_are(ticket: Ticket) -> None:
    site = Site(always=True)
    assert placed(site.scheduler, ticket, 0) is ticket


def test_ranks_compute_short_prompts_while_no_prefiller_is_open() -> None:
    site = Site(prefillers=2)
    site.feed(PrefillerClosed(PrefillerId(0)))
    assert not site.place(10)
    site.feed(PrefillerClosed(PrefillerId(1)))
    assert site.place(10)
    assert not site.place(1_001)


def test_only_prefillers_that_can_serve_it_count() -> None:
    site = Site(prefillers=2)
    site.feed(PrefillerClosed(PrefillerId(0)))
    only = Eligible(frozenset({PrefillerId(0)}), frozenset({RankId(0)}))
    assert not placed(site.scheduler, Ticket(10, eligible=only), 0).prefill


def test_without_the_rule_tickets_stay_as_they_are() -> None:
    inputs = PolicyInputs(1, 1, PolicySettings(), random.Random(0), NoPrediction())
    config = SchedulerConfig(ranks=1, batch_limit=1)
    ticket = Ticket(10)
    assert placed(Scheduler(config, make_policy("fifo", inputs)), ticket, 0) is ticket


def test_nothing_is_kept_of_requests_that_ended() -> None:
    site = Site(prefillers=2)
    finished, cancelled, lost, direct = (site.arrive(50) for _ in range(4))
    site.feed(RequestFinished(finished), RequestCancelled(cancelled))
    site.feed(PrefillLost(lost), RequestCancelled(lost), PrefillLost(direct, decode=False))
    local = site.local
    assert (local._prompts, local._queued, local._admitted_ns) == ({}, {}, {})
    assert local._queued_tokens == 0
    assert not local._work._places

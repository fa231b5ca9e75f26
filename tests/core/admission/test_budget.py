"""The budget in a scheduler: who is granted a start, what is measured, and what a resize does."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.admission import POST_5, AimdSettings, Budget, Decision
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    FirstToken,
    PrefillDone,
    PrefillLost,
    RankClosed,
    RankId,
    RankOpened,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import Fcfs, fair_queueing
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig

S = 1_000_000_000


def fixed(cap: int) -> AimdSettings:
    return AimdSettings(cap_min=cap, cap_max=cap, cap_initial=cap)


class Fleet:
    """A scheduler with a budget, prefills at once, and a driver that performs what it asks for."""

    def __init__(
        self, settings: AimdSettings, *, ranks: int = 1, ttl_ns: int | None = None
    ) -> None:
        self.budget = Budget(settings)
        queueing = fair_queueing("request", Fcfs)
        inputs = PolicyInputs(ranks, 1000, PolicySettings(), random.Random(0), NoPrediction())
        self.scheduler = Scheduler(
            SchedulerConfig(ranks=ranks, batch_limit=1000, queue_ttl_ns=ttl_ns),
            make_policy("jsq", inputs),
            intake=Intake(fair=queueing, budget=self.budget),
        )
        self.now_ns = 0
        self.arrived = 0

    def feed(self, event: Event) -> list[Action]:
        actions = self.scheduler.handle(event, now_ns=self.now_ns)
        self.scheduler.check()
        return actions

    def perform(self, actions: list[Action]) -> list[Action]:
        """Prefill at once, decide, and join; return every action on the way."""
        done = list(actions)
        while actions:
            following: list[Action] = []
            for action in actions:
                if isinstance(action, StartPrefill):
                    following += self.feed(PrefillDone(action.request, action.prompt_tokens))
                elif isinstance(action, Admit):
                    following += self.feed(DecodeStarted(action.request))
            actions = following + self.feed(Tick())
            done += actions
        return done

    def arrive(self, *, prefill: bool = True, tenant: str = "a") -> RequestId:
        number = RequestId(self.arrived)
        self.arrived += 1
        actions = self.feed(RequestArrived(number, Ticket(10, prefill=prefill, tenant=tenant)))
        self.perform(actions + self.feed(Tick()))
        return number

    def end(self, number: RequestId, event: type[RequestFinished] = RequestFinished) -> None:
        self.perform(self.feed(event(number)) + self.feed(Tick()))

    def at(self, seconds: float) -> None:
        self.now_ns = round(seconds * S)
        self.perform(self.feed(Tick()))

    @property
    def in_flight(self) -> int:
        return sum(
            one.state is not LifecycleState.QUEUED for one in self.scheduler.requests.values()
        )


@pytest.mark.parametrize("prefill", [True, False])
def test_requests_start_while_the_budget_has_room(prefill: bool) -> None:
    fleet = Fleet(fixed(2), ranks=2)
    for _ in range(6):
        fleet.arrive(prefill=prefill)
    assert fleet.in_flight == 4
    assert fleet.scheduler.prefill_queue.waiting == 2
    fleet.end(RequestId(0))
    assert fleet.scheduler.requests[RequestId(4)].state is LifecycleState.DECODING


def test_a_closed_rank_takes_its_share_of_the_budget_with_it() -> None:
    fleet = Fleet(fixed(2), ranks=2)
    fleet.feed(RankClosed(RankId(1)))
    for _ in range(4):
        fleet.arrive()
    assert fleet.in_flight == 2
    fleet.feed(RankOpened(RankId(1)))
    fleet.perform(fleet.feed(Tick()))
    assert fleet.in_flight == 4


def test_a_shrunk_budget_cancels_nothing_and_absorbs_what_ends() -> None:
    fleet = Fleet(fixed(8))
    numbers = [fleet.arrive() for _ in range(12)]
    fleet.budget._controller.cap = 2
    for number in numbers[:6]:
        fleet.end(number)
    # 8 were in flight. Six ended, and nothing took their places.
    assert fleet.in_flight == 2
    # Growing afterwards grants what the limit says, and no more.
    fleet.budget._controller.cap = 4
    fleet.perform(fleet.feed(Tick()))
    assert fleet.in_flight == 4


def test_a_budget_that_shrinks_while_nothing_runs_holds_at_once() -> None:
    fleet = Fleet(fixed(8))
    fleet.budget._controller.cap = 2
    for _ in range(8):
        fleet.arrive()
    assert fleet.in_flight == 2


def test_what_waits_longer_than_the_acquire_timeout_expires_and_frees_its_place() -> None:
    fleet = Fleet(fixed(1), ttl_ns=S)
    fleet.arrive()
    waiting = fleet.arrive()
    fleet.now_ns = S
    assert Expire(waiting) in fleet.feed(Tick())
    assert fleet.scheduler.prefill_queue.waiting == 0
    assert fleet.in_flight == 1


def test_the_percentile_covers_the_window_and_errors_do_not_count() -> None:
    fleet = Fleet(POST_5)
    for second in range(4):
        fleet.now_ns = second * S
        for _ in range(3):
            # It waits for 3 s before its first token.
            number = RequestId(fleet.arrived)
            fleet.arrived += 1
            fleet.feed(RequestArrived(number, Ticket(10)))
            # An engine that refuses at once: no first token.
            fleet.feed(RequestFailed(number))
    fleet.at(5)
    assert fleet.budget.ttft_ns is None
    assert fleet.budget.decisions == {Decision.UNKNOWN: 1}


def test_slow_first_tokens_shrink_the_limit_and_it_recovers() -> None:
    fleet = Fleet(AimdSettings(cap_min=1, cap_max=64, cap_initial=8))
    numbers = []
    for _ in range(12):
        number = RequestId(fleet.arrived)
        fleet.arrived += 1
        numbers.append(number)
        fleet.feed(RequestArrived(number, Ticket(10)))
        fleet.feed(PrefillDone(number, 10)) if number < 8 else None
    fleet.now_ns = 3 * S
    # Eight start 3 s after their arrival; the others take their places.
    fleet.perform(fleet.feed(Tick()))
    for number in numbers:
        fleet.end(number)
    fleet.at(5)
    assert fleet.budget.ttft_ns == pytest.approx(3 * S)
    assert fleet.budget.cap == 6
    for tick in range(2, 40):
        fleet.at(5 * tick - 1)
        for number in [fleet.arrive() for _ in range(12)]:
            fleet.end(number)
        keeper = fleet.arrive()  # Demand.
        fleet.at(5 * tick)
        fleet.end(keeper)
    assert fleet.budget.cap > 20


def test_a_long_pause_costs_no_time_and_changes_nothing() -> None:
    budget = Budget(POST_5)
    budget.advance(0, demand=True)
    budget.advance(10**18, demand=True)
    assert budget.cap == 64
    assert sum(budget.decisions.values()) <= 2
    assert budget.next_tick_ns is not None
    assert 10**18 < budget.next_tick_ns <= 10**18 + 5 * S


def test_a_waiting_request_has_the_scheduler_woken_when_the_limit_may_grow() -> None:
    fleet = Fleet(fixed(1))
    fleet.arrive()
    assert fleet.scheduler.next_deadline_ns() is None
    fleet.arrive()
    assert fleet.scheduler.next_deadline_ns() == 5 * S


def test_the_guard_measures_steps() -> None:
    settings = AimdSettings(tpot_target_ns=S // 10)
    fleet = Fleet(settings)
    for number in range(20):
        fleet.end(fleet.arrive())
        fleet.now_ns = number
        fleet.feed(StepCompleted(S // 5))
    fleet.at(5)
    assert fleet.budget.tpot_ns == pytest.approx(S / 5)
    assert fleet.budget.decisions[Decision.DECREASE] == 1


class Granting(RuleBasedStateMachine):
    """Random arrivals, ends, resizes and ranks: who is granted, and when."""

    @initialize(cap=st.integers(1, 4), ranks=st.integers(1, 3))
    def build(self, cap: int, ranks: int) -> None:
        settings = AimdSettings(cap_min=1, cap_max=8, cap_initial=cap)
        self.fleet = Fleet(settings, ranks=ranks, ttl_ns=20 * S)
        self.open = [True] * ranks
        self.ended = 0

    @property
    def limit(self) -> int:
        return self.fleet.budget.cap * sum(self.open)

    def change(self, event: Event) -> None:
        """Feed an event. Whatever starts with it, the limit allows at that moment."""
        before = self.fleet.in_flight
        actions = self.fleet.feed(event)
        if any(isinstance(action, StartPrefill) for action in actions):
            assert self.fleet.in_flight <= self.limit
        for action in self.fleet.perform(actions + self.fleet.feed(Tick())):
            self.ended += isinstance(action, Expire)
        assert self.fleet.in_flight <= max(before, self.limit)

    @rule(prefill=st.booleans(), tenant=st.sampled_from("abc"))
    def arrive(self, prefill: bool, tenant: str) -> None:
        number = RequestId(self.fleet.arrived)
        self.fleet.arrived += 1
        self.change(RequestArrived(number, Ticket(10, prefill=prefill, tenant=tenant)))

    @precondition(lambda self: self.fleet.scheduler.requests)
    @rule(data=st.data(), finishes=st.booleans())
    def end(self, data: st.DataObject, finishes: bool) -> None:
        requests = self.fleet.scheduler.requests
        number = data.draw(st.sampled_from(sorted(requests)))
        decodes = requests[number].state is LifecycleState.DECODING
        self.ended += 1
        self.change((RequestFinished if finishes and decodes else RequestCancelled)(number))

    @rule(cap=st.integers(1, 8))
    def resize(self, cap: int) -> None:
        self.fleet.budget._controller.cap = cap
        self.change(Tick())

    @rule(data=st.data())
    def switch(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.open) - 1))
        self.open[rank] = not self.open[rank]
        event = RankOpened if self.open[rank] else RankClosed
        self.change(event(RankId(rank)))

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.fleet.now_ns += seconds * S
        self.change(Tick())

    @invariant()
    def no_budget_is_idle_while_anything_waits(self) -> None:
        if hasattr(self, "fleet") and self.fleet.scheduler.prefill_queue.waiting:
            assert self.fleet.in_flight >= self.limit

    @invariant()
    def every_request_ends_once(self) -> None:
        if hasattr(self, "fleet"):
            assert len(self.fleet.scheduler.requests) + self.ended == self.fleet.arrived


def test_grants_in_any_order_of_events() -> None:
    run_state_machine_as_test(Granting)


class Controlling(RuleBasedStateMachine):
    """Random first tokens, pauses and demand: how the limit moves."""

    @initialize(
        low=st.integers(1, 8),
        span=st.integers(0, 30),
        cooldown=st.integers(0, 4),
        post_4=st.booleans(),
    )
    def build(self, low: int, span: int, cooldown: int, post_4: bool) -> None:
        self.settings = AimdSettings(
            cap_min=low,
            cap_max=low + span,
            cap_initial=low + span // 2,
            cooldown_ticks=cooldown,
        )
        if post_4:
            self.settings = replace(self.settings, factor=1.0, step_down=4)
        self.budget = Budget(self.settings)
        self.now_ns = 0
        self.budget.advance(0, demand=False)
        self.last_decrease_ns: int | None = None

    @rule(ttft_s=st.sampled_from([0.1, 1.9, 2.0, 9.0]), count=st.integers(1, 12))
    def first_tokens(self, ttft_s: float, count: int) -> None:
        for _ in range(count):
            self.budget.first_token(round(ttft_s * S), self.now_ns)

    @rule(tenths=st.integers(1, 50), demand=st.booleans())
    def wait(self, tenths: int, demand: bool) -> None:
        budget, before = self.budget, self.budget.cap
        counts = budget.decisions.copy()
        self.now_ns += tenths * S // 10
        budget.advance(self.now_ns, demand=demand)
        taken = budget.decisions - counts
        assert taken.total() <= 1
        moved = budget.cap - before
        assert moved <= taken[Decision.INCREASE]
        assert moved >= 0 or taken[Decision.DECREASE]
        if not demand:
            assert moved <= 0
        if taken[Decision.DECREASE]:
            if self.last_decrease_ns is not None:
                ticks = (self.now_ns - self.last_decrease_ns) / self.settings.tick_ns
                # Both lie somewhere behind their ticks.
                assert ticks > self.settings.cooldown_ticks
            self.last_decrease_ns = self.now_ns

    @invariant()
    def it_is_within_its_bounds(self) -> None:
        if hasattr(self, "budget"):
            assert self.settings.cap_min <= self.budget.cap <= self.settings.cap_max


TestControlling = Controlling.TestCase


def test_a_lost_prefill_returns_its_place() -> None:
    fleet = Fleet(fixed(1))
    number = RequestId(0)
    fleet.feed(RequestArrived(number, Ticket(10)))
    assert fleet.in_flight == 1
    # It starts again at once: its place is its own.
    assert fleet.feed(PrefillLost(number))
    assert fleet.in_flight == 1


def test_a_first_token_counts_once_from_the_arrival_whoever_says_it() -> None:
    fleet = Fleet(POST_5)
    took_ns = []
    for number in map(RequestId, range(12)):
        arrived_ns = fleet.now_ns
        fleet.feed(RequestArrived(number, Ticket(10)))
        fleet.now_ns += S // 100 * (number + 1)
        if number % 2:  # The prefiller's, long before there is a rank.
            fleet.feed(FirstToken(number))
            took_ns.append(fleet.now_ns - arrived_ns)
            fleet.now_ns += S // 2
        fleet.feed(PrefillDone(number, 10))
        assert Admit(number, RankId(0)) in fleet.feed(Tick())
        if number % 4 == 0:  # The rank gives it back before it says anything.
            fleet.perform(fleet.feed(RequestRecomputed(number)))
        else:
            fleet.feed(DecodeStarted(number))
        if not number % 2:
            took_ns.append(fleet.now_ns - arrived_ns)
        fleet.perform(fleet.feed(RequestRecomputed(number)))
        fleet.feed(RequestFinished(number))
    fleet.at(11)
    assert fleet.budget.ttft_ns == pytest.approx(np.percentile(took_ns, 99))


def test_the_whole_of_a_request_that_a_prefiller_answers_counts_too() -> None:
    fleet = Fleet(POST_5)
    for number in map(RequestId, range(12)):
        fleet.feed(RequestArrived(number, Ticket(10, decode=False)))
        fleet.now_ns += S // 10
        fleet.feed(FirstToken(number))
        fleet.feed(FirstToken(number))
        fleet.feed(RequestFinished(number))
    fleet.at(5)
    assert fleet.budget.ttft_ns == S // 10

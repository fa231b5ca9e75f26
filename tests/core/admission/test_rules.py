"""The budget in a scheduler: who is granted a start, what is measured, and what a resize does."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
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
from balanceroute.proxy.core.admission import (
    ADMISSIONS,
    POST_4,
    POST_5,
    AimdOptions,
    AimdSettings,
    BoundedQueue,
    Decision,
    Ending,
    Load,
    Refusal,
)
from balanceroute.proxy.core.admission.overload import Aimd, Budget, EarlyRefusal, FirstTokens
from balanceroute.proxy.core.errors import ConfigError
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
from balanceroute.proxy.core.fair_queueing import fair_queueing
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import QUEUE_ORDERS, Fcfs
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


# First tokens after 1 s for 20 s, after 4 s for 10 s, and after 1 s again for 30 s; the target is 2 s.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # One more at 5, 10, 15 and 20 s, a decrease at 25 s, three ticks of cooldown.
        (AimdOptions(aimd="post5", aimd_min=1), [64, 67, 51, 51, 55]),
        (AimdOptions(aimd="post5", aimd_min=1, aimd_first=10), [10, 13, 10, 10, 14]),
        (AimdOptions(aimd="post5", aimd_min=1, aimd_tick_s=1.0), [64, 83, 47, 35, 39]),
        # The change at 20 s is seen at once.
        (AimdOptions(aimd="post5", aimd_min=1, aimd_window_s=2.0), [64, 67, 50, 50, 55]),
        # No increase: 1 s is within the band.
        (AimdOptions(aimd="post5", aimd_min=1, aimd_band=0.6), [64, 64, 48, 48, 48]),
        (AimdOptions(aimd="post5", aimd_min=1, aimd_cooldown=0), [64, 67, 51, 38, 33]),
        (AimdOptions(aimd="post5", aimd_min=1, aimd_factor=0.5), [64, 67, 34, 34, 38]),
        (AimdOptions(aimd="post5", aimd_min=1, aimd_step=10), [64, 67, 41, 41, 45]),
        # Decreases at 25, 45 and 65 s would be due; the window of 30 s holds 4 s until 60 s.
        (AimdOptions(aimd="post4"), [64, 67, 64, 64, 60]),
    ],
)
def test_each_number_of_the_controller_moves_the_limit(
    options: AimdOptions, expected: list[int]
) -> None:
    assert options.settings is not None
    budget, caps = Budget(options.settings), list[int]()
    for tenth in range(601):
        now_ns = tenth * S // 10
        budget.first_token(4 * S if 200 <= tenth < 300 else S, now_ns)
        budget.advance(now_ns, demand=True)
        caps.append(budget.cap)
    assert [caps[tenth] for tenth in (0, 199, 250, 300, 600)] == expected


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


# The controller: its order of decisions, its bounds, and the values of both versions.


SECOND = 1e9
ABOVE, BELOW, INSIDE = 2.5 * SECOND, 1.0 * SECOND, 2.0 * SECOND


def test_jitter_around_the_target_changes_nothing() -> None:
    controller = Aimd(POST_5)
    for ttft_s in (1.9, 2.1, 1.95, 1.6, 2.4):
        assert controller.decide(ttft_s * SECOND, demand=True) is Decision.HOLD
    assert controller.cap == 64


def test_a_high_percentile_multiplies_and_a_low_one_adds() -> None:
    controller = Aimd(replace(POST_5, cooldown_ticks=0))
    assert controller.decide(ABOVE, demand=True) is Decision.DECREASE
    assert controller.cap == 48
    assert controller.decide(BELOW, demand=True) is Decision.INCREASE
    assert controller.cap == 49


def test_the_first_version_subtracts() -> None:
    controller = Aimd(POST_4)
    controller.decide(ABOVE, demand=True)
    assert controller.cap == 60


def test_without_demand_the_limit_does_not_grow_but_shrinks() -> None:
    controller = Aimd(POST_5)
    assert controller.decide(BELOW, demand=False) is Decision.HOLD
    assert controller.decide(ABOVE, demand=False) is Decision.DECREASE


def test_after_a_decrease_measurements_are_stale_for_three_ticks() -> None:
    controller = Aimd(POST_5)
    controller.decide(ABOVE, demand=True)
    # What is not known does not use the cooldown up.
    assert controller.decide(None, demand=True) is Decision.UNKNOWN
    assert [controller.decide(ABOVE, demand=True) for _ in range(4)] == [
        Decision.COOLDOWN,
        Decision.COOLDOWN,
        Decision.COOLDOWN,
        Decision.DECREASE,
    ]


def test_a_decrease_at_the_floor_counts_and_cools_down() -> None:
    controller = Aimd(replace(POST_5, cap_initial=32))
    assert controller.decide(ABOVE, demand=True) is Decision.DECREASE
    assert controller.cap == 32
    assert controller.decide(BELOW, demand=True) is Decision.COOLDOWN


def test_slow_steps_shrink_the_limit_and_keep_it_from_growing() -> None:
    guarded = replace(POST_5, tpot_target_ns=100_000_000)
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=130e6) is Decision.DECREASE
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=100e6) is Decision.HOLD
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=50e6) is Decision.INCREASE
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=None) is Decision.INCREASE
    assert Aimd(POST_5).decide(BELOW, demand=True, tpot_ns=130e6) is Decision.INCREASE


SIGNALS = st.lists(
    st.tuples(st.none() | st.sampled_from([ABOVE, BELOW, INSIDE]), st.booleans()), max_size=60
)


@given(
    signals=SIGNALS,
    cooldown=st.integers(0, 4),
    factor=st.floats(0.0, 1.0),
    step_down=st.integers(0, 9),
    low=st.integers(1, 9),
    span=st.integers(0, 20),
)
def test_the_limit_stays_in_its_bounds_and_decreases_are_apart(
    signals: list[tuple[float | None, bool]],
    cooldown: int,
    factor: float,
    step_down: int,
    low: int,
    span: int,
) -> None:
    settings = AimdSettings(
        cap_min=low,
        cap_max=low + span,
        cap_initial=low + span // 2,
        cooldown_ticks=cooldown,
        factor=factor,
        step_down=step_down,
    )
    controller, decreases = Aimd(settings), list[int]()
    for tick, (ttft_ns, demand) in enumerate(signals):
        before = controller.cap
        decision = controller.decide(ttft_ns, demand=demand)
        assert low <= controller.cap <= low + span
        assert controller.cap <= before + (decision is Decision.INCREASE)
        if controller.cap < before:
            assert decision is Decision.DECREASE
        if decision is Decision.DECREASE:
            decreases.append(tick)
    assert all(later - tick > cooldown for tick, later in pairwise(decreases))


def test_a_limit_of_another_controller_begins_within_the_bounds() -> None:
    assert [POST_5.beginning_at(cap).cap_initial for cap in (1, 40, 999)] == [32, 40, 256]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_ns", 0),
        ("tick_ns", 0),
        ("band", -0.1),
        ("cap_min", 0),
        ("cap_max", 31),
        ("cap_initial", 257),
        ("factor", 1.1),
        ("factor", float("nan")),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        replace(POST_5, **{name: value})  # type: ignore[arg-type]


# The bounded queue lets everyone in until too many wait, and says when to come again.


TICKET = Ticket(10)


@pytest.mark.parametrize(("waiting", "welcome"), [(0, True), (9, True), (10, False), (11, False)])
def test_requests_are_rejected_once_the_limit_waits(waiting: int, welcome: bool) -> None:
    admission = ADMISSIONS["bounded"](10)
    admission.ended(TICKET, Ending(served=True, first_token_ns=5, output_tokens=1), now_ns=9)
    assert (admission.offer(TICKET, Load(waiting), now_ns=0) is None) == welcome


def test_a_refusal_says_why_and_when_to_come_again() -> None:
    refusal = BoundedQueue(2, retry_after_s=7).offer(TICKET, Load(3), now_ns=0)
    assert refusal == Refusal(429, "3 requests wait already", retry_after_s=7)


def test_a_limit_below_one_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="limit is 0"):
        BoundedQueue(0)
    with pytest.raises(ConfigError, match="retry_after_s is 0"):
        BoundedQueue(1, retry_after_s=0)


# Early refusal: what is expected of a first token, and who is refused for it.


def measured(*, starts_per_s: float = 2.0, seconds: int = 40) -> FirstTokens:
    """Return what has seen starts at a rate, prefills of 1 ms per token, and 0.5 s after that."""
    first_tokens = FirstTokens()
    for number in range(round(seconds * starts_per_s)):
        first_tokens.advance(round(number * S / starts_per_s), waiting=True)
        first_tokens.started()
    first_tokens.came(100, 100_000_000, S // 2, early=False)
    return first_tokens


def test_the_parts_of_a_first_token_add_up() -> None:
    expected_ns = measured().expected_ns(1_000, ahead=9, early=False)
    # It is the tenth to start at two a second; then a prefill of 1 s, and the rest.
    assert expected_ns == pytest.approx(5 * S + S + S / 2, rel=0.02)
    assert measured().expected_ns(1_000, ahead=0, early=False) == pytest.approx(S + S / 2)


def test_room_that_admissions_make_is_used_in_the_same_tick_where_no_prefiller_is_needed() -> None:
    inputs = PolicyInputs(5, 1, PolicySettings(), random.Random(0), NoPrediction())
    scheduler = Scheduler(
        SchedulerConfig(ranks=5, batch_limit=1, pool_limit=2),
        make_policy("fifo", inputs),
        intake=Intake(first_tokens=FirstTokens()),
    )
    for number in range(6):
        scheduler.handle(RequestArrived(RequestId(number), Ticket(9, prefill=False)), now_ns=0)
    admitted = [one for one in scheduler.handle(Tick(), now_ns=0) if isinstance(one, Admit)]
    assert [one.request for one in admitted] == [0, 1, 2, 3, 4]
    assert len(scheduler.pool.entries) == 1
    scheduler.check()


def test_nothing_is_expected_before_it_was_measured() -> None:
    assert FirstTokens().expected_ns(10, ahead=0, early=False) is None
    first_tokens = FirstTokens()
    first_tokens.came(100, 100_000_000, S, early=False)
    assert first_tokens.expected_ns(100, ahead=0, early=False) is not None
    assert first_tokens.expected_ns(100, ahead=1, early=False) is None


def test_time_without_a_queue_says_nothing_about_the_rate() -> None:
    first_tokens = measured()
    before_ns = first_tokens.expected_ns(10, ahead=9, early=False)
    first_tokens.advance(10_000 * S, waiting=False)
    assert first_tokens.expected_ns(10, ahead=9, early=False) == before_ns


def test_a_queue_that_does_not_move_takes_longer_and_longer() -> None:
    first_tokens = measured()
    before_ns = first_tokens.expected_ns(10, ahead=1, early=False)
    first_tokens.advance(70 * S, waiting=True)
    after_ns = first_tokens.expected_ns(10, ahead=1, early=False)
    assert before_ns is not None
    assert after_ns is not None
    assert after_ns > 5 * before_ns


def offer(
    deadline_s: float | None, expected_s: float | None, *, idle: bool = False
) -> Refusal | None:
    deadline_ns = None if deadline_s is None else round((100 + deadline_s) * S)
    expected_ns = None if expected_s is None else expected_s * S
    rule = EarlyRefusal(BoundedQueue(10))
    return rule.offer(Ticket(1, deadline_ns=deadline_ns), Load(5, expected_ns, idle), 100 * S)


def test_the_hopeless_are_refused_and_told_when_to_come_again() -> None:
    refusal = offer(2.0, 6.5)
    assert refusal is not None
    assert (refusal.status, refusal.retry_after_s, refusal.cause) == (503, 5, "deadline")
    assert refusal.reason == "the first token is expected in 6.5 s, and due in 2.0 s"


@pytest.mark.parametrize(
    ("deadline_s", "expected_s", "idle"),
    [(7.0, 6.5, False), (None, 6.5, False), (2.0, None, False), (2.0, 6.5, True)],
)
def test_all_others_are_accepted(
    deadline_s: float | None, expected_s: float | None, idle: bool
) -> None:
    assert offer(deadline_s, expected_s, idle=idle) is None


def test_the_rule_within_is_asked_first_and_told_of_ends() -> None:
    told: list[str] = []

    class Within(BoundedQueue):
        def began(self, ticket: Ticket, now_ns: int) -> None:
            told.append("began")

        def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
            told.append("ended")

    rule = EarlyRefusal(Within(1))
    refusal = rule.offer(Ticket(1, deadline_ns=0), Load(5, 9.0 * S), 0)
    assert refusal is not None
    assert refusal.status == 429
    rule.began(Ticket(1), 0)
    rule.ended(Ticket(1), Ending(True, None, 1), 0)
    assert told == ["began", "ended"]


TICKETS = st.lists(
    st.builds(
        Ticket,
        st.integers(1, 100),
        level=st.integers(-2, 2),
        deadline_ns=st.none() | st.integers(0, 100),
        predicted_tokens=st.integers(1, 100),
    ),
    min_size=1,
    max_size=20,
)


@given(tickets=TICKETS, order=st.sampled_from(sorted(QUEUE_ORDERS)))
def test_as_many_go_ahead_as_the_order_says(tickets: list[Ticket], order: str) -> None:
    queue = QUEUE_ORDERS[order]()
    for number, ticket in enumerate(tickets[:-1]):
        queue.add(RequestId(number), ticket)
    expected = queue.ahead(tickets[-1])
    newest = RequestId(len(tickets))
    queue.add(newest, tickets[-1])
    assert expected == len(queue.ahead_of(newest))


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
COSTS = {"a": 10, "b": 40, "c": 10}


@pytest.mark.parametrize("cost", ["request", "prompt-tokens"])
@pytest.mark.parametrize("tenant", ["a", "b", "c", "new"])
def test_as_many_go_ahead_as_start_before_it(cost: str, tenant: str) -> None:
    """Three tenants always wait, and start as their weights and costs let them."""
    queue = fair_queueing(cost, QUEUE_ORDERS["fcfs"]).make_order()
    numbers = map(RequestId, range(10_000))

    def come(name: str) -> RequestId:
        request = next(numbers)
        prompt_tokens, weight = COSTS.get(name, 20), WEIGHTS.get(name, 1.0)
        queue.add(request, Ticket(prompt_tokens, tenant=name, weight=weight))
        owners[request] = name
        return request

    def start() -> RequestId:
        request = queue.head()
        assert request is not None
        queue.serve(request)
        # Whoever starts sends another one.
        come(owners.pop(request))
        return request

    owners: dict[RequestId, str] = {}
    for name in [*"abc"] * 10:
        come(name)
    for _ in range(300):
        start()
    expected = queue.ahead(Ticket(20, tenant=tenant, weight=WEIGHTS.get(tenant, 1.0)))
    newest = come(tenant)
    real = next(started for started in range(1_000) if start() == newest)
    assert expected == pytest.approx(real, rel=0.25, abs=3)


def test_one_tenant_alone_is_first_come_first_served() -> None:
    queue = fair_queueing("request", QUEUE_ORDERS["fcfs"]).make_order()
    ticket = Ticket(1, tenant="a", weight=3.0)
    for number in range(20):
        queue.add(RequestId(number), ticket)
    for number in range(20):
        assert queue.ahead(ticket) == 20 - number
        queue.serve(RequestId(number))
    assert queue.ahead(ticket) == 0


def test_before_anything_started_only_a_tenants_own_go_ahead() -> None:
    queue = fair_queueing("request", QUEUE_ORDERS["fcfs"]).make_order()
    for number in range(30):
        queue.add(RequestId(number), Ticket(1, tenant="ab"[number % 2]))
    assert queue.ahead(Ticket(1, tenant="a")) == 15

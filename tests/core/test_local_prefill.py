"""Who computes a prompt: the worked sums of delays, and what they are measured from."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs
from tests.extended import usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import (
    Admit,
    DecodeLost,
    DecodeStarted,
    Eligible,
    Event,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
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
from balanceroute.proxy.core.local_prefill import LocalPrefill, RankPrompts
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.ranks import FleetState
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig, placed

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


# Random legal events while ranks compute prompts: what is kept of a request goes with it.
#
# And a turn goes to no other rank than the one that has its beginning, unless that one is closed, has lost
# it, or gave it back.


RANKS, BLOCK = 3, 10
INDEX = st.integers(0, 1_000)
ENDS = (RequestFinished, RequestFailed, RequestCancelled)


class LocalPrefillMachine(RuleBasedStateMachine):
    """Two prefillers and three ranks of two slots."""

    policy = "br-0"

    @initialize(limit=st.sampled_from([20, 60, 10_000]), always=st.booleans())
    def build(self, limit: int, always: bool) -> None:
        config = SchedulerConfig(ranks=RANKS, batch_limit=2, prefillers=2, probe_limit=2)
        inputs = PolicyInputs(RANKS, 2, PolicySettings(), random.Random(0), NoPrediction())
        self.local = LocalPrefill(limit, always=always)
        self.scheduler = Scheduler(
            config, make_policy(self.policy, inputs), intake=Intake(local_prefill=self.local)
        )
        self.now_ns = 0
        self.arrived = 0
        self.homes: dict[RequestId, RankId] = {}  # Where pooled requests have to go.

    def feed(self, event: Event) -> None:
        for one in (event, Tick()):
            for action in self.scheduler.handle(one, now_ns=self.now_ns):
                match action:
                    case Admit(request, rank):
                        assert self.homes.pop(request, rank) == rank
                    case StartPrefill(request):
                        assert request not in self.homes
                    case _:
                        pass

    def requests(self, *states: LifecycleState, started: bool | None = None) -> list[RequestId]:
        return [
            number
            for number, request in self.scheduler.requests.items()
            if request.state in states and started in {None, request.started}
        ]

    @rule(ns=st.integers(0, 50_000))
    def wait(self, ns: int) -> None:
        self.now_ns += ns

    @rule(
        conversation=st.integers(0, 3),
        length=st.integers(1, 9),
        session=st.integers(0, 2),
        decode=st.sampled_from([True, True, True, False]),
    )
    def arrive(self, conversation: int, length: int, session: int, decode: bool) -> None:
        request = RequestId(self.arrived)
        self.arrived += 1
        blocks = tuple(100 * conversation + place for place in range(length))
        ticket = Ticket(
            BLOCK * length + 1, blocks=blocks, block_tokens=BLOCK, session=session, decode=decode
        )
        ticket = placed(self.scheduler, ticket, self.now_ns)
        if ticket.home is not None:
            assert not ticket.prefill
            assert 0 < ticket.home_tokens < ticket.prompt_tokens
            self.homes[request] = ticket.home
        self.feed(RequestArrived(request, ticket))

    @precondition(lambda self: self.requests(LifecycleState.PREFILLING))
    @rule(index=INDEX, lost=st.booleans(), cached=st.none() | st.integers(0, 10))
    def end_prefill(self, index: int, lost: bool, cached: int | None) -> None:
        prefilling = self.requests(LifecycleState.PREFILLING)
        request = prefilling[index % len(prefilling)]
        held = self.scheduler.requests[request]
        if lost:
            self.feed(PrefillLost(request))
        elif held.decode:
            self.feed(PrefillDone(request, held.prompt_tokens, cached_tokens=cached))
        else:
            self.feed(RequestFinished(request))

    @precondition(lambda self: self.requests(LifecycleState.DECODING, started=False))
    @rule(index=INDEX, lost=st.booleans())
    def begin(self, index: int, lost: bool) -> None:
        waiting = self.requests(LifecycleState.DECODING, started=False)
        request = waiting[index % len(waiting)]
        self.feed(DecodeLost(request) if lost else DecodeStarted(request))

    @precondition(lambda self: self.requests(LifecycleState.DECODING, started=True))
    @rule(index=INDEX, elsewhere=st.booleans())
    def give_back(self, index: int, elsewhere: bool) -> None:
        decoding = self.requests(LifecycleState.DECODING, started=True)
        self.feed(RequestRecomputed(decoding[index % len(decoding)], elsewhere))

    @precondition(lambda self: self.scheduler.requests)
    @rule(index=INDEX, how=st.sampled_from(ENDS))
    def end(
        self, index: int, how: type[RequestFinished | RequestFailed | RequestCancelled]
    ) -> None:
        requests = list(self.scheduler.requests)
        request = requests[index % len(requests)]
        if (
            how is RequestFinished
            and self.scheduler.requests[request].state is not LifecycleState.DECODING
        ):
            how = RequestCancelled
        self.homes.pop(request, None)
        self.feed(how(request))

    @rule(ns=st.none() | st.integers(1_000, 40_000))
    def step(self, ns: int | None) -> None:
        self.now_ns += ns or 0
        self.feed(StepCompleted(ns))

    @rule(rank=st.integers(0, RANKS - 1), opens=st.booleans())
    def switch_rank(self, rank: int, opens: bool) -> None:
        if not opens:
            self.homes = {one: home for one, home in self.homes.items() if home != rank}
        self.feed(RankOpened(RankId(rank)) if opens else RankClosed(RankId(rank)))

    @rule(prefiller=st.integers(0, 1), opens=st.booleans())
    def switch_prefiller(self, prefiller: int, opens: bool) -> None:
        one = PrefillerId(prefiller)
        self.feed(PrefillerOpened(one) if opens else PrefillerClosed(one))

    @invariant()
    def nothing_leaked(self) -> None:
        local, live = self.local, self.scheduler.requests
        self.scheduler.check()
        computing = local._computing
        admitted = set(self.requests(LifecycleState.DECODING, started=False))
        assert local._prompts.keys() <= live.keys()
        assert local._queued.keys() <= set(self.requests(LifecycleState.QUEUED))
        assert local._queued_tokens == sum(local._queued.values())
        assert local._waits_for.keys() <= set(self.requests(LifecycleState.POOLED))
        assert local._admitted_ns.keys() <= admitted
        assert {*computing._waiting, *computing._begun} <= admitted
        assert not computing._waiting.keys() & computing._begun.keys()

    def teardown(self) -> None:
        for request in list(self.scheduler.requests):
            self.homes.pop(request, None)
            self.feed(RequestCancelled(request))
            self.nothing_leaked()


@pytest.mark.parametrize("name", ["br-0", "jsq"])
def test_every_order_of_events_keeps_what_is_known_of_prompts(name: str) -> None:
    class Machine(LocalPrefillMachine):
        policy = name

    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))


@pytest.mark.parametrize("seed", usually({0, 1}, range(6)))
@pytest.mark.parametrize("name", ["br-0", "br-h", "round-robin"])
def test_a_long_random_walk_keeps_it_too(name: str, seed: int) -> None:
    # Turns return only after others were decoded: so deep Hypothesis rarely goes.
    rng = random.Random(f"{name} {seed}")
    machine = LocalPrefillMachine()
    machine.policy = name
    machine.build(rng.choice([20, 60, 10_000]), rng.random() < 0.5)
    for _ in range(400):
        index, coin = rng.randrange(1_000), rng.random() < 0.2
        match rng.randrange(9):
            case 0 | 1:
                lengths = rng.randrange(4), rng.randint(1, 9), rng.randrange(3)
                machine.arrive(*lengths, rng.random() < 0.9)
            case 2 if machine.requests(LifecycleState.PREFILLING):
                machine.end_prefill(index, coin, index % 10)
            case 3 if machine.requests(LifecycleState.DECODING, started=False):
                machine.begin(index, coin)
            case 4 if machine.requests(LifecycleState.DECODING, started=True) and coin:
                machine.give_back(index, index % 2 == 0)
            case 5 if machine.scheduler.requests:
                machine.end(index, rng.choice(ENDS))
            case 6:
                machine.step(rng.choice([None, 10_000, 20_000]))
            case 7 if coin:
                machine.switch_rank(index % RANKS, rng.random() < 0.7)
            case _:
                machine.wait(rng.randrange(20_000))
        machine.nothing_leaked()
    machine.teardown()


# What a prompt on one rank costs the others, and what its time tells.


RANK0, RANK1, RANK2 = RankId(0), RankId(1), RankId(2)
A, B, C = RequestId(0), RequestId(1), RequestId(2)


def test_ranks_that_compute_in_one_step_wait_for_the_longest() -> None:
    prompts = RankPrompts()
    assert prompts.longer_ns(50.0, RANK0) == prompts.longer_ns(50.0) == 50.0
    prompts.add(A, RANK0, 30.0, 5)
    assert prompts.longer_ns(50.0, RANK0) == 50.0
    assert prompts.longer_ns(50.0, RANK1) == prompts.longer_ns(50.0) == 20.0
    assert prompts.longer_ns(20.0, RANK1) == 0.0
    prompts.add(B, RANK1, 10.0, 6)
    assert prompts.longer_ns(25.0, RANK1) == 5.0
    prompts.step(7)  # They are computed now, and the next one in the step behind.
    assert prompts.longer_ns(50.0, RANK1) == 50.0


def test_the_time_of_a_prompt_is_known_of_the_longest_alone() -> None:
    prompts = RankPrompts()
    prompts.add(A, RANK0, 30.0, 5)
    prompts.add(B, RANK1, 10.0, 6)
    prompts.step(7)
    prompts.add(C, RANK1, 99.0, 8)  # For the next step.
    a, b = prompts.end(A, 47), prompts.end(B, 47)
    assert a is not None
    assert b is not None
    assert (a.begun_ns, a.longest_ns, a.decides) == (7, 30.0, True)
    assert (b.begun_ns, b.longest_ns, b.decides) == (7, 30.0, False)
    prompts.step(47)
    c = prompts.end(C, 150)
    assert c is not None
    assert (c.begun_ns, c.longest_ns, c.decides) == (47, 99.0, True)
    assert prompts.end(C, 151) is None


def test_one_rank_computes_its_prompts_one_after_the_other() -> None:
    prompts = RankPrompts()
    prompts.add(A, RANK0, 30.0, 5)
    prompts.step(7)
    prompts.add(B, RANK0, 20.0, 7)  # At the end of a step, in time for the next one.
    prompts.add(C, RANK2, 40.0, 7)
    ended = [prompts.end(one, 60) for one in (A, B, C)]
    assert [one and (one.begun_ns, one.longest_ns, one.decides) for one in ended] == [
        (7, 50.0, False),
        (7, 50.0, False),
        (7, 50.0, False),
    ]


def test_where_no_step_runs_a_prompt_begins_at_once() -> None:
    prompts = RankPrompts()
    prompts.add(A, RANK0, 30.0, 5)
    ended = prompts.end(A, 40)
    assert ended is not None
    assert (ended.begun_ns, ended.decides) == (5, True)

"""`kv-token-seconds`: deposits, what is measured, and that tenants pay what they held."""

import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.core.steady_tenants import Draw, TenantLoad, between, shares
from tests.extended import usually

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.fair_queueing import KvMeter, fair_queueing
from balanceroute.proxy.core.queueing import Fcfs

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
ROUNDING = 1e-6


def ticket(tenant: str = "a", prompt_tokens: int = 100, slots: int = 1) -> Ticket:
    return Ticket(prompt_tokens, tenant=tenant, weight=WEIGHTS[tenant], slots=slots)


def steps(meter: KvMeter, count: int, seconds: float = 0.1) -> None:
    for _ in range(count):
        meter.step(round(seconds * 1e9))


def paid(meter: KvMeter, tenant: str) -> float:
    """Return what a tenant has paid and owes, its deposits aside, by weight 1."""
    meter._pay(ticket(tenant))
    deposits = sum(
        cost / one.weight for one, cost in meter.shares._deposits.values() if one.tenant == tenant
    )
    return (meter.shares.counter(tenant) - deposits) * WEIGHTS[tenant]


@pytest.mark.parametrize("slots", [1, 4])
def test_a_deposit_is_what_a_request_holds_in_two_mean_stays(slots: int) -> None:
    meter, one = KvMeter(), ticket(slots=slots)
    for number in range(1_000):
        meter.begin(RequestId(number), one, 100)
        steps(meter, 20)
        meter.end(RequestId(number), one, 100 + 20 * slots)
    assert meter.deposit(one) == pytest.approx(2 * (100 + 10 * slots) * 2.0, rel=0.01)


def test_before_the_first_end_the_first_request_tells_how_long_they_stay() -> None:
    meter = KvMeter()
    assert meter.deposit(ticket()) > 0
    meter.begin(RequestId(0), ticket(), 100)
    steps(meter, 300)
    assert meter.deposit(ticket()) == pytest.approx(2 * 100 * 30.0)


def test_deposits_of_requests_in_flight_follow_the_mean_stay() -> None:
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queue, meter = queueing.make_order(), queueing.meter
    assert meter is not None
    for number in range(200):
        queue.add(RequestId(number), ticket("ab"[number % 2]))
    for seconds in (0.1, 1.0, 0.01):
        for number in range(60):
            request = queue.head()
            assert request is not None
            one = ticket("ab"[request % 2])
            queue.serve(request)
            meter.begin(request, one, 100)
            steps(meter, 20, seconds)
            # The first of each part stays.
            if number:
                meter.end(request, one, 120)
    fresh = meter.deposit(ticket())
    kept = [cost for _, cost in meter.shares._deposits.values()]
    assert len(kept) == 3
    assert kept == pytest.approx([fresh] * 3, rel=0.3)


def test_a_step_that_was_not_measured_took_as_long_as_the_others() -> None:
    meter, other = KvMeter(), KvMeter()
    steps(meter, 4)
    steps(other, 2)
    other.step(None)
    other.step(None)
    assert meter._elapsed_s == pytest.approx(other._elapsed_s)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("per_step", [0, 1, 2])
def test_a_tenant_pays_what_it_held_however_it_grew(slots: int, per_step: int) -> None:
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queue, meter = queueing.make_order(), queueing.meter
    assert meter is not None
    one, grown = ticket(slots=slots), 30 * slots * per_step
    for number in range(20):
        queue.add(RequestId(number), one)
    for number in range(20):
        queue.serve(RequestId(number))
        meter.begin(RequestId(number), one, 100)
        steps(meter, 30)
        meter.end(RequestId(number), one, 100 + grown)
    assert paid(meter, "a") == pytest.approx(20 * (100 + grown / 2) * 30 * 0.1)


def test_a_tenant_pays_as_time_passes() -> None:
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queue, meter = queueing.make_order(), queueing.meter
    assert meter is not None
    queue.add(RequestId(0), ticket())
    queue.serve(RequestId(0))
    meter.begin(RequestId(0), ticket(), 100)
    steps(meter, 10)
    assert paid(meter, "a") == pytest.approx((100 + 10 / 2) * 10 * 0.1)
    steps(meter, 10)
    assert paid(meter, "a") == pytest.approx((100 + 20 / 2) * 20 * 0.1)


def test_what_never_reached_a_rank_gets_its_deposit_back() -> None:
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queue, meter = queueing.make_order(), queueing.meter
    assert meter is not None
    for number in range(2):
        queue.add(RequestId(number), ticket())
    queue.serve(RequestId(0))
    once = meter.shares.counter("a")
    meter.end(RequestId(0), ticket(), 0)
    queue.serve(RequestId(1))
    assert meter.shares.counter("a") == once


def test_a_direct_request_costs_a_part_of_its_deposit() -> None:
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queue, meter = queueing.make_order(), queueing.meter
    assert meter is not None
    for number in range(2):
        queue.add(RequestId(number), ticket())
        queue.serve(RequestId(number))
        meter.end_direct(RequestId(number))
    assert meter.shares.counter("a") == pytest.approx(2 * meter.deposit(ticket()) / 16)
    assert not meter.unsettled


def test_a_tenant_whose_requests_end_goes_next() -> None:
    """Its counter falls while it waits, in every queue that it waits in."""
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queues, meter = (queueing.make_order(), queueing.make_order()), queueing.meter
    assert meter is not None
    for number in range(6):
        for part, queue in enumerate(queues):
            queue.add(RequestId(2 * number + part), ticket("ab"[number % 2]))
    # Two of `a` start, and two of `b`, which pays half of their prices.
    for request in (0, 2, 6, 4):
        assert queues[0].head() == request
        queues[0].serve(RequestId(request))
        assert queues[1].head() is not None
    assert [queue.head() for queue in queues] == [10, 3]
    for request in (0, 4):
        meter.end(RequestId(request), ticket("a"), 0)
    assert [queue.head() for queue in queues] == [8, 1]


class Settling(RuleBasedStateMachine):
    """Tenants queue, start, decode and end."""

    def __init__(self) -> None:
        super().__init__()
        queueing = fair_queueing("kv-token-seconds", Fcfs)
        assert queueing.meter is not None
        self.queue, self.meter = queueing.make_order(), queueing.meter
        self.shares = self.meter.shares
        self.tickets: dict[RequestId, Ticket] = {}
        self.waiting: dict[str, int] = dict.fromkeys(WEIGHTS, 0)
        # Requests in decode: KV tokens now.
        self.running: dict[RequestId, int] = {}
        self.held: dict[str, float] = dict.fromkeys(WEIGHTS, 0.0)
        # What the counters left out or added while tenants had nothing to wait for, by weight.
        self.lifted: dict[str, float] = dict.fromkeys(WEIGHTS, 0.0)
        self.number = 0

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        tokens=st.integers(1, 50),
        count=st.integers(1, 3),
    )
    def arrive(self, tenant: str, tokens: int, count: int) -> None:
        for _ in range(count):
            request = RequestId(self.number)
            self.number += 1
            self.tickets[request] = ticket(tenant, tokens)
            before = self.shares._counters.get(tenant, 0.0)
            self.queue.add(request, self.tickets[request])
            assert self.shares.counter(tenant) == before or not self.waiting[tenant]
            self.lifted[tenant] += self.shares.counter(tenant) - before
            self.waiting[tenant] += 1

    @precondition(lambda self: len(self.queue) > 0)
    @rule(joins=st.booleans())
    def start(self, joins: bool) -> None:
        request = self.queue.head()
        assert request is not None, "something waits, but nothing goes next"
        one = self.tickets[request]
        counters = [self.shares.counter(name) for name, count in self.waiting.items() if count]
        assert self.shares.counter(one.tenant) == min(counters)
        self.queue.serve(request)
        self.waiting[one.tenant] -= 1
        if joins:
            self.meter.begin(request, one, one.prompt_tokens)
            self.running[request] = one.prompt_tokens
        else:
            self.meter.end(request, one, 0)

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        steps(self.meter, count)
        for request, tokens in self.running.items():
            held = (tokens + count / 2) * count * 0.1
            self.held[self.tickets[request].tenant] += held
            self.running[request] += count

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        tokens = self.running.pop(request)
        one = self.tickets[request]
        self.meter.end(request, one, tokens)

    @invariant()
    def every_tenant_pays_what_its_requests_hold(self) -> None:
        for tenant, weight in WEIGHTS.items():
            if tenant in self.shares._counters:
                lifted = self.lifted[tenant] * weight
                expected = self.held[tenant] + lifted
                assert paid(self.meter, tenant) == pytest.approx(
                    expected, abs=ROUNDING * (1 + lifted)
                )

    @invariant()
    def nothing_is_kept_of_what_ended(self) -> None:
        assert self.shares.unsettled == set(self.running) == set(self.meter._began)
        assert self.meter.unsettled == len(self.running)


TestSettling = Settling.TestCase


def bimodal(rng: random.Random) -> int:
    return rng.randint(5, 15) if rng.random() < 0.8 else rng.randint(150, 250)


PROMPTS, ANSWERS, FIXED = between(200, 1000), between(20, 60), between(40, 40)
LONG, SHORT = between(600, 1000), between(100, 300)
# Of each tenant: weight, prompts, answers, and how many requests.
MIXES: dict[str, list[tuple[float, Draw, Draw, int]]] = {
    "alike": [(2.0, PROMPTS, ANSWERS, 900), (1.0, PROMPTS, ANSWERS, 600)],
    "one length": [(2.0, PROMPTS, FIXED, 900), (1.0, PROMPTS, FIXED, 600)],
    "bimodal": [(2.0, PROMPTS, bimodal, 900), (1.0, PROMPTS, bimodal, 600)],
    "10 to 1": [(10.0, PROMPTS, ANSWERS, 1200), (1.0, PROMPTS, ANSWERS, 300)],
    "three": [
        (5.0, PROMPTS, ANSWERS, 900),
        (3.0, PROMPTS, ANSWERS, 600),
        (1.0, PROMPTS, ANSWERS, 300),
    ],
    "prompts": [(2.0, LONG, ANSWERS, 900), (1.0, SHORT, ANSWERS, 1500)],
}


@pytest.mark.parametrize("pool", usually({24}, [8, 24]))
@pytest.mark.parametrize("mix", usually({"bimodal", "three"}, MIXES))
def test_shares_are_steady_in_windows_of_a_second(mix: str, pool: int) -> None:
    """The first tenant's share of what all hold, in percent, against that of its weight."""
    loads = [TenantLoad(name, *of) for name, of in zip("abc", MIXES[mix], strict=False)]
    due = 100 * loads[0].weight / sum(load.weight for load in loads)
    second, ten = shares(pool, loads, 1, 10)
    assert len(second) > 20
    assert second.std() <= 7.0
    assert np.abs(second - due).max() <= 24.0
    assert np.abs(ten - due).max() <= (10.0 if mix == "bimodal" else 5.0)


@pytest.mark.parametrize("pool", usually({8}, [8, 24]))
def test_shares_of_answers_that_grow_beyond_their_prompts_do_not_swing(pool: int) -> None:
    loads = [
        TenantLoad(name, weight, between(10, 50), between(50, 250), 300)
        for name, weight in (("gold", 2.0), ("silver", 1.0))
    ]
    (ten,) = shares(pool, loads, 10)
    assert ten.std() <= 8.0
    assert 45.0 <= ten.min() <= ten.max() <= 88.0


def test_a_tenant_that_joins_gets_its_share_and_one_that_leaves_takes_nothing_along() -> None:
    """`silver` waits again after its requests have ended: the deposits of both are settled by then."""
    queueing = fair_queueing("kv-token-seconds", Fcfs)
    queue, meter = queueing.make_order(), queueing.meter
    assert meter is not None
    numbers = iter(range(10_000))
    tenants: dict[RequestId, str] = {}
    running: list[RequestId] = []

    def add(tenant: str, count: int) -> None:
        for _ in range(count):
            request = RequestId(next(numbers))
            tenants[request] = tenant
            queue.add(request, ticket(tenant))

    def turn() -> None:
        """Fill eight slots, run, and end the oldest."""
        while len(running) < 8 and (request := queue.head()) is not None:
            queue.serve(request)
            meter.begin(request, ticket(tenants[request]), 100)
            running.append(request)
        steps(meter, 5)
        request = running.pop(0)
        meter.end(request, ticket(tenants[request]), 100 + 5 * 8)

    def count_of(tenant: str) -> int:
        return sum(tenants[one] == tenant for one in running)

    add("a", 2_000)
    for _ in range(200):
        turn()
    add("b", 100)
    for _ in range(10):
        turn()
    # Two thirds by weight, as soon as what ran before has ended.
    assert 4 <= count_of("b") <= 6
    while len(queue) and count_of("b"):
        turn()
    for _ in range(50):
        turn()
        assert count_of("a") == 7
    add("b", 100)
    for _ in range(10):
        turn()
    assert 4 <= count_of("b") <= 6

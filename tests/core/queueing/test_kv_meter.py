"""`kv-token-seconds`: deposits, what is measured, and that tenants pay what they held."""

from itertools import combinations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import Fcfs, KvMeter, fair_queueing

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
ROUNDING = 1e-6


def ticket(tenant: str = "a", prompt_tokens: int = 100, slots: int = 1) -> Ticket:
    return Ticket(prompt_tokens, tenant=tenant, weight=WEIGHTS[tenant], slots=slots)


def steps(meter: KvMeter, count: int, seconds: float = 0.1) -> None:
    for _ in range(count):
        meter.step(round(seconds * 1e9))


def paid(meter: KvMeter, tenant: str) -> float:
    """Return what a tenant has paid and owes, its deposits aside, by weight 1."""
    meter._pay(tenant)
    shares = meter.shares
    return shares.counter(tenant) + shares._owed[tenant] - sum(shares._deposits.values())


def test_a_deposit_is_what_the_prompt_holds_in_a_part_of_a_stay() -> None:
    meter = KvMeter()
    assert meter.deposit(ticket()) == pytest.approx(100 * 8.0 / 8)
    for number in range(1_000):
        meter.begin(RequestId(number), ticket(), 100)
        steps(meter, 20)
        meter.end(RequestId(number), ticket(), 120)
    assert meter.deposit(ticket()) == pytest.approx(100 * 2.0 / 8, rel=0.01)


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


def test_a_direct_request_costs_its_deposit() -> None:
    meter = KvMeter()
    for number in range(2):
        meter.shares.joined("a")
        meter.shares.charge(RequestId(number), ticket())
        meter.end_direct(RequestId(number))
    assert meter.shares.counter("a") == pytest.approx(2 * meter.deposit(ticket()))
    assert not meter.unsettled


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
        self.paid: dict[str, float] = dict.fromkeys(WEIGHTS, 0.0)
        self.largest = 0.0
        self.since: dict[tuple[str, str], dict[str, float]] = {}
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
            self.queue.add(request, self.tickets[request])
            self.waiting[tenant] += 1

    @precondition(lambda self: len(self.queue) > 0)
    @rule(joins=st.booleans())
    def start(self, joins: bool) -> None:
        request = self.queue.head()
        assert request is not None, "something waits, but nothing goes next"
        one = self.tickets[request]
        both = [
            pair for pair in combinations(sorted(WEIGHTS), 2) if all(map(self.waiting.get, pair))
        ]
        self.since = {pair: self.since.get(pair, dict.fromkeys(pair, 0.0)) for pair in both}
        before = self.shares.counter(one.tenant)
        self.queue.serve(request)
        self.waiting[one.tenant] -= 1
        charge = (self.shares.counter(one.tenant) - before) * one.weight
        assert charge >= 0.0
        self.largest = max(self.largest, charge)
        self.paid[one.tenant] += charge
        for service in self.since.values():
            if one.tenant in service:
                service[one.tenant] += charge / one.weight
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
        for tenant in WEIGHTS:
            self.meter._pay(tenant)
            deposits = sum(
                cost
                for request, cost in self.shares._deposits.items()
                if self.tickets[request].tenant == tenant
            )
            owes = self.shares._owed.get(tenant, 0.0)
            assert abs(self.paid[tenant] + owes - deposits - self.held[tenant]) <= ROUNDING * (
                1 + self.paid[tenant]
            )

    @invariant()
    def the_bound_holds(self) -> None:
        for (one, other), service in list(self.since.items()):
            bound = self.largest / WEIGHTS[one] + self.largest / WEIGHTS[other]
            assert abs(service[one] - service[other]) <= bound * (1 + ROUNDING) + ROUNDING
            if not (self.waiting[one] and self.waiting[other]):
                del self.since[one, other]

    @invariant()
    def nothing_is_kept_of_what_ended(self) -> None:
        assert self.shares.unsettled == set(self.running) == set(self.meter._began)
        assert self.meter.unsettled == len(self.running)


TestSettling = Settling.TestCase

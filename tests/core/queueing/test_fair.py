"""Fair queueing: shares by weight, no idle slot, no credit for idle time, and the bound."""

from itertools import combinations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import (
    COSTS,
    QUEUE_ORDERS,
    FairQueue,
    Fcfs,
    StartOrder,
    fair_queueing,
)

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
# What a sum of this many costs may lose by rounding.
ROUNDING = 1e-6


def ticket(tenant: str, prompt_tokens: int = 10, level: int = 0) -> Ticket:
    return Ticket(prompt_tokens, tenant=tenant, weight=WEIGHTS[tenant], level=level)


def queue_of(cost: str, *tickets: Ticket, order: str = "fcfs") -> StartOrder:
    queue = fair_queueing(cost, QUEUE_ORDERS[order]).make_order()
    for number, one in enumerate(tickets):
        queue.add(RequestId(number), one)
    return queue


def drain(queue: StartOrder, count: int = 1000) -> list[RequestId]:
    served: list[RequestId] = []
    while len(served) < count and (head := queue.head()) is not None:
        queue.serve(head)
        served.append(head)
    return served


def test_one_tenant_goes_in_the_order_within() -> None:
    tickets = [ticket("a", level=level) for level in (2, 0, 1)]
    assert drain(queue_of("request", *tickets)) == [0, 1, 2]
    assert drain(queue_of("request", *tickets, order="abs")) == [1, 2, 0]


def test_starts_are_shared_by_weight() -> None:
    queue = queue_of("request", *[ticket("a")] * 40, *[ticket("b")] * 40)
    served = drain(queue, 30)
    assert sum(number >= 40 for number in served) == 20


def test_tokens_are_shared_by_weight_whatever_the_sizes() -> None:
    queue = queue_of("prompt-tokens", *[ticket("a", 100)] * 40, *[ticket("b", 10)] * 400)
    served = drain(queue, 210)
    assert sum(number < 40 for number in served) * 100 == 1000
    assert sum(number >= 40 for number in served) * 10 == 2000


def test_idle_time_earns_no_credit() -> None:
    queue = queue_of("request", *[ticket("a")] * 50)
    drain(queue, 40)
    for number in range(50, 60):
        queue.add(RequestId(number), ticket("c"))
    # Not all of c's first: it has five starts for one of a's.
    assert [number >= 50 for number in drain(queue, 6)].count(True) == 5


def test_what_ends_while_it_waits_costs_nothing() -> None:
    queue = queue_of("request", *[ticket("a")] * 9, *[ticket("c")] * 2)
    for number in range(8):
        queue.remove(RequestId(number))
    assert sorted(drain(queue)) == [8, 9, 10]
    assert queue.head() is None


def test_misuse_asserts() -> None:
    queue = queue_of("request", ticket("a"))
    with pytest.raises(AssertionError, match="request 0 is queued twice"):
        queue.add(RequestId(0), ticket("a"))
    with pytest.raises(AssertionError, match="request 1 does not wait here"):
        queue.remove(RequestId(1))


class Sharing(RuleBasedStateMachine):
    """Two queues with the same counters, as of two sets of models; the one with the first head goes."""

    def __init__(self) -> None:
        super().__init__()
        make = fair_queueing("prompt-tokens", Fcfs).make_order
        self.queues = make(), make()
        self.tickets: dict[RequestId, Ticket] = {}
        self.where: dict[RequestId, StartOrder] = {}
        self.number = 0
        self.largest = 0.0
        # Weighted service of each pair of tenants since both wait.
        self.since: dict[tuple[str, str], dict[str, float]] = {}

    def waiting(self, tenant: str) -> bool:
        return any(one.tenant == tenant for one in self.tickets.values())

    def leave(self, request: RequestId) -> Ticket:
        del self.where[request]
        return self.tickets.pop(request)

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), tokens=st.integers(1, 50), second=st.booleans())
    def arrive(self, tenant: str, tokens: int, second: bool) -> None:
        request = RequestId(self.number)
        self.number += 1
        self.tickets[request] = ticket(tenant, tokens)
        self.where[request] = self.queues[second]
        self.queues[second].add(request, self.tickets[request])
        self.largest = max(self.largest, float(tokens))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.tickets)))
        self.where[request].remove(request)
        self.leave(request)

    @precondition(lambda self: self.tickets)
    @rule()
    def start(self) -> None:
        # Work is conserved: something waits, so there is a head.
        heads = [
            (queue.place(head), head)
            for queue in self.queues
            for head in [queue.head()]
            if head is not None
        ]
        request = min(heads)[1]
        both = [pair for pair in combinations(sorted(WEIGHTS), 2) if all(map(self.waiting, pair))]
        self.since = {pair: self.since.get(pair, dict.fromkeys(pair, 0.0)) for pair in both}
        self.where[request].serve(request)
        served = self.leave(request)
        for service in self.since.values():
            if served.tenant in service:
                service[served.tenant] += served.prompt_tokens / WEIGHTS[served.tenant]

    @invariant()
    def the_bound_holds(self) -> None:
        for (one, other), service in list(self.since.items()):
            bound = self.largest / WEIGHTS[one] + self.largest / WEIGHTS[other]
            assert abs(service[one] - service[other]) <= bound + ROUNDING
            if not (self.waiting(one) and self.waiting(other)):
                del self.since[one, other]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert sum(map(len, self.queues)) == len(self.tickets)
        assert all(request in queue for request, queue in self.where.items())


TestSharing = Sharing.TestCase


def test_a_queue_keeps_nothing_of_tenants_that_left() -> None:
    queue = queue_of("request")
    assert isinstance(queue, FairQueue)
    for number in range(1000):
        queue.add(RequestId(number), ticket("abc"[number % 3]))
        if number % 2:
            queue.remove(RequestId(number))
        else:
            drain(queue)
    assert queue.head() is None
    assert len(queue._heap) == 0


def test_every_cost_is_above_0() -> None:
    assert all(cost(ticket("a", 1)) > 0 for cost in COSTS.values())

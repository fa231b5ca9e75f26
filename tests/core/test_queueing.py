"""First come, first served; a request that returns takes its old place."""

import random
from itertools import combinations, count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.core.steady_tenants import TenantLoad, between, shares
from tests.extended import usually

from balanceroute.predictors import Survival
from balanceroute.proxy.core.events import (
    DecodeLost,
    DecodeStarted,
    PrefillDone,
    RankId,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.fair_queueing import FairQueue, HeldShares, InTurn, fair_queueing
from balanceroute.proxy.core.policies import (
    Assignment,
    Fleet,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.core.queueing import COSTS, QUEUE_ORDERS, Fcfs, QueueOrder, StartOrder
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig
from balanceroute.proxy.core.waiting import Pool, PoolEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

A, B, C, D = (RequestId(number) for number in range(4))
TICKET = Ticket(10)


def queue_of(*requests: RequestId) -> QueueOrder:
    queue = QUEUE_ORDERS["fcfs"]()
    for request in requests:
        queue.add(request, TICKET)
    return queue


def drain(queue: QueueOrder) -> list[RequestId]:
    order: list[RequestId] = []
    while first := queue.first(1):
        order.append(first[0])
        queue.remove(first[0])
    return order


def test_the_order_is_that_of_arrival() -> None:
    queue = queue_of(A, B, C)
    assert (len(queue), list(queue.first(2))) == (3, [A, B])
    queue.remove(B)
    assert B not in queue
    assert drain(queue) == [A, C]
    assert len(queue) == 0


def test_those_that_come_back_take_their_old_places() -> None:
    assert drain(queue_of(C, D, B, A)) == [A, B, C, D]


def test_being_asked_takes_no_one_out() -> None:
    queue = queue_of()
    assert list(queue.first(3)) == []
    queue = queue_of(A, B)
    assert (list(queue.first(3)), list(queue.ahead_of(B))) == ([A, B], [A])
    assert len(queue) == 2
    assert A in queue


def test_a_second_place_asserts() -> None:
    queue = queue_of(A, B)
    with pytest.raises(AssertionError, match="request 0 is queued twice"):
        queue.add(A, TICKET)
    assert len(queue) == 2


def test_taking_out_who_does_not_wait_asserts() -> None:
    queue = queue_of(A)
    with pytest.raises(AssertionError, match="request 1 does not wait here"):
        queue.remove(B)
    with pytest.raises(AssertionError, match="request 1 does not wait here"):
        queue.ahead_of(B)
    assert len(queue) == 1


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 9)), max_size=60),
    st.integers(0, 9),
)
def test_it_agrees_with_a_sorted_list(operations: list[tuple[str, int]], asked: int) -> None:
    queue = Fcfs()
    there: set[RequestId] = set()
    for name, number in operations:
        request = RequestId(number)
        if name == "remove" and request in there:
            there.remove(request)
            queue.remove(request)
        elif name == "add" and request not in there:
            there.add(request)
            queue.add(request, TICKET)
        order = sorted(there)
        assert list(queue.first(asked)) == order[:asked]
        assert len(queue) == len(order)
        assert all((RequestId(one) in queue) == (one in order) for one in range(10))
        if asked in there:
            assert list(queue.ahead_of(RequestId(asked))) == [one for one in order if one < asked]
    assert drain(queue) == sorted(there)


# Deadlines, levels, both, and work: who goes first; and that the order is a sorted list.


BY_TICKET = sorted(QUEUE_ORDERS.keys() - {"fcfs"})
# By id: a usual one, an urgent one due late, an urgent one due soon, a usual one due at once, a
# background one, and a usual one again.
TICKETS = [
    Ticket(50, predicted_tokens=50),
    Ticket(10, level=-2, deadline_ns=900, predicted_tokens=20, slots=3),
    Ticket(40, level=-1, deadline_ns=300),
    Ticket(90, deadline_ns=100, predicted_tokens=11),
    Ticket(20, level=5, predicted_tokens=10),
    Ticket(50, predicted_tokens=50),
]


def order_of(name: str, tickets: list[Ticket]) -> QueueOrder:
    order = QUEUE_ORDERS[name]()
    for number, ticket in enumerate(tickets):
        order.add(RequestId(number), ticket)
    return order


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fcfs", [0, 1, 2, 3, 4, 5]),
        ("edf", [3, 2, 1, 0, 4, 5]),
        ("abs", [1, 2, 0, 3, 5, 4]),
        ("ml", [2, 1, 0, 3, 4, 5]),
        ("srpt", [2, 4, 1, 3, 0, 5]),
    ],
)
def test_each_order_is_its_own(name: str, expected: list[int]) -> None:
    order = order_of(name, TICKETS)
    assert list(order.first(9)) == expected
    assert list(order.first(2)) == expected[:2]
    assert list(order.ahead_of(RequestId(4))) == expected[: expected.index(4)]
    assert sorted(range(6), key=lambda number: order.place(RequestId(number))) == expected


@pytest.mark.parametrize("name", BY_TICKET)
def test_a_second_place_by_ticket_asserts(name: str) -> None:
    order = order_of(name, TICKETS)
    with pytest.raises(AssertionError, match="request 3 is queued twice"):
        order.add(RequestId(3), TICKETS[0])
    assert len(order) == 6


@pytest.mark.parametrize("name", BY_TICKET)
def test_taking_out_a_ticket_that_does_not_wait_asserts(name: str) -> None:
    order = order_of(name, TICKETS)
    for method in (order.remove, order.ahead_of):
        with pytest.raises(AssertionError, match="request 6 does not wait here"):
            method(RequestId(6))
    assert len(order) == 6


@given(
    st.sampled_from(BY_TICKET),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
    st.lists(
        st.builds(
            Ticket,
            st.integers(1, 3),
            level=st.integers(-1, 1),
            deadline_ns=st.none() | st.integers(0, 2),
        ),
        min_size=10,
        max_size=10,
    ),
)
def test_by_ticket_it_agrees_with_a_sorted_list(
    name: str, operations: list[tuple[bool, int]], tickets: list[Ticket]
) -> None:
    order, there = QUEUE_ORDERS[name](), set[RequestId]()
    for is_removal, number in operations:
        request = RequestId(number)
        if is_removal and request in there:
            there.remove(request)
            order.remove(request)
        elif not is_removal and request not in there:
            there.add(request)
            order.add(request, tickets[number])
        expected = sorted(there, key=order.place)
        assert list(order.first(len(there))) == expected
        assert len(order) == len(expected)
        assert all((RequestId(one) in order) == (one in there) for one in range(10))
        for position, one in enumerate(expected):
            assert list(order.ahead_of(one)) == expected[:position]


def test_before_its_prediction_a_request_is_expected_to_answer_as_the_others() -> None:
    order = QUEUE_ORDERS["srpt"]()
    for number, prompt_tokens in enumerate((10, 20, 30, 40)):
        order.add(RequestId(number), Ticket(prompt_tokens, predicted_tokens=100))
    assert order.ahead(Ticket(25)) == 2


# Fair queueing: shares by weight, no idle slot, no credit for idle time, and the bound.


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
# What a sum of this many costs may lose by rounding.
ROUNDING = 1e-6


def ticket(tenant: str, prompt_tokens: int = 10, level: int = 0) -> Ticket:
    return Ticket(prompt_tokens, tenant=tenant, weight=WEIGHTS[tenant], level=level)


def fair_queue_of(cost: str, *tickets: Ticket, order: str = "fcfs") -> StartOrder:
    queue = fair_queueing(cost, QUEUE_ORDERS[order]).make_order()
    for number, one in enumerate(tickets):
        queue.add(RequestId(number), one)
    return queue


def fair_drain(queue: StartOrder, count: int = 1000) -> list[RequestId]:
    served: list[RequestId] = []
    while len(served) < count and (head := queue.head()) is not None:
        queue.serve(head)
        served.append(head)
    return served


def test_one_tenant_goes_in_the_order_within() -> None:
    tickets = [ticket("a", level=level) for level in (2, 0, 1)]
    assert fair_drain(fair_queue_of("request", *tickets)) == [0, 1, 2]
    assert fair_drain(fair_queue_of("request", *tickets, order="abs")) == [1, 2, 0]


def test_starts_are_shared_by_weight() -> None:
    queue = fair_queue_of("request", *[ticket("a")] * 40, *[ticket("b")] * 40)
    served = fair_drain(queue, 30)
    assert sum(number >= 40 for number in served) == 20


def test_tokens_are_shared_by_weight_whatever_the_sizes() -> None:
    queue = fair_queue_of("prompt-tokens", *[ticket("a", 100)] * 40, *[ticket("b", 10)] * 400)
    served = fair_drain(queue, 210)
    assert sum(number < 40 for number in served) * 100 == 1000
    assert sum(number >= 40 for number in served) * 10 == 2000


def test_idle_time_earns_no_credit() -> None:
    queue = fair_queue_of("request", *[ticket("a")] * 50)
    fair_drain(queue, 40)
    for number in range(50, 60):
        queue.add(RequestId(number), ticket("c"))
    # Not all of c's first: it has five starts for one of a's.
    assert [number >= 50 for number in fair_drain(queue, 6)].count(True) == 5


def test_what_ends_while_it_waits_costs_nothing() -> None:
    queue = fair_queue_of("request", *[ticket("a")] * 9, *[ticket("c")] * 2)
    for number in range(8):
        queue.remove(RequestId(number))
    assert sorted(fair_drain(queue)) == [8, 9, 10]
    assert queue.head() is None


def test_misuse_asserts() -> None:
    queue = fair_queue_of("request", ticket("a"))
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
    queue = fair_queue_of("request")
    assert isinstance(queue, FairQueue)
    for number in range(1000):
        queue.add(RequestId(number), ticket("abc"[number % 3]))
        if number % 2:
            queue.remove(RequestId(number))
        else:
            fair_drain(queue)
    assert queue.head() is None
    assert len(queue._heap) == 0


def test_every_cost_is_above_0() -> None:
    assert all(cost(ticket("a", 1)) > 0 for cost in COSTS.values())


# The pool behind fair queues, against a list in the order of the first coming.


ONE = Ticket(1)


class Turns(RuleBasedStateMachine):
    """Requests come in any order of their ids, leave, and return."""

    def __init__(self) -> None:
        super().__init__()
        self.order = InTurn()
        self.came: list[RequestId] = []
        self.waiting: set[RequestId] = set()

    @property
    def expected(self) -> "Sequence[RequestId]":
        return [request for request in self.came if request in self.waiting]

    @rule(number=st.integers(0, 30))
    def come(self, number: int) -> None:
        request = RequestId(number)
        if request in self.waiting:
            with pytest.raises(AssertionError, match="queued twice"):
                self.order.add(request, ONE)
            return
        if request not in self.came:
            self.came.append(request)
        self.waiting.add(request)
        self.order.add(request, ONE)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), serves=st.booleans())
    def leave(self, data: st.DataObject, serves: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        (self.order.serve if serves else self.order.remove)(request)
        self.waiting.remove(request)

    @invariant()
    def it_is_the_list(self) -> None:
        expected = self.expected
        assert self.order.first(99) == expected
        assert self.order.first(2) == expected[:2]
        assert self.order.head() == (expected[0] if expected else None)
        assert len(self.order) == self.order.ahead(ONE) == len(expected)
        for place, request in enumerate(expected):
            assert request in self.order
            assert self.order.ahead_of(request) == expected[:place]
        assert sorted(expected, key=self.order.place) == expected
        assert RequestId(99) not in self.order


TestTurns = Turns.TestCase


def test_a_return_is_remembered_for_a_while_and_not_for_ever() -> None:
    order = InTurn()
    for number in range(20_000):
        order.add(RequestId(number), ONE)
        if number >= 3:
            order.remove(RequestId(number))
    assert order.first(9) == [0, 1, 2]
    assert len(order._turns) < 9_000
    order.add(RequestId(19_998), ONE)
    order.add(RequestId(19_997), ONE)
    order.add(RequestId(5), ONE)
    assert order.first(9) == [0, 1, 2, 19_997, 19_998, 5]


def test_what_does_not_wait_cannot_leave() -> None:
    with pytest.raises(AssertionError, match="request 3 does not wait here"):
        InTurn().remove(RequestId(3))
    with pytest.raises(AssertionError, match="request 3 does not wait here"):
        InTurn().ahead_of(RequestId(3))


# Tenants that hold more than their share of the ranks wait in the pool, where it costs no balance.


# Bound requests have numbers from here on.
BOUND = 1_000
# No entry is so young that BR-H keeps it for a better rank.
NOT_HELD_NS = 1_000_000_000_000


def held_ticket(tenant: str, tokens: int, weight: float = 1.0) -> Ticket:
    return Ticket(tokens, tenant=tenant, weight=weight)


def holding(**tokens: list[int]) -> HeldShares:
    """Return what tenants hold whose requests are bound with so many tokens."""
    held_shares, number = HeldShares(), BOUND
    for tenant, sizes in tokens.items():
        for size in sizes:
            held_shares.bind(RequestId(number), held_ticket(tenant, size), size)
            number += 1
    return held_shares


@pytest.mark.parametrize("seed", range(5))
def test_what_a_tenant_holds_is_what_its_requests_do(seed: int) -> None:
    rng, held_shares = random.Random(seed), HeldShares()
    held: dict[RequestId, tuple[str, int, int]] = {}
    for number in range(2_000):
        what = rng.random()
        if what < 0.4:
            one = Ticket(rng.randint(1, 900), tenant=rng.choice("abc"), slots=rng.choice((1, 4)))
            held_shares.bind(RequestId(number), one, one.prompt_tokens)
            held[RequestId(number)] = one.tenant, one.prompt_tokens, one.slots
        elif what < 0.7 and held:
            gone = rng.choice(list(held))
            held_shares.unbind(gone)
            del held[gone]
        else:
            held_shares.steps += 1
            held = {key: (who, size + slots, slots) for key, (who, size, slots) in held.items()}
        for tenant in "abc":
            assert held_shares.tokens(tenant) == sum(
                s for who, s, _ in held.values() if who == tenant
            )
        assert held_shares.bound == held.keys()
    for request in list(held):
        held_shares.unbind(request)
    assert not held_shares._held


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (3, 1), (10, 1), (5, 3, 1), (1,) * 40])
@pytest.mark.parametrize("seed", usually({0}, range(3)))
def test_who_takes_a_slot_holds_its_share_a_mean_request_and_its_new_one_at_most(
    weights: tuple[int, ...], seed: int
) -> None:
    """A choice at random among those not held back; tenants come and go, and stays differ."""
    rng, held_shares = random.Random(seed), HeldShares()
    running: dict[RequestId, Ticket] = {}
    for number in range(3_000):
        here = [one for one in range(len(weights)) if one == 0 or rng.random() < 0.8]
        pool = [held_ticket(f"{rng.choice(here)}", rng.randint(100, 900)) for _ in range(24)]
        pool = [
            held_ticket(one.tenant, one.prompt_tokens, weights[int(one.tenant)]) for one in pool
        ]
        waits = held_shares.held_back(pool)
        free = [one for one in pool if one.tenant not in waits]
        assert free, "all are held back"
        chosen = rng.choice(free)
        tenants = {one.tenant: one.weight for one in pool}
        held = {tenant: held_shares.tokens(tenant) for tenant in tenants}
        due = sum(held.values()) * chosen.weight / sum(tenants.values())
        mean = sum(one.prompt_tokens for one in running.values()) / max(1, len(running))
        if len(tenants) > 1:
            assert held[chosen.tenant] <= due + mean + 1e-6
        held_shares.bind(RequestId(number), chosen, chosen.prompt_tokens)
        running[RequestId(number)] = chosen
        if len(running) == 32:
            gone = rng.choice(list(running))
            held_shares.unbind(gone)
            del running[gone]


def test_a_tenant_that_waits_alone_is_not_held_back() -> None:
    held_shares = holding(a=[500] * 20, b=[500])
    assert held_shares.held_back([held_ticket("a", 100), held_ticket("b", 100)]) == {"a"}
    assert not held_shares.held_back([held_ticket("a", 100)])
    assert not held_shares.held_back([held_ticket("a", 100, 40.0), held_ticket("b", 100, 1.0)])


def fleet(loads: list[int], free: list[int], room: int = 2**40) -> Fleet:
    slots = np.array(free)
    return Fleet(
        np.ones(len(loads), np.bool_), np.array(loads), 8 - slots, slots, np.full(len(loads), room)
    )


def dispatched(
    entries: list[tuple[str, int]], *, loads: list[int], free: list[int], long: bool, room: int
) -> list[Assignment]:
    """Let BR-H decide on (tenant, prompt tokens); `a` holds 8,000 tokens more than its half.

    With `long` answers are long beside prompts, so that candidates have trajectories.
    """
    inputs = PolicyInputs(len(loads), 8, PolicySettings(), random.Random(1), Survival([200] * 99))
    policy = make_policy("br-h", inputs)
    assert isinstance(policy, TwoStage)
    assert policy.own_trajectory is not None
    for _ in range(64):
        policy.own_trajectory.slots.leave(100, 400 if long else 50)
    pool = Pool(Fcfs(), holding(a=[500] * 20, b=[500] * 4).held_back)
    for number, (tenant, tokens) in enumerate(entries):
        one = held_ticket(tenant, tokens)
        pool.add(PoolEntry(RequestId(number), one, tokens, 0, None, None, None))
    return policy.dispatch(fleet(loads, free, room), pool, NOT_HELD_NS)


ENOUGH = 2**40


@pytest.mark.parametrize("long", [False, True])
def test_the_pool_lets_the_tenant_within_its_share_go_first(long: bool) -> None:
    entries = [("a", 300), ("a", 300), ("b", 300)]
    (one,) = dispatched(entries, loads=[3000, 3000], free=[1, 0], long=long, room=ENOUGH)
    assert one.request == 2


@pytest.mark.parametrize("long", [False, True])
def test_no_slot_stays_free_for_a_share(long: bool) -> None:
    entries = [("a", 300), ("a", 300), ("b", 3_000)]
    # The request of `b` has no room.
    (one,) = dispatched(entries, loads=[3000, 3000], free=[1, 0], long=long, room=1_000)
    assert one.request == 0
    entries = [("a", 300), ("b", 300), ("a", 300)]
    taken = dispatched(entries, loads=[3000, 3000], free=[2, 1], long=long, room=ENOUGH)
    assert len(taken) == 3


def test_balance_goes_before_shares() -> None:
    """What `b` has would overflow its rank by many mean prompts, which all other ranks would wait for."""
    entries = [("a", 300), ("a", 310), ("b", 3_000)]
    (one,) = dispatched(entries, loads=[3000, 3320], free=[1, 0], long=False, room=ENOUGH)
    assert one.request in (0, 1)


def test_what_leaves_its_rank_in_any_way_is_held_no_more() -> None:
    inputs = PolicyInputs(2, 4, PolicySettings(), random.Random(1), Survival([50]))
    fair = fair_queueing("kv-token-seconds", Fcfs)
    scheduler = Scheduler(
        SchedulerConfig(ranks=2, batch_limit=4, prefillers=1),
        make_policy("br-h", inputs),
        intake=Intake(fair=fair),
    )
    assert fair.meter is not None
    held_shares, one = fair.meter.held_shares, RequestId(0)

    times_ns = count(0, NOT_HELD_NS)

    def feed(*events: object) -> None:
        for event in (*events, Tick()):
            scheduler.handle(event, now_ns=next(times_ns))  # type: ignore[arg-type]

    feed(RequestArrived(one, held_ticket("a", 100)))
    assert held_shares.tokens("a") == 0
    feed(PrefillDone(one, 100))
    assert held_shares.tokens("a") == 100
    # Back to the pool, and from there to the other rank.
    feed(DecodeLost(one))
    assert held_shares.tokens("a") == 100
    feed(DecodeStarted(one), StepCompleted(10), StepCompleted(10))
    assert held_shares.tokens("a") == 102
    scheduler.handle(RequestRecomputed(one), now_ns=next(times_ns))
    assert held_shares.tokens("a") == 0
    feed(PrefillDone(one, 102))
    assert held_shares.tokens("a") == 102
    feed(RequestFinished(one))
    assert not held_shares.bound
    assert fair.meter.unsettled == 0
    assert scheduler.ledger.loads[RankId(0)] == 0


@pytest.mark.parametrize("pool", usually({24}, [8, 24]))
def test_shares_are_steady_however_long_requests_stay(pool: int) -> None:
    """Of weights 2 and 1, with stays of 20 s: it takes that long until a choice is made good."""
    loads = [
        TenantLoad(name, weight, between(200, 1000), between(200, 600), 500)
        for name, weight in (("gold", 2.0), ("silver", 1.0))
    ]
    second, ten = shares(pool, loads, 1, 10)
    assert second.std() <= 5.0
    assert 50.0 <= second.min() <= second.max() <= 82.0
    assert 55.0 <= ten.min() <= ten.max() <= 78.0

"""Fair shares of tenants: `fair_queueing` makes the parts that share one scheduler's starts."""

import heapq
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import COSTS, KV_SECONDS, Cost
from balanceroute.proxy.core.waiting import Fcfs, MakeQueueOrder, MakeStartOrder, StartOrder

# Weighted fair queueing before prefill: tenants share the starts, however much they queue.
#
# Each tenant has a counter of the cost of its started requests, divided by its weight. The tenant with
# the lowest counter goes next. So no slot is idle while a request waits, and the counters of two waiting
# tenants differ by at most one largest cost divided by the weight of the tenant ahead: over any time in
# which tenants i and j both wait, |S_i / w_i - S_j / w_j| <= L / w_i + L / w_j for the costs S of their
# starts and the largest single cost L.
#
# A tenant that returns after a time without waiting requests begins at the counter of the latest start,
# the deposits aside: idle time earns no credit. This is start-time fair queueing (Goyal et al., SIGCOMM
# 1996). Unlike deficit round robin it needs no quantum above the largest cost, and one start costs O(log
# tenants).
#
# A cost that grows with time (`KvMeter`) is charged as a deposit, which the tenant gets back at the end;
# the growing cost is added to its counter at once. So counters also fall, and the bound above holds for
# the charges less what the tenants get back.

# In running means, which so cover about 64 starts of all tenants, and 32 of one.
_START_WEIGHT = 1 / 64
_OWN_WEIGHT = 1 / 32


class FairShares:
    """The counters of the tenants, shared by all queues before prefill.

    Args:
        cost: Of one request; above 0.
        deposits: Whether each charge is a deposit: `give_back` follows it.
    """

    def __init__(self, cost: Cost, *, deposits: bool = False) -> None:
        self._cost = cost
        self._has_deposits = deposits
        self._counters: dict[str, float] = {}
        # The queues in which a tenant waits.
        self._queues: dict[str, list[FairQueue]] = {}
        # The counter of the latest start, with and without deposits.
        self._served_last = self._served_base = 0.0
        # Means: by how much a start raises it, and by tenant, what its counter gains from one start to the
        # next. And what the counter gained since the tenant's latest start.
        self._advance = 0.0
        self._added: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._deposits: dict[RequestId, tuple[Ticket, float]] = {}
        # The part of a tenant's counter that is deposits.
        self._deposited: dict[str, float] = {}

    def counter(self, tenant: str) -> float:
        """Return the weighted cost of a tenant's starts."""
        return self._counters[tenant]

    @property
    def unsettled(self) -> Set[RequestId]:
        """The requests whose deposit is not settled."""
        return self._deposits.keys()

    def joined(self, tenant: str, queue: "FairQueue") -> None:
        queues = self._queues.setdefault(tenant, [])
        if not queues:
            self._counters[tenant] = self._joining(tenant)
        queues.append(queue)

    def _joining(self, tenant: str) -> float:
        """Return the counter of a tenant that begins to wait now."""
        # Its deposits count: a tenant without a request in flight comes before those that have some.
        base = self._served_base + self._deposited.get(tenant, 0.0)
        return max(self._counters.get(tenant, 0.0), base)

    def left(self, tenant: str, queue: "FairQueue") -> None:
        queues = self._queues[tenant]
        queues.remove(queue)
        if not queues:
            del self._queues[tenant]

    def charge(self, request: RequestId, ticket: Ticket) -> None:
        tenant, cost = ticket.tenant, self._cost(ticket)
        counter = self._counters[tenant]
        moved = counter - self._served_last
        # Another queue may have held up a lower one. With deposits counters fall, and this with them.
        if not self._has_deposits:
            moved = max(0.0, moved)
        self._served_last += moved
        base = counter - self._deposited.get(tenant, 0.0)
        self._served_base = max(self._served_base, base)
        self._advance += (_START_WEIGHT if self._advance else 1.0) * (moved - self._advance)
        added = cost / ticket.weight
        self._counters[tenant] = counter + added
        if self._has_deposits:
            self._deposits[request] = ticket, cost
            self._deposited[tenant] = self._deposited.get(tenant, 0.0) + added
            added += self._since.pop(tenant, 0.0)
        before = self._added.setdefault(tenant, added)
        self._added[tenant] = before + _OWN_WEIGHT * (added - before)

    def starts_before(self, ticket: Ticket, own: int) -> float:
        """Return about how many requests start before one of a tenant, `own` of the same among them.

        A tenant's turn comes when the counter of the latest start reaches its own. Each start raises that
        counter by its mean, which includes the costs and the requests that come meanwhile.
        """
        tenant = ticket.tenant
        if self._advance <= 0.0:
            return own
        added = self._added.get(tenant)
        if added is None:
            # Assume that it gains from one start to the next what the other tenants gain.
            added = sum(self._added.values()) / len(self._added)
        counter = self._counters[tenant] if tenant in self._queues else self._joining(tenant)
        # Its own start is the last of those that move it there.
        return max(own, (counter + own * added - self._served_last) / self._advance - 1.0)

    def owe(self, ticket: Ticket, cost: float) -> None:
        """Add a cost to the counter of a request's tenant; below 0 it is credit."""
        tenant, added = ticket.tenant, cost / ticket.weight
        self._counters[tenant] = self._counters.get(tenant, 0.0) + added
        self._since[tenant] = self._since.get(tenant, 0.0) + added
        if added < 0.0:
            for queue in self._queues.get(tenant, ()):
                queue.lower(tenant)

    def give_back(self, request: RequestId, part: float = 1.0) -> None:
        """Settle a request's deposit, if it made one: give a part back, and keep the rest."""
        deposit = self._deposits.pop(request, None)
        if deposit is not None:
            ticket, cost = deposit
            self._deposited[ticket.tenant] -= cost / ticket.weight
            self.owe(ticket, -part * cost)

    def scale_deposits(self, factor: float) -> None:
        """Change all deposits, and the counters with them."""
        for request, (ticket, cost) in self._deposits.items():
            self._deposits[request] = ticket, factor * cost
            added = (factor - 1.0) * cost / ticket.weight
            self._deposited[ticket.tenant] += added
            self.owe(ticket, (factor - 1.0) * cost)
            # No cost of its starts.
            self._since[ticket.tenant] -= added
        # Deposits change much before requests end, when they are most of the gain from starts.
        self._added = {tenant: factor * added for tenant, added in self._added.items()}


class FairQueue:
    """Requests by tenant, in an order of their own within each.

    Args:
        make_order: Makes the order of one tenant's requests.
    """

    def __init__(self, shares: FairShares, make_order: MakeStartOrder) -> None:
        self._shares = shares
        self._make_order = make_order
        self._tickets: dict[RequestId, Ticket] = {}
        self._queues: dict[str, StartOrder] = {}
        # (counter, tenant) of each waiting tenant, as in `_entries`: at most its counter, and corrected at
        # the top. Stale pairs are dropped there.
        self._heap: list[tuple[float, str]] = []
        self._entries: dict[str, float] = {}

    def add(self, request: RequestId, ticket: Ticket) -> None:
        assert request not in self._tickets, f"request {request} is queued twice"
        tenant = ticket.tenant
        self._tickets[request] = ticket
        if tenant not in self._queues:
            self._queues[tenant] = self._make_order()
            self._shares.joined(tenant, self)
            self.lower(tenant)
        self._queues[tenant].add(request, ticket)

    def lower(self, tenant: str) -> None:
        """Note that the counter of a tenant that waits may have fallen."""
        counter = self._shares.counter(tenant)
        if tenant not in self._entries or counter < self._entries[tenant]:
            self._entries[tenant] = counter
            heapq.heappush(self._heap, (counter, tenant))

    def remove(self, request: RequestId) -> None:
        assert request in self._tickets, f"request {request} does not wait here"
        tenant = self._tickets.pop(request).tenant
        queue = self._queues[tenant]
        queue.remove(request)
        if not len(queue):
            del self._queues[tenant]
            self._shares.left(tenant, self)

    def serve(self, request: RequestId) -> None:
        ticket = self._tickets[request]
        self.remove(request)
        self._shares.charge(request, ticket)

    def head(self) -> RequestId | None:
        heap, entries = self._heap, self._entries
        while heap:
            entry, tenant = heap[0]
            if entries.get(tenant) != entry:
                heapq.heappop(heap)
            elif tenant not in self._queues:
                heapq.heappop(heap)
                del entries[tenant]
            elif entry < (counter := self._shares.counter(tenant)):
                entries[tenant] = counter
                heapq.heapreplace(heap, (counter, tenant))
            else:
                return self._queues[tenant].head()
        return None

    def ahead(self, ticket: Ticket) -> int:
        """Return about how many requests would go before one that came now, see `starts_before`."""
        queue = self._queues.get(ticket.tenant)
        own = 0 if queue is None else queue.ahead(ticket)
        return round(self._shares.starts_before(ticket, own))

    def place(self, request: RequestId) -> Any:
        """Return the sort key of a request among the heads of queues with the same counters."""
        tenant = self._tickets[request].tenant
        return self._shares.counter(tenant), tenant, self._queues[tenant].place(request)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: RequestId, /) -> bool:
        return request in self._tickets


# Which tenants hold more than their share of the decode ranks, when a slot is free.
#
# `KvMeter` decides which tenant starts a request. The request then waits in the pool, from which a policy
# takes what suits the barrier, of any tenant. With n slots and a share p that alone spreads the share of
# the running requests by sqrt(p (1 - p) / n): 8 points of 2 : 1 on 32 slots, for as long as requests stay.
# No order of the starts undoes it, because a start takes effect only after the pool. So the policy holds a
# tenant back while it holds
#
#     more than its share + a mean request,
#
# where shares are by weight among the tenants that a policy may choose from, of the KV tokens that these
# hold on the ranks. A policy chooses freely among the remaining tenants, unless their best request suits
# the barrier much worse: by more than an eighth of a mean prompt that overflows. So no slot is idle for
# shares. Where requests differ much in size, balance goes first: a tenant's requests that stay in the pool
# are those that suit the ranks least.
#
# Bound. Where another tenant's request is nearly as good, a tenant that takes a slot holds at most its
# share + a mean request at the beginning of that round. A late request that has reserved a rank is exempt,
# and the choices of the present round do not count yet. A policy may always choose from some tenant: not
# all hold more than their shares. A tenant that is held back gets no slot, so it is not held back after
# the last of its requests has ended. A deadline in the pool goes before all shares. Starts are counted as
# before, so that the bound of `KvMeter` holds over a long time.


class _Held(Struct):
    """What a tenant or all hold: `tokens` at step 0, and since then one a step for each sequence."""

    requests: int = 0
    tokens: int = 0
    sequences: int = 0


class _Bound(NamedTuple):
    """What a request adds to the `_Held` of its tenant."""

    tenant: str
    tokens: int
    sequences: int


class HeldShares:
    """The KV tokens of each tenant's requests on the decode ranks, those on their way included."""

    def __init__(self) -> None:
        self.steps = 0  # So many steps have passed.
        self._held: dict[str, _Held] = {}
        self._all = _Held()
        self._bound: dict[RequestId, _Bound] = {}

    @property
    def bound(self) -> Set[RequestId]:
        """The requests that are on a rank, or on their way."""
        return self._bound.keys()

    def bind(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request of `kv_tokens` has a rank; from now on it grows with each step."""
        tokens = kv_tokens - ticket.slots * self.steps
        bound = self._bound[request] = _Bound(ticket.tenant, tokens, ticket.slots)
        self._add(bound, 1)

    def unbind(self, request: RequestId) -> None:
        self._add(self._bound.pop(request), -1)

    def tokens(self, tenant: str) -> int:
        held = self._held.get(tenant)
        return 0 if held is None else held.tokens + self.steps * held.sequences

    def held_back(self, tickets: Iterable[Ticket]) -> Set[str]:
        """Return those tenants of some requests that a policy holds back; never all of them."""
        weights = {ticket.tenant: ticket.weight for ticket in tickets}
        if len(weights) < 2 or not self._bound:
            return frozenset()
        held = {tenant: self.tokens(tenant) for tenant in weights}
        everything = self._all
        spare = (everything.tokens + self.steps * everything.sequences) / everything.requests
        of_weight = sum(held.values()) / sum(weights.values())
        return {
            tenant
            for tenant, tokens in held.items()
            if tokens > of_weight * weights[tenant] + spare
        }

    def _add(self, bound: _Bound, sign: int) -> None:
        held = self._held.get(bound.tenant)
        if held is None:
            held = self._held[bound.tenant] = _Held()
        for one in (held, self._all):
            one.requests += sign
            one.tokens += sign * bound.tokens
            one.sequences += sign * bound.sequences
        if not held.requests:
            del self._held[bound.tenant]


# `kv-token-seconds`: what a request holds on a decode rank, in KV tokens times seconds.
#
# Tenants pay for what their requests hold as time passes, not in advance: a charge for all that a request
# will hold would make its tenant wait until other tenants have had as much, for tokens that no rank holds
# yet. But a request that starts now holds tokens only later. So a start also deposits what the request
# holds in a time T, and gets it back when it ends. A tenant's counter then is
#
#     KV token-seconds held until now + T x KV tokens of its requests in flight,
#
# divided by its weight w, and each start goes to the lowest counter.
#
# Bound. With M the most KV tokens that are in flight and L the largest deposit, the counters of
# two tenants that wait differ by at most about L / w after each start, so what they held by
# weight differs by at most (T M + L) / w, over any time. It is the difference that a window of
# length W may show: T / W of what is held, and a few requests.
#
# Choice of T. A request that starts joins its rank a delay P later (prefill, pool), and stays for
# S on average. If phi is the Laplace transform of the stays and psi = (1 - phi) / (s S) that of
# what is left of one that runs, equal counters mean that a difference in starts is answered by
# the later ones with
#
#     e^(-s P) (phi - psi / A),  A = T / S.
#
# Below 1 at all frequencies it dies out, however long P is. A slow difference is answered by |1 -
# 1 / A|: seven times at A = 1/8, so that shares swing to their limits, and half of it at A = 2.
# That is the largest answer for stays without memory; it is 0.71 for stays between half and one
# and a half times their mean (0.83 at A = 1), and 1.12 (1.26) for stays that are all alike, which
# the pool damps, as requests wait there for different times. A larger A adds little, and a
# difference decays within T.

_NS_PER_S = 1e9
# Before the first step that is measured.
_FIRST_STEP_S = 0.05
# Weights in the running means, which so cover about 64 steps and 128 requests.
_STEP_WEIGHT = 1 / 64
_STAY_WEIGHT = 1 / 128
# A: T in mean stays.
_AHEAD = 2.0
# T stays as it is while the measured one is within this factor. When it changes, all deposits are made
# anew: a mixture would favour tenants with old deposits over those with new ones, or the other way round.
_RANGE = 1.25
# The share of its deposit that a request pays which only a prefiller answers.
_DIRECT = 1 / 16


@dataclass(slots=True)
class _RunningTotal:
    """What a tenant's requests in decode hold since `elapsed_s`, growing by a token a step."""

    tokens: int = 0
    sequences: int = 0
    elapsed_s: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Began:
    """When a request began to decode, and its KV tokens then."""

    elapsed_s: float
    steps: int
    tokens: int


class KvMeter:
    """Measures the tokens that requests hold over time, and has their tenants pay for them."""

    def __init__(self) -> None:
        # Charged with deposits, and with the cost of tokens as time passes.
        self.shares = FairShares(self.deposit, deposits=True)
        self.held_shares = HeldShares()  # Decides which tenants the policy holds back.
        self._step_s = 0.0
        # Of the requests that ended, the later ones with more weight: their number, how long they stayed,
        # and what they held beyond their prompts, for each sequence.
        self._ended = 0.0
        self._stay_s = 0.0
        self._grown = 0.0
        # T.
        self._ahead_s = _AHEAD * _FIRST_STEP_S
        # The time of all steps, and their number.
        self._elapsed_s = 0.0
        self._steps = 0
        self._held: dict[str, _RunningTotal] = {}
        self._began: dict[RequestId, _Began] = {}

    def deposit(self, ticket: Ticket) -> float:
        """Return what a start deposits, in KV token-seconds; above 0. Its tenant pays what it held."""
        self._pay(ticket)
        self._look_ahead()
        grown = self._grown / self._stay_s if self._stay_s else 0.0
        return (ticket.prompt_tokens + ticket.slots * grown) * self._ahead_s

    @property
    def unsettled(self) -> int:
        """Requests that were charged, have a rank, or joined a batch, and have not ended."""
        return len(self.shares.unsettled | self._began.keys() | self.held_shares.bound)

    def step(self, duration_ns: int | None) -> None:
        """Note a step; one that was not measured counts as long as the mean one."""
        self._steps += 1
        self.held_shares.steps += 1
        if duration_ns is None:
            self._elapsed_s += self._step_s or _FIRST_STEP_S
            return
        step_s = duration_ns / _NS_PER_S
        self._elapsed_s += step_s
        self._step_s += _STEP_WEIGHT * (step_s - self._step_s) if self._step_s else step_s

    def begin(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request of `kv_tokens` joined its rank's batch."""
        held = self._pay(ticket)
        held.tokens += kv_tokens
        held.sequences += ticket.slots
        self._began[request] = _Began(self._elapsed_s, self._steps, kv_tokens)

    def end(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request left its rank with `kv_tokens`, or ended before it joined a batch."""
        began = self._began.pop(request, None)
        if began is None:
            self.shares.give_back(request)
            return
        held = self._pay(ticket)
        grown = began.tokens + ticket.slots * (self._steps - began.steps)
        held.tokens -= grown
        held.sequences -= ticket.slots
        if not held.sequences:
            del self._held[ticket.tenant]
        # Where it emitted other than a token a step, the mean is still halfway.
        stay_s = self._elapsed_s - began.elapsed_s
        self.shares.owe(ticket, (kv_tokens - grown) / 2 * stay_s)
        self.shares.give_back(request)
        of_a_sequence = (kv_tokens - began.tokens) / 2 * stay_s / ticket.slots
        self._ended += 1.0 - _STAY_WEIGHT * self._ended
        self._stay_s += stay_s - _STAY_WEIGHT * self._stay_s
        self._grown += of_a_sequence - _STAY_WEIGHT * self._grown
        self._look_ahead()

    def end_direct(self, request: RequestId) -> None:
        """Note the end of a request that held no rank: a part of its deposit stands for its cost."""
        self.shares.give_back(request, 1.0 - _DIRECT)

    def _look_ahead(self) -> None:
        """Set T anew where it has left its range, and all deposits with it."""
        if self._ended:
            stay_s = self._stay_s / self._ended
        else:
            # Nothing ended yet, so that requests stay for longer than the first one has run.
            first = next(iter(self._began.values()), None)
            stay_s = self._elapsed_s - first.elapsed_s if first else 0.0
        ahead_s = _AHEAD * max(stay_s, self._step_s or _FIRST_STEP_S)
        if not self._ahead_s / _RANGE <= ahead_s <= self._ahead_s * _RANGE:
            self.shares.scale_deposits(ahead_s / self._ahead_s)
            self._ahead_s = ahead_s

    def _pay(self, ticket: Ticket) -> _RunningTotal:
        """Have a request's tenant pay what its requests held since the last time."""
        held = self._held.get(ticket.tenant)
        if held is None:
            held = self._held[ticket.tenant] = _RunningTotal()
        steps, passed_s = self._steps - held.steps, self._elapsed_s - held.elapsed_s
        # The steps since then are taken as equally long.
        grown = held.sequences * steps
        self.shares.owe(ticket, (held.tokens + grown / 2) * passed_s)
        held.tokens += grown
        held.steps, held.elapsed_s = self._steps, self._elapsed_s
        return held


# The pool behind fair queues: requests in the order in which they first came to it.
#
# Which request starts next is settled when they come here. By their arrivals those of a tenant
# that had to wait for its share would go ahead of those of one within its share, in the pool a
# second time.

# Requests that left whose turns are kept, as they may return.
_REMEMBERED = 4096


class InTurn:
    """Requests by turn. One that returns has its old turn, if it is among the latest 4,096."""

    def __init__(self) -> None:
        self._order = Fcfs()
        self._turns: dict[RequestId, RequestId] = {}
        # Of those that wait.
        self._requests: dict[RequestId, RequestId] = {}
        self._next = 0

    def add(self, request: RequestId, ticket: Ticket) -> None:
        turn = self._turns.get(request)
        if turn is None:
            turn = self._turns[request] = RequestId(self._next)
            self._next += 1
            self._forget()
        self._order.add(turn, ticket)
        self._requests[turn] = request

    def remove(self, request: RequestId) -> None:
        assert request in self, f"request {request} does not wait here"
        turn = self._turns[request]
        self._order.remove(turn)
        del self._requests[turn]

    serve = remove

    def head(self) -> RequestId | None:
        turn = self._order.head()
        return None if turn is None else self._requests[turn]

    def first(self, count: int) -> Sequence[RequestId]:
        return [self._requests[turn] for turn in self._order.first(count)]

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        assert request in self, f"request {request} does not wait here"
        return [self._requests[turn] for turn in self._order.ahead_of(self._turns[request])]

    def ahead(self, ticket: Ticket) -> int:
        return self._order.ahead(ticket)

    def place(self, request: RequestId) -> RequestId:
        return self._turns[request]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: RequestId, /) -> bool:
        return self._turns.get(request) in self._requests

    def _forget(self) -> None:
        """Forget the earlier half of the turns of those that left, once they are too many."""
        if len(self._turns) - len(self._requests) < 2 * _REMEMBERED:
            return
        # In the order of turns, as they were given.
        left = [request for request, turn in self._turns.items() if turn not in self._requests]
        for request in left[:-_REMEMBERED]:
            del self._turns[request]


# Fair queueing by name of its cost: `fair_queueing("kv-token-seconds", order)`.


class FairQueueing(NamedTuple):
    """The parts of one scheduler that share its starts."""

    make_order: MakeStartOrder  # Makes its queues before prefill.
    make_pool: MakeQueueOrder  # Makes the order of its pool.
    meter: KvMeter | None  # Replaces deposits by the real cost; None without deposits.


def fair_queueing(cost: str, make_order: MakeQueueOrder) -> FairQueueing:
    """Return the parts for a cost of `FAIR_COSTS`, with an order of requests within each tenant.

    It also orders the pool. There first come, first served means in order of the starts, as the shares
    decide that order.
    """
    meter = KvMeter() if cost == KV_SECONDS else None
    shares = FairShares(COSTS[cost]) if meter is None else meter.shares
    make_pool = InTurn if make_order is Fcfs else make_order
    return FairQueueing(lambda: FairQueue(shares, make_order), make_pool, meter)

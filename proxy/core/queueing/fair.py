"""Weighted fair queueing before prefill: tenants share what starts, whatever they queue.

Each tenant has a counter of the cost that it was served, divided by its weight, and the tenant with
the lowest counter goes next. So no slot is idle while anything waits, and while two tenants wait,
their counters differ by at most one largest cost divided by the weight of the tenant ahead: over any
time in which tenants i and j both wait, |S_i / w_i - S_j / w_j| <= L / w_i + L / w_j for the
costs S that were served and the largest single cost L.

A tenant that comes back after it had nothing to wait for starts at the counter that was served last, the
deposits aside: idle time earns no credit. This is start-time fair queueing (Goyal et al., SIGCOMM 1996). Unlike
deficit round robin it needs no quantum above the largest cost, and one grant costs O(log tenants).

A cost that is known only as time passes (`kv_meter`) is charged as a deposit, which is given back at
the end, and what a tenant owes meanwhile is added to its counter at once. So counters fall as well, and
the bound above holds for what is charged, less what is given back.
"""

import heapq
from collections.abc import Callable, Set
from typing import Any

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing.base import MakeStartOrder, StartOrder

# In running means, which so cover about 64 starts of all tenants, and 32 of one.
_START_WEIGHT = 1 / 64
_OWN_WEIGHT = 1 / 32

Cost = Callable[[Ticket], float]

COSTS: dict[str, Cost] = {
    "request": lambda _: 1.0,
    "prompt-tokens": lambda ticket: float(ticket.prompt_tokens),
}
"""What a start costs its tenant, by name. A repeated prefill costs it again."""


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
        # The counter that was served last, and what it was without deposits.
        self._served_last = self._served_base = 0.0
        # Means: by how much a start moves that on, and by tenant, what its counter gains from one start
        # to the next. And what it gained since its last start.
        self._advance = 0.0
        self._added: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._deposits: dict[RequestId, tuple[Ticket, float]] = {}
        # The part of a tenant's counter that is deposits.
        self._deposited: dict[str, float] = {}

    def counter(self, tenant: str) -> float:
        """Return the weighted cost that a tenant was served."""
        return self._counters[tenant]

    @property
    def unsettled(self) -> Set[RequestId]:
        """The requests whose deposit is not settled."""
        return self._deposits.keys()

    def joined(self, tenant: str, queue: "FairQueue") -> None:
        """Note that a tenant begins to wait in a queue."""
        queues = self._queues.setdefault(tenant, [])
        if not queues:
            self._counters[tenant] = self._joining(tenant)
        queues.append(queue)

    def _joining(self, tenant: str) -> float:
        """Return the counter of a tenant that begins to wait now."""
        # The deposits are its own: who has no request in flight comes before those that have.
        base = self._served_base + self._deposited.get(tenant, 0.0)
        return max(self._counters.get(tenant, 0.0), base)

    def left(self, tenant: str, queue: "FairQueue") -> None:
        """Note that a tenant no longer waits in a queue."""
        queues = self._queues[tenant]
        queues.remove(queue)
        if not queues:
            del self._queues[tenant]

    def charge(self, request: RequestId, ticket: Ticket) -> None:
        """Charge a tenant for a request that starts."""
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

        All tenants are served when the counter that was served last comes to theirs, and each start
        moves it on by its mean: whoever comes meanwhile, and whatever it costs, is in that mean.
        """
        tenant = ticket.tenant
        if self._advance <= 0.0:
            return own
        added = self._added.get(tenant)
        if added is None:
            # It is taken to start what others start.
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
        # Deposits change much before requests end, when they are most of what starts were seen to add.
        self._added = {tenant: factor * added for tenant, added in self._added.items()}


class FairQueue:
    """Requests by tenant, in an order of their own within each.

    Args:
        shares: The counters.
        make_order: Makes the order of one tenant's requests.
    """

    def __init__(self, shares: FairShares, make_order: MakeStartOrder) -> None:
        self._shares = shares
        self._make_order = make_order
        self._tickets: dict[RequestId, Ticket] = {}
        self._queues: dict[str, StartOrder] = {}
        # (counter, tenant): of each tenant that waits, and of some that do so no longer, the one in
        # `_entries`, which is at most its counter and is corrected at the top. Others are dropped there.
        self._heap: list[tuple[float, str]] = []
        self._entries: dict[str, float] = {}

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Add a request to its tenant's."""
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
        """Remove a request that ended while it waited; it costs nothing."""
        assert request in self._tickets, f"request {request} does not wait here"
        tenant = self._tickets.pop(request).tenant
        queue = self._queues[tenant]
        queue.remove(request)
        if not len(queue):
            del self._queues[tenant]
            self._shares.left(tenant, self)

    def serve(self, request: RequestId) -> None:
        """Remove a request that starts, and charge its tenant."""
        ticket = self._tickets[request]
        self.remove(request)
        self._shares.charge(request, ticket)

    def head(self) -> RequestId | None:
        """Return the first request of the tenant that is served least; None if nothing waits."""
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
        """Return what sorts a request among the heads of queues with the same counters."""
        tenant = self._tickets[request].tenant
        return self._shares.counter(tenant), tenant, self._queues[tenant].place(request)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._tickets)

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        return request in self._tickets

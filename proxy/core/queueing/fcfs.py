"""`fcfs`: first come, first served. Request ids grow in order of arrival."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing.base import MakeQueueOrder, MakeStartOrder
from balanceroute.proxy.core.queueing.fair import COSTS, FairQueue, FairShares
from balanceroute.proxy.core.queueing.kv_meter import KvMeter


class Fcfs:
    """Requests in order of arrival. One that returns takes its old place, ahead of later arrivals.

    Removal costs O(log n) plus one memory move; in practice requests leave from the front.
    """

    def __init__(self) -> None:
        self._order: list[RequestId] = []

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Insert a request in order."""
        del ticket
        # Ids grow with arrivals, so a new request is appended; only one that returns is inserted.
        if not self._order or request > self._order[-1]:
            self._order.append(request)
            return
        assert request not in self, f"request {request} is queued twice"
        self._order.insert(bisect_left(self._order, request), request)

    def remove(self, request: RequestId) -> None:
        """Remove a request."""
        del self._order[self._place(request)]

    serve = remove

    def head(self) -> RequestId | None:
        """Return the first waiting request; None if there is none."""
        return self._order[0] if self._order else None

    def first(self, count: int) -> Sequence[RequestId]:
        """Return the first `count` waiting requests."""
        return self._order[:count]

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        """Return the waiting requests that arrived earlier."""
        return self._order[: self._place(request)]

    def ahead(self, ticket: Ticket) -> int:
        """Return how many requests wait."""
        del ticket
        return len(self._order)

    def place(self, request: RequestId) -> RequestId:
        """Return the id: ids grow in order of arrival."""
        return request

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._order)

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        # The list is sorted, so a bisection finds the request if it is there.
        place = bisect_left(self._order, request)
        return place < len(self._order) and self._order[place] == request

    def _place(self, request: RequestId) -> int:
        order = self._order
        if order and order[0] == request:  # Nearly always.
            return 0
        place = bisect_left(order, request)
        waits = place < len(order) and order[place] == request
        assert waits, f"request {request} does not wait here"
        return place


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
        """Insert a request in order."""
        turn = self._turns.get(request)
        if turn is None:
            turn = self._turns[request] = RequestId(self._next)
            self._next += 1
            self._forget()
        self._order.add(turn, ticket)
        self._requests[turn] = request

    def remove(self, request: RequestId) -> None:
        """Remove a request."""
        assert request in self, f"request {request} does not wait here"
        turn = self._turns[request]
        self._order.remove(turn)
        del self._requests[turn]

    serve = remove

    def head(self) -> RequestId | None:
        """Return the first waiting request; None if there is none."""
        turn = self._order.head()
        return None if turn is None else self._requests[turn]

    def first(self, count: int) -> Sequence[RequestId]:
        """Return the first `count` waiting requests."""
        return [self._requests[turn] for turn in self._order.first(count)]

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        """Return the waiting requests whose turns are earlier."""
        assert request in self, f"request {request} does not wait here"
        return [self._requests[turn] for turn in self._order.ahead_of(self._turns[request])]

    def ahead(self, ticket: Ticket) -> int:
        """Return how many requests wait."""
        return self._order.ahead(ticket)

    def place(self, request: RequestId) -> RequestId:
        """Return the turn."""
        return self._turns[request]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._order)

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
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

KV_SECONDS = "kv-token-seconds"
FAIR_COSTS = (*COSTS, KV_SECONDS)
"""What tenants can share."""


class FairQueueing(NamedTuple):
    """The parts of one scheduler that share what starts.

    Attributes:
        make_order: Makes its queues before prefill.
        make_pool: Makes the order of its pool.
        meter: Settles what was charged; None if the cost is known at the start.
    """

    make_order: MakeStartOrder
    make_pool: MakeQueueOrder
    meter: KvMeter | None


def fair_queueing(cost: str, make_order: MakeQueueOrder) -> FairQueueing:
    """Return the parts for a cost of `FAIR_COSTS`, with an order of requests within each tenant.

    In the pool it is the order of all requests. First come, first served is there as they start: that
    they came in another order is what the shares are for.
    """
    meter = KvMeter() if cost == KV_SECONDS else None
    shares = FairShares(COSTS[cost]) if meter is None else meter.shares
    make_pool = InTurn if make_order is Fcfs else make_order
    return FairQueueing(lambda: FairQueue(shares, make_order), make_pool, meter)

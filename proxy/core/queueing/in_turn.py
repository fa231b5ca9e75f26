"""The pool behind fair queues: requests in the order in which they first came to it.

Which request starts next is settled when they come here. By their arrivals those of a tenant that had
to wait for its share would go ahead of those of one within its share, in the pool a second time.
"""

from collections.abc import Sequence

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing.fcfs import Fcfs

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

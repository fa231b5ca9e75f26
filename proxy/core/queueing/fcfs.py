"""`fcfs`: first come, first served. Request ids grow in order of arrival."""

from bisect import bisect_left
from collections.abc import Sequence

from balanceroute.proxy.core.events import RequestId, Ticket


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

"""`arrival`: first come, first served. Request ids grow in order of arrival."""

from bisect import bisect_left
from collections.abc import Sequence

from balanceroute.proxy.core.events import RequestId, Ticket


class Arrival:
    """In order of arrival. Whoever comes back takes its old place, ahead of all later arrivals.

    Removal costs O(log n + distance from the front) plus one memory move; requests leave from the
    front in practice.
    """

    def __init__(self) -> None:
        self._order: list[RequestId] = []

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Put a request at its place."""
        del ticket
        assert request not in self, f"request {request} is queued twice"
        if not self._order or request > self._order[-1]:
            self._order.append(request)
        else:
            self._order.insert(bisect_left(self._order, request), request)

    def remove(self, request: RequestId) -> None:
        """Take a request out."""
        del self._order[self._place(request)]

    def first(self, count: int) -> Sequence[RequestId]:
        """Return the first `count` arrivals that wait."""
        return self._order[:count]

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        """Return the earlier arrivals that wait."""
        return self._order[: self._place(request)]

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._order)

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        place = bisect_left(self._order, request)
        return place < len(self._order) and self._order[place] == request

    def _place(self, request: RequestId) -> int:
        assert request in self, f"request {request} does not wait here"
        return bisect_left(self._order, request)

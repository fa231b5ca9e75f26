"""The order of requests before prefill and in the pool: the interface for priorities and fair shares.

A queue order is one new file here and a line in the registry. Before prefill a request holds no KV
cache, so that is the place to reorder. The first request starts next; if no prefiller has room for
it, the others wait with it, so that smaller prompts do not overtake a large one for ever. In the pool
a policy chooses among the first few.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from balanceroute.proxy.core.events import RequestId, Ticket


class StartOrder(Protocol):
    """Requests before prefill in some order, which may change from one call to the next."""

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Add a request. One that returns after it was served or lost is added again."""
        ...

    def remove(self, request: RequestId) -> None:
        """Remove a request that has ended."""
        ...

    def serve(self, request: RequestId) -> None:
        """Remove a request that proceeds."""
        ...

    def head(self) -> RequestId | None:
        """Return the first request; None if there is none."""
        ...

    def ahead(self, ticket: Ticket) -> int:
        """Return about how many requests would go before one that came now."""
        ...

    def place(self, request: RequestId) -> Any:
        """Return what sorts a request among those of all orders that the same maker made."""
        ...

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        ...


class QueueOrder(StartOrder, Protocol):
    """An order that can also sort the pool."""

    def first(self, count: int) -> Sequence[RequestId]:
        """Return the first `count` requests in order, or all if fewer wait."""
        ...

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        """Return the requests ahead of one that waits here."""
        ...


MakeStartOrder = Callable[[], StartOrder]
"""Makes an empty order. Each queue before prefill has its own."""
MakeQueueOrder = Callable[[], QueueOrder]
"""Makes an empty order, also for the pool."""

"""In what order requests wait, before prefill and in the pool: the seam for priorities and fair shares.

A queue order is one new file here and a line in the registry. Before prefill requests hold no KV
cache, so that is the place to reorder them: the first one starts next, and if no prefiller has room
for it, the others wait with it, so that a large prompt is not passed over for ever. In the pool the
first few are what a policy chooses among.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from balanceroute.proxy.core.events import RequestId, Ticket


class QueueOrder(Protocol):
    """Waiting requests in an order of its own, which may change from one call to the next."""

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Take a request in. One that comes back after it was served or lost is added again."""
        ...

    def remove(self, request: RequestId) -> None:
        """Take a request out: it goes on, or has ended."""
        ...

    def first(self, count: int) -> Sequence[RequestId]:
        """Return the first `count` requests in order, or all if fewer wait."""
        ...

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        """Return the requests that come before one that waits here."""
        ...

    def __len__(self) -> int:
        """Return how many wait."""
        ...

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        ...


MakeQueueOrder = Callable[[], QueueOrder]
"""Makes an empty queue. Each line before prefill has its own, and so has the pool."""

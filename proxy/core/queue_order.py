"""What waits before prefill, and who is next: the seam for priorities and fair shares.

Requests wait here without holding any KV cache, so this is the place to reorder them. Who goes next
is asked again at each chance to start a probe; if no prefiller has room for that one, the others
wait with it, so that a large prompt is not passed over forever.
"""

from collections import OrderedDict
from typing import Protocol

from balanceroute.proxy.core.events import RequestId


class QueueOrder(Protocol):
    """The requests that wait for a prefiller, in an order of its own."""

    def add(self, request: RequestId, prompt_tokens: int, *, returned: bool) -> None:
        """Take a request in; `returned` says that it has been probed before and came back."""
        ...

    def remove(self, request: RequestId) -> None:
        """Take a request out: it is probed, or has ended."""
        ...

    def first(self) -> RequestId | None:
        """Return who is next, or None if nobody waits. It stays until it is removed."""
        ...

    def __len__(self) -> int:
        """Return how many wait."""
        ...

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        ...


class FirstCome:
    """In order of arrival, but those that came back go first: they have waited their turn once."""

    def __init__(self) -> None:
        # Ordered dictionaries, since a plain one finds its first key in time linear in the number
        # of keys that went before.
        self._arrived: OrderedDict[RequestId, None] = OrderedDict()
        self._returned: OrderedDict[RequestId, None] = OrderedDict()

    def add(self, request: RequestId, prompt_tokens: int, *, returned: bool) -> None:
        """Put a request at the end of its line."""
        del prompt_tokens
        assert request not in self, f"request {request} is queued twice"
        (self._returned if returned else self._arrived)[request] = None

    def remove(self, request: RequestId) -> None:
        """Take a request out of its line."""
        line = self._returned if request in self._returned else self._arrived
        del line[request]

    def first(self) -> RequestId | None:
        """Return the first of those that came back, else of the others."""
        line = self._returned or self._arrived
        return next(iter(line), None)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._arrived) + len(self._returned)

    def __contains__(self, request: RequestId, /) -> bool:
        """Return whether `request` waits here."""
        return request in self._arrived or request in self._returned

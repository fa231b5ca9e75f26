"""The prompt pool: prefilled requests in order of arrival.

The pool keeps for each entry how often it was **overtaken**, that is, how many later arrivals were
admitted while it waited. Unlike a waiting time this does not depend on the load: it is what a
free choice among the pooled requests costs this one request compared with first come, first served.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from balanceroute.proxy.core.events import RequestId

# Weight of one more arrival in the running mean of prompt lengths: remembers about 128 arrivals.
_MEAN_WEIGHT = 1 / 128


@dataclass(slots=True, eq=False)
class PoolEntry:
    """One waiting request. `age` is the number of tokens it emitted before a recompute."""

    request: RequestId
    prompt_tokens: int
    age: int
    deadline_ns: int | None
    expires_ns: int | None
    lease_ends_ns: int | None
    overtaken: int = 0


class Pool:
    """Arrival-ordered entries with deadlines (serve first), expiry and KV leases (both remove).

    Admissions come from the front in practice, so removal costs O(distance from the front) plus one
    memory move.
    """

    def __init__(self) -> None:
        self._order: list[RequestId] = []
        self._entries: dict[RequestId, PoolEntry] = {}
        # Heaps of (time, request); an entry that left is skipped when its time comes up.
        self._deadlines: list[tuple[int, RequestId]] = []
        self._expiries: list[tuple[int, RequestId]] = []
        self._leases: list[tuple[int, RequestId]] = []
        self.mean_prompt_tokens = 0.0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._order)

    def __iter__(self) -> Iterator[PoolEntry]:
        """Iterate in order of arrival."""
        return (self._entries[request] for request in self._order)

    def __contains__(self, request: RequestId) -> bool:
        """Return whether `request` waits here."""
        return request in self._entries

    def add(self, entry: PoolEntry) -> None:
        """Insert `entry` at its place in the order of arrival (a recomputed one goes far ahead)."""
        assert entry.request not in self._entries, f"request {entry.request} is pooled twice"
        if self._order and entry.request < self._order[-1]:
            self._order.insert(bisect_left(self._order, entry.request), entry.request)
        else:
            self._order.append(entry.request)
        self._entries[entry.request] = entry
        for heap, time_ns in (
            (self._deadlines, entry.deadline_ns),
            (self._expiries, entry.expires_ns),
            (self._leases, entry.lease_ends_ns),
        ):
            if time_ns is not None:
                heapq.heappush(heap, (time_ns, entry.request))
        if self.mean_prompt_tokens == 0.0:
            self.mean_prompt_tokens = float(entry.prompt_tokens)
        else:
            self.mean_prompt_tokens += _MEAN_WEIGHT * (
                entry.prompt_tokens - self.mean_prompt_tokens
            )

    def oldest(self, count: int) -> list[PoolEntry]:
        """Return the first `count` entries in order of arrival."""
        entries = self._entries
        return [entries[request] for request in self._order[:count]]

    def admit(self, request: RequestId) -> PoolEntry:
        """Remove an entry that goes to decode; every older entry was overtaken once more."""
        place = self._place(request)
        for older in self._order[:place]:
            self._entries[older].overtaken += 1
        del self._order[place]
        return self._entries.pop(request)

    def remove(self, request: RequestId) -> PoolEntry:
        """Remove an entry for any other reason."""
        del self._order[self._place(request)]
        return self._entries.pop(request)

    def overdue(self, now_ns: int) -> list[PoolEntry]:
        """Return the entries past their deadline, oldest first. They stay in the pool."""
        late: list[tuple[int, RequestId]] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            time_ns, request = heapq.heappop(self._deadlines)
            entry = self._entries.get(request)
            # An entry that came back with its old time is queued twice; equals come in a row.
            if (
                entry is not None
                and entry.deadline_ns == time_ns
                and (time_ns, request) not in late[-1:]
            ):
                late.append((time_ns, request))
        for item in late:  # Still waiting, so still overdue at the next call.
            heapq.heappush(self._deadlines, item)
        return [self._entries[request] for request in sorted(request for _, request in late)]

    def expired(self, now_ns: int) -> list[RequestId]:
        """Return the entries whose time to live is over. The caller removes them."""
        return self._due(self._expiries, "expires_ns", now_ns)

    def lapsed(self, now_ns: int) -> list[RequestId]:
        """Return the entries whose KV lease must not be used any more. The caller removes them."""
        return self._due(self._leases, "lease_ends_ns", now_ns)

    def _due(self, heap: list[tuple[int, RequestId]], clock: str, now_ns: int) -> list[RequestId]:
        due: list[RequestId] = []
        while heap and heap[0][0] <= now_ns:
            time_ns, request = heapq.heappop(heap)
            entry = self._entries.get(request)
            if entry is not None and getattr(entry, clock) == time_ns and request not in due[-1:]:
                due.append(request)
        return due

    def _place(self, request: RequestId) -> int:
        place = bisect_left(self._order, request)
        assert place < len(self._order), f"request {request} is not pooled"
        assert self._order[place] == request, f"request {request} is not pooled"
        return place

"""The prompt pool: requests that wait for a decode slot, in a queue order.

The pool counts for each entry how often it was **overtaken**: how many entries behind it were
admitted while it waited. Unlike a waiting time the count does not depend on the load. It measures
what free choice among the pooled requests costs one request, against first come, first served.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.queueing import HeldShares, QueueOrder

# Times at which something is due for a request, the earliest first.

# Cleared times that the heap may hold beyond the number of valid ones before it is rebuilt.
_SLACK = 64


class Timers:
    """At most one time per request; setting or clearing costs O(log requests) at most."""

    def __init__(self) -> None:
        self._times: dict[RequestId, int] = {}
        # (time, request): ties go to the lower request id. A cleared or changed time stays in the
        # heap and is skipped when it reaches the top: a heap has no cheap removal.
        self._heap: list[tuple[int, RequestId]] = []

    def set(self, request: RequestId, time_ns: int | None) -> None:
        """Set the one time at which `request` is due; None for never."""
        times = self._times
        if time_ns is None:
            times.pop(request, None)
            return
        times[request] = time_ns
        heap = self._heap
        heappush(heap, (time_ns, request))
        # Amortised O(1); without it cleared times would accumulate.
        if len(heap) > 2 * len(times) + _SLACK:
            self._heap = [(time_ns, request) for request, time_ns in times.items()]
            heapify(self._heap)

    def clear(self, request: RequestId) -> None:
        """Remove the time of `request`, if it has one."""
        self._times.pop(request, None)

    def first_ns(self) -> int | None:
        """Return the earliest time, or None if there is none."""
        heap, times = self._heap, self._times
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now_ns: int) -> list[RequestId]:
        """Return the requests that are due, the earliest first, and remove their times."""
        if not self._heap or self._heap[0][0] > now_ns:  # Nearly always.
            return []
        return [request for _, request in self._pop(now_ns)]

    def due(self, now_ns: int) -> list[RequestId]:
        """Return the requests that are due, the earliest first; they stay due."""
        if not self._heap or self._heap[0][0] > now_ns:
            return []
        items = self._pop(now_ns)
        for time_ns, request in items:
            self.set(request, time_ns)
        return [request for _, request in items]

    def _pop(self, now_ns: int) -> list[tuple[int, RequestId]]:
        items: list[tuple[int, RequestId]] = []
        while self._heap and self._heap[0][0] <= now_ns:
            time_ns, request = heappop(self._heap)
            if self._times.get(request) == time_ns:
                del self._times[request]
                items.append((time_ns, request))
        return items


# Weight of an arrival in the running mean of prompt lengths, which so covers about 128 arrivals.
_MEAN_WEIGHT = 1 / 128


class Kept(NamedTuple):
    """What the ranks have of the prompt of a waiting request.

    Attributes:
        tokens: Of its beginning, by rank. A list: single items of an array take longer.
        mean: Of the open ranks.
        until: The admission at which it is looked up again.
    """

    tokens: list[int]
    mean: float
    until: int


class PoolEntry(Struct, eq=False):
    """One waiting request.

    Attributes:
        prompt_tokens: Prompt tokens, and those emitted before a recompute.
        age: Tokens that each sequence emitted before a recompute.
        deadline_ns: From then on it goes first; None for never.
        expires_ns: When it ends with an error; None for never.
        lease_ends_ns: When its KV cache counts as lost; None for never.
        lost_on: Ranks to avoid while others are open, the earliest loss first.
        overtaken: Entries behind it that were admitted while it waited.
        overflow_limit: Past its deadline, the overflow in tokens up to which it goes first.
        home: The rank that it waits for, see `Ticket`; None for none.
        partners: The only ranks that can use its prefiller's KV cache; None for all.
        kept: What the ranks had of its prompt when that was looked up last; see `Keeping`.
        since_ns: When it first entered the pool, unless it has been decoded since.
        slots: Its sequences. One free slot is enough to admit it.
        ranks: The only ranks that can serve it; None for all.
        restricted: Whether some open rank may be closed to it.
        kv_tokens: Its load on the rank that admits it.
    """

    request: RequestId
    ticket: Ticket
    prompt_tokens: int
    age: int
    deadline_ns: int | None
    expires_ns: int | None
    lease_ends_ns: int | None
    lost_on: tuple[RankId, ...] = ()
    overtaken: int = 0
    overflow_limit: float = inf
    since_ns: int = 0
    home: RankId | None = None
    partners: frozenset[RankId] | None = None
    kept: Kept | None = None
    # These follow from the others.
    slots: int = 0
    ranks: frozenset[RankId] | None = None
    restricted: bool = False
    kv_tokens: int = 0

    def __post_init__(self) -> None:
        eligible = self.ticket.eligible
        self.slots = self.ticket.slots
        self.ranks = None if eligible is None else eligible.ranks
        if self.partners is not None:
            self.ranks = self.partners if self.ranks is None else self.ranks & self.partners
            self.home = self.home if self.home in self.partners else None
        if self.home is not None:
            self.ranks = frozenset((self.home,))
        self.restricted = bool(self.lost_on) or self.ranks is not None
        self.kv_tokens = self.prompt_tokens * self.slots


class Pool:
    """Entries with deadlines (serve first), expiry and KV leases (both remove).

    Args:
        order: The order of the entries; empty at first.
        held_shares: What tenants hold on the ranks, if they share that.

    Attributes:
        entries: What waits, by request, in no order. Read-only.
        slots: Slots that all waiting requests need; 0 if none waits.
        mean_prompt_tokens: Running mean over the added entries.
    """

    def __init__(self, order: QueueOrder, held_shares: HeldShares | None = None) -> None:
        self._order = order
        self._held_shares = held_shares
        self.entries: dict[RequestId, PoolEntry] = {}
        self._deadlines = Timers()
        self._expiries = Timers()
        self._leases = Timers()
        self._closed: set[RankId] = set()
        self.slots = 0
        self.mean_prompt_tokens = 0.0
        # What left since `begin_round`, in order, and which of it was removed without admission.
        self._round: dict[RequestId, PoolEntry] | None = None
        self._removed: list[RequestId] = []

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.entries)

    def __iter__(self) -> Iterator[PoolEntry]:
        """Iterate in order."""
        return iter(self.first(len(self)))

    def __contains__(self, request: RequestId) -> bool:
        """Return whether `request` waits here."""
        return request in self.entries

    def add(self, entry: PoolEntry) -> None:
        """Insert `entry` in order."""
        assert entry.request not in self.entries, f"request {entry.request} is pooled twice"
        if entry.home in self._closed:
            entry = replace(entry, home=None)
        self._order.add(entry.request, entry.ticket)
        self.entries[entry.request] = entry
        self._begin_timers(entry)
        self.slots += entry.slots
        # The first entry sets the mean: from 0 it would take some 128 arrivals to become right.
        if self.mean_prompt_tokens == 0.0:
            self.mean_prompt_tokens = float(entry.prompt_tokens)
        else:
            self.mean_prompt_tokens += _MEAN_WEIGHT * (
                entry.prompt_tokens - self.mean_prompt_tokens
            )

    def replace(self, entry: PoolEntry) -> None:
        """Replace an entry by one with other times; place, home and overtakings stay."""
        before = self.entries[entry.request]
        entry = replace(entry, overtaken=before.overtaken, home=before.home)
        self.entries[entry.request] = entry
        self._set_timers(entry)

    def set_open(self, rank: RankId, is_open: bool) -> None:
        """Note whether a rank is open; entries that wait for a closed one may go elsewhere."""
        if is_open:
            self._closed.discard(rank)
            return
        self._closed.add(rank)
        for request, entry in self.entries.items():
            if entry.home == rank:
                self.entries[request] = replace(entry, home=None)

    def first(self, count: int) -> list[PoolEntry]:
        """Return the first `count` entries in order."""
        entries = self.entries
        return [entries[request] for request in self._order.first(count)]

    def held_back(self, count: int) -> Set[str]:
        """Return the tenants among the first `count` entries whose entries are to wait for others."""
        if self._held_shares is None:
            return frozenset()
        return self._held_shares.held_back(entry.ticket for entry in self.first(count))

    def at(self, place: int) -> PoolEntry:
        """Return the entry at a position of the order."""
        return self.entries[self._order.first(place + 1)[place]]

    def admit(self, request: RequestId) -> PoolEntry:
        """Remove an entry that goes to decode; it overtakes every entry ahead of it."""
        entries = self.entries
        # Before the removal, while the entry still has its place.
        for ahead in self._order.ahead_of(request):
            entries[ahead].overtaken += 1
        return self._take_out(request)

    def admit_all(self, requests: Sequence[RequestId]) -> None:
        """Remove entries that go to decode, as `admit` does one after the other.

        O(n + m log m) for m requests, with n entries up to the last of them.
        """
        if len(requests) < 2:
            for request in requests:
                self.admit(request)
            return
        order, going = self._order, set(requests)
        behind = len(going)
        for ahead in order.ahead_of(max(requests, key=order.place)):
            if ahead in going:
                behind -= 1
            else:
                self.entries[ahead].overtaken += behind
        # Those of them that went before overtook it, too, if they were behind it.
        gone: list[Any] = []
        for request in requests:
            place = order.place(request)
            earlier = bisect_left(gone, place)
            self._take_out(request).overtaken += len(gone) - earlier
            gone.insert(earlier, place)

    def remove(self, request: RequestId) -> PoolEntry:
        """Remove an entry for any other reason."""
        # Nothing is overtaken, as the entry does not go to decode.
        entry = self._take_out(request)
        if self._round is not None:
            self._removed.append(request)
        return entry

    def begin_round(self) -> None:
        """Start to record what leaves, so that `undo_round` can restore it."""
        self._round = {}
        self._removed = []

    @property
    def taken(self) -> dict[RequestId, PoolEntry]:
        """A copy of what left since `begin_round`."""
        assert self._round is not None, "there is no round"
        return self._round.copy()

    def end_round(self) -> None:
        """Stop to record; what left stays out."""
        self._round = None

    def undo_round(self) -> None:
        """Restore what left since `begin_round`, as if it had never been admitted."""
        left, self._round = self._round, None
        assert left is not None, "there is no round to undo"
        # The last one first: then the entries ahead of each are those that it overtook.
        for request, entry in reversed(left.items()):
            self._order.add(request, entry.ticket)
            self.entries[request] = entry
            self._begin_timers(entry)
            self.slots += entry.slots
            # Only an admission overtook the entries ahead.
            if request not in self._removed:
                for ahead in self._order.ahead_of(request):
                    self.entries[ahead].overtaken -= 1

    def overdue(self, now_ns: int) -> list[PoolEntry]:
        """Return the entries past their deadline, oldest first. They stay in the pool."""
        due = self._deadlines.due(now_ns)
        if not due:
            return []
        # By id: the oldest arrival first, whatever the order of the deadlines.
        return [self.entries[request] for request in sorted(due)]

    def expired(self, now_ns: int) -> list[RequestId]:
        """Return the entries whose time to live has ended, once. The caller removes them."""
        return self._expiries.take_due(now_ns)

    def lapsed(self, now_ns: int) -> list[RequestId]:
        """Return the entries whose KV lease has ended, once. The caller removes them."""
        return self._leases.take_due(now_ns)

    def first_lease_end_ns(self) -> int | None:
        """Return when the first lease ends; None if no entry has one."""
        return self._leases.first_ns()

    def next_removal_ns(self) -> int | None:
        """Return when the next entry expires or its lease lapses; None for never."""
        expiry_ns, lease_ns = self._expiries.first_ns(), self.first_lease_end_ns()
        if expiry_ns is None or lease_ns is None:
            return lease_ns if expiry_ns is None else expiry_ns
        return min(expiry_ns, lease_ns)

    def _set_timers(self, entry: PoolEntry) -> None:
        self._deadlines.set(entry.request, entry.deadline_ns)
        self._expiries.set(entry.request, entry.expires_ns)
        self._leases.set(entry.request, entry.lease_ends_ns)

    def _begin_timers(self, entry: PoolEntry) -> None:
        """Set the timers of an entry that has none yet."""
        request = entry.request
        if entry.deadline_ns is not None:
            self._deadlines.set(request, entry.deadline_ns)
        if entry.expires_ns is not None:
            self._expiries.set(request, entry.expires_ns)
        if entry.lease_ends_ns is not None:
            self._leases.set(request, entry.lease_ends_ns)

    def _take_out(self, request: RequestId) -> PoolEntry:
        self._order.remove(request)
        entry = self.entries.pop(request)
        if entry.deadline_ns is not None:
            self._deadlines.clear(request)
        if entry.expires_ns is not None:
            self._expiries.clear(request)
        if entry.lease_ends_ns is not None:
            self._leases.clear(request)
        self.slots -= entry.slots
        if self._round is not None:
            # A dictionary for its order: `undo_round` goes backwards through it.
            self._round[request] = entry
        return entry

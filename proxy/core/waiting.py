"""Where requests wait: before prefill, and in the pool for a decode slot; each in a queue order.

The pool counts for each entry how often it was **overtaken**: how many entries behind it were
admitted while it waited. Unlike a waiting time the count does not depend on the load. It measures
what free choice among the pooled requests costs one request, against first come, first served.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from balanceroute.proxy.core.events import Eligible, PrefillerId, RankId, RequestId, Ticket
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.prefill import Prefillers, PrefillRequest

# The order of requests before prefill and in the pool: the interface for priorities and fair
# shares.
#
# A queue order is a class in `queueing` and a line in its registry. It reorders before prefill, where a
# request holds no KV cache. The first request starts next; if no prefiller has room for it, all wait with
# it, so that smaller prompts do not overtake a large one for ever. In the pool a policy chooses among the
# first few.


class StartOrder(Protocol):
    """Requests before prefill in some order, which may change from one call to the next."""

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Add a request, also one that returns after it was served or lost."""
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
        """Return the sort key of a request among those of all orders of the same maker."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, request: RequestId, /) -> bool: ...


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


class Fcfs:
    """Requests in order of arrival. One that returns takes its old place, ahead of later arrivals.

    Removal costs O(log n) plus one memory move; in practice requests leave from the front.
    """

    def __init__(self) -> None:
        self._order: list[RequestId] = []

    def add(self, request: RequestId, ticket: Ticket) -> None:
        del ticket
        # Ids grow with arrivals, so a new request is appended; only one that returns is inserted.
        if not self._order or request > self._order[-1]:
            self._order.append(request)
            return
        assert request not in self, f"request {request} is queued twice"
        self._order.insert(bisect_left(self._order, request), request)

    def remove(self, request: RequestId) -> None:
        del self._order[self._place(request)]

    serve = remove

    def head(self) -> RequestId | None:
        return self._order[0] if self._order else None

    def first(self, count: int) -> Sequence[RequestId]:
        return self._order[:count]

    def ahead_of(self, request: RequestId) -> Sequence[RequestId]:
        return self._order[: self._place(request)]

    def ahead(self, ticket: Ticket) -> int:
        del ticket
        return len(self._order)

    def place(self, request: RequestId) -> RequestId:
        return request

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: RequestId, /) -> bool:
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
    """How much of a waiting request's prompt is on the ranks."""

    tokens: list[int]  # Of its beginning, by rank. A list: single items of an array take longer.
    mean: float  # Of the open ranks.
    until: int  # The admission at which `Keeping` looks it up again.


class PoolEntry(Struct, eq=False):
    request: RequestId
    ticket: Ticket
    prompt_tokens: int  # Prompt tokens, and those emitted before a recompute.
    age: int  # Tokens that each sequence emitted before a recompute.
    deadline_ns: int | None  # From then on it goes first; None for never.
    expires_ns: int | None  # When it ends with an error; None for never.
    lease_ends_ns: int | None  # When its KV cache counts as lost; None for never.
    # Ranks to avoid while another one is open, the earliest loss first.
    lost_on: tuple[RankId, ...] = ()
    overtaken: int = 0  # Entries behind it that were admitted while it waited.
    # Past its deadline, the overflow in tokens up to which it goes first.
    overflow_limit: float = inf
    since_ns: int = 0  # When it first entered the pool, unless it has been decoded since.
    home: RankId | None = None  # The rank that it waits for, see `Ticket`; None for none.
    # The only ranks that can use its prefiller's KV cache; None for all.
    partners: frozenset[RankId] | None = None
    # How much of its prompt was on the ranks at the last look; see `Keeping`.
    kept: Kept | None = None
    # These follow from the fields above.
    slots: int = 0  # Its sequences. One free slot is enough to admit it.
    ranks: frozenset[RankId] | None = None  # The only ranks that can serve it; None for all.
    restricted: bool = False  # Whether some open rank may be closed to it.
    kv_tokens: int = 0  # Its load on the rank that admits it.

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


BeyondShares = Callable[[Iterable[Ticket]], Set[str]]
"""Returns those tenants of some requests that a policy holds back; see `HeldShares`."""


class Pool:
    """Entries with deadlines (serve first), expiry and KV leases (both remove).

    Args:
        order: The order of the entries; empty at first.
        beyond_shares: None if tenants share nothing.
    """

    def __init__(self, order: QueueOrder, beyond_shares: BeyondShares | None = None) -> None:
        self._order = order
        self._beyond_shares = beyond_shares
        # The entries, by request, in no order. Read-only.
        self.entries: dict[RequestId, PoolEntry] = {}
        self._deadlines = Timers()
        self._expiries = Timers()
        self._leases = Timers()
        self._closed: set[RankId] = set()
        self.slots = 0  # Slots that all waiting requests need; 0 if none waits.
        self.mean_prompt_tokens = 0.0  # Running mean over the added entries.
        # Entries that left since `begin_round`, in order, and those removed without admission.
        self._round: dict[RequestId, PoolEntry] | None = None
        self._removed: list[RequestId] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter(self.first(len(self)))

    def __contains__(self, request: RequestId) -> bool:
        return request in self.entries

    def add(self, entry: PoolEntry) -> None:
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
        entries = self.entries
        return [entries[request] for request in self._order.first(count)]

    def held_back(self, count: int) -> Set[str]:
        """Return the tenants among the first `count` entries that a policy holds back."""
        if self._beyond_shares is None:
            return frozenset()
        return self._beyond_shares(entry.ticket for entry in self.first(count))

    def at(self, place: int) -> PoolEntry:
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
        """Start to record entries that leave, so that `undo_round` can restore them."""
        self._round = {}
        self._removed = []

    @property
    def taken(self) -> dict[RequestId, PoolEntry]:
        """A copy of the entries that left since `begin_round`."""
        assert self._round is not None, "there is no round"
        return self._round.copy()

    def end_round(self) -> None:
        """Stop to record; the recorded entries stay out."""
        self._round = None

    def undo_round(self) -> None:
        """Restore the entries that left since `begin_round`, as if none had been admitted."""
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


def earliest(*times_ns: int | None) -> int | None:
    """Return the earliest time; None, which stands for never, if there is none."""
    first_ns = None
    for time_ns in times_ns:
        if time_ns is not None and (first_ns is None or time_ns < first_ns):
            first_ns = time_ns
    return first_ns


# The requests that wait for a prefiller, and which of them start.
#
# Direct requests, which a prefiller answers whole, have a queue and a limit of their own, so that they do
# not hold up prefills. Requests that need no prefiller wait here only if the intake limits requests in
# flight, predicts first tokens, or was on hold. Requests that only some prefillers can serve have two such
# queues for each set of prefillers: one that waits holds up later requests only on the prefillers that it
# waits for.


class PrefillQueue:
    """The requests before prefill.

    Args:
        prefillers: Their budgets are charged with each request that starts.
    """

    def __init__(
        self,
        requests: Mapping[RequestId, Request],
        prefillers: Prefillers,
        make_order: MakeStartOrder,
    ) -> None:
        self._requests = requests
        self._prefillers = prefillers
        self._make_order = make_order
        self._queue, self._direct = make_order(), make_order()
        # The same two queues for each set of prefillers. Empty pairs are dropped, so that sets that
        # no longer occur cost nothing.
        self._restricted: dict[frozenset[PrefillerId], tuple[StartOrder, StartOrder]] = {}
        self._expiries = Timers()
        self._dues = Timers()
        self.waiting = 0  # How many requests wait.

    def __contains__(self, request: Request) -> bool:
        if (
            # Checked first, because `_queue_of` creates the queues of a set that has none.
            request.ticket.eligible is not None
            and request.ticket.eligible.prefillers not in self._restricted
        ):
            return False
        return request.request in self._queue_of(request)

    def add(self, request: Request, expires_ns: int | None) -> None:
        """Add a request, also one that was here before."""
        self._queue_of(request).add(request.request, request.ticket)
        self.waiting += 1
        self._expiries.set(request.request, expires_ns)
        if request.due_ns is not None:
            self._dues.set(request.request, request.due_ns)

    def remove(self, request: Request) -> None:
        self._queue_of(request).remove(request.request)
        self._left(request.request)
        self._drop_empty(request)

    def expire_at(self, request: Request, expires_ns: int | None) -> None:
        """Change when a request expires; None for never."""
        self._expiries.set(request.request, expires_ns)

    def next_expiry_ns(self) -> int | None:
        """Return when the first request expires; None for never."""
        return earliest(self._expiries.first_ns(), self._dues.first_ns())

    def ahead(self, ticket: Ticket) -> int:
        """Return about how many requests would start before one that came now."""
        queues = [(self._queue, self._direct)]
        if ticket.eligible is not None and ticket.eligible.prefillers in self._restricted:
            queues.append(self._restricted[ticket.eligible.prefillers])
        return sum(pair[not ticket.decode].ahead(ticket) for pair in queues)

    def take_expired(self, now_ns: int) -> list[RequestId]:
        """Return the requests that have expired, those that are due first; the caller removes them."""
        due, expired = self.take_due(now_ns), self._expiries.take_due(now_ns)
        return due + [one for one in expired if one not in due] if due else expired

    def take_due(self, now_ns: int) -> list[RequestId]:
        """Return the requests whose first token is due, once. The caller removes them."""
        return self._dues.take_due(now_ns)

    def start(self, room: int, now_ns: int) -> Iterator[tuple[Request, PrefillerId | None]]:
        """Yield the requests that the budgets allow to start, removed and charged, in order.

        With each its prefiller; None if it needs none.

        Args:
            room: How many requests may start. Direct requests have a limit of their own.
        """
        if self._restricted:
            yield from self._start_restricted(room, now_ns)
            return
        # Direct requests do not depend on `room`: they never enter the pool.
        while (first := self._direct.head()) is not None:
            request = self._requests[first]
            prefiller = self._begin(request, self._direct, now_ns)
            if prefiller is not None:
                yield request, prefiller
            elif self._prefillers.waits_for_memory(request.ticket.slots):
                # It lacks only KV tokens. Smaller prompts that started now would take them, and
                # overtake it for ever.
                return
            else:
                break
        while room > 0 and (first := self._queue.head()) is not None:
            request = self._requests[first]
            prefiller = self._begin(request, self._queue, now_ns)
            # The rest waits with the first one: smaller prompts would overtake it for ever.
            if prefiller is None and request.ticket.prefill:
                return
            room -= 1
            yield request, prefiller

    def _start_restricted(
        self, room: int, now_ns: int
    ) -> Iterator[tuple[Request, PrefillerId | None]]:
        """Do the same as `start` if only some prefillers can serve some of the requests."""
        # The set of requests without restriction, which hold up later ones on every prefiller.
        everyone = frozenset(map(PrefillerId, range(len(self._prefillers.is_open))))
        # Prefillers that a direct request lacks KV tokens on: prefills must leave them alone.
        starved: set[PrefillerId] = set()
        # In the order of `start`: direct requests, then prefills.
        for direct in (True, False):
            # Prefillers that an earlier request waits for, and the sets whose queues wait.
            withheld = set(starved)
            stuck: list[frozenset[PrefillerId] | None] = []
            while (direct or room > 0) and (head := self._head(stuck, direct=direct)) is not None:
                prefiller = self._begin(head, self._queue_of(head), now_ns, withheld)
                if prefiller is not None or not head.ticket.prefill:
                    self._drop_empty(head)
                    room -= not direct
                    yield head, prefiller
                    continue
                among = None if head.ticket.eligible is None else head.ticket.eligible.prefillers
                stuck.append(among)
                awaited = everyone if among is None else among
                withheld |= awaited
                if direct and self._prefillers.waits_for_memory(head.ticket.slots, among):
                    starved |= awaited

    def _head(
        self, stuck: Collection[frozenset[PrefillerId] | None], *, direct: bool
    ) -> Request | None:
        """Return the request that goes first among the first of all queues that are not stuck."""
        queues = [pair[direct] for among, pair in self._restricted.items() if among not in stuck]
        if None not in stuck:
            queues.append((self._queue, self._direct)[direct])
        heads = [
            (queue.place(head), head) for queue in queues if (head := queue.head()) is not None
        ]
        return self._requests[min(heads)[1]] if heads else None

    def _drop_empty(self, request: Request) -> None:
        if request.ticket.eligible is not None and not any(
            map(len, self._queues_of(request.ticket.eligible))
        ):
            del self._restricted[request.ticket.eligible.prefillers]

    def _begin(
        self,
        request: Request,
        queue: StartOrder,
        now_ns: int,
        withheld: Collection[PrefillerId] = (),
    ) -> PrefillerId | None:
        """Take the first request of a queue out if it can start; return its prefiller, if any."""
        if not request.ticket.prefill:
            queue.serve(request.request)
            self._left(request.request)
            return None
        # No sequences mark a prefill.
        tokens, sequences = request.held_tokens(), 0 if request.decode else request.ticket.slots
        prefiller = self._prefillers.choose(
            PrefillRequest(request.request, request.ticket, tokens, now_ns),
            request.lost_on_prefillers,
            sequences=sequences,
            among=None if request.ticket.eligible is None else request.ticket.eligible.prefillers,
            withheld=withheld,
        )
        if prefiller is not None:
            queue.serve(request.request)
            self._left(request.request)
            if request.decode:
                self._prefillers.begin_prefill(prefiller, tokens)
            else:
                self._prefillers.begin_direct(prefiller, tokens, sequences)
        return prefiller

    def _left(self, number: RequestId) -> None:
        self.waiting -= 1
        self._expiries.clear(number)
        self._dues.clear(number)

    def _queue_of(self, request: Request) -> StartOrder:
        if request.ticket.eligible is not None:
            return self._queues_of(request.ticket.eligible)[not request.decode]
        return self._queue if request.decode else self._direct

    def _queues_of(self, eligible: Eligible) -> tuple[StartOrder, StartOrder]:
        queues = self._restricted.get(eligible.prefillers)
        if queues is None:
            queues = self._make_order(), self._make_order()
            self._restricted[eligible.prefillers] = queues
        return queues

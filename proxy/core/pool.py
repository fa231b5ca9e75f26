"""The prompt pool: requests that wait for a decode slot, in a queue order.

The pool keeps for each entry how often it was **overtaken**, that is, how many entries behind it were
admitted while it waited. Unlike a waiting time this does not depend on the load: it is what a
free choice among the pooled requests costs this one request compared with first come, first served.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.queueing import QueueOrder
from balanceroute.proxy.core.timers import Timers

# Weight of one more arrival in the running mean of prompt lengths: remembers about 128 arrivals.
_MEAN_WEIGHT = 1 / 128


@dataclass(slots=True, eq=False)
class PoolEntry:
    """One waiting request.

    Attributes:
        request: Its number.
        ticket: What was known of it when it came.
        prompt_tokens: Tokens of its prompt, and of what it emitted before a recompute.
        age: Tokens that a sequence of it emitted before a recompute.
        deadline_ns: When it goes first; None for never.
        expires_ns: When it is given up; None for never.
        lease_ends_ns: When its KV cache counts as lost; None for never.
        lost_on: Ranks that it must not go to while others are open, the earliest loss first.
        overtaken: Entries behind it that were admitted while it waited.
        slots: Sequences that it runs. One free slot is enough for it to go to a rank.
        ranks: The only ranks that can serve it; None for all.
        restricted: Whether it may not go to every open rank.
        kv_tokens: What it adds to the load of the rank that takes it.
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
    slots: int = field(init=False)
    ranks: frozenset[RankId] | None = field(init=False)
    restricted: bool = field(init=False)
    kv_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        eligible = self.ticket.eligible
        self.slots = self.ticket.slots
        self.ranks = None if eligible is None else eligible.ranks
        self.restricted = bool(self.lost_on) or self.ranks is not None
        self.kv_tokens = self.prompt_tokens * self.slots


class Pool:
    """Entries with deadlines (serve first), expiry and KV leases (both remove).

    Args:
        order: Empty.

    Attributes:
        slots: Slots that the waiting requests want.
        mean_prompt_tokens: Running mean over the entries that were added.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._entries: dict[RequestId, PoolEntry] = {}
        self._deadlines = Timers()
        self._expiries = Timers()
        self._leases = Timers()
        self.slots = 0
        self.mean_prompt_tokens = 0.0
        # What left since `begin_round`, in order; and who of them without being admitted.
        self._round: dict[RequestId, PoolEntry] | None = None
        self._removed: list[RequestId] = []

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._entries)

    def __iter__(self) -> Iterator[PoolEntry]:
        """Iterate in order."""
        return iter(self.first(len(self)))

    def __contains__(self, request: RequestId) -> bool:
        """Return whether `request` waits here."""
        return request in self._entries

    def add(self, entry: PoolEntry) -> None:
        """Insert `entry` at its place in the order."""
        assert entry.request not in self._entries, f"request {entry.request} is pooled twice"
        self._order.add(entry.request, entry.ticket)
        self._entries[entry.request] = entry
        self._set_timers(entry)
        self.slots += entry.slots
        if self.mean_prompt_tokens == 0.0:
            self.mean_prompt_tokens = float(entry.prompt_tokens)
        else:
            self.mean_prompt_tokens += _MEAN_WEIGHT * (
                entry.prompt_tokens - self.mean_prompt_tokens
            )

    def replace(self, entry: PoolEntry) -> None:
        """Give a waiting request new times; it keeps its place and its overtakings."""
        entry.overtaken = self._entries[entry.request].overtaken
        self._entries[entry.request] = entry
        self._set_timers(entry)

    def first(self, count: int) -> list[PoolEntry]:
        """Return the first `count` entries in order."""
        entries = self._entries
        return [entries[request] for request in self._order.first(count)]

    def at(self, place: int) -> PoolEntry:
        """Return an entry by its place in the order."""
        return self._entries[self._order.first(place + 1)[place]]

    def admit(self, request: RequestId) -> PoolEntry:
        """Remove an entry that goes to decode; every entry ahead was overtaken once more."""
        for ahead in self._order.ahead_of(request):
            self._entries[ahead].overtaken += 1
        return self._take_out(request)

    def remove(self, request: RequestId) -> PoolEntry:
        """Remove an entry for any other reason."""
        entry = self._take_out(request)
        if self._round is not None:
            self._removed.append(request)
        return entry

    def begin_round(self) -> None:
        """Begin to note what leaves, so that `undo_round` can bring it back."""
        self._round = {}
        self._removed = []

    @property
    def taken(self) -> dict[RequestId, PoolEntry]:
        """What left since `begin_round`; a copy."""
        assert self._round is not None, "there is no round"
        return self._round.copy()

    def end_round(self) -> None:
        """Note no more; what left stays out."""
        self._round = None

    def undo_round(self) -> None:
        """Bring back what left since `begin_round`, as if it had never been admitted."""
        left, self._round = self._round, None
        assert left is not None, "there is no round to undo"
        for request, entry in reversed(left.items()):
            self._order.add(request, entry.ticket)
            self._entries[request] = entry
            self._set_timers(entry)
            self.slots += entry.slots
            if request not in self._removed:
                for ahead in self._order.ahead_of(request):
                    self._entries[ahead].overtaken -= 1

    def overdue(self, now_ns: int) -> list[PoolEntry]:
        """Return the entries past their deadline, oldest first. They stay in the pool."""
        return [self._entries[request] for request in sorted(self._deadlines.due(now_ns))]

    def expired(self, now_ns: int) -> list[RequestId]:
        """Return the entries whose time to live is over. The caller removes them."""
        return self._expiries.take_due(now_ns)

    def lapsed(self, now_ns: int) -> list[RequestId]:
        """Return the entries whose KV lease must not be used any more. The caller removes them."""
        return self._leases.take_due(now_ns)

    def next_removal_ns(self) -> int | None:
        """Return when the next entry expires or its lease lapses; None for never."""
        expiry_ns, lease_ns = self._expiries.first_ns(), self._leases.first_ns()
        if expiry_ns is None or lease_ns is None:
            return lease_ns if expiry_ns is None else expiry_ns
        return min(expiry_ns, lease_ns)

    def _set_timers(self, entry: PoolEntry) -> None:
        self._deadlines.set(entry.request, entry.deadline_ns)
        self._expiries.set(entry.request, entry.expires_ns)
        self._leases.set(entry.request, entry.lease_ends_ns)

    def _take_out(self, request: RequestId) -> PoolEntry:
        self._order.remove(request)
        self._deadlines.clear(request)
        self._expiries.clear(request)
        self._leases.clear(request)
        entry = self._entries.pop(request)
        self.slots -= entry.slots
        if self._round is not None:
            self._round[request] = entry
        return entry

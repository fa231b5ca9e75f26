"""The interface of a policy: what it sees, what it returns, and what must hold.

A new policy is one new file here and a line in the registry: a class with the members of `Policy`,
or only a choice of rank for `OldestFirst`. A policy never uses a clock, a socket, a log or an
unseeded generator.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.ledger import BoundRequest, Follower, Turnover
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.rank_memory import Keeping
from balanceroute.proxy.core.warm_up import allowed

# Stands for "no limit" in `Fleet.free_slots` and `Fleet.free_kv_tokens`.
UNLIMITED = 1 << 62


class Fleet(Struct, eq=False):
    """The decode ranks as a policy sees them.

    The policy owns this copy and may write to it, except to `is_open`.

    Attributes:
        is_open: bool[G], whether each rank takes new requests.
        loads: int64[G], KV tokens of the bound requests, and of those that others have there.
        bound: int64[G], slots of the same.
        free_slots: int64[G], slots that are still free, at least 0; 0 if the rank is closed.
        free_kv_tokens: int64[G], KV tokens that still fit.
        requests: Returns the bound requests, in O(requests); without those of this round.
        turnover: How fast requests leave the ranks. Read-only.
        speeds: float64[G], KV tokens that each rank reads in the same time, 1 on average; None if
            all are equally fast.
        room_after: Admits an entry to a rank, and returns the KV tokens that then still fit; None if
            it takes its own.
        others_kv_tokens: int64[G], what the requests of others hold; None if there are none.
        keeping: What the ranks have of prompts; None if nobody remembers that.
        closes: Whether a rank without a free slot closes: of a policy that binds early, those that have
            few slots began lately.
    """

    is_open: NDArray[np.bool_]
    loads: NDArray[np.int64]
    bound: NDArray[np.int64]
    free_slots: NDArray[np.int64]
    free_kv_tokens: NDArray[np.int64]
    requests: Callable[[], list[BoundRequest]] = list
    turnover: Turnover = field(default_factory=Turnover)
    speeds: NDArray[np.float64] | None = None
    room_after: Callable[[int, PoolEntry], int] | None = None
    others_kv_tokens: NDArray[np.int64] | None = None
    keeping: Keeping | None = None
    closes: bool = False

    @property
    def free(self) -> int:
        """All free slots."""
        # `ndarray.sum` takes ten times as long for a few ranks.
        return sum(self.free_slots.tolist())

    def share(self, slots: NDArray[np.int64], kv_tokens: NDArray[np.int64]) -> None:
        """Add what others have on the ranks; `free_slots` knows it already.

        Args:
            slots: int64[G], the slots of their requests.
            kv_tokens: int64[G], what those hold.
        """
        self.others_kv_tokens = kv_tokens
        self.loads += kv_tokens
        self.bound += slots
        self.free_kv_tokens = self.free_kv_tokens - kv_tokens

    def room(self, rank: int) -> int:
        """Return the KV tokens of the largest request that fits on `rank`; slots do not count.

        A request larger than a whole rank may go to an empty one: it fails there with the engine's
        own error instead of waiting for ever.
        """
        return int(self.free_kv_tokens[rank]) if self.bound[rank] else UNLIMITED

    def allowed(self, entry: PoolEntry) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank is open, can serve the entry and need not be avoided.

        Room does not count. Read-only.
        """
        # Almost every entry; the rest is Python code per rank.
        if not entry.restricted:
            return self.is_open
        is_open = self.is_open
        if entry.ranks is not None:
            is_open = is_open & self.able(entry.ranks)
        return np.array(allowed(is_open.tolist(), entry.lost_on))

    def able(self, ranks: frozenset[RankId]) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank is one of `ranks`."""
        return np.array([rank in ranks for rank in range(len(self.is_open))], np.bool_)

    def has_room(self, entry: PoolEntry) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank is open, able, and has a slot and memory for an entry.

        One slot is enough: further sequences of the request wait in the engine. Read-only.
        """
        slots, memory = self.free_slots, self.free_kv_tokens
        if slots[slots.argmin()] > 0 and memory[memory.argmin()] >= entry.kv_tokens:
            room = self.is_open  # All of them are.
        else:
            # An empty rank takes any request, see `room`.
            room = (slots > 0) & ((memory >= entry.kv_tokens) | (self.bound == 0))
        return room if entry.ranks is None else room & self.able(entry.ranks)

    def open_to(self, entry: PoolEntry) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank has room for an entry and need not be avoided."""
        if not entry.lost_on:
            return self.has_room(entry)
        return self.has_room(entry) & self.allowed(entry)

    def bind(self, rank: int, entry: PoolEntry) -> None:
        """Charge an admitted request."""
        self.loads[rank] += entry.kv_tokens
        self.bound[rank] += entry.slots
        # A request of several sequences may need more slots than are free.
        self.free_slots[rank] = max(0, int(self.free_slots[rank]) - entry.slots)
        if self.closes:
            self.is_open[rank] &= self.free_slots[rank] > 0
        if self.room_after is None:
            self.free_kv_tokens[rank] -= entry.kv_tokens
        else:
            room = self.room_after(rank, entry)
            shared = self.others_kv_tokens
            self.free_kv_tokens[rank] = room if shared is None else room - int(shared[rank])


def lowest(values: NDArray[np.int64] | NDArray[np.float64], among: NDArray[np.bool_]) -> int | None:
    """Return the rank in `among` with the lowest value; on a tie the lowest rank. None if empty."""
    # The usual case needs no copy; `argmin` returns the first of equal values.
    if among.all():
        return int(values.argmin())
    if not among.any():
        return None
    return int(np.where(among, values, UNLIMITED).argmin())


class Assignment(NamedTuple):
    """Admit `request` to `rank`."""

    request: RequestId
    rank: RankId


class Policy(Protocol):
    """Decides which pooled requests go to which ranks."""

    @property
    def slots_beyond_batch(self) -> int | None:
        """How many slots beyond its batch limit a rank may get; None for any number.

        0 means late binding: a request stays in the pool until a slot is free. None means early
        binding: a request is sent at once and queues in the engine.
        """
        ...

    @property
    def projection(self) -> Follower | None:
        """What the ledger keeps up to date for this policy, usually a projection; None for nothing."""
        ...

    @property
    def next_decision_ns(self) -> int | None:
        """When to decide again if nothing happens before, as of the last `dispatch`; None for never.

        For an entry that is held although it could be admitted: a `Tick` at this time ends its hold.
        """
        ...

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Return the admissions to make now, and take each admitted entry out of `pool`.

        Called at each tick at which the pool is not empty. May return none. An entry may only go to
        a rank that is open to it (`Fleet.open_to`, after the admissions before it).
        """
        ...


class OldestFirst:
    """A policy that takes requests in order and only chooses the rank of each.

    Args:
        choose: Returns the rank for an entry, or None if it has to wait; the rest then waits too.
        slots_beyond_batch: See `Policy`.
    """

    projection = None
    next_decision_ns = None

    def __init__(
        self,
        choose: Callable[[Fleet, PoolEntry], int | None],
        *,
        slots_beyond_batch: int | None,
    ) -> None:
        self.slots_beyond_batch = slots_beyond_batch
        self._choose = choose

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind entries in order of arrival until one has to wait.

        An entry that waits only because it avoids the ranks that lost it does not hold up the rest.
        One that only some ranks can serve holds up the rest on these ranks.
        """
        del now_ns
        assignments: list[Assignment] = []
        # Entries before this position stay in the pool for this round.
        passed_over = 0
        while passed_over < len(pool):
            entry = pool.at(passed_over)
            rank = self._choose(fleet, entry)
            if rank is not None:
                pool.admit(entry.request)
                fleet.bind(rank, entry)
                assignments.append(Assignment(entry.request, RankId(rank)))
            # It avoids the only ranks with room, which are open to the others.
            elif fleet.has_room(entry).any():
                passed_over += 1
            elif entry.ranks is not None:
                # Its ranks take no later entry, or smaller ones would overtake it for ever.
                fleet.free_slots[fleet.able(entry.ranks)] = 0
                if not fleet.free_slots.any():
                    break
                passed_over += 1
            # No rank has room for it. A smaller entry behind it may not go first: it would starve.
            else:
                break
        return assignments

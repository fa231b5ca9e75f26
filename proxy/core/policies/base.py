"""What a policy sees, what it answers, and the contract between.

A new policy is one new file here and a line in the registry: a class with the members of `Policy`,
or just a choice of rank for `OldestFirst`. A policy never sees a clock, a socket, a log or an
unseeded generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.projection import Projection

# Stands for "no limit" in `Fleet.free_slots` and `Fleet.free_kv_tokens`.
UNLIMITED = 1 << 62


@dataclass(slots=True)
class Fleet:
    """The decode ranks as a policy sees them. The policy owns this copy and may write to it.

    Attributes:
        loads: int64[G], KV tokens of the bound requests.
        bound: int64[G], requests bound.
        free_slots: int64[G], requests that may still be bound.
        free_kv_tokens: int64[G], KV tokens that still fit.
    """

    loads: NDArray[np.int64]
    bound: NDArray[np.int64]
    free_slots: NDArray[np.int64]
    free_kv_tokens: NDArray[np.int64]

    def room(self, rank: int) -> int:
        """Return the KV tokens of the largest request that `rank` can take, slots aside.

        A request larger than a whole rank may go to an empty one: it fails there with the engine's
        own error instead of waiting forever.
        """
        return int(self.free_kv_tokens[rank]) if self.bound[rank] else UNLIMITED

    def open_to(self, kv_tokens: int) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank has a slot and room for a request."""
        room = (self.free_kv_tokens >= kv_tokens) | (self.bound == 0)
        return np.asarray((self.free_slots > 0) & room)

    def bind(self, rank: int, kv_tokens: int) -> None:
        """Account for one more request."""
        self.loads[rank] += kv_tokens
        self.bound[rank] += 1
        self.free_slots[rank] -= 1
        self.free_kv_tokens[rank] -= kv_tokens


class Assignment(NamedTuple):
    """Admit `request` to `rank`."""

    request: RequestId
    rank: RankId


class Policy(Protocol):
    """Decides which pooled requests go to which ranks."""

    @property
    def slots_beyond_batch(self) -> int | None:
        """How many requests beyond its batch limit a rank may be sent; None for any number.

        0 means late binding: a request stays in the pool until a slot is free. None means early
        binding: a request is sent at once and queues in the engine.
        """
        ...

    @property
    def projection(self) -> Projection | None:
        """The projection that the scheduler keeps up to date for this policy, if it needs one."""
        ...

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Return the admissions to make now, taking each admitted entry out of `pool`.

        Called whenever the pool is not empty. May return nothing.
        """
        ...


class OldestFirst:
    """A policy that takes the requests as they come and only chooses the rank of each.

    Args:
        choose: Returns the rank for an entry, or None if it has to wait; then so does the rest.
        slots_beyond_batch: See `Policy`.
    """

    projection = None

    def __init__(
        self,
        choose: Callable[[Fleet, PoolEntry], int | None],
        *,
        slots_beyond_batch: int | None,
    ) -> None:
        self.slots_beyond_batch = slots_beyond_batch
        self._choose = choose

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind entries in order of arrival until one has to wait."""
        del now_ns
        assignments: list[Assignment] = []
        while len(pool):
            entry = pool.oldest(1)[0]
            rank = self._choose(fleet, entry)
            if rank is None:
                break
            pool.admit(entry.request)
            fleet.bind(rank, entry.prompt_tokens)
            assignments.append(Assignment(entry.request, RankId(rank)))
        return assignments

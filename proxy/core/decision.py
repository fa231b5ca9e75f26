"""One round of admissions: decided by the policy, or oldest first if it fails.

A policy takes entries out of the pool while it decides. If it raises halfway, or if its decision
cannot be carried out, all of them are put back: a round takes effect as a whole or not at all.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.errors import PolicyError
from balanceroute.proxy.core.policies.base import Assignment, Fleet, OldestFirst, Policy
from balanceroute.proxy.core.policies.fifo import least_kv_with_room
from balanceroute.proxy.core.pool import Pool

OnFailure = Callable[[str, Exception], None]
"""Called with what failed ("policy" or "projection") and the exception."""

# Without a projection or any state, so it does not fail for the same reason.
_OLDEST_FIRST = OldestFirst(least_kv_with_room, slots_beyond_batch=0)


def decide(
    policy: Policy,
    make_fleet: Callable[[], Fleet],
    pool: Pool,
    now_ns: int,
    *,
    on_failure: OnFailure,
) -> list[Assignment]:
    """Return the admissions to make now, whose entries have left the pool.

    Args:
        policy: Decides the round.
        make_fleet: Returns the ranks as they are now.
        pool: Not empty. Restored if the policy fails.
        now_ns: For deadlines.
        on_failure: Called if the policy fails. The round is then decided oldest first: each request
            goes to the least loaded rank with room.
    """
    fleet = make_fleet()
    # The policy may write to its fleet, so the check needs its own copy.
    free_slots = fleet.free_slots.copy()
    pool.begin_round()
    try:
        assignments = policy.dispatch(fleet, pool, now_ns)
        _check(assignments, free_slots, pool)
    # Any exception: a policy may be third-party code, and no request may be lost by its failure.
    except Exception as error:
        # First, as `on_failure` may raise.
        pool.undo_round()
        on_failure("policy", error)
        # Another fleet: the policy may have written to the first one.
        return _OLDEST_FIRST.dispatch(make_fleet(), pool, now_ns)
    pool.end_round()
    return assignments


def _check(assignments: Sequence[Assignment], free_slots: NDArray[np.int64], pool: Pool) -> None:
    """Reject a decision that cannot be carried out.

    Raises:
        PolicyError: An entry or a rank is unknown, a rank has no slot or cannot serve the entry, or
            an entry was taken and not assigned.
    """
    taken, ranks = pool.taken, len(free_slots)
    free: dict[int, int] = {}
    for number, rank in assignments:
        entry = taken.pop(number, None)
        if entry is None:
            raise PolicyError(f"request {number!r} was not taken from the pool, or is there twice")
        if not 0 <= rank < ranks:
            raise PolicyError(f"rank {rank!r} is unknown: there are {ranks}")
        if entry.ranks is not None and rank not in entry.ranks:
            raise PolicyError(f"rank {rank} cannot serve request {number}")
        # One free slot is enough, so the last request of a rank may take the count below 0.
        left = free[rank] if rank in free else free_slots.item(rank)
        if left < 1:
            raise PolicyError(f"rank {rank} is closed or has no slot for request {number}")
        free[rank] = left - entry.slots
    # Neither in the pool nor on a rank, such an entry would be lost.
    for number in taken:
        raise PolicyError(f"request {number} was taken from the pool, but has no rank")

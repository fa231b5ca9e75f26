"""Requests in order: `fifo`, a scheduler's fallback, and the base of the policies of `baselines.py`."""

from collections.abc import Callable

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.ranks import Assignment, Fleet, lowest
from balanceroute.proxy.core.waiting import Pool, PoolEntry

# `fifo`: late binding without a choice of request: the oldest goes to the least-loaded rank.
#
# It has the pool of BR-0 and its view of the loads, but admits requests in order. So the
# difference to BR-0 is the value of choosing the request.


def least_kv_with_room(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the least-loaded rank that is open to the entry; on a tie the lowest."""
    return lowest(fleet.loads, fleet.open_to(entry))


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
            # It avoids the only ranks with room, which are open to later entries.
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

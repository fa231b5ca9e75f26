"""No choice: one rank has free slots, and there is room on it for everything that waits.

So it is in a fleet of one rank until its slots are taken. Stage 1 would come to the same, at the cost
of projected loads that decide nothing.
"""

from operator import attrgetter

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.policies.base import Assignment, Fleet
from balanceroute.proxy.core.policies.two_stage.stage_1 import largest_first
from balanceroute.proxy.core.pool import Pool

_KV_TOKENS, _RESTRICTED = attrgetter("kv_tokens"), attrgetter("restricted")


def fill_only_rank(fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment] | None:
    """Admit everything that waits; None, with nothing admitted, if there is a choice.

    Not where requests may be held.

    Args:
        fleet: The ranks; at least one has a free slot.
        pool: What waits.
        now_ns: For deadlines: an entry that is late may have to go first, or not at all.
    """
    (ranks,) = fleet.free_slots.nonzero()
    if len(ranks) > 1 or fleet.room_after is not None:
        return None
    rank = RankId(ranks.item(0))
    if pool.slots > fleet.free_slots.item(rank) or pool.overdue(now_ns):
        return None
    entries = pool.first(len(pool.entries))
    fits = sum(map(_KV_TOKENS, entries)) <= fleet.free_kv_tokens.item(rank)
    if not fits or any(map(_RESTRICTED, entries)):
        return None
    if len(entries) > 1:
        entries.sort(key=largest_first)
    requests = [entry.request for entry in entries]
    pool.admit_all(requests)
    return [Assignment(request, rank) for request in requests]

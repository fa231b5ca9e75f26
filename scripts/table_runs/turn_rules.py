"""Other rules for later turns, as policies of the simulator: `--policy turn_rules:sticky` and so on.

They see what the price sees: how many tokens of a prompt's beginning each rank has.
"""

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.policies import Fleet, Policy, PolicyInputs
from balanceroute.proxy.core.policies.base import Assignment, OldestFirst, lowest
from balanceroute.proxy.core.pool import Pool, PoolEntry

# SMG: queues whose lengths differ by more are evened out first. Theirs is 64, beyond any batch of ours.
_LONGER, _TIMES_LONGER = 8, 1.5
# SMG: the least share of a prompt that is followed.
_MATCH = 0.3
# Tokens of a beginning that conversations may share, as a system prompt: affinity alone follows longer ones.
_SHARED = 2_560


def kept_tokens(fleet: Fleet, entry: PoolEntry) -> NDArray[np.float64]:
    """Return float64[G], the tokens of a prompt that each rank has."""
    if fleet.keeping is None:
        return np.zeros(len(fleet.loads))
    return np.array(fleet.keeping.of(entry).tokens, np.float64)


class Sticky:
    """Affinity alone: a turn waits for the rank with most of its prompt, whatever its load.

    A conversation begins on the rank with a free slot and the fewest tokens.
    """

    projection = None
    next_decision_ns = None
    slots_beyond_batch = 0

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind entries in order of arrival; one whose rank is full is passed over."""
        del now_ns
        assignments: list[Assignment] = []
        if not fleet.free:
            return assignments
        for entry in list(pool):
            kept = np.maximum(kept_tokens(fleet, entry), _SHARED)
            home = int(kept.argmax())
            best = kept == kept[home]
            if not fleet.free_slots[home] and np.count_nonzero(best) == 1:
                continue
            rank = lowest(fleet.loads, fleet.has_room(entry) & best)
            if rank is not None:
                pool.admit(entry.request)
                fleet.bind(rank, entry)
                assignments.append(Assignment(entry.request, RankId(rank)))
        return assignments


def sticky(inputs: PolicyInputs) -> Policy:
    """Return affinity alone."""
    del inputs
    return Sticky()


def cache_aware(inputs: PolicyInputs) -> Policy:
    """Return SMG's `cache_aware`: the longest match while queues are even, else the shortest queue.

    Source: https://github.com/lightseekorg/smg, model_gateway/src/policies/cache_aware.rs.
    """
    del inputs

    def choose(fleet: Fleet, entry: PoolEntry) -> int | None:
        queues, able = fleet.bound, fleet.allowed(entry)
        most, least = int(queues.max()), int(queues.min())
        kept = kept_tokens(fleet, entry)
        uneven = most - least > _LONGER and most > _TIMES_LONGER * least
        if uneven or kept.max() <= _MATCH * entry.prompt_tokens:
            return lowest(queues, able)
        return lowest(-kept, able)

    return OldestFirst(choose, slots_beyond_batch=None)


def overlap_and_load(inputs: PolicyInputs) -> Policy:
    """Return the rule of Dynamo's KV router with overlap: the fewest tokens to bring and to hold.

    Source: https://github.com/ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs.
    """
    del inputs

    def choose(fleet: Fleet, entry: PoolEntry) -> int | None:
        missing = entry.prompt_tokens - kept_tokens(fleet, entry)
        return lowest(fleet.loads + missing, fleet.allowed(entry))

    return OldestFirst(choose, slots_beyond_batch=None)

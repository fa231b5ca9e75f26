"""`cache-aware`: vllm-router's rule: the longest cached prefix, unless loads differ a lot.

If the busiest candidate works on over 64 requests more than the least busy one, and on over 1.5 times
as many, the least busy one takes the request. Else the one that was given the longest beginning of the
prompt does, if that is over 0.3 of it; else the least busy one. Theirs matches characters, in a tree
that all workers share; here the unit is a block.

Source: https://github.com/vllm-project/router, src/policies/cache_aware.rs at 16917f49522f.
"""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView, Turns
from balanceroute.proxy.core.prefill.least_conn import under_way
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory

_CACHE_THRESHOLD = 0.3
_BALANCE_ABS_THRESHOLD = 64
_BALANCE_REL_THRESHOLD = 1.5


class CacheAware:
    """The candidate with the longest cached prefix or the fewest requests.

    Args:
        index_blocks: Blocks that are remembered of each prefiller.
    """

    observer = None

    def __init__(self, index_blocks: int) -> None:
        self._memory = PrefixMemory(index_blocks)
        self._turns = Turns()

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the candidate by the rule above; equal ones take turns."""
        busy = {prefiller: under_way(view, prefiller) for prefiller in candidates}
        most, least = max(busy.values()), min(busy.values())
        expected = self._memory.expect(request, candidates)
        longest = max(found.cached_tokens for found in expected.values())
        imbalanced = most - least > _BALANCE_ABS_THRESHOLD and most > _BALANCE_REL_THRESHOLD * least
        if imbalanced or longest <= _CACHE_THRESHOLD * request.tokens:
            chosen = self._turns.least(candidates, busy.__getitem__)
        else:
            chosen = self._turns.least(candidates, lambda one: -expected[one].cached_tokens)
        self._memory.add(request, chosen)
        return chosen

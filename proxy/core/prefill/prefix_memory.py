"""What each prefiller is expected to find in its prefix cache, from the prompts that it was given."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from balanceroute.proxy.core.events import PrefillDone, PrefillerId, RequestId
from balanceroute.proxy.core.prefill.base import PrefillRequest
from balanceroute.proxy.core.prefill.block_index import BlockIndex, block_keys

# A prefiller that found nothing of what it was given last so often in a row has lost its cache.
_MISSES = 2


class Expected(NamedTuple):
    """What a prefiller should find of a request.

    Attributes:
        cached_tokens: Tokens that it need not compute.
        table: The table of its index that says so.
    """

    cached_tokens: int
    table: int


class PrefixMemory:
    """The indices of all prefillers, corrected by what engines report to have found.

    Args:
        blocks: Blocks that are remembered of each prefiller.
    """

    def __init__(self, blocks: int) -> None:
        self._indices: defaultdict[PrefillerId, BlockIndex] = defaultdict(
            lambda: BlockIndex(blocks)
        )
        self._running: dict[RequestId, tuple[PrefillerId, Expected]] = {}
        self._misses: defaultdict[PrefillerId, int] = defaultdict(int)

    def expect(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId]
    ) -> dict[PrefillerId, Expected]:
        """Return what each candidate should find of a request."""
        ticket = request.ticket
        if not ticket.blocks:
            return dict.fromkeys(candidates, Expected(0, 0))
        keys = block_keys(ticket.blocks).tolist()
        found: dict[PrefillerId, Expected] = {}
        for prefiller in candidates:
            known, table = self._indices[prefiller].leading(keys)
            # The last token is always computed: its output is the answer's first token.
            tokens = min(round(known * ticket.block_tokens), request.tokens - 1)
            found[prefiller] = Expected(tokens, table)
        return found

    def add(self, request: PrefillRequest, prefiller: PrefillerId) -> None:
        """Note that a prefiller takes a request, and so has its blocks soon."""
        if request.ticket.blocks:
            self._indices[prefiller].add(block_keys(request.ticket.blocks))

    def watch(self, request: RequestId, prefiller: PrefillerId, expected: Expected) -> None:
        """Expect `ended` for a request that was added."""
        self._running[request] = prefiller, expected

    def ended(self, request: RequestId, done: PrefillDone | None) -> None:
        """Compare what was found with what was expected; None if the prefill was lost.

        An engine drops the blocks first that were not used for longest. So one that finds less than
        half has dropped what was given to it in that time, and before it.
        """
        prefiller, expected = self._running.pop(request, (None, None))
        if prefiller is None or expected is None or done is None or done.cached_tokens is None:
            return
        if 2 * done.cached_tokens >= expected.cached_tokens:
            self._misses[prefiller] = 0
            return
        index = self._indices[prefiller]
        if expected.table < index.newest:
            index.drop(expected.table)
        elif done.cached_tokens == 0:
            # Not at once: of two prompts of a batch the second may miss what the first computes.
            self._misses[prefiller] += 1
            if self._misses[prefiller] >= _MISSES:
                index.drop(index.newest)
                self._misses[prefiller] = 0

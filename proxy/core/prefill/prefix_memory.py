"""What each prefiller is expected to find in its prefix cache.

From the prompts that it was given, or from what it tells itself of its blocks, if it does.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from balanceroute.proxy.core.events import PrefillDone, PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.base import PrefillRequest
from balanceroute.proxy.core.prefill.block_index import BlockIndex, block_keys
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge
from balanceroute.proxy.core.prefill.heard_prefixes import HeardPrefixes

# A prefiller that found nothing of what it was given last so often in a row has lost its cache.
_MISSES = 2
# In place of a table: the prefiller told it.
_TOLD = -1


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
        engines: What prefillers tell of their blocks; None if nobody listens.
    """

    def __init__(self, blocks: int, engines: EngineBlocks | None = None) -> None:
        self._heard = None if engines is None else HeardPrefixes(engines)
        self._resets: defaultdict[PrefillerId, int] = defaultdict(int)
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
        told = () if self._heard is None else self._heard.engines.beginning(ticket)
        found: dict[PrefillerId, Expected] = {}
        for prefiller in candidates:
            known, table = self._leading(prefiller, ticket, keys, told)
            # The last token is always computed: its output is the answer's first token.
            found[prefiller] = Expected(min(known, request.tokens - 1), table)
        return found

    def _leading(
        self, prefiller: PrefillerId, ticket: Ticket, keys: list[int], told: Sequence[int]
    ) -> tuple[int, int]:
        """Return how many of a prompt's first tokens a prefiller should have, and the table."""
        heard = self._heard
        if heard is None:
            return self._given(prefiller, ticket, keys)
        resets = heard.engines.resets(prefiller)
        if resets != self._resets[prefiller]:
            self._resets[prefiller] = resets
            self._indices.pop(prefiller, None)
        knowledge = heard.engines.knowledge(prefiller)
        if knowledge is Knowledge.NONE or not told:
            return self._given(prefiller, ticket, keys)
        there, whole = heard.cached(prefiller, told)
        coming = round(heard.coming(prefiller, keys) * ticket.block_tokens)
        expected = max(there, coming), _TOLD
        if knowledge is Knowledge.ALL and (ticket.token_blocks or not whole):
            return expected
        # Of a text, what follows the part whose tokens are known may be there too.
        return max(self._given(prefiller, ticket, keys), expected)

    def _given(self, prefiller: PrefillerId, ticket: Ticket, keys: list[int]) -> tuple[int, int]:
        """Return the same by the prompts that it was given."""
        known, table = self._indices[prefiller].leading(keys)
        return round(known * ticket.block_tokens), table

    def add(self, request: PrefillRequest, prefiller: PrefillerId) -> None:
        """Note that a prefiller takes a request, and so has its blocks soon."""
        if request.ticket.blocks:
            self._indices[prefiller].add(block_keys(request.ticket.blocks))

    def watch(self, request: PrefillRequest, prefiller: PrefillerId, expected: Expected) -> None:
        """Expect `ended` for a request that was added."""
        self._running[request.request] = prefiller, expected
        if self._heard is not None:
            self._heard.begin(request.request, prefiller, request.ticket)

    def ended(self, request: RequestId, done: PrefillDone | None) -> None:
        """Compare what was found with what was expected; None if the prefill was lost.

        An engine drops the blocks first that were not used for longest. So one that finds less than
        half has dropped what was given to it in that time, and before it.
        """
        if self._heard is not None:
            self._heard.end(request)
        prefiller, expected = self._running.pop(request, (None, None))
        if prefiller is None or expected is None or done is None or done.cached_tokens is None:
            return
        if expected.table == _TOLD:
            return  # It corrects itself.
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

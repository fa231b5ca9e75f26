"""What prefillers tell of their caches, and the prompts on their way there, which they cannot tell yet."""

from collections import Counter, defaultdict

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.block_index import BlockIndex, block_keys
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge

# Blocks of prompts on their way to one prefiller that are remembered. They are forgotten together when
# the last one of a quarter is there.
_PENDING = 1 << 16


class HeardPrefixes:
    """How many of a prompt's blocks each prefiller has or will have.

    Args:
        engines: What they tell.
    """

    def __init__(self, engines: EngineBlocks) -> None:
        self.engines = engines
        self._pending: defaultdict[PrefillerId, BlockIndex] = defaultdict(
            lambda: BlockIndex(_PENDING)
        )
        # Running requests by table of those.
        self._under_way: defaultdict[PrefillerId, Counter[int]] = defaultdict(Counter)
        self._tables: dict[RequestId, tuple[PrefillerId, int]] = {}

    def leading(self, prefiller: PrefillerId, ticket: Ticket, keys: list[int]) -> int:
        """Return how many of a prompt's first blocks are there or will be; `keys` are its own."""
        there = self.engines.leading(prefiller, ticket.blocks)
        return max(there, self._pending[prefiller].leading(keys)[0])

    def knowledge(self, prefiller: PrefillerId, ticket: Ticket) -> Knowledge:
        """Return how much of a prompt a prefiller's events tell."""
        return self.engines.knowledge(prefiller) if ticket.token_blocks else Knowledge.NONE

    def begin(self, request: RequestId, prefiller: PrefillerId, ticket: Ticket) -> None:
        """Note that a request goes to a prefiller."""
        if ticket.token_blocks:
            pending = self._pending[prefiller]
            pending.add(block_keys(ticket.blocks))
            self._under_way[prefiller][pending.newest] += 1
            self._tables[request] = prefiller, pending.newest

    def end(self, request: RequestId) -> None:
        """Note that its prefill ended: what it stored was told."""
        prefiller, table = self._tables.pop(request, (None, 0))
        if prefiller is None:
            return
        under_way = self._under_way[prefiller]
        under_way[table] -= 1
        under_way += Counter()  # Without those of which none is left.
        oldest = min(under_way, default=table + 1)
        self._pending[prefiller].drop(oldest - 1)

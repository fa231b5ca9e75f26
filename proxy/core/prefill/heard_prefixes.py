"""What prefillers tell of their caches, and the prompts on their way there, which they cannot tell yet."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.block_index import BlockIndex, block_keys
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks

# Blocks of prompts on their way to one prefiller that are remembered. They are forgotten together when
# the last one of a quarter is there.
_PENDING = 1 << 16


class HeardPrefixes:
    """How much of a prompt each prefiller has or will have.

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

    def cached(self, prefiller: PrefillerId, told: Sequence[int]) -> tuple[int, bool]:
        """Return how many tokens of a prompt a prefiller says that it has, and whether that is all of `told`."""
        there = self.engines.leading(prefiller, told)
        return there * self.engines.block_tokens, there == len(told)

    def coming(self, prefiller: PrefillerId, keys: list[int]) -> int:
        """Return how many of a prompt's first blocks are on their way there; `keys` are its own."""
        return self._pending[prefiller].leading(keys)[0]

    def begin(self, request: RequestId, prefiller: PrefillerId, ticket: Ticket) -> None:
        """Note that a request goes to a prefiller."""
        if ticket.blocks:
            if not ticket.token_blocks:
                self.engines.texts.sent(ticket.blocks)
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

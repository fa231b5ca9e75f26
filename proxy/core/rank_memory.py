"""Which rank has the beginning of a prompt, from the prompts that the ranks were given."""

from collections import defaultdict

from balanceroute.proxy.core.events import RankId, Ticket
from balanceroute.proxy.core.prefill.block_index import BlockIndex, block_keys

# A million tokens in blocks of 16, more than most ranks have room for.
_BLOCKS = 1 << 16
# Misses in a row that may be chance: a first token is late also after another request's prompt.
_CHANCE = 3
# Each further one makes it so many times longer until a rank is relied on again.
_PATIENCE = 4
_MOST_MISSES = 8


class RankMemory:
    """The blocks of each rank, the latest ones."""

    def __init__(self) -> None:
        self._indices: defaultdict[RankId, BlockIndex] = defaultdict(lambda: BlockIndex(_BLOCKS))
        # In a row, and requests for which nothing is expected since: ranks may have no prefix caches.
        self._misses = self._skips = 0

    def expect(self, ticket: Ticket) -> dict[RankId, int]:
        """Return the ranks that should have a beginning of a prompt, and its tokens."""
        if not ticket.blocks or not self._indices:
            return {}
        keys = block_keys(ticket.blocks).tolist()
        found: dict[RankId, int] = {}
        for rank, index in self._indices.items():
            known, _ = index.leading(keys)
            if known:
                # The last token is always computed: its output is the answer's first token.
                found[rank] = min(round(known * ticket.block_tokens), ticket.prompt_tokens - 1)
        if found and self._skips:
            self._skips -= 1
            return {}
        return found

    def add(self, ticket: Ticket, rank: RankId) -> None:
        """Note that a rank gets a request, and so has its blocks soon."""
        if ticket.blocks:
            self._indices[rank].add(block_keys(ticket.blocks))

    def had(self) -> None:
        """Note that a rank had what was expected."""
        self._misses = 0

    def missed(self, rank: RankId) -> None:
        """Note that a rank had to compute what it was expected to have."""
        self._misses = min(self._misses + 1, _MOST_MISSES)
        if self._misses > _CHANCE:
            self._skips = _PATIENCE ** (self._misses - _CHANCE)
        self.forget(rank)

    def forget(self, rank: RankId) -> None:
        """Note that a rank may have lost what it had."""
        self._indices.pop(rank, None)

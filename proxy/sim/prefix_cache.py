"""An engine's prefix cache: the full blocks of prompts, the least recently used ones out first."""

from collections.abc import Hashable, Sequence


class PrefixCache:
    """The blocks of one engine.

    Args:
        blocks: How many it holds; None for no limit.
        block_tokens: Tokens of a block.

    Attributes:
        dropped: Blocks that it held before its last use, or got then, and holds no more.
    """

    def __init__(self, blocks: int | None, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self.dropped: list[Hashable] = []
        self._held: dict[Hashable, None] = {}  # The least recently used first.

    def leading(self, blocks: Sequence[Hashable]) -> int:
        """Return how many of a prompt's first blocks it holds."""
        known = 0
        while known < len(blocks) and blocks[known] in self._held:
            known += 1
        return known

    def use(self, blocks: Sequence[Hashable], prompt_tokens: int) -> int:
        """Look a prompt up and keep it.

        Args:
            blocks: Hashes of its blocks, each of all that comes before it too. Only full ones count.
            prompt_tokens: Its length.

        Returns:
            The tokens that were cached. The last one never counts: it is computed for its output.
        """
        held = self._held
        full = blocks[: prompt_tokens // self._block_tokens]
        most = (prompt_tokens - 1) // self._block_tokens
        found = 0
        while found < min(len(full), most) and full[found] in held:
            found += 1
        # From the end, as vLLM frees them: of a long prompt the beginning is kept longest.
        for block in reversed(full):
            held.pop(block, None)
            held[block] = None
        self.dropped.clear()
        while self._blocks is not None and len(held) > self._blocks:
            self.dropped.append(next(iter(held)))
            del held[self.dropped[-1]]
        return found * self._block_tokens

"""An engine's prefix cache: the full blocks of prompts, the least recently used ones out first."""

from collections.abc import Hashable, Sequence


class PrefixCache:
    """The blocks of one engine.

    Args:
        blocks: How many it holds; None for no limit.
        block_tokens: Tokens of a block.
    """

    def __init__(self, blocks: int | None, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._held: dict[Hashable, None] = {}  # The least recently used first.

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
        while self._blocks is not None and len(held) > self._blocks:
            del held[next(iter(held))]
        return found * self._block_tokens

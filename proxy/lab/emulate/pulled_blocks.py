"""What a decode rank has in its KV cache after a pull, as with vLLM's NIXL connector.

The rank compares no lengths. It counts every token of its prompt but the last as computed elsewhere,
pulls so many blocks as its own prefix cache does not have, and takes as many of the prefiller's: the last
ones. So a prompt that is longer or shorter than the prefiller's is right only by the count of blocks.
"""

from collections.abc import Sequence

# What is in a block where nobody wrote; no token has this id.
NOTHING = 2**64 - 1


def pulled(
    prompt: Sequence[int], cached: Sequence[int], prefilled: Sequence[int], block_tokens: int
) -> list[int] | None:
    """Return the tokens whose KV the rank then has; None if its engine dies instead.

    Args:
        prompt: The rank's own.
        cached: The tokens of the full blocks that its prefix cache has.
        prefilled: The prompt of which the prefiller keeps the blocks.
        block_tokens: Tokens of a block.
    """
    missing = -(-len(prompt) // block_tokens) - len(cached) // block_tokens
    blocks = -(-len(prefilled) // block_tokens)
    if missing > blocks:
        return None  # vLLM: `assert num_decode_blocks <= len(prefill_group)`.
    read = [*cached, *prefilled[(blocks - missing) * block_tokens :]][: len(prompt) - 1]
    read += [NOTHING] * (len(prompt) - 1 - len(read))
    return [*read, prompt[-1]]  # The last one is computed by the rank.

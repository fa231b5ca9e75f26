"""Prompts of a recorded length, the same for the same seed wherever and whenever they are built.

A prompt is words `t<number>` with one space between two. The emulated engines take each word for
one token, and add a few for the roles of a chat; the tokenizers of real models make a few tokens of
each word, and the report says how many.

A prompt is made of blocks of 512 words, the size of Mooncake's prefix blocks. The words of a block
follow from the seed and the block's id where the trace records ids, so that prompts share the
prefixes that they shared when they were recorded; and from the seed and the request's number where
it does not.
"""

import hashlib
import struct
from collections import OrderedDict

from balanceroute.proxy.replay.workload import PlannedRequest

BLOCK_WORDS = 512

# A power of two, so that random bits choose evenly; all but a few are of the emulated vocabulary.
_WORDS = tuple(f"t{number}" for number in range(1 << 14))
_NUMBERS = struct.Struct(f"<{BLOCK_WORDS}H")


class PromptBuilder:
    """Builds prompts, at about 30 µs per block that is not cached.

    Args:
        seed: Determines the tokens.
        cached_blocks: Blocks with an id that are cached; one takes about 4 kB.
    """

    def __init__(self, seed: int, *, cached_blocks: int = 4096) -> None:
        self._seed = seed
        self._limit = cached_blocks
        self._blocks: OrderedDict[int, str] = OrderedDict()

    def build(self, request: PlannedRequest) -> str:
        """Return the request's prompt: its own text, or exactly `prompt_tokens` words."""
        if request.text is not None:
            return request.text
        whole, rest = divmod(request.prompt_tokens, BLOCK_WORDS)
        blocks = [self._block(request, index) for index in range(whole)]
        if rest:
            last = self._block(request, whole)
            blocks.append(" ".join(last.split(" ", rest)[:rest]))
        return " ".join(blocks)

    def _block(self, request: PlannedRequest, index: int) -> str:
        if index >= len(request.hash_ids):
            # Also the end of a prompt that is longer than its ids cover.
            return _words(f"{self._seed}/request/{request.number}/{index}")
        block_id = request.hash_ids[index]
        block = self._blocks.get(block_id)
        if block is None:
            block = self._blocks[block_id] = _words(f"{self._seed}/block/{block_id}")
            if len(self._blocks) > self._limit:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(block_id)
        return block


def _words(key: str) -> str:
    """Return the block that belongs to a key, on every machine and version of Python."""
    digest = hashlib.shake_128(key.encode()).digest(_NUMBERS.size)
    return " ".join([_WORDS[number % len(_WORDS)] for number in _NUMBERS.unpack(digest)])

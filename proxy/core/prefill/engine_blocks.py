"""Which blocks are in the prefix cache of each engine of a role, as its own events tell.

An engine names a block by a hash that nobody else can compute, and tells its token ids and the block
before it when it stores it. So a block is known here by both: by the engine's hash, by which it is
removed, and by the proxy's own, by which a prompt looks for it. What cannot be linked to the start of a
prompt is left out. Whatever an engine tells, the worst is a wrong expectation.

A block also depends on what its engine mixes into its hash beside the token ids: the name of an adapter,
a cache salt, the images in it. These are mixed into the proxy's own hash too.

Memory: 64 bytes for each block that fits, taken as they come.
"""

from array import array
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.prefill.key_table import KeyTable
from balanceroute.proxy.core.prefill.text_prompts import TextPrompts
from balanceroute.proxy.core.prefill.token_blocks import HASH_MASK, chain, chain_one

# The largest token id that is taken.
_MOST_ID = 1 << 40
# Blocks up to which a prompt is followed back to its start: half a million tokens.
_MOST_ANCESTORS = 1 << 15


class Knowledge(Enum):
    """How much is known of what an engine has cached."""

    NONE = "none"  # It tells nothing.
    SOME = "some"  # It had blocks before it was heard.
    ALL = "all"


class EngineBlocks:
    """The blocks of all prefillers by their numbers, or of all ranks.

    Args:
        block_tokens: Tokens of a block.
        most: Blocks that are known of each engine at most.
        texts: What others tell of the tokens of texts; None for nobody.

    Attributes:
        texts: The same, and what these tell.
    """

    def __init__(
        self, block_tokens: int, most: int = 1 << 20, texts: TextPrompts | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self.texts = TextPrompts() if texts is None else texts
        self._most = most
        self._caches: dict[int, _Cache] = {}
        self._resets: dict[int, int] = {}

    @property
    def engines(self) -> list[int]:
        """Those of which anything is known."""
        return list(self._caches)

    def knowledge(self, engine: int) -> Knowledge:
        """Return how much is known of an engine."""
        cache = self._caches.get(engine)
        return Knowledge.NONE if cache is None else cache.knowledge

    def blocks(self, engine: int) -> int:
        """Return how many blocks are known of an engine."""
        cache = self._caches.get(engine)
        return 0 if cache is None else cache.own.count

    def resets(self, engine: int) -> int:
        """Return how often an engine is known to have lost all its blocks."""
        return self._resets.get(engine, 0)

    def beginning(self, ticket: Ticket) -> Sequence[int]:
        """Return a prompt's first blocks of tokens, as far as they are known."""
        return ticket.blocks if ticket.token_blocks else self.texts.tokens(ticket.blocks)

    def leading(self, engine: int, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are there; see `token_hashes`.

        By binary search: engines drop the blocks of a prompt from its end.
        """
        cache = self._caches.get(engine)
        if cache is None:
            return 0
        least, most = 0, len(hashes)
        while least < most:
            # The first ones first: most prompts share little.
            middle = (least + most) // 2 if least else 0
            if cache.own.get(hashes[middle]) is None:
                most = middle
            else:
                least = middle + 1
        return least

    def begin(self, engine: int, knowledge: Knowledge) -> None:
        """Start anew with an engine that has no block yet, or has unknown ones."""
        self._caches[engine] = _Cache(self._most, knowledge)

    def forget(self, engine: int) -> None:
        """Know nothing of an engine any more."""
        self._caches.pop(engine, None)

    def cleared(self, engine: int) -> None:
        """Note that an engine has dropped all blocks."""
        self.begin(engine, Knowledge.ALL)
        self._resets[engine] = self.resets(engine) + 1

    def stored(
        self,
        engine: int,
        hashes: Sequence[int],
        before: int | None,
        tokens: list[int],
        *,
        extras: Sequence[int] = (),
        name: str = "",
    ) -> None:
        """Note that an engine has stored consecutive blocks of a prompt.

        Args:
            engine: One that was begun.
            hashes: The engine's, 64 bits each.
            before: That of the block before them; None if they begin the prompt.
            tokens: Their token ids.
            extras: Hashes of what else they depend on, one for each; empty for nothing.
            name: What the prompt is called there; see `TextPrompts`.

        Raises:
            ValueError: The token ids are not those of so many blocks, or are none.
        """
        if len(tokens) != len(hashes) * self.block_tokens:
            raise ValueError(f"{len(tokens)} token ids for {len(hashes)} blocks")
        try:
            ids = np.array(tokens, np.int64) if len(hashes) > 1 else None
            if ids is None:
                least, most = min(tokens, default=0), max(tokens, default=0)
            else:
                least, most = int(ids.min()), int(ids.max())
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"token ids: {error}") from None
        if not 0 <= least <= most < _MOST_ID:
            raise ValueError("a token id is out of range")
        cache = self._caches[engine]
        start = 0 if before is None else cache.by_engine.get(before)
        if start is None or not hashes:
            return  # The blocks before it were stored unheard.
        if ids is None:
            own = cache.put_one(hashes[0], start, chain_one(tokens, start, *extras))
        else:
            own = cache.put(hashes, start, chain(ids, self.block_tokens, start, extras))
        if name:
            start &= HASH_MASK
            self.texts.told(name, start, own, lambda: cache.up_to(start))

    def removed(self, engine: int, hashes: Sequence[int]) -> None:
        """Note that an engine has dropped blocks; unknown ones are fine."""
        cache = self._caches[engine]
        for engines in hashes:
            own = cache.by_engine.remove(engines)
            if own is not None:
                cache.own.remove(own & HASH_MASK)


class _Cache:
    """One engine's blocks: its hashes with the proxy's, and the proxy's as tickets have them.

    With each of the latter is that of the block before it; 0 for none.
    """

    def __init__(self, most: int, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.by_engine = KeyTable(most)
        self.own = KeyTable(most)

    def put(self, hashes: Sequence[int], start: int, own: NDArray[np.uint64]) -> list[int]:
        """Add blocks behind one with this hash; return the proxy's as tickets have them."""
        self.by_engine.put(np.array(hashes, np.uint64), own)
        own &= np.uint64(HASH_MASK)
        before = np.roll(own, 1)
        before[:1] = start & HASH_MASK
        self.own.put(own, before)
        blocks: list[int] = own.tolist()
        return blocks

    def put_one(self, name: int, start: int, own: int) -> list[int]:
        """Do the same with one block."""
        self.by_engine.put_one(name, own)
        own &= HASH_MASK
        self.own.put_one(own, start & HASH_MASK)
        return [own]

    def up_to(self, block: int) -> "array[int]":
        """Return all blocks of a prompt up to one; empty if one of them is gone, or they are too many."""
        found = array("Q")
        while block and len(found) < _MOST_ANCESTORS:
            before = self.own.get(block)
            if before is None:
                return array("Q")
            found.append(block)
            block = before
        found.reverse()
        return array("Q") if block else found

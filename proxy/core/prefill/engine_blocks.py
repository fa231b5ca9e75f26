"""Which blocks are in the prefix cache of each engine of a role, from the engines' own events.

An engine names a block by a hash that only it can compute. When it stores the block, it reports its token
ids and the block before it. So this module keeps two hashes of a block: the engine's, by which the engine
removes it, and the proxy's own, by which a prompt looks for it. It leaves out blocks that it cannot link
to the start of a prompt. The worst that false events do is a wrong expectation.

A block also depends on what its engine mixes into its hash beside the token ids: the name of an adapter,
a cache salt, the images in it. The proxy mixes these into its own hash too.

Memory: 64 bytes for each block that fits, allocated by its first use.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from hashlib import blake2b
from operator import mul

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from balanceroute.proxy.core.events import Ticket

# A hash table of 64-bit keys in two arrays: a quarter of a dictionary's memory.
#
# Open addressing with linear probing; a removed key is filled up from behind, so that no search
# gets longer with time. The memory is taken by the first use of each page.

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class KeyTable:
    """Keys above 0, each with a value.

    Args:
        most: How many keys it takes; it is at most half full.
    """

    def __init__(self, most: int) -> None:
        bits = max(4, (2 * most - 1).bit_length())
        self.count = 0
        self.most = most
        self._shift, self._last = 64 - bits, (1 << bits) - 1
        self._keys = np.zeros(1 << bits, np.uint64)
        self._values = np.zeros(1 << bits, np.uint64)
        # Reading single items of an array is three times slower.
        self._key_at, self._value_at = self._keys.data, self._values.data

    def get(self, key: int) -> int | None:
        at = self._find(key)
        return int(self._value_at[at]) if self._key_at[at] else None

    def put(self, keys: NDArray[np.uint64], values: NDArray[np.uint64]) -> None:
        """Add keys, and give those that are there their new values; what does not fit is left out."""
        keys, first = np.unique(keys, return_index=True)
        values = values[first]
        above = keys > 0
        keys, values = keys[above], values[above]
        room = self.most - self.count
        if len(keys) > room:
            keys, values = keys[:room], values[:room]
        slots = (keys * np.uint64(_ODD) >> np.uint64(self._shift)).astype(np.intp)
        while len(keys):
            free = self._keys[slots] == 0
            # Of several keys for one slot the last one stays; the rest tries the next slot.
            self._keys[slots[free]] = keys[free]
            there = self._keys[slots] == keys
            self._values[slots[there]] = values[there]
            self.count += int(np.count_nonzero(free & there))
            keys, values, slots = keys[~there], values[~there], (slots[~there] + 1) & self._last

    def put_one(self, key: int, value: int) -> None:
        """Do the same with one key; of so few a loop is quicker."""
        if not key:
            return
        at = self._find(key)
        if not self._key_at[at]:
            if self.count >= self.most:
                return
            self._key_at[at] = key
            self.count += 1
        self._value_at[at] = value

    def remove(self, key: int) -> int | None:
        keys, values, last = self._key_at, self._value_at, self._last
        hole = self._find(key)
        if not keys[hole]:
            return None
        value = int(values[hole])
        at = hole
        while found := keys[at := (at + 1) & last]:
            # A key may move to the hole unless its own slot is between the two.
            if (at - self._slot(found)) & last >= (at - hole) & last:
                keys[hole], values[hole] = found, values[at]
                hole = at
        keys[hole] = values[hole] = 0
        self.count -= 1
        return value

    def _slot(self, key: int) -> int:
        return (key * _ODD & _MASK) >> self._shift

    def _find(self, key: int) -> int:
        """Return where a key is, or the free slot where it would be."""
        keys, at = self._key_at, self._slot(key)
        while (found := keys[at]) and found != key:
            at = (at + 1) & self._last
        return at


# Hashes of blocks of token ids, each of all that comes before it too.
#
# The proxy's own: an engine's hashes cannot be computed without its seed. They are the
# coefficients of one polynomial, so that a piece of a prompt can be continued from the hash
# before it without a loop.
# Tickets hold hashes below 2**63.
HASH_MASK = (1 << 63) - 1
_FACTOR = 0x9E3779B97F4A7C15
_encode = msgspec.msgpack.Encoder().encode
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def chain(
    tokens: NDArray[np.int64], block_tokens: int, before: int, extras: Sequence[int] = ()
) -> NDArray[np.uint64]:
    """Return the hashes of all full blocks, uint64[n].

    Args:
        block_tokens: Tokens of a block.
        before: The hash of the block before the first one; 0 at the start of a prompt.
        extras: 64 bits of each block that depends on more than its tokens; empty if none does.
    """
    count = len(tokens) // block_tokens
    blocks = tokens[: count * block_tokens].astype(np.uint64).reshape(count, block_tokens)
    own = (blocks + np.uint64(1)) @ _multipliers(block_tokens)
    own = (own ^ (own >> np.uint64(29))) * np.uint64(_FACTOR)
    own ^= own >> np.uint64(32)
    if len(extras):
        own += np.array(extras, np.uint64)
    # S[n] = S[n-1] * f + own[n], solved for S[n] by dividing by f**n.
    factors, inverses = _powers(_FACTOR, count), _powers(_INVERSE, count)
    sums = np.cumsum(own * inverses, dtype=np.uint64) + np.uint64(before)
    return np.asarray(factors * sums, np.uint64)


def chain_one(tokens: Sequence[int], before: int, extra: int = 0) -> int:
    """Return the same hash of one full block; of so few a loop is quicker."""
    multipliers = _plain_multipliers(len(tokens))
    own: int = sum(map(mul, multipliers, tokens)) + _plain_sum(len(tokens)) & _MASK
    own = (own ^ own >> 29) * _FACTOR & _MASK
    own ^= own >> 32
    return before * _FACTOR + own + extra & _MASK


def mixed_in(keys: object) -> int:
    """Return a hash of what an engine mixes into a block's hash beside its tokens; 0 for nothing.

    Raises:
        TypeError: It is nothing that MessagePack can say.
        RecursionError: It is nested too deeply.
    """
    return int.from_bytes(blake2b(_encode(keys), digest_size=8).digest()) if keys else 0


def token_hashes(tokens: NDArray[np.int64], block_tokens: int) -> tuple[int, ...]:
    """Return the hashes of a prompt's full blocks as tickets have them, below 2**63."""
    hashes = chain(tokens, block_tokens, 0) & np.uint64(HASH_MASK)
    return tuple(hashes.tolist())


def _powers(factor: int, count: int) -> NDArray[np.uint64]:
    """Return factor**1 to factor**count modulo 2**64."""
    return np.cumprod(np.full(count, factor, np.uint64), dtype=np.uint64)


@cache
def _plain_multipliers(count: int) -> tuple[int, ...]:
    return tuple(_multipliers(count).tolist())


@cache
def _plain_sum(count: int) -> int:
    return sum(_plain_multipliers(count))


@cache
def _multipliers(count: int) -> NDArray[np.uint64]:
    """Return odd numbers without a pattern (SplitMix64)."""
    found = []
    for number in range(1, count + 1):
        bits = number * _FACTOR & _MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
        found.append((bits ^ bits >> 31) | 1)
    return np.array(found, np.uint64)


# The token blocks of prompts that came as text, from the events of the engines that computed
# them.
#
# The proxy does not tokenise. But an engine reports the token ids of the blocks that it stores, and the
# request's `session_id` (vLLM 0.32 and later). So the proxy names each text that it sends by the hash of
# its last full block of text; see `named`. The engine reports the blocks of that text under this name,
# whatever made them: a chat template, tools, images, an adapter, a cache salt. The next turn of a
# conversation begins with the same text, and so, up to there, with the same blocks of tokens.
#
# The number of tokens in a part of a text is interpolated; the rest is exact.

# Of tokens, that are remembered in all prompts, and what a block of text counts beside these: 12 MB.
_MOST_BLOCKS = 1 << 20
_TEXT_BLOCK = 16
# Blocks of text on their way to engines that are remembered.
_MOST_SENT = 1 << 17
# A name gives the length of a text in so many parts of a block.
_PARTS = 64
_NAME = re.compile(r"br-([0-9a-f]{1,16})-([0-9a-f]{1,4})-([0-9a-f]{1,10})")


def named(blocks: tuple[int, ...], length: float) -> str:
    """Return the name of a prompt of at least one full block, of `length` blocks in all."""
    return f"br-{blocks[-1]:x}-{len(blocks):x}-{round(length * _PARTS):x}"


class _Prompt(Struct):
    texts: tuple[int, ...]  # The hashes of its beginnings that are known by it.
    tokens: "array[int]"  # The proxy's hashes of its blocks of tokens.
    share: float  # What part of it one block of text is.

    @property
    def weight(self) -> int:
        return len(self.tokens) + _TEXT_BLOCK * len(self.texts)


class TextPrompts:
    """The latest texts whose blocks of tokens are known.

    Args:
        most: How many blocks are remembered.
    """

    def __init__(self, most: int = _MOST_BLOCKS) -> None:
        self._most, self._weight = most, 0
        # By the hash of the last full block of text, those used last behind.
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        # By the hash of any beginning: which text knows it, and how many blocks it has.
        self._beginnings: dict[int, tuple[int, int]] = {}
        self._sent: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._sent_blocks = 0

    def sent(self, texts: tuple[int, ...]) -> None:
        """Note the blocks of a text that goes to an engine, which will report its tokens."""
        self._sent_blocks += len(texts) - len(self._sent.pop(texts[-1], ()))
        self._sent[texts[-1]] = texts
        while self._sent_blocks > _MOST_SENT:
            _, oldest = self._sent.popitem(last=False)
            self._sent_blocks -= len(oldest)

    def tokens(self, texts: tuple[int, ...]) -> "array[int]":
        """Return the known blocks of tokens that a text certainly begins with."""
        for text in reversed(texts):
            found = self._beginnings.get(text)
            if found is not None:
                end, blocks = found
                prompt = self._prompts[end]
                self._prompts.move_to_end(end)
                return prompt.tokens[: int(len(prompt.tokens) * min(1.0, blocks * prompt.share))]
        return array("Q")

    def add_blocks(
        self, name: str, before: int, tokens: Iterable[int], ancestors: Callable[[], "array[int]"]
    ) -> None:
        """Note that an engine has stored consecutive blocks of a prompt.

        Args:
            name: Its name there. A name that `named` did not make is ignored.
            before: The proxy's hash of the block before them; 0 if they begin the prompt.
            tokens: The proxy's hashes of the blocks.
            ancestors: Returns all blocks up to `before`; empty if they are not known.
        """
        match = _NAME.fullmatch(name)
        stored = array("Q", tokens)
        if match is None or not stored:
            return
        end, count, parts = (int(part, 16) for part in match.groups())
        if not 0 < _PARTS * count <= parts:
            return
        old = self._prompts.get(end)
        if old is not None and old.tokens[-1] == before:
            old.tokens += stored  # The next part of it.
            old.share = _PARTS / parts
            self._weight += len(stored)
            self._shrink()
            return
        texts = self._sent.get(end, (end,))
        count = len(texts) if end in self._sent else count
        known = old.tokens if old is not None else self.tokens(texts)
        if stored[-1] in known and old is not None:
            return  # From another engine, or of a part that was dropped.
        if before:
            found = before in known
            known = known[: known.index(before) + 1] if found else ancestors()
            if not known:
                return
            stored = known + stored
        self._keep(end, count, _Prompt(texts, stored, _PARTS / parts))

    def _keep(self, end: int, count: int, prompt: _Prompt) -> None:
        self._drop(end)
        first = count - len(prompt.texts) + 1
        for number, text in enumerate(prompt.texts, first):
            # An earlier turn of the same conversation.
            earlier = self._prompts.get(text)
            if earlier is not None and len(earlier.tokens) <= len(prompt.tokens):
                self._drop(text)
            self._beginnings[text] = end, number
        self._prompts[end] = prompt
        self._weight += prompt.weight
        self._shrink()

    def _shrink(self) -> None:
        while self._weight > self._most and self._prompts:
            self._drop(next(iter(self._prompts)))

    def _drop(self, end: int) -> None:
        prompt = self._prompts.pop(end, None)
        if prompt is None:
            return
        self._weight -= prompt.weight
        for text in prompt.texts:
            if self._beginnings.get(text, (None, 0))[0] == end:
                del self._beginnings[text]


# Larger token ids are refused.
_MOST_ID = 1 << 40
# Blocks up to which a prompt is followed back to its start: half a million tokens.
_MOST_ANCESTORS = 1 << 15


class Knowledge(Enum):
    """How much is known of what an engine has cached."""

    NONE = "none"  # It reports nothing.
    SOME = "some"  # It had blocks before its events came.
    ALL = "all"


class EngineBlocks:
    """The blocks of all prefillers by their numbers, or of all ranks.

    Args:
        block_tokens: Tokens of a block.
        most: Blocks that are known of each engine at most.
        texts: The tokens of texts, shared with the engines of another role; None for a table of its own.
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
        return list(self._caches)

    def knowledge(self, engine: int) -> Knowledge:
        cache = self._caches.get(engine)
        return Knowledge.NONE if cache is None else cache.knowledge

    def blocks(self, engine: int) -> int:
        cache = self._caches.get(engine)
        return 0 if cache is None else cache.own.count

    def resets(self, engine: int) -> int:
        """Return how often an engine is known to have lost all its blocks."""
        return self._resets.get(engine, 0)

    def beginning(self, ticket: Ticket) -> Sequence[int]:
        """Return a prompt's first blocks of tokens that are known."""
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
        """Drop all blocks of an engine, which then reports nothing."""
        self._caches.pop(engine, None)

    def cleared(self, engine: int) -> None:
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
            name: The prompt's name there; see `named`.

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
            return  # The blocks before it were stored before its events came.
        if ids is None:
            own = cache.put_one(hashes[0], start, chain_one(tokens, start, *extras))
        else:
            own = cache.put(hashes, start, chain(ids, self.block_tokens, start, extras))
        if name:
            start &= HASH_MASK
            self.texts.add_blocks(name, start, own, lambda: cache.up_to(start))

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

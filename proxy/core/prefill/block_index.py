"""Which blocks of prompts a prefiller was given lately, in bounded memory.

A block is known by a hash of the prompt up to its end, so a prompt that shares its first m blocks with
an earlier one has m hashes in common with it. The index is a queue of hash tables: new blocks go to the
newest one, and when that is full the oldest one is dropped, with what was not given again since. A
prompt's blocks are added together, so each table holds a beginning of the prompt or nothing of it, and
its length is found by binary search.

Memory: 16 bytes for each block, in tables that are at most half full.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_TABLES = 4
# Multiplicative hashing: the ids of a trace are small numbers in a row.
_ODD = np.uint64(0x9E3779B97F4A7C15)


def block_keys(blocks: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return the keys of blocks, uint64[n], never 0. Hashes are below 2**63."""
    keys = np.array(blocks, np.int64).astype(np.uint64) * _ODD
    return np.asarray(keys | np.uint64(1), np.uint64)


class BlockIndex:
    """The blocks of one prefiller.

    Args:
        blocks: How many are remembered at most; at least three quarters of it of the latest ones.
    """

    def __init__(self, blocks: int) -> None:
        self._room = max(1, blocks // _TABLES)
        bits = max(4, (2 * self._room - 1).bit_length())
        self._shift, self._slots = 64 - bits, 1 << bits
        self._tables: deque[_Table] = deque()
        self._made = 0

    def leading(self, keys: list[int]) -> tuple[int, int]:
        """Return how many of a prompt's first blocks are known.

        Returns:
            Their number, and the number of the table that knows the last one; see `drop`.
        """
        known, number = 0, self._made
        for table in reversed(self._tables):
            if known == len(keys):
                break
            if table.has(keys[known]):
                known, number = table.leading(keys, known), table.number
        return known, number

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Note the blocks of one prompt, in order; of very many the first."""
        keys = keys[: self._room]
        if not self._tables or self._tables[-1].count + len(keys) > self._room:
            if len(self._tables) == _TABLES:
                self._tables.popleft()
            self._made += 1
            self._tables.append(_Table(self._slots, self._shift, self._made))
        self._tables[-1].add(keys)

    def drop(self, number: int) -> None:
        """Forget what was added before a table was full, or with it."""
        while self._tables and self._tables[0].number <= number:
            self._tables.popleft()

    @property
    def newest(self) -> int:
        """The number of the table that is being filled."""
        return self._made


class _Table:
    """Keys by open addressing: a key is at its slot, or at the next that was free."""

    def __init__(self, slots: int, shift: int, number: int) -> None:
        self.number = number
        self.count = 0
        self._keys = np.zeros(slots, np.uint64)
        # Reading single items of an array is three times slower.
        self._view = self._keys.data
        self._mask, self._shift = slots - 1, shift

    def has(self, key: int) -> bool:
        at = key >> self._shift
        while found := self._view[at]:
            if found == key:
                return True
            at = (at + 1) & self._mask
        return False

    def leading(self, keys: list[int], known: int) -> int:
        """Return how many leading keys are here, if the one at `known` is."""
        least, most = known + 1, len(keys)
        while least < most:
            middle = (least + most) // 2
            if self.has(keys[middle]):
                least = middle + 1
            else:
                most = middle
        return least

    def add(self, keys: NDArray[np.uint64]) -> None:
        table = self._keys
        slots = (keys >> np.uint64(self._shift)).astype(np.intp)
        while len(keys):
            free = table[slots] == 0
            # Of several keys for one slot the last stays; the others move on.
            table[slots[free]] = keys[free]
            there = table[slots] == keys
            self.count += int(np.count_nonzero(free & there))
            keys, slots = keys[~there], (slots[~there] + 1) & self._mask

"""A hash table of 64-bit keys in two arrays: a quarter of a dictionary's memory.

Open addressing with linear probing; a removed key is filled up from behind, so that no search gets
longer with time. The memory is taken by the first use of each page.
"""

import numpy as np
from numpy.typing import NDArray

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
        """Return the value of a key; None if it is not there."""
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
            # Of several keys for one slot the last stays; the others move on.
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
        """Remove a key and return its value; None if it is not there."""
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

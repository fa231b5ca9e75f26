"""Subsets of up to three items, by a look-up of the third for every two.

For two items of a sorted list the best third is next to what is left of the total, behind the second:
so each three are looked at once, and n**2 / 2 look-ups take the place of n**3 / 6 sums.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST_ITEMS = 3
# Above every total, with room to add one without overflow.
BEYOND = 1 << 60


class Triples:
    """The sizes in ascending order, behind two empty places: so two items or one are three, too.

    Args:
        sizes: KV tokens.
        max_items: 1 to 3.
    """

    def __init__(self, sizes: Sequence[int], max_items: int) -> None:
        values = np.array(sizes, np.int64)
        order = values.argsort(kind="stable")
        # The last one stands for none.
        self._values = np.concatenate(([0, 0], values[order], [BEYOND]))
        self._places = np.concatenate(([-1, -1], order))
        self._first, self._second = _pairs(len(sizes) + 2, max_items)
        self._sums = self._values[self._first] + self._values[self._second]

    def totals_next_to(self, floor: int) -> tuple[int, int]:
        """Return the largest total up to `floor`, 0 if none is, and the smallest beyond it."""
        values, least = self._values, self._second + 1
        beyond = values[:-1].searchsorted(floor - self._sums, side="right")
        self._below = np.where(beyond > least, self._sums + values[beyond - 1], 0)
        self._above = self._sums + values[np.maximum(beyond, least)]
        return int(self._below.max()), int(self._above.min())

    def indices(self, total: int, floor: int) -> tuple[int, ...]:
        """Return the preferred subset of a total that `totals_next_to` found."""
        (hits,) = ((self._below if total <= floor else self._above) == total).nonzero()
        first, second = self._first[hits], self._second[hits]
        # Of equal sizes the first behind the second, which has the lowest index.
        third = self._values.searchsorted(total - self._sums[hits])
        third = np.maximum(third, second + 1)
        rows = self._places[np.array([first, second, third])]
        rows.sort(axis=0)
        # An empty place is -1: the fewest items come first, then the lowest indices.
        best = np.lexsort(rows[::-1])[0]
        return tuple(index for index in rows[:, best].tolist() if index >= 0)


@lru_cache(maxsize=64)
def _pairs(places: int, max_items: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the first and the second of up to `max_items`, of which two places at most are empty."""
    # Two items have one empty place before them, and one item has both.
    seconds = [np.arange(1, 2 if max_items == 1 else places)]
    firsts = [np.zeros(len(seconds[0]), np.intp)]
    if max_items == 3:
        first, second = np.triu_indices(places - 2, 1)
        firsts.append(first + 2)
        seconds.append(second + 2)
    return np.concatenate(firsts), np.concatenate(seconds)

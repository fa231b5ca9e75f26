"""The oldest entries of the pool, and what scores them as arrays.

The ranks of one round choose from nearly the same entries: some leave, and as many move up. So the
arrays are made once and follow each admission, which costs less than to make them for every rank.
"""

from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.pool import PoolEntry

_RESTRICTED = attrgetter("restricted")
_OVERTAKEN = attrgetter("overtaken")


class Candidates(NamedTuple):
    """What a rank chooses from, in order of the pool. Valid until the next admission.

    Attributes:
        entries: n entries.
        sizes: float64[n], see `sizes`.
        overtaken: float64[n], how often each was overtaken.
    """

    entries: list[PoolEntry]
    sizes: NDArray[np.float64]
    overtaken: NDArray[np.float64]


def sizes(entries: list[PoolEntry]) -> NDArray[np.float64]:
    """Return float64[n], the load of each entry on the rank that admits it."""
    return np.array([entry.kv_tokens for entry in entries], np.float64)


def candidates_of(entries: list[PoolEntry]) -> Candidates:
    """Return the candidates with their arrays."""
    return Candidates(entries, sizes(entries), np.array([*map(_OVERTAKEN, entries)], np.float64))


class Oldest:
    """The oldest entries of a pool during a round.

    Args:
        entries: As many as can be considered before the round ends; the list is used up.
    """

    def __init__(self, entries: list[PoolEntry]) -> None:
        self._all = candidates_of(entries)
        # Restricted entries are rare.
        self._restricted = any(map(_RESTRICTED, entries))

    def first(self, count: int) -> Candidates | None:
        """Return the first entries that are left; None if one of them may not go to every rank."""
        entries = self._all.entries[:count]
        if self._restricted and any(map(_RESTRICTED, entries)):
            return None
        left = len(entries)
        return Candidates(entries, self._all.sizes[:left], self._all.overtaken[:left])

    def admitted(self, entry: PoolEntry) -> None:
        """Take out an entry that has left the pool; those ahead of it were overtaken."""
        entries, sizes_of, overtaken = self._all
        if entry not in entries:
            # A rank that may not take some of them chose from behind them.
            overtaken += 1.0
            return
        place = entries.index(entry)
        overtaken[:place] += 1.0
        del entries[place]
        # The last place stays, unused.
        sizes_of[place:-1] = sizes_of[place + 1 :]
        overtaken[place:-1] = overtaken[place + 1 :]

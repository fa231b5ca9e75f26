"""The oldest entries of the pool, and what scores them as arrays.

The ranks of one round choose from nearly the same entries: some leave, and as many move up. So the
arrays are made once and follow each admission, which costs less than to make them for every rank.
"""

from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.pool import PoolEntry

_KV_TOKENS = attrgetter("kv_tokens")
_RESTRICTED = attrgetter("restricted")
_OVERTAKEN = attrgetter("overtaken")


class Candidates(NamedTuple):
    """What a rank chooses from, in order of the pool. Valid until the next admission.

    Attributes:
        entries: n entries.
        sizes: float64[n], the load of each on the rank that admits it.
        overtaken: float64[n], how often each was overtaken.
        beyond_turn: float64[n], the admissions beyond its turn: first come, first served, the entries
            ahead would be admitted before it.
        columns: int64[n], their places in `Oldest.ascending`; None if they are not the first of it.
    """

    entries: list[PoolEntry]
    sizes: NDArray[np.float64]
    overtaken: NDArray[np.float64]
    beyond_turn: NDArray[np.float64]
    columns: NDArray[np.int64] | None


def sizes(entries: list[PoolEntry]) -> NDArray[np.float64]:
    """Return float64[n], the load of each entry on the rank that admits it."""
    return np.array([*map(_KV_TOKENS, entries)], np.float64)


def candidates_of(entries: list[PoolEntry]) -> Candidates:
    """Return the candidates with their arrays."""
    overtaken = np.array([*map(_OVERTAKEN, entries)], np.float64)
    return Candidates(entries, sizes(entries), overtaken, overtaken - np.arange(len(entries)), None)


class Oldest:
    """The oldest entries of a pool during a round.

    Args:
        entries: The first of the pool; the list is used up.
        spare: How many of them may be admitted before the candidates would be too few.

    Attributes:
        spare: How many still may.
        ascending: float64[n], the sizes of all these entries, also of those that have left.
    """

    def __init__(self, entries: list[PoolEntry], spare: int) -> None:
        self.spare = spare
        of_all = candidates_of(entries)
        self._entries = entries
        order = of_all.sizes.argsort(kind="stable")
        self.ascending = of_all.sizes[order]
        self._columns = order.argsort()
        # One array for all that moves up together: sizes, overtakings, admissions beyond the turn.
        self._rows = np.array([of_all.sizes, of_all.overtaken, of_all.beyond_turn])
        self._requests: frozenset[RequestId] = frozenset()
        self._is_among = np.zeros(len(entries), np.bool_)
        # Restricted entries are rare.
        self._restricted = any(map(_RESTRICTED, entries))

    def first(self, count: int) -> Candidates | None:
        """Return the first entries that are left; None if one of them may not go to every rank."""
        entries = self._entries[:count]
        if self._restricted and any(map(_RESTRICTED, entries)):
            return None
        left = len(entries)
        sizes_of, overtaken, beyond_turn = self._rows[:, :left]
        return Candidates(entries, sizes_of, overtaken, beyond_turn, self._columns[:left])

    def admitted(self, entry: PoolEntry) -> None:
        """Take out an entry that has left the pool; those ahead of it were overtaken."""
        entries, rows, columns = self._entries, self._rows, self._columns
        self.spare -= 1
        try:
            place = entries.index(entry)
        except ValueError:
            # A rank that may not take some of them chose from behind them.
            rows[1:] += 1.0
            return
        del entries[place]
        # Those ahead were overtaken; for those behind there is one less ahead.
        rows[1, :place] += 1.0
        rows[2] += 1.0
        # The last place stays, unused.
        rows[:, place:-1] = rows[:, place + 1 :]
        columns[place:-1] = columns[place + 1 :]
        self._is_among[place:-1] = self._is_among[place + 1 :]

    def among(self, requests: frozenset[RequestId]) -> NDArray[np.bool_]:
        """Return bool[n], which entries are some of `requests`; the first places are those left."""
        # They change much less often than ranks choose.
        if requests is not self._requests:
            self._requests = requests
            left = len(self._entries)
            self._is_among[:left] = [entry.request in requests for entry in self._entries]
        return self._is_among

"""The oldest entries of the pool, and what scores them as arrays.

The ranks of one round choose from nearly the same entries: some leave, and as many move up. So the
arrays are made once and follow each admission, which costs less than to make them for every rank. An
entry that leaves keeps its place in them.
"""

from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.pool import PoolEntry

_KV_TOKENS = attrgetter("kv_tokens")
_OVERTAKEN = attrgetter("overtaken")


class Candidates(NamedTuple):
    """What a rank chooses from, in order of the pool. Valid until the next admission.

    Attributes:
        entries: n entries, also such as have left.
        is_left: bool[n], whether each still waits.
        sizes: float64[n], the load of each on the rank that admits it; inf once it has left.
        overtaken: float64[n], how often each was overtaken.
        beyond_turn: float64[n], the admissions beyond its turn: first come, first served, the entries
            ahead would be admitted before it. -inf once it has left.
        are_oldest: Whether they are the first of `Oldest`.
    """

    entries: list[PoolEntry]
    is_left: NDArray[np.bool_]
    sizes: NDArray[np.float64]
    overtaken: NDArray[np.float64]
    beyond_turn: NDArray[np.float64]
    are_oldest: bool = False

    def place_of(self, request: RequestId) -> int | None:
        """Return the place of a request; None if it is not among those left."""
        for place, entry in enumerate(self.entries):
            if entry.request == request:
                return place if self.is_left[place] else None
        return None


def sizes(entries: list[PoolEntry]) -> NDArray[np.float64]:
    """Return float64[n], the load of each entry on the rank that admits it."""
    return np.array([*map(_KV_TOKENS, entries)], np.float64)


def candidates_of(entries: list[PoolEntry]) -> Candidates:
    """Return the candidates with their arrays; all of them are left."""
    count = len(entries)
    overtaken = np.array([*map(_OVERTAKEN, entries)], np.float64)
    is_left = np.ones(count, np.bool_)
    return Candidates(entries, is_left, sizes(entries), overtaken, overtaken - np.arange(count))


class Oldest:
    """The oldest entries of a pool during a round.

    Args:
        entries: The first of the pool.
        window: How many of those left are candidates.
        spare: How many of them may be admitted before the candidates would be too few.

    Attributes:
        spare: How many still may.
        sizes: float64[n], the load of each, also of those that have left.
    """

    def __init__(self, entries: list[PoolEntry], window: int, spare: int) -> None:
        self.spare = spare
        of_all = candidates_of(entries)
        self.sizes = of_all.sizes.copy()
        self._sizes_left = of_all.sizes
        self._entries = entries
        self._is_left = of_all.is_left
        self._overtaken = of_all.overtaken
        # With each admission an entry ahead is overtaken, and one behind has one less ahead.
        self._beyond_turn = of_all.beyond_turn
        self._place_of = {entry.request: place for place, entry in enumerate(entries)}
        # The candidates are those left before this place.
        self._end = min(window, len(entries))
        self._requests: frozenset[RequestId] = frozenset()
        self._is_among = np.zeros(len(entries), np.bool_)
        # Restricted entries are rare.
        self._restricted = [place for place, entry in enumerate(entries) if entry.restricted]

    def first(self) -> Candidates | None:
        """Return the candidates; None if one of them may not go to every rank."""
        end = self._end
        if self._restricted and any(
            place < end and self._is_left[place] for place in self._restricted
        ):
            return None
        return Candidates(
            self._entries[:end],
            self._is_left[:end],
            self._sizes_left[:end],
            self._overtaken[:end],
            self._beyond_turn[:end],
            are_oldest=True,
        )

    def admitted(self, entry: PoolEntry) -> None:
        """Note that an entry has left the pool; those ahead of it were overtaken."""
        self.spare -= 1
        self._beyond_turn += 1.0
        place = self._place_of.get(entry.request)
        if place is None:
            # A rank that may not take some of them chose from behind them.
            self._overtaken += 1.0
            return
        self._overtaken[:place] += 1.0
        self._is_left[place] = False
        # Then what is late, and what fits, needs no look at who has left.
        self._sizes_left[place], self._beyond_turn[place] = np.inf, -np.inf
        if place < self._end < len(self._entries):
            self._end += 1
            while self._end < len(self._entries) and not self._is_left[self._end - 1]:
                self._end += 1

    def among(self, requests: frozenset[RequestId]) -> NDArray[np.bool_]:
        """Return bool[n], which entries are some of `requests`."""
        # They change much less often than ranks choose.
        if requests is not self._requests:
            self._requests = requests
            self._is_among = np.zeros(len(self._entries), np.bool_)
            for request in requests:
                place = self._place_of.get(request)
                if place is not None:
                    self._is_among[place] = True
        return self._is_among

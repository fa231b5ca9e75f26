"""What a projection keeps of each bound request: arrays with one place per request."""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId


class Running(NamedTuple):
    """Bound requests in the order of their ranks.

    Attributes:
        requests: int64[n], as the following.
        places: In `curves`.
        ranks: Ascending.
        kv_tokens: KV tokens that each holds.
        ages: Tokens that each sequence has emitted.
        sequences: Tokens that each gains per step.
        curves: See `Deposits`; for all places, to be written to.
    """

    requests: NDArray[np.int64]
    places: NDArray[np.int64]
    ranks: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    ages: NDArray[np.int64]
    sequences: NDArray[np.int64]
    curves: NDArray[np.int64]


class Deposits:
    """The deposits of all bound requests, which grow together.

    Args:
        width: W, the steps that a deposit covers.
        longest: M, the most steps after which a deposit is made anew.

    Attributes:
        place_of: The place of each request in the arrays.
        request: Its request, by place.
        rank: Its rank; -1 without a request.
        since: The step at which the deposit starts.
        tokens: KV tokens at that step.
        sequences: Tokens that it gains with each step.
        base: KV tokens at age 0: age = (tokens - base) / sequences.
        due: The step at which it is predicted again; -1 for none.
        started: Whether it decodes yet.
        expected: int32[places, W], the tokens that it is expected to hold at each step.
        curves: The row of its survival curve in `Curves`; -1 until it is looked up.
    """

    def __init__(self, width: int, longest: int) -> None:
        places = 64
        self._width = width
        self.place_of: dict[RequestId, int] = {}
        self.request = np.full(places, -1, np.int64)
        self.rank = np.full(places, -1, np.int64)
        self.since = np.zeros(places, np.int64)
        self.tokens = np.zeros(places, np.int64)
        self.sequences = np.ones(places, np.int64)
        self.base = np.zeros(places, np.int64)
        self.due = np.full(places, -1, np.int64)
        self.started = np.zeros(places, np.bool_)
        self.curves = np.full(places, -1, np.int64)
        # M zeros follow each row, so that what is left of a deposit is a window of W columns.
        self._padded: NDArray[np.int32] = np.zeros((places, width + longest), np.int32)
        self.expected = self._padded[:, :width]
        self._windows = self._all_windows()
        self._memory = self._all_memory()
        self._free = list(range(places))

    def add(
        self,
        request: RequestId,
        rank: RankId,
        *,
        kv_tokens: int,
        age: int,
        sequences: int,
        now: int,
    ) -> int:
        """Take in a request that has not started, and return its place; nothing is expected yet."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self.place_of[request] = place
        numbers, ranks, since, tokens, each, base, curves, started = self._memory
        numbers[place] = request
        ranks[place] = rank
        since[place] = now
        tokens[place] = kv_tokens
        each[place] = sequences
        base[place] = kv_tokens - age * sequences
        curves[place] = -1
        started[place] = False
        return place

    def remove(self, request: RequestId) -> int:
        """Forget a request, and return the place that it had."""
        place = self.place_of.pop(request)
        self._free.append(place)
        return place

    def running_on(self, ranks: NDArray[np.bool_], now: int) -> Running:
        """Return the requests bound to some ranks, bool[G], as they are at the step `now`."""
        # A place without a request reads the last one.
        (places,) = np.append(ranks, False)[self.rank].nonzero()
        # Numbers of one or two bytes are sorted in a tenth of the time.
        by_rank = self.rank[places].astype(np.min_scalar_type(len(ranks))).argsort(kind="stable")
        places = places[by_rank]
        tokens, sequences = self.tokens[places], self.sequences[places]
        grown = (now - self.since[places]) * self.started[places]
        return Running(
            self.request[places],
            places,
            self.rank[places],
            tokens + grown * sequences,
            (tokens - self.base[places]) // sequences + grown,
            sequences,
            self.curves,
        )

    def ages(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens that each sequence of these requests has emitted."""
        return (self.tokens[places] - self.base[places]) // self.sequences[places]

    def rest(self, place: int, now: int) -> NDArray[np.int32]:
        """Return what is left of a deposit, from the step `now` on."""
        return self.expected[place, now - self.since.item(place) :]

    def advance(self, places: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        """Let deposits start at `now`, and return where what was left of them begins.

        None of them is older than M steps.
        """
        passed = now - self.since[places]
        self.tokens[places] += np.where(self.started[places], passed, 0) * self.sequences[places]
        self.since[places] = now
        return np.asarray(places * self._padded.shape[1] + passed)

    def rests(self, begins: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return what was left of deposits, int32[n, W], from where `advance` says that it begins."""
        # Each row is copied as a whole, which costs a fortieth of an index for every column.
        return np.asarray(self._windows[begins])

    def _grow(self) -> None:
        """Double the number of places, so that binding is amortised O(1)."""
        places = len(self.request)
        self._free.extend(range(places, 2 * places))
        self.request = np.concatenate([self.request, np.full_like(self.request, -1)])
        self.rank = np.concatenate([self.rank, np.full_like(self.rank, -1)])
        self.since = np.concatenate([self.since, np.zeros_like(self.since)])
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.sequences = np.concatenate([self.sequences, np.ones_like(self.sequences)])
        self.base = np.concatenate([self.base, np.zeros_like(self.base)])
        self.started = np.concatenate([self.started, np.zeros_like(self.started)])
        self.curves = np.concatenate([self.curves, np.full_like(self.curves, -1)])
        self.due = np.concatenate([self.due, np.full_like(self.due, -1)])
        self._padded = np.concatenate([self._padded, np.zeros_like(self._padded)])
        self.expected = self._padded[:, : self._width]
        self._windows = self._all_windows()
        self._memory = self._all_memory()

    def _all_memory(self) -> tuple[memoryview, ...]:
        """Return the memory of what `add` sets: one number so takes a fifth of what an array takes."""
        arrays = (
            *(self.request, self.rank, self.since, self.tokens, self.sequences, self.base),
            *(self.curves, self.started),
        )
        return tuple(array.data for array in arrays)

    def _all_windows(self) -> NDArray[np.int32]:
        """Return a view of the W columns that begin at each place of the padded rows."""
        return np.asarray(sliding_window_view(self._padded.ravel(), self._width))


def first_of_each(values: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the place of the first of each run of equal values."""
    # `np.diff` is Python code, which takes longer than this.
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first.nonzero()[0]

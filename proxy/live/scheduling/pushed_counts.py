"""How far streams are that other processes serve: they tell it in arrays, and it stays in arrays.

A request has a **row** in the arrays from its acceptance to its end. Those who serve it name it by
that. With ten thousand streams a look at each of them in turn would cost more than every decision.
"""

from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.errors import BalanceRouteError

_FIRST_ROWS = 1_024
# Steps between two looks that are tried before the median is searched for.
_LIKELY = 4


class UnknownRowError(BalanceRouteError):
    """Progress was told of a row that no request has, or in arrays of unequal length."""


class InRow(Protocol):
    """One request, as the counts see it."""

    @property
    def row(self) -> int:
        """Its row."""
        ...

    @property
    def streamed(self) -> bool:
        """Whether anybody tells how far it is."""
        ...

    @property
    def emitted_before(self) -> int:
        """Tokens of all sequences that earlier bindings emitted."""
        ...


_Request = TypeVar("_Request", bound=InRow)
_Number = TypeVar("_Number", np.int64, np.bool_)


class PushedCounts(Generic[_Request]):
    """The rows of all requests; see `Counts` for those that are started."""

    def __init__(self) -> None:
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        self._taken = np.zeros(_FIRST_ROWS, np.bool_)
        # Of all sequences and bindings, and of each sequence on this binding.
        self._emitted = np.zeros(_FIRST_ROWS, np.int64)
        self._rounds = np.zeros(_FIRST_ROWS, np.int64)
        self._before = np.zeros(_FIRST_ROWS, np.int64)
        self._sequences = np.ones(_FIRST_ROWS, np.int64)
        self._offset = np.zeros(_FIRST_ROWS, np.int64)
        self._streams = np.zeros(_FIRST_ROWS, np.bool_)
        self._started: dict[int, _Request] = {}
        self._silent = 0
        # Of all streams by row, at the last look; void once anything has changed.
        self._changed = True
        self._leads = np.zeros(0, np.int64)
        self._settled = False  # Whether none of them is off.

    @property
    def silent(self) -> bool:
        """Whether a request without a stream is started."""
        return self._silent > 0

    def take(self, sequences: int) -> int:
        """Return a row for a request that is accepted, whose answer has so many sequences."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._taken[row] = True
        self._sequences[row] = sequences
        self._emitted[row] = self._rounds[row] = self._before[row] = 0
        return row

    def release(self, row: int) -> None:
        """Take back the row of a request that is over."""
        self._taken[row] = False
        self._free.append(row)

    def update(self, rows: NDArray[np.integer], emitted: NDArray[np.integer]) -> None:
        """Note how far some requests are.

        Args:
            rows: int[n], each once.
            emitted: int[n], tokens of all sequences and bindings.

        Raises:
            UnknownRowError: No request has one of the rows. Nothing was changed.
        """
        if len(rows) != len(emitted):
            raise UnknownRowError(f"progress of {len(rows)} rows has {len(emitted)} counts")
        if not len(rows):
            return
        if rows.max() >= len(self._taken) or not self._taken[rows].all():
            raise UnknownRowError("progress of a row that no request has")
        self._emitted[rows] = emitted
        self._rounds[rows] = (self._emitted[rows] - self._before[rows]) // self._sequences[rows]
        self._changed = True

    def emitted(self, row: int) -> int:
        """Return the tokens that a request has emitted, of all sequences and bindings."""
        return self._emitted.item(row)

    def rounds(self, row: int) -> int:
        """Return the tokens that each sequence of a started request has emitted on this binding."""
        return self._rounds.item(row)

    # What the step clock asks.

    def start(self, request: _Request, place: int) -> None:
        """Note that a request has started; see `Counts`."""
        row = request.row
        self._started[row] = request
        if not request.streamed:
            self._silent += 1
            return
        self._before[row] = request.emitted_before
        self._rounds[row] = (self._emitted[row] - self._before[row]) // self._sequences[row]
        self._offset[row] = place
        self._streams[row] = True
        self._changed = True

    def stop(self, request: _Request) -> None:
        """Note that a request is not started any more; see `Counts`."""
        row = request.row
        del self._started[row]
        if request.streamed:
            self._streams[row] = False
            self._changed = True
        else:
            self._silent -= 1

    def passed(self, steps: int) -> int | None:
        """Return how far ahead of the clock the median is; see `Counts`."""
        if not self._changed:  # The clock has caught up with these leads.
            return 0 if len(self._leads) else None
        self._changed = self._settled = False
        leads = self._leads = (self._rounds + self._offset)[self._streams]
        if not len(leads):
            return None
        # Of two in the middle the larger is exceeded by so many.
        larger = len(leads) - 1 - len(leads) // 2
        for ahead in range(_LIKELY):  # Each costs a fiftieth of a partition.
            if np.count_nonzero(leads > steps + ahead) <= larger:
                return ahead
        return int(np.partition(leads, len(leads) // 2)[len(leads) // 2]) - steps

    def corrected(self, steps: int, tolerance: int) -> list[tuple[_Request, int]]:
        """Put streams right that are off; see `Counts`."""
        if self._settled:
            return []
        self._settled = True
        off = self._leads - steps
        (which,) = (np.abs(off) > tolerance).nonzero()
        if not len(which):
            return []
        rows, off = self._streams.nonzero()[0][which], off[which]
        self._offset[rows] -= off
        self._leads[which] = steps
        started = self._started
        return [(started[row], by) for row, by in zip(rows.tolist(), off.tolist(), strict=True)]

    def _grow(self) -> None:
        """Double the rows, so that acceptance is amortised O(1)."""
        rows = len(self._taken)
        self._free = list(range(2 * rows - 1, rows - 1, -1))
        self._taken, self._streams = _doubled(self._taken), _doubled(self._streams)
        self._emitted, self._rounds = _doubled(self._emitted), _doubled(self._rounds)
        self._before, self._offset = _doubled(self._before), _doubled(self._offset)
        self._sequences = _doubled(self._sequences)


def _doubled(array: NDArray[_Number]) -> NDArray[_Number]:
    return np.concatenate([array, np.zeros_like(array)])

"""Survival curves of whole outputs, asked once per request and read at any age.

A curve is Pr[output > h], at k = 0..`LONGEST` the mean over the width around h = k x width; at its two
ends, the value there. At age a the survival h steps ahead is the ratio of the curve at a + h and at a,
between two points linear. So a request costs its predictor one question, when it is first a
candidate, however long it then runs.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.proxy.core.deposits import Running, first_of_each
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.trajectories import POINTS

if TYPE_CHECKING:
    from balanceroute.proxy.core.prediction import Predictor

# Six lasting outputs.
LONGEST = 3 * (POINTS - 1)
# The last point is repeated behind it, so that every window exists: what outlives its curve stays.
_COLUMNS = LONGEST + 1 + POINTS
# Rows of one question: a row has a probability for every single step.
_BATCH = 16
_FIRST_ROWS = 256
_PLACES = np.arange(LONGEST + 1)


class Curves:
    """The curves of the requests that may be admitted or run.

    Args:
        predictor: Asked for each request once.
    """

    def __init__(self, predictor: "Predictor") -> None:
        self._predictor = predictor
        self._row_of: dict[RequestId, int] = {}
        # Row 0 stands for requests that were never asked about: the mean of the latest candidates.
        self._keep(np.ones((_FIRST_ROWS, _COLUMNS)))
        self._free = list(range(1, _FIRST_ROWS))

    def __len__(self) -> int:
        """Return the number of curves that there is memory for."""
        return len(self._curves)

    def ask(self, requests: Sequence[RequestId], width: int) -> NDArray[np.int64]:
        """Ask about the requests that have no curve yet; return the rows of all, int64[n]."""
        unknown = [request for request in requests if request not in self._row_of]
        for begin in range(0, len(unknown), _BATCH):
            batch = unknown[begin : begin + _BATCH]
            survival = self._predictor.survival(
                batch, np.zeros(len(batch), np.int64), LONGEST * width
            )
            rows = [self._free.pop() for _ in batch]
            # So that it is not lost where between two points a request ends.
            begin_around = (width + 1) // 2
            around = survival[:, begin_around : begin_around + (LONGEST - 1) * width]
            self._curves[rows, 0] = 1.0
            self._curves[rows, 1:LONGEST] = around.reshape(len(batch), -1, width).mean(axis=2)
            self._curves[rows, LONGEST:] = survival[:, -1:]
            self._row_of.update(zip(batch, rows, strict=True))
        of_all = np.array([self._row_of[request] for request in requests])
        self._curves[0] = np.add.reduce(self._curves[of_all]) / len(of_all)
        return of_all

    def row_of(self, request: RequestId) -> int:
        """Return the row of a request; 0 if it was never asked about."""
        return self._row_of.get(request, 0)

    def rows_of(self, running: Running) -> NDArray[np.int64]:
        """Return the rows of some running requests, int64[n]; 0 of those never asked about."""
        rows = running.curves[running.places]
        (unknown,) = (rows < 0).nonzero()
        if unknown.size:
            requests = running.requests[unknown].tolist()
            found = np.array([*map(self.row_of, requests)], np.int64)
            # It stays while the request runs: only candidates are asked about.
            rows[unknown] = running.curves[running.places[unknown]] = found
        return rows

    def lasting_output(self, width: int) -> float:
        """Return E[o**2] / E[o] of the requests asked about last, up to the end of the curves."""
        mean = self._curves[0, : LONGEST + 1]
        # Sums by the trapezoid rule: half of the first point.
        return 2.0 * width * float(mean @ _PLACES) / (float(mean.sum()) - 0.5)

    def make_room(self, requests: int, is_known: Callable[[RequestId], bool]) -> None:
        """Have room for so many more requests, of which no longer known ones make way first."""
        if len(self._free) >= requests:
            return
        for request in [request for request in self._row_of if not is_known(request)]:
            self._free.append(self._row_of.pop(request))
        rows = len(self._curves)
        if len(self._free) < max(requests, rows // 2):
            more = max(requests, rows)
            self._free.extend(range(rows, rows + more))
            self._keep(np.concatenate([self._curves, np.ones((more, _COLUMNS))]))

    def stretch(self, factor: float) -> None:
        """Follow the grid, whose points are now `factor` times as far apart."""
        places = np.minimum(np.arange(_COLUMNS) * factor, _COLUMNS - 1)
        below = np.minimum(places.astype(np.int64), _COLUMNS - 2)
        share = places - below
        self._keep((1.0 - share) * self._curves[:, below] + share * self._curves[:, below + 1])

    def _keep(self, curves: NDArray[np.float64]) -> None:
        self._curves = np.ascontiguousarray(curves)
        # By the place in all curves in one line: each is taken as a whole, not point by point.
        self._windows = sliding_window_view(self._curves.reshape(-1), POINTS + 1)

    def survival(
        self, rows: NDArray[np.int64], ages: NDArray[np.int64], width: int
    ) -> NDArray[np.float64]:
        """Return float64[n, POINTS], the survival of some requests at their ages.

        Args:
            rows: int64[n], of their curves.
            ages: int64[n].
            width: Of the grid.
        """
        if not np.count_nonzero(ages):
            return self._curves[rows, :POINTS]
        curves, share = self._around(rows, ages, width)
        share = share[:, None]
        ahead = (1.0 - share) * curves[:, :-1] + share * curves[:, 1:]
        now = ahead[:, :1].copy()
        survival = np.ones_like(ahead)
        np.divide(ahead, now, out=survival, where=now > 0.0)
        return survival

    def sums(
        self,
        rows: NDArray[np.int64],
        ages: NDArray[np.int64],
        width: int,
        *,
        weights: NDArray[np.float64],
        groups: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return float64[m, k, POINTS], k weighted sums of the survival in each of m groups.

        What a sum of `survival` comes to, without a row for each request.

        Args:
            rows: int64[n], of their curves.
            ages: int64[n].
            width: Of the grid.
            weights: float64[k, n].
            groups: int64[n], ascending.
        """
        curves, share = self._around(rows, ages, width)
        rest = 1.0 - share
        now = rest * curves[:, 0] + share * curves[:, 1]
        stays = now <= 0.0
        relative = weights / np.where(stays, np.inf, now)
        parts = np.concatenate([relative * rest, relative * share])
        begins = first_of_each(groups)
        around = np.empty((len(begins), len(parts), POINTS + 1))
        bounds = [*begins.tolist(), len(rows)]
        for group, (begin, end) in enumerate(pairwise(bounds)):
            np.matmul(parts[:, begin:end], curves[begin:end], out=around[group])
        sums = around[:, : len(weights), :-1] + around[:, len(weights) :, 1:]
        if stays.any():
            sums += np.add.reduceat(weights * stays, begins, axis=1).T[:, :, None]
        return sums

    def _around(
        self, rows: NDArray[np.int64], ages: NDArray[np.int64], width: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the curves from the point before each age on, float64[n, POINTS + 1].

        And float64[n], how far from there to the next point the age is.
        """
        places, rest = np.divmod(ages, width)
        return self._windows[rows * _COLUMNS + np.minimum(places, LONGEST)], rest / width

"""Survival curves of whole outputs, from one question per request, to read at any age.

A curve is Pr[output > h], at k = 0..`LONGEST` the mean over the width around h = k x width; at its two
ends, the value there. At age a the survival h steps ahead is the ratio of the curve at a + h and at a,
between two points linear. So a request costs its predictor one question, when it is first a
candidate, however long it then runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.projection import Running, first_of_each

if TYPE_CHECKING:
    from balanceroute.proxy.core.prediction import OutputPredictor


# Expected KV load of a decode slot over a whole output, on a coarse grid of steps.
#
# The grid has `POINTS` points, `width` steps apart, up to `HORIZON_OUTPUTS` **lasting outputs**
# ahead: the mean output of the requests that a slot holds at any one time, E[o**2] / E[o]. With
# many short outputs and a few long ones it is a multiple of the mean. A slot holds w + h tokens
# while its request still runs, and after that what a refilled slot holds: a mean request, and
# when that one ends the next. So the **trajectory** of a request is
#
#     (w + h) S(h) + sum over departures at u <= h of Pr[ends at u] R(h - u),
#
# R the same sum for a mean request that starts at once (the renewal equation). Without R a rank
# whose requests end soon would look empty for the rest of the horizon.

POINTS = 32
HORIZON_OUTPUTS = 2.5
# Later points weigh less: the admissions until then can still correct them. The weights fall by e for
# each half of a lasting output.
WEIGHTS: NDArray[np.float64] = np.exp(-5.0 * np.arange(POINTS) / (POINTS - 1))

WEIGHTS /= WEIGHTS.sum()

# Departures that the means cover, and how many have to be known first.
_REMEMBERED = 512
_LEAST_KNOWN = 64
# The first requests that leave are the short ones. Predictions cover all; this bounds by how much longer
# they may be.
_MOST_CENSORED = 4.0
_MEAN_WEIGHT = 1 / 512
_AHEAD = np.arange(POINTS)
# By how much the row is later than the column, or the other way; negative ones count from the end.
_LATER = _AHEAD[:-1, None] - _AHEAD[:-1]
_FROM = _AHEAD - _AHEAD[:, None]
_WEIGHT_SO_FAR: list[float] = [0.0, *WEIGHTS.cumsum().tolist()]


class Slots:
    """The grid, and what a refilled slot holds.

    Attributes:
        width: Steps between two points of the grid; 0 until it was fitted.
        gains: float64[POINTS, POINTS], what a slot holds at each point, the column, because its request
            runs at each point, the row: all but the KV tokens that the request holds now.
        gained: float64[POINTS], the means of its rows by `WEIGHTS`.
        output_ratio: Mean output over mean prompt; 0 until enough requests have left.
    """

    def __init__(self) -> None:
        self.width = 0
        self.output_ratio = 0.0
        self._left: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._prompts = 0
        self._outputs = 0
        self._squares = 0
        self._predicted = 0.0
        self._refill(np.zeros(POINTS - 1))

    def leave(self, prompt_tokens: int, output_tokens: int) -> None:
        """Note a request that left its rank."""
        if len(self._left) == _REMEMBERED:
            prompt, output = self._left[0]
            self._prompts -= prompt
            self._outputs -= output
            self._squares -= output * output
        self._left.append((prompt_tokens, output_tokens))
        self._prompts += prompt_tokens
        self._outputs += output_tokens
        self._squares += output_tokens * output_tokens
        if len(self._left) >= _LEAST_KNOWN:
            self.output_ratio = self._outputs / max(self._prompts, 1)

    def fit(self) -> float:
        """Fit the grid to the lasting output; return the factor by which its width grew.

        The grid stays while it reaches far enough, but not twice as far as it should: a change makes the
        curves less exact.
        """
        left = self._squares / self._outputs
        lasting = min(max(self._predicted, left), _MOST_CENSORED * left)
        fitting = max(1, round(HORIZON_OUTPUTS * lasting / (POINTS - 1)))
        if fitting <= self.width <= 2 * fitting:
            return 1.0
        fitting = round(1.25 * fitting)
        before, self.width = self.width or fitting, fitting
        self._refill(np.zeros(POINTS - 1))
        return self.width / before

    def expect(self, output_tokens: float) -> None:
        """Note the predicted lasting output of the candidates."""
        weight = _MEAN_WEIGHT if self._predicted else 1.0
        self._predicted += weight * (output_tokens - self._predicted)

    def refill_with(self, prompts: NDArray[np.int64], survival: NDArray[np.float64]) -> None:
        """Assume that such requests refill empty slots, by the renewal equation.

        Args:
            prompts: int64[n], KV tokens of one sequence.
            survival: float64[n, POINTS], on the grid.
        """
        runs = np.add.reduce(survival) / len(survival)
        held = (prompts @ survival) / len(prompts) + self.width * _AHEAD * runs
        ends = runs[:-1] - runs[1:]
        # A request that ends between two points leaves half way, so the equation is of half widths, of
        # which both up to a point have half of its ends. With power series D of the ends, X of the
        # values at the points and Y of those half way, and HX and HY of `held` there, it is
        #     X = HX + t D (X + Y) / 2,    Y = HY + D X / 2 + t D Y / 2.
        # Without X: (1 - t D - (t - t**2) D**2 / 4) Y = HY + D (HX - t HY) / 2.
        half_way = 0.5 * (held[:-1] + held[1:])
        rises = held[:-1].copy()
        rises[1:] -= half_way[:-1]
        right = half_way + 0.5 * np.convolve(ends, rises)[: POINTS - 1]
        squares = np.zeros(POINTS)
        squares[1:] = np.convolve(ends, ends)[: POINTS - 1]
        # Zeros behind it: before its beginning a series has none.
        left = np.zeros(2 * POINTS - 3)
        left[0] = 1.0
        left[1 : POINTS - 1] = 0.25 * (squares[:-2] - squares[1:-1]) - ends[:-1]
        self._refill(np.linalg.solve(left[_LATER], right))

    def _refill(self, half_way: NDArray[np.float64]) -> None:
        """Note what a refilled slot holds, float64[POINTS - 1], from half a point after its refill on."""
        # As the request runs at point k and not at k - 1, its slot is refilled a point later.
        later = np.zeros(2 * POINTS - 1)
        later[: POINTS - 1] = -half_way
        later[1:POINTS] += half_way
        gains = later[_FROM]
        gains[0, 0] = 0.0
        gains[0, 1:] = half_way
        gains.ravel()[:: POINTS + 1] += self.width * _AHEAD
        self.gains: NDArray[np.float64] = gains
        self.gained: NDArray[np.float64] = gains @ WEIGHTS
        self._gained_so_far: list[float] = [0.0, *self.gained.cumsum().tolist()]

    def loads(
        self,
        kv_tokens: NDArray[np.int64],
        sequences: NDArray[np.int64],
        survival: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return float64[n, POINTS], the expected KV tokens of the requests' slots.

        Args:
            kv_tokens: int64[n], held now.
            sequences: int64[n], tokens gained per step.
            survival: float64[n, POINTS], on the grid.
        """
        gained = survival @ self.gains
        gained *= sequences[:, None]
        gained += kv_tokens[:, None] * survival
        return np.asarray(gained)

    def level(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the mean by `WEIGHTS` of what a slot holds whose request has such an output."""
        points = min(-(-output_tokens // self.width), POINTS)
        return prompt_tokens * _WEIGHT_SO_FAR[points] + self._gained_so_far[points]


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
        predictor: Gets one question about each request.
    """

    def __init__(self, predictor: "OutputPredictor") -> None:
        self._predictor = predictor
        self._row_of: dict[RequestId, int] = {}
        # Row 0 stands for requests without a curve: the mean of the latest candidates.
        self._keep(np.ones((_FIRST_ROWS, _COLUMNS)))
        self._free = list(range(1, _FIRST_ROWS))

    def __len__(self) -> int:
        return len(self._curves)

    def ask(self, requests: Sequence[RequestId], width: int) -> NDArray[np.int64]:
        """Ask the predictor about requests without a curve; return the rows of all, int64[n]."""
        unknown = [request for request in requests if request not in self._row_of]
        for begin in range(0, len(unknown), _BATCH):
            batch = unknown[begin : begin + _BATCH]
            survival = self._predictor.survival(
                batch, np.zeros(len(batch), np.int64), LONGEST * width
            )
            rows = [self._free.pop() for _ in batch]
            # This keeps where between two points a request ends.
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
        """Return the row of a request; 0 if it has no curve."""
        return self._row_of.get(request, 0)

    def rows_of(self, running: Running) -> NDArray[np.int64]:
        """Return the rows of some running requests, int64[n]; 0 without a curve."""
        rows = running.curves[running.places]
        (unknown,) = (rows < 0).nonzero()
        if unknown.size:
            requests = running.requests[unknown].tolist()
            found = np.array([*map(self.row_of, requests)], np.int64)
            # It stays while the request runs: only candidates get a curve.
            rows[unknown] = running.curves[running.places[unknown]] = found
        return rows

    def lasting_output(self, width: int) -> float:
        """Return E[o**2] / E[o] of the latest curves' requests, up to the end of the curves."""
        mean = self._curves[0, : LONGEST + 1]
        # Sums by the trapezoid rule: half of the first point.
        return 2.0 * width * float(mean @ _PLACES) / (float(mean.sum()) - 0.5)

    def make_room(self, requests: int, is_known: Callable[[RequestId], bool]) -> None:
        """Have room for so many more requests; first drop those that the scheduler no longer knows."""
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

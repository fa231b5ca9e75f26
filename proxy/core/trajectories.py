"""Expected KV load of a decode slot over a whole output, on a coarse grid of steps.

The grid has `POINTS` points, `width` steps apart, up to `HORIZON_OUTPUTS` **lasting outputs** ahead: the
mean output of the requests that a slot holds at any one time, E[o**2] / E[o]. With many short outputs
and a few long ones it is a multiple of the mean. A slot holds w + h tokens while its request still runs, and after that what a refilled slot holds: a mean
request, and when that one ends the next. So the **trajectory** of a request is

    (w + h) S(h) + sum over departures at u <= h of Pr[ends at u] R(h - u),

R the same sum for a mean request that starts at once (the renewal equation). Without R a rank whose
requests end soon would look empty for the rest of the horizon.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

POINTS = 32
HORIZON_OUTPUTS = 2.5
# What is further ahead weighs less: the admissions until then can still correct it. The weights fall by
# e for each half of a lasting output.
WEIGHTS: NDArray[np.float64] = np.exp(-5.0 * np.arange(POINTS) / (POINTS - 1))
WEIGHTS /= WEIGHTS.sum()

# Departures that the means are of, and how many have to be known first.
_REMEMBERED = 512
_LEAST_KNOWN = 64
# The first requests that leave are the short ones. Predictions tell of all; this bounds by how much
# longer these may be.
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
    """

    def __init__(self) -> None:
        self.width = 0
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

    @property
    def output_ratio(self) -> float:
        """Mean output over mean prompt; 0 until enough requests have left."""
        if len(self._left) < _LEAST_KNOWN:
            return 0.0
        return self._outputs / max(self._prompts, 1)

    def fit(self) -> float:
        """Fit the grid to the lasting output; return the factor by which its width grew.

        It stays while it reaches far enough, but not twice as far as it should: what is known on a grid
        is less exact on another.
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
        """Note the lasting output that is predicted of the candidates."""
        weight = _MEAN_WEIGHT if self._predicted else 1.0
        self._predicted += weight * (output_tokens - self._predicted)

    def refill_with(self, prompts: NDArray[np.int64], survival: NDArray[np.float64]) -> None:
        """Take it that empty slots are refilled with such requests, by the renewal equation.

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
        """Note what a refilled slot holds, float64[POINTS - 1], half a point and more after that."""
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

"""The line of the step time, T = a + b max L, by least squares."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A step longer than this many medians is a pause of the machine, not a step.
_PAUSE = 5.0
_LEAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted line.

    Attributes:
        base_ms: a.
        us_per_token: b.
        r2: Share of the variance of T that the line explains.
        steps: Steps fitted to.
        pauses: Steps left out because they took more than five times the median.
    """

    base_ms: float
    us_per_token: float
    r2: float
    steps: int
    pauses: int


def fit_step_time(max_loads: NDArray[np.int64], step_ns: NDArray[np.float64]) -> Fit | None:
    """Return the least-squares line; None if the steps are too few or their loads all the same.

    Args:
        max_loads: int64[steps], load of the heaviest rank, KV tokens.
        step_ns: float64[steps], time of the step.
    """
    if not len(step_ns):
        return None
    kept = step_ns <= _PAUSE * np.median(step_ns)
    loads, times = max_loads[kept].astype(np.float64), step_ns[kept]
    if len(loads) < _LEAST_STEPS or np.ptp(loads) == 0:
        return None
    off = loads - loads.mean()
    slope = float(off @ (times - times.mean()) / (off @ off))
    base = float(times.mean() - slope * loads.mean())
    spread = float(np.square(times - times.mean()).sum())
    missed = float(np.square(times - base - slope * loads).sum())
    return Fit(
        base_ms=base / 1e6,
        us_per_token=slope / 1e3,
        r2=1 - missed / spread if spread else 0.0,
        steps=len(loads),
        pauses=int((~kept).sum()),
    )

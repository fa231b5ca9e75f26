"""The line of the step time, from looks at the engines that see no single step.

Between two looks a request that runs emits a token per step, so tokens / running requests is the number
of steps. Looks that follow each other quickly see two or three, and not their fractions: the quotient
of two such numbers is too large on average, the more so the fewer steps there are, which is where the
loads are high. So each point of the fit is a window of many steps.
"""

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.validate.fit import Fit, fit_step_time

_WINDOW_STEPS = 25.0
"""One step more or less is then 4 % of a window's."""


def fit_looks(
    times_s: NDArray[np.float64],
    peaks: NDArray[np.float64],
    running: NDArray[np.float64],
    generated: NDArray[np.float64],
) -> Fit | None:
    """Return T = a + b x max L, in time of the wall; None if it cannot be told.

    Args:
        times_s: float64[looks].
        peaks: float64[looks], KV tokens of the fullest rank.
        running: float64[looks], requests in all batches.
        generated: float64[looks], tokens of all ranks since the start.
    """
    seconds, tokens = np.diff(times_s), np.diff(generated)
    at_work = (running[1:] + running[:-1]) / 2
    # Not a number where nothing ran, or an engine does not tell its tokens or counts anew. So is the window.
    steps = np.full(len(tokens), np.nan)
    np.divide(tokens, at_work, out=steps, where=(at_work > 0) & (tokens >= 0))
    told = steps[steps >= 0]
    if not told.any():
        return None
    looks = min(len(steps), int(np.ceil(_WINDOW_STEPS / told.mean())))
    of_time, of_steps, of_peaks = (
        np.convolve(values, np.ones(looks), "valid")
        for values in (seconds, steps, steps * (peaks[1:] + peaks[:-1]) / 2)
    )
    known = of_steps > 0
    if not known.any():
        return None
    fit = fit_step_time(
        (of_peaks[known] / of_steps[known]).astype(np.int64), 1e9 * of_time[known] / of_steps[known]
    )
    return None if fit is None or fit.base_ms <= 0 or fit.us_per_token <= 0 else fit

"""How far the proxy's loads were from the engine's, and how late they were."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.validate.timeline import Timeline

MAX_LAG_NS = 1_000_000_000
_COARSE_NS = 20_000_000
_FINE_NS = 1_000_000
# With fewer samples no lag is computed.
_LEAST_SAMPLES = 20
# With more samples than this the lag is computed from some of them, evenly spaced.
_MOST_SAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of loads. Relative ones are shares of the engine's own load.

    Attributes:
        samples: Samples compared: those at which the engine's load was large enough.
        tokens_p50: Median of the absolute error, tokens.
        tokens_p99: Its 99th percentile.
        p50: Median of the relative error's absolute value.
        p90: Its 90th percentile.
        p99: Its 99th percentile.
        bias: Median of the relative error; positive if the proxy's load is too high.
    """

    samples: int
    tokens_p50: float
    tokens_p99: float
    p50: float
    p90: float
    p99: float
    bias: float


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the proxy's loads were.

    Attributes:
        lag_ms: The shift with the best fit; positive if the proxy was late.
        tokens_p50: Median of the absolute error at that shift, tokens.
        unshifted_tokens_p50: That without a shift, of the same samples.
    """

    lag_ms: float
    tokens_p50: float
    unshifted_tokens_p50: float


def errors(
    proxy_loads: NDArray[np.int64], truth: NDArray[np.float64], *, min_tokens: int
) -> Errors | None:
    """Return how far loads were off; None if no sample counts.

    Args:
        proxy_loads: int64[samples], the proxy's loads.
        truth: float64[samples], the engine's; NaN where it is not known.
        min_tokens: Samples at which the engine's load was below this do not count; at least 1.
    """
    assert min_tokens >= 1
    counts = truth >= min_tokens  # False for NaN.
    if not counts.any():
        return None
    truth = truth[counts]
    off = proxy_loads[counts] - truth
    size, share = np.abs(off), off / truth
    p50, p90, p99 = np.percentile(np.abs(share), [50, 90, 99]).tolist()
    return Errors(
        samples=len(truth),
        tokens_p50=float(np.median(size)),
        tokens_p99=float(np.percentile(size, 99)),
        p50=p50,
        p90=p90,
        p99=p99,
        bias=float(np.median(share)),
    )


def lag(
    times_ns: NDArray[np.int64], proxy_loads: NDArray[np.int64], timeline: Timeline
) -> Lag | None:
    """Return the shift, up to a second either way, with the least median error.

    Only samples are used for which every shift falls on the timeline, and at which either side has a
    load. Of equally good shifts the smallest is returned. A load that is off by a constant, not by
    time, changes the shift too; the errors show which.

    Args:
        times_ns: int64[samples], Unix time.
        proxy_loads: int64[samples], the proxy's loads.
        timeline: The engine's.

    Returns:
        None if the samples are too few, or the loads never change.
    """
    inside = (times_ns >= timeline.begin_ns[0] + MAX_LAG_NS) & (
        times_ns <= timeline.end_ns[-1] - MAX_LAG_NS
    )
    busy = (proxy_loads > 0) | (np.nan_to_num(timeline.loads_at(times_ns)) > 0)
    chosen = np.flatnonzero(inside & busy)
    if len(chosen) < _LEAST_SAMPLES:
        return None
    chosen = chosen[:: -(-len(chosen) // _MOST_SAMPLES)]
    times_ns, proxy_loads = times_ns[chosen], proxy_loads[chosen]
    if np.ptp(timeline.loads_at(times_ns)) == 0:
        return None

    def error_at(shift_ns: int) -> float:
        return float(np.median(np.abs(proxy_loads - timeline.loads_at(times_ns - shift_ns))))

    def best(shifts_ns: NDArray[np.int64]) -> int:
        return min(map(int, shifts_ns), key=lambda shift_ns: (error_at(shift_ns), abs(shift_ns)))

    coarse_ns = best(np.arange(-MAX_LAG_NS, MAX_LAG_NS + 1, _COARSE_NS))
    fine_ns = np.arange(coarse_ns - _COARSE_NS, coarse_ns + _COARSE_NS + 1, _FINE_NS)
    shift_ns = best(fine_ns[np.abs(fine_ns) <= MAX_LAG_NS])
    return Lag(shift_ns / 1e6, error_at(shift_ns), error_at(0))

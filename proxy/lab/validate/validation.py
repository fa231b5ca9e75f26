"""A complete validation: every rank's load error, every barrier, the line of the step time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from balanceroute.engine_patch.reader import EngineTrace
from balanceroute.proxy.lab.validate.traces import Samples, Timeline, ValidationError, timeline_of

# The line of the step time, T = a + b max L, by least squares.

# A step longer than this many medians is a pause of the machine, not a step.
_PAUSE = 5.0
_LEAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Fit:
    base_ms: float  # a.
    us_per_token: float  # b.
    r2: float  # Share of the variance of T that the line explains.
    steps: int  # Steps fitted to.
    pauses: int  # Steps left out because they took more than five times the median.


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


# Decode ranks in lock step: the same step on all of them, and the time that they waited.


@dataclass(frozen=True, slots=True)
class Aligned:
    """The steps that every rank of a barrier recorded, in order."""

    loads: NDArray[np.int64]  # int64[steps, ranks], KV tokens.
    step_ns: NDArray[np.float64]  # float64[steps], the ranks' median time of the step.
    prefill_tokens: NDArray[np.int64]  # int64[steps], of all ranks.
    dummy: NDArray[np.bool_]  # bool[steps, ranks].
    spread_ns: NDArray[np.int64]  # int64[steps], between the first and the last rank's end.


@dataclass(frozen=True, slots=True)
class Idle:
    """The cost of a barrier."""

    ranks: int  # Of the barrier.
    steps: int  # Aligned steps at which some rank had a load.
    # Idle fraction by loads: sum of max L - L_g over sum of max L, over steps and ranks.
    tokens: float
    # Share of the ranks' wall time in which they waited: b (max L - L_g) of each step over its
    # time. None without a fit, or if b is not positive.
    time: float | None
    dummy: float  # Share of the ranks' wall time in steps without a request of their own.
    # Median time between the first and the last rank's end of a step. Large if the ranks' clocks
    # differ, or the steps are not the same ones.
    spread_ms_p50: float


def align(timelines: Sequence[Timeline]) -> Aligned:
    """Return the steps that are on every timeline, by their places in the barrier."""
    places = reduce(np.intersect1d, (timeline.place[timeline.place >= 0] for timeline in timelines))
    rows: list[Timeline] = []
    for timeline in timelines:
        # Of two steps in one place, which no engine writes, the first is taken.
        known, first = np.unique(timeline.place, return_index=True)
        rows.append(timeline.cut(_mask(first[np.isin(known, places)], len(timeline.place))))
    # By place, which is the order of time within one process.
    orders = [np.argsort(row.place) for row in rows]

    def column(name: str) -> "NDArray[np.int64]":
        found = [getattr(row, name)[order] for row, order in zip(rows, orders, strict=True)]
        return np.stack(found, axis=1)

    ends = column("end_ns")
    return Aligned(
        loads=column("kv_tokens"),
        step_ns=np.median(column("cycle_ns"), axis=1),
        prefill_tokens=column("prefill_tokens").sum(axis=1),
        dummy=column("dummy").astype(np.bool_),
        spread_ns=np.ptp(ends, axis=1),
    )


def idle(aligned: Aligned, fit: Fit | None) -> Idle | None:
    """Return the cost of the barrier without prefill steps; None if no rank had a load."""
    chosen = (aligned.loads.max(axis=1) > 0) & (aligned.prefill_tokens == 0)
    if not chosen.any():
        return None
    loads, step_ns = aligned.loads[chosen], aligned.step_ns[chosen]
    ranks = loads.shape[1]
    envelope = loads.max(axis=1)
    missing = ranks * envelope - loads.sum(axis=1)
    wall_ns = ranks * float(step_ns.sum())
    lost = None
    if fit is not None and fit.us_per_token > 0:
        lost = float(missing.sum()) * fit.us_per_token * 1e3 / wall_ns
    return Idle(
        ranks=ranks,
        steps=len(loads),
        tokens=float(missing.sum() / (ranks * envelope.sum())),
        time=lost,
        dummy=float((aligned.dummy[chosen] * step_ns[:, None]).sum() / wall_ns),
        spread_ms_p50=float(np.median(aligned.spread_ns[chosen])) / 1e6,
    )


def _mask(places: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    mask = np.zeros(length, np.bool_)
    mask[places] = True
    return mask


# How far the proxy's loads were from the engine's, and how late they were.

MAX_LAG_NS = 1_000_000_000
_COARSE_NS = 20_000_000
_FINE_NS = 1_000_000
# With fewer samples no lag is computed.
_LEAST_SAMPLES = 20
# With more samples than this the lag is computed from some of them, evenly spaced.
_MOST_SAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of loads. Relative ones are shares of the engine's own load."""

    samples: int  # Samples compared: those at which the engine's load was large enough.
    tokens_p50: float  # Median of the absolute error, tokens.
    tokens_p99: float  # Its 99th percentile.
    p50: float  # Median of the relative error's absolute value.
    p90: float  # Its 90th percentile.
    p99: float  # Its 99th percentile.
    bias: float  # Median of the relative error; positive if the proxy's load is too high.


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the proxy's loads were."""

    lag_ms: float  # The shift with the best fit; positive if the proxy was late.
    tokens_p50: float  # Median of the absolute error at that shift, tokens.
    unshifted_tokens_p50: float  # That without a shift, of the same samples.


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


@dataclass(frozen=True, slots=True)
class RankResult:
    name: str
    file: str
    steps: int  # Steps with a batch within the time of the log.
    # Errors of the load that the proxy counted in the batch; None if no sample counts.
    started: Errors | None
    bound: Errors | None  # Errors of the load that it had sent there, including transfers.
    lag: Lag | None  # The lag of the load in the batch; None if it cannot be computed.
    samples: Samples  # The proxy's samples, for plots.
    timeline: Timeline  # The engine's steps.


@dataclass(frozen=True, slots=True)
class UnitResult:
    """Ranks that step together: those of a barrier, or a rank by itself."""

    ranks: tuple[str, ...]  # The ranks' names.
    whole: bool  # Whether these are all ranks of the barrier; if not, its cost is not computed.
    idle: Idle | None  # The cost of the barrier; None for a single rank, or without a load.
    fit: Fit | None  # The line of the step time; None if it cannot be fitted.
    max_loads: NDArray[np.int64]  # int64[steps], of the steps without prefill, for the fit.
    step_ns: NDArray[np.float64]  # float64[steps], likewise.


@dataclass(frozen=True, slots=True)
class Validation:
    ranks: tuple[RankResult, ...]
    unmatched: tuple[str, ...]  # Ranks without a trace.
    started: Errors | None  # Errors over all ranks.
    bound: Errors | None  # Errors over all ranks.
    units: tuple[UnitResult, ...]  # Barriers and single ranks.
    fit: Fit | None  # One line for all units.


def validate(
    log: Mapping[str, Samples], traces: Mapping[str, EngineTrace], *, min_tokens: int
) -> Validation:
    """Compare the proxy's loads with those of some ranks' engines in the time of the log.

    Errors are computed from samples at which the engine's load was at least `min_tokens`.

    Raises:
        ValidationError: No trace has a step in the time of the log.
    """
    timelines = {name: timeline_of(trace) for name, trace in traces.items()}
    cut = {name: _within(timelines[name], log[name]) for name in traces}
    if not any(len(timeline.end_ns) for timeline in cut.values()):
        raise ValidationError("the log and the traces have no time in common: other runs?")
    ranks = tuple(
        _rank(
            name,
            file=trace.path.name,
            samples=log[name],
            timeline=timelines[name],
            steps=int((~cut[name].dummy).sum()),
            min_tokens=min_tokens,
        )
        for name, trace in traces.items()
    )
    truths = [result.timeline.loads_at(result.samples.times_ns) for result in ranks]
    truth = np.concatenate(truths)
    started = np.concatenate([result.samples.started_tokens for result in ranks])
    bound = np.concatenate([result.samples.bound_tokens for result in ranks])
    units = tuple(
        _unit(names, [cut[name] for name in names], whole=whole)
        for names, whole in _units(traces).items()
    )
    return Validation(
        ranks=ranks,
        unmatched=tuple(name for name in log if name not in traces),
        started=errors(started, truth, min_tokens=min_tokens),
        bound=errors(bound, truth, min_tokens=min_tokens),
        units=units,
        fit=fit_step_time(
            np.concatenate([unit.max_loads for unit in units]),
            np.concatenate([unit.step_ns for unit in units]),
        ),
    )


def _within(timeline: Timeline, samples: Samples) -> Timeline:
    first_ns, last_ns = samples.times_ns[0], samples.times_ns[-1]
    return timeline.cut((timeline.end_ns >= first_ns) & (timeline.begin_ns <= last_ns))


def _rank(
    name: str, *, file: str, samples: Samples, timeline: Timeline, steps: int, min_tokens: int
) -> RankResult:
    truth = timeline.loads_at(samples.times_ns)
    return RankResult(
        name=name,
        file=file,
        steps=steps,
        started=errors(samples.started_tokens, truth, min_tokens=min_tokens),
        bound=errors(samples.bound_tokens, truth, min_tokens=min_tokens),
        lag=lag(samples.times_ns, samples.started_tokens, timeline),
        samples=samples,
        timeline=timeline,
    )


def _units(traces: Mapping[str, EngineTrace]) -> dict[tuple[str, ...], bool]:
    """Return the names of the ranks that step together, and whether these are all of them."""
    units: dict[object, list[str]] = {}
    sizes: dict[object, object] = {}
    for name, trace in traces.items():
        key: object = name
        if trace.header.get("barrier") is True:
            key = (trace.header.get("dp_group"),)
            sizes[key] = trace.header.get("dp_size")
        units.setdefault(key, []).append(name)
    return {
        tuple(names): key not in sizes or sizes[key] == len(names) for key, names in units.items()
    }


def _unit(names: tuple[str, ...], timelines: Sequence[Timeline], *, whole: bool) -> UnitResult:
    if not whole:
        # The heaviest rank may be one without a trace.
        return UnitResult(names, whole, None, None, np.empty(0, np.int64), np.empty(0))
    if len(names) == 1:
        (timeline,) = timelines
        chosen = ~timeline.dummy & (timeline.prefill_tokens == 0)
        loads, step_ns = timeline.kv_tokens[chosen], timeline.cycle_ns[chosen].astype(np.float64)
        return UnitResult(names, whole, None, fit_step_time(loads, step_ns), loads, step_ns)
    aligned: Aligned = align(timelines)
    envelope = aligned.loads.max(axis=1, initial=0)
    chosen = (envelope > 0) & (aligned.prefill_tokens == 0)
    loads, step_ns = envelope[chosen], aligned.step_ns[chosen]
    fit = fit_step_time(loads, step_ns)
    return UnitResult(names, whole, idle(aligned, fit), fit, loads, step_ns)

"""A complete validation: every rank's load error, every barrier, the line of the step time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.engine_patch.reader import EngineTrace
from balanceroute.proxy.validate.barrier import Aligned, Idle, align, idle
from balanceroute.proxy.validate.errors import ValidationError
from balanceroute.proxy.validate.fit import Fit, fit_step_time
from balanceroute.proxy.validate.load_log import Samples
from balanceroute.proxy.validate.mirror import Errors, Lag, errors, lag
from balanceroute.proxy.validate.timeline import Timeline, timeline_of


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank.

    Attributes:
        steps: Steps with a batch within the time of the log.
        started: Errors of the load that the proxy counted in the batch; None if no sample counts.
        bound: Errors of the load that it had sent there, including transfers.
        lag: The lag of the load in the batch; None if it cannot be computed.
        samples: The proxy's samples, for plots.
        timeline: The engine's steps.
    """

    name: str
    file: str
    steps: int
    started: Errors | None
    bound: Errors | None
    lag: Lag | None
    samples: Samples
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class UnitResult:
    """Ranks that step together: those of a barrier, or a rank by itself.

    Attributes:
        ranks: Their names.
        whole: Whether these are all ranks of the barrier; if not, its cost is not computed.
        idle: The cost of the barrier; None for a single rank, or without a load.
        fit: The line of the step time; None if it cannot be fitted.
        max_loads: int64[steps], of the steps without prefill, what is fitted.
        step_ns: float64[steps], likewise.
    """

    ranks: tuple[str, ...]
    whole: bool
    idle: Idle | None
    fit: Fit | None
    max_loads: NDArray[np.int64]
    step_ns: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of a validation.

    Attributes:
        unmatched: Ranks without a trace.
        started: Errors over all ranks.
        bound: Likewise.
        units: Barriers and single ranks.
        fit: One line for all units.
    """

    ranks: tuple[RankResult, ...]
    unmatched: tuple[str, ...]
    started: Errors | None
    bound: Errors | None
    units: tuple[UnitResult, ...]
    fit: Fit | None


def validate(
    log: Mapping[str, Samples], traces: Mapping[str, EngineTrace], *, min_tokens: int
) -> Validation:
    """Compare the proxy's loads with what the engines did.

    Steps outside the time of the log are ignored.

    Args:
        log: The samples of every rank.
        traces: The traces of some of them.
        min_tokens: Errors are computed from samples at which the engine's load was at least this.

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

"""Policies compared on the same segments of a trace.

Every policy replays the same workloads; a figure is the mean over the segments, with its standard
error. Seeds derive from the experiment's seed, the segment and the policy alone.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean, stdev
from traceback import extract_tb

import numpy as np
from msgspec import structs

from balanceroute.predictors import (
    Capped,
    Hinted,
    NoPrediction,
    Oracle,
    Predictor,
    RequestFeatures,
    Survival,
)
from balanceroute.predictors.base import Checked
from balanceroute.predictors.files import load
from balanceroute.predictors.kinds import KINDS, train
from balanceroute.predictors.past import past_requests
from balanceroute.predictors.survival import Hint
from balanceroute.proxy.core.config import outside_name
from balanceroute.proxy.core.errors import ConfigError, PolicyError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.policies import (
    PolicyInputs,
    PolicySettings,
    is_outside,
    make_policy,
    predicts,
)
from balanceroute.proxy.core.prefill import PREFILL_CHOICES, PrefillInputs
from balanceroute.proxy.lab.service_levels import ByGroup, ServiceTargets, mean_of
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.recorder import Recorder, RunMetrics, ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload, playable, split
from balanceroute.traces import TraceRequest, read_names, read_trace

# The predictors of BR-H, in one simulated run.
#
# A run's predictor starts with the requests before its segment and learns from those that finish,
# as in a proxy that has served them. A trained predictor starts with its file.

Forecast = Callable[[Workload, PolicySettings], Predictor]
"""Makes the predictor of one run."""


def _oracle(workload: Workload, _: PolicySettings) -> Predictor:
    outputs = [request.output_tokens for request in workload.requests]
    return Oracle({RequestId(i): tokens for i, tokens in enumerate(outputs)})


def _trained(kind: str, workload: Workload, settings: PolicySettings) -> Predictor:
    try:
        return train(kind, past_requests(workload.history), horizon_steps=settings.steps_ahead)
    except ConfigError as error:
        raise ConfigError(f"{error}: --known N has it learn from the first N") from None


def _survival(workload: Workload, _: PolicySettings | None = None) -> Predictor:
    # In the order of arrival, as for all figures that are published.
    return Survival(request.output_tokens for request in workload.history)


class _Thirds(Hinted):
    """Knows of each request whether its output is in the short, middle or long third."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(_survival(workload))
        played = [request.output_tokens for request in workload.requests]
        known = [request.output_tokens for request in workload.history]
        thirds = np.quantile(known + played, [1 / 3, 2 / 3])
        # A hint is the limit of a third: numbers that only distinguish the thirds.
        limits = np.append(np.rint(thirds).astype(np.int64), max(known + played))
        self._third = limits[np.searchsorted(thirds, played)].tolist()
        for third, output in zip(
            limits[np.searchsorted(thirds, known)].tolist(), known, strict=True
        ):
            self.learn(Hint(third, "client"), output)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        super().begin(request, structs.replace(features, expected_tokens=self._third[request]))


def _none(_: Workload, __: PolicySettings) -> Predictor:
    return NoPrediction()


FORECASTS: dict[str, Forecast] = {
    **{kind: partial(_trained, kind) for kind in KINDS},
    "survival": _survival,
    "thirds": lambda workload, _: _Thirds(workload),
    "oracle": _oracle,
    "none": _none,
}


def _outside(name: str, workload: Workload) -> Predictor:
    predictor = Checked(name)
    # Behind those of the run.
    for number, past in enumerate(past_requests(workload.history), len(workload.requests)):
        predictor.begin(RequestId(number), past.features)
        predictor.observe(RequestId(number), past.output_tokens)
    return predictor


def forecast_called(word: str) -> Forecast:
    """Return one of `FORECASTS`, or that of a trained predictor's file or of one from outside.

    Raises:
        ConfigError: Neither is called so.
    """
    if word in FORECASTS:
        return FORECASTS[word]
    path = Path(word)
    if not path.is_file():
        outside = outside_name("predictors", word)
        if outside is not None:
            return lambda workload, _: _outside(outside, workload)
        raise ConfigError(f"{word!r} is no file, and none of {', '.join(FORECASTS)}")
    # Read for every run: what it learns in one must not be known in the next.
    return lambda _, __: load(path)


METRICS = tuple(one.name for one in fields(RunMetrics))


# The fields of a result's representation.
_SHOWN = ("idle_fraction", "output_tokens_per_s", "ttft_s_p99", "tpot_ms_p95")


@dataclass(frozen=True, slots=True)
class PolicyResult:
    policy: str
    mean: dict[str, float]  # Of each of `METRICS` over the segments.
    # The standard error of each mean; 0 for a single segment, which has none.
    stderr: dict[str, float]
    picture: list[list[int]]  # Loads by step and rank in the first segment's steady state.
    segments: int = 1  # How many runs the means are of.
    # The means of each tenant and class; empty if not asked for.
    groups: ByGroup = field(default_factory=dict)
    service: ServiceLog | None = None  # The first segment's account of them.

    def __repr__(self) -> str:
        """Return the text for a notebook: some figures, and not the thousands of `picture`."""
        shown = ", ".join(f"{name}={self.mean[name]:.4g}" for name in _SHOWN)
        return f"PolicyResult({self.policy!r}, {shown}, segments={self.segments})"


def run_experiment(
    deployment: SimulatedDeployment,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    settings: PolicySettings,
    forecast: Forecast,
    *,
    seed: int = 0,
    targets: ServiceTargets | None = None,
    progress: Callable[[str, int], None] = lambda _policy, _requests: None,
) -> Iterator[PolicyResult]:
    """Run every policy on every workload; yield each policy's figures when its runs are done.

    With `targets` it has the figures of tenants and classes, too. `progress` is called after each step
    with the policy and the number of requests that finished.

    Raises:
        ConfigError: A policy is unknown, a predictor cannot be made, or a workload is too short for a
            steady state.
        PolicyError: A policy from outside failed.
    """
    for policy in policies:
        runs: list[RunMetrics] = []
        groups: list[ByGroup] = []
        first: Recorder | None = None
        for segment, workload in enumerate(workloads):
            simulation = make_simulation(
                deployment,
                workload,
                policy,
                settings,
                forecast,
                seed=f"{seed}/{segment}/{policy}",
                service=None if targets is None else ServiceLog(workload.requests),
                on_finished=partial(progress, policy),
            )
            recorder = _run(simulation, policy)
            runs.append(recorder.metrics())
            first = first or recorder
            if recorder.service is not None and targets is not None:
                groups.append(recorder.service.figures(targets))
        assert first is not None
        yield _summarise(policy, runs, groups, first)


def _run(simulation: Simulation, policy: str) -> Recorder:
    """Run a simulation; a failure of a policy from outside is its own, not the simulator's.

    Raises:
        PolicyError: Such a policy failed, or left requests in the pool for ever.
    """
    if not is_outside(policy):
        return simulation.run()
    try:
        return simulation.run()
    except Exception as error:
        raise PolicyError(f"policy {policy!r} failed{_place_of(error)}: {error!r}") from error


def _place_of(error: Exception) -> str:
    """Return where code from outside this package raised or called; empty if none did."""
    own = str(Path(__file__).parents[3])
    frames = extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(own)]
    return f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def make_simulation(
    deployment: SimulatedDeployment,
    workload: Workload,
    policy: str,
    settings: PolicySettings,
    forecast: Forecast,
    *,
    seed: str,
    service: ServiceLog | None = None,
    on_finished: Callable[[int], None] = lambda _: None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Simulation:
    """Return one run, ready to go.

    Raises:
        ConfigError: The policy is unknown, or the predictor cannot be made.
    """
    # Other policies do not predict, and training takes time.
    predicting = predicts(policy) or deployment.expects_output
    predicting |= settings.kv_peak_quantile is not None
    asked: Predictor = forecast(workload, settings) if predicting else NoPrediction()
    # As in the proxy; but a hint could only mislead an oracle.
    if not isinstance(asked, Oracle):
        limited = [request for request in workload.history if request.max_tokens is not None]
        asked = Hinted(asked, past_requests(limited))
    predictor = Capped(asked)
    parts = PolicyInputs(
        deployment.ranks,
        deployment.batch_limit,
        settings,
        random.Random(seed),
        predictor,
        rank_kv_tokens=deployment.rank_kv_tokens,
        scores=deployment.scores,
    )
    return Simulation(
        deployment,
        workload,
        make_policy(policy, parts),
        predictor,
        service=service,
        prefill_choice=partial(
            PREFILL_CHOICES[deployment.prefill_choice],
            PrefillInputs(random.Random(f"{seed}/prefill"), scores=deployment.scores),
        ),
        on_finished=on_finished,
        clock_ns=clock_ns,
    )


def _summarise(
    policy: str, runs: Sequence[RunMetrics], groups: Sequence[ByGroup], first: Recorder
) -> PolicyResult:
    mean: dict[str, float] = {}
    stderr: dict[str, float] = {}
    for name in METRICS:
        values = [float(getattr(run, name)) for run in runs]
        mean[name] = fmean(values)
        stderr[name] = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return PolicyResult(
        policy, mean, stderr, first.picture, len(runs), mean_of(groups), first.service
    )


# Simulations from Python: `from balanceroute import simulate`.


def _requests_of(
    trace: str | PathLike[str] | Sequence[TraceRequest], columns: Mapping[str, str] | None
) -> Sequence[TraceRequest]:
    """Return the requests of `simulate`'s trace. Raises ConfigError: of `columns`."""
    if not isinstance(trace, str | PathLike):
        if columns is not None:
            raise ConfigError("columns: are those of a file, and the trace is none")
        return trace
    if columns is None:
        return read_trace(trace)
    try:
        names = read_names(",".join(f"{field}={name}" for field, name in columns.items()))
    except ValueError as error:
        raise ConfigError(f"columns: {error}") from None
    return read_trace(trace, columns=names)


def simulate(
    trace: str | PathLike[str] | Sequence[TraceRequest],
    *,
    policies: Sequence[str] = ("jsq", "br-h"),
    ranks: int = 8,
    batch: int = 16,
    deployment: SimulatedDeployment | None = None,
    rate: float | None = None,
    backlog: int | None = None,
    concurrency: int | None = None,
    requests: int | None = None,
    segments: int = 1,
    predictor: str = "survival",
    settings: PolicySettings | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
) -> list[PolicyResult]:
    """Replay a trace as `balanceroute simulate` does; return the figures in the order of `policies`.

    Args:
        trace: A file, the name of a shipped trace, or requests by arrival.
        policies: Names of policies, or `module:function`.
        deployment: All of the machines, in place of `ranks` and `batch`.
        rate: Open loop, see `Workload`; 1 if no other pace is given.
        backlog: Saturated, see `Workload`.
        concurrency: Closed loop, see `Workload`.
        requests: Replay only the first ones.
        segments: Cut the trace in so many runs, of which the figures are means.
        predictor: Of `br-h`: `survival`, another name, or a file that `balanceroute train` wrote.
        columns: What the columns or keys of a file of your own are called, by `arrival`, `prompt` and `output`,
            and if they are there `limit`, `tenant`, `class` and `deadline`; see `--columns`.

    Raises:
        ConfigError: A value or a combination of values makes no sense.
        PolicyError: A policy from outside failed.
        TraceError: The trace cannot be read.
    """
    if rate is None and backlog is None and concurrency is None:
        rate = 1.0
    workloads = split(
        playable(_requests_of(trace, columns)[:requests]),
        segments=segments,
        rate=rate,
        backlog=backlog,
        concurrency=concurrency,
    )
    return list(
        run_experiment(
            deployment or SimulatedDeployment(ranks=ranks, batch_limit=batch),
            workloads,
            policies,
            settings or PolicySettings(),
            forecast_called(predictor),
            seed=seed,
        )
    )

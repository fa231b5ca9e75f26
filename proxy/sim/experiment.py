"""Policies compared on the same segments of a trace.

Every policy replays the same workloads; a figure is the mean over the segments, with its standard
error. Seeds derive from the experiment's seed, the segment and the policy alone.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from traceback import extract_tb

from balanceroute.predictors import Capped, Hinted, NoPrediction, Oracle, Predictor
from balanceroute.predictors.traced import past_requests
from balanceroute.proxy.core.errors import PolicyError
from balanceroute.proxy.core.policies import (
    PolicyInputs,
    PolicySettings,
    is_outside,
    make_policy,
    predicts,
)
from balanceroute.proxy.core.prefill import PREFILL_CHOICES, PrefillInputs
from balanceroute.proxy.service_levels import ByGroup, Targets, mean_of
from balanceroute.proxy.sim.driver import Deployment, Simulation
from balanceroute.proxy.sim.forecast import Forecast
from balanceroute.proxy.sim.recorder import Recorder, RunMetrics
from balanceroute.proxy.sim.service_log import ServiceLog
from balanceroute.proxy.sim.workload import Workload

METRICS = tuple(one.name for one in fields(RunMetrics))


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's figures.

    Attributes:
        policy: Its name.
        mean: Of each of `METRICS` over the segments.
        stderr: The standard error of each mean; 0 for a single segment, which has none.
        segments: How many runs the means are of.
        groups: The means of each tenant and class; empty if not asked for.
        service: The first segment's account of them.
        picture: Loads by step and rank in the first segment's steady state.
    """

    policy: str
    mean: dict[str, float]
    stderr: dict[str, float]
    picture: list[list[int]]
    segments: int = 1
    groups: ByGroup = field(default_factory=dict)
    service: ServiceLog | None = None


def run_experiment(
    deployment: Deployment,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    settings: PolicySettings,
    forecast: Forecast,
    *,
    seed: int = 0,
    targets: Targets | None = None,
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
    """Run a simulation; what fails in a policy from outside is its fault, not the simulator's.

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
    own = str(Path(__file__).parents[2])
    frames = extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(own)]
    return f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def make_simulation(
    deployment: Deployment,
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
    # The others do not predict, and training takes time.
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
    )
    return Simulation(
        deployment,
        workload,
        make_policy(policy, parts),
        predictor,
        service=service,
        prefill_choice=partial(
            PREFILL_CHOICES[deployment.prefill_choice],
            PrefillInputs(random.Random(f"{seed}/prefill"), limits=deployment.score_limits),
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

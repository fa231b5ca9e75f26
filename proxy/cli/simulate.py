"""`balanceroute simulate`: replay a trace through the policies in virtual time."""

import argparse
import sys
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from balanceroute import __version__
from balanceroute.proxy.cli.outputs import (
    PipedProgress,
    StageBar,
    add_output_flags,
    answer,
    check_outputs,
    for_people,
    options,
)
from balanceroute.proxy.cli.run_flags import Machines, deployment_of
from balanceroute.proxy.cli.trace_flags import (
    Goodput,
    add_trace_flags,
    read_flagged_mix,
    trace_path,
)
from balanceroute.proxy.core.admission import AimdOptions
from balanceroute.proxy.core.config import is_outside, outside_name
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import POLICIES, PolicySettings
from balanceroute.proxy.core.prefill import ScoreSettings
from balanceroute.proxy.core.setting import integer, number, settings_of, text
from balanceroute.proxy.lab.service_levels import ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import SimulatedEngineOptions
from balanceroute.proxy.lab.sim.experiment import FORECASTS, forecast_called, run_experiment
from balanceroute.proxy.lab.sim.plots import write_plots, write_service_plots
from balanceroute.proxy.lab.sim.recorder import groups_of
from balanceroute.proxy.lab.sim.report import STEADY_STATE, as_json, hints, print_table, unending
from balanceroute.proxy.lab.sim.workload import MAX_RATE, playable, scaled, split
from balanceroute.proxy.settings import Given, add_flags, read_flags
from balanceroute.topologies import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.lab.sim.experiment import Forecast, PolicyResult
    from balanceroute.proxy.lab.sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPace:
    """When requests come; one of them at most."""

    rate: float | None = number(
        None,
        "open loop: speed up the trace's times (default 1)",
        1 / MAX_RATE,
        MAX_RATE,
        metavar="R",
    )
    backlog: int | None = integer(None, "saturated: N requests always wait for decode", 1, 10**9)
    concurrency: int | None = integer(None, "closed loop: N requests always under way", 1, 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrace:
    requests: int | None = integer(None, "replay only the first N", 1, 10**9)
    skip: int = integer(0, "pass over the first N", 0, 10**9)
    known: int = integer(0, "do not replay the first N: predictors learn from them", 0, 10**9)
    output_scale: float = number(
        1.0, "multiply every output, for the shape of long answers", 0.001, 1_000, metavar="X"
    )
    segments: int = integer(1, "cut the trace in S runs", 1, 10**9, metavar="S")
    seed: int = integer(0, "of random policies", -(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    policy: str = text(
        "jsq,least-kv,fifo,br-0,br-h",
        f"of {', '.join(POLICIES)}, or module:function",
        metavar="NAME[,NAME..]",
    )
    predictor: str = text(
        "survival",
        f"for br-h: {', '.join(FORECASTS)}, what `train` wrote, or module:function of your own",
        metavar="NAME|FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """When a request goes first."""

    deadline: float | None = number(
        None, "pool wait after which a request goes first", 0.001, 1e6, metavar="S"
    )


DEPLOYMENT = (SimulatedDeployment, Machines, ScoreSettings, AimdOptions, SimulatedEngineOptions)
# Without effect under some settings, as in `serve`.
_AS_SERVED = (ScoreSettings, AimdOptions, PolicySettings)
SECTIONS = (
    SimulationPace,
    SimulatedTrace,
    *DEPLOYMENT,
    Compared,
    PolicySettings,
    Lateness,
    Goodput,
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="replay a trace through the policies in virtual time",
        usage="%(prog)s (--trace FILE | --mix FILE) [option ...]",
        description=__doc__,
    )
    parser.set_defaults(run=run)
    workload = parser.add_argument_group("workload")
    add_trace_flags(workload)
    add_flags(workload.add_mutually_exclusive_group(), SimulationPace)
    add_flags(workload, SimulatedTrace)
    add_flags(parser.add_argument_group("deployment"), *DEPLOYMENT)
    add_flags(parser.add_argument_group("policies"), Compared, PolicySettings, Lateness)
    output = parser.add_argument_group("output")
    add_flags(output, Goodput)
    add_output_flags(output)


def run(arguments: argparse.Namespace) -> int:
    given = read_flags(arguments, *SECTIONS)
    compared, settings = given.read(Compared), given.read(PolicySettings)
    policies = _policies(compared.policy, given)
    deployment = deployment_of(given, given.read(Lateness).deadline)
    if settings.kv_peak_quantile is not None and deployment.rank_kv_tokens is None:
        raise ConfigError("--kv-peak-quantile: needs --kv-capacity too")
    with given.blamed("predictor"):
        forecast = forecast_called(compared.predictor)
    workloads, dropped = _workloads(arguments, given)
    targets = given.read(Goodput).targets(max(len(groups_of(one.requests)) for one in workloads))
    check_outputs(arguments)
    results: list[PolicyResult] = []
    try:
        _simulate(
            deployment,
            workloads,
            policies,
            settings,
            forecast=forecast,
            seed=given.read(SimulatedTrace).seed,
            targets=targets,
            results=results,
        )
    except KeyboardInterrupt:
        if not results:
            raise
    interrupted = len(results) < len(policies)
    title = _title(arguments, given, workloads)
    notes = [f"Steady state: {STEADY_STATE}."]
    if len(workloads) > 1:
        notes.append(f"Mean ± standard error of {len(workloads)} segments.")
    if dropped:
        notes.append(f"{dropped} requests without output left out.")
    if interrupted:
        notes.append(f"Interrupted before the end of {', '.join(policies[len(results) :])}.")
    notes += hints(results, deployment, workloads)
    config = _config(arguments, given, policies, workloads, dropped) | {"interrupted": interrupted}
    answer(
        arguments,
        lambda: print_table(results, title=title, caption=" ".join(notes), targets=targets),
        lambda: as_json(config, results),
    )
    if arguments.plots is not None:
        pictures = write_plots(results, arguments.plots, title=title)
        pictures += write_service_plots(results, arguments.plots, title=title)
        with for_people(arguments.json):
            Console(soft_wrap=True).print(
                f"Pictures: {', '.join(map(str, pictures))}", highlight=False, markup=False
            )
    return 130 if interrupted else 0


def _warn_of_idle(given: Given, policies: "Sequence[str]") -> None:
    """Warn of given settings without effect under every policy, as in `serve`."""
    names = {one.name for section in _AS_SERVED for one in settings_of(section)}
    shared = {name: place for name, place in given.places.items() if name in names}
    if not shared:
        return
    # Here, as most runs do without them.
    from balanceroute.proxy.live.settings.configure import make_config  # noqa: PLC0415
    from balanceroute.proxy.live.settings.effects import without_effect  # noqa: PLC0415

    flags: dict[str, object] = {"prefill": ["http://prefill"], "decode": ["http://decode"]}
    flags |= {name: given.flags.get(name) for name in (*shared, "prefill_choice")}
    configs = [make_config(None, flags | {"policy": name}) for name in policies]
    for message in without_effect(shared, configs):
        sys.stderr.write(f"balanceroute: warning: {message}\n")


def _policies(names: str, given: Given) -> list[str]:
    policies = [name.strip() for name in names.split(",") if name.strip()]
    policies = [
        name if name in POLICIES else outside_name("policies", name) or name for name in policies
    ]
    unknown = [name for name in policies if name not in POLICIES and not is_outside(name)]
    if unknown or not policies:
        meant = did_you_mean(unknown[0], POLICIES) if unknown else f"; known: {', '.join(POLICIES)}"
        raise ConfigError(f"--policy: unknown {unknown}{meant}")
    if len(set(policies)) < len(policies):
        raise ConfigError(f"--policy: {names} names a policy twice")
    _warn_of_idle(given, policies)
    return policies


def _workloads(arguments: argparse.Namespace, given: Given) -> "tuple[list[Workload], int]":
    pace, replayed = given.read(SimulationPace), given.read(SimulatedTrace)
    with StageBar() as bar:
        bar.show(f"reading {trace_path(arguments)}")
        trace = read_flagged_mix(arguments)
    total = len(trace)
    trace = trace[replayed.skip :][: replayed.requests]
    requests = scaled(playable(trace), replayed.output_scale)
    warning = unending(requests)
    if warning is not None:
        sys.stderr.write(f"balanceroute: warning: {trace_path(arguments)}: {warning}\n")
    rate = pace.rate
    if rate is None and pace.backlog is None and pace.concurrency is None:
        rate = 1.0
    try:
        workloads = split(
            requests,
            segments=replayed.segments,
            rate=rate,
            backlog=pace.backlog,
            concurrency=pace.concurrency,
            known=replayed.known,
        )
    except ConfigError as error:
        passed = f"--skip {replayed.skip}, --known {replayed.known}"
        path = trace_path(arguments)
        raise ConfigError(f"{path}: {error} ({total:,} in the file, {passed})") from None
    return workloads, len(trace) - len(requests)


def _simulate(
    deployment: SimulatedDeployment,
    workloads: "Sequence[Workload]",
    policies: "Sequence[str]",
    settings: "PolicySettings",
    *,
    forecast: "Forecast",
    seed: int,
    targets: ServiceTargets | None,
    results: "list[PolicyResult]",
) -> None:
    """Add each policy's figures to `results` when it is through, so that an interrupt keeps them."""
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        total = len(policies) * sum(len(workload.requests) for workload in workloads)
        task = bar.add_task(policies[0], total=total)
        done = unshown = 0
        piped = PipedProgress()

        def progress(policy: str, finished: int) -> None:
            nonlocal done, unshown
            done += finished
            unshown += finished
            if 1_000 * unshown >= total:  # To show every step would cost more than the steps.
                bar.update(task, description=policy, advance=unshown)
                piped.write(f"{policy}: {done:,} of {total:,} requests")
                unshown = 0

        for result in run_experiment(
            deployment,
            workloads,
            policies,
            settings,
            forecast,
            seed=seed,
            targets=targets,
            progress=progress,
        ):
            results.append(result)


def _title(arguments: argparse.Namespace, given: Given, workloads: "Sequence[Workload]") -> str:
    pace_given, values = given.read(SimulationPace), given.values
    requests = sum(len(workload.requests) for workload in workloads)
    pace = f"rate {workloads[0].rate:g}"
    if pace_given.backlog is not None:
        pace = f"saturated, backlog {pace_given.backlog}"
    elif pace_given.concurrency is not None:
        pace = f"{pace_given.concurrency:,} under way"
    return (
        f"{trace_path(arguments).name}: {requests:,} requests, {pace}, "
        f"{values['ranks']} ranks x batch {values['batch']}"
    )


def _config(
    arguments: argparse.Namespace,
    given: Given,
    policies: "Sequence[str]",
    workloads: "Sequence[Workload]",
    dropped: int,
) -> dict[str, object]:
    chosen = options(arguments)
    for name in ("json", "plots"):
        del chosen[name]
    machines = given.read(SimulatedDeployment)
    used = given.read(PolicySettings).resolved(
        ranks=machines.ranks, batch_limit=machines.batch_limit
    )
    parameters = {one.name: getattr(used, one.attribute) for one in settings_of(PolicySettings)}
    assert used.form is not None
    return (
        chosen
        | given.values
        | parameters
        | {
            "rate": workloads[0].rate if workloads[0].open_loop else None,
            "patience": "inf" if used.patience == inf else used.patience,  # JSON has no infinity.
            "projection": used.form.value,
            "trace": str(trace_path(arguments)),
            "mix": arguments.mix is not None,
            "policy": list(policies),
            "version": __version__,
            "requests_per_segment": len(workloads[0].requests),
            "requests_without_output": dropped,
            "steady_state": STEADY_STATE,
        }
    )

"""`balanceroute simulate`: replay a trace through the policies in virtual time."""

import argparse
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from balanceroute import __version__
from balanceroute.proxy.cli.help_format import HelpFormatter
from balanceroute.proxy.cli.numbers import check_numbers
from balanceroute.proxy.cli.outputs import check_output, write_output
from balanceroute.proxy.cli.stage_bar import StageBar
from balanceroute.proxy.cli.trace_flags import TRACE_HELP, add_format_flags, read_flagged_trace
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.live.settings.declared import PolicyKnobs
from balanceroute.proxy.live.settings.reader import Given, add_flags, given_by_flags
from balanceroute.proxy.pictures import require_matplotlib
from balanceroute.proxy.sim.driver import Deployment
from balanceroute.proxy.sim.experiment import run_experiment
from balanceroute.proxy.sim.forecast import FORECASTS, forecast_called
from balanceroute.proxy.sim.hints import hints, unending
from balanceroute.proxy.sim.plots import write_plots
from balanceroute.proxy.sim.prefill_fleet import PrefillModel
from balanceroute.proxy.sim.report import STEADY_STATE, as_json, print_table
from balanceroute.proxy.sim.workload import MAX_RATE, playable, split
from balanceroute.topologies import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.core.policies import PolicySettings
    from balanceroute.proxy.sim.experiment import PolicyResult
    from balanceroute.proxy.sim.forecast import Forecast
    from balanceroute.proxy.sim.workload import Workload

# The range of every number. The upper ends keep memory and virtual time in bounds.
_BOUNDS: dict[str, tuple[float, float]] = {
    "--rate": (1 / MAX_RATE, MAX_RATE),
    "--backlog": (1, 1e9),
    "--concurrency": (1, 1e9),
    "--requests": (1, 1e9),
    "--skip": (0, 1e9),
    "--known": (0, 1e9),
    "--segments": (1, 1e9),
    "--ranks": (1, 1e4),
    "--batch": (1, 1e9),
    # A step of no time would let virtual time stand still.
    "--step-base-ms": (0.001, 1e6),
    "--step-us-per-token": (0, 1e6),
    "--kv-capacity": (1, 1e9),
    "--prefill-servers": (1, 1e4),
    "--prefill-base-ms": (0, 1e6),
    "--prefill-us-per-token": (0, 1e6),
    "--transfer-base-ms": (0, 1e6),
    "--transfer-us-per-token": (0, 1e6),
    "--pool-limit": (1, 1e9),
    "--deadline": (0.001, 1e6),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="replay a trace through the policies in virtual time",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    workload = parser.add_argument_group("workload")
    workload.add_argument("--trace", required=True, type=Path, metavar="FILE", help=TRACE_HELP)
    add_format_flags(workload)
    pace = workload.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=float, metavar="R", help="open loop: speed up the trace's times (default 1)"
    )
    pace.add_argument(
        "--backlog", type=int, metavar="N", help="saturated: N requests always wait for decode"
    )
    pace.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: N requests always under way"
    )
    workload.add_argument("--requests", type=int, metavar="N", help="replay only the first N")
    workload.add_argument("--skip", type=int, default=0, metavar="N", help="pass over the first N")
    workload.add_argument(
        "--known",
        type=int,
        default=0,
        metavar="N",
        help="do not replay the first N: predictors learn from them",
    )
    workload.add_argument(
        "--segments", type=int, default=1, metavar="S", help="cut the trace in S runs"
    )
    workload.add_argument("--seed", type=int, default=0, metavar="N", help="of random policies")
    _add_deployment(parser)
    _add_policy(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="OUT", help="write the figures as JSON")
    output.add_argument("--plots", type=Path, metavar="DIR", help="write pictures (PNG)")


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("deployment")
    group.add_argument("--ranks", type=int, default=8, metavar="G", help="decode ranks")
    group.add_argument("--batch", type=int, default=16, metavar="B", help="batch limit of a rank")
    group.add_argument(
        "--step-base-ms", type=float, default=30.0, metavar="a", help="step = a + b x max load"
    )
    group.add_argument("--step-us-per-token", type=float, default=0.2, metavar="b", help="see a")
    group.add_argument(
        "--kv-capacity", type=int, metavar="TOKENS", help="KV tokens per rank (default: no limit)"
    )
    group.add_argument(
        "--prefill-servers", type=int, metavar="P", help="prefillers (default: prefill at once)"
    )
    group.add_argument(
        "--prefill-base-ms", type=float, default=20.0, metavar="c", help="prefill = c + d x prompt"
    )
    group.add_argument(
        "--prefill-us-per-token", type=float, default=50.0, metavar="d", help="see c"
    )
    group.add_argument(
        "--transfer-base-ms",
        type=float,
        default=0.0,
        metavar="e",
        help="KV transfer = e + f x KV tokens",
    )
    group.add_argument(
        "--transfer-us-per-token", type=float, default=0.0, metavar="f", help="see e"
    )
    group.add_argument(
        "--pool-limit",
        type=int,
        metavar="N",
        help="requests in prefill or in the pool; others wait before prefill (default: no limit)",
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policies")
    group.add_argument(
        "--policy",
        default="jsq,least-kv,fifo,br-0,br-h",
        metavar="NAME[,NAME..]",
        help=f"of {', '.join(POLICIES)}",
    )
    group.add_argument(
        "--predictor",
        default="survival",
        metavar="NAME|FILE",
        help=f"for br-h: {', '.join(FORECASTS)}, or what `train` wrote",
    )
    add_flags(group, PolicyKnobs)
    group.add_argument(
        "--deadline", type=float, metavar="S", help="pool wait after which a request goes first"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: A setting cannot be served.
        TraceError: The trace cannot be read.
        OSError: The output cannot be written.
    """
    check_numbers(arguments, _BOUNDS)
    policies = [name.strip() for name in arguments.policy.split(",") if name.strip()]
    unknown = [name for name in policies if name not in POLICIES]
    if unknown or not policies:
        meant = did_you_mean(unknown[0], POLICIES) if unknown else f"; known: {', '.join(POLICIES)}"
        raise ConfigError(f"--policy: unknown {unknown}{meant}")
    if len(set(policies)) < len(policies):
        raise ConfigError(f"--policy: {arguments.policy} names a policy twice")
    deployment = _deployment(arguments)
    given = given_by_flags(arguments, [PolicyKnobs])
    settings = Given([PolicyKnobs], flags=given).read(PolicyKnobs).settings
    try:
        forecast = forecast_called(arguments.predictor)
    except ConfigError as error:
        raise ConfigError(f"--predictor: {error}") from None
    workloads, dropped = _workloads(arguments)
    _check_outputs(arguments)
    results: list[PolicyResult] = []
    try:
        _simulate(
            arguments, deployment, workloads, policies, settings, forecast=forecast, results=results
        )
    except KeyboardInterrupt:
        if not results:
            raise
    interrupted = len(results) < len(policies)
    title = _title(arguments, workloads)
    notes = [f"Steady state: {STEADY_STATE}."]
    if len(workloads) > 1:
        notes.append(f"Mean ± standard error of {len(workloads)} segments.")
    if dropped:
        notes.append(f"{dropped} requests without output left out.")
    if interrupted:
        notes.append(f"Interrupted before the end of {', '.join(policies[len(results) :])}.")
    notes += hints(results, deployment, workloads)
    print_table(results, title=title, caption=" ".join(notes))
    if arguments.json is not None:
        config = _config(arguments, policies, settings, workloads, dropped)
        config |= {"interrupted": interrupted}
        write_output("--json", arguments.json, as_json(config, results))
    if arguments.plots is not None:
        pictures = write_plots(results, arguments.plots, title=title)
        Console(soft_wrap=True).print(
            f"Pictures: {', '.join(map(str, pictures))}", highlight=False, markup=False
        )
    return 130 if interrupted else 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Find out now, not after the simulation, that its figures cannot be written."""
    check_output("--json", arguments.json)
    if arguments.plots is not None:
        require_matplotlib()
        try:
            arguments.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--plots: {arguments.plots}: {error.strerror}") from error


def _deployment(arguments: argparse.Namespace) -> Deployment:
    prefill = None
    if arguments.prefill_servers is not None:
        prefill = PrefillModel(
            servers=arguments.prefill_servers,
            base_ns=round(1e6 * arguments.prefill_base_ms),
            ns_per_token=1e3 * arguments.prefill_us_per_token,
        )
    deadline = arguments.deadline
    return Deployment(
        ranks=arguments.ranks,
        batch_limit=arguments.batch,
        step_base_ns=round(1e6 * arguments.step_base_ms),
        step_ns_per_token=1e3 * arguments.step_us_per_token,
        rank_kv_tokens=arguments.kv_capacity,
        prefill=prefill,
        transfer_base_ns=round(1e6 * arguments.transfer_base_ms),
        transfer_ns_per_token=1e3 * arguments.transfer_us_per_token,
        deadline_ns=None if deadline is None else round(1e9 * deadline),
        pool_limit=arguments.pool_limit,
    )


def _workloads(arguments: argparse.Namespace) -> "tuple[list[Workload], int]":
    with StageBar() as bar:
        bar.show(f"reading {arguments.trace}")
        trace = read_flagged_trace(arguments)
    total = len(trace)
    trace = trace[arguments.skip :][: arguments.requests]
    requests = playable(trace)
    warning = unending(requests)
    if warning is not None:
        sys.stderr.write(f"balanceroute: warning: {arguments.trace}: {warning}\n")
    rate = arguments.rate
    if rate is None and arguments.backlog is None and arguments.concurrency is None:
        rate = 1.0
    try:
        workloads = split(
            requests,
            segments=arguments.segments,
            rate=rate,
            backlog=arguments.backlog,
            concurrency=arguments.concurrency,
            known=arguments.known,
        )
    except ConfigError as error:
        passed = f"--skip {arguments.skip}, --known {arguments.known}"
        raise ConfigError(f"{arguments.trace}: {error} ({total:,} in the file, {passed})") from None
    return workloads, len(trace) - len(requests)


def _simulate(
    arguments: argparse.Namespace,
    deployment: Deployment,
    workloads: "Sequence[Workload]",
    policies: "Sequence[str]",
    settings: "PolicySettings",
    *,
    forecast: "Forecast",
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
        unshown = 0

        def progress(policy: str, finished: int) -> None:
            nonlocal unshown
            unshown += finished
            if 1_000 * unshown >= total:  # To show every step would cost more than the steps.
                bar.update(task, description=policy, advance=unshown)
                unshown = 0

        for result in run_experiment(
            deployment,
            workloads,
            policies,
            settings,
            forecast,
            seed=arguments.seed,
            progress=progress,
        ):
            results.append(result)


def _title(arguments: argparse.Namespace, workloads: "Sequence[Workload]") -> str:
    requests = sum(len(workload.requests) for workload in workloads)
    pace = f"rate {workloads[0].rate:g}"
    if arguments.backlog is not None:
        pace = f"saturated, backlog {arguments.backlog}"
    elif arguments.concurrency is not None:
        pace = f"{arguments.concurrency:,} under way"
    return (
        f"{arguments.trace.name}: {requests:,} requests, {pace}, "
        f"{arguments.ranks} ranks x batch {arguments.batch}"
    )


def _config(
    arguments: argparse.Namespace,
    policies: "Sequence[str]",
    settings: "PolicySettings",
    workloads: "Sequence[Workload]",
    dropped: int,
) -> dict[str, object]:
    chosen = {name: value for name, value in vars(arguments).items() if name != "run"}
    for name in ("json", "plots"):
        del chosen[name]
    used = settings.resolved(ranks=arguments.ranks, batch_limit=arguments.batch)
    assert used.form is not None
    return chosen | {
        "rate": workloads[0].rate if workloads[0].open_loop else None,
        "horizon": used.horizon_steps,
        "gamma": used.gamma,
        "alpha": used.alpha,
        "beta": used.beta,
        "theta": used.theta,
        "window": used.window,
        "patience": "inf" if used.patience == inf else used.patience,  # JSON has no infinity.
        "projection": used.form.value,
        "refresh_tokens": used.refresh_tokens,
        "bypass_slots": used.bypass_slots,
        "paper": used.paper,
        "trace": str(arguments.trace),
        "policy": list(policies),
        "version": __version__,
        "requests_per_segment": len(workloads[0].requests),
        "requests_without_output": dropped,
        "steady_state": STEADY_STATE,
    }

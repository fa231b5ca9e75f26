"""`balanceroute advise`: what bounds a fleet, and how many prefillers and decode ranks it needs."""

import argparse
import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from rich.console import Console

from balanceroute.proxy.capacity import Needs, needs
from balanceroute.proxy.cli.outputs import (
    add_output_flags,
    answer,
    as_json_text,
    check_outputs,
    print_lines,
)
from balanceroute.proxy.cli.run_flags import Machines, deployment_of
from balanceroute.proxy.cli.simulate import DEPLOYMENT
from balanceroute.proxy.cli.trace_flags import TRACE_HELP, add_format_flags, read_flagged_trace
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.core.setting import choice, file, integer, number, words
from balanceroute.proxy.lab.advise.fleets import Fleets, FleetTrial, Slo, plan
from balanceroute.proxy.lab.advise.report import (
    ProxyPages,
    as_json,
    lines,
    plan_as_json,
    plan_lines,
)
from balanceroute.proxy.lab.audit.observation import (
    AuditedEngines,
    Observation,
    Watched,
    look_at,
    observe,
)
from balanceroute.proxy.lab.sim.experiment import forecast_called
from balanceroute.proxy.lab.sim.workload import MAX_RATE, playable, split
from balanceroute.proxy.page_client import PageClient
from balanceroute.proxy.settings import Given, add_flags, read_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Watched):
    """How a running fleet is looked at, and how busy it may be."""

    busy: float = number(0.8, "share of the time or the slots to use", 0.05, 1.0, metavar="U")
    token_file: Path | None = file(
        "with --proxy: holds the token of its administrators, or an API key at its clients' address"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    ttft_p99: float | None = number(
        None,
        "with --trace: the 99th percentile of the times to first token",
        1e-3,
        1e6,
        metavar="S",
    )
    tpot_p95: float | None = number(
        None,
        "with --trace: the 95th percentile of the times per output token",
        1e-6,
        1e6,
        metavar="S",
    )
    rate: float = number(1.0, "speed up the trace's times", 1 / MAX_RATE, MAX_RATE, metavar="R")
    requests: int | None = integer(None, "use only the first N of the trace", 1, 10**9)
    most: int = integer(256, "instances of each role to try", 1, 10_000, metavar="N")
    policy: str = choice("br-h", "that decides which rank takes a request", words(POLICIES))
    seed: int = integer(0, "of random policies", 0, 1 << 62)


SECTIONS = (Judged, Planned, *DEPLOYMENT)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "advise",
        help="what bounds a fleet, and how many engines of each role it needs",
        usage="%(prog)s --decode URL [URL ...] --prefill URL [URL ...] [option ...]\n"
        "       %(prog)s --proxy URL [option ...]\n"
        "       %(prog)s --trace FILE [option ...]",
        description=f"{__doc__} From a running fleet (--decode and --prefill, or --proxy): how many its "
        "present load needs. From --trace, in simulation: likewise for --prefill-servers and --ranks, or "
        "with --ttft-p99 and --tpot-p95 the smallest fleet that keeps them. Nothing is sent to a model.",
    )
    parser.set_defaults(run=run)
    source = parser.add_argument_group("a running fleet")
    source.add_argument(
        "--decode", nargs="+", metavar="URL", help="http://host:port of each engine"
    )
    source.add_argument("--prefill", nargs="+", metavar="URL", help="likewise")
    source.add_argument(
        "--proxy", metavar="URL", help="http://host:port of the proxy, in place of the engines"
    )
    add_flags(source, Judged)
    trace = parser.add_argument_group("a trace")
    trace.add_argument("--trace", type=Path, metavar="FILE", help=TRACE_HELP)
    add_format_flags(trace)
    add_flags(trace, Planned)
    add_flags(parser.add_argument_group("the fleet of a trace"), *DEPLOYMENT)
    add_output_flags(parser, plots=False)


def run(arguments: argparse.Namespace) -> int:
    given = read_flags(arguments, *SECTIONS)
    check_outputs(arguments)
    sources = {"--decode": arguments.decode, "--proxy": arguments.proxy, "--trace": arguments.trace}
    named = [flag for flag, value in sources.items() if value is not None]
    if len(named) != 1:
        raise ConfigError(f"give one of {', '.join(sources)}, not {' and '.join(named) or 'none'}")
    if arguments.prefill is not None and arguments.decode is None:
        raise ConfigError(f"--prefill means nothing with {named[0]}")
    planned = given.read(Planned)
    if arguments.trace is not None:
        text, advice = _from_trace(arguments, given)
    elif planned.ttft_p99 is not None or planned.tpot_p95 is not None:
        raise ConfigError(
            "--ttft-p99 and --tpot-p95 need a --trace: a running fleet cannot be resized"
        )
    else:
        watched = given.read(Judged)
        if watched.token_file is not None and arguments.proxy is None:
            raise ConfigError("--token-file means nothing without --proxy")
        seen = asyncio.run(_watch(arguments, watched))
        found = _of_fleet(seen, watched.busy)
        text, advice = list(lines(found, watched.busy)), as_json(found)
    answer(arguments, partial(print_lines, text), partial(as_json_text, advice))
    return 0


async def _watch(arguments: argparse.Namespace, watched: Judged) -> Observation:
    client = PageClient.of_flags(watched.ca_file, watched.token_file, timeout_s=watched.timeout_s)
    async with client as pages:
        if arguments.proxy is not None:
            proxy = ProxyPages(arguments.proxy, pages)
            looks = await look_at(proxy, watched)
            return observe(looks, batch=proxy.batch, outputs_known=False)
        engines = AuditedEngines(arguments.prefill or (), arguments.decode, pages)
        return observe(await look_at(engines, watched))


def _of_fleet(seen: Observation, busy: float) -> Needs:
    work = None
    if seen.prefill_busy is not None:
        work = seen.prefillers * seen.prefill_busy
    return needs(
        seen.verdict,
        prefillers=seen.prefillers,
        ranks=len(seen.ranks),
        prefill_work=work,
        decode_work=(seen.running + seen.waiting) / seen.batch,
        busy=busy,
    )


def _from_trace(
    arguments: argparse.Namespace, given: Given
) -> tuple[Iterable[str], dict[str, object]]:
    planned, watched, machines = given.read(Planned), given.read(Judged), given.read(Machines)
    slo = Slo(planned.ttft_p99 or inf, planned.tpot_p95 or inf)
    if slo == Slo() and machines.prefill_servers is None:
        raise ConfigError(
            "give --ttft-p99, --tpot-p95 or both to have a fleet planned, or --prefill-servers and "
            "--ranks to have one judged"
        )
    requests = playable(read_flagged_trace(arguments)[: planned.requests])
    (workload,) = split(requests, segments=1, rate=planned.rate)
    deployment = deployment_of(given, None)
    if deployment.prefill is None:
        deployment = replace(deployment, prefill=machines.prefill_model(1))
    with Console(stderr=True).status("simulating") as status:
        fleets = Fleets(
            deployment,
            workload,
            planned.policy,
            forecast_called("survival"),
            seed=planned.seed,
            tried=lambda one: status.update(f"{one.prefillers} prefillers, {one.ranks} ranks"),
        )
        present = None
        if machines.prefill_servers is not None:
            present = fleets.trial(machines.prefill_servers, deployment.ranks)
        if slo == Slo():
            assert present is not None
            found = _of_trial(present, watched.busy)
            return lines(found, watched.busy), as_json(found)
        best = plan(fleets, slo, most=planned.most)
    trials = list(fleets.trials.values())
    return plan_lines(best, slo, trials, present), plan_as_json(best, slo, trials, present)


def _of_trial(one: FleetTrial, busy: float) -> Needs:
    return needs(
        one.verdict,
        prefillers=one.prefillers,
        ranks=one.ranks,
        prefill_work=one.prefill_work,
        decode_work=one.slots_share * one.ranks,
        busy=busy,
    )

"""`balanceroute audit`: what a fleet loses at the barrier, and what other policies would recover."""

import argparse
import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.outputs import (
    add_output_flags,
    answer,
    as_json_text,
    check_outputs,
    print_lines,
)
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import integer, number
from balanceroute.proxy.lab.audit.observation import (
    AuditedEngines,
    Look,
    Watched,
    look_at,
    observe,
)
from balanceroute.proxy.lab.audit.prometheus import PrometheusWindow, looks_of
from balanceroute.proxy.lab.audit.replica import recover
from balanceroute.proxy.lab.audit.report import Audit, as_json, lines, write_plots
from balanceroute.proxy.page_client import PageClient
from balanceroute.proxy.settings import add_flags, read_flags
from balanceroute.traces import read_trace

if TYPE_CHECKING:
    from balanceroute.proxy.lab.audit.replica import AuditRecovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Watched):
    """How to look at the fleet, and facts that the engines do not report."""

    batch: int | None = integer(
        None, "slots of a rank (default: the most requests that one ran)", 1, 10**6
    )
    step_base_ms: float = number(30.0, "a step takes a + b x max load", 1e-6, 1e6, metavar="a")
    step_us_per_token: float = number(0.2, "used if b is not seen", 0.0, 1e6, metavar="b")
    in_flight: int | None = integer(
        None,
        "requests that clients have under way (default: those that the engines have, and if these are full at "
        "least 24 more, which the router would hold back)",
        1,
        10**6,
    )
    seed: int = integer(0, "of the simulated load", 0, 1 << 62)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "audit",
        help="what a fleet behind any router loses at the barrier",
        description=f"{__doc__} It reads the engines' /metrics (vLLM, SGLang) and sends nothing to a "
        "model, so any router may be in front.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--decode", nargs="+", required=True, metavar="URL", help="http://host:port of each engine"
    )
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="likewise")
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        help="read what this server has scraped of them in the latest --minutes instead; --interval-s is "
        "then its scrape interval, and an engine is the instance host:port",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="the requests of the same load, as an access log or a trace; without, they are drawn from the "
        "engines' histograms of lengths",
    )
    add_flags(parser, Audited)
    add_output_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    watched = read_flags(arguments, Audited).read(Audited)
    check_outputs(arguments)
    requests = None if arguments.trace is None else read_trace(arguments.trace)
    fleet = arguments.prefill, arguments.decode
    if arguments.prometheus is None:
        looks = asyncio.run(_watch(*fleet, watched))
    else:
        looks = asyncio.run(_read(arguments.prometheus, *fleet, watched))
    seen = observe(looks, batch=watched.batch)
    recovery: AuditRecovery | None = None
    unknown = ""
    try:
        recovery = recover(
            seen,
            requests,
            step_base_ms=watched.step_base_ms,
            step_us_per_token=watched.step_us_per_token,
            in_flight=watched.in_flight,
            seed=watched.seed,
        )
    except ConfigError as error:
        unknown = str(error)
    audit = Audit(seen, seen.verdict, recovery, unknown)
    answer(arguments, lambda: print_lines(lines(audit)), lambda: as_json_text(as_json(audit)))
    if arguments.plots is not None:
        write_plots(audit, arguments.plots)
    return 0


async def _watch(prefill: list[str], decode: list[str], watched: Watched) -> list[Look]:
    async with PageClient.of_flags(watched.ca_file, timeout_s=watched.timeout_s) as pages:
        return await look_at(AuditedEngines(prefill, decode, pages), watched)


async def _read(server: str, prefill: list[str], decode: list[str], watched: Watched) -> list[Look]:
    end_s = datetime.now(UTC).timestamp()
    window = PrometheusWindow(end_s - 60.0 * watched.minutes, end_s, watched.interval_s)
    async with PageClient.of_flags(watched.ca_file, timeout_s=watched.timeout_s) as pages:
        return await looks_of(server, prefill, decode, window, pages)

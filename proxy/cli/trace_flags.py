"""Flags that say how a trace is read."""

import argparse
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.predictors.past import past_requests, read_log
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import integer, number
from balanceroute.proxy.lab.service_levels import ServiceTargets
from balanceroute.proxy.settings import add_flags
from balanceroute.traces import (
    FORMATS,
    read_mix,
    read_names,
    read_trace,
    shipped_traces,
    with_sessions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.predictors import PastRequest
    from balanceroute.traces import TraceRequest


TRACE_HELP = (
    "Azure LLM CSV, Mooncake JSONL, Bailian JSONL, BurstGPT CSV, the proxy's request log, or one JSON object a line: "
    '{"arrival_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}; also gzipped; - is standard input. '
    f"Shipped, by name: {', '.join(sorted(shipped_traces()))}"
)


MIX_HELP = (
    "several traces as one, each with its tenant, weight, class, deadline and rate: TOML tables [[part]] "
    '(trace = "a.csv", tenant = "a", weight = 2.0, class = 0, deadline_s = 5, rate = 1.5, ..)'
)


def add_trace_flags(group: "argparse._ArgumentGroup") -> None:
    """Add `--trace` and `--mix`, of which one must be given, and those of the trace's format."""
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument("--trace", type=Path, metavar="FILE", help=TRACE_HELP)
    either.add_argument("--mix", type=Path, metavar="FILE", help=MIX_HELP)
    add_format_flags(group)


def add_format_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--format",
        choices=["auto", *FORMATS],
        help="of the trace (default: auto, by its first line)",
    )
    group.add_argument(
        "--columns",
        metavar="FIELD=NAME,..",
        help="what the columns of a CSV, or the keys of a JSONL, of your own are called: "
        "arrival=time,prompt=input_tokens,output=output_tokens (seconds, or dates and times); "
        "if they are there, limit=NAME for max_tokens, and tenant=, class=, deadline= (in seconds)",
    )
    group.add_argument(
        "--sessions",
        action="store_true",
        help="find the conversations of a trace by the blocks of its prompts (hash_ids), where it does not "
        "name them",
    )


def trace_path(arguments: argparse.Namespace) -> Path:
    """Return the file that `--trace` or `--mix` names."""
    path: Path = arguments.trace if arguments.trace is not None else arguments.mix
    return path


def read_flagged_mix(arguments: argparse.Namespace) -> "list[TraceRequest]":
    """Read the trace of `--trace` or `--mix`.

    Raises:
        ConfigError: `--columns` says nothing sensible, or a flag of the format stands beside `--mix`.
        TraceError: A trace or the mix cannot be read.
    """
    if arguments.mix is None:
        return read_flagged_trace(arguments)
    if arguments.format is not None or arguments.columns is not None:
        raise ConfigError(
            "--format and --columns are those of a --trace; a mix has a format by part"
        )
    if arguments.sessions:
        raise ConfigError("--sessions is that of a --trace: the parts of a mix have other blocks")
    return read_mix(arguments.mix)


def read_flagged_trace(arguments: argparse.Namespace) -> "list[TraceRequest]":
    """Read the trace that the flags name.

    Raises:
        ConfigError: `--columns` says nothing sensible, or stands beside `--format`.
        TraceError: The trace cannot be read.
    """
    names = None
    if arguments.columns is not None:
        if arguments.format not in (None, "auto"):
            raise ConfigError("--columns stands instead of --format, not beside it")
        try:
            names = read_names(arguments.columns)
        except ValueError as error:
            raise ConfigError(f"--columns: {error}") from None
    requests = read_trace(arguments.trace, arguments.format or "auto", columns=names)
    return with_sessions(requests) if arguments.sessions else requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What tenants and classes are reported; one of them or a trace of several asks for it."""

    ttft_target: float | None = number(
        None, "a good request's time to the first token, at most", 1e-3, 1e6, metavar="S"
    )
    tpot_target: float | None = number(
        None, "a good request's mean time between tokens, at most", 1e-6, 1e6, metavar="S"
    )

    def targets(self, groups: int) -> ServiceTargets | None:
        """Return the targets if the report has figures by tenant and class, else None.

        Args:
            groups: Tenants and classes that the trace has.
        """
        if self == Goodput() and groups < 2:
            return None
        return ServiceTargets(self.ttft_target or inf, self.tpot_target or inf)


# Questions look as far ahead, for each of many requests.
MAX_HORIZON = 10_000
_TOKEN_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    skip: int = integer(0, "pass over the first N", 0, 10**9)
    requests: int | None = integer(None, "take only the first N of these", 1, 10**9)
    token_ms: float | None = number(
        None,
        "time a token takes: traces do not say when a request ended",
        0,
        1e6,
        shown_default=f"{_TOKEN_MS:g}",
        metavar="MS",
    )


def add_past_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, all but `--horizon`, whose meaning is each command's own."""
    group = parser.add_argument_group("requests")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help=TRACE_HELP)
    source.add_argument("--log", type=Path, metavar="FILE", help="the proxy's request log")
    add_format_flags(group)
    add_flags(group, Chosen)


def check_source(arguments: argparse.Namespace) -> None:
    """Find out before anything is read that two flags do not go together.

    Raises:
        ConfigError: They do not.
    """
    if arguments.log is not None:
        for name in ("format", "columns", "token_ms"):
            flag = f"--{name.replace('_', '-')}"
            if getattr(arguments, name) is not None:
                raise ConfigError(f"{flag} is of traces: a request log needs none")


def source_of(arguments: argparse.Namespace) -> Path:
    source: Path = arguments.trace if arguments.log is None else arguments.log
    return source


@dataclass(frozen=True, slots=True)
class Past:
    """Requests that emitted something, by arrival."""

    skipped: "list[PastRequest]"  # Those that `--skip` passes over.
    chosen: "list[PastRequest]"  # Those after them, at least one.


def warn_of_limits(past: "Sequence[PastRequest]") -> None:
    """Say on standard error if most requests ended where their `max_tokens` ended them.

    Predictors know that limit in advance, so such requests show nothing of how long answers are, and
    every score on them is near perfect.
    """
    cut = sum(request.output_tokens == request.features.max_tokens for request in past)
    if 2 * cut > len(past):
        sys.stderr.write(
            f"balanceroute: warning: {cut:,} of {len(past):,} requests ended at their max_tokens: "
            "these ends are the clients' limits, which every predictor is told in advance\n"
        )


def read_past(arguments: argparse.Namespace, chosen: Chosen) -> Past:
    """Return the requests.

    Raises:
        ConfigError: None is chosen.
        TraceError: The trace or the log cannot be read.
    """
    end = None if chosen.requests is None else chosen.skip + chosen.requests
    skipped, taken = slice(chosen.skip), slice(chosen.skip, end)
    if arguments.log is not None:
        logged = read_log(arguments.log)
        past = Past(logged[skipped], logged[taken])
    else:
        token_s = (_TOKEN_MS if chosen.token_ms is None else chosen.token_ms) / 1e3
        trace = read_flagged_trace(arguments)
        past = Past(
            past_requests(trace[skipped], token_s=token_s),
            past_requests(trace[taken], token_s=token_s),
        )
    if not past.chosen:
        raise ConfigError(f"{source_of(arguments)}: none of the requests chosen has any output")
    return past

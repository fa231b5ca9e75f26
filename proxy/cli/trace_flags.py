"""Flags that say how a trace is read."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.traces import (
    FORMATS,
    read_mix,
    read_names,
    read_trace,
    shipped_traces,
    with_sessions,
)

if TYPE_CHECKING:
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
    """Add `--format`, `--columns` and `--sessions`."""
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
    """Read what `--trace` or `--mix` names.

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

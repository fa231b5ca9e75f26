"""Flags that say how a trace is read."""

import argparse
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.traces import FORMATS, read_names, read_trace

if TYPE_CHECKING:
    from balanceroute.traces import TraceRequest

TRACE_HELP = (
    "Azure LLM CSV, Mooncake JSONL, BurstGPT CSV, the proxy's request log, or one JSON object a line: "
    '{"arrival_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}; also gzipped'
)


def add_format_flags(group: "argparse._ArgumentGroup") -> None:
    """Add `--format` and `--columns`."""
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
        "limit=NAME for max_tokens, if there is one",
    )


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
    return read_trace(arguments.trace, arguments.format or "auto", columns=names)

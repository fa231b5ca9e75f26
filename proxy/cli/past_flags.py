"""Flags that say which requests of the past to learn from or to judge on."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.predictors.logged import read_log
from balanceroute.predictors.traced import past_requests
from balanceroute.proxy.cli.trace_flags import TRACE_HELP, add_format_flags, read_flagged_trace
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.settings.reader import add_flags
from balanceroute.proxy.settings.setting import integer, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.predictors import PastRequest

# Questions look as far ahead, for each of many requests.
MAX_HORIZON = 10_000
_TOKEN_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which requests."""

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
    """Return the file that the requests are read from."""
    source: Path = arguments.trace if arguments.log is None else arguments.log
    return source


@dataclass(frozen=True, slots=True)
class Past:
    """Requests that emitted something, by arrival.

    Attributes:
        skipped: Those that `--skip` passes over.
        chosen: Those after them, at least one.
    """

    skipped: "list[PastRequest]"
    chosen: "list[PastRequest]"


def warn_of_limits(past: "Sequence[PastRequest]") -> None:
    """Say on standard error if most requests ended where their `max_tokens` ended them.

    Predictors know that limit in advance, so such requests tell nothing of how long answers are, and
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

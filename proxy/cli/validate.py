"""`balanceroute validate`: compare the loads of the proxy's ledger with the engines' own steps."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from balanceroute import __version__
from balanceroute.proxy.cli.outputs import add_output_flags, answer, as_json_text, check_outputs
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import integer
from balanceroute.proxy.lab.service_levels import wide_console
from balanceroute.proxy.lab.validate.plots import write_plots
from balanceroute.proxy.lab.validate.traces import match, read_load_log, read_traces
from balanceroute.proxy.lab.validate.validation import validate
from balanceroute.proxy.settings import add_flags, read_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.lab.validate.validation import Errors, Fit, UnitResult, Validation


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFlags:
    min_tokens: int = integer(
        1000,
        "errors are of samples at which the engine's load was at least N KV tokens",
        1,
        10**12,
    )


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "validate",
        help="compare the loads of the proxy's ledger with the engines' own steps",
        description=f"{__doc__} The engines wrote theirs with BALANCEROUTE_STEP_TRACE, the proxy "
        "its own with `serve --load-log`. A trace is a rank's if the engine's port and "
        "data-parallel rank are those of the rank's URL; where that does not tell, --map does.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--steps", type=Path, required=True, metavar="DIR", help="the engines' step traces"
    )
    parser.add_argument(
        "--log", type=Path, required=True, metavar="FILE", help="the proxy's load log"
    )
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="RANK=FILE",
        help="which trace is a rank's; may be given more than once",
    )
    add_flags(parser, SampleFlags)
    add_output_flags(parser.add_argument_group("output"))


def run(arguments: argparse.Namespace) -> int:
    min_tokens = read_flags(arguments, SampleFlags).read(SampleFlags).min_tokens
    given = _given(arguments.map)
    check_outputs(arguments)
    log = read_load_log(arguments.log)
    spans = [(samples.times_ns[0], samples.times_ns[-1]) for samples in log.values()]
    span_ns = (int(min(begin for begin, _ in spans)), int(max(end for _, end in spans)))
    traces = match(read_traces(arguments.steps), list(log), given=given, span_ns=span_ns)
    validation = validate(log, traces, min_tokens=min_tokens)
    answer(
        arguments,
        lambda: _print(validation, min_tokens),
        lambda: as_json_text(_as_json(arguments, min_tokens, validation)),
    )
    if arguments.plots is not None:
        title = f"{arguments.log.name}, {arguments.steps.name}: {len(validation.ranks)} ranks"
        write_plots(validation, arguments.plots, title=title)
    return 0


def _given(words: "Sequence[str]") -> dict[str, Path]:
    given: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not equals or not name or not file:
            raise ConfigError(f"--map is {word!r}, must be RANK=FILE")
        if name in given:
            raise ConfigError(f"--map names {name!r} twice")
        given[name] = Path(file)
    return given


def _print(validation: "Validation", min_tokens: int) -> None:
    table = Table(
        title="Error of the proxy's load, started requests",
        caption=f"Samples at which the engine's load was at least {min_tokens:,} KV tokens. bias: "
        "median, positive if the ledger has too much. bound: all requests sent to the rank. "
        "lag: positive if the proxy was behind.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("rank", overflow="fold")
    for heading in ("steps", "samples", "p50", "p90", "p99", "bias", "bound p50", "lag"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in validation.ranks:
        lag = "-" if rank.lag is None else f"{rank.lag.lag_ms:+.0f} ms"
        table.add_row(escape(rank.name), f"{rank.steps:,}", *_cells(rank.started, rank.bound), lag)
    if len(validation.ranks) > 1:
        steps = sum(rank.steps for rank in validation.ranks)
        table.add_row("all", f"{steps:,}", *_cells(validation.started, validation.bound), "")
    wide_console().print(table)
    if validation.unmatched:
        print(f"without a trace: {', '.join(validation.unmatched)}")  # noqa: T201
    for unit in validation.units:
        for line in _unit_lines(unit):
            print(line)  # noqa: T201
    print(_fit_line(validation.fit))  # noqa: T201


def _cells(started: "Errors | None", bound: "Errors | None") -> list[str]:
    if started is None:
        return ["0", *["-"] * 5]
    shares = (started.p50, started.p90, started.p99)
    return [
        f"{started.samples:,}",
        *(f"{100 * share:.2f} %" for share in shares),
        f"{100 * started.bias:+.2f} %",
        "-" if bound is None else f"{100 * bound.p50:.2f} %",
    ]


def _unit_lines(unit: "UnitResult") -> list[str]:
    who = unit.ranks[0] if len(unit.ranks) == 1 else f"{unit.ranks[0]} … {unit.ranks[-1]}"
    if not unit.whole:
        return [f"{who}: ranks of their barrier have no trace, so nothing is told of it"]
    lines: list[str] = []
    if unit.idle is not None:
        idle = unit.idle
        lines.append(
            f"{who}: barrier of {idle.ranks} ranks over {idle.steps:,} steps: idle "
            f"{100 * idle.tokens:.2f} % by loads, "
            + (f"{100 * idle.time:.2f} % of rank time, " if idle.time is not None else "")
            + f"{100 * idle.dummy:.2f} % in dummy batches; steps end within "
            f"{idle.spread_ms_p50:.2f} ms on all ranks"
        )
    if unit.fit is not None:
        lines.append(f"{who}: {_equation(unit.fit)}")
    return lines


def _equation(fit: "Fit") -> str:
    left_out = f", {fit.pauses:,} pauses left out" if fit.pauses else ""
    return (
        f"T = {fit.base_ms:.4g} ms + {fit.us_per_token:.4g} µs x max L, R² {fit.r2:.3f}, "
        f"{fit.steps:,} steps without prefill{left_out}"
    )


def _fit_line(fit: "Fit | None") -> str:
    if fit is None:
        return "step time: too few steps without prefill, or their loads are all the same"
    if fit.base_ms <= 0 or fit.us_per_token < 0:
        return f"step time: {_equation(fit)}: no line to simulate with"
    # In the terms of `balanceroute simulate`.
    flags = f"--step-base-ms {fit.base_ms:.6g} --step-us-per-token {fit.us_per_token:.6g}"
    return f"step time: {_equation(fit)}\n  balanceroute simulate {flags}"


def _as_json(
    arguments: argparse.Namespace, min_tokens: int, validation: "Validation"
) -> dict[str, object]:
    def plain(value: "Errors | Fit | None") -> dict[str, object] | None:
        return None if value is None else asdict(value)

    return {
        "config": {
            "steps": str(arguments.steps),
            "log": str(arguments.log),
            "map": arguments.map,
            "min_tokens": min_tokens,
            "version": __version__,
        },
        "ranks": [
            {
                "rank": rank.name,
                "file": rank.file,
                "steps": rank.steps,
                "started": plain(rank.started),
                "bound": plain(rank.bound),
                "lag": None if rank.lag is None else asdict(rank.lag),
            }
            for rank in validation.ranks
        ],
        "without_trace": list(validation.unmatched),
        "started": plain(validation.started),
        "bound": plain(validation.bound),
        "units": [
            {
                "ranks": list(unit.ranks),
                "whole": unit.whole,
                "idle": None if unit.idle is None else asdict(unit.idle),
                "fit": plain(unit.fit),
            }
            for unit in validation.units
        ],
        "fit": plain(validation.fit),
    }

"""`balanceroute replay`: replay a trace over HTTP against an OpenAI-compatible endpoint."""

import argparse
import asyncio
import resource
import secrets
import signal
import sys
import time
import tomllib
from codecs import BOM_UTF8
from collections import deque
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from balanceroute import __version__
from balanceroute.proxy.cli.outputs import (
    PipedProgress,
    add_output_flags,
    answer,
    check_output,
    check_outputs,
    options,
    write_output,
)
from balanceroute.proxy.cli.trace_flags import (
    Goodput,
    add_trace_flags,
    read_flagged_mix,
    trace_path,
)
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import (
    choice,
    file,
    flag,
    integer,
    named,
    number,
    text,
)
from balanceroute.proxy.lab.replay.driver import replay
from balanceroute.proxy.lab.replay.exchange import parse_target
from balanceroute.proxy.lab.replay.figures import STEADY_STATE
from balanceroute.proxy.lab.replay.report import as_json, print_report, requests_as_json
from balanceroute.proxy.lab.replay.requests import (
    BYTES_PER_TOKEN,
    ReplayLengths,
    ReplaySettings,
    plan,
    read_exchanges,
    with_exchanges,
    with_limits,
)
from balanceroute.proxy.settings import Given, add_flags, read_flags

if TYPE_CHECKING:
    from balanceroute.proxy.lab.replay.driver import ReplayProgress as State
    from balanceroute.proxy.lab.replay.driver import ReplayResult
    from balanceroute.proxy.lab.replay.requests import PlannedRequest


# Of the bar, over which its tokens per second are taken.
_RATE_UPDATES = 15
# A trace that is sent so many times as fast or as slow as it was recorded is worth a warning, and so are
# as few or many requests a second by its own times.
_ODD_PACE = 100.0
_SLOWEST_PER_S, _FASTEST_PER_S = 0.01, 500.0
_LEAST_PACED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags:
    api_key_file: Path | None = file("its one line is sent as a bearer token", metavar="F")
    tenant_keys: Path | None = file(
        'the key of each tenant of the trace, sent instead: TOML lines NAME = "KEY"', metavar="F"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPace:
    """When requests are sent; one of them at most."""

    rate: float | None = number(
        None, "open loop: speed up the trace's times (default 1)", 1e-6, 1e6, metavar="R"
    )
    concurrency: int | None = integer(None, "closed loop: N requests always outstanding", 1, 10**5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTrace:
    requests: int | None = integer(None, "replay only the first N", 1, 10**9)
    skip: int = integer(0, "pass over the first N", 0, 10**9)
    max_prompt_tokens: int | None = integer(None, "cut longer prompts", 1, 10**9)
    max_output_tokens: int | None = integer(None, "cut longer answers", 1, 10**9)
    sharegpt: Path | None = file("prompts and output lengths of conversations")
    lengths: ReplayLengths | None = choice(
        None,
        "how engines learn how long answers are: hidden from the target (takes --emulation), "
        "max_tokens as clients set it; or as max_tokens with ignore_eos, which tells predictors "
        "the answer",
        named(ReplayLengths),
        shown_default="hidden with --emulation, max-tokens without",
    )
    seed: int = integer(0, "of the prompts' words, and of limits", -(1 << 63), (1 << 63) - 1)
    stop_at_last_arrival: bool = flag(
        "give up what still runs when the last request is sent: by then all is measured"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutputs:
    label: str = text("target", "what to call the target in the report", metavar="LABEL")


SECTIONS = (ReplaySettings, TargetFlags, ReplayPace, ReplayedTrace, ReplayOutputs, Goodput)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "replay",
        help="replay a trace over HTTP against an OpenAI-compatible endpoint",
        usage="%(prog)s --target URL (--trace FILE | --mix FILE) [option ...]",
        description=__doc__,
    )
    parser.set_defaults(run=run)
    target = parser.add_argument_group("target")
    target.add_argument(
        "--target", required=True, metavar="URL", help="http://host:port or https://host:port"
    )
    add_flags(target, ReplaySettings, TargetFlags)
    workload = parser.add_argument_group("workload")
    add_trace_flags(workload)
    add_flags(workload.add_mutually_exclusive_group(), ReplayPace)
    add_flags(workload, ReplayedTrace)
    output = parser.add_argument_group("output")
    add_flags(output, ReplayOutputs, Goodput)
    add_output_flags(output, plots=False)
    output.add_argument(
        "--requests-json", type=Path, metavar="OUT", help="write what happened to each request"
    )


def run(arguments: argparse.Namespace) -> int:
    given = read_flags(arguments, *SECTIONS)
    settings, label = _settings(arguments, given), given.read(ReplayOutputs).label
    check_outputs(arguments)
    check_output("--requests-json", arguments.requests_json)
    requests, notes = _workload(arguments, given.read(ReplayedTrace), settings)
    groups = len({request.group for request in requests})
    settings = replace(settings, targets=given.read(Goodput).targets(groups))
    _allow_open_files()
    result = _replay(settings, requests)
    if settings.time_scale != 1:
        notes.append(
            f"The target runs {settings.time_scale:g} times faster than real time; "
            "all times and rates are its own."
        )
    title = _title(arguments, settings, requests, result)
    config = _config(arguments, given, settings, requests, result)
    answer(
        arguments,
        lambda: print_report(label, result, title=title, notes=notes, targets=settings.targets),
        lambda: as_json(config, label, result),
    )
    if arguments.requests_json is not None:
        text = requests_as_json(result, time_scale=settings.time_scale)
        write_output("--requests-json", arguments.requests_json, text)
    if result.interrupted:
        return 130
    return 1 if result.faults else 0


def _settings(arguments: argparse.Namespace, given: Given) -> ReplaySettings:
    flags, pace, replayed = (
        given.read(TargetFlags),
        given.read(ReplayPace),
        given.read(ReplayedTrace),
    )
    parsed, http3 = parse_target("--target", arguments.target), given.values["http3"]
    if http3 and not parsed.tls:
        raise ConfigError("--http3: needs a --target of https, as HTTP/3 is always encrypted")
    if http3 and find_spec("aioquic") is None:
        raise ConfigError("--http3: needs the extra h3: pip install '.[h3]'")
    emulation = arguments.emulation
    if emulation is not None:
        parse_target("--emulation", emulation)
    return given.read(
        ReplaySettings,
        target=arguments.target,
        rate=pace.rate or 1.0,
        concurrency=pace.concurrency,
        api_key=None if flags.api_key_file is None else _api_key(flags.api_key_file),
        tenant_keys={} if flags.tenant_keys is None else _tenant_keys(flags.tenant_keys),
        seed=replayed.seed,
        request_ids=f"replay-{secrets.token_hex(4)}",
        lengths=_lengths(replayed.lengths, emulation),
        drain=not replayed.stop_at_last_arrival,
    )


def _lengths(asked: ReplayLengths | None, emulation: str | None) -> ReplayLengths:
    if asked is None:
        return ReplayLengths.MAX_TOKENS if emulation is None else ReplayLengths.HIDDEN
    if asked is ReplayLengths.HIDDEN and emulation is None:
        raise ConfigError("--lengths hidden: needs --emulation, for who is to tell the lengths")
    return asked


def _api_key(path: Path) -> str:
    # The file's text is a secret: no message repeats it.
    key = path.read_bytes().removeprefix(BOM_UTF8).strip().decode("latin-1")
    if not _is_key(key):
        raise ConfigError(f"--api-key-file: {path} does not hold one line of printable ASCII")
    return key


def _tenant_keys(path: Path) -> dict[str, str]:
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # Their messages may show what the file holds.
        raise ConfigError(f"--tenant-keys: {path} is not valid TOML") from None
    for name, key in keys.items():
        if not isinstance(key, str) or not _is_key(key):
            raise ConfigError(
                f"--tenant-keys: {path}: the key of {name} is no text of printable ASCII"
            )
    if not keys:
        raise ConfigError(f"--tenant-keys: {path} has no tenant")
    return keys


def _is_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


def _workload(
    arguments: argparse.Namespace, replayed: ReplayedTrace, settings: ReplaySettings
) -> "tuple[list[PlannedRequest], list[str]]":
    """Return the requests, and the report's notes on them."""
    trace = read_flagged_mix(arguments)
    limits = {
        "max_prompt_tokens": replayed.max_prompt_tokens,
        "max_output_tokens": replayed.max_output_tokens,
    }
    requests = plan(trace, skip=replayed.skip, count=replayed.requests, **limits)
    notes = _doubts(requests, settings)
    taken = len(trace[replayed.skip :][: replayed.requests])
    if taken > len(requests):
        notes.append(f"{taken - len(requests):,} requests without output are left out.")
    if replayed.sharegpt is not None:
        requests = with_exchanges(requests, read_exchanges(replayed.sharegpt), **limits)
        notes.append(
            f"Prompts are of {replayed.sharegpt.name}; lengths asked are estimates, a token for "
            f"every {BYTES_PER_TOKEN} bytes."
        )
    if settings.lengths is ReplayLengths.MAX_TOKENS:
        notes.append(
            "Every request's max_tokens is the length of its answer: the target's predictors, if it "
            "has any, were told what they are to predict."
        )
        return requests, notes
    requests = with_limits(requests, seed=settings.seed, api=settings.api)
    cut = sum(request.answer_tokens < request.output_tokens for request in requests)
    notes.append(
        "Lengths were told to the emulated engines alone; max_tokens is drawn as clients set it, and "
        f"cuts {cut:,} of {len(requests):,} answers."
    )
    return requests, notes


def _doubts(requests: "list[PlannedRequest]", settings: ReplaySettings) -> list[str]:
    """Warn now, and in the report, of a pace that is hardly meant."""
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    if settings.concurrency is not None or not span_s:
        return []
    sent_s, doubt = span_s / settings.rate, ""
    per_s = (len(requests) - 1) / span_s
    if not 1 / _ODD_PACE < settings.rate < _ODD_PACE:
        doubt = f"--rate {settings.rate:g}"
    elif len(requests) >= _LEAST_PACED and not _SLOWEST_PER_S < per_s < _FASTEST_PER_S:
        doubt = "the unit of its times may be another: see --columns"
    if not doubt:
        return []
    warning = (
        f"warning: {len(requests):,} requests that span {span_s:,.6g} s by the trace are sent within "
        f"{sent_s:,.6g} s ({doubt})"
    )
    sys.stderr.write(warning + "\n")
    return [warning]


def _allow_open_files() -> None:
    """Allow as many connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in {soft, hard} and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _replay(settings: ReplaySettings, requests: "list[PlannedRequest]") -> "ReplayResult":
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # Not its own thread: the replay refreshes the bar between two pieces of its work.
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not sys.stderr.isatty(),
        ) as bar,
    ):
        try:
            return runner.run(_interruptible(settings, requests, _Bar(bar, len(requests))))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _interruptible(
    settings: ReplaySettings, requests: "list[PlannedRequest]", bar: "_Bar"
) -> "ReplayResult":
    """Replay until the end or the first SIGINT; a second one cancels even that end."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stop = asyncio.Event()

    def interrupt() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await replay(
            settings, requests, progress=bar.show, stop=stop, clock_ns=time.perf_counter_ns
        )
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Bar:
    """The bar: the ended and running requests, and the rate of tokens."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, state="")
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RATE_UPDATES)
        self._total, self._piped = total, PipedProgress()

    def show(self, state: "State") -> None:
        self._recent.append((state.elapsed_s, state.token_events))
        (begin_s, before), (end_s, now) = self._recent[0], self._recent[-1]
        rate = (now - before) / (end_s - begin_s) if end_s > begin_s else 0.0
        text = f"requests, {state.running:,} running, {state.errors:,} errors, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=state.ended, state=text)
        self._bar.refresh()
        self._piped.write(f"{state.ended:,} of {self._total:,} {text}")


def _title(
    arguments: argparse.Namespace,
    settings: ReplaySettings,
    requests: "list[PlannedRequest]",
    result: "ReplayResult",
) -> str:
    pace = f"rate {settings.rate:g}"
    if settings.concurrency is not None:
        pace = f"{settings.concurrency:,} outstanding"
    return (
        f"{trace_path(arguments).name}: {len(requests):,} requests, {pace}, "
        f"to {result.model} at {arguments.target} ({settings.api.value})"
    )


def _config(
    arguments: argparse.Namespace,
    given: Given,
    settings: ReplaySettings,
    requests: "list[PlannedRequest]",
    result: "ReplayResult",
) -> dict[str, object]:
    chosen = options(arguments) | given.values
    for name in ("json", "requests_json", "api_key_file", "tenant_keys"):
        del chosen[name]
    sharegpt = given.read(ReplayedTrace).sharegpt
    return chosen | {
        "api": settings.api.value,
        "lengths": settings.lengths.value,
        "trace": str(trace_path(arguments)),
        "mix": arguments.mix is not None,
        "sharegpt": None if sharegpt is None else str(sharegpt),
        "rate": settings.rate if settings.concurrency is None else None,
        "model": result.model,
        "requests": len(requests),
        "interrupted": result.interrupted,
        "version": __version__,
        "steady_state": STEADY_STATE,
    }

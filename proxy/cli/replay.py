"""`balanceroute replay`: replay a trace over HTTP against an OpenAI-compatible endpoint."""

import argparse
import asyncio
import resource
import secrets
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from balanceroute import __version__
from balanceroute.proxy.cli.help_format import HelpFormatter
from balanceroute.proxy.cli.numbers import check_numbers
from balanceroute.proxy.cli.outputs import check_output, write_output
from balanceroute.proxy.cli.trace_flags import TRACE_HELP, add_format_flags, read_flagged_trace
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.replay.body import Api
from balanceroute.proxy.replay.driver import replay
from balanceroute.proxy.replay.figures import STEADY_STATE
from balanceroute.proxy.replay.limits import with_limits
from balanceroute.proxy.replay.report import as_json, print_report, requests_as_json
from balanceroute.proxy.replay.settings import Lengths, ReplaySettings
from balanceroute.proxy.replay.sharegpt import BYTES_PER_TOKEN, read_exchanges, with_exchanges
from balanceroute.proxy.replay.target import parse_target
from balanceroute.proxy.replay.workload import plan

if TYPE_CHECKING:
    from balanceroute.proxy.replay.driver import Progress as State
    from balanceroute.proxy.replay.driver import ReplayResult
    from balanceroute.proxy.replay.workload import PlannedRequest

_DEFAULTS = ReplaySettings(target="")
# The range of every number.
_BOUNDS: dict[str, tuple[float, float]] = {
    "--rate": (1e-6, 1e6),
    "--concurrency": (1, 1e5),
    "--requests": (1, 1e9),
    "--skip": (0, 1e9),
    "--timeout": (0.001, 1e6),
    "--time-scale": (1e-3, 1e6),
    "--max-prompt-tokens": (1, 1e9),
    "--max-output-tokens": (1, 1e9),
}
# Of the bar, over which its tokens per second are taken.
_RATE_UPDATES = 15


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace over HTTP against an OpenAI-compatible endpoint",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    _add_target(parser)
    _add_workload(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--label", default="target", help="what to call the target in the report")
    output.add_argument("--json", type=Path, metavar="OUT", help="write the figures as JSON")
    output.add_argument(
        "--requests-json", type=Path, metavar="OUT", help="write what happened to each request"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument(
        "--target", required=True, metavar="URL", help="http://host:port or https://host:port"
    )
    group.add_argument("--model", metavar="M", help="its name (default: the first of /v1/models)")
    group.add_argument(
        "--api", default=_DEFAULTS.api.value, choices=[api.value for api in Api], help="endpoint"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=_DEFAULTS.timeout_s,
        metavar="S",
        help="seconds until a whole answer must be there",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="F", help="its one line is sent as a bearer token"
    )
    group.add_argument(
        "--time-scale",
        type=float,
        default=_DEFAULTS.time_scale,
        metavar="S",
        help="the target runs S times faster than real time: an emulated fleet; every time and "
        "rate given or reported is the target's",
    )
    group.add_argument(
        "--emulation",
        metavar="URL",
        help="any engine of the emulated fleet behind the target: it is told the lengths of the "
        "answers, and its own figures are reported",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", required=True, type=Path, metavar="FILE", help=TRACE_HELP)
    add_format_flags(group)
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=float, metavar="R", help="open loop: speed up the trace's times (default 1)"
    )
    pace.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: N requests always outstanding"
    )
    group.add_argument("--requests", type=int, metavar="N", help="replay only the first N")
    group.add_argument("--skip", type=int, default=0, metavar="N", help="pass over the first N")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="cut longer prompts")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="cut longer answers")
    group.add_argument(
        "--sharegpt", type=Path, metavar="FILE", help="prompts and output lengths of conversations"
    )
    group.add_argument(
        "--lengths",
        choices=[one.value for one in Lengths],
        help="how engines learn how long answers are: hidden from the target (takes --emulation), "
        "max_tokens as clients set it; or as max_tokens with ignore_eos, which tells predictors "
        "the answer (default: hidden with --emulation, max-tokens without)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the prompts' words, and of limits"
    )
    group.add_argument(
        "--stop-at-last-arrival",
        action="store_true",
        help="give up what still runs when the last request is sent: by then all is measured",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 if a request failed, 130 if it was interrupted.

    Raises:
        ConfigError: A setting cannot be served.
        TargetError: The target does not answer as it must.
        TraceError: The trace cannot be read.
        WireError: The target does not answer.
        OSError: The output cannot be written.
    """
    check_numbers(arguments, _BOUNDS)
    settings = _settings(arguments)
    for flag, path in (("--json", arguments.json), ("--requests-json", arguments.requests_json)):
        check_output(flag, path)
    requests, notes = _workload(arguments, settings)
    _allow_open_files()
    result = _replay(settings, requests)
    if settings.time_scale != 1:
        notes.append(
            f"The target runs {settings.time_scale:g} times faster than real time; "
            "all times and rates are its own."
        )
    print_report(arguments.label, result, title=_title(arguments, requests, result), notes=notes)
    if arguments.json is not None:
        config = _config(arguments, settings, requests, result)
        write_output("--json", arguments.json, as_json(config, arguments.label, result))
    if arguments.requests_json is not None:
        text = requests_as_json(result, time_scale=settings.time_scale)
        write_output("--requests-json", arguments.requests_json, text)
    if result.interrupted:
        return 130
    return 1 if result.faults else 0


def _settings(arguments: argparse.Namespace) -> ReplaySettings:
    parse_target("--target", arguments.target)
    if arguments.emulation is not None:
        parse_target("--emulation", arguments.emulation)
    return ReplaySettings(
        target=arguments.target,
        model=arguments.model,
        api=Api(arguments.api),
        rate=1.0 if arguments.rate is None else arguments.rate,
        concurrency=arguments.concurrency,
        time_scale=arguments.time_scale,
        timeout_s=arguments.timeout,
        api_key=None if arguments.api_key_file is None else _api_key(arguments.api_key_file),
        seed=arguments.seed,
        request_ids=f"replay-{secrets.token_hex(4)}",
        emulation=arguments.emulation,
        lengths=_lengths(arguments),
        drain=not arguments.stop_at_last_arrival,
    )


def _lengths(arguments: argparse.Namespace) -> Lengths:
    if arguments.lengths is None:
        return Lengths.MAX_TOKENS if arguments.emulation is None else Lengths.HIDDEN
    if arguments.lengths == Lengths.HIDDEN.value and arguments.emulation is None:
        raise ConfigError("--lengths hidden: needs --emulation, for who is to tell the lengths")
    return Lengths(arguments.lengths)


def _api_key(path: Path) -> str:
    # The file's text is a secret: no message repeats it.
    key = path.read_bytes().strip()
    if not key or not key.isascii() or not key.decode().isprintable():
        raise ConfigError(f"--api-key-file: {path} does not hold one line of printable ASCII")
    return key.decode()


def _workload(
    arguments: argparse.Namespace, settings: ReplaySettings
) -> "tuple[list[PlannedRequest], list[str]]":
    """Return the requests, and what the report must say about them."""
    trace = read_flagged_trace(arguments)
    limits = {
        "max_prompt_tokens": arguments.max_prompt_tokens,
        "max_output_tokens": arguments.max_output_tokens,
    }
    requests = plan(trace, skip=arguments.skip, count=arguments.requests, **limits)
    notes = []
    taken = len(trace[arguments.skip :][: arguments.requests])
    if taken > len(requests):
        notes.append(f"{taken - len(requests):,} requests without output are left out.")
    if arguments.sharegpt is not None:
        requests = with_exchanges(requests, read_exchanges(arguments.sharegpt), **limits)
        notes.append(
            f"Prompts are of {arguments.sharegpt.name}; lengths asked are estimates, a token for "
            f"every {BYTES_PER_TOKEN} bytes."
        )
    if settings.lengths is Lengths.MAX_TOKENS:
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
    """The bar: how many requests have ended, what runs, and how fast tokens come."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, state="")
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RATE_UPDATES)

    def show(self, state: "State") -> None:
        self._recent.append((state.elapsed_s, state.token_events))
        (begin_s, before), (end_s, now) = self._recent[0], self._recent[-1]
        rate = (now - before) / (end_s - begin_s) if end_s > begin_s else 0.0
        text = f"requests, {state.running:,} running, {state.errors:,} errors, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=state.ended, state=text)
        self._bar.refresh()


def _title(
    arguments: argparse.Namespace, requests: "list[PlannedRequest]", result: "ReplayResult"
) -> str:
    pace = f"rate {1.0 if arguments.rate is None else arguments.rate:g}"
    if arguments.concurrency is not None:
        pace = f"{arguments.concurrency:,} outstanding"
    return (
        f"{arguments.trace.name}: {len(requests):,} requests, {pace}, "
        f"to {result.model} at {arguments.target} ({arguments.api})"
    )


def _config(
    arguments: argparse.Namespace,
    settings: ReplaySettings,
    requests: "list[PlannedRequest]",
    result: "ReplayResult",
) -> dict[str, object]:
    chosen = {name: value for name, value in vars(arguments).items() if name != "run"}
    for name in ("json", "requests_json", "api_key_file"):
        del chosen[name]
    rate = 1.0 if arguments.rate is None else arguments.rate
    return chosen | {
        "lengths": settings.lengths.value,
        "trace": str(arguments.trace),
        "sharegpt": None if arguments.sharegpt is None else str(arguments.sharegpt),
        "rate": rate if arguments.concurrency is None else None,
        "model": result.model,
        "requests": len(requests),
        "interrupted": result.interrupted,
        "version": __version__,
        "steady_state": STEADY_STATE,
    }

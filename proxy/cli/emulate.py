"""`balanceroute emulate`: prefillers and decode ranks that behave like vLLM engines, on this machine."""

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import sys
import time
from math import inf

from balanceroute.proxy.cli.help_format import HelpFormatter
from balanceroute.proxy.cli.numbers import check_numbers
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.emulate import (
    Connector,
    DpMode,
    EmulatedFleet,
    EmulationSettings,
    Preemption,
)

_DEFAULTS = EmulationSettings()
_READ_BYTES = 4_096
# The range of every number.
_BOUNDS: dict[str, tuple[float, float]] = {
    "--prefillers": (0, 1e3),
    "--ranks": (0, 1e4),
    "--batch": (1, 1e9),
    "--kv-capacity": (1, 1e12),
    "--prefill-kv-capacity": (1, 1e12),
    "--lease-s": (1e-6, 1e9),
    "--max-model-len": (2, 1e9),
    "--mean-output": (1, inf),
    "--port": (0, 65_535),
    # A step of no time would let time stand still.
    "--step-base-ms": (0.001, 1e6),
    "--step-us-per-token": (0, 1e6),
    "--prefill-base-ms": (0, 1e6),
    "--prefill-us-per-token": (0, 1e6),
    "--transfer-base-ms": (0, 1e6),
    "--transfer-us-per-token": (0, 1e6),
    "--time-scale": (1e-3, 1e6),
    "--partial-utf8": (0, 1),
    "--merged-outputs": (0, 1),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "emulate",
        help="serve emulated engines: prefillers, and decode ranks with one barrier",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--prefillers", type=int, default=_DEFAULTS.prefillers, metavar="P", help="prefill engines"
    )
    fleet.add_argument(
        "--ranks", type=int, default=_DEFAULTS.ranks, metavar="G", help="decode ranks"
    )
    fleet.add_argument(
        "--batch",
        type=int,
        default=_DEFAULTS.batch_limit,
        metavar="B",
        help="batch limit of a rank",
    )
    fleet.add_argument(
        "--kv-capacity", type=int, metavar="TOKENS", help="KV tokens per rank (default: no limit)"
    )
    fleet.add_argument(
        "--prefill-kv-capacity",
        type=int,
        metavar="TOKENS",
        help="the same, per prefiller (default: no limit)",
    )
    fleet.add_argument(
        "--connector",
        choices=[one.value for one in Connector],
        default=_DEFAULTS.connector.value,
        help="how KV caches travel",
    )
    fleet.add_argument(
        "--dp-mode",
        choices=[one.value for one in DpMode],
        default=_DEFAULTS.dp_mode.value,
        help="a port for each rank, or one port and X-data-parallel-rank",
    )
    fleet.add_argument(
        "--preemption",
        choices=[one.value for one in Preemption],
        default=_DEFAULTS.preemption.value,
        help='what a full KV cache does: compute again, or stop with "recomputed"',
    )
    fleet.add_argument(
        "--lease-s",
        type=float,
        default=_DEFAULTS.lease_s,
        metavar="S",
        help="lease of prefilled KV",
    )
    _add_speed(parser)
    _add_answers(parser)
    _add_server(parser)


def _add_speed(parser: argparse.ArgumentParser) -> None:
    speed = parser.add_argument_group("speed")
    for flag, value, symbol, words in (
        ("--step-base-ms", _DEFAULTS.step_base_ns / 1e6, "a", "step = a + b x max load"),
        ("--step-us-per-token", _DEFAULTS.step_ns_per_token / 1e3, "b", "see a"),
        ("--prefill-base-ms", _DEFAULTS.prefill_base_ns / 1e6, "c", "prefill = c + d x prompt"),
        ("--prefill-us-per-token", _DEFAULTS.prefill_ns_per_token / 1e3, "d", "see c"),
        (
            "--transfer-base-ms",
            _DEFAULTS.transfer_base_ns / 1e6,
            "e",
            "KV transfer = e + f x prompt",
        ),
        ("--transfer-us-per-token", _DEFAULTS.transfer_ns_per_token / 1e3, "f", "see e"),
        ("--time-scale", _DEFAULTS.time_scale, "X", "emulated seconds in a real one"),
    ):
        speed.add_argument(flag, type=float, default=value, metavar=symbol, help=words)


def _add_answers(parser: argparse.ArgumentParser) -> None:
    answers = parser.add_argument_group("answers")
    answers.add_argument("--model", default=_DEFAULTS.model, help="name of the served model")
    answers.add_argument(
        "--max-model-len",
        type=int,
        default=_DEFAULTS.max_model_len,
        metavar="TOKENS",
        help="context",
    )
    answers.add_argument(
        "--mean-output",
        type=float,
        default=_DEFAULTS.mean_output_tokens,
        metavar="TOKENS",
        help="mean length of answers that end by themselves",
    )
    answers.add_argument(
        "--prompt-tokens-details", action="store_true", help="tell cached_tokens in usage"
    )
    answers.add_argument(
        "--reasoning-parser",
        action="store_true",
        help="chats begin with reasoning; tell reasoning_tokens in usage",
    )
    answers.add_argument(
        "--partial-utf8",
        type=float,
        default=_DEFAULTS.partial_utf8,
        metavar="P",
        help="probability that a token ends within a character",
    )
    answers.add_argument(
        "--merged-outputs",
        type=float,
        default=_DEFAULTS.merged_outputs,
        metavar="P",
        help="probability that a token shows in one event with the next",
    )
    answers.add_argument("--seed", type=int, default=0, metavar="N", help="of ids and faults")


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    server.add_argument(
        "--port",
        type=int,
        default=9100,
        help="of the first engine; the others follow (0: free ones)",
    )
    server.add_argument(
        "--json-ready", action="store_true", help="print one line of JSON instead of a list"
    )
    server.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="end when standard input ends: with the process that writes to it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it is interrupted.

    Raises:
        ConfigError: A setting cannot be served.
        OSError: An address cannot be bound.
    """
    import uvloop  # noqa: PLC0415 - so that the other subcommands start without it.

    settings = settings_from_flags(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, arguments))
    return 0


def settings_from_flags(arguments: argparse.Namespace) -> EmulationSettings:
    """Return the fleet's settings.

    Raises:
        ConfigError: One has a value that it cannot have.
    """
    _check_numbers(arguments)
    return EmulationSettings(
        prefillers=arguments.prefillers,
        ranks=arguments.ranks,
        batch_limit=arguments.batch,
        step_base_ns=round(1e6 * arguments.step_base_ms),
        step_ns_per_token=1e3 * arguments.step_us_per_token,
        prefill_base_ns=round(1e6 * arguments.prefill_base_ms),
        prefill_ns_per_token=1e3 * arguments.prefill_us_per_token,
        transfer_base_ns=round(1e6 * arguments.transfer_base_ms),
        transfer_ns_per_token=1e3 * arguments.transfer_us_per_token,
        rank_kv_tokens=arguments.kv_capacity,
        prefiller_kv_tokens=arguments.prefill_kv_capacity,
        lease_s=arguments.lease_s,
        connector=Connector(arguments.connector),
        dp_mode=DpMode(arguments.dp_mode),
        preemption=Preemption(arguments.preemption),
        time_scale=arguments.time_scale,
        model=arguments.model,
        max_model_len=arguments.max_model_len,
        mean_output_tokens=arguments.mean_output,
        prompt_tokens_details=arguments.prompt_tokens_details,
        reasoning_parser=arguments.reasoning_parser,
        partial_utf8=arguments.partial_utf8,
        merged_outputs=arguments.merged_outputs,
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    check_numbers(arguments, _BOUNDS)
    if arguments.prefillers + arguments.ranks == 0:
        raise ConfigError("--ranks is 0, and --prefillers is 0 too")
    engines = arguments.prefillers + arguments.ranks
    if arguments.port and arguments.port + 2 * engines > _BOUNDS["--port"][1]:
        raise ConfigError(f"--port is {arguments.port}, too high for {engines} engines behind it")


async def _serve(settings: EmulationSettings, arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if arguments.exit_with_stdin:
        _watch_stdin(loop, stopped)
    epoch_s = time.time_ns() / 1e9 - loop.time()
    fleet = EmulatedFleet(settings, rng=random.Random(arguments.seed), epoch_s=epoch_s)
    await fleet.start(arguments.host, arguments.port)
    try:
        # What is there stays, and requests leave few cycles. A collection holds up every rank.
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        _announce(fleet, as_json=arguments.json_ready)
        await stopped.wait()
    finally:
        await fleet.close()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Set `stopped` when standard input ends.

    Raises:
        ConfigError: It is nothing that can be waited for.
    """
    descriptor = sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, _READ_BYTES):
            loop.remove_reader(descriptor)
            stopped.set()

    try:
        loop.add_reader(descriptor, read)
    except OSError as error:
        raise ConfigError(f"--exit-with-stdin: standard input: {error.strerror}") from error


def _announce(fleet: EmulatedFleet, *, as_json: bool) -> None:
    urls = {
        "prefill": fleet.prefill_urls,
        "decode": fleet.decode_urls,
        "bootstrap": fleet.bootstrap_urls,
    }
    lines = [json.dumps({"ready": True} | urls)]
    if not as_json:
        lines = [f"{role}/{i} {url}" for role in urls for i, url in enumerate(urls[role])]
        lines.append("ready")
    for line in lines:
        print(line, flush=True)  # noqa: T201 - the command line's answer.

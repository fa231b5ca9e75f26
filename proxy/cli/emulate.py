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
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.run_flags import EngineFlags, Times
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import (
    choice,
    file,
    flag,
    integer,
    named,
    number,
    part,
    seconds,
    text,
    words,
)
from balanceroute.proxy.lab.emulate import (
    DpMode,
    EmulatedFleet,
    EmulationSettings,
    Frontend,
    Preemption,
)
from balanceroute.proxy.lab.emulate.prefix_caches import Publish
from balanceroute.proxy.live.security import engine_context
from balanceroute.proxy.live.settings.checks import host_name
from balanceroute.proxy.settings import Given, add_flags, read_flags
from balanceroute.topologies import CONNECTORS, KvFlow

if TYPE_CHECKING:
    from ssl import SSLContext


_DEFAULTS = EmulationSettings()
_MAX_PORT = 65_535
_READ_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFlags:
    prefillers: int = integer(_DEFAULTS.prefillers, "prefill engines", 0, 1_000, metavar="P")
    ranks: int = integer(_DEFAULTS.ranks, "decode ranks", 0, 10_000, metavar="G")
    batch: int = integer(_DEFAULTS.batch_limit, "batch limit of a rank", 1, 10**9, metavar="B")
    kv_capacity: int | None = integer(
        None, "KV tokens per rank", 1, 10**12, shown_default="no limit", metavar="TOKENS"
    )
    prefill_kv_capacity: int | None = integer(
        None, "the same, per prefiller", 1, 10**12, shown_default="no limit", metavar="TOKENS"
    )
    prefix_cache: int | None = integer(
        None,
        "tokens in the prefix cache of each engine and rank",
        0,
        10**12,
        shown_default="no cache",
        metavar="TOKENS",
    )
    kv_events: bool = flag(
        "let prefillers publish the events of their prefix caches (ZeroMQ; the extra kv-events)"
    )
    kv_event_faults: float = number(
        _DEFAULTS.kv_event_faults,
        "probability that a batch of them is lost, repeated, late, misnumbered or wrong",
        0,
        1,
        metavar="P",
    )
    connector: str = choice(
        _DEFAULTS.connector, "how KV caches travel", words(CONNECTORS), at_top=True
    )
    dp_mode: DpMode = choice(
        _DEFAULTS.dp_mode,
        "a port for each rank, or one port and X-data-parallel-rank",
        named(DpMode),
    )
    dp_size: int = integer(
        _DEFAULTS.dp_size,
        "ranks of a data-parallel group, of which all end once one is killed",
        1,
        10_000,
    )
    preemption: Preemption = choice(
        _DEFAULTS.preemption,
        'what a full KV cache does: compute again, or stop with "recomputed"',
        named(Preemption),
    )
    lease_s: float = seconds(_DEFAULTS.lease_s, "lease of prefilled KV", 1e-6, 1e9)
    proxy_ca_file: Path | None = file(
        "with mooncake-layerwise, certificates that ranks trust when they call an https proxy back; "
        "without it they trust any"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Times):
    """How long things take."""

    transfer_base_ms: float = number(
        _DEFAULTS.transfer_base_ns / 1e6, "KV transfer = e + f x prompt", 0, 1e6, metavar="e"
    )
    transfer_us_per_token: float = number(
        _DEFAULTS.transfer_ns_per_token / 1e3, "see e", 0, 1e6, metavar="f"
    )
    time_scale: float = number(_DEFAULTS.time_scale, "emulated seconds in a real one", 1e-3, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlags:
    """What the engines say."""

    model: str = text(_DEFAULTS.model, "name of the served model", metavar="MODEL", at_top=True)
    max_model_len: int = integer(_DEFAULTS.max_model_len, "context", 2, 10**9, metavar="TOKENS")
    mean_output: float = number(
        _DEFAULTS.mean_output_tokens,
        "mean length of answers that end by themselves",
        1,
        inf,
        metavar="TOKENS",
    )
    prompt_tokens_details: bool = flag("tell cached_tokens in usage")
    reasoning_parser: bool = flag("chats begin with reasoning; tell reasoning_tokens in usage")
    partial_utf8: float = number(
        _DEFAULTS.partial_utf8,
        "probability that a token ends within a character",
        0,
        1,
        metavar="P",
    )
    merged_outputs: float = number(
        _DEFAULTS.merged_outputs,
        "probability that a token shows in one event with the next",
        0,
        1,
        metavar="P",
    )
    frontend: Frontend = choice(
        _DEFAULTS.frontend, "which of vLLM's API servers writes the answers", named(Frontend)
    )
    seed: int = integer(0, "of ids and faults", -(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the engines are."""

    host: str = text("127.0.0.1", "address to listen on", host_name, metavar="HOST")
    port: int = integer(
        9100, "of the first engine; the others follow (0: free ones)", 0, _MAX_PORT, metavar="PORT"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """How the command deals with the process that starts it."""

    json_ready: bool = flag("print one line of JSON instead of a list")
    exit_with_stdin: bool = flag("end when standard input ends: with the process that writes to it")


HEADINGS: dict[str, tuple[type, ...]] = {
    "fleet": (FleetFlags, EngineFlags),
    "speed": (Speed,),
    "answers": (AnswerFlags,),
    "server": (Place, Process),
}
SECTIONS = (FleetFlags, EngineFlags, Speed, AnswerFlags, Place, Process)
# What the [emulation] table of a topology may say.
FILED = (FleetFlags, EngineFlags, Speed, AnswerFlags, Place)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "emulate",
        help="serve emulated engines: prefillers, and decode ranks with one barrier",
        usage="%(prog)s [option ...]",
        description=__doc__,
    )
    parser.set_defaults(run=run)
    for heading, sections in HEADINGS.items():
        add_flags(parser.add_argument_group(heading), *sections)


def run(arguments: argparse.Namespace) -> int:
    import uvloop  # noqa: PLC0415 - so that the other subcommands start without it.

    given = read_flags(arguments, *SECTIONS)
    settings, port = emulation_settings(given), given.read(Place).port
    engines = settings.prefillers + settings.ranks
    if port and port + 4 * engines > _MAX_PORT:
        raise ConfigError(f"--port is {port}, too high for {engines} engines behind it")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, given))
    return 0


def emulation_settings(given: Given) -> EmulationSettings:
    """Return the fleet's settings.

    Raises:
        ConfigError: There is no engine.
    """
    fleet, speed, answers = given.read(FleetFlags), given.read(Speed), given.read(AnswerFlags)
    if fleet.prefillers + fleet.ranks == 0:
        raise ConfigError("--ranks is 0, and --prefillers is 0 too")
    return part(
        EmulationSettings,
        fleet,
        speed,
        answers,
        batch_limit=fleet.batch,
        rank_kv_tokens=fleet.kv_capacity,
        prefiller_kv_tokens=fleet.prefill_kv_capacity,
        prefix_cache_tokens=fleet.prefix_cache,
        **speed.of("step", "prefill", "transfer"),
        mean_output_tokens=answers.mean_output,
        engines=given.read(EngineFlags).options,
    )


async def _serve(settings: EmulationSettings, given: Given) -> None:
    place, process = given.read(Place), given.read(Process)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stopped.set)
    if process.exit_with_stdin:
        _watch_stdin(loop, stopped)
    epoch_s = time.time_ns() / 1e9 - loop.time()
    rng = random.Random(given.read(AnswerFlags).seed)
    fleet = EmulatedFleet(
        settings, rng=rng, epoch_s=epoch_s, publish=_publish(settings), trust=_trust(given)
    )
    await fleet.start(place.host, place.port)
    try:
        # What is there stays, and requests leave few cycles. A collection holds up every rank.
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        _announce(fleet, as_json=process.json_ready)
        await stopped.wait()
    finally:
        await fleet.close()


def _trust(given: Given) -> "SSLContext | None":
    fleet = given.read(FleetFlags)
    if fleet.proxy_ca_file is None:
        return None
    if CONNECTORS[fleet.connector].flow is not KvFlow.DECODE_FIRST:
        reason = f"means nothing with {fleet.connector}, whose ranks call no proxy"
        raise ConfigError(f"{given.where('proxy_ca_file')}: {reason}")
    with given.blamed("proxy_ca_file"):
        return engine_context(fleet.proxy_ca_file, insecure=False)


def _publish(settings: EmulationSettings) -> Publish | None:
    if not settings.kv_events:
        return None
    try:
        from balanceroute.proxy.lab.emulate.kv_publisher import KvPublisher  # noqa: PLC0415  # An extra.
    except ModuleNotFoundError:
        raise ConfigError(
            "--kv-events: needs the extra kv-events: pip install '.[kv-events]'"
        ) from None
    return KvPublisher


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
        "kv_events": [events for events, _ in fleet.kv_addresses],
        "kv_replay": [replay for _, replay in fleet.kv_addresses],
    }
    lines = [json.dumps({"ready": True} | urls)]
    if not as_json:
        lines = [f"{role}/{i} {url}" for role in urls for i, url in enumerate(urls[role])]
        lines.append("ready")
    for line in lines:
        print(line, flush=True)  # noqa: T201 - the command line's answer.

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

from balanceroute.proxy.cli.run_flags import Times
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import flag, integer, number, text
from balanceroute.proxy.lab.emulate import EmulatedFleet, EmulationSettings
from balanceroute.proxy.lab.emulate.prefix_caches import Publish
from balanceroute.proxy.lab.sim.engines import SimulatedEngineOptions
from balanceroute.proxy.live.settings.checks import host_name
from balanceroute.proxy.settings import Given, add_flags, read_flags

_DEFAULTS = EmulationSettings()
_MAX_PORT = 65_535
_READ_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFlags:
    """The inputs of the engines beside their settings."""

    seed: int = integer(0, "of ids and faults", -(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Times):
    transfer_base_ms: float = number(
        _DEFAULTS.transfer_base_ns / 1e6, "KV transfer = e + f x prompt", 0, 1e6, metavar="e"
    )
    transfer_us_per_token: float = number(
        _DEFAULTS.transfer_ns_per_token / 1e3, "see e", 0, 1e6, metavar="f"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    "engines": (EmulationSettings, SimulatedEngineOptions, FleetFlags),
    "speed": (Speed,),
    "server": (Place, Process),
}
# The keys of a topology's [emulation] table.
FILED = (EmulationSettings, SimulatedEngineOptions, FleetFlags, Speed, Place)
SECTIONS = (*FILED, Process)


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
    if given.values["prefillers"] == given.values["ranks"] == 0:
        raise ConfigError("--ranks is 0, and --prefillers is 0 too")
    return given.read(
        EmulationSettings,
        **given.read(Speed).of("step", "prefill", "transfer"),
        engines=given.read(SimulatedEngineOptions),
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
    rng = random.Random(given.read(FleetFlags).seed)
    fleet = EmulatedFleet(settings, rng=rng, epoch_s=epoch_s, publish=_publish(settings))
    await fleet.start(place.host, place.port)
    try:
        # Objects made so far stay, and requests leave few cycles. A collection holds up every rank.
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        _announce(fleet, as_json=process.json_ready)
        await stopped.wait()
    finally:
        await fleet.close()


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

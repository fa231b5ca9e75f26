"""`balanceroute up`: start a topology's emulated engines and serve in front of them."""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.serve import add_serve_flags, configure_and_serve, flags_given
from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError, shown
from balanceroute.topologies import did_you_mean, read_topology

if TYPE_CHECKING:
    from balanceroute.topologies import Topology

# What an [emulation] table may say: flags of `balanceroute emulate`, with underscores.
EMULATION_KEYS = (
    "host",
    "port",
    "prefillers",
    "ranks",
    "batch",
    "kv_capacity",
    "prefill_kv_capacity",
    "dp_mode",
    "preemption",
    "lease_s",
    "step_base_ms",
    "step_us_per_token",
    "prefill_base_ms",
    "prefill_us_per_token",
    "transfer_base_ms",
    "transfer_us_per_token",
    "time_scale",
    "max_model_len",
    "mean_output",
    "seed",
)
_READY_S = 30.0
_END_S = 10.0
_READY_BYTES = 1 << 20


class EngineProcessError(BalanceRouteError):
    """The emulated engines did not start, or ended before they were to."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "up",
        help="start a topology's emulated engines and serve in front of them",
        description=__doc__,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "topology", metavar="TOPOLOGY", help="a TOML file, or the name of a shipped one"
    )
    add_serve_flags(parser, without=("prefill", "decode", "bootstrap", "connector", "model"))


def run(arguments: argparse.Namespace) -> int:
    """Run the command: serve until a signal ends it, then end the engines.

    Raises:
        ConfigError: A setting cannot be served.
        TopologyError: The topology cannot be used.
        EngineProcessError: The engines did not start, or ended.
    """
    topology = read_topology(arguments.topology)
    with engine_process(emulate_command(topology)) as process:
        engines = _addresses(_ready_line(process))
        _greet(engines)
        with _watched(process) as ended:
            status = configure_and_serve(topology, flags_given(arguments) | engines)
        if ended:
            raise EngineProcessError(f"the emulated engines ended {ended[0]}")
        return status


def _greet(engines: "Mapping[str, object]") -> None:
    """Say where the engines are: what wants their own figures needs to know."""
    for role, urls in engines.items():
        assert isinstance(urls, list)
        sys.stderr.write(f"{role}: {' '.join(urls)}\n")


@contextmanager
def _watched(process: "subprocess.Popen[bytes]") -> Iterator[list[str]]:
    """End this process's service if a process ends; yield where it is noted how that ended."""
    ended: list[str] = []
    over = threading.Event()

    def watch() -> None:
        status = process.wait()
        if over.is_set():
            return
        ended.append(f"with status {status}" if status >= 0 else f"by signal {-status}")
        os.kill(os.getpid(), signal.SIGTERM)  # As if somebody stopped it: it drains.

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield ended
    finally:
        over.set()


def emulate_command(topology: "Topology") -> list[str]:
    """Return the command line that emulates a topology's engines.

    Raises:
        ConfigError: The topology does not say how, or says something unknown.
    """
    if topology.emulation is None:
        reason = "has no [emulation] table: put `balanceroute serve` before its engines"
        raise ConfigError(f"{topology.path}: {reason}")
    words = [sys.executable, "-m", "balanceroute.proxy", "emulate"]
    for key, value in topology.emulation.items():
        place = f"{topology.path}: [emulation].{key}"
        if key not in EMULATION_KEYS:
            raise ConfigError(f"{place}: unknown key{did_you_mean(key, EMULATION_KEYS)}")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ConfigError(f"{place} is {shown(value)}, must be a number or a text")
        # As one word: a value that begins with a dash is no flag.
        words.append(f"--{key.replace('_', '-')}={value}")
    if topology.connector is not None:
        words.append(f"--connector={topology.connector}")
    if len(topology.models) > 1:
        raise ConfigError(f"{topology.path}: model: emulated engines serve one model, not several")
    if topology.models:
        words.append(f"--model={topology.models[0]}")
    return [*words, "--json-ready", "--exit-with-stdin"]


@contextmanager
def emulated_engines(command: Sequence[str]) -> Iterator[dict[str, object]]:
    """Run the engines; yield their addresses as `serve`'s flags.

    Raises:
        EngineProcessError: They did not start.
    """
    with engine_process(command) as process:
        yield _addresses(_ready_line(process))


@contextmanager
def engine_process(command: Sequence[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the engines until the context ends.

    The engines end when their standard input does, so that they never outlive this process, however
    it ends. A session of their own keeps the terminal's Ctrl-C from ending them before the proxy.
    """
    process = subprocess.Popen(  # noqa: S603 - this package's own command.
        command,
        # Unbuffered, so that a read takes no more than what has come.
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _ready_line(process: "subprocess.Popen[bytes]") -> bytes:
    """Return the first line that the engines print.

    Raises:
        EngineProcessError: They end first, or print none in time.
    """
    assert process.stdout is not None
    line = bytearray()
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], _READY_S)[0]:
            raise EngineProcessError(f"the emulated engines were not ready after {_READY_S:g} s")
        piece = process.stdout.read(_READY_BYTES)
        line += piece
        if not piece:
            process.kill()
            status = process.wait()
            reason = f"ended with status {status} before they were ready"
            raise EngineProcessError(f"the emulated engines {reason}")
        if len(line) > _READY_BYTES:
            raise EngineProcessError(f"the emulated engines said {shown(bytes(line))}")
    return bytes(line)


def _addresses(line: bytes) -> dict[str, object]:
    """Return the flags in the line with which the engines say that they are ready.

    Raises:
        EngineProcessError: It is another line.
    """
    try:
        ready = json.loads(line)
    except ValueError:
        ready = None
    found: dict[str, object] = {}
    if isinstance(ready, Mapping) and ready.get("ready") is True:
        for name in ("prefill", "decode", "bootstrap"):
            urls = ready.get(name)
            if isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls):
                found[name] = urls
    if not found.keys() >= {"prefill", "decode"}:
        raise EngineProcessError(f"the emulated engines said {shown(line)} instead of ready")
    return found

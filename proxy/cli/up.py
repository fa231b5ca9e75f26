"""`balanceroute up`: start a topology's emulated engines and serve in front of them."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.serve import (
    add_serve_flags,
    configure_and_serve,
    flags_given,
)
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import flag_of
from balanceroute.proxy.lab.emulate.process import (
    EngineProcessError,
    addresses,
    engine_process,
    ready_line,
)
from balanceroute.proxy.settings import Given
from balanceroute.topologies.topology import read_topology

if TYPE_CHECKING:
    import subprocess

    from balanceroute.topologies.topology import Topology


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        help="start a topology's emulated engines and serve in front of them",
        usage="%(prog)s TOPOLOGY [option ...]",
        description=__doc__,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "topology", metavar="TOPOLOGY", help="a TOML file, or the name of a shipped one"
    )
    add_serve_flags(
        parser,
        without=("prefill", "decode", "bootstrap", "kv_events", "kv_replay", "connector", "model"),
    )


def run(arguments: argparse.Namespace) -> int:
    topology = read_topology(arguments.topology)
    given = flags_given(arguments)
    with engine_process(emulate_command(topology)) as process:
        engines = addresses(ready_line(process))
        _greet(engines)
        with _watched(process) as ended:
            status = configure_and_serve(topology, given | engines, arguments, owns_engines=True)
        if ended:
            raise EngineProcessError(f"the emulated engines ended {ended[0]}")
        return status


def _greet(engines: "Mapping[str, object]") -> None:
    """Print the engines' addresses, for commands that read the engines' own figures."""
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
        os.kill(os.getpid(), signal.SIGTERM)  # Then it drains.

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
    from balanceroute.proxy.cli.emulate import FILED  # noqa: PLC0415 - it needs the extra.

    if topology.emulation is None:
        reason = "has no [emulation] table: put `balanceroute serve` before its engines"
        raise ConfigError(f"{topology.path}: {reason}")
    words = [sys.executable, "-m", "balanceroute.proxy", "emulate"]
    # Checked here, where the file is known.
    table = topology.emulation
    Given(FILED, flags={}, table=table, table_name="emulation", file=topology.path)
    for key, value in table.items():
        if isinstance(value, bool):
            words += [flag_of(key)] * value
        else:
            # As one word: a value that begins with a dash is no flag.
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"{flag_of(key)}={text}")
    if topology.connector is not None:
        words.append(f"--connector={topology.connector}")
    if len(topology.models) > 1:
        raise ConfigError(f"{topology.path}: model: emulated engines serve one model, not several")
    if topology.models:
        words.append(f"--model={topology.models[0]}")
    return [*words, "--json-ready", "--exit-with-stdin"]

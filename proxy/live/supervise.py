"""Running the proxy as several processes: what the command itself becomes."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from msgspec.structs import replace

from balanceroute.proxy.live.announcement import announce as announce_ports
from balanceroute.proxy.live.control.standing import make_private
from balanceroute.proxy.live.listeners import not_bound
from balanceroute.proxy.live.process_edge import Logs, native_library
from balanceroute.proxy.live.processes.kept_process import INPUT_FAULT, StartError
from balanceroute.proxy.live.processes.listening import listen
from balanceroute.proxy.live.processes.supervisor import Commands, Supervisor

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from balanceroute.proxy.live.processes.part import Part
    from balanceroute.proxy.live.settings.config import ProxyConfig

_log = logging.getLogger(__name__)


def supervise(
    config: "ProxyConfig",
    words: Sequence[str],
    topology: Path | None,
    engines: Mapping[str, object],
) -> int:
    """Serve with several processes until a signal ends it; return the exit status.

    Args:
        config: All settings; the processes read theirs again.
        words: The command line, the command first: each process is started by the same.
        topology: The file that they name, if there is one.
        engines: The URLs of the engines that the command has started, by flag.

    Raises:
        ConfigError: An address cannot be bound.
    """
    return uvloop.run(_supervise(config, partial(_commands, words, topology, engines)))


def workers_of(config: "ProxyConfig") -> int:
    """Return how many relays there are to be."""
    return config.listening.workers or max(1, len(os.sched_getaffinity(0)) - 1)


async def _supervise(config: "ProxyConfig", commands: Commands) -> int:
    native_library(config)  # The relays load it themselves, and each would only say the same.
    logs = Logs(config, loads=False, process="supervisor")
    workers, listening = workers_of(config), config.listening
    try:
        host, port = listening.host, listening.port
        relays = _listen("--host {} --port {}", host, port, workers)
        admin: list[socket.socket] = []
        if listening.admin:
            host, port = listening.admin_host, listening.admin_port
            (admin,) = _listen("--admin-host {} --admin-port {}", host, port, 1)
        ports = [own[0].getsockname()[1] for own in (relays[0], admin) if own]

        def announce() -> None:
            announce_ports(config, *ports)
            _log.info("serving", extra={"fields": {"relays": workers, "port": ports[0]}})

        supervisor = Supervisor(
            commands,
            relays,
            admin,
            drain_s=config.times.drain_timeout_s,
            hang_up=logs.reopen,
        )
        await supervisor.run(announce)
    except StartError as error:
        if error.status != INPUT_FAULT:  # Else the process has said what is wrong.
            print(f"balanceroute: {error}", file=sys.stderr)  # noqa: T201 - the command's answer.
        return error.status
    finally:
        logs.close()
    return 0


def _listen(place: str, host: str, port: int, copies: int) -> "list[list[socket.socket]]":
    try:
        return listen(host, port, copies=copies)
    except OSError as error:
        raise not_bound(place, host, port, error) from None


def _commands(
    words: Sequence[str], topology: Path | None, engines: Mapping[str, object], path: Path
) -> "Callable[[Part], list[str]]":
    """Return what starts the parts of a generation, whose socket is to be at a path.

    All read the topology as it is now, whenever they start, and whoever cleans its folder meanwhile.
    """
    text, copy = b"", Path(f"{path}.toml")
    if topology is not None:
        text = topology.read_bytes()

    def command(part: "Part") -> list[str]:
        if topology is not None and not copy.exists():
            make_private(copy.parent)
            new = copy.with_suffix(".new")
            new.write_bytes(text)
            new.replace(copy)
        own = "" if topology is None else str(copy)
        word = replace(part, engines=dict(engines), topology=own).word()
        first, *others = words
        return [sys.executable, "-m", "balanceroute.proxy", first, f"--process={word}", *others]

    return command

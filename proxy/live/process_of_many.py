"""One process of several: the scheduler process, or a relay; see `supervise`."""

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from balanceroute.proxy.live.control.standing import KeepingFile
from balanceroute.proxy.live.descriptors import DescriptorWatch
from balanceroute.proxy.live.process_edge import (
    Logs,
    Signals,
    equip,
    make_environment,
    serve_until_told,
    settle_memory,
)
from balanceroute.proxy.live.processes.part import (
    orders_beside,
    supervisor_gone,
    tell_alive,
)
from balanceroute.proxy.live.relay_app import RelayApp
from balanceroute.proxy.live.relay_process import RelayProcess
from balanceroute.proxy.live.renewal import renew
from balanceroute.proxy.live.scheduler_app import SchedulerApp
from balanceroute.proxy.live.scheduler_process import SchedulerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.live.processes.part import Part
    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig

_log = logging.getLogger(__name__)


def serve_part(
    config: "ProxyConfig", read_credentials: "Callable[[], Credentials]", part: "Part"
) -> int:
    """Serve as one process of several until the supervisor ends it; return the exit status.

    Args:
        config: All settings.
        read_credentials: Reads keys, certificates and tenants again. Raises ConfigError.
        part: What this process is.

    Raises:
        ConfigError: The settings cannot be served.
    """
    return uvloop.run(_serve(config, read_credentials, part))


async def _serve(
    config: "ProxyConfig", read_credentials: "Callable[[], Credentials]", part: "Part"
) -> int:
    # But for keys and tenants: one that starts later may read newer files of them.
    settings = config.redacted() | {"credentials": None}
    digest = hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()
    is_scheduler = part.role == "scheduler"
    logs = Logs(config, loads=is_scheduler, process=part.name)
    signals = Signals(logs.reopen)
    signals.ignore_interrupts()

    def relays_gone(gone: list[int]) -> None:
        if isinstance(process, RelayProcess):
            process.stand_in(gone)

    orphan = asyncio.create_task(_end_with_supervisor(signals, relays_gone))
    config, _, pump = equip(_share(config, part.relays), moves=not is_scheduler)

    def processes() -> dict[str, int]:
        return process.processes()

    environment = replace(
        make_environment(logs, lambda: watch.shortages, pump),
        read_credentials=partial(_read_for_all, read_credentials),
        processes=processes,
        orders=KeepingFile(config.discovery.roster_state)
        if config.discovery.roster_state
        else KeepingFile(orders_beside(Path(part.path)), is_temporary=True),
        admin_sockets=[socket.socket(fileno=number) for number in part.listeners * is_scheduler],
    )
    process: SchedulerProcess | RelayProcess
    if is_scheduler:
        scheduler = SchedulerApp(config, environment, relays=part.relays, digest=digest)
        process = SchedulerProcess(scheduler, Path(part.path))
    else:
        relay = RelayApp(config, environment, place=part.relay, digest=digest)
        process = RelayProcess(relay, part.path, part.listeners, part.others)
    watch = DescriptorWatch(process.servers)

    def on_hangup() -> None:
        logs.reopen()
        renew(process, read_credentials)

    try:
        starting = asyncio.create_task(process.start())
        await asyncio.wait((starting, orphan), return_when=asyncio.FIRST_COMPLETED)
        if orphan.done():  # Nobody will be there to be connected to.
            starting.cancel()
            return 0
        starting.result()
        signals.on_hangup(on_hangup)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, process.hand_over)
        settle_memory()
        alive = asyncio.create_task(tell_alive())
        await serve_until_told(process, watch, signals)
        alive.cancel()
    finally:
        orphan.cancel()
        logs.close()
    return 0


def _read_for_all(read_credentials: "Callable[[], Credentials]") -> "Credentials":
    """Read credentials by an administrator's order, which the scheduler process alone gets."""
    credentials = read_credentials()
    os.kill(os.getppid(), signal.SIGHUP)  # Which the supervisor passes on to every process.
    return credentials


async def _end_with_supervisor(
    signals: Signals, relays_gone: "Callable[[list[int]], None]"
) -> None:
    await supervisor_gone(relays_gone)
    _log.error("the supervisor is gone")
    signals.stop.set()
    signals.now.set()


def _share(config: "ProxyConfig", relays: int) -> "ProxyConfig":
    """Return the settings of one of so many relays: its share of what the whole proxy may hold."""

    def share(limit: Any) -> Any:
        return None if limit is None else -(-limit // relays)

    limits = config.limits
    bodies = max(limits.body_limit_bytes, share(limits.body_budget_bytes))
    return replace(
        config,
        limits=replace(
            limits,
            connection_limit=share(limits.connection_limit),
            peer_connection_limit=share(limits.peer_connection_limit),
            body_budget_bytes=bodies,
        ),
    )

"""Running the proxy as one process."""

import asyncio
import logging
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop

from balanceroute.proxy.live.announcement import announce
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
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.live.renewal import renew

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig

_log = logging.getLogger(__name__)


def serve(
    config: "ProxyConfig",
    read_credentials: "Callable[[], Credentials]",
    make_group: "Callable[[Mapping[str, object]], GroupConfig] | None" = None,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    The first signal drains: nothing new is taken, what runs may end. A second one ends it at once.
    SIGHUP opens the logs again, and reads keys, certificates and tenants again.

    Args:
        config: All settings.
        read_credentials: Reads its files of keys, certificates and tenants again. Raises ConfigError.
        make_group: See `Environment`.
    """
    return uvloop.run(_serve(config, read_credentials, make_group))


async def _serve(
    config: "ProxyConfig",
    read_credentials: "Callable[[], Credentials]",
    make_group: "Callable[[Mapping[str, object]], GroupConfig] | None",
) -> int:
    logs = Logs(config, loads=True)
    signals = Signals(logs.reopen)
    config, descriptors, pump = equip(config)
    kept = config.discovery.roster_state
    environment = replace(
        make_environment(logs, lambda: watch.shortages, pump),
        read_credentials=read_credentials,
        make_group=make_group,
        orders=None if kept is None else KeepingFile(kept),
    )
    proxy = Proxy(config, environment)

    def on_hangup() -> None:
        logs.reopen()
        renew(proxy, read_credentials)

    watch = DescriptorWatch(proxy.servers)
    try:
        await proxy.start()
        signals.on_hangup(on_hangup)
        # Which would end it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _stay)
        settle_memory()
        _announce(proxy, descriptors, native=pump is not None)
        await serve_until_told(proxy, watch, signals)
    finally:
        logs.close()
    return 0


def _stay() -> None:
    _log.warning("SIGUSR2 is of no use with one process: --workers of 2 or more take over")


def _announce(proxy: Proxy, descriptors: int, *, native: bool) -> None:
    config = proxy.config
    admin_port = None if proxy.admin is None else proxy.admin.port
    announce(config, proxy.server.port, admin_port)
    instances = [one.instances for one in proxy.deployments.values()]
    _log.info(
        "serving",
        extra={
            "fields": {
                "port": proxy.server.port,
                "prefillers": sum(len(one.prefilling()) for one in instances),
                "ranks": sum(len(one.serving()) for one in instances),
                "policy": config.scheduling.policy,
                "descriptors": descriptors,
                "connection_limit": config.limits.connection_limit,
                "native": native,
            }
        },
    )

"""Running the proxy: what the process does from its start to its end."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import uvloop

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.descriptors import DescriptorWatch
from balanceroute.proxy.live.hand_over import Inherited, Successor, hold_signals, wait_in_place
from balanceroute.proxy.live.process_edge import (
    Logs,
    Signals,
    equip,
    make_environment,
    serve_until_signal,
    settle_memory,
)
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.live.security import Credentials
from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig
from balanceroute.proxy.wire.messages import bracketed

# What a command prints when it serves: one line for scripts, and at a terminal what to try first.

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the other way round.


def announce(config: ProxyConfig, port: int, admin_port: int | None = None) -> None:
    """Print the line that scripts wait for, and at a terminal the commands to try."""
    lines = [announcement(config, port, admin_port)]
    if sys.stdout.isatty():
        lines += greeting(config, port, admin_port)
    print("\n".join(lines), flush=True)  # noqa: T201 - the command's answer.


def announcement(config: ProxyConfig, port: int, admin_port: int | None = None) -> str:
    """Return the line that a command prints when it serves, at these ports."""
    listening = config.listening
    line = f"listening on {_scheme(config)}://{bracketed(listening.host)}:{port}"
    if admin_port is not None:
        line += f", admin on http://{bracketed(listening.admin_host)}:{admin_port}"
    return line


def greeting(config: ProxyConfig, port: int, admin_port: int | None = None) -> list[str]:
    """Return commands to try: a request, whether the fleet is ready, and its engines."""
    listening, credentials = config.listening, config.credentials
    url = f"{_scheme(config)}://{_reached(listening.host)}:{port}"
    key = ' -H "Authorization: Bearer $KEY"'
    asks = key if credentials.api_keys or credentials.tenants else ""
    json = "-H 'Content-Type: application/json'"
    body = """-d '{"prompt": "1 2 3", "max_tokens": 8}'"""
    lines = [
        f"  a request:   curl {url}/v1/completions{asks} {json} {body}",
        f"  ready?       curl -i {url}/ready",
    ]
    if admin_port is not None:
        asks = key.replace("KEY", "TOKEN") if credentials.admin_token else ""
        where = f"http://{_reached(listening.admin_host)}:{admin_port}"
        lines.append(f"  its engines: curl {where}/admin/instances{asks}")
    return lines


def _scheme(config: ProxyConfig) -> str:
    return "http" if config.listening.tls_cert is None else "https"


def _reached(host: str) -> str:
    return bracketed(_ANY_ADDRESS.get(host, host))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The command, as far as the process needs it again."""

    words: Sequence[str]  # The command line, the command first.
    owns_engines: bool  # Whether it has started engines, which end with this process.
    # Reads the files of keys, certificates and tenants again. Raises ConfigError.
    read_credentials: Callable[[], Credentials]
    make_group: Callable[[Mapping[str, object]], GroupConfig] | None = None  # See `Environment`.
    # Settings that were not given, and are as the engines report, by name.
    from_engines: Mapping[str, object] = field(default_factory=dict)


def serve(config: ProxyConfig, command: ServeCommand) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    The first signal drains: the proxy takes nothing new, running requests may end. A second one ends it at once.
    SIGHUP opens the logs again, and reads keys, certificates and tenants again. SIGUSR2 has a new version
    take over; see `hand_over`.
    """
    successor = uvloop.run(_serve(config, command))
    return 0 if successor is None else wait_in_place(successor)


async def _serve(config: ProxyConfig, command: ServeCommand) -> subprocess.Popen[bytes] | None:
    inherited = Inherited(os.environ)
    logs = Logs(config)
    signals = Signals(logs.reopen)
    config, descriptors, pump = equip(config)
    orders = OrderStore(config.discovery.roster_state, inherited.orders)
    environment = replace(
        make_environment(logs, lambda: watch.shortages, pump),
        read_credentials=command.read_credentials,
        make_group=command.make_group,
        orders=orders,
        led=inherited.led,
        public_sockets=inherited.public,
        admin_sockets=inherited.admin,
    )
    proxy = Proxy(config, environment)
    leaving: list[asyncio.Task[None]] = []

    async def leave() -> None:
        await proxy.hand_over()
        signals.stop.set()

    successor = Successor(
        [sys.executable, "-m", "balanceroute.proxy", *command.words],
        public=lambda: proxy.server.listening,
        admin=lambda: [] if proxy.admin is None else proxy.admin.listening,
        stop_orders=proxy.stop_orders,
        orders=orders.content,
        led=proxy.hand_over_state,
        serves=lambda: leaving.append(asyncio.create_task(leave())),
        failed=proxy.take_orders,
    )

    def on_hangup() -> None:
        logs.reopen()
        renew(proxy, command.read_credentials)
        successor.send(signal.SIGHUP)

    watch = DescriptorWatch(proxy.servers)
    try:
        await proxy.start()
        if proxy.admin is None:  # The settings have changed: refuse connections there.
            for one in inherited.admin:
                one.close()
        signals.on_hangup(on_hangup)
        signals.on_signal = successor.send
        _await_successor(proxy, command, successor)
        settle_memory()
        _announce(proxy, command, descriptors, native=pump is not None)
        await proxy.succeed()
        inherited.serves()
        await serve_until_signal(proxy, watch, signals)
        successor.stop()
        if successor.took_over is not None:
            hold_signals()
    finally:
        logs.close()
    return successor.took_over


def renew(proxy: Proxy, read: Callable[[], Credentials]) -> None:
    """Read credentials again, and use them unless one of them is bad; see `Proxy.renew`."""
    try:
        fields = proxy.renew(read)
    except ConfigError as error:
        fields = {"reason": error}
        _log.error("certificates, keys and tenants stay as they are", extra={"fields": fields})
        return
    _log.info("certificates, keys and tenants were read again", extra={"fields": fields})


def _why_alone(proxy: Proxy, command: ServeCommand) -> str | None:
    """Return why no new version can take over from this process; None if one can."""
    if command.owns_engines:
        return "it has started the engines, which end with it"
    if proxy.config.http3.http3:
        return "connections of HTTP/3 stay with the process that has them (--http3)"
    if proxy.config.gateway.pick != "off":
        return "streams of gateways stay with the process that has them (--pick)"
    if proxy.select_service is not None:
        return (
            "reservations of other routers stay with the process that has them (--select-key-file)"
        )
    if proxy.called_back:
        return "decode ranks call the process back that has their requests"
    return None


def _await_successor(proxy: Proxy, command: ServeCommand, successor: Successor) -> None:
    """Have a new version take over at SIGUSR2, if one can."""
    alone = _why_alone(proxy, command)
    take_over = successor.begin if alone is None else partial(_stay, alone)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, take_over)


def _stay(reason: str) -> None:
    _log.warning("no new version can take over", extra={"fields": {"reason": reason}})


def _announce(proxy: Proxy, command: ServeCommand, descriptors: int, *, native: bool) -> None:
    if command.from_engines:
        _log.info("settings are as the engines tell", extra={"fields": dict(command.from_engines)})
    config = proxy.config
    admin_port = None if proxy.admin is None else proxy.admin.port
    announce(config, proxy.server.port, admin_port)
    instances = [one.instances for one in proxy.deployments.values()]
    service = proxy.select_service
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
                **({} if service is None else {"select_port": service.server.port}),
            }
        },
    )

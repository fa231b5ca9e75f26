"""Running the proxy: what the process does from its start to its end."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.standing import KeepingFile, KeptHere
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
from balanceroute.proxy.wire.addresses import bracketed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balanceroute.proxy.live.control.standing import Keeper
    from balanceroute.proxy.live.security import Credentials
    from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig


# What a command prints when it serves: one line for scripts, and at a terminal what to try first.

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the other way round.


def announce(config: "ProxyConfig", port: int, admin_port: int | None = None) -> None:
    """Print the line that scripts wait for, and at a terminal the commands to try."""
    lines = [announcement(config, port, admin_port)]
    if sys.stdout.isatty():
        lines += greeting(config, port, admin_port)
    print("\n".join(lines), flush=True)  # noqa: T201 - the command's answer.


def announcement(config: "ProxyConfig", port: int, admin_port: int | None = None) -> str:
    """Return the line that a command prints when it serves, at these ports."""
    listening = config.listening
    line = f"listening on {_scheme(config)}://{bracketed(listening.host)}:{port}"
    if admin_port is not None:
        line += f", admin on http://{bracketed(listening.admin_host)}:{admin_port}"
    return line


def greeting(config: "ProxyConfig", port: int, admin_port: int | None = None) -> list[str]:
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


def _scheme(config: "ProxyConfig") -> str:
    return "http" if config.listening.tls_cert is None else "https"


def _reached(host: str) -> str:
    return bracketed(_ANY_ADDRESS.get(host, host))


# An update without a lost request: on SIGUSR2 a new version takes the listening sockets.
#
# The process starts the same command again, which reads the program and the settings as they are
# now on the disk. The new process has the listening sockets from the start, and says when it
# serves. Then the old one accepts nothing more, lets its connections end, and after that only
# waits for the new one and passes signals on to it. So whoever started the first process sees one
# process with one number, and its end.
#
# This file is also the program that waits: it is run alone, and so imports nothing of the
# package.

_log = logging.getLogger(__name__)
_GIVEN = "BALANCEROUTE_HAND_OVER"
_READY = b"ready\n"
# So long a new version may take to serve: it may have thousands of engines to ask.
_READY_S = 120.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


class Inherited:
    """What the process has from the one that started it; nothing, if that was no hand-over.

    Args:
        environment: Of the process; what names it is removed, so that nobody else inherits it.

    Attributes:
        public: Listening sockets for clients.
        admin: Those for administrators.
        orders: What was ordered; see `standing`.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self.public: list[socket.socket] = []
        self.admin: list[socket.socket] = []
        self.orders = b""
        self._ready: int | None = None
        given = environment.pop(_GIVEN, None)
        if given is None:
            return
        told = json.loads(given)
        self.public = [socket.socket(fileno=one) for one in told["public"]]
        self.admin = [socket.socket(fileno=one) for one in told["admin"]]
        with open(told["orders"], "rb") as orders:
            self.orders = orders.read()
        self._ready = told["ready"]
        for one in (*told["public"], *told["admin"], told["ready"]):
            os.set_inheritable(one, False)

    def serves(self) -> None:
        """Tell the one that started it that it serves."""
        if self._ready is not None:
            with suppress(OSError):  # It may have died.
                os.write(self._ready, _READY)
            os.close(self._ready)
            self._ready = None


class Successor:
    """The process that takes over, once there is to be one.

    Args:
        command: Its command line.
        public: Returns the descriptors of the listening sockets for clients.
        admin: Returns those for administrators.
        orders: Returns what was ordered.
        serves: Called when it serves.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        public: Callable[[], Sequence[int]],
        admin: Callable[[], Sequence[int]],
        orders: Callable[[], bytes],
        serves: Callable[[], object],
    ) -> None:
        self._command = command
        self._public, self._admin, self._orders, self._serves = public, admin, orders, serves
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: int | None = None
        self._late: asyncio.TimerHandle | None = None

    @property
    def took_over(self) -> "subprocess.Popen[bytes] | None":
        """The process that serves in place of this one; None while none does."""
        return None if self._ready is not None else self._process

    def begin(self) -> None:
        """Start it; if it has taken over already, have it do so itself."""
        if self._ready is not None:
            _log.warning("a new version is starting already")
            return
        if self._process is not None:
            self.send(signal.SIGUSR2)
            return
        public, admin = self._public(), self._admin()
        if not public:
            _log.warning("a new version cannot take over now: nothing is accepted at present")
            return
        self._ready, its_end = os.pipe()
        try:
            self._start(public, admin, its_end)
        except OSError as error:
            self._failed(str(error))
        else:
            self._loop.add_reader(self._ready, self._read)
            self._late = self._loop.call_later(_READY_S, self._kill)
        finally:
            os.close(its_end)

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on to it, if it has taken over."""
        if self.took_over is not None:
            self.took_over.send_signal(number)

    def stop(self) -> None:
        """Kill it if it does not serve yet: the proxy ends."""
        if self._ready is not None:
            self._end()

    def _start(self, public: Sequence[int], admin: Sequence[int], its_end: int) -> None:
        with tempfile.TemporaryFile() as orders:
            orders.write(self._orders())
            orders.seek(0)
            given = {"public": public, "admin": admin, "ready": its_end, "orders": orders.fileno()}
            self._process = subprocess.Popen(  # noqa: S603 - this very command.
                self._command,
                env=os.environ | {_GIVEN: json.dumps(given)},
                pass_fds=[*public, *admin, its_end, orders.fileno()],
                # A terminal's signals would reach it twice: by itself, and passed on.
                process_group=0,
            )

    def _read(self) -> None:
        assert self._ready is not None
        if os.read(self._ready, len(_READY)) == _READY:
            self._over()
            _log.info("a new version serves: this one lets its connections end")
            self._serves()
        else:
            self._failed("it ended before it served")

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def _end(self) -> None:
        self._over()
        if self._process is not None:
            self._process.kill()  # It may have done no more than close its end.
            self._process.wait()
            self._process = None

    def _failed(self, reason: str) -> None:
        self._end()
        fields = {"reason": reason}
        _log.error("the new version does not start: this one stays", extra={"fields": fields})

    def _over(self) -> None:
        if self._late is not None:
            self._late.cancel()
        assert self._ready is not None
        self._loop.remove_reader(self._ready)
        os.close(self._ready)
        self._ready = None


def hold_signals() -> None:
    """Keep the signals of this process for `wait_in_place`, which acts on them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})


def wait_in_place(process: "subprocess.Popen[bytes]") -> int:  # noqa: RET503 - else it is replaced.
    """Become a small process that waits for another one; return that one's exit status if it has ended.

    `hold_signals` before the loop ends, so that none of them ends this process meanwhile.
    """
    status = process.poll()
    if status is not None:
        return status if status >= 0 else 128 - status
    os.execv(  # noqa: S606 - this very file.
        sys.executable, [sys.executable, "-I", "-S", __file__, str(process.pid)]
    )


def _wait(pid: int) -> int:
    """Wait for a child and pass signals on to it; return its exit status."""
    hold_signals()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        number = signal.sigwait({*_PASSED_ON, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(pid, number)  # It is there until it is waited for.


if __name__ == "__main__":
    sys.exit(_wait(int(sys.argv[1])))


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What was called, as far as the process needs it again.

    Attributes:
        words: The command line, the command first.
        owns_engines: Whether it has started engines, which end with this process.
        read_credentials: Reads the files of keys, certificates and tenants again. Raises ConfigError.
        make_group: See `Environment`.
    """

    words: "Sequence[str]"
    owns_engines: bool
    read_credentials: "Callable[[], Credentials]"
    make_group: "Callable[[Mapping[str, object]], GroupConfig] | None" = None


def serve(config: "ProxyConfig", command: ServeCommand) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    The first signal drains: nothing new is taken, what runs may end. A second one ends it at once.
    SIGHUP opens the logs again, and reads keys, certificates and tenants again. SIGUSR2 has a new version
    take over; see `hand_over`.
    """
    successor = uvloop.run(_serve(config, command))
    return 0 if successor is None else wait_in_place(successor)


async def _serve(config: "ProxyConfig", command: ServeCommand) -> "subprocess.Popen[bytes] | None":
    inherited = Inherited(os.environ)
    logs = Logs(config)
    signals = Signals(logs.reopen)
    config, descriptors, pump = equip(config)
    kept = config.discovery.roster_state
    orders: Keeper = KeptHere(inherited.orders) if kept is None else KeepingFile(kept)
    environment = replace(
        make_environment(logs, lambda: watch.shortages, pump),
        read_credentials=command.read_credentials,
        make_group=command.make_group,
        orders=orders,
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
        orders=orders.read,
        serves=lambda: leaving.append(asyncio.create_task(leave())),
    )

    def on_hangup() -> None:
        logs.reopen()
        renew(proxy, command.read_credentials)
        successor.send(signal.SIGHUP)

    watch = DescriptorWatch(proxy.servers)
    try:
        await proxy.start()
        if proxy.admin is None:  # The settings have changed: who connects there is refused.
            for one in inherited.admin:
                one.close()
        signals.on_hangup(on_hangup)
        signals.told = successor.send
        alone = _why_alone(proxy, command)
        take_over = successor.begin if alone is None else partial(_stay, alone)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, take_over)
        settle_memory()
        _announce(proxy, descriptors, native=pump is not None)
        inherited.serves()
        await serve_until_told(proxy, watch, signals)
        successor.stop()
        if successor.took_over is not None:
            hold_signals()
    finally:
        logs.close()
    return successor.took_over


def renew(proxy: Proxy, read: "Callable[[], Credentials]") -> None:
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
    if proxy.called_back:
        return "decode ranks call the process back that has their requests"
    return None


def _stay(reason: str) -> None:
    _log.warning("no new version can take over", extra={"fields": {"reason": reason}})


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

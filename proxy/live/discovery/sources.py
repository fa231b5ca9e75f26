"""The sources that the settings name, and what follows them."""

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.order_store import OrderedState
from balanceroute.proxy.live.control.roster import Roster
from balanceroute.proxy.live.discovery.kubernetes import ACCOUNT, ApiClient, KubernetesSlices
from balanceroute.proxy.live.discovery.reconciler import DiscoverySource, Found, Reconciler, View
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.security import engine_context
from balanceroute.proxy.live.settings.checks import event_address
from balanceroute.proxy.live.settings.declared import DiscoverySettings, EngineSource
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.topologies import TopologyError
from balanceroute.topologies.topology import MAX_FILE_BYTES, read_engine_list

# Engines behind one name, as a headless Service of Kubernetes has: one for each address.

_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name. Raises OSError."""


class DnsName:
    """A name that is resolved again and again.

    A name without addresses says nothing, as an error does: a resolver that lost its zone looks the same as
    a fleet that has ended, and health checks see that.

    Args:
        resolve: By default the loop's `getaddrinfo`.
    """

    def __init__(
        self,
        role: Role,
        host: str,
        port: int,
        *,
        interval_s: float,
        resolve: Resolve | None = None,
    ) -> None:
        self._role, self._host, self._port = role, host, port
        self._interval_s = interval_s
        self._resolve = resolve or _addresses
        self._failing = False

    async def run(self, report: Callable[[View], None]) -> None:
        while True:
            try:
                addresses = await self._resolve(self._host, self._port)
            except (OSError, UnicodeError) as error:
                if not self._failing:
                    fields = {"name": self._host, "reason": str(error)}
                    _log.warning("the name of engines does not resolve", extra={"fields": fields})
                self._failing = True
            else:
                self._failing = False
                report(self._view(addresses))
            await asyncio.sleep(self._interval_s)

    def _view(self, addresses: list[str]) -> View:
        # An engine with addresses of both families must not count twice.
        addresses = [one for one in addresses if ":" not in one] or addresses
        targets = [
            Target(self._role, EngineUrl("http", address, self._port).base) for address in addresses
        ]
        return {target: Found(target) for target in sorted(targets, key=lambda one: one.url)}


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


# Engines in a file that another program writes: `[[prefill]]` and `[[decode]]` as in a topology.


class WatchedFile:
    """A file that is read again and again.

    Args:
        follows: Whether the proxy follows KV cache events of prefillers.
    """

    def __init__(self, path: Path, *, interval_s: float, follows: bool = True) -> None:
        self._path, self._interval_s = path, interval_s
        self._reason = ""
        self._ignores_events = not follows  # Until it is logged.
        self._last: tuple[bytes, View] = b"", {}  # What was read, and its engines.

    async def run(self, report: Callable[[View], None]) -> None:
        while True:
            try:
                view = self._read()
            except (OSError, TopologyError, ConfigError) as error:
                self._log_once(str(error))
            else:
                self._log_once("")
                self._log_ignored_events(view)
                report(view)
            await asyncio.sleep(self._interval_s)

    def _read(self) -> View:
        """Return the engines; the same object while the file has the same bytes."""
        with self._path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        # To read thousands of engines takes a part of a second.
        if data != self._last[0]:
            self._last = data, read_view(self._path)
        return self._last[1]

    def _log_once(self, reason: str) -> None:
        if reason and reason != self._reason:
            fields = {"file": str(self._path), "reason": reason}
            _log.warning("the file of engines cannot be read", extra={"fields": fields})
        self._reason = reason

    def _log_ignored_events(self, view: View) -> None:
        if self._ignores_events and any(found.kv_events for found in view.values()):
            self._ignores_events = False
            needed = "needs --prefill-choice prefix-aware and --kv-events-port"
            fields = {"file": str(self._path), "reason": needed}
            _log.warning(
                "kv_events of the file of engines is not followed", extra={"fields": fields}
            )


def read_view(path: Path) -> View:
    """Return the engines of a file.

    Raises:
        OSError: It cannot be read.
        TopologyError: It is no list of engines.
        ConfigError: An address is none.
    """
    prefill, decode = read_engine_list(path)
    found = [
        Found(
            _target(path, Role.PREFILL, one.url),
            bootstrap=one.bootstrap,
            kv_events=_event_address(path, one.kv_events),
            kv_replay=_event_address(path, one.kv_replay),
        )
        for one in prefill
    ]
    for entry in prefill:
        if entry.kv_replay and not entry.kv_events:
            raise ConfigError(f"{path}: prefill url {entry.url}: kv_replay needs kv_events too")
    for one in decode:
        ids = one.rank_ids or (0,)
        if ids != tuple(range(len(ids))):
            raise ConfigError(f"{path}: decode url {one.url}: write ranks = N, not rank_ids")
        ranks = None if one.discover else len(ids)
        found.append(Found(_target(path, Role.DECODE, one.url), ranks))
    return {one.target: one for one in found}


def _event_address(path: Path, word: str | None) -> str | None:
    try:
        return None if word is None else event_address(word)
    except ConfigError as error:
        raise ConfigError(f"{path}: an address of KV cache events {error}") from None


def _target(path: Path, role: Role, word: str) -> Target:
    try:
        url = EngineUrl.parse(word)
    except ConfigError as error:
        raise ConfigError(f"{path}: {role.value} url {error}") from None
    if url.rank is not None:
        raise ConfigError(f"{path}: {role.value} url is {url.name!r}: write ranks = N")
    return Target(role, url.base)


def make_reconciler(
    settings: DiscoverySettings,
    roster: Roster,
    ordered: OrderedState,
    *,
    rng: random.Random,
    ask: Callable[[Found], Awaitable[int | None]],
) -> Reconciler:
    present = roster.targets()
    return Reconciler(
        roster,
        make_sources(settings, rng, follows=roster.instances.engine_blocks is not None),
        ask=ask,
        hold_s=settings.discover_hold_s,
        limit=settings.discover_limit,
        clock=asyncio.get_running_loop().time,
        owned=set(ordered.discovered).intersection(present),
        leaving=set(ordered.leaving).intersection(present),
    )


def make_sources(
    settings: DiscoverySettings, rng: random.Random, *, follows: bool
) -> list[DiscoverySource]:
    return [_make(one, settings, rng, follows=follows) for one in settings.discover]


def _make(
    source: EngineSource, settings: DiscoverySettings, rng: random.Random, *, follows: bool
) -> DiscoverySource:
    if source.kind == "file":
        interval_s = settings.discover_interval_s
        return WatchedFile(Path(source.place), interval_s=interval_s, follows=follows)
    if source.kind == "dns":
        assert source.role is not None
        url = EngineUrl.parse(f"http://{source.place}")
        return DnsName(source.role, url.host, url.port, interval_s=settings.discover_interval_s)
    selector, _, namespace = source.place.partition("@")
    return KubernetesSlices(
        selector, namespace or None, source.role, api=api_client(settings), rng=rng
    )


def api_client(settings: DiscoverySettings) -> ApiClient:
    account = settings.kubernetes_account or ACCOUNT

    def connect() -> Endpoint:
        url = EngineUrl.parse(settings.kubernetes_api)
        tls = None
        if url.scheme == "https":
            tls = engine_context(account / "ca.crt", insecure=False)
        return Endpoint(url.host, url.port, ssl=tls)

    return ApiClient(connect, account)

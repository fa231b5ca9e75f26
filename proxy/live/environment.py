"""Clocks, files, sockets and callbacks of the proxy: everything that is not the event loop's.

So the same proxy runs on real sockets and in virtual time.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from balanceroute.proxy.core.events import Observer
from balanceroute.proxy.core.policies import Policy
from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.prediction import InThread
from balanceroute.proxy.live.security import Credentials, engine_context
from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig
from balanceroute.proxy.live.telemetry.record import Log
from balanceroute.proxy.wire.http1.client import Addresses, Endpoint, ResponseRoom
from balanceroute.proxy.wire.http1.pump import Pump

if TYPE_CHECKING:
    from ssl import SSLContext

    from balanceroute.proxy.live.engines.kv_feed import Subscribe

PAGES_BYTES = 64 << 20
"""Metrics and other pages of engines that are being read at a time: sixteen of the greatest."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything outside the proxy and its event loop that it uses."""

    log: Log
    rng: random.Random  # Of every random choice.
    unix_s: Callable[[], float]  # Wall-clock time, for logs alone.
    stopwatch: Callable[[], float]  # Seconds of real time, for the cost of decisions.
    # Seconds since the machine started. They go on while it is suspended, as leases do.
    uptime_s: Callable[[], float]
    log_lines_dropped: Callable[[], int] = lambda: 0  # Lines the logs had to drop.
    descriptor_shortages: Callable[[], int] = lambda: 0  # How often no file descriptor was left.
    # Takes a line per sample of the ranks' loads; None for no samples.
    write_loads: Callable[[bytes], object] | None = None
    in_thread: InThread = asyncio.to_thread  # Runs what may wait for a disk.
    # Called with every event of a scheduler and its actions, if there is one.
    observer: Observer | None = None
    # Of several groups, by name, in place of `observer`.
    group_observers: Mapping[str, Observer] = field(default_factory=dict)
    # Returns what decides in place of a policy that was made.
    policy: Callable[[Policy], Policy] = lambda policy: policy
    # Reads the files of keys, certificates and tenants again. Raises ConfigError. None where there
    # are none.
    read_credentials: Callable[[], Credentials] | None = None
    # Returns the settings of a group that is to be added. Raises ConfigError. None where there are
    # no groups.
    make_group: Callable[[Mapping[str, object]], GroupConfig] | None = None
    # Keeps orders and found engines for the process that is started next; None to forget them.
    orders: OrderStore | None = None
    group: str = ""  # Of one of several groups, its name.
    # Takes the KV cache events of prefillers; None for over ZeroMQ.
    subscribe: "Subscribe | None" = None
    # Listen for clients already; none to listen at the address of the settings.
    public_sockets: Sequence[socket.socket] = ()
    admin_sockets: Sequence[socket.socket] = ()  # Listen for administrators likewise.
    # Moves the ordinary events of streams; None without one, as in virtual time, which has no
    # descriptors.
    pump: Pump | None = None
    # Returns why nothing may be given to an engine now, as another process leads; empty if it may. None if
    # this process is alone.
    forbids: Callable[[], str] | None = None
    # What the process that this one takes over from has said of the leadership; None if nothing.
    led: Mapping[str, object] | None = None
    # Bounds the pages of engines that are being read, of all groups together.
    pages: ResponseRoom = field(default_factory=lambda: ResponseRoom(PAGES_BYTES))

    def of_group(self, name: str) -> "Environment":
        """Return that of one of several groups: its observer, and its part of the orders."""
        return replace(self, group=name, observer=self.group_observers.get(name))


class EngineConnections:
    """Called with an address, it returns the connections to it."""

    def __init__(self, config: ProxyConfig, uptime_s: Callable[[], float] | None = None) -> None:
        self._config = config
        self._uptime_s = uptime_s
        self._tls: SSLContext | None = None
        # Probes and requests go to the same addresses, also while the name does not resolve.
        self._addresses: WeakValueDictionary[tuple[str, int], Addresses] = WeakValueDictionary()

    def __call__(self, url: EngineUrl) -> Endpoint:
        engines, times = self._config.engines, self._config.times
        is_https = url.scheme == "https"
        if is_https and self._tls is None:
            self._tls = engine_context(engines.engine_ca_file, insecure=engines.insecure_engines)
        addresses = self._addresses.get((url.host, url.port))
        if addresses is None:
            addresses = Addresses(url.host, url.port, asyncio.get_running_loop())
            self._addresses[url.host, url.port] = addresses
        return Endpoint(
            url.host,
            url.port,
            addresses=addresses,
            ssl=self._tls if is_https else None,
            connect_timeout_s=times.connect_timeout_s,
            tcp_timeout_s=times.tcp_timeout_s,
            expiry_clock=self._uptime_s,
        )

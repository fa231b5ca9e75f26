"""Connections to engines, as the settings have them."""

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from balanceroute.proxy.live.security import engine_context
from balanceroute.proxy.wire.addresses import Addresses
from balanceroute.proxy.wire.http1.client import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from ssl import SSLContext

    from balanceroute.proxy.live.engines.engine_url import EngineUrl
    from balanceroute.proxy.live.settings.config import ProxyConfig


class EngineConnections:
    """Called with an address, it returns the connections to it.

    Args:
        uptime_s: What leases are measured by; see `Environment`. None where there are none.
    """

    def __init__(
        self, config: "ProxyConfig", uptime_s: "Callable[[], float] | None" = None
    ) -> None:
        self._config = config
        self._uptime_s = uptime_s
        self._tls: SSLContext | None = None
        # Probes and requests go to the same addresses, also while the name does not resolve.
        self._addresses: WeakValueDictionary[tuple[str, int], Addresses] = WeakValueDictionary()

    def __call__(self, url: "EngineUrl") -> Endpoint:
        """Return an endpoint that has no connection yet."""
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

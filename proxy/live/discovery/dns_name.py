"""Engines behind one name, as a headless Service of Kubernetes has: one for each address."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.live.discovery.found import Found
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.discovery.found import View

_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name. Raises OSError."""


class DnsName:
    """A name that is resolved again and again.

    A name without addresses tells nothing, as an error does: a resolver that lost its zone cannot be
    told from a fleet that has ended, and of that health checks know.

    Args:
        role: What the engines do.
        host: The name.
        port: Where they listen.
        interval_s: Between two look-ups.
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

    async def run(self, tell: "Callable[[View], None]") -> None:
        """Tell the engines after each look-up."""
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
                tell(self._view(addresses))
            await asyncio.sleep(self._interval_s)

    def _view(self, addresses: list[str]) -> "View":
        # An engine with addresses of both families must not count twice.
        addresses = [one for one in addresses if ":" not in one] or addresses
        targets = [
            Target(self._role, EngineUrl("http", address, self._port).base) for address in addresses
        ]
        return {target: Found(target) for target in sorted(targets, key=lambda one: one.url)}


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]

"""What the admin pages may do with the proxy."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.control.state import instance_rows

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.instances import Role
    from balanceroute.proxy.live.proxy import Proxy
    from balanceroute.proxy.live.telemetry.snapshot import Snapshot


class ProxyControl:
    """See `Control`."""

    def __init__(self, proxy: "Proxy") -> None:
        self._proxy = proxy

    def snapshot(self, requests: bool) -> "Snapshot":
        """Return the state, with each live request if asked."""
        return self._proxy.snapshot(requests=requests)

    def ready(self) -> bool:
        """Tell whether a request would be taken now."""
        return self._proxy.ready

    async def add(self, role: "Role", url: str, ranks: int | None, bootstrap: str | None) -> None:
        """Add an instance."""
        await self._proxy.roster.add(role, url, ranks=ranks, bootstrap=bootstrap)

    def drain(self, role: "Role", url: str) -> None:
        """Send nothing new to an instance."""
        self._proxy.roster.drain(role, url)

    def remove(self, role: "Role", url: str, force: bool) -> None:
        """Forget an instance."""
        self._proxy.roster.remove(role, url, force=force)

    def instances(self) -> list[dict[str, object]]:
        """Return every instance, with what is in flight on it."""
        return instance_rows(self._proxy.roster, self._proxy.quarantines())

    def set_policy(self, name: str) -> None:
        """Decide by another policy from now on."""
        self._proxy.set_policy(name)

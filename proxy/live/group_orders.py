"""Groups that are added, drained and removed while the proxy serves."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.live.control.orders import ConflictError
from balanceroute.proxy.live.control.standing import named

if TYPE_CHECKING:
    from balanceroute.proxy.live.deployment import Deployment
    from balanceroute.proxy.live.kept_groups import KeptGroups
    from balanceroute.proxy.live.settings.config import GroupConfig


class GroupOrders:
    """Takes the orders about groups.

    Args:
        deployments: Those of the proxy, by name.
        make: Returns a group's settings, given what its `[[model]]` table would have. Raises ConfigError.
        begin: Starts a group and serves it from now on.
        end: Serves a group no more, and closes it.
        kept: Keeps what was ordered.
    """

    def __init__(
        self,
        deployments: "Mapping[str, Deployment]",
        *,
        make: "Callable[[Mapping[str, object]], GroupConfig]",
        begin: "Callable[[GroupConfig], Awaitable[None]]",
        end: Callable[[str], Awaitable[None]],
        kept: "KeptGroups",
    ) -> None:
        self._deployments = deployments
        self._make, self._begin, self._end, self._kept = make, begin, end, kept

    def rows(self) -> list[dict[str, object]]:
        """Return each group: its names, whether it takes requests, and how many it has."""
        return [
            {
                "group": name,
                "model": list(one.config.engines.model) or [name],
                "ready": one.driver.ready,
                "engines": len(one.roster.targets()),
                "in_flight": self._in_flight(one),
            }
            for name, one in self._deployments.items()
        ]

    async def add(self, table: Mapping[str, object]) -> None:
        """Add a group; `table` is what its `[[model]]` table would have.

        Raises:
            ConfigError: It cannot be served.
            ConflictError: Another group has the name, a served name or an engine.
        """
        group = self._make(table)
        for name, one in self._deployments.items():
            names = {name, *one.config.engines.model}
            taken = names.intersection((group.name, *group.models))
            if taken:
                raise ConflictError(f"{min(taken)!r} is served by the group {name!r}")
            urls = {target.url for target in one.roster.targets()}
            own = {server.url.base for server in group.config.prefillers}
            own |= {server.url.base for server in group.config.decoders}
            for url in own & urls:
                raise ConflictError(f"{url} is an engine of the group {name!r}")
        await self._begin(group)
        self._kept.add(group.name, table)

    def drain(self, group: str) -> None:
        """Send nothing new to any engine of a group. Raises UnknownInstanceError: it is not there."""
        roster = self._deployments[named(self._deployments, group)].roster
        for target in roster.targets():
            roster.drain(target.role, target.url)

    async def remove(self, group: str, *, force: bool) -> None:
        """Forget a group and its engines.

        Raises:
            UnknownInstanceError: It is not there.
            ConflictError: It is the last one, or has requests, and `force` does not say to end them.
        """
        found = self._deployments[named(self._deployments, group)]
        if len(self._deployments) == 1:
            raise ConflictError(f"{group!r} is the last group: end the proxy instead")
        count = self._in_flight(found)
        if count and not force:
            raise ConflictError(f"{count} requests are in flight in {group!r}: drain it first")
        await self._end(group)
        self._kept.remove(group)

    def _in_flight(self, deployment: "Deployment") -> int:
        return len(deployment.driver.sessions) + deployment.pass_through.in_flight

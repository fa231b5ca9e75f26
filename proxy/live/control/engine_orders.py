"""Orders about engines, where there may be several groups of them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.errors import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.roster import Roster


class EngineOrders:
    """Passes each order on to the group that it is about; see `Roster`.

    Args:
        rosters: Returns those of the groups by name, and that of a proxy without groups by "".
    """

    def __init__(self, rosters: "Callable[[], Mapping[str, Roster]]") -> None:
        self._rosters = rosters

    async def add(
        self,
        role: Role,
        url: str,
        *,
        ranks: int | None,
        bootstrap: str | None,
        group: str | None = None,
        kv_events: str | None = None,
        kv_replay: str | None = None,
    ) -> None:
        """Add an instance to a group; None without groups, or to take a draining one back.

        Raises:
            ConfigError: The order cannot be carried out, names no group where there are some, or names KV
                cache events that nobody would follow.
            ConflictError: It is there already, perhaps in another group.
            UnknownInstanceError: There is no such group.
        """
        rosters, base = self._rosters(), EngineUrl.parse(url).base
        both = [Target(either, base) for either in Role]
        owners = [name for name, one in rosters.items() if any(map(one.instances.has, both))]
        name = owners[0] if group is None and owners else group
        name = named(rosters, name)
        if any(one != name for one in owners):
            raise ConflictError(f"{base} is an engine of the group {owners[0]!r}")
        roster = rosters[name]
        if kv_events is not None and role is not Role.PREFILL:
            raise ConfigError("kv_events: only prefillers tell what they have cached")
        if kv_events is not None and roster.instances.engine_blocks is None:
            raise ConfigError(
                "kv_events: none are followed: start the proxy with --kv-events or --kv-events-port"
            )
        await roster.add(
            role, url, ranks=ranks, bootstrap=bootstrap, kv_events=kv_events, kv_replay=kv_replay
        )

    def drain(self, role: Role, url: str, *, deadline_s: float | None = None) -> None:
        """Send nothing new to an instance; see `Roster.drain`."""
        self._having(role, url).drain(role, url, deadline_s=deadline_s)

    def move_away(self, role: Role, url: str) -> None:
        """Have requests on an instance go on elsewhere in its group; see `Roster.move_away`."""
        self._having(role, url).move_away(role, url)

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        """Forget an instance; see `Roster.remove`."""
        self._having(role, url).remove(role, url, force=force)

    def _having(self, role: Role, url: str) -> "Roster":
        """Return the roster that has an instance, or one that says that it has not."""
        rosters = list(self._rosters().values())
        target = Target(role, EngineUrl.parse(url).base)
        return next((one for one in rosters if one.instances.has(target)), rosters[0])


def named(groups: Mapping[str, object], group: str | None) -> str:
    """Return the name of a group that an order is about; None stands for the only one.

    Raises:
        ConfigError: There are groups, and none is named.
        UnknownInstanceError: There is no such group.
    """
    if group is None and "" not in groups:
        raise ConfigError(f"group is missing, one of {', '.join(groups)}")
    name = group or ""
    if name not in groups:
        raise UnknownInstanceError(f"there is no group {name!r}")
    return name

"""What was ordered and found of one deployment, kept for the process that is started next."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import decode, encode

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.standing import (
    Keeper,
    KeepingPart,
    StandingOrders,
    basis_of,
    load,
    save,
)
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Status
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.live.telemetry.process_log import log_level

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission import Budget
    from balanceroute.proxy.live.control.roster import Roster
    from balanceroute.proxy.live.discovery.reconciler import Reconciler
    from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig


# Between two looks at the limit on requests in flight, which moves every 5 s at most.
_LIMIT_S = 1.0


class KeptOrders:
    """Loads and keeps it.

    Args:
        keeper: Outlives the process; None to keep nothing.
        config: The settings.
    """

    def __init__(self, keeper: Keeper | None, config: "ProxyConfig") -> None:
        self._keeper = keeper
        self._config = config

    def load(self) -> StandingOrders:
        """Return what was kept, or else what the settings say."""
        config = self._config
        named = (config.scheduling.policy, config.prefillers, config.decoders)
        return load(self._keeper, StandingOrders(*named, basis=self._basis))

    def keep(
        self,
        policy: str,
        roster: "Roster",
        found: "Reconciler | None",
        budget: "Budget | None",
        *,
        paused: bool,
    ) -> None:
        """Keep how it stands now.

        Args:
            policy: The policy's name.
            roster: The engines.
            found: What registers engines; None if nothing does.
            budget: The limit on requests in flight; None for none.
            paused: Whether no prefill may start.
        """
        if self._keeper is None:
            return
        servers = roster.servers.values()
        instances: list[Prefiller | Rank] = [*roster.instances.prefillers, *roster.instances.ranks]
        standing = StandingOrders(
            policy,
            tuple(one for one in servers if isinstance(one, PrefillServer)),
            tuple(one for one in servers if isinstance(one, DecodeServer)),
            tuple({one.target for one in instances if one.status is Status.DRAINING}),
            () if found is None else tuple(found.owned),
            () if found is None else tuple(found.leaving),
            self._basis,
            log_level(other_than=self._config.log.log_level),
            None if budget is None else budget.cap,
            paused,
            roster.deadlines.standing(),
        )
        save(self._keeper, standing)

    def hand_over(self) -> None:
        """Keep nothing any more: it is another process's."""
        self._keeper = None

    async def follow(self, budget: "Budget", ordered: Callable[[], None]) -> None:
        """Call `ordered` whenever the limit on requests in flight has moved."""
        kept = budget.cap
        while True:
            await asyncio.sleep(_LIMIT_S)
            if budget.cap != kept:
                kept = budget.cap
                ordered()

    @property
    def _basis(self) -> str:
        """The name of the settings that orders and findings change."""
        config = self._config
        return basis_of(
            config.scheduling.policy, config.prefillers, config.decoders, config.discovery.discover
        )


# Which groups were added to those of the settings, and which were removed, kept over a restart.

# Beside the parts of the groups: no group can have this name.
_PLACE = "[[model]]"
_log = logging.getLogger(__name__)


class _Kept(Struct, frozen=True):
    """What was ordered.

    Attributes:
        basis: Names the groups of the settings that it was ordered for.
        added: What the `[[model]]` tables of the groups that were added would have.
        removed: The groups of the settings that were removed.
    """

    basis: str
    added: tuple[dict[str, Any], ...] = ()
    removed: tuple[str, ...] = ()


class KeptGroups:
    """Loads and keeps it.

    Args:
        keeper: Outlives the process; None to keep nothing.
        groups: Those of the settings.
        make: Returns a group's settings, given what its table would have. Raises ConfigError.
    """

    def __init__(
        self,
        keeper: Keeper | None,
        groups: "tuple[GroupConfig, ...]",
        make: "Callable[[Mapping[str, object]], GroupConfig]",
    ) -> None:
        self._whole = keeper
        self._keeper = None if keeper is None else KeepingPart(keeper, _PLACE)
        self._groups = groups
        self._make = make
        self._basis = basis_of(*((one.name, one.models) for one in groups))
        self._added: dict[str, dict[str, Any]] = {}
        self._removed: set[str] = set()

    def load(self) -> "tuple[GroupConfig, ...]":
        """Return the groups as they stood last, else those of the settings."""
        kept = self._read()
        if kept.basis != self._basis:
            _log.warning("orders about groups are dropped: the settings have other groups by now")
            return self._groups
        groups = [one for one in self._groups if one.name not in kept.removed]
        for table in kept.added:
            try:
                groups.append(self._make(table))
            except ConfigError as error:
                fields = {"group": table.get("name"), "reason": str(error)}
                _log.error("a group that was added is lost", extra={"fields": fields})
            else:
                self._added[groups[-1].name] = table
        if not groups:
            _log.error("orders about groups are lost: no group is left")
            return self._groups
        self._removed.update(kept.removed)
        return tuple(groups)

    def add(self, name: str, table: Mapping[str, object]) -> None:
        """Keep that a group was added."""
        self._added[name] = dict(table)
        self._keep()

    def remove(self, name: str) -> None:
        """Keep that a group was removed, and nothing that was ordered about its engines."""
        if self._added.pop(name, None) is None:
            self._removed.add(name)
        self._keep(forgotten=name)

    def _read(self) -> _Kept:
        nothing = _Kept(self._basis)
        try:
            data = b"" if self._keeper is None else self._keeper.read()
            return decode(data, type=_Kept) if data else nothing
        except (OSError, ValueError) as error:
            _log.error("orders about groups are lost", extra={"fields": {"reason": str(error)}})
            return nothing

    def _keep(self, forgotten: str = "") -> None:
        """Keep how it stands now, and nothing of the engines of one that is gone."""
        if self._whole is None or self._keeper is None:
            return
        kept = _Kept(self._basis, tuple(self._added.values()), tuple(sorted(self._removed)))
        try:
            self._keeper.write(encode(kept))
            if forgotten:
                KeepingPart(self._whole, forgotten).forget()
        except (OSError, ValueError) as error:
            fields = {"reason": str(error)}
            _log.error("orders about groups are not kept", extra={"fields": fields})

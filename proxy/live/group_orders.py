"""Groups that are added, drained and removed while the proxy serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from msgspec import Struct
from msgspec.json import decode

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.order_store import OrderStore, basis_of
from balanceroute.proxy.live.control.orders import (
    ConflictError,
    OrderRefusal,
    force_of,
    read_order,
    text_of,
)
from balanceroute.proxy.live.control.pages import Routes, answering, begin, send_json, where
from balanceroute.proxy.live.control.roster import named
from balanceroute.proxy.live.deployment import Deployment
from balanceroute.proxy.live.settings.config import GroupConfig
from balanceroute.proxy.wire.messages import HttpRequest, Reply

_log = logging.getLogger(__name__)

# Which groups were added to those of the settings, and which were removed, kept over a restart.

# Beside the parts of the groups: no group can have this name.
_PLACE = "[[model]]"


class _GroupChanges(Struct, frozen=True):
    """The groups that orders have added and removed."""

    basis: str  # Names the groups of the settings that it was ordered for.
    # What the `[[model]]` tables of the groups that were added would have.
    added: tuple[dict[str, Any], ...] = ()
    removed: tuple[str, ...] = ()  # The groups of the settings that were removed.


class GroupsInForce:
    """The groups of the settings, and what orders have made of them.

    Args:
        store: Keeps it; None to keep nothing.
        make: Returns a group's settings, given what its table would have. Raises ConfigError.
    """

    def __init__(
        self,
        store: OrderStore | None,
        groups: tuple[GroupConfig, ...],
        make: Callable[[Mapping[str, object]], GroupConfig],
    ) -> None:
        self._store = store
        self._groups = groups
        self.make = make
        self._basis = basis_of(*((one.name, one.models) for one in groups))
        self._added: dict[str, dict[str, Any]] = {}
        self._removed: set[str] = set()

    def load(self) -> tuple[GroupConfig, ...]:
        """Return the groups as they stood last, else those of the settings."""
        kept = self._read()
        if kept.basis != self._basis:
            _log.warning("orders about groups are dropped: the settings have other groups by now")
            return self._groups
        groups = [one for one in self._groups if one.name not in kept.removed]
        for table in kept.added:
            try:
                groups.append(self.make(table))
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
        self._added[name] = dict(table)
        self._keep()

    def remove(self, name: str) -> None:
        """Keep that a group was removed, and nothing that was ordered about its engines."""
        if self._added.pop(name, None) is None:
            self._removed.add(name)
        self._keep(forgotten=name)

    def _read(self) -> _GroupChanges:
        nothing = _GroupChanges(self._basis)
        try:
            data = b"" if self._store is None else self._store.load(_PLACE)
            return decode(data, type=_GroupChanges) if data else nothing
        except (OSError, ValueError) as error:
            _log.error("orders about groups are lost", extra={"fields": {"reason": str(error)}})
            return nothing

    def _keep(self, forgotten: str = "") -> None:
        """Keep how it stands now, and nothing of the engines of one that is gone."""
        if self._store is not None:
            what = "orders about groups"
            self._store.changed(_PLACE, self._changes, forgotten=forgotten, what=what)

    def _changes(self) -> _GroupChanges:
        return _GroupChanges(self._basis, tuple(self._added.values()), tuple(sorted(self._removed)))


class GroupOrders:
    """Takes the orders about groups.

    Args:
        begin: Starts a group and serves it from now on.
        end: Serves a group no more, and closes it.
    """

    def __init__(
        self,
        deployments: Mapping[str, Deployment],
        begin: Callable[[GroupConfig], Awaitable[None]],
        end: Callable[[str], Awaitable[None]],
        in_force: GroupsInForce,
    ) -> None:
        self._deployments = deployments
        self._begin, self._end, self._in_force = begin, end, in_force

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
        group = self._in_force.make(table)
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
        self._in_force.add(group.name, table)

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
        self._in_force.remove(group)

    def _in_flight(self, deployment: Deployment) -> int:
        return len(deployment.driver.sessions) + deployment.pass_through.in_flight


# The pages of the admin listener about groups, where there are several.

_KEYS = frozenset({"model", "connector", "prefill", "decode", "proxy"})


class GroupPages:
    """Serves them."""

    def __init__(self, groups: GroupOrders, tasks: set[asyncio.Task[None]]) -> None:
        self._groups = groups
        self._tasks = tasks
        self._busy = False
        self.routes: Routes = {
            b"/admin/groups": {b"GET": self._rows, b"POST": self._add},
            b"/admin/groups/drain": {b"POST": self._drain},
            b"/admin/groups/remove": {b"POST": self._remove},
        }

    def _rows(self, _request: HttpRequest, reply: Reply) -> None:
        send_json(reply, 200, {"groups": self._groups.rows()})

    def _add(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"name"}, optional=_KEYS)
        self._carry_out(request, reply, order, lambda: self._groups.add(order), "added")

    def _drain(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"group"})
        self._groups.drain(text_of(order, "group"))
        _log.info("admin: drains a group", extra=where(request, order))
        self._rows(request, reply)

    def _remove(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"group"}, optional={"force"})
        group, force = text_of(order, "group"), force_of(order)
        self._carry_out(
            request, reply, order, lambda: self._groups.remove(group, force=force), "removed"
        )

    def _carry_out(
        self,
        request: HttpRequest,
        reply: Reply,
        order: dict[str, object],
        do: Callable[[], Coroutine[None, None, None]],
        word: str,
    ) -> None:
        """Carry out one order at a time: two that begin together might add the same."""
        if self._busy:
            raise OrderRefusal(429, "another order about groups is being carried out")
        self._busy = True

        async def carry_out() -> None:
            with answering(reply):
                try:
                    await do()
                finally:
                    self._busy = False
                _log.info("admin: %s a group", word, extra=where(request, order))
                self._rows(request, reply)

        begin(self._tasks, carry_out())

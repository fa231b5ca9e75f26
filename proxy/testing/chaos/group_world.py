"""A proxy before several groups of engines in one virtual-time loop."""

import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.control.standing import Keeper
from balanceroute.proxy.live.settings.configure import make_config, make_group, read_credentials
from balanceroute.proxy.testing.chaos.scheduler_watch import SchedulerWatch, Step
from balanceroute.proxy.testing.chaos.world import EPOCH_S, Part, World, WorldSettings
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.wire.messages import Response
from balanceroute.topologies import read_topology

if TYPE_CHECKING:
    from balanceroute.proxy.live.deployment import Deployment


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One group.

    Attributes:
        engines: Its fleet.
        table: More lines of its `[[model]]` table, before its engines.
        proxy: Lines of its `[model.proxy]` table.
    """

    engines: EmulationSettings
    table: str = ""
    proxy: str = ""


class GroupWorld(World):
    """One proxy before several fleets, made from a topology file.

    Attributes:
        fleets: By the group's name; `fleet` is the first.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupSettings],
        loop: VirtualLoop,
        rng: random.Random,
        *,
        flags: Mapping[str, object],
        more: str = "",
        tenants: str = "",
        files: Mapping[str, bytes] = MappingProxyType({}),
        orders: Keeper | None = None,
        watch: Callable[[Step], None] = lambda _: None,
    ) -> None:
        """Take the groups by name.

        `more` are further tables of the file, `files` lie beside it; `orders` outlives the proxy.
        """
        first = next(iter(groups.values()))
        super().__init__(WorldSettings(first.engines, flags, tenants), loop, rng, watch=watch)
        self._groups = groups
        self._more = more
        self._files = files
        self._orders = orders
        self.fleets = {
            name: EmulatedFleet(
                one.engines, rng=random.Random(rng.getrandbits(64)), epoch_s=EPOCH_S
            )
            for name, one in groups.items()
        }
        self.fleet = next(iter(self.fleets.values()))
        self.deployments_made = len(groups)
        self._latest: dict[str, Deployment] = {}
        self._observers = {
            name: SchedulerWatch(partial(self._scheduler_of, name), watch, group=name)
            for name in groups
        }

    @property
    def parts(self) -> Sequence[Part]:
        """Each group with its engines."""
        return [
            Part(name, fleet, self._observers[name], lambda: self.plane.deployments)
            for name, fleet in self.fleets.items()
        ]

    def _scheduler_of(self, name: str) -> Scheduler:
        # While a group is removed or added it is not there, and its requests end.
        self._latest |= self.plane.deployments
        return self._latest[name].driver.scheduler

    async def start(self, front: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the engines, unless they run, and the proxy; see `World.start`."""
        self._front = front
        await self.start_engines()
        flags = {
            "host": "127.0.0.1",
            "port": 0,
            "admin": False,
            "log": "none",
            "tenants": self._write_tenants(self._settings.tenants),
            **self._settings.flags,
        }
        path = self._folder / "groups.toml"
        path.write_text(self.topology())
        for name, data in self._files.items():
            path.with_name(name).write_bytes(data)
        topology = read_topology(path)
        environment = self._make_environment(partial(read_credentials, topology, flags))
        make = partial(make_group, topology, flags)
        environment = replace(
            environment,
            make_group=make,
            orders=self._orders,
            group_observers=self._observers,
        )
        await self._begin(make_config(topology, flags), environment)
        self._latest |= self.plane.deployments

    def topology(self) -> str:
        """Return the file."""
        lines = ['name = "groups"']
        for name, group in self._groups.items():
            fleet = self.fleets[name]
            lines += ["[[model]]", f'name = "{name}"', group.table]
            lines.append(f'connector = "{group.engines.connector}"')
            for place, url in enumerate(fleet.prefill_urls):
                lines += ["[[model.prefill]]", f'url = "{self.known(url)}"']
                if fleet.bootstrap_urls:
                    lines.append(f'bootstrap = "{fleet.bootstrap_urls[place]}"')
            for url in fleet.decode_urls:
                base, _, rank = url.partition("@")
                lines += ["[[model.decode]]", f'url = "{self.known(base)}"']
                if rank:
                    lines.append(f"rank_ids = [{rank}]")
            if group.proxy:
                lines += ["[model.proxy]", group.proxy]
        return "\n".join([*lines, self._more, ""])

    def engine_name(self, url: str) -> str:
        """Return what an engine is called: its group and its own name, as in `large:decode/0`."""
        return next(
            f"{name}:{engine.name}"
            for name, fleet in self.fleets.items()
            for engine in fleet.engines
            if engine.url == url
        )

    async def begin_group(self, name: str) -> Response:
        """Add a group that was removed, by an administrator's order; return the answer."""
        tables: list[dict[str, Any]] = tomllib.loads(self.topology())["model"]
        self._observers[name].forget()
        self.deployments_made += 1
        return await self._order("", next(one for one in tables if one["name"] == name))

    async def drain_group(self, name: str) -> Response:
        """Drain a group likewise."""
        return await self._order("/drain", {"group": name})

    async def end_group(self, name: str, *, force: bool) -> Response:
        """Remove a group likewise."""
        return await self._order("/remove", {"group": name, "force": force})

    async def _order(self, path: str, order: Mapping[str, object]) -> Response:
        return await self.ask("POST", f"/admin/groups{path}", order)

"""A proxy before several groups of engines in one virtual-time loop."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from balanceroute.proxy.emulate.fleet import EmulatedFleet
from balanceroute.proxy.emulate.settings import EmulationSettings
from balanceroute.proxy.live.settings.configure import make_config, make_group, read_credentials
from balanceroute.proxy.testing.chaos.scheduler_watch import Step
from balanceroute.proxy.testing.chaos.world import EPOCH_S, World, WorldSettings
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.topologies import read_topology


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
        watch: Callable[[Step], None] = lambda _: None,
    ) -> None:
        """Take the groups by name; `more` are further tables of the file."""
        first = next(iter(groups.values()))
        super().__init__(WorldSettings(first.engines, flags, tenants), loop, rng, watch=watch)
        self._groups = groups
        self._more = more
        self.fleets = {
            name: EmulatedFleet(
                one.engines, rng=random.Random(rng.getrandbits(64)), epoch_s=EPOCH_S
            )
            for name, one in groups.items()
        }
        self.fleet = next(iter(self.fleets.values()))

    async def start(self, front: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the engines and the proxy."""
        del front
        for fleet in self.fleets.values():
            await fleet.start()
        flags = {
            "host": "127.0.0.1",
            "port": 0,
            "admin": False,
            "log": "none",
            "tenants": self._write_tenants(self._settings.tenants),
            **self._settings.flags,
        }
        path = self._own_folder() / "groups.toml"
        path.write_text(self.topology())
        topology = read_topology(path)
        environment = self._make_environment(partial(read_credentials, topology, flags))
        # Numbers of requests are those of one scheduler.
        await self._start(
            make_config(topology, flags),
            replace(environment, observer=None, make_group=partial(make_group, topology, flags)),
        )

    def topology(self) -> str:
        """Return the file."""
        lines = ['name = "groups"']
        for name, group in self._groups.items():
            fleet = self.fleets[name]
            lines += ["[[model]]", f'name = "{name}"', group.table]
            lines.append(f'connector = "{group.engines.connector}"')
            for place, url in enumerate(fleet.prefill_urls):
                lines += ["[[model.prefill]]", f'url = "{url}"']
                if fleet.bootstrap_urls:
                    lines.append(f'bootstrap = "{fleet.bootstrap_urls[place]}"')
            for url in fleet.decode_urls:
                lines += ["[[model.decode]]", f'url = "{url}"']
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

    async def close(self) -> None:
        """End everything."""
        await super().close()
        for fleet in self.fleets.values():
            if fleet is not self.fleet:
                await fleet.close()

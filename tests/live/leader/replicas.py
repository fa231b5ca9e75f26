"""Whole proxies before one fleet, of which one leads, in virtual time."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tests.live.leader.lease_server import NAME, LeaseServer
from tests.support.chaos.world import World, WorldSettings
from tests.support.site import Exchanged
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.wire.http1.client import Endpoint

if TYPE_CHECKING:
    from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet

_REPLICA: ContextVar[str] = ContextVar("replica", default="")


class Replica(World):
    """One of them."""

    name: str

    async def _begin(self, config: ProxyConfig, environment: Environment) -> None:
        self.context.run(_REPLICA.set, self.name)
        await super()._begin(config, environment)

    def stop_for(self, seconds: float) -> None:
        """Let nothing of it run, as after SIGSTOP, and then let it go on."""
        self.loop.hold(lambda context: context.get(_REPLICA) == self.name, seconds)

    @property
    def leads(self) -> bool:
        assert self.proxy.leadership is not None
        return self.proxy.leadership.leads


class Replicas:
    """The proxies, the fleet, and the server of the Lease."""

    def __init__(
        self, loop: VirtualLoop, engines: EmulationSettings, flags: Mapping[str, object]
    ) -> None:
        self.loop, self._engines, self._flags = loop, engines, flags
        self.server = LeaseServer()
        self.all: list[Replica] = []
        self.over: list[list[int]] = []  # Of each look, the ranks with more requests than slots.
        self.fleet: EmulatedFleet
        self._begun = 0
        self._endpoints: dict[int, Endpoint] = {}

    async def begin(self) -> Replica:
        """Start one more."""
        where = {"leader_lease": f"serving/{NAME}", "kubernetes_api": self.server.url}
        slots = {"batch": self._engines.batch_limit}
        flags = {"admin": True, "admin_port": 0, **slots, **where, **self._flags}
        self._begun += 1
        rng = random.Random(self._begun)
        one = Replica(WorldSettings(self._engines, flags), self.loop, rng)
        one.name = f"replica {self._begun}"
        if self._begun > 1:
            one.fleet = self.fleet
        self.fleet = one.fleet
        self.all.append(one)
        await one.start()
        return one

    async def end(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        for one in self.all:
            await one.close_proxy()
        await self.fleet.close()

    async def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> float:
        """Wait for something; return how long it took."""
        began_s = self.loop.time()
        while not condition():
            assert self.loop.time() - began_s < limit_s, f"not within {limit_s:g} s"
            await asyncio.sleep(0.005)
        return self.loop.time() - began_s

    async def leader(self) -> Replica:
        await self.until(lambda: any(one.leads for one in self.all))
        return next(one for one in self.all if one.leads)

    def other(self, than: Replica) -> Replica:
        return next(one for one in self.all if one is not than)

    def send(
        self, to: Replica, path: str, values: object = None, *, admin: bool = False
    ) -> Exchanged:
        """Begin an exchange with a proxy: post a JSON object, or get a page."""
        port = to.port
        if admin:
            assert to.proxy.admin is not None
            port = to.proxy.admin.port
        endpoint = self._endpoints.setdefault(port, Endpoint("127.0.0.1", port))
        exchanged = Exchanged()
        body = b"" if values is None else json.dumps(values).encode()
        headers = [(b"content-type", b"application/json")] if values is not None else []
        method = b"GET" if values is None else b"POST"
        exchanged.call = endpoint.request(method, path.encode(), headers, body, exchanged)
        return exchanged

    def complete(self, to: Replica, tokens: int = 40, prompt: int = 30) -> Exchanged:
        """Begin a streamed completion."""
        ids = list(range(1, prompt + 1))
        return self.send(
            to,
            "/v1/completions",
            {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True},
        )

    async def watch(self) -> None:
        """See that one leads at most, and note the ranks that stand above their slots."""
        fleet, limit = self.fleet, self._engines.batch_limit
        while True:
            assert sum(one.leads for one in self.all) <= 1
            stats: Any = fleet.stats()
            loads = zip(stats["running"], stats["waiting"], stats["arriving"], strict=True)
            self.over.append([sum(load) for load in loads if sum(load) > limit])
            await asyncio.sleep(0.01)


Scenario = Callable[[Replicas], Awaitable[None]]
ENGINES: dict[str, Any] = {
    "model": "tiny",
    "prefillers": 2,
    "ranks": 2,
    "batch_limit": 4,
    "max_model_len": 4096,
}


def play_replicas(
    scenario: Scenario, *, count: int = 2, flags: Mapping[str, object] | None = None, **changes: Any
) -> Replicas:
    """Play a scenario with so many replicas."""
    played: list[Replicas] = []

    async def main(loop: VirtualLoop) -> None:
        site = Replicas(loop, EmulationSettings(**(ENGINES | changes)), flags or {})
        played.append(site)
        await site.server.start()
        for _ in range(count):
            await site.begin()
        watch, play = asyncio.create_task(site.watch()), asyncio.ensure_future(scenario(site))
        done, _ = await asyncio.wait([watch, play], return_when=asyncio.FIRST_COMPLETED)
        for one in (watch, play):
            one.cancel()
        await asyncio.gather(watch, play, return_exceptions=True)
        await site.end()
        await site.server.close()
        for one in done:
            one.result()

    run(main, seed=1, limit_s=10_000.0)
    return played[0]

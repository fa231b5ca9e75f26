"""Two proxies before one fleet: each leaves the other's slots alone, and nothing is lost."""

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest
from tests.support.chaos.world import SchedulerStep, World, WorldSettings
from tests.support.site import Site, served

from balanceroute.proxy.core.events import Event, ForeignLoad
from balanceroute.proxy.lab.emulate.settings import DpMode

BATCH, RANKS = 12, 2
FLEET: dict[str, Any] = {
    "prefillers": 4,
    "ranks": RANKS,
    "batch_limit": 4 * BATCH,  # So that too many would run, and be seen.
    "step_base_ns": 60_000_000,
    "prefill_base_ns": 5_000_000,
    "prefill_ns_per_token": 1_000.0,
    "rank_kv_tokens": 100_000,
}
FLAGS = {"batch": BATCH}


async def second_proxy(site: Site) -> World:
    """Start another proxy before the same engines."""
    flags = {"admin": True, "admin_port": 0, **FLAGS}
    settings = WorldSettings(site.fleet.settings, flags)
    world = World(settings, site.loop, random.Random(9))
    world.fleet = site.fleet
    await world.start()
    return world


class Clients:
    """So many clients of a proxy, each of which sends its next request when one is answered."""

    def __init__(self, site: Site, port: int, count: int) -> None:
        self.served = 0  # The answers that came to their ends.
        self._site, self._port = site, port
        self._going = True
        numbers = itertools.count(100_000 * port)
        self._tasks = [asyncio.ensure_future(self._run(numbers)) for _ in range(count)]

    async def stop(self) -> None:
        """Send nothing more and wait for the answers."""
        self._going = False
        await asyncio.gather(*self._tasks)

    async def _run(self, numbers: "itertools.count[int]") -> None:
        while self._going:
            number = next(numbers)
            limit = 5 + number % 31
            body = {
                "model": "tiny",
                "prompt": [1 + number % 997] * (50 + number % 400),
                "max_tokens": limit,
                "ignore_eos": True,
                "stream": True,
            }
            answer = await self._site.send("/v1/completions", body, port=self._port).end()
            assert answer.done, (answer.status, answer.body)
            assert len(answer.chunks) >= limit
            self.served += 1


class Loads:
    """The slots that each proxy has on each rank, 20 times a second."""

    def __init__(self, *worlds: World) -> None:
        self._worlds = worlds
        self._seen: list[list[Any]] = []
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return int64[samples, proxies, ranks]."""
        self._task.cancel()
        await asyncio.wait([self._task])
        return np.array(self._seen)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self._seen.append([one.scheduler.ledger.bound.copy() for one in self._worlds])


@pytest.mark.parametrize("dp_mode", list(DpMode))
@served("dp_mode", flags=FLAGS, **FLEET)
async def test_a_new_proxy_takes_the_slots_that_the_old_one_leaves(
    site: Site, dp_mode: DpMode
) -> None:
    old = Clients(site, site.world.port, 36)
    await asyncio.sleep(4.0)
    world = await second_proxy(site)
    loads = Loads(site.world, world)
    new = Clients(site, world.port, 36)
    await asyncio.sleep(6.0)
    await old.stop()
    await asyncio.sleep(4.0)
    seen = await loads.stop()
    assert seen.sum(axis=1).max() <= BATCH + 1  # The one that is always its own.
    assert (seen[-1] == [[0] * RANKS, [BATCH] * RANKS]).all()
    await new.stop()
    assert new.served > BATCH * RANKS
    world.scheduler.check()
    assert not world.scheduler.requests
    await world.close_proxy()


@served(flags=FLAGS, **FLEET)
async def test_two_that_stay_share_each_rank(site: Site) -> None:
    """From an empty fleet, so that nobody has anything to give."""
    world = await second_proxy(site)
    loads = Loads(site.world, world)
    clients = [Clients(site, one.port, 36) for one in (site.world, world)]
    await asyncio.sleep(9.0)
    seen = await loads.stop()
    # Three readings, one a second, until each knows of the other, and requests of 2 s.
    assert seen[-60:].sum(axis=1).max() <= BATCH
    assert seen[-60:].min() >= BATCH // 2 - 1
    for one in clients:
        await one.stop()
    assert not world.scheduler.requests
    await world.close_proxy()


@served(flags=FLAGS, **FLEET)
async def test_a_proxy_alone_never_sees_others(site: Site) -> None:
    """Also if clients leave, so that engines run for a moment what is not there any more."""
    told: list[Event] = []

    def watch(step: SchedulerStep) -> None:
        if isinstance(step.event, ForeignLoad):
            told.append(step.event)

    site.world.observer.watch = watch
    clients = Clients(site, site.world.port, 36)
    body = {"model": "tiny", "prompt": "t1 t2", "max_tokens": 200, "ignore_eos": True}
    for _ in range(30):
        left = site.send("/v1/completions", body | {"stream": True})
        await asyncio.sleep(0.2)
        left.call.abort()
    await clients.stop()
    assert clients.served > 60
    assert not told

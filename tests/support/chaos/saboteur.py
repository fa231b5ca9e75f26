"""Lets the faults of a plan happen, and undoes them."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

from tests.support.chaos.clients import Holders
from tests.support.chaos.faults import Act, Injection
from tests.support.chaos.machine import EngineName, Naming
from tests.support.chaos.meddler import Meddler
from tests.support.chaos.world import Part, World

from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.lab.emulate.faults import AfterPull
from balanceroute.proxy.live.control.admin import CONNECTIONS
from balanceroute.proxy.live.control.orders import ConflictError
from balanceroute.proxy.live.control.roster import Addition

# Above what may be held.
_MORE_HOLDERS = 16


class Saboteur:
    """Works on one part of a world, whose engines run."""

    def __init__(self, world: World, part: Part, injections: tuple[Injection, ...]) -> None:
        self.done: Counter[str] = Counter()  # How many faults of each kind there were.
        # URLs under which the proxy is to know engines, by their own.
        self.front: dict[str, str] = {}
        self._world = world
        self._part = part
        self._injections = injections
        self._meddlers: dict[Engine, Meddler] = {}
        self._names: dict[Engine, EngineName] = {}
        self._holders: list[Holders] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Stand between the proxy and those engines whose framing is to be broken."""
        meddled = {self._engine(one) for one in self._injections if one.act is Act.MEDDLE}
        for injection in self._injections:
            engine = self._engine(injection)
            if injection.act is Act.NAME and engine not in meddled | self._names.keys():
                host = f"{engine.name.replace('/', '-')}.test"
                rng = random.Random(f"names {injection.start_s}")
                self._names[engine] = EngineName(
                    self._world.loop, host, engine.host, engine.port, rng
                )
                self.front[engine.url] = f"http://{host}:{engine.port}"
            if injection.act is Act.MEDDLE and engine not in self._meddlers:
                meddler = Meddler(self._world.loop, engine.host, engine.port)
                await meddler.start()
                self._meddlers[engine] = meddler
                self.front[engine.url] = f"http://{engine.host}:{meddler.port}"

    def begin(self, at_s: float) -> None:
        """Let everything happen as planned; the plan's time 0 is `at_s` of the loop."""
        call_at = self._world.loop.call_at
        for injection in self._injections:
            self._timers.append(call_at(at_s + injection.start_s, self._begin, injection))
            self._timers.append(call_at(at_s + injection.end_s, self._end, injection))

    async def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._disperse()
        await asyncio.gather(*self._tasks)
        world, fleet = self._world, self._part.fleet
        fleet.faults.clear()
        world.decision_faults.clear()
        for meddler in self._meddlers.values():
            meddler.meddling = None
        for name in self._names.values():
            name.naming = Naming.WELL
        world.machine.lacks_descriptors = False
        world.machine.disk.free()
        world.machine.crowd.go()
        for injection in self._injections:
            engine = self._engine(injection)
            world.loop.network.rule(engine.host, engine.port, None)
            world.loop.network.restore(engine.host, engine.port)
        for engine in fleet.engines:
            await fleet.restore(engine.name)

    def close(self) -> None:
        for meddler in self._meddlers.values():
            meddler.close()

    def _begin(self, injection: Injection) -> None:
        world, fleet, engine = self._world, self._part.fleet, self._engine(injection)
        network = world.loop.network
        world.journal.write("fault", injection.name, engine.name, injection.changes or "")
        self.done[injection.name] += 1
        if self._begin_in_proxy(injection):
            return
        if injection.act is Act.HOLD:
            self._hold(injection)
        match injection.act:
            case Act.BOARD:
                fleet.faults.set(engine.name, **injection.changes)
            case Act.KILL:
                fleet.kill(engine.name)
            case Act.PROCESS:
                engine.lose_process()
            case Act.SILENCE:
                network.silence(engine.host, engine.port)
            case Act.LINK:
                network.rule(engine.host, engine.port, injection.link)
            case Act.MEDDLE:
                self._meddlers[engine].meddling = injection.meddling
            case Act.NAME:
                self._name(engine, injection.naming)
            case Act.DRAIN:
                if self._part.is_there:
                    self._part.deployment.roster.drain(injection.role, self._known(engine))
            case _:
                pass

    def _begin_in_proxy(self, injection: Injection) -> bool:
        """Let a fault begin if it is one of the proxy itself; return whether it is."""
        world = self._world
        match injection.act:
            case Act.POLICY:
                if self._part.is_there:
                    self._part.deployment.set_policy(injection.policy)
            case Act.DECISION:
                assert injection.lapse is not None
                world.decision_faults.begin(injection.lapse)
            case Act.STANDSTILL:
                world.stand_still(injection.end_s - injection.start_s)
            case Act.WALL_CLOCK:
                world.wall_s += injection.jump_s
            case Act.SUSPENSION:
                world.suspend(injection.jump_s)
            case Act.DESCRIPTORS:
                world.machine.lacks_descriptors = True
            case Act.DISK:
                world.machine.disk.fill()
                if self._part.is_there:
                    self._part.deployment.set_policy(injection.policy)
            case Act.KEYS:
                world.spoil_key(injection.spoiling)
            case Act.CROWD:
                world.machine.crowd.come(injection.crowd)
            case _:
                return False
        return True

    def _name(self, engine: Engine, naming: Naming) -> None:
        if engine in self._names:
            self._names[engine].naming = naming

    def _end(self, injection: Injection) -> None:
        world, fleet, engine = self._world, self._part.fleet, self._engine(injection)
        network = world.loop.network
        world.journal.write("fault over", injection.name, engine.name)
        self._end_in_proxy(injection)
        match injection.act:
            case Act.BOARD:
                fleet.faults.set(engine.name, **injection.usual)
                if injection.changes.get("after_pull") is AfterPull.DEATH:
                    self._tasks.append(world.loop.create_task(fleet.restore(engine.name)))
            case Act.KILL:
                if injection.version:
                    world.versions[engine.name] = injection.version
                self._tasks.append(world.loop.create_task(fleet.restore(engine.name)))
            case Act.SILENCE:
                network.restore(engine.host, engine.port)
            case Act.LINK:
                network.rule(engine.host, engine.port, None)
            case Act.MEDDLE:
                self._meddlers[engine].meddling = None
            case Act.DRAIN:
                self._tasks.append(world.loop.create_task(self._take_back(injection)))
            case Act.NAME:
                self._name(engine, Naming.WELL)
            case _:
                pass

    def _end_in_proxy(self, injection: Injection) -> None:
        """End a fault if it is one of the proxy itself that does not end by itself."""
        world = self._world
        match injection.act:
            case Act.DECISION:
                assert injection.lapse is not None
                world.decision_faults.end(injection.lapse)
            case Act.WALL_CLOCK:
                world.wall_s -= injection.jump_s
            case Act.DESCRIPTORS:
                world.machine.lacks_descriptors = False
            case Act.DISK:
                world.machine.disk.free()
            case Act.KEYS:
                world.renew_key()
            case Act.CROWD:
                self._end_crowd()
            case Act.HOLD:
                self._disperse()
            case _:
                pass

    def _end_crowd(self) -> None:
        crowd = self._world.machine.crowd
        if self._part.is_there:
            urls = (target.url for target in self._part.deployment.roster.targets())
            wrong = crowd.registered(urls)
            self._world.machine.wrongs += [f"found: {url} never answered" for url in wrong]
        crowd.go()

    def _hold(self, injection: Injection) -> None:
        """Hold every connection that there may be, of the clients' listeners and the administrators'."""
        world = self._world
        fronts = list(dict.fromkeys(front.server.port for front in world.fronts))
        held = (world.plane.config.limits.connection_limit or 0) + _MORE_HOLDERS
        host = injection.held_from
        self._holders.append(Holders(fronts, held, injection.held_with, host))
        if world.plane.admin is not None:
            ports = [world.plane.admin.port]
            self._holders.append(
                Holders(ports, CONNECTIONS + _MORE_HOLDERS, injection.held_with, host)
            )

    def _disperse(self) -> None:
        """Have the holders of connections leave; they may not have kept out any other client."""
        world = self._world
        for one in self._holders:
            self._tasks.append(world.loop.create_task(one.leave()))
        if self._holders:
            rejected = sum(front.server.limit.rejected["limit"] for front in world.fronts)
            if rejected:
                world.machine.wrongs.append(f"holders: {rejected} connections were rejected")
        self._holders.clear()

    async def _take_back(self, injection: Injection) -> None:
        if not self._part.is_there:
            return
        # Unless another fault of this kind has ended already.
        with suppress(ConflictError):
            addition = Addition(injection.role, self._known(self._engine(injection)))
            await self._part.deployment.roster.add(addition)

    def _engine(self, injection: Injection) -> Engine:
        return self._part.fleet.engine(f"{injection.role.value}/{injection.engine}")

    def _known(self, engine: Engine) -> str:
        return self.front.get(engine.url, engine.url)

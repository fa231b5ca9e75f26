"""Who is registered, drained and removed, when sources tell this and that."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.errors import ConflictError
from balanceroute.proxy.live.discovery.found import Found, View
from balanceroute.proxy.live.discovery.reconciler import Reconciler
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.faults import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run

A, B = (Target(Role.DECODE, f"http://10.0.0.{number}:8000") for number in (1, 2))
P = Target(Role.PREFILL, "http://10.0.1.1:8000")


class Engines:
    """A list of engines in place of a roster.

    Attributes:
        status: Of each: "up" or "draining".
        ranks: As they were given.
        busy: Those with requests.
    """

    def __init__(self) -> None:
        self.status: dict[Target, str] = {}
        self.ranks: dict[Target, int | None] = {}
        self.busy: set[Target] = set()
        self.refused: set[Target] = set()

    def targets(self) -> list[Target]:
        return list(self.status)

    def sessions_on(self, target: Target) -> Collection[object]:
        return [object()] if target in self.busy else []

    async def add(
        self,
        role: Role,
        url: str,
        *,
        ranks: int | None,
        bootstrap: str | None,
        kv_events: str | None = None,
        kv_replay: str | None = None,
    ) -> None:
        del bootstrap
        target = Target(role, url)
        await asyncio.sleep(0)
        if target in self.refused:
            raise ConfigError("it does not fit")
        if self.status.get(target) == "up":
            raise ConflictError("it is there")
        self.status[target], self.ranks[target] = "up", ranks

    def drain(self, role: Role, url: str) -> None:
        self.status[Target(role, url)] = "draining"

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        target = Target(role, url)
        assert not force
        assert target not in self.busy
        del self.status[target]


class Told:
    """A source that tells what a test says."""

    def __init__(self) -> None:
        self._tell: Callable[[View], None]

    async def run(self, tell: Callable[[View], None]) -> None:
        self._tell = tell
        await asyncio.Event().wait()

    def tell(self, *found: Found | Target) -> None:
        all_of = [one if isinstance(one, Found) else Found(one) for one in found]
        self._tell({one.target: one for one in all_of})


class Scene:
    """A reconciler at work with two sources; the second tells nothing unless it is told to."""

    def __init__(self, *, owned: Collection[Target] = (), leaving: Collection[Target] = ()) -> None:
        self.engines, self.first, self.second = Engines(), Told(), Told()
        self.engines.status = dict.fromkeys(owned, "up") | dict.fromkeys(leaving, "draining")
        self.silent: set[str] = set()
        self.asked = 0
        self.reconciler = Reconciler(
            self.engines,
            [self.first, self.second],
            ask=self._ask,
            hold_s=5.0,
            clock=asyncio.get_running_loop().time,
            owned=owned,
            leaving=leaving,
        )

    async def _ask(self, url: EngineUrl) -> int:
        self.asked += 1
        await asyncio.sleep(0.1)
        if url.base in self.silent:
            raise FetchError(Fault.CONNECT, "refused")
        return 4


def play(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    owned: Collection[Target] = (),
    leaving: Collection[Target] = (),
) -> None:
    async def main(_: VirtualLoop) -> None:
        scene = Scene(owned=owned, leaving=leaving)
        scene.engines.busy.update(leaving)
        task = asyncio.create_task(scene.reconciler.run())
        await asyncio.sleep(0.1)
        await scenario(scene)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=10_000.0)


def test_what_is_found_is_added_and_decode_servers_are_asked_for_their_ranks() -> None:
    async def scenario(scene: Scene) -> None:
        scene.first.tell(Found(A), Found(B, ranks=2), Found(P))
        await asyncio.sleep(1.0)
        assert scene.engines.status == {A: "up", B: "up", P: "up"}
        assert scene.engines.ranks == {A: 4, B: 2, P: None}
        assert scene.reconciler.owned == {A, B, P}

    play(scenario)


def test_what_is_not_ready_is_added_when_it_is_and_stays_when_it_is_no_more() -> None:
    async def scenario(scene: Scene) -> None:
        scene.second.tell()
        scene.first.tell(Found(A, ready=False))
        await asyncio.sleep(10.0)
        assert scene.engines.status == {}
        for ready in (True, False):
            scene.first.tell(Found(A, ready=ready))
            await asyncio.sleep(20.0)
            assert scene.engines.status == {A: "up"}

    play(scenario)


def test_who_is_missing_for_long_is_drained_then_removed_when_idle() -> None:
    async def scenario(scene: Scene) -> None:
        scene.first.tell(A, B)
        scene.second.tell()
        await asyncio.sleep(1.0)
        scene.engines.busy.add(A)
        scene.first.tell(B)
        await asyncio.sleep(4.5)
        assert scene.engines.status == {A: "up", B: "up"}
        await asyncio.sleep(60.0)
        assert scene.engines.status == {A: "draining", B: "up"}
        assert scene.reconciler.leaving == {A}
        scene.engines.busy.clear()
        await asyncio.sleep(1.0)
        assert scene.engines.status == {B: "up"}
        assert (scene.reconciler.owned, scene.reconciler.leaving) == ({B}, set())
        # Later it is a new one.
        scene.first.tell(A, B)
        await asyncio.sleep(1.0)
        assert scene.engines.status == {A: "up", B: "up"}

    play(scenario)


def test_who_flaps_is_not_drained() -> None:
    async def scenario(scene: Scene) -> None:
        scene.first.tell(A)
        scene.second.tell()
        for _ in range(10):
            await asyncio.sleep(4.0)
            scene.first.tell()
            await asyncio.sleep(4.0)
            assert scene.engines.status == {A: "up"}
            scene.first.tell(A)
        assert scene.asked == 1

    play(scenario)


def test_who_says_that_it_is_leaving_is_drained_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        scene.first.tell(A)
        await asyncio.sleep(1.0)
        scene.engines.busy.add(A)
        scene.first.tell(Found(A, ready=False, leaving=True))
        await asyncio.sleep(0.01)
        assert scene.engines.status == {A: "draining"}
        scene.engines.busy.clear()
        await asyncio.sleep(1.0)
        assert scene.engines.status == {}
        # It is listed still for a while.
        await asyncio.sleep(10.0)
        assert scene.engines.status == {}

    play(scenario)


def test_who_comes_back_while_it_is_drained_is_taken_back() -> None:
    async def scenario(scene: Scene) -> None:
        scene.first.tell(A)
        scene.second.tell()
        await asyncio.sleep(1.0)
        scene.engines.busy.add(A)
        scene.first.tell()
        await asyncio.sleep(6.0)
        assert scene.engines.status == {A: "draining"}
        scene.first.tell(A)
        await asyncio.sleep(0.01)
        assert scene.engines.status == {A: "up"}
        assert (scene.reconciler.owned, scene.reconciler.leaving) == ({A}, set())

    play(scenario)


def test_who_does_not_answer_is_asked_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(scene: Scene) -> None:
        scene.silent.add(A.url)
        scene.engines.refused.add(B)
        scene.first.tell(A, B)
        await asyncio.sleep(20.0)
        assert scene.engines.status == {}
        assert 20 < scene.asked <= 40
        assert scene.reconciler.owned == set()
        scene.silent.clear()
        scene.engines.refused.clear()
        await asyncio.sleep(2.0)
        assert scene.engines.status == {A: "up", B: "up"}

    with caplog.at_level(logging.WARNING):
        play(scenario)
    # Once for each.
    assert caplog.messages == ["a found engine cannot be added yet"] * 2


def test_engines_of_administrators_are_left_alone() -> None:
    async def scenario(scene: Scene) -> None:
        engines = scene.engines
        await engines.add(A.role, A.url, ranks=1, bootstrap=None)
        scene.first.tell(A, B)
        scene.second.tell()
        await asyncio.sleep(1.0)
        assert scene.reconciler.owned == {B}
        # Drained by order: it stays so while it is found.
        engines.drain(B.role, B.url)
        await asyncio.sleep(20.0)
        assert engines.status == {A: "up", B: "draining"}
        # And removed: it does not come back before it was missing.
        engines.remove(B.role, B.url, force=False)
        await asyncio.sleep(20.0)
        assert engines.status == {A: "up"}
        scene.first.tell()
        await asyncio.sleep(20.0)
        assert engines.status == {A: "up"}
        scene.first.tell(B)
        await asyncio.sleep(2.0)
        assert engines.status == {A: "up", B: "up"}

    play(scenario)


def test_after_a_restart_engines_stay_until_every_source_was_read() -> None:
    async def scenario(scene: Scene) -> None:
        scene.first.tell(A)
        await asyncio.sleep(60.0)
        # B may be in the source that was not read yet.
        assert scene.engines.status == {A: "up", B: "up", P: "draining"}
        scene.second.tell(P)
        await asyncio.sleep(0.01)
        assert scene.engines.status == {A: "up", B: "up", P: "up"}
        await asyncio.sleep(10.0)
        assert scene.engines.status == {A: "up", P: "up"}

    play(scenario, owned=[A, B, P], leaving=[P])

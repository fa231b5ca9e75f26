"""Who is registered, drained and removed, when sources tell this and that."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.played import played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.orders import ConflictError
from balanceroute.proxy.live.control.roster import Addition
from balanceroute.proxy.live.discovery.reconciler import Found, Reconciler, View
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Role, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.roster import Roster

A, B = (Target(Role.DECODE, f"http://10.0.0.{number}:8000") for number in (1, 2))
P = Target(Role.PREFILL, "http://10.0.1.1:8000")


class Engines:
    """A list of engines in place of a roster."""

    def __init__(self) -> None:
        self.status: dict[Target, str] = {}  # Of each: "up" or "draining".
        self.ranks: dict[Target, int | None] = {}  # As they were given.
        self.busy: set[Target] = set()  # Those with requests.
        self.refused: set[Target] = set()
        self.added: list[int] = []  # How many were added at a time.
        self.changes = 0  # How often some came or went.

    def targets(self) -> list[Target]:
        return list(self.status)

    def sessions_on(self, target: Target) -> Collection[object]:
        return [object()] if target in self.busy else []

    def add(self, one: Addition) -> ConfigError | ConflictError | None:
        target = Target(one.role, one.url)
        if target in self.refused:
            return ConfigError("it does not fit")
        if self.status.get(target) == "up":
            return ConflictError("it is there")
        self.status[target], self.ranks[target] = "up", one.ranks
        return None

    def add_all(self, additions: Sequence[Addition]) -> list[ConfigError | ConflictError | None]:
        self.added.append(len(additions))
        return [self.add(one) for one in additions]

    def drain(self, role: Role, url: str) -> None:
        self.status[Target(role, url)] = "draining"

    def remove_idle(self, targets: Collection[Target]) -> set[Target]:
        idle = {*targets} - self.busy
        for target in idle:
            del self.status[target]
        return idle

    @contextmanager
    def one_change(self) -> Iterator[None]:
        before = dict(self.status)
        yield
        self.changes += self.status != before


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

    def __init__(
        self,
        *,
        owned: Collection[Target] = (),
        leaving: Collection[Target] = (),
        limit: int = 4096,
    ) -> None:
        self.engines, self.first, self.second = Engines(), Told(), Told()
        self.engines.status = dict.fromkeys(owned, "up") | dict.fromkeys(leaving, "draining")
        self.silent: set[str] = set()
        self.asked = self.asking = self.most_asking = 0
        self.slow: set[str] = set()
        self.reconciler = Reconciler(
            cast("Roster", self.engines),
            [self.first, self.second],
            ask=self._ask,
            hold_s=5.0,
            limit=limit,
            clock=asyncio.get_running_loop().time,
            owned=owned,
            leaving=leaving,
        )

    async def _ask(self, found: Found) -> int | None:
        self.asked += 1
        self.asking += 1
        self.most_asking = max(self.most_asking, self.asking)
        await asyncio.sleep(2.0 if found.target.url in self.slow else 0.05)
        self.asking -= 1
        if found.target.url in self.silent:
            raise FetchError(Fault.CONNECT, "refused")
        return 4 if found.ranks is None and found.target.role is Role.DECODE else found.ranks


def play(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    owned: Collection[Target] = (),
    leaving: Collection[Target] = (),
    limit: int = 4096,
) -> None:
    async def main(_: VirtualLoop) -> None:
        scene = Scene(owned=owned, leaving=leaving, limit=limit)
        scene.engines.busy.update(leaving)
        task = asyncio.create_task(scene.reconciler.run())
        await asyncio.sleep(0.1)
        await scenario(scene)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=10_000.0)


played = played_by(play)


@played()
async def test_what_is_found_is_added_and_decode_servers_are_asked_for_their_ranks(
    scene: Scene,
) -> None:
    scene.first.tell(Found(A), Found(B, ranks=2), Found(P))
    await asyncio.sleep(1.0)
    assert scene.engines.status == {A: "up", B: "up", P: "up"}
    assert scene.engines.ranks == {A: 4, B: 2, P: None}
    assert scene.reconciler.owned == {A, B, P}


@played()
async def test_what_is_not_ready_is_added_when_it_is_and_stays_when_it_is_no_more(
    scene: Scene,
) -> None:
    scene.second.tell()
    scene.first.tell(Found(A, ready=False))
    await asyncio.sleep(10.0)
    assert scene.engines.status == {}
    for ready in (True, False):
        scene.first.tell(Found(A, ready=ready))
        await asyncio.sleep(20.0)
        assert scene.engines.status == {A: "up"}


@played()
async def test_who_is_missing_for_long_is_drained_then_removed_when_idle(scene: Scene) -> None:
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


@played()
async def test_who_flaps_is_not_drained(scene: Scene) -> None:
    scene.first.tell(A)
    scene.second.tell()
    for _ in range(10):
        await asyncio.sleep(4.0)
        scene.first.tell()
        await asyncio.sleep(4.0)
        assert scene.engines.status == {A: "up"}
        scene.first.tell(A)
    assert scene.asked == 1


@played()
async def test_who_says_that_it_is_leaving_is_drained_at_once(scene: Scene) -> None:
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


@played()
async def test_who_comes_back_while_it_is_drained_is_taken_back(scene: Scene) -> None:
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


@played()
async def test_engines_of_administrators_are_left_alone(scene: Scene) -> None:
    engines = scene.engines
    engines.add(Addition(A.role, A.url, 1))
    scene.first.tell(A, B)
    scene.second.tell()
    await asyncio.sleep(1.0)
    assert scene.reconciler.owned == {B}
    # Drained by order: it stays so while it is found.
    engines.drain(B.role, B.url)
    await asyncio.sleep(20.0)
    assert engines.status == {A: "up", B: "draining"}
    # And removed: it does not come back before it was missing.
    engines.remove_idle([B])
    await asyncio.sleep(20.0)
    assert engines.status == {A: "up"}
    scene.first.tell()
    await asyncio.sleep(20.0)
    assert engines.status == {A: "up"}
    scene.first.tell(B)
    await asyncio.sleep(2.0)
    assert engines.status == {A: "up", B: "up"}


@played(owned=[A, B, P], leaving=[P])
async def test_after_a_restart_engines_stay_until_every_source_was_read(scene: Scene) -> None:
    scene.first.tell(A)
    await asyncio.sleep(60.0)
    # B may be in the source that was not read yet.
    assert scene.engines.status == {A: "up", B: "up", P: "draining"}
    scene.second.tell(P)
    await asyncio.sleep(0.01)
    assert scene.engines.status == {A: "up", B: "up", P: "up"}
    await asyncio.sleep(10.0)
    assert scene.engines.status == {A: "up", P: "up"}


def many(count: int) -> list[Target]:
    return [Target(Role.DECODE, f"http://10.1.{n >> 8}.{n & 255}:8000") for n in range(count)]


@played()
async def test_a_reading_is_one_change_however_many_engines_it_tells(scene: Scene) -> None:
    engines = scene.engines
    scene.second.tell()
    scene.first.tell(A, *many(500))
    await asyncio.sleep(3.0)
    assert (len(engines.status), engines.added, engines.changes) == (501, [501], 1)
    assert scene.most_asking == 16
    scene.first.tell(A)
    await asyncio.sleep(8.0)
    # Drained together, then removed together.
    assert (engines.status, engines.changes) == ({A: "up"}, 3)


@played()
async def test_engines_that_do_not_answer_keep_nobody_waiting_and_are_asked_at_a_bounded_rate(
    scene: Scene,
) -> None:
    dead = many(400)
    scene.silent.update(one.url for one in dead)
    scene.slow.update(one.url for one in dead[:200])
    scene.first.tell(*dead, A, B)
    await asyncio.sleep(6.0)
    assert scene.engines.status == {A: "up", B: "up"}
    assert scene.most_asking <= 16 * 2.0 / 0.1 + 16
    before = scene.asked
    await asyncio.sleep(20.0)
    assert 1_000 < scene.asked - before <= 2_100
    # Late answers are collected, too.
    scene.silent.clear()
    added = len(scene.engines.added)
    await asyncio.sleep(20.0)
    assert len(scene.engines.status) == 402
    assert len(scene.engines.added) - added <= 20


def test_of_more_than_the_limit_those_that_are_registered_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.second.tell()
        scene.first.tell(A, B)
        await asyncio.sleep(1.0)
        for _ in range(3):
            scene.first.tell(*many(20), A, B)
            await asyncio.sleep(10.0)
            assert [*scene.engines.status] == [A, B, *many(8)]
        scene.first.tell(A)
        await asyncio.sleep(10.0)
        assert [*scene.engines.status] == [A]

    with caplog.at_level(logging.INFO):
        play(scenario, limit=10)
    assert caplog.messages == [
        "more engines are found than --discover-limit allows: some are left out",
        "no engine that is found is left out any more",
    ]
    assert caplog.records[0].__dict__["fields"] == {"discover_limit": 10, "left_out": 12}


@played()
async def test_nothing_is_left_of_questions_that_are_not_answered(
    scene: Scene, cyclic: Callable[[], Counter[str]]
) -> None:
    scene.silent = {A.url, B.url, P.url}
    scene.slow = {A.url}
    scene.first.tell(A, B, P)
    await asyncio.sleep(5.0)
    assert scene.asked > 9
    assert not cyclic()["FetchError"]

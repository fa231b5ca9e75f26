"""Processes that stand for the lead, in virtual time, and a watch that sees if two lead at once."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar, copy_context
from pathlib import Path

from tests.live.leader.lease_server import NAME, LeaseServer
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.discovery.kubernetes import ApiClient
from balanceroute.proxy.live.leader.kubernetes_lease import KubernetesLease
from balanceroute.proxy.live.leader.leadership import Leadership, LeaderStore, LedGroup
from balanceroute.proxy.live.leader.lock_file import LockFile
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.messages import Headers

LEASE_S = 3
_WHO: ContextVar[str] = ContextVar("who", default="")


class Client(ApiClient):
    """Connects anew for each request."""

    def request(
        self, method: bytes, target: str, body: bytes = b""
    ) -> tuple[Endpoint, bytes, bytes, Headers, bytes]:
        self.close()
        return super().request(method, target, body)


class Candidate:
    """One process."""

    def __init__(self, name: str, store: LeaderStore, loop: VirtualLoop, lease_s: int) -> None:
        self.name, self.store, self._loop = name, store, loop
        self.leadership = Leadership(
            store,
            duration_s=lease_s,
            clock=loop.time,
            rng=random.Random(name),
            groups=lambda: self.groups,
        )
        self.groups: Iterable[LedGroup] = ()
        self.cut_off = False  # Whether the API server cannot be reached from it.
        context = copy_context()
        context.run(_WHO.set, name)
        self._task = loop.create_task(self.leadership.run(), context=context)

    @property
    def leads(self) -> bool:
        return self.leadership.leads

    def stop_for(self, seconds: float) -> None:
        """Let nothing of it run, as after SIGSTOP, and then let it go on."""
        self._loop.hold(lambda context: context.get(_WHO) == self.name, seconds)

    async def kill(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.leadership.close()


class Election:
    """Candidates and the place where they agree."""

    def __init__(self, loop: VirtualLoop, folder: Path) -> None:
        self.loop, self.folder = loop, folder
        self.server = LeaseServer()
        self.candidates: list[Candidate] = []
        self.wall_s = 0.0  # By how much wall clocks are wrong.

    def stand(
        self, name: str, *, identity: str = "", lease_s: int = LEASE_S, lock: bool = False
    ) -> Candidate:
        """Begin a process; `identity` is what it is called at the place, if not by its name."""
        found: list[Candidate] = []

        def connect() -> Endpoint:
            # A new connection for each request: see `cut_off`.
            return Endpoint("127.0.0.1", 9 if found and found[0].cut_off else self.server.port)

        store: LeaderStore
        if lock:
            store = LockFile(
                self.folder / "leader",
                name=identity or name,
                duration_s=lease_s,
                clock=self.loop.time,
                in_thread=_at_once,
            )
        else:
            store = KubernetesLease(
                Client(connect, self.folder),
                NAME,
                "serving",
                name=identity or name,
                duration_s=lease_s,
                clock=self.loop.time,
                unix_s=lambda: 1_795_000_000.0 + self.loop.time() + self.wall_s,
                rng=random.Random(name),
            )
        found.append(Candidate(name, store, self.loop, lease_s))
        self.candidates += found
        return found[0]

    @property
    def leaders(self) -> list[str]:
        return [one.name for one in self.candidates if one.leads]

    async def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> float:
        """Wait for something; return how long it took."""
        began_s = self.loop.time()
        while not condition():
            assert self.loop.time() - began_s < limit_s, f"not within {limit_s:g} s: {self.leaders}"
            await asyncio.sleep(0.01)
        return self.loop.time() - began_s

    async def leader(self) -> Candidate:
        """Wait until one leads."""
        await self.until(lambda: bool(self.leaders))
        return next(one for one in self.candidates if one.leads)

    def other(self, than: Candidate) -> Candidate:
        return next(one for one in self.candidates if one is not than)

    async def watch(self) -> None:
        while True:
            assert len(self.leaders) <= 1, self.leaders
            await asyncio.sleep(0.02)


Scenario = Callable[[Election], Awaitable[None]]


def elect(scenario: Scenario, folder: Path, *, at_once: bool = True) -> None:
    """Play a scenario; at no time may two lead."""

    async def main(loop: VirtualLoop) -> None:
        election = Election(loop, folder)
        await election.server.start()
        watch = asyncio.create_task(election.watch())
        play = asyncio.ensure_future(scenario(election))
        done, _ = await asyncio.wait([watch, play], return_when=asyncio.FIRST_COMPLETED)
        for one in (watch, play):
            one.cancel()
        await asyncio.gather(watch, play, return_exceptions=True)
        for candidate in election.candidates:
            await candidate.kill()
        await election.server.close()
        for one in done:
            one.result()

    run(main, seed=1, limit_s=10_000.0)


async def _at_once(function: Callable[[], None]) -> None:
    function()

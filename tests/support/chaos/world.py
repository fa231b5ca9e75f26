"""A proxy and its engines in one virtual-time loop."""

import asyncio
import errno
import json
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import MappingProxyType
from weakref import finalize

from tests.support.chaos.decision_faults import (
    DecisionFaults,
    FaultyPolicy,
    FaultyPredictor,
)
from tests.support.chaos.log_capture import Journal
from tests.support.chaos.machine import Machine, Spoiling
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    Event,
    ForeignLoad,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    RankClosed,
    RankOpened,
    RequestId,
    StepCompleted,
    Tick,
)
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.prefix_caches import KvLog
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.deployment import Deployment
from balanceroute.proxy.live.engines.kv_feed import KvEventSource, KvFeed
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.frontend.pass_through import PassThrough
from balanceroute.proxy.live.proxy import DEFAULT, Proxy
from balanceroute.proxy.live.security import Credentials
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config, read_credentials
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import Response

# KV cache events of emulated engines in virtual time, where ZeroMQ cannot be.

# How often what was published arrives.
_TURN_S = 0.05
RANK_PORT = 10_000
"""Above it are the ports of ranks, by their number; below it those of prefillers, from 1 on."""


class KvLink:
    """Between the logs of a fleet's engines and the proxy that listens.

    Args:
        fleet: Its engines, by their numbers, are at the ports of the sources.
    """

    def __init__(self, fleet: EmulatedFleet) -> None:
        self._fleet = fleet

    async def subscribe(self, sources: asyncio.Queue[KvEventSource]) -> None:
        """Take the events of all sources that come, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._follow(await sources.get()))

    async def _follow(self, source: KvEventSource) -> None:
        port = int(source.events.rpartition(":")[2])
        waiting: list[tuple[int, bytes]] = []
        followed: KvLog | None = None

        def listen(number: int, payload: bytes) -> None:
            waiting.append((number, payload))

        try:
            while source.is_wanted():
                log = self._log(port)
                if log is not followed:
                    if followed is not None:
                        followed.listeners.remove(listen)
                        waiting.clear()
                        source.feed.interrupted()
                    followed = log
                    log.listeners.append(listen)
                    _catch_up(source, log)
                batches, waiting[:] = [*waiting], []
                for number, payload in batches:
                    if source.feed.take(number, payload):
                        _catch_up(source, log)
                await asyncio.sleep(_TURN_S)
        finally:
            if followed is not None:
                followed.listeners.remove(listen)
        source.feed.end()

    def _log(self, port: int) -> KvLog:
        """Return the log that is published at a port at present."""
        if port >= RANK_PORT:
            return self._fleet.rank_kv_logs[port - RANK_PORT]
        return self._fleet.kv_logs[self._fleet.engines[port - 1]]


def _catch_up(source: KvEventSource, log: KvLog) -> None:
    """Have batches sent again, as the subscriber does."""
    if source.replay is not None and not _replayed(source.feed, log):
        _replayed(source.feed, log)


def _replayed(feed: KvFeed, log: KvLog) -> bool:
    start = feed.begin_replay()
    for number, payload in log.batches:
        if number >= start and not feed.replayed(number, payload):
            return False
    return feed.end_replay(complete=True)


# The proxy's scheduler under observation: what goes in and comes out, and whether the books are
# right.

_NOT_OF_A_REQUEST = (
    StepCompleted,
    Tick,
    RankClosed,
    RankOpened,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    ForeignLoad,
)


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """One event and what came of it."""

    event: Event  # What the scheduler got.
    request: RequestId | None  # The request that it concerns; None for all.
    before: LifecycleState | None  # That request's state before; None if it had none.
    started: bool  # Whether it was in its rank's batch before.
    actions: list[Action]  # What the scheduler wants done.
    group: str = ""  # Whose scheduler it is; empty for the only one.


class SchedulerWatch:
    """Observes the proxy's scheduler.

    Args:
        scheduler: Returns the observed scheduler.
        watch: Called with every event that was handled.
        check_every: How many events pass between two recounts of everything.
        group: The scheduler's group; empty for the only one.

    Attributes:
        stale_admissions: Requests that were sent to decode with a lease that had run out.
    """

    def __init__(
        self,
        scheduler: Callable[[], Scheduler],
        watch: Callable[[SchedulerStep], None],
        *,
        check_every: int = 64,
        group: str = "",
    ) -> None:
        self._scheduler = scheduler
        self.watch = watch
        self.stale_admissions: list[RequestId] = []
        self._check_every = check_every
        self._group = group
        self._events = 0
        # State of each request, and whether it is in its rank's batch.
        self._states: dict[RequestId, tuple[LifecycleState, bool]] = {}

    def forget(self) -> None:
        """Forget all requests: the scheduler is another one from now on."""
        self._states.clear()

    def __call__(self, event: Event, actions: Sequence[Action], now_ns: int) -> None:
        number = None if isinstance(event, _NOT_OF_A_REQUEST) else event.request
        before, started = None, False
        if number is not None:
            before, started = self._states.get(number, (None, False))
            self._learn(number)
        for action in actions:
            self._learn(action.request)
            if isinstance(action, Admit):
                expires_ns = self._scheduler().requests[action.request].lease_expires_ns
                if expires_ns is not None and expires_ns <= now_ns:
                    self.stale_admissions.append(action.request)
        self._events += 1
        if self._events % self._check_every == 0:
            self._scheduler().check()
        self.watch(SchedulerStep(event, number, before, started, list(actions), self._group))

    def _learn(self, number: RequestId) -> None:
        request = self._scheduler().requests.get(number)
        if request is None:
            self._states.pop(number, None)
        else:
            self._states[number] = request.state, request.started


_HOST: ContextVar[str] = ContextVar("host", default="")
_PROXY = "proxy"
_MOMENT_S = 1e-6
_STILL_S = 0.3  # Too short to be noticed as a standstill.
EPOCH_S = 1_795_000_000.0
# An order to sleep takes two minutes to fail at a silent engine.
_ORDER_TIMEOUT_S = 200.0
_ORDER_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What stands in the world."""

    engines: EmulationSettings  # The fleet.
    flags: Mapping[str, object]  # Of the proxy, by name, besides its engines and its addresses.
    tenants: str = ""  # The file of tenants; empty for none.
    engine_key: bool = False  # Whether the proxy has a key for its engines, in a file.
    finds: bool = False  # Whether the proxy looks for engines in a file too.


@dataclass(frozen=True, slots=True)
class Front:
    """One listener for clients, with its connections to the engines by URL."""

    server: Server
    pass_through: PassThrough
    endpoints: Mapping[str, Endpoint]


@dataclass(frozen=True, slots=True)
class Part:
    """A deployment of a world with its engines."""

    name: str  # Of its group; empty if it is the only one.
    fleet: EmulatedFleet
    observer: SchedulerWatch  # Of its scheduler.
    deployments: Callable[[], Mapping[str, Deployment]]  # Returns those that are there, by name.

    @property
    def deployment(self) -> Deployment:
        """What decides about it. Raises KeyError: it is not there."""
        return self.deployments()[self.name]

    @property
    def is_there(self) -> bool:
        return self.name in self.deployments()


class World:
    """One proxy before one fleet.

    Attributes:
        lag_s: What is ordered holds everywhere within this time.
    """

    lag_s = 0.2

    def __init__(
        self,
        settings: WorldSettings,
        loop: VirtualLoop,
        rng: random.Random,
        *,
        watch: Callable[[SchedulerStep], None] = lambda _: None,
    ) -> None:
        self.loop = loop
        self.journal = Journal(loop.time)
        self.context = copy_context()  # What the proxy runs in.
        self.ended: list[RequestRecord] = []  # The requests that ended, in order.
        self.deployments_made = 1  # How many the proxy has made so far.
        self.decision_faults = DecisionFaults()  # Of the policy and the predictor.
        self.wall_s = 0.0  # By how much the proxy's wall clock is wrong.
        # For how long the proxy's machine was suspended.
        self.suspended_s = (
            5_000.0  # Before all this: its uptime and its loop's time are two clocks.
        )
        # Of engines that report another one than the rest, by name; an engine reads its own here.
        self.versions = dict(settings.engines.engine_versions)
        self.fleet = EmulatedFleet(
            replace(settings.engines, engine_versions=self.versions),
            rng=random.Random(rng.getrandbits(64)),
            epoch_s=EPOCH_S,
        )
        self._folder = Path(mkdtemp())
        # A world that fails to start is never closed.
        self._remove_folder = finalize(self, rmtree, self._folder)
        self.proxy: Proxy
        loop.network.denies = self._denied
        self.machine = Machine(loop, self._folder)  # The proxy's.
        self._settings = settings
        self._front: Mapping[str, str] = {}
        self._rng = random.Random(rng.getrandbits(64))
        self.observer = SchedulerWatch(lambda: self.scheduler, watch)

    async def start(self, front: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the engines, unless they run, and the proxy.

        `front` has the URLs under which the proxy is to know engines, by their own.
        """
        self._front = front
        await self.start_engines()
        flags = {
            "host": "127.0.0.1",
            "port": 0,
            "admin": False,
            "log": "none",
            "model": [],
            "tenants": self._write_tenants(self._settings.tenants),
            **_kv_addresses(self._settings.engines),
            **self._file_flags(),
            **self._settings.flags,
            "prefill": [self.known(url) for url in self.fleet.prefill_urls],
            "decode": [self.known(url) for url in self.fleet.decode_urls],
            "bootstrap": self.fleet.bootstrap_urls or None,
            "connector": self._settings.engines.connector,
        }
        environment = self._make_environment(partial(read_credentials, None, flags))
        await self._begin(make_config(None, flags), environment)

    def _file_flags(self) -> dict[str, object]:
        files: dict[str, object] = {}
        if self._settings.engine_key:
            files["engine_key_file"] = str(self.machine.key_file.path)
        if self._settings.finds:
            files["discover"] = [f"file:{self.machine.crowd.path}"]
            files |= {"discover_interval_s": 0.3, "discover_hold_s": 0.5, "discover_limit": 400}
        return files

    async def _begin(self, config: ProxyConfig, environment: Environment) -> None:
        """Start what serves clients, as something that can stand still by itself."""
        self.context.run(_HOST.set, _PROXY)
        await self.loop.create_task(self._start(config, environment), context=self.context)

    def stand_still(self, seconds: float) -> None:
        """Let the proxy stand still, and the rest go on."""
        self.loop.hold(lambda context: context.get(_HOST) == _PROXY, seconds)

    def suspend(self, seconds: float) -> None:
        """Let the proxy's machine be suspended.

        Its loop's clock does not count the time; its uptime and the leases do. Before that it stands still
        for a moment, in which the engines get what was on its way.
        """
        # Before anything else happens here: what it sent just before would still be on its way.
        self.loop.call_later(_STILL_S - _MOMENT_S, self._let_pass, seconds)
        self.stand_still(_STILL_S)

    def _let_pass(self, seconds: float) -> None:
        self.suspended_s += seconds
        for part in self.parts:
            part.fleet.age_leases(seconds)

    def known(self, url: str) -> str:
        """Return the URL under which the proxy is to know an engine."""
        base, mark, rank = url.partition("@")
        return f"{self._front.get(base, base)}{mark}{rank}"

    async def start_engines(self) -> None:
        for part in self.parts:
            if not part.fleet.engines:
                await part.fleet.start()

    def _make_environment(self, read: Callable[[], Credentials]) -> Environment:
        return Environment(
            log=self,
            rng=self._rng,
            unix_s=lambda: EPOCH_S + self.loop.time() + self.wall_s,
            stopwatch=self.loop.time,
            uptime_s=lambda: self.loop.time() + self.suspended_s,
            in_thread=_at_once,
            observer=self.observer,
            subscribe=KvLink(self.fleet).subscribe,
            policy=lambda policy: FaultyPolicy(policy, self.decision_faults),
            read_credentials=read,
            orders=OrderStore(self.machine.disk.orders),
        )

    def _denied(self) -> OSError | None:
        if self.machine.lacks_descriptors and _HOST.get() == _PROXY:
            return OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return None

    async def _start(self, config: ProxyConfig, environment: Environment) -> None:
        self.proxy = Proxy(config, environment)
        self._doubt(self.proxy)
        await self.proxy.start()

    def _write_tenants(self, text: str) -> str | None:
        """Return the file of tenants; None if there are none."""
        if not text:
            return None
        path = self._folder / "tenants.toml"
        path.write_text(text)
        return str(path)

    def change_tenants(self, text: str) -> None:
        """Have the proxy read another file of tenants. Raises ConfigError."""
        self._write_tenants(text)
        self.reload()

    def reload(self) -> None:
        """Have the proxy read keys and tenants again. Raises ConfigError."""
        self.plane.reload()

    def spoil_key(self, spoiling: Spoiling) -> None:
        """Have the proxy read a bad file of a key."""
        self.machine.key_file.spoil(spoiling)
        with suppress(ConfigError):
            self.reload()
            self.machine.wrongs.append(f"keys: a bad file was taken ({spoiling.value})")

    def renew_key(self) -> None:
        """Have the proxy read a good file of a key."""
        self.machine.key_file.renew()
        self.reload()

    def explains(self, record: logging.LogRecord) -> bool:
        """Return whether a logged error was to be expected."""
        return self.decision_faults.explains(record) or self.machine.disk.explains(
            record.getMessage()
        )

    def _doubt(self, plane: Proxy) -> None:
        """Let its predictor fail when it is to."""
        for deployment in plane.deployments.values():
            active = deployment.predictors.active
            active.predictor = FaultyPredictor(active.predictor, self.decision_faults)

    @property
    def plane(self) -> Proxy:
        return self.proxy

    @property
    def parts(self) -> Sequence[Part]:
        return [Part(DEFAULT, self.fleet, self.observer, lambda: self.plane.deployments)]

    @property
    def scheduler(self) -> Scheduler:
        return self.plane.deployment.driver.scheduler

    @property
    def port(self) -> int:
        return self.proxy.server.port

    @property
    def fronts(self) -> list[Front]:
        server, deployments = self.proxy.server, self.proxy.deployments.values()
        return [Front(server, one.pass_through, one.roster.endpoints) for one in deployments]

    async def ask(self, method: str, path: str, order: object = None) -> Response:
        """Ask for a page of the admin listener, or give an order. Raises WireError."""
        endpoint = Endpoint("127.0.0.1", 0 if self.plane.admin is None else self.plane.admin.port)
        try:
            return await fetch(
                endpoint,
                method.encode(),
                path.encode(),
                [(b"content-type", b"application/json")],
                b"" if order is None else json.dumps(order).encode(),
                timeout_s=_ORDER_TIMEOUT_S,
                max_bytes=_ORDER_BYTES,
            )
        finally:
            endpoint.close()

    async def drain(self) -> None:
        """Take nothing new, and wait for what runs."""
        await self.proxy.drain()

    async def close_proxy(self) -> None:
        await self.proxy.close()

    async def restart(self) -> None:
        """End the proxy, and start another one in its place."""
        await self.close_proxy()
        self.observer.forget()
        await self.start(self._front)

    def request_ended(self, record: RequestRecord) -> None:
        """Take the proxy's word on a request that ended: it is the proxy's log."""
        self.ended.append(record)

    async def close(self) -> None:
        await self.close_proxy()
        for part in self.parts:
            await part.fleet.close()
        self._remove_folder()


def _kv_addresses(engines: EmulationSettings) -> dict[str, object]:
    """Return the flags for KV cache events; the ports are those of `KvLink`."""
    if not engines.kv_events:
        return {}
    events = [f"tcp://127.0.0.1:{1 + number}" for number in range(engines.prefillers)]
    return {"kv_events": events, "kv_replay": events}


async def _at_once(function: Callable[[], None]) -> None:
    """Do what would have a thread: virtual time has none."""
    function()

"""A proxy of several processes in one virtual-time loop: relays, a scheduler, and what is between them."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.standing import KeepingFile
from balanceroute.proxy.live.control_plane import ControlPlane
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.processes import frames, from_relay, to_relay
from balanceroute.proxy.live.relay_app import RelayApp
from balanceroute.proxy.live.scheduler_app import SchedulerApp
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.testing.chaos.scheduler_watch import Step
from balanceroute.proxy.testing.chaos.world import Front, World, WorldSettings
from balanceroute.proxy.testing.virtual.loop import VirtualLoop

if TYPE_CHECKING:
    from balanceroute.proxy.live.processes.relay_desk import RelayDesk

_DIGEST = "the same"
# Seconds that a frame takes at least and at most, and how often in a hundred.
_DELAYS = ((0.0, 0.0002, 60), (0.0002, 0.002, 30), (0.002, 0.02, 9), (0.02, 0.3, 1))
# Within this a scheduler process makes its socket and the orders again if they were removed.
_MADE_AGAIN_S = 1.0
# Within this all relays are welcome.
_WELCOME_S = 1.0


class Wire:
    """One direction of a connection: frames arrive late, whole and in order.

    Args:
        take: Called with the bytes of a frame.
    """

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, take: Callable[[bytes], None]
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._take = take
        self._last_s = 0.0
        self._cut = False

    def write(self, messages: "Sequence[from_relay.FromRelay | to_relay.ToRelay]") -> None:
        """Send messages as one frame."""
        least, most, _ = self._rng.choices(_DELAYS, [weight for *_, weight in _DELAYS])[0]
        self._last_s = max(self._last_s, self._loop.time() + self._rng.uniform(least, most))
        self._loop.call_at(self._last_s, self._deliver, bytes(frames.encode(messages)))

    def cut(self) -> None:
        """Deliver nothing more."""
        self._cut = True

    def _deliver(self, data: bytes) -> None:
        if not self._cut:
            self._take(data)


def _refusal(renew: Callable[[], object]) -> ConfigError | None:
    try:
        renew()
    except ConfigError as error:
        return error
    return None


class SplitWorld(World):
    """Several relays and one scheduler process before one fleet. A client goes to any relay.

    Attributes:
        app: The scheduler process.
        relays: The others.
        scheduler_kills: How often it was killed.
    """

    lag_s = 1.5  # Of frames there and back.

    def __init__(
        self,
        settings: WorldSettings,
        loop: VirtualLoop,
        rng: random.Random,
        *,
        relays: int,
        watch: Callable[[Step], None] = lambda _: None,
    ) -> None:
        super().__init__(settings, loop, rng, watch=watch)
        self.app: SchedulerApp
        self.relays: list[RelayApp] = []
        self._config: ProxyConfig
        self._environment: Environment
        self._ends: dict[int, tuple[Wire, Wire, RelayDesk]] = {}
        self._down: set[int] = set()
        self._alone = False
        self._apart: set[int] = set()  # Relays that find no socket of the scheduler process.
        self._has_socket = True
        self.scheduler_kills = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._number = relays
        self._wires_rng = random.Random(f"wires {rng.getrandbits(64)}")
        self._chosen = random.Random(f"relays {rng.getrandbits(64)}")

    async def _start(self, config: ProxyConfig, environment: Environment) -> None:
        environment = replace(environment, orders=self._keeper())
        self.app = SchedulerApp(config, environment, relays=self._number, digest=_DIGEST)
        self._doubt(self.app)
        await self.app.start()
        self._config, self._environment = config, environment
        for place in range(self._number):
            self.relays.append(await self._start_relay(place, config))
        await asyncio.sleep(_WELCOME_S)
        assert all(relay.host.scheduler for relay in self.relays)

    async def _start_relay(self, place: int, config: ProxyConfig) -> RelayApp:
        relay = RelayApp(self._renewed(config), self._environment, place=place, digest=_DIGEST)
        await relay.start()
        if not self._has_socket:
            self._apart.add(place)
        elif not self._alone:
            self._connect(relay, place)
        return relay

    def _connect(self, relay: RelayApp, place: int) -> None:
        loop, rng = self.loop, self._wires_rng
        for_relay, for_scheduler = frames.for_relay(), frames.for_scheduler()
        down = Wire(loop, rng, lambda data: relay.take(for_relay.feed(data)))
        desk = self.app.connect(down.write)
        up = Wire(loop, rng, lambda data: desk.take(for_scheduler.feed(data)))
        self._ends[place] = up, down, desk
        relay.connect(up.write)

    def kill_relay(self, place: int, down_s: float) -> int | None:
        """Kill a relay, and begin another in its place later; return its port, None if it is down."""
        if place in self._down:
            return None
        self._down.add(place)
        relay = self.relays[place]
        up, down, desk = self._ends[place]
        up.cut()
        down.cut()
        port = relay.public.server.port
        relay.cut()
        if not (self._alone or place in self._apart):
            self.loop.call_soon(desk.gone)
        self._apart.discard(place)
        self.loop.call_later(down_s, self._begin_again, place, port, context=self.context)
        return port

    def _begin_again(self, place: int, port: int) -> None:
        self._tasks.append(self.loop.create_task(self._replace(place, port)))

    async def _replace(self, place: int, port: int) -> None:
        listening = replace(self._config.listening, port=port)
        config = replace(self._config, listening=listening)
        self.relays[place] = await self._start_relay(place, config)
        self._down.discard(place)

    def kill_scheduler(self, down_s: float) -> bool:
        """Kill the scheduler process, and begin another later; return whether it was there."""
        if not self._alone:
            self._alone = True
            self.scheduler_kills += 1
            for place, (up, down, _) in self._ends.items():
                up.cut()
                down.cut()
                if place not in self._down | self._apart:
                    self.loop.call_soon(self.relays[place].gone)
            anew = self._schedule_anew(self.app, down_s)
            self._tasks.append(self.loop.create_task(anew, context=self.context))
            return True
        return False

    async def _schedule_anew(self, killed: SchedulerApp, down_s: float) -> None:
        await killed.close()
        await asyncio.sleep(down_s)
        config = self._renewed(self._config)
        self._environment = replace(self._environment, orders=self._keeper())
        app = SchedulerApp(config, self._environment, relays=self._number, digest=_DIGEST)
        self._doubt(app)
        self.observer.forget()
        self.app = app
        await app.start()
        self._alone, self._has_socket = False, True
        self._apart.clear()
        for place, relay in enumerate(self.relays):
            if place not in self._down:
                self._connect(relay, place)

    def clean_folder(self) -> None:
        """Remove what the processes have in a temporary folder: the orders, and the socket of the scheduler."""
        self.machine.disk.clean()
        self._has_socket = False
        if not self._alone:
            seconds = self._wires_rng.uniform(0.0, _MADE_AGAIN_S)
            self.loop.call_later(seconds, self._make_socket, self.app)

    def _make_socket(self, app: SchedulerApp) -> None:
        if self._alone or app is not self.app or self._has_socket:
            return
        self._has_socket = True
        for place in sorted(self._apart):
            self._connect(self.relays[place], place)
        self._apart.clear()

    def _keeper(self) -> KeepingFile:
        """Return what keeps orders for the next scheduler process, which knows none itself."""
        return KeepingFile(self.machine.disk.orders, is_temporary=True)

    def _renewed(self, config: ProxyConfig) -> ProxyConfig:
        """Return the settings with the keys and tenants as the files have them now."""
        assert self._environment.read_credentials is not None
        return replace(config, credentials=self._environment.read_credentials())

    def reload(self) -> None:
        """Have every process read keys and tenants again. Raises ConfigError."""
        read = self._environment.read_credentials
        assert read is not None
        up = [one for place, one in enumerate(self.relays) if place not in self._down]
        renew: list[Callable[[], object]] = [partial(one.renew, read) for one in up]
        if not self._alone:
            renew.append(self.app.reload)
        renew = renew or [read]  # Every process is killed just now.
        refused = [error for error in map(_refusal, renew) if error is not None]
        assert len(refused) in (0, len(renew)), "some processes take what others refuse"
        if refused:
            raise refused[0]

    @property
    def is_whole(self) -> bool:
        """Whether no process is missing."""
        return not (self._alone or self._down or self._apart)

    @property
    def decides(self) -> bool:
        """Whether there is a scheduler process just now."""
        return not self._alone

    @property
    def lives(self) -> int:
        """How often it was killed."""
        return self.scheduler_kills

    def is_up(self, port: int) -> bool:
        """Return whether a relay listens there."""
        up = [one for place, one in enumerate(self.relays) if place not in self._down]
        return any(one.public.server.port == port for one in up)

    @property
    def plane(self) -> ControlPlane:
        """What decides."""
        return self.app

    @property
    def port(self) -> int:
        """Where the next client goes."""
        up = [one for place, one in enumerate(self.relays) if place not in self._down]
        return self._chosen.choice(up or self.relays).public.server.port

    @property
    def fronts(self) -> list[Front]:
        """The listeners for clients."""
        return [
            Front(one.public.server, one.pass_through, one.mirror.endpoints) for one in self.relays
        ]

    async def drain(self) -> None:
        """Take nothing new, and wait for what runs."""
        await asyncio.gather(self.app.drain(), *(relay.drain() for relay in self.relays))

    async def close_proxy(self) -> None:
        """End what serves clients."""
        for relay in self.relays:
            await relay.close()
        await self.app.close()

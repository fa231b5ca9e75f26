"""A whole proxy in virtual time before emulated engines, and a client that speaks to each of them."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.chaos.groups import GroupSettings, GroupWorld
from tests.support.chaos.world import World, WorldSettings
from tests.support.played import played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.generation import Routes
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.deployment import Deployment
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.http1.client import Call, Endpoint
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, HttpRequest, WireError, first_value
from balanceroute.proxy.wire.sse import EventScanner, event_data

TRANSCRIPTS = Path(__file__).parents[1] / "live" / "transcripts"


def transcript(name: str) -> bytes:
    """Return the body that a real engine was sent or that it answered, without its framing."""
    head, _, body = (TRANSCRIPTS / name).read_bytes().partition(b"\r\n\r\n")
    return ChunkedDecoder().feed(body) if b"transfer-encoding: chunked" in head else body


def _said(choice: Any) -> str:
    part = choice.get("delta", choice.get("message", choice))
    return part.get("content", part.get("text")) or ""


class Exchanged:
    """One exchange, as far as it has come."""

    call: Call

    def __init__(self) -> None:
        self.status = 0  # 0 until the head came.
        self.headers: Headers = []
        self.events: list[bytes] = []  # Of a stream: its complete events.
        self.times_s: list[float] = []  # When each of them came.
        self.error: WireError | None = None  # How it broke off, or None.
        self._body = bytearray()
        self._over = asyncio.Event()
        self._more = asyncio.Event()
        self._scanner = EventScanner(max_event_bytes=64 << 20)

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._more.set()

    def on_data(self, data: bytes) -> None:
        self._body += data
        self.events += self._scanner.feed(data)
        now_s = asyncio.get_running_loop().time()
        self.times_s += [now_s] * (len(self.events) - len(self.times_s))
        self._more.set()

    def on_end(self) -> None:
        self._over.set()
        self._more.set()

    def on_error(self, error: WireError) -> None:
        self.error = error
        self.on_end()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @property
    def json(self) -> Any:
        return json.loads(self._body)

    def header(self, name: bytes) -> bytes | None:
        return first_value(self.headers, name)

    async def end(self) -> "Exchanged":
        await self._over.wait()
        return self

    async def until(self, ready: Callable[[], bool]) -> "Exchanged":
        """Wait until something is so; it must be before the end."""
        while not ready():
            assert not self.over, (self.status, self.body, self.error)
            self._more.clear()
            await self._more.wait()
        return self

    async def until_events(self, count: int) -> "Exchanged":
        return await self.until(lambda: len(self.events) >= count)

    async def tokens(self, count: int) -> None:
        await self.until(lambda: len(self.texts()) >= count)

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream as JSON, without `[DONE]`."""
        data = [event_data(event) for event in self.events]
        return [json.loads(one) for one in data if one and one != b"[DONE]"]

    @property
    def done(self) -> bool:
        """Whether a stream came to its proper end."""
        return self.over and self.error is None and self.events[-1:] == [b"data: [DONE]\n\n"]

    def _choices(self, index: int, messages: list[Any]) -> list[Any]:
        found = (one for message in messages for one in message.get("choices", ()))
        return [one for one in found if one["index"] == index]

    def texts(self, index: int = 0) -> list[str]:
        """The text of each token of a choice of a stream."""
        choices = self._choices(index, self.chunks)
        return [_said(one) for one in choices if "role" not in one.get("delta", one)]

    @property
    def text(self) -> str:
        return self.text_of(0)

    def text_of(self, index: int) -> str:
        return "".join(
            map(_said, self._choices(index, self.chunks if self.events else [self.json]))
        )

    def reasons(self, index: int = 0) -> tuple[str, object]:
        """Finish reason and stop reason of a choice."""
        last = self._choices(index, self.chunks if self.events else [self.json])[-1]
        return last["finish_reason"], last["stop_reason"]


@dataclass(frozen=True)
class Seen:
    """A request as an engine received it."""

    engine: str
    request: HttpRequest
    at_s: float

    @property
    def path(self) -> str:
        return self.request.path.decode()

    @property
    def values(self) -> Any:
        return json.loads(self.request.body)

    def header(self, name: bytes) -> bytes | None:
        return self.request.header(name)


Handler = Callable[[str, HttpRequest, Reply], None]


def answering(status: int, body: bytes, *, kind: bytes | None = b"application/json") -> Handler:
    """Return a handler that gives one answer, of a media type if it has one."""
    headers = [] if kind is None else [(b"content-type", kind)]
    return lambda _engine, _request, reply: reply.send(status, headers, body)


class Site:
    """A proxy before emulated engines, and a client that speaks to each of them."""

    def __init__(self, world: World) -> None:
        self.world = world  # The proxy and its engines.
        self.loop = world.loop
        self.fleet = world.fleet
        # What the engines received, but for what the proxy asks them by itself.
        self.seen: list[Seen] = []
        # Paths that the engines answer otherwise than an emulated engine does.
        self.handlers: dict[bytes, Handler] = {}
        self.rank_handlers: dict[bytes, Handler] = {}  # Likewise, of the decode engines alone.
        # Paths that engines do not have whose names begin so.
        self.lacking: dict[bytes, tuple[str, ...]] = {}
        self._endpoints: dict[int, Endpoint] = {}

    def take(self, engine: str, request: HttpRequest, reply: Reply) -> bool:
        """Note what an engine received; return whether it was answered."""
        own = request.path == b"/v1/models" and request.header(b"x-request-id") is None
        if not own and request.path not in (b"/health", b"/metrics", b"/version"):
            self.seen.append(Seen(engine, request, self.loop.time()))
        if engine.startswith(self.lacking.get(request.path, ())):
            reply.send(404, [(b"content-type", b"application/json")], b'{"detail":"Not Found"}')
            return True
        own_of_ranks = self.rank_handlers if engine.startswith("decode") else {}
        handler = own_of_ranks.get(request.path) or self.handlers.get(request.path)
        if handler is not None:
            handler(engine, request, reply)
        return handler is not None

    def received(self, role: str, path: str | None = None) -> list[Seen]:
        """Return what the engines of a role received, in order."""
        return [s for s in self.seen if s.engine.startswith(role) and path in (None, s.path)]

    def send(
        self,
        path: str,
        values: object = b"",
        *,
        method: str = "POST",
        headers: Headers | None = None,
        port: int | None = None,
    ) -> Exchanged:
        """Begin an exchange with the proxy; `values` may be JSON or bytes."""
        port = self.world.port if port is None else port
        if port not in self._endpoints:
            self._endpoints[port] = Endpoint("127.0.0.1", port)
        exchanged = Exchanged()
        exchanged.call = self._endpoints[port].request(
            method.encode(),
            path.encode(),
            headers or [],
            values if isinstance(values, bytes) else json.dumps(values).encode(),
            exchanged,
        )
        return exchanged

    async def post(self, path: str, values: object, headers: Headers | None = None) -> Exchanged:
        return await self.send(path, values, headers=headers).end()

    async def get(self, path: str, headers: Headers | None = None) -> Exchanged:
        return await self.send(path, method="GET", headers=headers).end()

    async def ask(self, engine: str, path: str, values: object, method: str = "POST") -> Exchanged:
        port = self.fleet.engine(engine).port
        return await self.send(path, values, method=method, port=port).end()

    async def admin(self, path: str, values: object = None, *, method: str = "GET") -> Exchanged:
        """Post an order to the admin listener, or get one of its pages."""
        assert self.world.plane.admin is not None
        port = self.world.plane.admin.port
        if values is None:
            return await self.send(path, method=method, port=port).end()
        headers = [(b"content-type", b"application/json")]
        return await self.send(path, values, headers=headers, port=port).end()

    async def state(self) -> Any:
        """Return the state from the admin page."""
        return (await self.admin("/admin/state?requests=1")).json["state"]

    async def until(
        self, condition: Callable[[], bool], limit_s: float = 60.0, *, every_s: float = 0.001
    ) -> None:
        """Wait for something that sets no event."""
        end_s = self.loop.time() + limit_s
        while not condition():
            assert self.loop.time() < end_s, f"not within {limit_s:g} s"
            await asyncio.sleep(every_s)

    async def ended(self, count: int = 1) -> list[RequestRecord]:
        """Return the requests that have ended, in order, once there are so many."""
        await self.until(lambda: len(self.world.ended) >= count)
        return self.world.ended

    async def rest(self, limit_s: float = 60.0) -> None:
        """Wait until nothing is held anywhere, and check that the books say so."""
        world = self.world
        fleets = world.fleets.values() if isinstance(world, GroupWorld) else [self.fleet]
        deployments = world.plane.deployments.values()
        await self.until(
            lambda: (
                not any(one.driver.sessions for one in deployments)
                and all(fleet.idle for fleet in fleets)
            ),
            limit_s,
            every_s=0.05,  # Nothing follows that a later look could miss.
        )
        for deployment in deployments:
            at_rest(deployment)
        assert not any(front.pass_through.in_flight for front in world.fronts)

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()


def at_rest(deployment: Deployment) -> None:
    """Check that the books of a deployment say that nothing is held."""
    scheduler = deployment.driver.scheduler
    scheduler.check()
    assert not scheduler.requests
    assert not scheduler.ledger.loads.any()
    assert not any(scheduler.prefillers.held_tokens)
    assert not any(scheduler.prefillers.prefills)
    assert not any(prefiller.hand_offs for prefiller in deployment.instances.prefillers)
    assert not deployment.driver.context.hand_offs
    states = deployment.tenancy.states()
    assert not [one for one in states if one.in_flight or one.waiting]


Scenario = Callable[[Site], Awaitable[None]]


async def _play_in(world: World, scenario: Scenario, *, at_rest: bool) -> None:
    """Play a scenario in a world that is not started yet."""
    site = Site(world)
    answer = Routes.answer

    def tapped(routes: Routes, request: HttpRequest, reply: Reply) -> None:
        engine = routes._engine
        name = world.engine_name(engine.url) if isinstance(world, GroupWorld) else engine.name
        if not site.take(name, request, reply):
            answer(routes, request, reply)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routes, "answer", tapped)
        await world.start()
        try:
            await scenario(site)
            if at_rest:
                await site.rest()
        finally:
            site.close()
            await world.close()


def play(
    scenario: Scenario,
    *,
    flags: Mapping[str, object] | None = None,
    at_rest: bool = True,
    tenants: str = "",
    **changes: Any,
) -> None:
    """Play a scenario in virtual time, before a small fleet; then nothing may be held anywhere."""
    engines: dict[str, Any] = {"model": "tiny", "prefillers": 2, "ranks": 2, "max_model_len": 4096}

    async def main(loop: VirtualLoop) -> None:
        settings = WorldSettings(
            EmulationSettings(**(engines | changes)),
            {"admin": True, "admin_port": 0, **(flags or {})},
            tenants,
        )
        await _play_in(World(settings, loop, random.Random(7)), scenario, at_rest=at_rest)

    run(main, seed=1, limit_s=10_000.0)


SMALL = EmulationSettings(
    model="small", prefillers=1, ranks=2, max_model_len=4096, mean_output_tokens=16
)
LARGE = EmulationSettings(
    model="large",
    prefillers=2,
    ranks=2,
    max_model_len=4096,
    mean_output_tokens=16,
    step_base_ns=40_000_000,
)


def play_groups(
    scenario: Scenario,
    *,
    groups: Mapping[str, GroupSettings] | None = None,
    flags: Mapping[str, object] | None = None,
    at_rest: bool = True,
    **more: Any,
) -> None:
    """Play a scenario before two groups of engines, `small` and `large`, unless it names other ones."""

    async def main(loop: VirtualLoop) -> None:
        world = GroupWorld(
            groups or {"small": GroupSettings(SMALL), "large": GroupSettings(LARGE)},
            loop,
            random.Random(7),
            flags={"admin": True, "admin_port": 0, **(flags or {})},
            **more,
        )
        await _play_in(world, scenario, at_rest=at_rest)

    run(main, seed=1, limit_s=10_000.0)


served = played_by(play)
served_by_groups = played_by(play_groups)

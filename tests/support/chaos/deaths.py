"""Decode engines that die under greedy streams, one after the other: what the clients get."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.support.chaos.clients import Client, ClientEnding, Visit, ask_all
from tests.support.chaos.expectation import (
    Expectation,
    TextOracle,
    error_of,
    events_of,
)
from tests.support.chaos.poison import client_name
from tests.support.chaos.requests import (
    CHAT,
    COMPLETIONS,
    TOKENS,
    TOOLS,
    ClientRequest,
    as_agents,
    of_tokens,
)
from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.steps import STEPS
from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Rank
from balanceroute.proxy.live.request.shared import MOST_DEATHS
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.wire.sse import event_data

_MODEL = "emulated"
_RANKS = 8
_HALF = 0.5
_MORE = 0.2
_ITEMS = {"type": "array", "items": {"type": "string"}}
_SCHEMA = {"type": "object", "properties": {f"m{number}": _ITEMS for number in range(30)}}
# Of chats of agents without tools.
_KINDS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.5, "bad_words": ["never"]},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": _SCHEMA},
        }
    },
]
_BATCH_LIMIT = 16
_GAP_S = 0.03
_PAUSE_S = 3.0
_DOWN_S = 0.4


@dataclass(slots=True)
class Deaths:
    """What came of greedy streams."""

    killed: int = 0  # Engines, each of which started again.
    hit: int = 0  # Streams whose rank died.
    exact: int = 0  # Streams that were, byte for byte, what one engine answers.
    failed: int = 0  # Those that ended with an error, after a right beginning.
    # Those of `failed` under which two engines had died, so that none goes on with them.
    twice: int = 0
    # Those that were neither, or that were on more engines that died, a line each.
    wrong: list[str] = field(default_factory=list)
    # Of each stream that went on, its longest gap between two events, in seconds.
    gaps_s: list[float] = field(default_factory=list)
    held: int = 0  # Requests that the proxy still had at the end.
    under: Counter[str] = field(default_factory=Counter)  # Engines that died under each request.


def kill_decoders(
    seed: int, *, requests: int, resume: str = "exact", agents: float = 0.0, dp_size: int = 1
) -> Deaths:
    """Send greedy streams through a proxy while decode engines die.

    Args:
        seed: Draws the requests and the deaths.
        requests: How many.
        resume: The proxy's setting.
        agents: The share that is as agents ask: chats, messages and responses with tools, JSON schemas or
            penalties, of a model with thoughts. With 0 none has thoughts.
        dp_size: Ranks that end together, a second behind the one that is killed.
    """
    engines = EmulationSettings(
        ranks=_RANKS,
        batch_limit=_BATCH_LIMIT,
        step_base_ns=10_000_000,
        model=_MODEL,
        merged_outputs=0.1,
        partial_utf8=0.1,
        reasoning_parser=agents > 0.0,
        dp_size=dp_size,
    )
    flags = {"batch": _BATCH_LIMIT, "resume": resume, "dp_size": dp_size}
    settings = WorldSettings(engines, flags)
    return run(lambda loop: _kill_decoders(loop, settings, seed, requests, agents), seed=seed)


async def _kill_decoders(
    loop: VirtualLoop, settings: WorldSettings, seed: int, requests: int, agents: float
) -> Deaths:
    rng = random.Random(f"deaths {seed}")
    world = World(settings, loop, rng)
    await world.start()
    oracle = TextOracle(settings.engines)
    await oracle.start()
    found = Deaths()
    drawn = [_draw(rng, number, agents) for number in range(requests)]
    killer = loop.create_task(_kill(world, rng, found))
    clients = await ask_all(world, drawn, gap_s=_GAP_S)
    killer.cancel()
    for request, client in zip(drawn, clients, strict=True):
        await _judge(request, client, oracle, found)
    for record in world.ended:
        found.hit += (
            bool(record.resumes) or record.status != 200 or record.outcome is not Outcome.OK
        )
        if record.resumes and record.outcome is Outcome.OK:
            found.gaps_s.append(record.itl_max_ns / 1e9)
    found.held = len(world.scheduler.requests)
    await oracle.close()
    await world.close()
    return found


def _draw(rng: random.Random, number: int, agents: float) -> ClientRequest:
    prompt = " ".join(f"w{rng.randrange(1_000)}" for _ in range(rng.randrange(1, 60)))
    values: dict[str, Any] = {
        "model": _MODEL,
        "temperature": 0,
        "stream": True,
        "max_tokens": rng.randrange(20, 200),
    }
    if rng.random() < _HALF:
        values["stream_options"] = {"include_usage": True}
    chat = rng.random() < _HALF
    more = random.Random(f"more {number} {prompt}")
    if more.random() < _MORE:
        # Parts of many words that the model says, and one that it never does.
        values["stop"] = more.choice(["1234", ["77 t", "never said"], ["\n", "t99"]])
    if more.random() < _MORE:
        values["logprobs"] = chat or more.randrange(4)
    path = CHAT if chat else COMPLETIONS
    text = f"r{number} {prompt}"
    values |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if not chat and "stop" not in values and more.random() < _HALF:
        prompt_ids = [20_000 + number, *(more.randrange(1_000) for _ in range(more.randrange(60)))]
        tokens = of_tokens(values | {"prompt": prompt_ids})
        assert tokens is not None
        path, values = TOKENS, tokens
    if agents and more.random() < agents:
        values |= {"messages": [{"role": "user", "content": text}]}
        values.pop("prompt", None)
        if "logprobs" in values:
            values["logprobs"] = True
        if more.random() < _HALF:
            values |= {"tools": TOOLS, "tool_choice": more.choice(["auto", "required"])}
        path, values = as_agents(more, values)
        values["temperature"] = 0  # Not all have it.
        if path == CHAT and "tools" not in values:
            values |= more.choice(_KINDS)
    return ClientRequest(number, path, values, json.dumps(values).encode(), f"death-{number}")


async def _kill(world: World, rng: random.Random, found: Deaths) -> None:
    """Kill one decode engine after the other; each starts again, with its group, before the next one dies."""
    down_s = _DOWN_S
    if world.fleet.settings.dp_size > 1:
        down_s += world.fleet.settings.dp_death_s
    while True:
        await asyncio.sleep(rng.uniform(0.0, _PAUSE_S))
        victim = rng.randrange(_RANKS)
        name = f"decode/{victim}"
        on = {client_name(call.name) for call in world.fleet.engine(name).exchanges.values()}
        world.fleet.kill(name)
        found.killed += 1
        found.under.update(on)
        await asyncio.sleep(down_s)
        await world.fleet.restore(name)


async def _judge(request: ClientRequest, client: Client, oracle: TextOracle, found: Deaths) -> None:
    received = client.answers[0]
    # Behind the cut, the engine may put tokens into other events.
    expected = Expectation(request, await oracle.answer(request), reworded=True)
    body = bytes(received.body)
    if received.status == 200 and received.ending is ClientEnding.COMPLETE:
        wrong = expected.differs(body)
        found.exact += not wrong
    else:
        found.failed += 1
        found.twice += found.under[request.request_id] == MOST_DEATHS
        events = [event for event in events_of(body) if error_of(event_data(event)) is None]
        wrong = expected.strays(events) if received.status == 200 else ""
    if found.under[request.request_id] > MOST_DEATHS:
        wrong = f"{found.under[request.request_id]} engines died under it"
    if wrong:
        found.wrong.append(f"{request.request_id}: {wrong}")


# Decode ranks that freeze, pause, are slow and send in bursts, for as long as wanted: which ones does the
# proxy leave out?
#
# What each engine does is known here. So it can be said of every time that the proxy leaves a
# rank out whether that rank stood still, and of every freeze how long it took until it was left
# out.

_FROZEN_RANKS, _FREEZES_BATCH_LIMIT, _STEP_S = 4, 8, 0.2

_CLIENTS = 14
_TOKENS = (10, 120)
_WHOLE_SHARE, _SLOW_READERS = 0.1, 0.1
# What an engine sends is joined in bursts, so many seconds apart; 0 for none.
_BURSTS_S = (0.0, 0.0, 0.5, 1.5, 3.0)
_WIRES_S = 60.0
# With a step and the time between two looks a pause is shorter than any limit.
_PAUSES_S = (0.2, 1.2)
_FREEZES_S, _STANDSTILLS_S, _HOLDS_S = (5.0, 15.0), (2.5, 6.0), (0.3, 5.0)
_BETWEEN_S = (1.0, 12.0)
# A freeze says nothing of a rank that the proxy does not know well enough to judge.
_STREAMS = 2
_LATE_S = 1.0
_LOOK_S = 0.05
_WARM_S = 15.0


@dataclass(slots=True)
class Freezes:
    """What came of an hour, say."""

    frozen: int = 0  # Ranks that froze under streams, at a pace that the proxy knew.
    found_s: list[float] = field(default_factory=list)  # After how long each of them was left out.
    # How long each might be silent by its own pace.
    limits_s: list[float] = field(default_factory=list)
    # Those that were not left out in time, a line each.
    missed: list[str] = field(default_factory=list)
    # Ranks that were left out and did not stand still, a line each.
    false: list[str] = field(default_factory=list)
    paused: int = 0  # Ranks that stood still for a moment.
    held: int = 0  # Times all ranks waited for one.
    told: int = 0  # How often the proxy counted that.
    stood: int = 0  # Times the proxy itself stood still.
    requests: int = 0  # All of them.
    # Answers that were not an engine's own, or no whole answer, a line each.
    wrong: list[str] = field(default_factory=list)
    # Of each stream that went on elsewhere, its longest silence.
    gaps_s: list[float] = field(default_factory=list)
    left: int = 0  # Requests that the proxy still had at the end.


def freeze_ranks(seed: int, *, seconds: float, resume: str = "exact") -> Freezes:
    """Serve greedy requests while decode ranks freeze, pause, and change their pace.

    Args:
        seed: Draws everything.
        seconds: For how long, in virtual time.
        resume: The proxy's setting.
    """
    engines = EmulationSettings(
        ranks=_FROZEN_RANKS,
        batch_limit=_FREEZES_BATCH_LIMIT,
        step_base_ns=round(1e9 * _STEP_S),
        model=_MODEL,
        merged_outputs=0.1,
        lease_s=60.0,
    )
    settings = WorldSettings(engines, {"batch": _FREEZES_BATCH_LIMIT, "resume": resume})
    trial = _Trial(seed, settings, seconds)
    return run(trial.run, seed=seed, limit_s=2 * seconds + 1_000.0)


class _Trial:
    def __init__(self, seed: int, settings: WorldSettings, seconds: float) -> None:
        self._rng = random.Random(f"freezes {seed}")
        self._settings = settings
        self._seconds = seconds
        self._found = Freezes()
        self._asked: list[tuple[ClientRequest, Client]] = []
        # By engine, since when and until when it stood still last.
        self._still: dict[str, tuple[float, float]] = {}
        self._loop: VirtualLoop
        self._world: World
        self._end_s = 0.0

    async def run(self, loop: VirtualLoop) -> Freezes:
        self._loop = loop
        self._world = world = World(self._settings, loop, self._rng)
        await world.start()
        oracle = TextOracle(self._settings.engines)
        await oracle.start()
        self._end_s = loop.time() + self._seconds
        works = [loop.create_task(one) for one in (self._watch(), self._change_wires())]
        clients = [loop.create_task(self._ask()) for _ in range(_CLIENTS)]
        await asyncio.sleep(_WARM_S)
        await self._disturb()
        self._found.told = world.plane.deployment.driver.veto.standstills
        await asyncio.gather(*clients)
        for work in works:
            work.cancel()
        for request, client in self._asked:
            await self._judge(request, client, oracle)
        await asyncio.sleep(1.0)
        for record in world.ended:
            if record.resumes and record.outcome is Outcome.OK:
                self._found.gaps_s.append(record.itl_max_ns / 1e9)
        self._found.left = len(world.scheduler.requests)
        await oracle.close()
        await world.close()
        return self._found

    # The clients.

    async def _ask(self) -> None:
        while self._loop.time() < self._end_s:
            request = self._draw()
            pauses = ((2_000, 8.0),) if self._rng.random() < _SLOW_READERS else ()
            client = Client(Visit(0.0, (request,), pauses=pauses), on_left=lambda _: None)
            self._asked.append((request, client))
            await self._loop.create_connection(lambda c=client: c, "127.0.0.1", self._world.port)  # type: ignore[misc]
            await client.over.wait()

    def _draw(self) -> ClientRequest:
        number = self._found.requests
        self._found.requests += 1
        values: dict[str, object] = {
            "model": _MODEL,
            "temperature": 0,
            "stream": self._rng.random() >= _WHOLE_SHARE,
            "max_tokens": self._rng.randrange(*_TOKENS),
            "messages": [{"role": "user", "content": f"r{number} of a freeze"}],
        }
        return ClientRequest(number, CHAT, values, json.dumps(values).encode(), f"freeze-{number}")

    async def _judge(self, request: ClientRequest, client: Client, oracle: TextOracle) -> None:
        received = client.answers[0]
        expected = Expectation(request, await oracle.answer(request), reworded=True)
        if received.status != 200 or received.ending is not ClientEnding.COMPLETE:
            wrong = f"status {received.status}, {received.ending}"
        else:
            wrong = expected.differs(bytes(received.body))
        if wrong:
            self._found.wrong.append(f"{request.request_id}: {wrong}")

    # The engines.

    async def _change_wires(self) -> None:
        """Have the engines send in other bursts now and then."""
        while True:
            for engine in self._decoders:
                burst_s = self._rng.choice(_BURSTS_S)
                link = Link(coalesce_s=burst_s) if burst_s else None
                self._loop.network.rule(engine.host, engine.port, link)
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * _WIRES_S)

    async def _disturb(self) -> None:
        kinds = (self._pause, self._pause, self._freeze, self._freeze, self._hold, self._stand)
        while self._loop.time() < self._end_s:
            await self._rng.choice(kinds)()
            await asyncio.sleep(self._rng.uniform(*_BETWEEN_S))

    async def _pause(self) -> None:
        """Have one rank do nothing for a moment."""
        self._found.paused += 1
        await self._freeze_one("alone", _PAUSES_S)

    async def _hold(self) -> None:
        """Have all ranks wait for one."""
        self._found.held += 1
        await self._freeze_one("barrier", _STANDSTILLS_S)

    async def _freeze_one(self, kind: str, times_s: tuple[float, float]) -> None:
        name = self._rng.choice(self._decoders).name
        self._world.fleet.faults.set(name, frozen=kind)
        await asyncio.sleep(self._rng.uniform(*times_s))
        self._world.fleet.faults.set(name, frozen=None)

    async def _stand(self) -> None:
        """Have the proxy itself stand still."""
        self._found.stood += 1
        seconds = self._rng.uniform(*_HOLDS_S)
        self._world.stand_still(seconds)
        await asyncio.sleep(seconds)

    async def _freeze(self) -> None:
        """Freeze one rank, or its host, until it was left out for a while."""
        number = self._rng.randrange(_FROZEN_RANKS)
        engine, rank = self._decoders[number], self._ranks[number]
        limit_s = self._limit_s(rank)
        host = self._rng.random() < 0.5
        if host:
            self._loop.network.silence(engine.host, engine.port)
        else:
            self._world.fleet.faults.set(engine.name, frozen="alone")
        begin_s = self._loop.time()
        self._still[engine.name] = begin_s, float("inf")
        end_s = begin_s + (limit_s or 0.0) + self._rng.uniform(*_FREEZES_S)
        out_s: float | None = None
        while self._loop.time() < end_s:
            if out_s is None and (rank.still or not rank.usable):
                out_s = self._loop.time() - begin_s
            await asyncio.sleep(_LOOK_S)
        self._loop.network.restore(engine.host, engine.port)
        self._world.fleet.faults.set(engine.name, frozen=None)
        self._still[engine.name] = begin_s, self._loop.time()
        if limit_s is None:
            return
        self._found.frozen += 1
        self._found.limits_s.append(limit_s)
        if out_s is None or out_s > limit_s + _LATE_S:
            took = "not at all" if out_s is None else f"after {out_s:.2f} s"
            self._found.missed.append(
                f"{engine.name} at {begin_s:.1f} s: {took}, limit {limit_s:.2f} s"
            )
        else:
            self._found.found_s.append(out_s)

    def _limit_s(self, rank: Rank) -> float | None:
        """Return for how long a rank may be silent; None if the proxy does not judge it now."""
        driver = self._world.plane.deployment.driver
        started = int(driver.scheduler.ledger.started[rank.id])
        elsewhere = int(driver.scheduler.ledger.started.sum()) - started
        # Its next burst may have been on its way.
        known_s = driver.veto.limit_s(rank.id)
        judged = rank.usable and not rank.on_trial and started >= _STREAMS and elsewhere >= _STREAMS
        return known_s * (1 + 1 / STEPS) + _STEP_S if judged and known_s is not None else None

    async def _watch(self) -> None:
        """Compare the ranks that the proxy leaves out with those that stand still."""
        veto = self._world.plane.deployment.driver.veto
        known = dict(veto.vetoes)
        while True:
            await asyncio.sleep(_LOOK_S)
            for rank in self._ranks:
                if veto.vetoes[rank.id] != known.get(rank.id, 0):
                    known[rank.id] = veto.vetoes[rank.id]
                    self._check(self._decoders[rank.id])

    def _check(self, engine: Engine) -> None:
        now_s = self._loop.time()
        since_s, until_s = self._still.get(engine.name, (float("inf"), 0.0))
        # Its trial may have begun while it stood still.
        if not (now_s - since_s >= 1.5 and now_s <= until_s + _LATE_S):
            self._found.false.append(f"{engine.name} at {now_s:.1f} s")

    @property
    def _decoders(self) -> list[Engine]:
        return self._world.fleet.engines[self._world.fleet.settings.prefillers :]

    @property
    def _ranks(self) -> list[Rank]:
        return self._world.plane.deployment.instances.ranks

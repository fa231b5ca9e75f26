"""Requests that kill the engines that compute them, and how many die of each.

Such a prompt is drawn for some seeds. Its engine dies as it begins with the prompt, with its first token,
or some tokens later, wherever the request is, and starts again after a while.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from balanceroute.proxy.emulate.engine import Engine
from balanceroute.proxy.emulate.exchange import Exchange
from balanceroute.proxy.live.request.suspects import MOST_DEATHS
from balanceroute.proxy.testing.chaos.clients import Visit
from balanceroute.proxy.testing.chaos.faults import Act, Injection
from balanceroute.proxy.testing.chaos.world import Part, World

# How often engines are looked at: no step is as short.
_LOOK_S = 0.001
_SHARE = 0.3
# With these nobody can see that an engine has died, or sees it late, when the request has gone on.
_HIDING = frozenset(
    {Act.LINK, Act.MEDDLE, Act.NAME, Act.SILENCE, Act.STANDSTILL, Act.SUSPENSION, Act.DESCRIPTORS}
)


class When(Enum):
    """When an engine dies of a prompt."""

    PREFILL = "in its prefill"
    FIRST = "at its first token"
    LATER = "after some tokens"


@dataclass(frozen=True, slots=True)
class Poison:
    """One request that kills engines.

    Attributes:
        name: Its request id, which no other request has, as none has its prompt.
        tokens: Those that an engine emits before it dies.
        down_s: How long the engine is down.
    """

    name: str
    when: When
    tokens: int
    down_s: float

    def is_due(self, exchange: Exchange) -> bool:
        """Return whether an engine dies of it now."""
        return sum(one.choice.emitted for one in exchange.sequences) >= self.tokens


def draw_poisons(seed: int, visits: Sequence[Visit]) -> tuple[Poison, ...]:
    """Return the requests that kill engines; for most seeds none."""
    rng = random.Random(f"poison {seed}")
    requests = [one for visit in visits for one in visit.requests]
    bodies, names = Counter(r.body for r in requests), Counter(r.request_id for r in requests)
    own = [
        r
        for r in requests
        if bodies[r.body] == names[r.request_id] == 1 and not (r.forbidden or r.deadline_ms)
    ]
    if rng.random() >= _SHARE or not own:
        return ()
    chosen = rng.sample(own, min(len(own), rng.choice([1, 2, 3])))
    poisons = []
    for one in chosen:
        when = rng.choice(list(When))
        tokens = {When.PREFILL: 0, When.FIRST: 1, When.LATER: rng.randint(2, 6)}[when]
        poisons.append(Poison(one.request_id, when, tokens, rng.uniform(0.5, 3.0)))
    return tuple(poisons)


def without_hiding(injections: Sequence[Injection]) -> tuple[Injection, ...]:
    """Return the faults with which it is seen at once that an engine has died."""
    return tuple(one for one in injections if one.act not in _HIDING)


class Poisoner:
    """Lets engines of a world die of the requests that kill them.

    Attributes:
        deaths: Engines that died, by request.
        done: Deaths of each kind.
    """

    def __init__(self, world: World, poisons: Sequence[Poison]) -> None:
        self.deaths: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self._world = world
        self._poisons = {one.name: one for one in poisons}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Look at the engines from now on."""
        if self._poisons:
            self._tasks.add(self._world.loop.create_task(self._look()))

    async def stop(self) -> None:
        """Have all engines serve again, and kill none any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for part in self._world.parts:
            for engine in part.fleet.engines:
                await part.fleet.restore(engine.name)

    def violations(self) -> list[str]:
        """Return what must not be."""
        return [
            f"poison: {count} engines died of {name}, {self._poisons[name].when.value}"
            for name, count in self.deaths.items()
            if count > MOST_DEATHS
        ]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for part in self._world.parts:
                for engine in part.fleet.engines:
                    self._look_at(part, engine)

    def _look_at(self, part: Part, engine: Engine) -> None:
        for exchange, call in engine.exchanges.items():
            name = call.name.removeprefix("tokens-")  # Of answers of token ids.
            poison = self._poisons.get(name) or self._poisons.get(name.rpartition("-")[0])
            if engine.alive and poison is not None and poison.is_due(exchange):
                self._kill(part, engine, poison)
                return

    def _kill(self, part: Part, engine: Engine, poison: Poison) -> None:
        self._world.journal.write("poison", poison.name, engine.name)
        self.deaths[poison.name] += 1
        self.done[f"client: kills its engine {poison.when.value}"] += 1
        part.fleet.kill(engine.name)
        self._tasks.add(self._world.loop.create_task(self._restore(part, engine, poison.down_s)))

    async def _restore(self, part: Part, engine: Engine, down_s: float) -> None:
        await asyncio.sleep(down_s)
        await part.fleet.restore(engine.name)

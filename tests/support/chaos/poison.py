"""Requests that kill the engines that compute them, and how many die of each.

Such a prompt is drawn for some seeds. Its engine dies as it begins with the prompt, with its first token,
or some tokens later, wherever the request is, and starts again after a while.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tests.support.chaos.clients import Visit
from tests.support.chaos.faults import Act, Injection
from tests.support.chaos.world import Part, World

from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.lab.emulate.exchange import EngineExchange
from balanceroute.proxy.lab.emulate.hub import EngineCall
from balanceroute.proxy.live.request.shared import MOST_DEATHS

# How often engines are looked at: no step is as short.
_LOOK_S = 0.001
# After a second death nothing that had not begun is on an engine any more, and nothing is sent to one.
_KNOWN_S = 0.01
_ENDED_S = 0.2
_SHARE = 0.3
# With all other faults the proxy cannot see that an engine has died, or sees a death that was none.
_CLEAR = frozenset({Act.POLICY, Act.DECISION, Act.WALL_CLOCK, Act.DISK, Act.KEYS, Act.DRAIN})
_CLEAR_CHANGES = frozenset(
    {
        *("status_400", "status_413", "status_429", "status_500", "status_503", "retry_after_s"),
        *("delay_s", "unhealthy", "malformed_scrape", "slow_scrape_s", "lease_s", "eos_first"),
        *("drop_kv_params", "alien_kv_params", "recomputed_after_tokens", "keep_alive_s"),
    }
)


class When(Enum):
    """When an engine dies of a prompt."""

    PREFILL = "in its prefill"
    FIRST = "at its first token"
    LATER = "after some tokens"


@dataclass(frozen=True, slots=True)
class Poison:
    """One request that kills engines."""

    name: str  # Its request id, which no other request has, as none has its prompt.
    when: When
    tokens: int  # Those that an engine emits before it dies.
    down_s: float  # How long the engine is down.
    again_s: tuple[float, ...]  # When the client sends it again, each time after the time before.

    def is_due(self, exchange: EngineExchange) -> bool:
        """Return whether an engine dies of it now."""
        return sum(one.choice.emitted for one in exchange.sequences) >= self.tokens


def client_name(name: str) -> str:
    """Return a client's name, of two words, for a request that has `name` at an engine: the proxy adds to it."""
    words = name.removeprefix("tokens-").split("-")  # Of answers of token ids.
    return "-".join(words[:2])


def draw_poisons(seed: int, visits: Sequence[Visit]) -> tuple[Poison, ...]:
    """Return the requests that kill engines; for most seeds none."""
    rng = random.Random(f"poison {seed}")
    if rng.random() >= _SHARE:
        return ()
    requests = [one for visit in visits for one in visit.requests]
    bodies, names = Counter(r.body for r in requests), Counter(r.request_id for r in requests)
    own = [
        visit
        for visit in visits
        if not (visit.departure or visit.pauses or visit.requests[0].forbidden)
        and len(visit.requests) == 1
        and bodies[visit.requests[0].body] == names[visit.requests[0].request_id] == 1
    ]
    poisons = []
    for visit in rng.sample(own, min(len(own), rng.choice([1, 2, 3]))):
        when = rng.choice(list(When))
        tokens = {When.PREFILL: 0, When.FIRST: 1, When.LATER: rng.randint(2, 6)}[when]
        again_s = tuple(rng.uniform(0.4, 2.0) for _ in range(rng.choice([0, 2, 3])))
        name = visit.requests[0].request_id
        poisons.append(Poison(name, when, tokens, rng.uniform(0.5, 3.0), again_s))
    return tuple(poisons)


def with_repetitions(visits: Sequence[Visit], poisons: Sequence[Poison]) -> tuple[Visit, ...]:
    """Return visits with those in which clients send such a prompt again."""
    again = []
    number = max(one.number for visit in visits for one in visit.requests)
    for poison in poisons:
        first = next(one for one in visits if one.requests[0].request_id == poison.name)
        start_s = first.start_s
        for place, pause_s in enumerate(poison.again_s):
            start_s += pause_s
            number += 1
            name = f"{poison.name}-again{place}"
            request = replace(first.requests[0], number=number, request_id=name)
            again.append(replace(first, start_s=start_s, requests=(request,)))
    return tuple(sorted([*visits, *again], key=lambda visit: visit.start_s))


def without_hiding(injections: Sequence[Injection]) -> tuple[Injection, ...]:
    """Return the faults beside which it is seen at once whether an engine has died."""
    return tuple(
        one
        for one in injections
        if one.act in _CLEAR or (one.act is Act.BOARD and one.changes.keys() <= _CLEAR_CHANGES)
    )


class Poisoner:
    """Lets engines of a world die of the requests that kill them."""

    def __init__(self, world: World, poisons: Sequence[Poison]) -> None:
        # When engines died of each prompt, that of equal requests which were there already left
        # out.
        self.deaths: defaultdict[str, list[float]] = defaultdict(list)
        self.done: Counter[str] = Counter()  # Deaths of each kind.
        self._world = world
        self._poisons = {one.name: one for one in poisons}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
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
        return [
            f"poison: {len(died)} engines died of {name}, {self._poisons[name].when.value}"
            for name, died in self.deaths.items()
            if len(died) > MOST_DEATHS
        ]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for part in self._world.parts:
                for engine in part.fleet.engines:
                    self._look_at(part, engine)

    def _look_at(self, part: Part, engine: Engine) -> None:
        for exchange, call in engine.exchanges.items():
            poison = self._poisons.get(client_name(call.name))
            if poison is not None and poison.when is When.PREFILL and call.remote_prefill:
                continue  # It only waits for the prefiller.
            if engine.alive and poison is not None and poison.is_due(exchange):
                ends_anyway = any(not one.alive for one in part.fleet.group(engine))
                if not (ends_anyway or self._may_be_there(call, poison)):
                    self.deaths[poison.name].append(self._world.loop.time())
                self._kill(part, engine, poison)
                return

    def _may_be_there(self, call: EngineCall, poison: Poison) -> bool:
        """Return whether a copy may be on an engine although two have died, as it is not recalled.

        It was sent before the second death, and since then it has begun to answer, or there was no time to end it; or
        it was sent before the first death, when it was not known yet.
        """
        died, now_s = self.deaths[poison.name], self._world.loop.time()
        if len(died) < MOST_DEATHS:
            return False
        first_s, second_s = died[0], died[MOST_DEATHS - 1]
        if call.arrived_s > second_s + _KNOWN_S:
            return False
        began = call.exchange.streams and poison.when is When.LATER
        return began or now_s <= second_s + _ENDED_S or call.arrived_s <= first_s + _KNOWN_S

    def _kill(self, part: Part, engine: Engine, poison: Poison) -> None:
        self._world.journal.write("poison", poison.name, engine.name)
        self.done[f"client: kills its engine {poison.when.value}"] += 1
        part.fleet.kill(engine.name)
        self._tasks.add(self._world.loop.create_task(self._restore(part, engine, poison.down_s)))

    async def _restore(self, part: Part, engine: Engine, down_s: float) -> None:
        await asyncio.sleep(down_s)
        await part.fleet.restore(engine.name)

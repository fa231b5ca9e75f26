"""Decode engines that die under greedy streams, one after the other: what the clients get."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.request.suspects import MOST_DEATHS
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.testing.chaos.answer_reader import Ending
from balanceroute.proxy.testing.chaos.ask_all import ask_all
from balanceroute.proxy.testing.chaos.clients import Client
from balanceroute.proxy.testing.chaos.expectation import Expectation, error_of, events_of
from balanceroute.proxy.testing.chaos.oracle import Oracle
from balanceroute.proxy.testing.chaos.poison import client_name
from balanceroute.proxy.testing.chaos.requests import (
    CHAT,
    COMPLETIONS,
    TOKENS,
    TOOLS,
    ClientRequest,
    as_agents,
    of_tokens,
)
from balanceroute.proxy.testing.chaos.world import World, WorldSettings
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run
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
    """What came of greedy streams.

    Attributes:
        killed: Engines, each of which started again.
        hit: Streams whose rank died.
        exact: Streams that were, byte for byte, what one engine answers.
        failed: Those that ended with an error, after a right beginning.
        twice: Those of `failed` under which two engines had died, so that none goes on with them.
        wrong: Those that were neither, or that were on more engines that died, a line each.
        gaps_s: Of each stream that went on, its longest gap between two events, in seconds.
        held: Requests that the proxy still had at the end.
        under: Engines that died under each request.
    """

    killed: int = 0
    hit: int = 0
    exact: int = 0
    failed: int = 0
    twice: int = 0
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    held: int = 0
    under: Counter[str] = field(default_factory=Counter)


def kill_decoders(
    seed: int, *, requests: int, resume: str = "exact", agents: float = 0.0
) -> Deaths:
    """Send greedy streams through a proxy while decode engines die.

    Args:
        seed: Draws the requests and the deaths.
        requests: How many.
        resume: The proxy's setting.
        agents: The share that is as agents ask: chats, messages and responses with tools, JSON schemas or
            penalties, of a model with thoughts. With 0 none has thoughts.
    """
    engines = EmulationSettings(
        ranks=_RANKS,
        batch_limit=_BATCH_LIMIT,
        step_base_ns=10_000_000,
        model=_MODEL,
        merged_outputs=0.1,
        partial_utf8=0.1,
        reasoning_parser=agents > 0.0,
    )
    settings = WorldSettings(engines, {"batch": _BATCH_LIMIT, "resume": resume})
    return run(lambda loop: _kill_decoders(loop, settings, seed, requests, agents), seed=seed)


async def _kill_decoders(
    loop: VirtualLoop, settings: WorldSettings, seed: int, requests: int, agents: float
) -> Deaths:
    rng = random.Random(f"deaths {seed}")
    world = World(settings, loop, rng)
    await world.start()
    oracle = Oracle(settings.engines)
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
    """Kill one decode engine after the other; each starts again before the next one dies."""
    while True:
        await asyncio.sleep(rng.uniform(0.0, _PAUSE_S))
        name = f"decode/{rng.randrange(_RANKS)}"
        on = {client_name(call.name) for call in world.fleet.engine(name).exchanges.values()}
        world.fleet.kill(name)
        found.killed += 1
        found.under.update(on)
        await asyncio.sleep(_DOWN_S)
        await world.fleet.restore(name)


async def _judge(request: ClientRequest, client: Client, oracle: Oracle, found: Deaths) -> None:
    received = client.answers[0]
    # Behind the cut, the engine may put tokens into other events.
    expected = Expectation(request, await oracle.answer(request), reworded=True)
    body = bytes(received.body)
    if received.status == 200 and received.ending is Ending.COMPLETE:
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

"""A request that kills the engines that work on it: how many die of it, and what becomes of the others."""

import asyncio
import json
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.chaos.groups import GroupSettings, GroupWorld
from tests.support.site import Exchanged, Site, play, play_groups, served

from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings
from balanceroute.proxy.live.request.shared import KEPT_S, MOST_DEATHS

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
POISON = [(b"x-request-id", b"poison")]
FLEET: dict[str, Any] = {"prefillers": 6, "ranks": 6, "prefill_base_ns": 20_000_000}
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "die"}], "max_tokens": 20, "ignore_eos": True},
    COMPLETIONS: {"prompt": "die", "max_tokens": 20, "ignore_eos": True},
    MESSAGES: {
        "model": "tiny",
        "messages": [{"role": "user", "content": "die"}],
        "max_tokens": 20,
    },
    RESPONSES: {"input": "die", "max_output_tokens": 20},
    EMBEDDINGS: {"input": "die"},
}


def is_poison(request: "HttpRequest") -> bool:
    return (request.header(b"x-request-id") or b"").startswith(b"poison")


class Poisoned:
    """Has engines of a role die of requests that are named so."""

    def __init__(self, site: Site, role: str, after_s: float = 0.0) -> None:
        self.dead: list[str] = []  # The engines that died, in order.
        self._site, self._take = site, site.take
        self._role, self._after_s = role, after_s
        site.take = self._taken  # type: ignore[method-assign]

    def _taken(self, engine: str, request: "HttpRequest", reply: "Reply") -> bool:
        if not (engine.startswith(self._role) and is_poison(request)):
            return self._take(engine, request, reply)
        if not self._after_s:
            self._kill(engine, reply)
            return True
        self._site.loop.call_later(self._after_s, self._kill, engine, reply)
        return self._take(engine, request, reply)

    def _kill(self, engine: str, reply: "Reply") -> None:
        # One that was aborted is on it no more; one that is answered may have left it something.
        aborted = reply.closed and not reply.started
        if self._site.fleet.engine(engine).alive and not aborted:
            self.dead.append(engine)
            self._site.fleet.kill(engine)


def refused(exchanged: Exchanged) -> bool:
    """Return whether a client is told that its prompt is not tried any more."""
    told = exchanged.header(b"x-should-retry") == b"false"
    return exchanged.status == 502 and told and b"two engines died" in exchanged.body


def spoilt(exchanged: Exchanged) -> bool:
    """Return whether an answer says that it is none: by its status, by an event, or by its end."""
    if exchanged.status != 200:
        return exchanged.status == 502
    return exchanged.error is not None or any("error" in one for one in exchanged.chunks)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize("resume", ["off", "exact", "valid"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("role", "after_s"),
    [("prefill", 0.0), ("prefill", 0.01), ("decode", 0.0), ("decode", 0.08), ("decode", 0.4)],
    ids=["prefill", "in the prefill", "decode", "at the first token", "later"],
)
def test_two_engines_die_of_a_request_and_all_its_repetitions(
    role: str, after_s: float, stream: bool, resume: str, first_token: str
) -> None:
    body = BODIES[CHAT] | {"max_tokens": 60, "stream": stream, "temperature": 0}

    async def scenario(site: Site) -> None:
        poisoned = Poisoned(site, role, after_s)
        for _ in range(3):
            assert spoilt(await site.post(CHAT, body, POISON))
            await asyncio.sleep(0.5)  # As clients do at least.
        assert refused(await site.post(CHAT, body, POISON))
        other = await site.post(CHAT, body | {"stream": not stream}, POISON)
        assert refused(other)
        innocent = body | {"messages": [{"role": "user", "content": "live"}]}
        assert (await site.post(CHAT, innocent)).status == 200
        assert len(poisoned.dead) == 2

    flags = {"resume": resume, "first_token": first_token}
    play(scenario, flags=flags, at_rest=False, **FLEET)


# The path, the body, the role whose engines die, and how they are set.
COPIES: dict[str, tuple[str, dict[str, object], str, dict[str, Any]]] = {
    "prefill": (CHAT, {}, "prefill", {}),
    "decode": (CHAT, {}, "decode", {}),
    "streamed": (CHAT, {"stream": True}, "decode", {}),
    "first token early": (
        CHAT,
        {"stream": True, "temperature": 0},
        "decode",
        {"flags": {"first_token": "prefill"}},
    ),
    "called for": (CHAT, {}, "prefill", {"connector": "mooncake-layerwise"}),
    "direct": (COMPLETIONS, {"echo": True}, "prefill", {"flags": {"direct": "prefill"}}),
    "one engine": (EMBEDDINGS, {}, "prefill", {}),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_on_engines_are_ended_with_the_second_death(kind: str) -> None:
    path, more, role, settings = COPIES[kind]
    body = BODIES[path] | more
    after_s = 2.0

    async def scenario(site: Site) -> None:
        await asyncio.sleep(1.0)
        take, poisoned = site.take, Poisoned(site, role, after_s)
        site.fleet.faults.set(role, hang=True)
        if path == EMBEDDINGS:  # Of which the fault knows nothing.
            poisoned._take = lambda *asked: asked[1].path == path.encode() or take(*asked)
        first = site.send(path, body, headers=POISON)
        await site.until(lambda: len(poisoned.dead) == 1)
        await asyncio.sleep(1.0)  # By now it is on another engine.
        copies = [site.send(path, body, headers=POISON) for _ in range(2)]
        assert refused_late(await first.end())
        assert len(poisoned.dead) == 2
        begin_s = site.loop.time()
        for copy in copies:
            assert refused_late(await copy.end())
        assert site.loop.time() - begin_s < 0.5
        await asyncio.sleep(2 * after_s)
        assert len(poisoned.dead) == 2

    play(scenario, at_rest=False, **(FLEET | settings))


def refused_late(exchanged: Exchanged) -> bool:
    """Return whether a client is told so, which may have had a token."""
    return refused(exchanged) or (
        exchanged.status == 200 and b"two engines died" in exchanged.events[-1]
    )


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS])
@served(at_rest=False, **FLEET)
async def test_the_bound_holds_on_every_route(site: Site, path: str) -> None:
    poisoned = Poisoned(site, "")
    for _ in range(2):
        assert refused(await site.post(path, BODIES[path], POISON))
    exchanged = await site.post(path, BODIES[path], POISON)
    assert refused(exchanged)
    error = exchanged.json["error"]
    assert exchanged.json.get("type") == ("error" if path == MESSAGES else None)
    assert error["type"] == ("api_error" if path == MESSAGES else "BadGatewayError")
    assert len(poisoned.dead) == 2


@pytest.mark.parametrize("direct", ["prefill", "decode"])
@served(flags=lambda direct: {"direct": direct}, at_rest=False, **FLEET)
async def test_the_bound_holds_where_one_engine_does_it_all(site: Site, direct: str) -> None:
    poisoned = Poisoned(site, direct)
    for _ in range(3):
        body = BODIES[COMPLETIONS] | {"echo": True}
        assert refused(await site.post(COMPLETIONS, body, POISON))
    assert len(poisoned.dead) == 2


@served(at_rest=False, connector="mooncake-layerwise", **FLEET)
async def test_the_bound_holds_for_a_prefill_that_a_rank_calls_for(site: Site) -> None:
    poisoned = Poisoned(site, "prefill")
    for _ in range(3):
        assert refused(await site.post(CHAT, BODIES[CHAT], POISON))
    assert len(poisoned.dead) == 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("role", "after_s"),
    [("prefill", 0.0), ("prefill", 0.01), ("decode", 0.0), ("decode", 0.2)],
    ids=["prefill", "in the prefill", "decode", "at the first token"],
)
@served(at_rest=False, **FLEET)
async def test_who_is_on_the_same_engines_gets_its_answer(
    site: Site, role: str, after_s: float, seed: int
) -> None:
    rng = random.Random(seed)
    poisoned = Poisoned(site, role, after_s)
    sent = []
    poison: Exchanged | None = None
    for i in range(24):
        if i == 12:
            poison = site.send(CHAT, BODIES[CHAT], headers=POISON)
        text = " ".join(f"w{rng.randrange(1000)}" for _ in range(30))
        body = {"messages": [{"role": "user", "content": f"{i} {text}"}], "temperature": 0}
        body |= {"max_tokens": rng.randrange(1, 30), "ignore_eos": True}
        sent.append(site.send(CHAT, body))
        await asyncio.sleep(rng.uniform(0.0, 0.01))
    assert poison is not None
    assert refused(await poison.end())
    assert len(poisoned.dead) == 2
    assert [(await one.end()).status for one in sent] == [200] * 24
    assert b"suspected_poison_total 1.0" in (await site.get("/metrics")).body


@pytest.mark.parametrize("direct", ["prefill", "decode"])
def test_who_is_served_by_one_engine_gets_its_answer_too(direct: str) -> None:
    async def scenario(site: Site) -> None:
        # Several at a time on each engine, so that some have to wait for one to themselves.
        body = BODIES[COMPLETIONS] | {"echo": True, "max_tokens": 40}
        sent = [site.send(COMPLETIONS, body | {"prompt": f"w{i} w{i}"}) for i in range(8)]
        await asyncio.sleep(0.3)
        site.fleet.kill(f"{direct}/0")
        answered = [(await one.end()).status for one in sent]
        assert answered == [200] * len(sent)

    fleet = FLEET | {"prefillers": 2, "ranks": 2}
    play(scenario, flags={"direct": direct}, at_rest=False, **fleet)


@pytest.mark.parametrize(
    ("role", "more"),
    [("prefill", {}), ("decode", {}), ("prefill", {"n": 2})],
    ids=["prefill", "decode", "direct"],
)
@pytest.mark.parametrize("order", ["drain", "remove", "nothing"])
def test_who_waits_for_an_engine_to_itself_does_not_go_there_once_it_is_closed(
    order: str, role: str, more: dict[str, object]
) -> None:
    async def scenario(site: Site) -> None:
        first, second = f"{role}/0", f"{role}/1"

        async def give(order: str, engine: str) -> None:
            url = site.fleet.engine(engine).url
            values: dict[str, object] = {"role": role, "url": url}
            if order == "remove":
                values["force"] = True
            answer = await site.admin(f"/admin/instances/{order}", values)
            assert answer.status == 200, answer.body

        async def give_back(engine: str) -> None:
            values = {"role": role, "url": site.fleet.engine(engine).url}
            assert (await site.admin("/admin/instances", values)).status == 200

        def here(engine: str) -> int:
            own = (CHAT, COMPLETIONS)
            return sum(seen.engine == engine and seen.path in own for seen in site.seen)

        await give("drain", second)
        site.fleet.faults.set(first, hang=True)
        bodies = [BODIES[CHAT] | more, BODIES[COMPLETIONS] | {"prompt": "another"} | more]
        sent = [site.send(path, one) for path, one in zip((CHAT, COMPLETIONS), bodies, strict=True)]
        await site.until(lambda: here(first) == 2)
        site.fleet.faults.set(second, delay_s=0.6)
        await give_back(second)
        site.fleet.kill(first)
        await site.until(lambda: here(second) == 1)  # The other one waits for it to be alone there.
        await asyncio.sleep(0.3)
        assert here(second) == 1
        if order == "nothing":
            assert [(await one.end()).status for one in sent] == [200, 200]
            assert here(second) == 2
            return
        await give(order, second)
        await asyncio.sleep(2.0)
        assert here(second) == 1
        site.fleet.faults.set(first, hang=False)
        await site.fleet.restore(first)
        assert [(await one.end()).status for one in sent] == [200, 200]
        assert here(second) == 1

    flags = {"direct": "prefill"}
    play(scenario, flags=flags, prefillers=2, ranks=2, dp_mode=DpMode.PORTS)


DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
RUST = "failed to submit chat request: engine core reported fatal failure"


@pytest.mark.parametrize("words", [DEAD, RUST], ids=["python", "rust"])
@pytest.mark.parametrize("status", [500, 503, 200], ids=["answer", "unavailable", "event"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@served(at_rest=False, **FLEET)
async def test_an_engine_that_says_that_it_has_died_is_one_that_died(
    site: Site, role: str, status: int, words: str
) -> None:
    error = {"message": words, "type": "InternalServerError", "param": None, "code": 500}
    said = json.dumps({"error": error}).encode()
    asked: list[str] = []
    take = site.take

    def taken(engine: str, request: "HttpRequest", reply: "Reply") -> bool:
        if not (engine.startswith(role) and is_poison(request)):
            return take(engine, request, reply)
        asked.append(engine)
        if status == 200 and role == "decode":
            reply.start(200, [(b"content-type", b"text/event-stream")])
            reply.write(b"data: " + said + b"\n\ndata: [DONE]\n\n")
            reply.end()
        else:
            code = 500 if status == 200 else status
            reply.send(code, [(b"content-type", b"application/json")], said)
        return True

    site.take = taken  # type: ignore[method-assign]
    for _ in range(3):
        assert refused(await site.post(CHAT, BODIES[CHAT] | {"stream": True}, POISON))
    assert len(asked) == len(set(asked)) == 2


def test_the_bound_holds_over_all_groups_of_a_chain() -> None:
    engines = EmulationSettings(prefillers=4, ranks=4, max_model_len=4096)
    groups = {name: GroupSettings(replace(engines, model=name)) for name in ("small", "large")}
    chain = (
        '[alias.auto]\ngroups = ["large", "small"]\nchooser = "static"\n'
        'fall_back = ["429", "503", "timeout"]\n'
    )

    async def scenario(site: Site) -> None:
        world = site.world
        assert isinstance(world, GroupWorld)
        dead: list[str] = []
        take = site.take

        def taken(engine: str, request: "HttpRequest", reply: "Reply") -> bool:
            if not is_poison(request):
                return take(engine, request, reply)
            group, _, name = engine.partition(":")
            dead.append(engine)
            world.fleets[group].kill(name)
            return True

        site.take = taken  # type: ignore[method-assign]
        for _ in range(3):
            assert refused(await site.post(CHAT, BODIES[CHAT] | {"model": "auto"}, POISON))
        assert len(dead) == 2

    play_groups(scenario, groups=groups, more=chain, at_rest=False)


# Looked at seldom, as ten minutes pass.
@served(at_rest=False, flags={"scrape_interval_s": 60.0, "health_interval_s": 20.0}, **FLEET)
async def test_who_is_refused_is_counted_and_logged_and_forgotten(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    page = (await site.get("/metrics")).body
    assert b"balanceroute_suspected_poison_total 0.0" in page
    poisoned = Poisoned(site, "prefill")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert refused(await site.post(CHAT, BODIES[CHAT], POISON))
            await asyncio.sleep(2.0)
    lines = [one for one in caplog.records if "two engines died" in one.getMessage()]
    assert len(lines) == 1
    page = (await site.get("/metrics")).body
    assert b"balanceroute_suspected_poison_total 1.0" in page
    for engine in poisoned.dead:
        await site.fleet.restore(engine)
    await asyncio.sleep(KEPT_S + 10.0)
    assert refused(await site.post(CHAT, BODIES[CHAT], POISON))
    assert len(poisoned.dead) == 2 * MOST_DEATHS

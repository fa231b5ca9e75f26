"""Exceptions in the proxy itself: each ends one request at most, and never the service."""

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Site, play, served

from balanceroute.predictors import Survival
from balanceroute.proxy.core.events import Action
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.live.frontend.pass_through import SingleExchange
from balanceroute.proxy.live.openai import prompt_keys
from balanceroute.proxy.live.request.decode_attempt import start_decode, start_prefill
from balanceroute.proxy.live.request.relay import Relay
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.scheduling.decisions import Decisions
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS = "/v1/completions"
POISON = "x-poison"
POISONED = [(b"x-request-id", POISON.encode())]


def poisoned(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of sessions that fails for one of them."""

    def method(session: Session, *args: Any, **more: Any) -> Any:
        if session.record.request_id == POISON:
            raise ZeroDivisionError("poison")
        return usual(session, *args, **more)

    return method


def body(text: str = "a b c", tokens: int = 5, *, stream: bool = False) -> dict[str, object]:
    return {"prompt": text, "max_tokens": tokens, "stream": stream, "ignore_eos": True}


async def counted(site: Site, what: str) -> int:
    page = (await site.get("/metrics")).body.decode()
    name = f'balanceroute_decision_failures_total{{what="{what}"}} '
    found = [line for line in page.splitlines() if line.startswith(name)]
    return int(float(found[0].removeprefix(name))) if found else 0


def outcomes(site: Site) -> list[Outcome | None]:
    return [record.outcome for record in site.world.ended]


@pytest.mark.parametrize(
    ("method", "what", "stream"),
    [
        ("start_prefill", "action", False),
        ("prefilled", "leg", True),
        ("start_decode", "action", True),
        ("began", "leg", True),
        ("answered", "leg", False),
        ("finished", "leg", True),
    ],
)
def test_an_exception_in_a_session_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, method: str, what: str, stream: bool
) -> None:
    """A session whose callback raised hung for ever, and held what it held."""
    starts: dict[str, Any] = {"start_prefill": start_prefill, "start_decode": start_decode}
    if method in starts:
        monkeypatch.setattr(f"{Decisions.__module__}.{method}", poisoned(starts[method]))
    else:
        monkeypatch.setattr(Session, method, poisoned(getattr(Session, method)))

    async def scenario(site: Site) -> None:
        bad = site.send(COMPLETIONS, body(stream=stream), headers=POISONED)
        good = [await site.post(COMPLETIONS, body(stream=stream)) for _ in range(3)]
        await bad.end()
        assert [one.status for one in good] == [200] * 3
        if method == "finished":  # The head was sent long ago.
            assert bad.status == 200
            assert not bad.done
            assert json.loads(bad.events[-1].removeprefix(b"data: "))["error"]["code"] == 500
        else:
            assert bad.status == 500
            assert bad.json["error"]["message"].startswith("internal error")
        assert await counted(site, what) == 1
        assert outcomes(site).count(Outcome.INTERNAL_ERROR) == 1
        assert (await site.get("/ready")).status == 200

    play(scenario)


def test_an_exception_in_the_stream_itself_is_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the wire calls is part of a request's handling."""
    usual = Relay.on_end

    def on_end(leg: Relay) -> None:
        if leg.started:
            raise ZeroDivisionError
        usual(leg)

    monkeypatch.setattr(Relay, "on_end", on_end)

    async def scenario(site: Site) -> None:
        bad = await site.post(COMPLETIONS, body(stream=True))
        assert b'"code":500' in bad.events[-1].replace(b" ", b"")
        assert (await site.post(COMPLETIONS, body())).status == 200
        assert await counted(site, "leg") == 1

    play(scenario)


def test_what_follows_from_a_failed_action_waits_for_the_actions_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    performed: list[tuple[str, str]] = []
    act = Decisions._act

    def note(own: Decisions, session: Session, action: Action) -> None:
        performed.append((type(action).__name__, session.record.request_id))
        act(own, session, action)

    monkeypatch.setattr(Decisions, "_act", note)
    monkeypatch.setattr(f"{Decisions.__module__}.start_prefill", poisoned(start_prefill))

    async def scenario(site: Site) -> None:
        driver = site.world.proxy.deployment.driver
        driver.instances.prefillers[0].crowded = True
        driver.reopen()
        names = [POISON, "b", "c"]
        sent = [
            site.send(COMPLETIONS, body(), headers=[(b"x-request-id", name.encode())])
            for name in names
        ]
        await site.until(lambda: len(driver.sessions) == 3)
        driver.instances.prefillers[0].crowded = False
        driver.reopen()
        assert performed == [("StartPrefill", name) for name in names]
        assert [(await one.end()).status for one in sent] == [500, 200, 200]

    play(scenario, prefillers=1, flags={"scrape_interval_s": 60.0})


def test_an_exception_at_arrival_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """`submit` had registered the session before what could raise."""

    def keys(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(prompt_keys, "prompt_keys", keys)

    async def scenario(site: Site) -> None:
        answer = await site.post(COMPLETIONS, body())
        assert answer.status == 500
        assert not site.world.proxy.deployment.driver.sessions
        assert await counted(site, "arrival") == 1

    play(scenario, flags={"policy": "br-h", "predictor": "exact-match"})


def test_deadlines_go_on_though_one_sessions_deadline_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an exception in a sweep no deadline was looked at ever again."""
    monkeypatch.setattr(Session, "check_deadline", poisoned(Session.check_deadline))

    async def scenario(site: Site) -> None:
        for number in range(2):
            site.fleet.faults.set(f"decode/{number}", hang=True)
        bad = site.send(COMPLETIONS, body(), headers=POISONED)
        good = await site.post(COMPLETIONS, body())
        assert (good.status, (await bad.end()).status) == (504, 500)
        assert await counted(site, "timer") == 1

    flags = {"answer_timeout_s": 5.0, "retry_attempts": 1, "first_token_timeout_s": 5.0}
    play(scenario, flags=flags, at_rest=False)


@pytest.mark.parametrize(
    ("metrics", "method"),
    [
        ("requests", "ended"),
        ("decisions", "loop_lag"),
        ("predictors", "scored"),
        ("predictors", "refreshed"),
        ("decisions", "dispatched"),
    ],
)
@served()
async def test_metrics_that_raise_end_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, metrics: str, method: str
) -> None:
    """No exception in a sweep, a tick or an end keeps others from being served."""

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(getattr(site.world.proxy.metrics, metrics), method, fails)
    asked = [site.send(COMPLETIONS, body(tokens=200)) for _ in range(8)]
    for one in asked:
        assert (await one.end()).status == 200
    driver = site.world.proxy.deployment.driver
    assert not driver.sessions
    await driver.table.drained()


@served(flags={"policy": "br-h", "predictor": "survival", "batch": 2}, batch_limit=2)
async def test_an_active_predictor_that_raises_is_one_that_knows_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exception came out of every decision."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    for method in ("begin", "survival", "observe", "forget"):
        monkeypatch.setattr(Survival, method, fails)
    asked = [site.send(COMPLETIONS, body(tokens=20)) for _ in range(12)]
    for one in asked:
        assert (await one.end()).status == 200
    assert await counted(site, "predictor") > 12
    assert await counted(site, "policy") == 0
    (active,) = (await site.state())["predictors"]
    assert active["failed"]
    assert (await site.get("/ready")).status == 200


def test_a_policy_that_goes_on_failing_makes_the_proxy_unready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/ready looked at the engines alone."""
    usual = TwoStage.dispatch
    broken = True

    def dispatch(self: TwoStage, *args: Any) -> Any:
        if broken:
            raise ZeroDivisionError
        return usual(self, *args)

    monkeypatch.setattr(TwoStage, "dispatch", dispatch)

    async def load(site: Site, seconds: float) -> None:
        end_s = site.loop.time() + seconds
        while site.loop.time() < end_s:
            assert (await site.post(COMPLETIONS, body())).status == 200
            await asyncio.sleep(0.5)

    async def ready(site: Site) -> tuple[int, int]:
        return (await site.get("/ready")).status, (await site.admin("/ready")).status

    async def scenario(site: Site) -> None:
        nonlocal broken
        await load(site, 7)
        assert await ready(site) == (200, 200)
        await load(site, 5)
        assert await ready(site) == (503, 503)
        assert await counted(site, "policy") >= 15
        await asyncio.sleep(10)  # Nothing was asked of it meanwhile: it is tried again.
        assert await ready(site) == (200, 200)
        await load(site, 1)
        assert await ready(site) == (503, 503)
        broken = False
        await load(site, 1)
        assert await ready(site) == (200, 200)

    play(scenario, flags={"policy": "br-0"})


@pytest.mark.parametrize(("method", "streams"), [("on_end", False), ("on_data", True)])
def test_an_exception_in_a_request_of_one_engine_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, method: str, streams: bool
) -> None:
    usual = getattr(SingleExchange, method)
    poison = [True]

    def fails(exchange: SingleExchange, *args: object) -> None:
        begun = exchange.record.first_token_ns is not None
        if poison and begun is streams:
            poison.clear()
            raise ZeroDivisionError
        usual(exchange, *args)

    monkeypatch.setattr(SingleExchange, method, fails)

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        if not streams:
            reply.send(200, [(b"content-type", b"application/json")], b"{}")
            return
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b"data: 1\n\n")
        asyncio.get_running_loop().call_later(1.0, reply.write, b"data: 2\n\n")
        asyncio.get_running_loop().call_later(2.0, reply.end)

    async def scenario(site: Site) -> None:
        site.handlers[b"/tokenize"] = answer
        # The second waits for the room that the first one holds.
        bad, good = (site.send("/tokenize", {"prompt": "a"}) for _ in range(2))
        await bad.end()
        await good.end()
        assert (good.status, good.error) == (200, None)
        if streams:
            assert bad.status == 200
            assert json.loads(bad.events[-1].removeprefix(b"data: "))["error"]["code"] == 500
        else:
            assert bad.status == 500
            assert bad.json["error"]["message"].startswith("internal error")
        assert await counted(site, "leg") == 1
        assert outcomes(site) == [Outcome.INTERNAL_ERROR, Outcome.OK]
        assert site.world.proxy.deployment.pass_through.in_flight == 0

    play(scenario, flags={"single_engine_limit": 1}, prefillers=1)

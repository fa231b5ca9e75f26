"""Messages that cross, said by hand: to the scheduler process as a relay, and to a relay as that."""

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from tests.live.frontend.test_tenants import flags as tenant_flags
from tests.live.frontend.test_tenants import given, tenant

from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.live.engines.instances import Role, Status, Target
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.frames import VERSION
from balanceroute.proxy.live.request.reports import (
    LegSucceeded,
    PromptCounted,
    Report,
    SessionEnded,
)
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.chaos.split_world import SplitWorld

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.live.conftest import Play, Site

    from balanceroute.proxy.live.request.live_request import LiveRequest

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 20, "ignore_eos": True}
SHAPE = Shape(Api.COMPLETIONS, "tiny", True, 1, "", 3, 12, 0, 20)
NUMBER = 7
_Message = TypeVar("_Message")


def split(site: "Site") -> SplitWorld:
    assert isinstance(site.world, SplitWorld)
    return site.world


class Relay:
    """A relay that says what a test says, next to those that are there."""

    def __init__(self, site: "Site") -> None:
        self.said: list[to_relay.ToRelay] = []
        self.desk = split(site).app.connect(self.said.extend)
        self.site = site
        self.say(from_relay.Hello(VERSION, 9, "the same"))

    def say(self, *messages: from_relay.FromRelay) -> None:
        self.desk.take(messages)

    def arrive(self) -> "LiveRequest":
        record = RequestRecord("r", COMPLETIONS, round(self.site.loop.time() * 1e9), 0.0)
        self.say(from_relay.Arrival(NUMBER, SHAPE, None, 0, None, "", (), record))
        return self.desk.requests[NUMBER]

    async def hears(self, kind: type[_Message], count: int = 1) -> _Message:
        """Return the last message of a kind, once there are so many."""

        def heard() -> list[_Message]:
            return [one for one in self.said if isinstance(one, kind)]

        await self.site.until(lambda: len(heard()) == count, limit_s=1.0)
        return heard()[-1]

    def end(self) -> None:
        record = self.desk.requests[NUMBER].record
        record.end(Outcome.CANCELLED, "", self.site.loop.time())
        self.say(from_relay.SessionEnded(NUMBER, record, "cancelled"))


def test_a_lost_kv_cache_that_crosses_a_binding_makes_it_void(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        number = relay.arrive().number
        accepted = await relay.hears(to_relay.Accepted)
        assert (accepted.number, accepted.engine_id, accepted.prompt_estimate) == (NUMBER, "r", 3)
        start = await relay.hears(to_relay.StartPrefill)
        assert (start.number, start.heard) == (NUMBER, 0)
        relay.say(from_relay.PrefillDone(NUMBER, 1, 3, None, True, 0))
        assert (await relay.hears(to_relay.StartDecode)).heard == 1
        # Sent before that came: one binding was acted on.
        relay.say(from_relay.PrefillLost(NUMBER, 1, True, True, False))
        again = await relay.hears(to_relay.StartPrefill, 2)
        assert again.heard == 2
        request = site.world.scheduler.requests[number]
        assert request.lost_on_ranks == () == request.lost_on_prefillers
        relay.say(from_relay.PrefillDone(NUMBER, 2, 3, None, True, 0))
        assert (await relay.hears(to_relay.StartDecode, 2)).heard == 3
        relay.say(from_relay.DecodeStarted(NUMBER, 3, 0))
        assert request.started
        relay.end()

    play(scenario, relays=1)


def test_a_lost_kv_cache_of_a_request_that_is_queued_already_changes_nothing(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        for prefiller in site.world.plane.deployment.instances.prefillers:
            prefiller.crowded = True
        site.world.plane.deployment.driver.reopen()
        number = relay.arrive().number
        request = site.world.scheduler.requests[number]
        assert request.state is State.QUEUED
        relay.say(from_relay.PrefillLost(NUMBER, 0, False, True, False))
        assert site.world.scheduler.requests[number] is request
        assert request.state is State.QUEUED
        relay.end()

    play(scenario, relays=1)


@pytest.mark.parametrize("stream", [False, True])
def test_what_messages_imply_is_reported(
    play: "Play", monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        driver = site.world.plane.deployment.driver
        reported: list[Report] = []
        monkeypatch.setattr(driver, "report", reported.append)
        number = relay.arrive().number
        start = await relay.hears(to_relay.StartPrefill)
        prefiller, url = PrefillerId(start.prefiller), f"prefill/{start.prefiller}"
        prefilled = LegSucceeded(Target(Role.PREFILL, site.fleet.engine(url).url))
        relay.say(from_relay.PrefillDone(NUMBER, 1, 3, None, True, 0))
        assert reported == [prefilled, PromptCounted(number, 3)]
        bound = await relay.hears(to_relay.StartDecode)
        rank = driver.instances.ranks[bound.rank]
        decoded = LegSucceeded(rank.target, (prefiller, rank.id))
        record = relay.desk.requests[NUMBER].record
        record.end(Outcome.OK, "", site.loop.time())
        if stream:
            relay.say(from_relay.DecodeStarted(NUMBER, 2, 0))
            assert reported[2:] == [decoded]
            relay.say(from_relay.SessionEnded(NUMBER, record, "finished"))
        else:
            relay.say(from_relay.SessionEnded(NUMBER, record, "finished", answered=True))
        assert reported[2:] == [decoded, SessionEnded(number, record)]
        assert not site.world.scheduler.requests
        monkeypatch.undo()
        driver.report(reported[-1])

    play(scenario, relays=1)


def test_a_prompt_with_emitted_tokens_is_not_counted(
    play: "Play", monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        reported: list[Report] = []
        relay.arrive()
        await relay.hears(to_relay.StartPrefill)
        with monkeypatch.context() as patch:
            patch.setattr(site.world.plane.deployment.driver, "report", reported.append)
            relay.say(from_relay.PrefillDone(NUMBER, 1, 9, None, True, 6))
        assert [type(one) for one in reported] == [LegSucceeded]
        relay.end()

    play(scenario, relays=1)


def test_what_a_relay_says_of_an_ended_request_changes_nothing(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        relay.arrive()
        relay.end()
        relay.say(from_relay.PrefillDone(NUMBER, 0, 3, None, True, 0))
        await asyncio.sleep(0.1)
        assert len(site.world.ended) == 1
        assert not site.world.scheduler.requests

    play(scenario, relays=1)


def test_a_record_of_a_request_that_nobody_knows_is_counted_and_logged(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        record = RequestRecord("late", COMPLETIONS, 0, 0.0, outcome=Outcome.OK, status=200)
        relay.say(from_relay.SessionEnded(3, record, "finished"))
        assert [one.request_id for one in site.world.ended] == ["late"]
        assert b'outcome="ok",status="200"} 1.0' in site.world.plane.metrics.render()

    play(scenario, relays=1)


def test_a_relay_that_is_gone_leaves_nothing_behind(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        relay.arrive()
        relay.say(from_relay.PrefillDone(NUMBER, 1, 3, None, True, 0))
        relay.say(from_relay.AskPrefiller(1, NUMBER, None))
        await relay.hears(to_relay.StartDecode)
        assert site.world.scheduler.ledger.bound.any()
        assert any(one.hand_offs for one in site.world.plane.deployment.instances.prefillers)
        relay.desk.gone()
        await site.rest(0.1)
        (record,) = site.world.ended
        assert record.outcome is Outcome.INTERNAL_ERROR
        assert record.reason == "internal error: its relay process ended"
        assert list(split(site).app.hub.desks) == [0]

    play(scenario, relays=1)


def test_an_event_that_no_state_allows_ends_that_request_alone(
    play: "Play", caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        relay.arrive()
        relay.say(from_relay.DecodeLost(NUMBER, 1))
        await relay.hears(to_relay.Crash)
        relay.say(from_relay.SessionEnded(NUMBER, relay.desk.requests[NUMBER].record))
        assert "LifecycleError" in caplog.text
        assert (await site.post(COMPLETIONS, BODY)).status == 200

    play(scenario, relays=1)


def heard_of(scheduler: "Scheduler", kind: type[_Message]) -> list[_Message]:
    return [one for one in scheduler.said if isinstance(one, kind)]


class Scheduler:
    """A scheduler process that says what a test says, to the only relay."""

    def __init__(self, site: "Site") -> None:
        self.site = site
        self.relay = split(site).relays[0]
        self.said: list[from_relay.FromRelay] = []
        self.frames: list[list[type[from_relay.FromRelay]]] = []
        host = self.relay.host
        self.relay.connect(self._take)
        states = split(site).app.hub.states()
        self.say(to_relay.Welcome(VERSION, "another", 1, uses_keys=False), *states.values())
        self.number = RequestId(host._arrived)

    def say(self, *messages: to_relay.ToRelay) -> None:
        self.relay.take(messages)

    def _take(self, messages: "Sequence[from_relay.FromRelay]") -> None:
        self.said += messages
        self.frames.append([type(one) for one in messages])

    async def hears(self, kind: type[_Message]) -> _Message:
        """Return the last message of a kind."""
        await self.site.until(lambda: bool(heard_of(self, kind)), limit_s=2.0)
        return heard_of(self, kind)[-1]


def test_a_relay_passes_over_a_void_binding(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        scheduler = Scheduler(site)
        number, p, r = scheduler.number, PrefillerId(0), RankId(0)
        exchange = site.send(COMPLETIONS, BODY | {"stream": True})
        await scheduler.hears(from_relay.Arrival)
        scheduler.say(to_relay.Accepted(number, 0, "mine", 3), to_relay.StartPrefill(number, 0, p))
        done = await scheduler.hears(from_relay.PrefillDone)
        assert (done.taken, done.prompt_tokens, done.pulls) == (1, 3, True)
        url = site.fleet.engine("prefill/0").url
        scheduler.say(
            to_relay.PrefillerState(p, url, url, Status.UP, None, 1),
            to_relay.DropLostKv(number),
            to_relay.StartDecode(number, 1, r),  # Given before the loss was heard of.
        )
        lost = await scheduler.hears(from_relay.PrefillLost)
        assert lost.taken == 1
        await asyncio.sleep(0.1)
        assert site.received("decode") == []
        scheduler.say(to_relay.StartPrefill(number, 2, PrefillerId(1)))
        await site.until(lambda: len(site.received("prefill")) == 2)
        await site.until(lambda: len(heard_of(scheduler, from_relay.PrefillDone)) == 2)
        scheduler.say(to_relay.StartDecode(number, 3, r))
        started = await scheduler.hears(from_relay.DecodeStarted)
        assert (started.taken, started.emitted) == (3, 0)
        await exchange.end()
        assert exchange.done
        ended = await scheduler.hears(from_relay.SessionEnded)
        assert (ended.how, ended.answered) == ("finished", False)  # As `DecodeStarted` said.
        assert (ended.record.outcome, ended.record.output_tokens) == (Outcome.OK, 20)
        assert site.received("decode")[0].header(b"x-request-id") == b"mine"

    play(scenario, relays=1, at_rest=False)


async def serve(scheduler: Scheduler) -> None:
    """Have a request prefilled and decoded."""
    await scheduler.hears(from_relay.Arrival)
    number = scheduler.number
    scheduler.say(
        to_relay.Accepted(number, 0, "mine", 3),
        to_relay.StartPrefill(number, 0, PrefillerId(0)),
    )
    await scheduler.hears(from_relay.PrefillDone)
    scheduler.say(to_relay.StartDecode(number, 1, RankId(0)))


def test_an_answer_takes_three_messages(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        scheduler = Scheduler(site)
        exchange = site.send(COMPLETIONS, BODY)
        await serve(scheduler)
        await exchange.end()
        ended = await scheduler.hears(from_relay.SessionEnded)
        assert (ended.how, ended.answered) == ("finished", True)
        of_request = [one for one in scheduler.said if hasattr(one, "number")]
        kinds = [from_relay.Arrival, from_relay.PrefillDone, from_relay.SessionEnded]
        assert [type(one) for one in of_request] == kinds
        assert not heard_of(scheduler, from_relay.LegSucceeded)

    play(scenario, relays=1, at_rest=False)


@pytest.mark.parametrize("limited", [False, True])
def test_a_beginning_and_an_end_wait_for_each_other(
    play: "Play", tmp_path: "Path", limited: bool
) -> None:
    async def scenario(site: "Site") -> None:
        scheduler = Scheduler(site)
        headers = given("acme") if limited else None
        exchange = site.send(COMPLETIONS, BODY | {"stream": True, "max_tokens": 1}, headers=headers)
        await serve(scheduler)
        await exchange.end()
        told = len(heard_of(scheduler, from_relay.SessionEnded))
        assert told == limited  # What a tenant has at a time counts before its client comes again.
        await scheduler.hears(from_relay.SessionEnded)
        assert [from_relay.DecodeStarted, from_relay.SessionEnded] in scheduler.frames

    flags = tenant_flags(tmp_path, tenant("acme", "concurrency = 1")) if limited else {}
    play(scenario, relays=1, at_rest=False, flags=flags)


def test_a_relay_that_ends_tells_what_waited(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        scheduler = Scheduler(site)
        exchange = site.send(COMPLETIONS, BODY | {"stream": True})
        await scheduler.hears(from_relay.Arrival)
        await scheduler.relay.close()
        await exchange.end()
        assert heard_of(scheduler, from_relay.SessionEnded)

    play(scenario, relays=1, at_rest=False)


def test_a_request_that_is_refused_late_is_answered_so(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        scheduler = Scheduler(site)
        exchange = site.send(COMPLETIONS, BODY)
        await scheduler.hears(from_relay.Arrival)
        scheduler.say(to_relay.Refused(scheduler.number, 429, "too many", 3, "overload"))
        await exchange.end()
        assert exchange.status == 429
        assert exchange.header(b"retry-after") == b"3"
        assert scheduler.relay.host.idle

    play(scenario, relays=1, at_rest=False)


def test_a_client_that_leaves_before_it_is_accepted_ends_once(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        scheduler = Scheduler(site)
        exchange = site.send(COMPLETIONS, BODY)
        await scheduler.hears(from_relay.Arrival)
        assert exchange.call is not None
        exchange.call.abort()
        ended = await scheduler.hears(from_relay.SessionEnded)
        assert (ended.how, ended.answered, ended.record.status) == ("cancelled", False, 0)
        scheduler.say(
            to_relay.Accepted(scheduler.number, 0, "mine", 3),
            to_relay.StartPrefill(scheduler.number, 0, PrefillerId(0)),
        )
        await asyncio.sleep(0.1)
        assert site.received("prefill") == []
        assert scheduler.relay.host.idle

    play(scenario, relays=1, at_rest=False)

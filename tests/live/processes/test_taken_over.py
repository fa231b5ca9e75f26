"""A new scheduler process takes over the requests that run, as the relays tell of them."""

import asyncio
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from tests.live.processes.test_crossing import NUMBER, SHAPE, Relay

from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Role, Status, Target
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.gathering import GATHERING_S, Gathering
from balanceroute.proxy.live.processes.mirror import Mirror
from balanceroute.proxy.live.processes.questions import Questions
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.chaos.split_world import SplitWorld

if TYPE_CHECKING:
    import pytest
    from tests.live.conftest import Play, Site

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 60, "ignore_eos": True}
STREAM = BODY | {"stream": True}
SLOW = {"step_base_ns": 20_000_000.0}
P0, P1, R0, R1 = PrefillerId(0), PrefillerId(1), RankId(0), RankId(1)


def split(site: "Site") -> SplitWorld:
    assert isinstance(site.world, SplitWorld)
    return site.world


async def restart(site: "Site", *, lacks_ranks: int = 0, lacks_prefillers: int = 0) -> None:
    """Kill the scheduler process, and wait for one that knows all requests.

    It lacks the first engines of each role, as if they had been added and were in no file.
    """
    world, before = split(site), split(site).app
    config = world._config
    world._config = replace(
        config,
        prefillers=config.prefillers[lacks_prefillers:],
        decoders=config.decoders[lacks_ranks:],
    )
    world.kill_scheduler(0.1)
    await site.until(lambda: world.app is not before and not world._alone)
    await site.until(lambda: world.app.hub.gathering.over)


def test_a_stream_counts_in_the_new_ledger_and_frees_its_slot_there(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        stream = await site.send(COMPLETIONS, STREAM).until_events(5)
        rank = site.world.scheduler.requests[stream_number(site)].rank
        await restart(site)
        scheduler, number = site.world.scheduler, stream_number(site)
        one = scheduler.requests[number]
        assert (one.state, one.rank, one.started) == (State.DECODING, rank, True)
        assert scheduler.ledger.bound.sum() == 1
        taken_over = len(stream.events)
        for _ in range(5):
            await asyncio.sleep(0.1)
            assert abs(scheduler.emitted(number) - len(stream.events)) <= 20
        # What it had emitted by then are no steps of this scheduler process.
        steps = site.world.plane.deployment.driver.decisions.progress.steps.steps
        assert steps <= len(stream.events) - taken_over + 5
        await stream.end()
        assert stream.done
        await site.until(lambda: not scheduler.requests, 1.0)
        (record,) = site.world.ended
        assert (record.outcome, record.output_tokens) == (Outcome.OK, 60)
        assert b'outcome="ok",status="200"} 1.0' in site.world.plane.metrics.render()

    play(scenario, relays=2, **SLOW)


def stream_number(site: "Site") -> Any:
    (number,) = site.world.scheduler.requests
    return number


def test_every_phase_is_taken_over_and_nothing_is_repeated(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        exchanges = [site.send(COMPLETIONS, BODY | {"prompt": f"t{i} " * 50}) for i in range(8)]
        scheduler = site.world.scheduler

        def phases() -> set[State]:
            return {one.state for one in scheduler.requests.values()}

        every = {State.QUEUED, State.PREFILLING, State.POOLED, State.DECODING}
        await site.until(lambda: phases() == every)
        await restart(site)
        for exchange in exchanges:
            assert (await exchange.end()).status == 200
        assert len(site.received("prefill")) == len(site.received("decode")) == 8
        ended = [record.request_id for record in await site.ended(8)]
        assert len(ended) == len(set(ended)) == 8

    flags = {"batch": 1, "probe_limit": 1}
    engines = {"batch_limit": 1, "prefill_ns_per_token": 1_000_000.0}
    play(scenario, relays=2, flags=flags, **engines, **SLOW)


def test_a_deadline_that_its_client_set_holds_under_the_next_one(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        site.fleet.faults.set("decode/0", stall_after_tokens=3)
        site.fleet.faults.set("decode/1", stall_after_tokens=3)
        busy = [site.send(COMPLETIONS, STREAM) for _ in range(2)]
        for one in busy:
            await one.until_events(3)
        sent_s = site.loop.time()
        headers = [(b"x-request-deadline-ms", b"20000")]
        late = [site.send(COMPLETIONS, BODY, headers=headers) for _ in range(3)]
        await asyncio.sleep(1.0)
        await restart(site)
        for one in late:
            assert (await one.end()).status == 503
            assert site.loop.time() - sent_s < 21.0
        assert site.loop.time() - sent_s > 19.0
        for one in busy:
            one.call.abort()

    flags = {"batch": 1, "client_deadline": True, "idle_stream_timeout_s": 600.0}
    play(scenario, relays=2, flags=flags, batch_limit=1, **SLOW)


def test_a_first_token_that_came_before_is_not_due_under_the_next_one(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        busy = [await site.send(COMPLETIONS, STREAM).until_events(3) for _ in range(2)]
        headers = [(b"x-request-deadline-ms", b"500")]
        late = [site.send(COMPLETIONS, STREAM, headers=headers) for _ in range(3)]
        for one in late:
            await one.until_events(1)
        await restart(site)
        requests = site.world.scheduler.requests.values()
        pooled = [one for one in requests if one.state is State.POOLED]
        assert [(one.answered, one.due_ns) for one in pooled] == [(True, None)] * 3
        for one in (*busy, *late):
            assert (await one.end()).done

    flags = {"batch": 1, "client_deadline": True, "first_token": "prefill"}
    play(scenario, relays=2, flags=flags, batch_limit=1, **SLOW)


def test_engines_may_have_other_ids_and_one_that_is_missing_is_not_accounted_for(
    play: "Play",
) -> None:
    async def scenario(site: "Site") -> None:
        streams = [await site.send(COMPLETIONS, STREAM).until_events(5) for _ in range(2)]
        before = site.world.scheduler
        assert [one.rank for one in before.requests.values()] == [R0, R1]
        await restart(site, lacks_ranks=1)
        scheduler = site.world.scheduler
        assert [one.rank for one in scheduler.requests.values()] == [R0]
        assert scheduler.ledger.bound.tolist() == [1]
        for stream in streams:
            await stream.end()
            assert stream.done
        await site.until(lambda: len(site.world.ended) == 2)
        assert [record.outcome for record in site.world.ended] == [Outcome.OK] * 2
        assert [record.retries for record in site.world.ended] == [0, 0]

    play(scenario, relays=2, **SLOW)


def test_what_a_missing_engine_has_not_begun_to_answer_leaves_it(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        # Not streamed, so that nothing of the answers is with the clients.
        exchanges = [site.send(COMPLETIONS, BODY) for _ in range(2)]
        await site.until(lambda: len(site.received("decode")) == 2)
        assert {one.engine for one in site.received("decode")} == {"decode/0", "decode/1"}
        await asyncio.sleep(0.2)
        await restart(site, lacks_ranks=1)
        for exchange in exchanges:
            assert (await exchange.end()).status == 200
        assert [one.engine for one in site.received("decode")][2:] == ["decode/1"]
        await site.until(lambda: len(site.world.ended) == 2)
        assert sorted(record.retries for record in site.world.ended) == [0, 1]

    play(scenario, relays=2, **SLOW)


def test_a_kv_cache_on_a_missing_prefiller_is_computed_anew_elsewhere(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        running = [await site.send(COMPLETIONS, STREAM).until_events(2) for _ in range(2)]
        waiting = [site.send(COMPLETIONS, STREAM) for _ in range(2)]
        await site.until(lambda: len(site.world.scheduler.pool) == 2)
        holders = {one.prefiller for one in site.world.scheduler.requests.values()}
        assert holders == {None, P0, P1}
        await restart(site, lacks_prefillers=1)
        for exchange in running + waiting:
            assert (await exchange.end()).done
        assert [one.engine for one in site.received("prefill")][4:] == ["prefill/1"]

    play(scenario, relays=2, batch_limit=1, flags={"batch": 1}, **SLOW)


def test_a_relay_that_died_too_is_not_waited_for_long(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        world = split(site)
        port = world.relays[1].public.server.port
        stream = await site.send(COMPLETIONS, STREAM, port=port).until_events(5)
        world.kill_relay(0, 5.0)
        world.kill_scheduler(0.1)
        begin_s = site.loop.time()
        late = site.send(COMPLETIONS, STREAM, port=port)
        await late.until_events(1)
        assert GATHERING_S < site.loop.time() - begin_s < GATHERING_S + 0.5
        for exchange in (stream, late):
            assert (await exchange.end()).done
        await asyncio.sleep(5.0)

    play(scenario, relays=2, **SLOW)


def test_limits_of_tenants_hold_on(play: "Play") -> None:
    key = b"a key of a tenant"

    async def scenario(site: "Site") -> None:
        headers = [(b"authorization", b"Bearer " + key)]
        streams = [site.send(COMPLETIONS, STREAM, headers=headers) for _ in range(2)]
        for stream in streams:
            await stream.until_events(2)
        await restart(site)
        refused = await site.post(COMPLETIONS, STREAM, headers)
        assert refused.status == 429
        assert b"2 requests of the tenant are in flight already" in refused.body
        for stream in streams:
            assert (await stream.end()).done
        await site.until(lambda: len(site.world.ended) == 3)
        assert (await site.post(COMPLETIONS, STREAM, headers)).done

    tenant = (
        f'[[tenant]]\nname = "a"\nkey_sha256 = ["{sha256(key).hexdigest()}"]\nconcurrency = 2\n'
    )
    play(scenario, relays=2, tenants=tenant, **SLOW)


def live(phase: Any, *, rank: RankId | None, prefiller: PrefillerId | None) -> from_relay.Live:
    record = RequestRecord("r", COMPLETIONS, 0, 0.0, prompt_estimate=3, prompt_tokens=3)
    arrival = from_relay.Arrival(NUMBER, SHAPE, None, 0, None, "", (), record)
    return from_relay.Live(
        *(arrival, "mine", phase, 3, 5, 0, True, prefiller, 0, None, True, rank),
        *(0, 0, False, 0, (), ()),
    )


def test_what_contradicts_itself_ends_that_request_alone(
    play: "Play", caplog: "pytest.LogCaptureFixture"
) -> None:
    async def scenario(site: "Site") -> None:
        for phase, rank in (("decoding", None), ("decoding", RankId(9)), ("admitted", R0)):
            relay = Relay(site)
            relay.say(live(phase, rank=rank, prefiller=None), from_relay.Resumed())
            accepted = await relay.hears(to_relay.Accepted)
            assert (accepted.number, accepted.engine_id) == (NUMBER, "mine")
            await relay.hears(to_relay.Crash)
            relay.say(from_relay.SessionEnded(NUMBER, relay.desk.requests[NUMBER].record))
            relay.desk.gone()
        assert "is decoding nowhere" in caplog.text
        assert (await site.post(COMPLETIONS, BODY)).status == 200

    play(scenario, relays=1)


def test_a_relay_that_comes_back_is_taken_over_when_it_comes(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        relay = Relay(site)
        relay.say(
            live("decoding", rank=R1, prefiller=P0),
            from_relay.Resumed(),
            # Of a hand-off that this scheduler process knows nothing of.
            from_relay.RemotePrefillEnded(P0),
        )
        assert site.world.scheduler.ledger.bound.tolist() == [0, 1]
        assert site.world.scheduler.ledger.loads.tolist() == [0, 8]
        assert relay.desk.requests[NUMBER].emitted_tokens == 5
        relay.end()

    play(scenario, relays=1)


class Teller:
    """Notes what it is to take."""

    def __init__(self, took: list[tuple[str, Any]], name: str) -> None:
        self._took, self._name = took, name

    def take_one(self, message: from_relay.FromRelay) -> None:
        self._took.append((self._name, message))


class Timer:
    """Is never due."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_nothing_is_passed_on_before_all_have_told() -> None:
    took: list[tuple[str, Any]] = []
    timers: list[tuple[float, Any]] = []
    timer = Timer()

    def call_later(delay_s: float, call: Any) -> Any:
        timers.append((delay_s, call))
        return timer

    def told(arrived_ns: int) -> from_relay.Live:
        message = live("queued", rank=None, prefiller=None)
        message.arrival.record.arrived_ns = arrived_ns
        return message

    a, b = Teller(took, "a"), Teller(took, "b")
    gathering = Gathering(2, call_later)
    early, middle, late = told(1), told(2), told(3)
    drained, resumed = from_relay.Drained(), from_relay.Resumed()
    for message in (early, late, resumed, drained):
        gathering.keep(a, message)
    gathering.keep(b, resumed)
    assert gathering.over
    assert timer.cancelled
    assert took == [("a", early), ("a", late), ("a", resumed), ("a", drained), ("b", resumed)]

    took.clear()
    gathering = Gathering(2, call_later)
    for message in (middle, resumed):
        gathering.keep(b, message)
    for message in (early, late, resumed):
        if message is resumed:
            gathering.forget(b)  # It is gone, and what it said is void.
        gathering.keep(a, message)
    assert not gathering.over
    for message in (middle, drained):
        gathering.keep(b, message)
    delay_s, end = timers[-1]
    assert delay_s == GATHERING_S
    end()
    assert took == [
        *(("a", early), ("b", middle), ("a", late)),
        *(("a", resumed), ("b", drained)),
    ]


def test_losses_go_on_counting_under_another_scheduler_process() -> None:
    mirror = Mirror(lambda _: cast("Any", None), lambda _: None)

    def tell(number: PrefillerId, name: str, losses: int, status: Status = Status.UP) -> None:
        mirror.take_prefiller(to_relay.PrefillerState(number, name, name, status, None, losses))

    tell(P0, "http://a", 2)
    tell(P1, "http://b", 0)
    mirror.take_rank(to_relay.RankState(R0, "http://d", "http://d", Status.UP, None))
    a, b = mirror.instances.prefillers
    mirror.begin_anew()
    tell(P0, "http://b", 1)
    tell(P1, "http://a", 0, Status.REMOVED)
    assert (a.lost_kv, b.lost_kv) == (2, 1)
    assert mirror.instances.prefillers == [b, a]
    renumbered = mirror.renumbered()
    assert renumbered.prefillers == {P1: P0}
    assert renumbered.ranks == {}
    assert renumbered.missing == [
        Target(Role.PREFILL, "http://a"),
        Target(Role.DECODE, "http://d"),
    ]


def test_questions_that_wait_name_prefillers_as_the_new_scheduler_process_does() -> None:
    questions = Questions(lambda _: None)

    def unanswered(_: object) -> None:
        raise AssertionError

    for pulled_from in (P0, P1, None):
        questions.ask(
            unanswered,
            lambda number: from_relay.AskRetry(number, "decode", Fault.RESET, pulled_from),  # noqa: B023
        )
    questions.ask(unanswered, lambda number: from_relay.AskPrefiller(number, 7, P1))
    questions.renumber({P1: P0})
    asked: Any = questions.open()
    assert [one.pulled_from for one in asked[:3]] == [None, P0, None]
    assert asked[3] == from_relay.AskPrefiller(4, 7, P0)

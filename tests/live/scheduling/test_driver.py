"""The driver before emulated engines: its mirror of their loads, its timers, and what it lets go."""

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.extended import usually
from tests.live.scheduling.mirror import (
    BODY,
    COMPLETIONS,
    FLEET,
    STREAM,
    Mirror,
    body,
    run_load,
    watch,
)
from tests.support.site import Exchanged, Scenario, Site, play, served

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    Event,
    RequestArrived,
    RequestId,
    StartPrefill,
)
from balanceroute.proxy.core.policies import PolicyInputs, make_policy
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.sim.engines import SimulatedEngineOptions
from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.topologies import CONNECTORS, KvFlow

if TYPE_CHECKING:
    from tests.support.chaos.world import SchedulerStep


@pytest.mark.parametrize("streamed", [1.0, 0.5, 0.0])
@served(**FLEET)
async def test_the_mirror_of_the_loads_is_true(site: Site, streamed: float) -> None:
    if not streamed:
        # The clock learns the time of a step from the first long answer.
        await site.post(COMPLETIONS, BODY | {"max_tokens": 200})
    mirror = Mirror(site)
    await run_load(site, streamed=streamed, requests=150)
    assert mirror.decisions > 100
    assert mirror.deviation < 0.01


@pytest.mark.parametrize("policy", ["br-0", "jsq"])
def test_another_scheduler_decides_the_same_of_the_same_events(policy: str) -> None:
    """Nothing but its events tells a scheduler anything: the driver changes nothing behind its back."""
    heard: list[tuple[Event, list[Action], int]] = []

    async def scenario(site: Site) -> None:
        def saw(step: "SchedulerStep") -> None:
            heard.append((step.event, step.actions, round(site.loop.time() * 1e9)))

        watch(site, saw)
        await run_load(site, streamed=0.7, requests=80)
        deployment = site.world.plane.deployment
        config, ranks = deployment.config, len(deployment.instances.ranks)
        other = Scheduler(
            config.scheduler_config(ranks, len(deployment.instances.prefillers)),
            make_policy(
                policy,
                PolicyInputs(
                    *(ranks, config.scheduling.batch, config.policies, random.Random(0)),
                    NoPrediction(),
                ),
            ),
        )
        for event, actions, now_ns in heard:
            assert other.handle(event, now_ns=now_ns) == actions
        kinds = {type(one) for _, actions, _ in heard for one in actions}
        assert {Admit, StartPrefill} <= kinds
        assert sum(isinstance(event, RequestArrived) for event, *_ in heard) == 80

    flags = {**FLEET["flags"], "policy": policy, "predictor": "none"}
    play(scenario, **(FLEET | {"flags": flags}))


@pytest.mark.parametrize("streamed", usually([0.5], [1.0, 0.5]))
@pytest.mark.parametrize(
    "engines",
    [
        SimulatedEngineOptions(rank_speeds=(1.0, 0.667), rank_batches=(16, 8)),
        SimulatedEngineOptions(tokens_per_step=3.0),
        SimulatedEngineOptions(pause_above=0.05),
    ],
    ids=["unequal", "speculative", "pausing"],
)
def test_the_mirror_is_true_of_engines_that_are_not_plain(
    engines: SimulatedEngineOptions, streamed: float
) -> None:
    async def scenario(site: Site) -> None:
        mirror = Mirror(site)
        await run_load(site, streamed=streamed, requests=150)
        assert mirror.decisions > 100
        assert mirror.deviation < 0.02
        # Ranks that differ only in speed and size still emit a token a step. Few requests are paused,
        # and one that is not streamed shows it at its end alone.
        in_step = engines.tokens_per_step == 1.0 and engines.pause_above is None
        assert in_step or streamed < 1.0 or mirror.corrections > 0

    play(scenario, **(FLEET | {"engines": engines, "step_ns_per_token": 20_000.0}))


@served(**FLEET | {"step_ns_per_token": 20_000.0})
async def test_the_costs_of_a_late_request_are_measured(site: Site) -> None:
    fleet, pace = site.fleet.settings, site.world.scheduler.leases.pace
    assert pace is not None
    for _ in range(3):
        await run_load(site, streamed=1.0, requests=150)
    assert pace.step_model.ns_per_token == pytest.approx(fleet.step_ns_per_token, rel=0.1)
    assert pace.tokens_left_per_step is not None
    # A prefill of 175 tokens in the mean, of which a part is the constant time of the engine.
    per_token = fleet.prefill_ns_per_token + fleet.prefill_base_ns / 175
    assert pace.prefill_ns_per_token == pytest.approx(per_token, rel=0.3)


@served(**FLEET)
async def test_the_time_lost_at_the_barrier_is_told(site: Site) -> None:
    await run_load(site, streamed=1.0, requests=100)
    driver, stats = site.world.proxy.deployment.driver, site.fleet.stats()
    # The engines' last steps may run out after the clients have their answers.
    assert driver.decisions.progress.steps.steps == pytest.approx(stats["steps"], rel=0.1)
    barrier = driver.decisions.progress.barrier
    told = barrier.idle_tokens / barrier.capacity_tokens
    assert told == pytest.approx(stats["idle_fraction"], rel=0.1)
    assert driver.decisions.progress.steps.step_s == pytest.approx(0.032, rel=0.1)


def test_ranks_of_different_speeds_are_balanced_in_time_if_they_are_told() -> None:
    idle: dict[bool, float] = {}

    def scenario(told: bool) -> Scenario:
        async def load(site: Site) -> None:
            await run_load(site, streamed=1.0, requests=200)
            barrier = site.world.proxy.deployment.driver.decisions.progress.barrier
            idle[told] = site.fleet.stats()["idle_fraction"]
            counted = barrier.idle_tokens / barrier.capacity_tokens
            assert (counted == pytest.approx(idle[told], rel=0.1)) == told

        return load

    engines = SimulatedEngineOptions(rank_speeds=(1.0, 0.5))
    for told in (False, True):
        flags = FLEET["flags"] | ({"rank_speeds": "1,0.5"} if told else {})
        play(scenario(told), **(FLEET | {"engines": engines, "flags": flags}))
    assert idle[True] < 0.7 * idle[False]


@served(batch_limit=4, flags={"batch": 4, "policy": "br-0"})
async def test_sequences_of_one_request_count_each(site: Site) -> None:
    mirror = Mirror(site)
    first = site.send(COMPLETIONS, body(0, n=3, max_tokens=60, prompt=list(range(5, 405))))
    await first.until_events(30)
    others = [site.send(COMPLETIONS, body(i, max_tokens=30)) for i in range(1, 4)]
    await others[-1].until_events(1)
    bound = site.world.scheduler.ledger.bound.tolist()
    assert sorted(bound) == [0, 3, 3] or sorted(bound) == [3, 3]
    for exchange in (first, *others):
        assert (await exchange.end()).done
    assert mirror.deviation < 0.01
    assert {record.choices: record.output_tokens for record in site.world.ended} == {
        3: 180,
        1: 30,
    }


# Decisions.


@served(prefillers=4, prefill_ns_per_token=0.0, flags={"batch": 2})
async def test_requests_that_end_with_one_step_are_seen_by_one_decision(site: Site) -> None:
    begun = [site.send(COMPLETIONS, body(i)) for i in range(4)]
    for exchange in begun:
        await exchange.until_events(1)
    waiting = [site.send(COMPLETIONS, body(i)) for i in range(4, 8)]
    await site.until(lambda: len(site.world.scheduler.pool) == 4)
    decisions: list[int] = []
    watch(
        site,
        lambda step: decisions.append(sum(isinstance(one, Admit) for one in step.actions)),
    )
    for exchange in begun + waiting:
        assert (await exchange.end()).done
    assert [count for count in decisions if count] == [4]


@served()
async def test_a_slot_that_is_free_is_used_at_once(site: Site) -> None:
    for i in range(3):
        await site.post(COMPLETIONS, body(i))
    prefills, decodes = site.received("prefill"), site.received("decode")
    for prefill, decode in zip(prefills, decodes, strict=True):
        # 20 ms of prefill, and next to nothing between its end and the decode leg.
        assert decode.at_s - prefill.at_s < 0.021


@served(ranks=1, flags={"batch": 1})
async def test_a_freed_slot_waits_for_others_no_longer_than_a_moment(site: Site) -> None:
    first = site.send(COMPLETIONS, body(0))
    await first.until_events(1)
    second = site.send(COMPLETIONS, body(1))
    await site.until(lambda: len(site.world.scheduler.pool) == 1)
    await first.end()
    ended_s = site.loop.time()
    assert (await second.end()).done
    assert site.received("decode")[1].at_s - ended_s == pytest.approx(0.002, abs=0.001)


# Waiting too long.


def expired(exchange: Exchanged) -> None:
    assert exchange.status == 503
    assert exchange.header(b"retry-after") == b"1"
    assert "longer than it may" in exchange.json["error"]["message"]


@served(prefillers=1, prefill_base_ns=5_000_000_000, flags={"queue_ttl_s": 2.0, "probe_limit": 1})
async def test_a_request_that_waits_too_long_for_a_prefiller_is_given_up(site: Site) -> None:
    begin_s = site.loop.time()
    first = site.send(COMPLETIONS, body(0))
    second = site.send(COMPLETIONS, body(1))
    expired(await second.end())
    assert site.loop.time() - begin_s == pytest.approx(2.0, abs=0.26)
    assert (await first.end()).done
    assert len(site.received("prefill")) == 1
    assert [record.outcome for record in site.world.ended] == [Outcome.EXPIRED, Outcome.OK]


@served(ranks=1, flags={"pool_ttl_s": 2.0, "batch": 1})
async def test_a_request_that_waits_too_long_for_a_rank_is_given_up(site: Site) -> None:
    first = site.send(COMPLETIONS, body(0, max_tokens=300))
    await first.until_events(1)
    begin_s = site.loop.time()
    second = site.send(COMPLETIONS, body(1))
    expired(await second.end())
    assert site.loop.time() - begin_s == pytest.approx(2.0, abs=0.3)
    assert (await first.end()).done
    assert len(site.received("decode")) == 1
    page = (await site.get("/metrics")).body
    assert b'balanceroute_abandoned_leases_total{reason="ended"} 1.0' in page


def test_a_lease_that_lapses_in_the_pool_is_prefilled_again() -> None:
    async def scenario(site: Site) -> None:
        first = site.send(COMPLETIONS, body(0, max_tokens=300))
        await first.until_events(1)
        second = site.send(COMPLETIONS, body(1))
        assert (await second.end()).done
        alone = await site.ask("decode/0", COMPLETIONS, body(1))
        assert second.text == alone.text
        assert (await first.end()).done
        record = next(one for one in site.world.ended if one.lease_lapses)
        # 300 steps of 30 ms are 9 s; a lease is used for 2 s less its margin of 0.5 s.
        assert record.lease_lapses in (5, 6)
        assert record.outcome is Outcome.OK
        assert record.retries == 0
        assert len(site.received("prefill")) == 2 + record.lease_lapses
        assert site.world.observer.stale_admissions == []
        assert site.fleet.stats()["leases"]["expired"] == record.lease_lapses
        page = (await site.get("/metrics")).body
        lapses = b"%d.0" % record.lease_lapses
        assert b"balanceroute_lease_lapses_total " + lapses in page
        assert b'balanceroute_abandoned_leases_total{reason="lapsed"} ' + lapses in page

    flags = {"lease_s": 2.0, "lease_margin_s": 0.5, "connect_timeout_s": 0.25, "batch": 1}
    play(scenario, ranks=1, lease_s=2.0, flags=flags)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "connector",
    [
        one
        for one, facts in CONNECTORS.items()
        if facts.lease_s and facts.flow is not KvFlow.DECODE_FIRST
    ],
)
@pytest.mark.parametrize("resume", ["off", "exact"])
def test_a_lease_that_lapsed_while_the_machine_stood_still_costs_no_attempt(
    connector: str, resume: str, *, stream: bool
) -> None:
    async def scenario(site: Site) -> None:
        await asyncio.sleep(1.0)
        values = body(1) | {"stream": stream}
        alone = await site.ask("decode/0", COMPLETIONS, values)
        first = site.send(COMPLETIONS, body(0, max_tokens=100))
        await first.until_events(1)
        second = site.send(COMPLETIONS, values)
        await site.until(lambda: len(site.received("prefill")) == 2)
        await asyncio.sleep(0.5)  # It waits in the pool, by whose clock the lease holds on.
        site.world.suspend(10_000.0)
        assert (await second.end()).text == alone.text
        (record,) = (one for one in await site.ended(2) if one.lease_lapses)
        assert (record.outcome, record.retries, record.lease_lapses) == (Outcome.OK, 0, 1)
        page = (await site.get("/metrics")).body
        assert b'balanceroute_abandoned_leases_total{reason="lapsed"} 1.0' in page

    flags = {"batch": 1, "retry_attempts": 1, "resume": resume}
    play(scenario, ranks=1, connector=connector, flags=flags)


# Time limits of the legs.


@served(flags={"prefill_timeout_s": 1.0})
async def test_a_prefiller_that_hangs_is_passed_over(site: Site) -> None:
    site.fleet.faults.set("prefill/0", hang=True)
    exchange = await site.post(COMPLETIONS, STREAM)
    assert exchange.done
    engines = [seen.engine for seen in site.received("prefill")]
    assert engines == ["prefill/0", "prefill/1"]
    assert site.fleet.engine("prefill/0").idle


@served(flags={"prefill_timeout_s": 1.0})
async def test_when_every_prefiller_hangs_the_client_is_told(site: Site) -> None:
    site.fleet.faults.set("prefill", hang=True)
    begin_s = site.loop.time()
    exchange = await site.post(COMPLETIONS, STREAM)
    assert exchange.status == 504
    assert "prefill" in exchange.json["error"]["message"]
    assert len(site.received("prefill")) == 3
    assert site.loop.time() - begin_s == pytest.approx(3.0, abs=1.2)


@served(flags={"first_token_timeout_s": 1.0})
async def test_a_rank_without_a_first_token_is_passed_over(site: Site) -> None:
    site.fleet.faults.set("decode/0", hang=True)
    site.fleet.faults.set("decode/1", hang=True)
    exchange = site.send(COMPLETIONS, STREAM)
    await site.until(lambda: len(site.received("decode")) == 1)
    site.fleet.faults.clear()
    await exchange.end()
    assert exchange.done
    # What became of the first KV cache nobody knows.
    assert len(site.received("prefill")) == 2


@pytest.mark.parametrize("stream", [True, False])
@served(flags={"idle_stream_timeout_s": 2.0, "answer_timeout_s": 3.0})
async def test_an_answer_that_stands_still_ends_truthfully(site: Site, stream: bool) -> None:
    site.fleet.faults.set("decode", stall_after_tokens=5)
    exchange = await site.post(COMPLETIONS, BODY | {"stream": stream})
    if stream:
        assert exchange.status == 200
        assert exchange.error is not None
        assert len(exchange.events) == 6
        assert exchange.chunks[-1]["error"]["code"] == 504
    else:
        assert exchange.status == 504
    await site.until(lambda: all(one.idle for one in site.fleet.engines), limit_s=0.1)


# Retries.


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [429, 503])
@served(flags={"quarantine_failures": 1})
async def test_a_busy_engine_is_passed_over_and_not_blamed(
    site: Site, role: str, status: int, stream: bool
) -> None:
    values = BODY | {"stream": stream}
    site.fleet.faults.set(f"{role}/0", **{f"status_{status}": 1.0}, retry_after_s=7)
    for _ in range(3):
        answer = await site.post(COMPLETIONS, values)
        assert answer.status == 200
    site.fleet.faults.set(role, **{f"status_{status}": 1.0}, retry_after_s=7)
    # When all are, it is told as the engine tells it.
    answer = await site.post(COMPLETIONS, values)
    alone = await site.ask(f"{role}/0", COMPLETIONS, values)
    assert (answer.status, answer.body) == (status, alone.body)
    assert answer.header(b"retry-after") == b"7"
    assert all(not state.reason for state in site.world.proxy.deployment.health.states())


@served()
async def test_an_outage_is_not_answered_with_a_storm_of_retries(site: Site) -> None:
    site.fleet.faults.set("prefill", status_500=1.0)
    exchanges = [site.send(COMPLETIONS, body(i)) for i in range(60)]
    for exchange in exchanges:
        await exchange.end()
        assert exchange.status == 500
    assert len(site.received("prefill")) <= 60 * 1.2 + 10


# Clients that leave.


@pytest.mark.parametrize("phase", ["queued", "prefilling", "pooled", "admitted", "streaming"])
@served(prefill_base_ns=100_000_000, flags={"batch": 1, "probe_limit": 1})
async def test_a_client_that_leaves_frees_everything_at_once(site: Site, phase: str) -> None:
    scheduler, driver = site.world.scheduler, site.world.proxy.deployment.driver
    others = []
    if phase == "pooled":
        others = [site.send(COMPLETIONS, body(i, max_tokens=60)) for i in range(2)]
        for other in others:
            await other.until_events(1)
    if phase == "queued":
        others = [site.send(COMPLETIONS, body(i)) for i in range(2)]
        await site.until(lambda: len(site.received("prefill")) == 2)
    before = len(site.seen)
    exchange = site.send(COMPLETIONS, body(9, max_tokens=60))
    number = RequestId(len(others))
    await site.until(lambda: number in driver.sessions)
    if phase == "prefilling":
        await site.until(lambda: len(site.seen) == before + 1)
    elif phase == "pooled":
        await site.until(lambda: len(scheduler.pool) == 1)
    elif phase == "admitted":
        await site.until(lambda: len(site.received("decode")) == 1)
    elif phase == "streaming":
        await exchange.until_events(3)
    exchange.call.abort()
    await site.until(lambda: number not in driver.sessions, limit_s=0.05)
    scheduler.check()
    if not others:
        await site.until(lambda: all(one.idle for one in site.fleet.engines), limit_s=0.1)
    for other in others:
        assert (await other.end()).done
    left = next(one for one in site.world.ended if one.outcome is Outcome.CANCELLED)
    assert left.output_tokens == (3 if phase == "streaming" else 0)
    assert len(site.received("decode")) == len(others) + (phase in ("admitted", "streaming"))


@served(flags={"idle_stream_timeout_s": 5.0, "write_buffer_bytes": 4_096, "write_timeout_s": 300})
async def test_a_client_that_does_not_read_pauses_its_engine(site: Site) -> None:
    exchange = site.send(COMPLETIONS, STREAM | {"max_tokens": 2_000})
    other = site.send(COMPLETIONS, body(1, max_tokens=100))
    await exchange.until_events(3)
    exchange.call.pause()
    assert (await other.end()).done
    # It stands still for longer than a stream may, which is not the engine's fault, and long
    # after the engine has said its last token.
    await asyncio.sleep(100.0)
    assert all(engine.idle for engine in site.fleet.engines)
    assert len(site.world.proxy.deployment.driver.sessions) == 1
    exchange.call.resume()
    await exchange.end()
    assert exchange.done
    assert len(exchange.events) == 2_001


# The end.


@served()
async def test_a_drain_waits_for_every_answer(site: Site) -> None:
    held: list[Any] = []
    site.handlers[b"/tokenize"] = lambda _, __, reply: held.append(reply)
    exchange = site.send(COMPLETIONS, STREAM)
    await exchange.until_events(2)
    passed = site.send("/tokenize", {"prompt": "t1"})
    await site.until(lambda: bool(held))
    drain = asyncio.create_task(site.world.proxy.drain())
    await exchange.end()
    assert exchange.done
    await asyncio.sleep(1.0)
    assert not drain.done()
    held[0].send(200, [], b"x")
    assert (await passed.end()).body == b"x"
    await drain
    refused = await site.get("/health")
    assert refused.error is not None


@served(flags={"drain_timeout_s": 3.0})
async def test_a_drain_lasts_no_longer_than_it_may(site: Site) -> None:
    exchange = site.send(COMPLETIONS, STREAM | {"max_tokens": 1_000})
    await exchange.until_events(2)
    begin_s = site.loop.time()
    await site.world.proxy.drain()
    assert site.loop.time() - begin_s == pytest.approx(3.0)
    await site.world.proxy.close()
    await exchange.end()
    assert exchange.error is not None
    assert "shutting down" in exchange.chunks[-1]["error"]["message"]
    assert all(engine.idle for engine in site.fleet.engines)


@pytest.mark.parametrize("phase", ["queued", "prefilling", "streaming", "whole"])
@served(prefillers=1, flags={"probe_limit": 1})
async def test_what_is_cut_off_is_told_so(site: Site, phase: str) -> None:
    count = 2 if phase == "queued" else 1
    stream = phase != "whole"
    exchanges = [site.send(COMPLETIONS, body(i, stream=stream)) for i in range(count)]
    exchange = exchanges[-1]
    if phase == "streaming":
        await exchange.until_events(2)
    elif phase == "whole":
        await site.until(lambda: sum(site.fleet.stats()["running"]) == 1)
    else:
        await site.until(lambda: len(site.received("prefill")) == 1)
    await site.world.proxy.close()
    await exchange.end()
    if phase == "streaming":
        assert exchange.error is not None
        assert exchange.chunks[-1]["error"]["code"] == 503
    else:
        assert exchange.status == 503
        assert "shutting down" in exchange.json["error"]["message"]
    await site.until(lambda: all(one.idle for one in site.fleet.engines), limit_s=0.1)


@served()
async def test_a_task_of_the_proxys_own_that_fails_is_begun_again(site: Site) -> None:
    """An exception in a probe or a scrape ended the process with all its streams."""
    watching = asyncio.create_task(site.world.proxy.watch())
    await asyncio.sleep(1.0)
    assert not watching.done()

    def fail() -> list[Any]:
        raise ValueError("a defect")

    proxy = site.world.proxy
    due = proxy.deployment.health.due
    proxy.deployment.health.due = fail  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    page = (await site.get("/metrics")).body
    assert b'balanceroute_decision_failures_total{what="health"} ' in page
    proxy.deployment.health.due = due  # type: ignore[method-assign]
    site.fleet.faults.set("decode/0", unhealthy=True)
    quarantined = proxy.deployment.instances.ranks[0]
    await site.until(lambda: quarantined.status is Status.QUARANTINED)
    assert not watching.done()
    watching.cancel()


# Engines that fall silent or die: what they were sent goes elsewhere, and KV caches on them are lost.


def short_body(i: int, **more: Any) -> dict[str, Any]:
    values = {"model": "tiny", "prompt": f"t{i} u v", "max_tokens": 20, "ignore_eos": True}
    return values | more


def silence(site: Site, engine: str) -> None:
    """Let an engine's host vanish: nothing arrives there any more, and nothing comes back."""
    one = site.fleet.engine(engine)
    site.loop.network.silence(one.host, one.port)


async def right(site: Site, exchanges: list[Exchanged], engine: str) -> None:
    """Check that answers are what one engine alone would have said."""
    for i, exchange in enumerate(exchanges):
        await exchange.end()
        assert exchange.status == 200
        alone = await site.ask(engine, COMPLETIONS, short_body(i))
        assert exchange.text == alone.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@served(at_rest=False, flags={"first_token_timeout_s": 500.0})
async def test_a_leg_without_a_byte_leaves_an_engine_that_fell_silent(
    site: Site, *, stream: bool, role: str
) -> None:
    """It stayed there for the prefill's time limit of 300 s, or kept its slot for 1,800 s."""
    site.fleet.faults.set(f"{role}/0", delay_s=5.0)
    exchange = site.send(COMPLETIONS, short_body(0, stream=stream))
    await site.until(lambda: bool(site.received(role, COMPLETIONS)))
    assert site.received(role, COMPLETIONS)[0].engine == f"{role}/0"
    silence(site, f"{role}/0")
    began_s = site.loop.time()
    await right(site, [exchange], "prefill/1")
    # Three probes of 2 s, 5 s apart, tell that it is gone.
    assert site.loop.time() - began_s < 25.0
    (record,) = site.world.ended
    assert (record.outcome, record.retries) == (Outcome.OK, 1)
    # What a silent rank did with a KV cache nobody knows.
    assert len(site.received("prefill", COMPLETIONS)) >= 2


@served(at_rest=False, flags={"prefill_timeout_s": 60.0})
async def test_a_fleet_that_falls_silent_makes_no_storm(site: Site) -> None:
    site.fleet.faults.set("prefill", delay_s=5.0)
    exchanges = [site.send(COMPLETIONS, short_body(i)) for i in range(100)]
    await asyncio.sleep(1.0)
    silence(site, "prefill/0")
    silence(site, "prefill/1")
    for exchange in exchanges:
        await exchange.end()
    # A fifth of the requests and ten more, and what was on the first one that is known to be silent.
    assert sum(record.retries for record in site.world.ended) <= 30 + 50


async def pooled(site: Site, count: int) -> list[Exchanged]:
    """Fill the only slot for long, and let requests wait for it with their KV caches ready."""
    await site.send(COMPLETIONS, short_body(99, max_tokens=400, stream=True)).until_events(1)
    exchanges = [site.send(COMPLETIONS, short_body(i)) for i in range(count)]
    await site.until(lambda: len(site.world.scheduler.pool) == count)
    return exchanges


@served(ranks=1, batch_limit=1, flags={"batch": 1}, at_rest=False)
async def test_kv_caches_of_a_dead_prefiller_are_computed_elsewhere_before_they_are_needed(
    site: Site,
) -> None:
    """They stayed in the pool, went to a rank, and failed there."""
    exchanges = await pooled(site, 4)
    site.fleet.kill("prefill/0")
    sent = len(site.received("prefill/1", COMPLETIONS))
    assert site.received("prefill/0", COMPLETIONS)
    # Probes find out within seconds, while the slot is still taken.
    await site.until(lambda: len(site.received("prefill/1", COMPLETIONS)) > sent, 7.0)
    await right(site, exchanges, "prefill/1")
    assert {record.retries for record in site.world.ended} == {0}
    failures = (await site.get("/metrics")).body.decode()
    assert "balanceroute_kv_transfer_failures_total{" not in failures


@served(ranks=1, batch_limit=1, flags={"batch": 1}, at_rest=False)
async def test_kv_caches_of_an_engine_that_restarted_are_lost_once_its_new_id_is_seen(
    site: Site,
) -> None:
    """The same, of a prefiller that was back before anyone noticed."""
    exchanges = await pooled(site, 4)
    site.fleet.kill("prefill/0")
    await site.fleet.restore("prefill/0")
    # A new request shows who is there now.
    more = [site.send(COMPLETIONS, short_body(i)) for i in range(4, 8)]
    await right(site, exchanges + more, "prefill/1")
    assert {record.retries for record in site.world.ended} == {0}
    failures = (await site.get("/metrics")).body.decode()
    assert "balanceroute_kv_transfer_failures_total{" not in failures

"""A scheduler process that is killed: streams go on, and who waits for a decision gets one later."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.processes.part import HANG_S
from balanceroute.proxy.live.processes.patience import PATIENCE_S
from balanceroute.proxy.live.processes.uplink import MAX_KEPT, Uplink
from balanceroute.proxy.live.telemetry.process_log import LOGGER, set_log_level
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.chaos.split_world import SplitWorld

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.live.conftest import Play, Site

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 40, "ignore_eos": True}
STREAM = BODY | {"stream": True}
SLOW = {"step_base_ns": 20_000_000.0}


def split(site: "Site") -> SplitWorld:
    assert isinstance(site.world, SplitWorld)
    return site.world


async def order(site: "Site", what: str, engine: str) -> None:
    role = engine.partition("/")[0]
    path = f"/admin/instances/{what}".removesuffix("/")
    answer = await site.admin(path, {"role": role, "url": site.fleet.engine(engine).url})
    assert answer.status == 200, answer.body


async def instances(site: "Site") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await site.admin("/admin/instances")).json["instances"]
    return sorted(rows, key=lambda row: row["url"])


def test_streams_go_on_and_end_while_nobody_decides(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        whole = site.send(COMPLETIONS, BODY)
        stream = site.send(COMPLETIONS, STREAM)
        await stream.until_events(5)
        split(site).kill_scheduler(5.0)
        await stream.end()
        await whole.end()
        assert site.loop.time() < 1_004.0
        assert stream.done
        assert whole.text == stream.text
        assert site.world.ended == []
        await site.until(lambda: len(site.world.ended) == 2)  # Told when somebody listens again.
        assert [record.outcome for record in site.world.ended] == [Outcome.OK] * 2

    play(scenario, relays=2, **SLOW)


def test_a_request_that_comes_meanwhile_waits_and_is_served(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        split(site).kill_scheduler(1.5)
        await asyncio.sleep(0.1)
        exchange = site.send(COMPLETIONS, STREAM)
        assert (await site.get("/ready")).status == 503
        await asyncio.sleep(1.0)
        assert not exchange.over
        await exchange.end()
        assert exchange.done
        assert (await site.ended())[0].retries == 0

    play(scenario, relays=2)


def test_a_request_in_the_pool_keeps_its_kv_cache(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        first = [site.send(COMPLETIONS, STREAM) for _ in range(2)]
        for exchange in first:
            await exchange.until_events(2)
        pooled = site.send(COMPLETIONS, STREAM)
        await site.until(lambda: len(site.world.scheduler.pool) == 1)
        before = len(site.received("prefill"))
        split(site).kill_scheduler(0.1)
        await pooled.end()
        assert pooled.done
        assert len(site.received("prefill")) == before
        # It waited for a slot, as the new scheduler process knew that both were taken.
        assert any(exchange.over for exchange in first)
        for exchange in first:
            assert (await exchange.end()).done

    play(scenario, relays=2, batch_limit=1, flags={"batch": 1}, **SLOW)


def test_nobody_waits_for_ever(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        split(site).kill_scheduler(PATIENCE_S + 5.0)
        await asyncio.sleep(0.1)
        begin_s = site.loop.time()
        exchange = await site.send(COMPLETIONS, BODY).end()
        assert exchange.status == 503
        assert b"the scheduler process is not there" in exchange.body
        assert PATIENCE_S - 0.5 < site.loop.time() - begin_s < PATIENCE_S + 1.0
        await asyncio.sleep(10.0)
        assert (await site.post(COMPLETIONS, BODY)).status == 200

    play(scenario, relays=1)


def test_without_a_relay_the_proxy_is_not_ready(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        assert (await site.admin("/ready")).status == 200
        split(site).kill_relay(0, 2.0)
        await asyncio.sleep(0.5)
        assert (await site.admin("/ready")).status == 503
        assert (await site.admin("/health")).status == 200
        await asyncio.sleep(5.0)
        assert (await site.admin("/ready")).status == 200

    play(scenario, relays=1)


def test_orders_and_relays_outlive_a_clean_up_of_the_folder(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        assert (await site.admin("/admin/policy", {"policy": "jsq"})).status == 200
        split(site).clean_folder()
        split(site).kill_relay(0, 0.1)
        split(site).kill_relay(1, 0.1)
        await asyncio.sleep(0.2)
        assert (await site.post(COMPLETIONS, BODY)).status == 200
        await asyncio.sleep(2.0)
        assert (await site.admin("/ready")).status == 200
        split(site).kill_scheduler(0.5)
        await asyncio.sleep(0.1)
        assert (await site.post(COMPLETIONS, BODY)).status == 200
        assert (await site.state())["policy"] == "jsq"

    play(scenario, relays=2)


def test_patience_outlasts_the_replacement_of_one_that_stands_still(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        split(site).kill_scheduler(HANG_S + 15.0)
        await asyncio.sleep(0.1)
        assert (await site.post(COMPLETIONS, BODY)).status == 200

    play(scenario, relays=2)


def test_as_many_wait_as_the_queue_may_hold(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        split(site).kill_scheduler(2.0)
        await asyncio.sleep(0.1)
        waiting = [site.send(COMPLETIONS, BODY) for _ in range(3)]
        await asyncio.sleep(0.1)
        refused = [exchange for exchange in waiting if exchange.over]
        assert [exchange.status for exchange in refused] == [503]
        for exchange in waiting:
            await exchange.end()
        assert sorted(exchange.status for exchange in waiting) == [200, 200, 503]

    play(scenario, relays=1, flags={"queue_limit": 2})


def test_what_is_told_late_is_kept_and_no_more_than_a_bound_of_it() -> None:
    record = RequestRecord("r", COMPLETIONS, 0, 0.0)
    written: list[from_relay.FromRelay] = []
    calls: list[Any] = []
    uplink = Uplink(calls.append, lambda _, call: calls.append(call))
    for number in range(MAX_KEPT + 1):
        uplink.send(from_relay.SessionEnded(number, record))
    uplink.send(from_relay.KvAbandoned("lost"))

    def write(messages: "Sequence[from_relay.FromRelay]") -> None:
        written.extend(messages)

    hello = from_relay.Hello(1, 0, "")
    uplink.connect(write, hello)
    assert not uplink.connected
    assert written == [hello]
    written.clear()
    uplink.open([from_relay.Drained()])
    for call in calls:
        call()
    assert len(written) == 1 + MAX_KEPT
    assert isinstance(written[0], from_relay.Drained)
    assert written[-1] == from_relay.SessionEnded(MAX_KEPT - 1, record)
    uplink.close()
    uplink.send(from_relay.KvAbandoned("lost"))
    assert not uplink.connected


def test_the_orders_of_administrators_outlive_it(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        await order(site, "drain", "decode/1")
        await order(site, "drain", "prefill/0")
        await order(site, "remove", "prefill/0")
        assert (await site.admin("/admin/policy", {"policy": "jsq"})).status == 200
        before = [(row["url"], row["status"]) for row in await instances(site)]
        assert "draining" in dict(before).values()
        assert split(site).kill_scheduler(0.5)
        await asyncio.sleep(3.0)
        assert [(row["url"], row["status"]) for row in await instances(site)] == before
        assert (await site.state())["policy"] == "jsq"
        exchanges = [site.send(COMPLETIONS, STREAM) for _ in range(4)]
        for one in exchanges:
            await one.end()
            assert one.done
        assert {seen.engine for seen in site.seen} == {"prefill/1", "decode/0"}
        # The other way round.
        await order(site, "", "decode/1")
        await order(site, "", "prefill/0")
        assert split(site).kill_scheduler(0.5)
        await asyncio.sleep(3.0)
        assert [row["status"] for row in await instances(site)] == ["up"] * 4

    play(scenario, relays=2)


def test_the_log_level_that_was_ordered_outlives_it(
    play: "Play", caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(site: "Site") -> None:
        log = logging.getLogger(LOGGER)
        assert (await site.admin("/admin/log-level", {"level": "loud"})).status == 400
        assert (await site.admin("/admin/log-level", {"level": "error"})).status == 200
        assert log.level == logging.ERROR
        set_log_level("info")  # As the new process begins.
        assert split(site).kill_scheduler(0.5)
        await asyncio.sleep(3.0)
        assert log.level == logging.ERROR

    caplog.set_level(logging.INFO, LOGGER)  # And back at the end.
    play(scenario, relays=1)


def test_a_role_whose_engines_were_all_removed_has_none_after_it(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        for engine in ("prefill/0", "prefill/1", "decode/0", "decode/1"):
            await order(site, "remove", engine)
        assert split(site).kill_scheduler(0.5)
        await asyncio.sleep(3.0)
        assert await instances(site) == []
        assert (await site.get("/ready")).status == 503
        for engine in ("prefill/1", "decode/1"):
            await order(site, "", engine)
        await site.until(lambda: site.world.plane.ready)
        assert (await site.post(COMPLETIONS, BODY)).status == 200

    play(scenario, relays=1)


def test_the_limit_that_was_found_outlives_it(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        async def limit() -> int:
            return int((await site.state())["budget"]["limit_per_rank"])

        assert await limit() == 64
        # First tokens that come in time let it grow.
        exchanges = [site.send(COMPLETIONS, STREAM | {"max_tokens": 400}) for _ in range(12)]
        await asyncio.gather(*(one.end() for one in exchanges))
        grown = await limit()
        assert 64 < grown <= 70
        assert split(site).kill_scheduler(0.5)
        await asyncio.sleep(2.0)
        assert await limit() == grown

    flags = {"aimd": "post5", "aimd_min": 4, "aimd_max": 70, "aimd_ttft_s": 5.0}
    play(scenario, relays=1, flags=flags, **SLOW)

"""Engines that fall silent or die: what they were sent goes elsewhere, and KV caches on them are lost."""

import asyncio
from typing import Any

import pytest
from tests.support.site import Exchanged, Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

COMPLETIONS = "/v1/completions"


def body(i: int, **more: Any) -> dict[str, Any]:
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
        alone = await site.ask(engine, COMPLETIONS, body(i))
        assert exchange.text == alone.text


@pytest.mark.parametrize("stream", [False, True])
@served(at_rest=False)
async def test_a_prefill_leg_leaves_a_prefiller_that_fell_silent(
    site: Site, *, stream: bool
) -> None:
    """It stayed there for the prefill's time limit of 300 s."""
    site.fleet.faults.set("prefill/0", delay_s=5.0)
    exchange = site.send(COMPLETIONS, body(0, stream=stream))
    await site.until(lambda: bool(site.received("prefill", COMPLETIONS)))
    assert site.received("prefill", COMPLETIONS)[0].engine == "prefill/0"
    silence(site, "prefill/0")
    began_s = site.loop.time()
    await right(site, [exchange], "prefill/1")
    # Three probes of 2 s, 5 s apart, tell that it is gone.
    assert site.loop.time() - began_s < 25.0
    (record,) = site.world.ended
    assert (record.outcome, record.retries) == (Outcome.OK, 1)


@pytest.mark.parametrize("stream", [False, True])
@served(at_rest=False, flags={"first_token_timeout_s": 500.0})
async def test_a_decode_leg_without_a_byte_leaves_a_rank_that_fell_silent(
    site: Site, *, stream: bool
) -> None:
    """One that is not streamed kept its slot there for 1,800 s."""
    site.fleet.faults.set("decode/0", delay_s=5.0)
    exchange = site.send(COMPLETIONS, body(0, stream=stream))
    await site.until(lambda: bool(site.received("decode", COMPLETIONS)))
    assert site.received("decode", COMPLETIONS)[0].engine == "decode/0"
    silence(site, "decode/0")
    began_s = site.loop.time()
    await right(site, [exchange], "prefill/1")
    assert site.loop.time() - began_s < 25.0
    # What the silent rank did with its KV cache nobody knows.
    assert len(site.received("prefill", COMPLETIONS)) >= 2


@served(at_rest=False, flags={"prefill_timeout_s": 60.0})
async def test_a_fleet_that_falls_silent_makes_no_storm(site: Site) -> None:
    site.fleet.faults.set("prefill", delay_s=5.0)
    exchanges = [site.send(COMPLETIONS, body(i)) for i in range(100)]
    await asyncio.sleep(1.0)
    silence(site, "prefill/0")
    silence(site, "prefill/1")
    for exchange in exchanges:
        await exchange.end()
    # A fifth of the requests and ten more.
    assert sum(record.retries for record in site.world.ended) <= 30


async def pooled(site: Site, count: int) -> list[Exchanged]:
    """Fill the only slot for long, and let requests wait for it with their KV caches ready."""
    await site.send(COMPLETIONS, body(99, max_tokens=400, stream=True)).until_events(1)
    exchanges = [site.send(COMPLETIONS, body(i)) for i in range(count)]
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
    more = [site.send(COMPLETIONS, body(i)) for i in range(4, 8)]
    await right(site, exchanges + more, "prefill/1")
    assert {record.retries for record in site.world.ended} == {0}
    failures = (await site.get("/metrics")).body.decode()
    assert "balanceroute_kv_transfer_failures_total{" not in failures

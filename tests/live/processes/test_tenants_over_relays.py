"""Tenants' limits on what one engine answers alone, while relays and scheduler processes come and go."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.frontend.test_tenants import flags, given, tenant

from balanceroute.proxy.testing.chaos.split_world import SplitWorld

if TYPE_CHECKING:
    from tests.live.conftest import Exchanged, Play, Site

BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3"}
PATH = "/tokenize"


def split(site: "Site") -> SplitWorld:
    assert isinstance(site.world, SplitWorld)
    return site.world


async def free(site: "Site") -> None:
    """Wait until the scheduler process counts no request."""
    states = site.world.plane.deployment.tenancy.states
    await site.until(lambda: not any(one.in_flight for one in states()))


async def held(site: "Site") -> "Exchanged":
    """Begin a request that its engine holds."""
    replies: list[Any] = []
    site.handlers[PATH.encode()] = lambda _engine, _request, reply: replies.append(reply)
    first = site.send(PATH, BODY, headers=given("acme"))
    await site.until(lambda: bool(replies))
    del site.handlers[PATH.encode()]
    refused = await site.post(PATH, BODY, given("acme"))
    assert refused.status == 429
    assert refused.header(b"x-ratelimit-remaining-requests") == b"8"
    return first


@pytest.fixture
def limits(tmp_path: Path) -> dict[str, object]:
    return flags(tmp_path, tenant("acme", "concurrency = 1\nrequests_per_minute = 9"))


def test_those_of_a_relay_that_dies_count_no_more(play: "Play", limits: dict[str, object]) -> None:
    async def scenario(site: "Site") -> None:
        await held(site)
        split(site).kill_relay(0, 0.5)
        await asyncio.sleep(2.0)
        assert (await site.post(PATH, BODY, given("acme"))).status == 200
        await free(site)

    play(scenario, flags=limits, relays=1)


def test_a_scheduler_process_counts_those_alone_that_it_let_in(
    play: "Play", limits: dict[str, object]
) -> None:
    async def scenario(site: "Site") -> None:
        first = await held(site)
        split(site).kill_scheduler(1.0)
        await asyncio.sleep(0.1)
        waits = site.send(PATH, BODY, headers=given("acme"))
        await asyncio.sleep(0.5)
        assert not waits.over
        assert (await waits.end()).status == 200
        await free(site)
        first.call.abort()
        await site.until(lambda: len(site.world.ended) == 3)
        await free(site)
        assert (await site.post(PATH, BODY, given("acme"))).status == 200
        await free(site)

    play(scenario, flags=limits, relays=1)


def test_nobody_waits_for_ever_for_a_scheduler_process(
    play: "Play", limits: dict[str, object]
) -> None:
    async def scenario(site: "Site") -> None:
        split(site).kill_scheduler(35.0)
        await asyncio.sleep(0.1)
        begin_s = site.loop.time()
        waiting = [site.send(PATH, BODY, headers=given("acme")) for _ in range(3)]
        await asyncio.sleep(1.0)
        # As many wait as the queue may hold.
        assert [one.status for one in waiting] == [0, 0, 503]
        for one in waiting:
            await one.end()
            assert one.status == 503
            assert one.header(b"retry-after") == b"1"
            assert b"the scheduler process is not there" in one.body
        assert site.loop.time() - begin_s == pytest.approx(29.9, abs=0.1)
        assert (await site.post(PATH, BODY, given("acme"))).status == 503
        assert site.loop.time() - begin_s == pytest.approx(29.9, abs=0.1)
        await asyncio.sleep(6.0)
        assert not site.received("prefill")
        assert (await site.post(PATH, BODY, given("acme"))).status == 200
        await free(site)
        # Nor does it count against the next ones.
        split(site).kill_scheduler(1.0)
        await asyncio.sleep(0.1)
        assert (await site.post(PATH, BODY, given("acme"))).status == 200
        await free(site)

    play(scenario, flags=limits | {"queue_limit": 2}, relays=1)


def test_who_leaves_before_the_answer_counts_no_more(
    play: "Play", limits: dict[str, object]
) -> None:
    async def scenario(site: "Site") -> None:
        for _ in range(5):
            site.send(PATH, BODY, headers=given("acme")).call.abort()
            gone = site.send(PATH, BODY, headers=given("acme"))
            await asyncio.sleep(0.0002)
            gone.call.abort()
            await asyncio.sleep(1.0)
        assert not site.received("prefill")
        await free(site)
        assert (await site.post(PATH, BODY, given("acme"))).status == 200
        await free(site)

    play(scenario, flags=limits, relays=1)

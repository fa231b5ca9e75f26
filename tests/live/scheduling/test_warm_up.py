"""Engines that come back beside others under load: what they get, second by second."""

import asyncio
from collections import Counter
from typing import Any

from tests.support.site import Exchanged, Site, served

from balanceroute.proxy.lab.emulate.faults import Faults

COMPLETIONS = "/v1/completions"
BATCH = 16
FLEET: dict[str, Any] = {"ranks": 2, "batch_limit": BATCH, "step_base_ns": 50_000_000}
FLAGS: dict[str, object] = {"batch": BATCH, "health_interval_s": 0.5}


def body(number: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": f"t{number} t2",
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }


async def join(site: Site, *, cold_s: float = 0.0) -> list[int]:
    """Return what a rank gets in each tenth of a second of the first two after it came back.

    There are twice as many requests as slots. `cold_s` is what its first token takes.
    """
    asked: list[Exchanged] = []

    def send() -> None:
        asked.append(site.send(COMPLETIONS, body(len(asked))))

    for _ in range(BATCH):
        send()
    await site.until(lambda: len(site.world.scheduler.ledger) == BATCH)
    site.fleet.kill("decode/1")
    await asyncio.sleep(1.0)
    for _ in range(2 * BATCH):
        send()
    if cold_s:
        site.fleet.engine("decode/1").faults = Faults(delay_s=cold_s)
    await site.fleet.restore("decode/1")
    rank = site.world.plane.deployment.instances.ranks[1]
    await site.until(lambda: rank.open)
    begin_s, before = site.loop.time(), len(site.seen)
    await asyncio.sleep(2.0)
    got = Counter(
        int(10 * (seen.at_s - begin_s))
        for seen in site.seen[before:]
        if seen.engine == "decode/1" and seen.path == COMPLETIONS
    )
    site.fleet.faults.clear()
    for one in asked:
        await one.end()
    return [got[tenth] for tenth in range(20)]


@served(flags=FLAGS, **FLEET)
async def test_a_rank_that_comes_back_gets_its_full_share_within_two_seconds(site: Site) -> None:
    got = await join(site)
    # A round takes the transfer and a step of 50 ms: 1, 2, 4, 8 and the rest.
    assert sum(got[:1]) <= 3
    assert sum(got[:2]) <= 7
    assert sum(got[:10]) >= BATCH


@served(flags=FLAGS | {"warm_up": False}, **FLEET)
async def test_without_the_setting_it_gets_all_at_once(site: Site) -> None:
    got = await join(site)
    assert sum(got[:1]) == BATCH


@served(flags=FLAGS, **FLEET)
async def test_one_that_is_cold_gets_no_more_before_its_first_token(site: Site) -> None:
    assert sum(await join(site, cold_s=1.5)) <= 3


@served(flags=FLAGS, **FLEET)
async def test_a_proxy_that_begins_serves_at_its_full_rate(site: Site) -> None:
    asked = [site.send(COMPLETIONS, body(number)) for number in range(2 * BATCH)]
    await site.until(lambda: len(site.world.scheduler.ledger) == 2 * BATCH)
    begin_s = site.received("decode", COMPLETIONS)[0].at_s
    await asyncio.sleep(0.2)
    sent = site.received("decode", COMPLETIONS)
    assert len(sent) == 2 * BATCH
    # No longer than their prefills took.
    assert not site.world.scheduler.ranks.warm_up.active
    assert site.loop.time() - begin_s < 3.0
    for one in asked:
        await one.end()

"""The load log: samples of the mirror, as decisions see it."""

import asyncio
import json
from typing import Any

from tests.support.site import Site, served

from balanceroute.proxy.live.control.load_log import LoadLog

COMPLETIONS = "/v1/completions"


def of(site: Site, lines: list[bytes], interval_s: float = 0.1) -> LoadLog:
    world = site.world
    return LoadLog(
        world.proxy.deployment.driver,
        interval_s=interval_s,
        unix_s=lambda: 1000.0 + world.loop.time(),
        write=lines.append,
    )


def body(prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": list(range(prompt_tokens)),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


@served()
async def test_samples_come_at_the_interval_with_the_time_of_the_wall(site: Site) -> None:
    lines: list[bytes] = []
    begin_s = site.loop.time()
    task = asyncio.create_task(of(site, lines, 0.25).run())
    await asyncio.sleep(0.9)
    task.cancel()
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    times = [json.loads(line)["time_s"] - 1000.0 - begin_s for line in lines]
    assert [round(time, 3) for time in times] == [0.0, 0.25, 0.5, 0.75]
    ranks = [rank.name for rank in site.world.proxy.deployment.instances.ranks]
    assert json.loads(lines[0])["loads"] == {name: [0, 0, 0, 0] for name in ranks}


@served()
async def test_a_sample_counts_what_runs_apart_from_what_is_on_its_way(site: Site) -> None:
    log = of(site, [])
    exchanged = site.send(COMPLETIONS, body(100, 200))
    scheduler = site.world.scheduler
    await site.until(lambda: bool(scheduler.ledger.bound.any()))
    (bound,) = [load for load in json.loads(log.sample())["loads"].values() if any(load)]
    assert bound == [0, 0, 100, 1]
    await exchanged.until_events(50)
    (started,) = [load for load in json.loads(log.sample())["loads"].values() if any(load)]
    tokens, slots, bound_tokens, bound_slots = started
    assert slots == bound_slots == 1
    assert tokens == bound_tokens
    # As far as the stream has come, without the delay of the driver's own sweep.
    assert abs(tokens - (100 + len(exchanged.events))) <= 1
    await exchanged.end()


@served()
async def test_removed_ranks_are_left_out(site: Site) -> None:
    log = of(site, [])
    kept, removed = (rank.name for rank in site.world.proxy.deployment.instances.ranks)
    order = {"role": "decode", "url": removed}
    assert (await site.admin("/admin/instances/remove", order)).status == 200
    assert list(json.loads(log.sample())["loads"]) == [kept]

"""Engines that sleep, by an order to the proxy and by others', and pauses that outlive a process."""

import asyncio
from pathlib import Path

import pytest
from tests.live.control.test_pausing import reason, running
from tests.live.groups.test_groups import COMPLETIONS, add, ask, remove, world_of
from tests.live.test_proxy_connectors import CHAT, TALK
from tests.support.site import Exchanged, Site, served, served_by_groups

from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.control.pausing import ABORTED

ENGINES = ("prefill/0", "prefill/1", "decode/0", "decode/1")


async def order(site: Site, path: str) -> Exchanged:
    return await site.admin(path, {})


def asleep(site: Site) -> set[str]:
    return {name for name in ENGINES if site.fleet.engine(name).asleep}


async def status(site: Site, path: str) -> int | None:
    return (await site.admin(path)).status


@pytest.mark.parametrize("mode", ["abort", "wait"])
@served(flags={"queue_ttl_s": 300.0})
async def test_engines_sleep_and_wake_up_and_who_comes_waits(site: Site, mode: str) -> None:
    streams = await running(site)
    answer = await order(site, f"/sleep?level=2&mode={mode}")
    assert (answer.status, answer.json["status"], answer.json["level"]) == (200, "sleeping", 2)
    assert asleep(site) == set(ENGINES)
    for stream in streams:
        assert reason(await stream.end()) == ("abort" if mode == "abort" else "length")
    assert (await site.admin("/is_sleeping")).json == {"is_sleeping": True}
    assert (await site.admin("/is_paused")).json == {"is_paused": True}
    await asyncio.sleep(2.0)  # They are asked once a second.
    assert await status(site, "/ready") == 503
    site.seen.clear()
    waiting = site.send(CHAT, TALK)
    await asyncio.sleep(40.0)  # Longer than a role may be missing.
    assert not waiting.over
    assert not site.received("prefill", CHAT)
    part = await order(site, "/wake_up?tags=weights")
    assert (part.json["status"], part.json["asleep"]) == ("sleeping", len(ENGINES))
    assert await status(site, "/ready") == 503
    whole = await order(site, "/wake_up?tags=weights&tags=kv_cache")
    assert (whole.status, whole.json["status"], whole.json["asleep"]) == (200, "awake", 0)
    assert not asleep(site)
    assert (await waiting.end()).status == 200
    assert await status(site, "/ready") == 200


@served()
async def test_nothing_is_sent_to_an_engine_that_others_have_sleep(site: Site) -> None:
    for name in ("prefill/0", "decode/1"):
        site.fleet.engine(name).asleep = True
    await asyncio.sleep(2.0)
    site.seen.clear()
    for _ in range(6):
        assert (await site.post(CHAT, TALK)).status == 200
    assert {leg.engine for leg in site.received("prefill")} == {"prefill/1"}
    assert {leg.engine for leg in site.received("decode")} == {"decode/0"}
    assert (await site.post("/v1/embeddings", {"model": "tiny", "input": "a"})).status == 200
    assert site.seen[-1].engine == "prefill/1"
    site.fleet.engine("decode/0").asleep = True
    await asyncio.sleep(2.0)
    assert await status(site, "/ready") == 503
    assert (await site.post(CHAT, TALK)).status == 503
    for name in ENGINES:
        site.fleet.engine(name).asleep = False
    await asyncio.sleep(2.0)
    assert await status(site, "/ready") == 200
    assert (await site.post(CHAT, TALK)).status == 200


@served()
async def test_an_engine_that_cannot_sleep_is_told_of_and_wakes_up_with_the_others(
    site: Site,
) -> None:
    routes = site.fleet.engine("decode/0")._answer.__self__._routes  # type: ignore[attr-defined]
    for path in (b"/sleep", b"/wake_up", b"/is_sleeping"):
        del routes[path]
    answer = await order(site, "/sleep")
    assert answer.status == 502
    assert [row["status"] for row in answer.json["engines"]].count(404) == 1
    woken = await order(site, "/wake_up")
    assert (woken.status, woken.json["status"]) == (502, "awake")
    assert (await site.post(CHAT, TALK)).status == 200


@served_by_groups(orders=lambda tmp_path: OrderStore(tmp_path / "orders"))
async def test_a_group_that_is_added_meanwhile_is_paused_too(site: Site, tmp_path: Path) -> None:
    await remove(site, "large")
    assert (await site.admin("/pause?engines=false", {})).status == 200
    await add(site, "large")
    waiting = [site.send(COMPLETIONS, ask(model)) for model in ("small", "large")]
    await asyncio.sleep(10.0)
    assert not any(one.over for one in waiting)
    await site.admin("/abort_requests", {})
    for one in waiting:
        assert ABORTED in (await one.end()).json["error"]["message"]
    await world_of(site).restart()
    assert (await site.admin("/is_paused")).json["is_paused"]
    assert (await site.admin("/resume?engines=false", {})).status == 200
    for model in ("small", "large"):
        assert (await site.post(COMPLETIONS, ask(model))).status == 200

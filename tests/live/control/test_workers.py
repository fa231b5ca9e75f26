"""`/workers` of the admin listener, as training frameworks use a router's."""

import asyncio
from typing import Any

import pytest
from tests.live.test_proxy_connectors import CHAT, TALK
from tests.support.played import in_virtual_time
from tests.support.site import Exchanged, Site, served
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.live.control.admin import InstanceRows

GREEDY: dict[str, Any] = {"temperature": 0, "stream": True, "max_tokens": 200}


async def listed(site: Site) -> list[dict[str, Any]]:
    answer = await site.admin("/workers")
    assert answer.json["total"] == len(answer.json["workers"])
    found: list[dict[str, Any]] = answer.json["workers"]
    return found


async def delete(site: Site, worker_id: str) -> Exchanged:
    return await site.admin(f"/workers/{worker_id}", method="DELETE")


@served()
async def test_workers_are_listed_removed_and_added_again(site: Site) -> None:
    workers = await listed(site)
    assert [one["worker_type"] for one in workers].count("decode") == 2
    assert all(one["is_healthy"] for one in workers)
    first = next(one for one in workers if one["worker_type"] == "decode")
    assert (await site.admin(f"/workers/{first['id']}")).json == first
    removed = await delete(site, first["id"])
    assert (removed.status, removed.json["worker_id"]) == (202, first["id"])
    await site.until(lambda: len(site.world.plane.deployment.roster.targets()) == 3)
    assert first["id"] not in [one["id"] for one in await listed(site)]
    assert (await site.admin(f"/workers/{first['id']}")).status == 404
    assert (await delete(site, first["id"])).status == 404
    more = {"priority": 50, "model_id": "tiny", "ranks": 1}
    order = {"url": first["url"], "worker_type": "decode", **more}
    added = await site.admin("/workers", order)
    assert (added.status, added.json["worker_id"]) == (202, first["id"])
    assert (await site.admin("/workers", order)).status == 409
    assert first["id"] in [one["id"] for one in await listed(site)]


@served(flags={"resume": "exact"})
async def test_a_worker_that_is_removed_ends_what_only_it_can_end(site: Site) -> None:
    streams = [site.send(CHAT, TALK | GREEDY | more) for more in ({}, {"temperature": 0.7})]
    for stream in streams:
        await stream.until_events(9)
    for worker in await listed(site):
        if worker["url"] == site.fleet.engine("decode/0").url:
            assert worker["load"] > 0
            assert (await delete(site, worker["id"])).status == 202
    for stream in streams:
        assert (await stream.end()).done
    await site.until(lambda: len(site.world.plane.deployment.roster.targets()) == 3)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"url": "http://d:1"}, "worker_type is missing"),
        ({"worker_type": "decode"}, "url is missing"),
        ({"url": 3, "worker_type": "decode"}, "url must be a text"),
        ({"url": "http://d:1", "worker_type": "regular"}, "must be prefill or decode"),
        ({"url": "http://d:1", "worker_type": "decode", "ranks": 0}, "ranks must be"),
        ({"url": "http://d:1", "worker_type": "prefill", "bootstrap_port": "1"}, "bootstrap_port"),
        ({"url": "d", "worker_type": "decode"}, "must begin with http"),
        ({"url": "http://d:1", "worker_type": "decode", "other": 1}, "unknown key 'other'"),
    ],
    ids=str,
)
@served()
async def test_a_bad_worker_is_refused(site: Site, order: dict[str, Any], words: str) -> None:
    answer = await site.admin("/workers", order)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]


@served()
async def test_a_method_that_workers_do_not_have_is_refused(site: Site) -> None:
    (worker, *_) = await listed(site)
    answer = await site.admin(f"/workers/{worker['id']}", {})
    assert (answer.status, answer.header(b"allow")) == (405, b"GET, HEAD, DELETE")


@in_virtual_time(limit_s=100.0)
async def test_all_that_wait_look_at_the_same_rows(loop: VirtualLoop) -> None:
    made: list[float] = []

    def make() -> list[dict[str, object]]:
        made.append(loop.time())
        return [{"made_s": loop.time()}]

    rows = InstanceRows(make)

    async def wait() -> None:
        looked_s: float | None = None
        for _ in range(20):
            (row,) = rows.after(looked_s)
            assert row["made_s"] == made[-1]
            assert made[-1] == loop.time() if looked_s is None else made[-1] > looked_s
            looked_s = loop.time()
            await asyncio.sleep(0.25)

    async with asyncio.TaskGroup() as waits:
        for _ in range(20):
            waits.create_task(wait())
            await asyncio.sleep(0.01)
    # The first look of each, and then one for all.
    assert len(made) <= 20 + 25


@served()
async def test_a_removal_goes_on_in_the_next_process(site: Site) -> None:
    url = site.fleet.engine("decode/0").url
    (worker,) = [one for one in await listed(site) if one["url"] == url]
    streams = [site.send(CHAT, TALK | GREEDY) for _ in range(4)]
    for stream in streams:
        await stream.until_events(9)
    assert (await delete(site, worker["id"])).status == 202
    roster = site.world.plane.deployment.roster
    assert [target.url for target in roster.removing] == [url]
    await site.world.restart()
    await asyncio.sleep(2.0)
    assert url not in [one["url"] for one in await listed(site)]
    assert not site.world.plane.deployment.roster.removing


@served()
async def test_a_worker_that_is_taken_back_is_not_removed(site: Site) -> None:
    url = site.fleet.engine("decode/0").url
    (worker,) = [one for one in await listed(site) if one["url"] == url]
    stream = site.send(CHAT, TALK | GREEDY)
    await stream.until_events(9)
    assert (await delete(site, worker["id"])).status == 202
    assert (await site.admin("/workers", {"url": url, "worker_type": "decode"})).status == 202
    assert (await stream.end()).done
    await asyncio.sleep(10.0)
    assert url in [one["url"] for one in await listed(site)]

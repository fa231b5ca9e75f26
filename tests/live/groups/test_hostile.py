"""Orders and requests that try what nobody should: the other groups and requests are untouched."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.support.chaos.groups import GroupSettings
from tests.support.chaos.traces import FLAGS, SpanCollector
from tests.support.site import LARGE, SMALL, Site, play_groups, served_by_groups

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

COMPLETIONS = "/v1/completions"
GROUPS = {
    "small": GroupSettings(SMALL),
    "large": GroupSettings(replace(LARGE, batch_limit=1), proxy="batch = 1\npool_limit = 1"),
}
ALIAS = '[alias.auto]\ngroups = ["small", "large"]\nchooser = "static"\n'
CHAIN = ALIAS + 'fall_back = ["429", "503", "timeout"]\n'


def ask(model: str = "auto", **values: object) -> dict[str, object]:
    return {"model": model, "prompt": "t1 t2", "max_tokens": 3, "ignore_eos": True} | values


async def replaced(site: Site, name: str) -> None:
    """Remove a group and add it again."""
    assert (await site.world.end_group(name, force=True)).status == 200  # type: ignore[attr-defined]
    assert (await site.world.begin_group(name)).status == 200  # type: ignore[attr-defined]


@served_by_groups(groups=GROUPS)
async def test_the_proxy_outlives_all_groups_that_it_began_with(site: Site) -> None:
    watching = asyncio.create_task(site.world.plane.watch())
    for name in ("small", "large"):
        await replaced(site, name)
    await asyncio.sleep(1.0)
    # It ends with what it waits for.
    assert not watching.done()
    for name in ("small", "large"):
        assert (await site.post(COMPLETIONS, ask(name))).status == 200
    watching.cancel()


@served_by_groups(groups=GROUPS, flags=FLAGS)
async def test_traces_outlive_the_first_group(site: Site) -> None:
    collector = SpanCollector((200,))
    await collector.start()
    await replaced(site, "small")
    assert (await site.post(COMPLETIONS, ask("small"))).status == 200
    await asyncio.sleep(10.0)
    assert collector.spans
    await collector.close()


@served_by_groups(groups=GROUPS, more=ALIAS)
async def test_no_group_is_added_by_the_name_of_an_alias(site: Site) -> None:
    for table in ({"name": "auto"}, {"name": "other", "model": ["x", "auto"]}):
        refused = await site.admin("/admin/groups", table)
        assert refused.status == 400
        assert "'auto' is an alias" in refused.json["error"]["message"]
    assert (await site.post(COMPLETIONS, ask())).status == 200


@served_by_groups(groups=GROUPS)
async def test_a_group_that_is_added_while_all_are_paused_is_paused_too(site: Site) -> None:
    pause = await site.admin("/pause?mode=wait", {})
    assert pause.status == 200, pause.body
    await replaced(site, "small")
    waiting = site.send(COMPLETIONS, ask("small"))
    await asyncio.sleep(5.0)
    assert not [one for one in site.seen if one.request.path == COMPLETIONS.encode()]
    assert (await site.admin("/resume", {})).status == 200
    assert (await waiting.end()).status == 200


@served_by_groups(groups=GROUPS)
async def test_two_orders_at_once_do_not_both_count(site: Site) -> None:
    orders = [site.admin("/admin/groups", {"name": "other"}) for _ in range(2)]
    answers = await asyncio.gather(*orders)
    assert sorted(one.status for one in answers) in ([200, 409], [200, 429])
    removals = [
        site.admin("/admin/groups/remove", {"group": name, "force": True})
        for name in ("small", "large", "other")
    ]
    await asyncio.gather(*removals)
    left = (await site.admin("/admin/groups")).json["groups"]
    assert left
    assert len(left) == len(site.world.plane.deployments)


@served_by_groups(groups=GROUPS, more=CHAIN)
async def test_a_group_that_is_removed_under_a_chain_leaves_the_request_to_the_next(
    site: Site,
) -> None:
    # They run, wait in the pool, and wait in the queue.
    sent = [site.send(COMPLETIONS, ask(max_tokens=100)) for _ in range(6)]
    await asyncio.sleep(0.5)
    order = {"group": "large", "force": True}
    assert (await site.admin("/admin/groups/remove", order)).status == 200
    answers = [await one.end() for one in sent]
    # One that ran fails like one whose engine died; what waited goes on.
    assert {one.status for one in answers} <= {200, 502, 503}
    moved = [one for one in answers if one.status == 200]
    assert {one.header(b"x-balanceroute-model") for one in moved} == {b"small"}
    assert len(moved) >= 3
    records = [one for one in site.world.ended if one.alias]
    assert len(records) == 6
    assert sum(bool(one.fall_backs) for one in records) >= 3


@served_by_groups(groups=GROUPS, more=CHAIN + "fall_back_after_s = 1.5\n")
async def test_a_group_that_is_removed_before_its_turn_is_left_out(site: Site) -> None:
    full = [site.send(COMPLETIONS, ask("large", max_tokens=200)) for _ in range(4)]
    await asyncio.sleep(0.5)
    waiting = site.send(COMPLETIONS, ask(stream=True))
    await asyncio.sleep(0.5)
    order = {"group": "small", "force": True}
    assert (await site.admin("/admin/groups/remove", order)).status == 200
    for one in full:
        assert (await one.end()).status == 200
    answer = await waiting.end()
    assert (answer.status, answer.done) == (200, True)
    assert answer.header(b"x-balanceroute-model") == b"large"
    (record,) = [one for one in site.world.ended if one.alias]
    assert not record.fall_backs


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([(b"x-task", b"nothing")], "X-Task"),
        ([(b"x-task", b"")], "X-Task"),
        ([(b"x-task", b"\xff" * 4_000)], "X-Task"),
        ([(b"x-task", b"chat"), (b"x-task", b"chat")], "X-Task"),
        ([(b"x-request-deadline-ms", b"0")], "X-Request-Deadline-Ms"),
        ([(b"x-request-deadline-ms", b"-5")], "X-Request-Deadline-Ms"),
        ([(b"x-request-deadline-ms", b"9" * 40)], "X-Request-Deadline-Ms"),
        ([(b"x-request-deadline-ms", b"1e3")], "X-Request-Deadline-Ms"),
    ],
)
def test_a_bad_header_is_refused_by_its_name(headers: "Headers", reason: str) -> None:
    async def scenario(site: Site) -> None:
        refused = await site.post(COMPLETIONS, ask(), headers)
        assert (refused.status, reason in refused.json["error"]["message"]) == (400, True)
        assert len(refused.body) < 1_000
        assert not site.seen
        (record,) = site.world.ended
        assert (record.status, record.group) == (400, "")

    tasks = "tasks = { chat = [0.7, 1.0] }\n"
    play_groups(scenario, groups=GROUPS, more=CHAIN + tasks, flags={"client_deadline": True})

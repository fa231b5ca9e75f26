"""Several groups of engines behind one proxy: each request is its own group's alone."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.chaos.groups import GroupSettings, GroupWorld
from tests.support.chaos.traces import FLAGS, SpanCollector
from tests.support.site import LARGE, SMALL, Site, play_groups, served, served_by_groups

from balanceroute.proxy.live.control.order_store import OrderStore

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

COMPLETIONS = "/v1/completions"


def ask(model: str | None, **values: object) -> dict[str, object]:
    named = {} if model is None else {"model": model}
    return {**named, "prompt": "t1 t2", "max_tokens": 3} | values


async def known(site: Site) -> None:
    """Wait until the proxy has read the lists of all engines."""
    await asyncio.sleep(2.0)


def only_their_own(site: Site) -> None:
    """Check that no engine got a request for a model of another group."""
    assert site.seen
    for one in site.seen:
        group = one.engine.partition(":")[0]
        if one.request.body:
            assert one.values["model"].split("-")[0] == group, one.engine


@served_by_groups()
async def test_each_request_goes_to_the_group_of_its_model(site: Site) -> None:
    sent = [
        site.send(COMPLETIONS, ask(model, stream=stream, max_tokens=20))
        for model in ("small", "large", "large", "small")
        for stream in (True, False)
    ]
    for one in sent:
        assert (await one.end()).status == 200
    answers = [one.chunks[0]["model"] if one.events else one.json["model"] for one in sent]
    assert answers == ["small"] * 2 + ["large"] * 4 + ["small"] * 2
    only_their_own(site)
    assert {one.group for one in site.world.ended} == {"small", "large"}


@served_by_groups()
async def test_a_model_of_no_group_is_refused_and_one_must_be_named(site: Site) -> None:
    missing = await site.post(COMPLETIONS, ask("medium"))
    assert missing.status == 404
    assert missing.json["error"]["message"] == "The model `medium` does not exist."
    nothing = await site.post(COMPLETIONS, ask(None))
    assert nothing.status == 400
    assert "you must provide a model" in nothing.json["error"]["message"]
    alone = await site.post("/tokenize", {"prompt": "t1"})
    assert alone.status == 400
    assert not site.seen


@served_by_groups()
async def test_what_one_engine_answers_goes_to_the_group_too(site: Site) -> None:
    for model in ("small", "large"):
        answer = await site.post("/tokenize", {"model": model, "prompt": "t1 t2"})
        assert answer.status == 200
    assert [one.engine[:-1] for one in site.seen] == ["small:prefill/", "large:prefill/"]


def test_all_models_are_listed_adapters_too() -> None:
    async def scenario(site: Site) -> None:
        await known(site)
        listed = [one["id"] for one in (await site.get("/v1/models")).json["data"]]
        assert listed == ["small", "small-sql", "large"]
        assert (await site.get("/v1/models/small-sql")).json["parent"] == "small"
        assert (await site.get("/v1/models/large-sql")).status == 404
        assert (await site.post(COMPLETIONS, ask("small-sql"))).status == 200
        only_their_own(site)

    groups = {
        "small": GroupSettings(replace(SMALL, adapters=("small-sql",))),
        "large": GroupSettings(LARGE),
    }
    play_groups(scenario, groups=groups)


def test_a_group_with_a_list_serves_no_other_names() -> None:
    async def scenario(site: Site) -> None:
        await known(site)
        listed = [one["id"] for one in (await site.get("/v1/models")).json["data"]]
        assert listed == ["small", "large"]
        assert (await site.post(COMPLETIONS, ask("small-sql"))).status == 404

    groups = {
        "small": GroupSettings(replace(SMALL, adapters=("small-sql",)), table='model = ["small"]'),
        "large": GroupSettings(LARGE),
    }
    play_groups(scenario, groups=groups)


def test_one_group_that_is_full_does_not_hold_up_another() -> None:
    async def scenario(site: Site) -> None:
        slow = [
            site.send(COMPLETIONS, ask("large", max_tokens=400, ignore_eos=True)) for _ in "123456"
        ]
        await asyncio.sleep(1.0)
        begin_s = site.loop.time()
        for _ in range(10):
            assert (await site.post(COMPLETIONS, ask("small", max_tokens=20))).status == 200
        assert site.loop.time() - begin_s < 10.0
        assert not any(one.over for one in slow)
        for one in slow:
            assert (await one.end()).status == 200

    groups = {
        "small": GroupSettings(SMALL),
        "large": GroupSettings(replace(LARGE, batch_limit=1), proxy="batch = 1"),
    }
    play_groups(scenario, groups=groups)


@served_by_groups()
async def test_a_group_without_engines_is_down_and_the_others_serve(site: Site) -> None:
    await known(site)
    for engine in ("prefill/0", "decode/0", "decode/1"):
        site.fleet.kill(engine)
    await asyncio.sleep(20.0)
    down = await site.post(COMPLETIONS, ask("small"))
    assert down.status == 503
    assert (await site.post(COMPLETIONS, ask("large"))).status == 200
    # The proxy is of use while any group is.
    assert (await site.get("/ready")).status == 200
    for engine in ("prefill/0", "decode/0", "decode/1"):
        await site.fleet.restore(engine)
    await asyncio.sleep(20.0)
    assert (await site.post(COMPLETIONS, ask("small"))).status == 200


def test_every_group_has_settings_of_its_own() -> None:
    async def scenario(site: Site) -> None:
        small, large = site.world.plane.deployments.values()
        assert (small.policy, large.policy) == ("jsq", "fifo")
        assert (small.config.scheduling.batch, large.config.scheduling.batch) == (3, 7)

    groups = {
        "small": GroupSettings(SMALL, proxy='policy = "jsq"\nbatch = 3'),
        "large": GroupSettings(LARGE),
    }
    play_groups(scenario, groups=groups, more='[proxy]\npolicy = "fifo"\nbatch = 7')


@served_by_groups()
async def test_administrators_see_and_change_single_groups(site: Site) -> None:
    groups = (await site.admin("/admin/state")).json["groups"]
    assert [len(one["ranks"]) for one in groups.values()] == [2, 2]
    rows = (await site.admin("/admin/instances")).json["instances"]
    assert [row["group"] for row in rows] == ["small"] * 3 + ["large"] * 4
    assert (await site.admin("/admin/policy", {"policy": "jsq"})).status == 400
    order = {"policy": "jsq", "group": "large"}
    assert (await site.admin("/admin/policy", order)).status == 200
    policies = [one.policy for one in site.world.plane.deployments.values()]
    assert policies == ["br-h", "jsq"]
    assert (await site.admin("/admin/policy", order | {"group": "x"})).status == 404


@served_by_groups()
async def test_engines_are_drained_removed_and_added_by_their_group(site: Site) -> None:
    assert isinstance(site.world.plane.deployments, dict)
    url = site.fleet.decode_urls[1]
    where = {"role": "decode", "url": url}
    assert (await site.admin("/admin/instances/drain", where)).status == 200
    assert (await site.admin("/admin/instances/remove", where)).status == 200
    assert (await site.post(COMPLETIONS, ask("small"))).status == 200
    # An engine that is new must be said to be of a group, and is of one.
    assert (await site.admin("/admin/instances", where | {"ranks": 1})).status == 400
    again = where | {"ranks": 1, "group": "small"}
    assert (await site.admin("/admin/instances", again)).status == 200
    other = where | {"ranks": 1, "group": "large"}
    assert (await site.admin("/admin/instances", other)).status == 409
    small = site.world.plane.deployments["small"]
    assert [rank.open for rank in small.instances.ranks] == [True, False, True]


@served_by_groups()
async def test_a_group_is_added_drained_and_removed_live(site: Site) -> None:
    fleet = site.world.fleets["large"]  # type: ignore[attr-defined]
    assert (await site.admin("/admin/groups/drain", {"group": "large"})).status == 200
    assert (await site.post(COMPLETIONS, ask("large"))).status == 503
    removed = await site.admin("/admin/groups/remove", {"group": "large"})
    assert [one["group"] for one in removed.json["groups"]] == ["small"]
    assert (await site.post(COMPLETIONS, ask("large"))).status == 404
    assert (await site.admin("/admin/groups/remove", {"group": "small"})).status == 409
    added = {
        "name": "large",
        "prefill": [{"url": url} for url in fleet.prefill_urls],
        "decode": [{"url": url} for url in fleet.decode_urls],
        "proxy": {"policy": "jsq"},
    }
    assert (await site.admin("/admin/groups", added)).status == 200
    assert (await site.post(COMPLETIONS, ask("large"))).status == 200
    assert (await site.post(COMPLETIONS, ask("small"))).status == 200
    only_their_own(site)
    assert site.world.plane.deployments["large"].policy == "jsq"
    page = (await site.get("/metrics")).body.decode()
    assert 'balanceroute_live_requests{group="large",state="queued"} 0' in page


@served_by_groups()
async def test_a_group_may_begin_without_engines(site: Site) -> None:
    fleet = site.world.fleets["large"]  # type: ignore[attr-defined]
    for path in ("drain", "remove"):
        assert (await site.admin(f"/admin/groups/{path}", {"group": "large"})).status == 200
    assert (await site.admin("/admin/groups", {"name": "large"})).status == 200
    assert (await site.post(COMPLETIONS, ask("large"))).status == 503
    for role, urls in (("prefill", fleet.prefill_urls), ("decode", fleet.decode_urls)):
        for url in urls:
            order = {"role": role, "url": url, "group": "large"}
            order |= {"ranks": 1} if role == "decode" else {}
            assert (await site.admin("/admin/instances", order)).status == 200
    assert (await site.post(COMPLETIONS, ask("large"))).status == 200


@pytest.mark.parametrize(
    ("path", "order", "status", "reason"),
    [
        ("", {"name": "small"}, 409, "is served by the group 'small'"),
        ("", {"name": "x", "model": ["large"]}, 409, "is served by the group 'large'"),
        ("", {"name": "x", "proxy": {"bach": 1}}, 400, "[group.proxy].bach: unknown key"),
        ("", {"name": "x", "proxy": {"port": 1}}, 400, "belongs into [proxy]"),
        ("", {"name": "x", "prefill": [{}]}, 400, "group.prefill[0].url: is missing"),
        ("", {"name": ""}, 400, "name: must be a text"),
        ("/drain", {"group": "x"}, 404, "there is no group 'x'"),
        ("/remove", {"group": "x"}, 404, "there is no group 'x'"),
        ("/remove", {"group": "small", "force": 1}, 400, "force must be true or false"),
    ],
)
@served_by_groups()
async def test_a_bad_order_about_groups_changes_nothing(
    site: Site, path: str, order: dict[str, object], status: int, reason: str
) -> None:
    answer = await site.admin(f"/admin/groups{path}", order)
    assert (answer.status, reason in answer.json["error"]["message"]) == (status, True)
    assert list(site.world.plane.deployments) == ["small", "large"]
    assert (await site.post(COMPLETIONS, ask("small"))).status == 200


@served_by_groups()
async def test_a_group_with_requests_is_removed_by_force_alone(site: Site) -> None:
    running = site.send(COMPLETIONS, ask("large", max_tokens=300, stream=True, ignore_eos=True))
    await running.until_events(3)
    order = {"group": "large"}
    assert (await site.admin("/admin/groups/remove", order)).status == 409
    assert (await site.admin("/admin/groups/remove", order | {"force": True})).status == 200
    assert not (await running.end()).done
    assert [one.outcome.value for one in site.world.ended] == ["upstream_error"]  # type: ignore[union-attr]
    assert (await site.admin("/admin/groups")).json["groups"][0]["in_flight"] == 0


@served_by_groups()
async def test_metrics_have_the_group(site: Site) -> None:
    for model in ("small", "large", "large"):
        assert (await site.post(COMPLETIONS, ask(model))).status == 200
    page = (await site.get("/metrics")).body.decode()
    assert 'balanceroute_group_requests_total{group="large",outcome="ok"} 2' in page
    assert 'balanceroute_live_requests{group="small",state="queued"} 0' in page
    assert 'balanceroute_decode_step_seconds{group="large"}' in page
    # Each family once, and what is of the whole proxy without a group.
    lines = page.splitlines()
    types = [line for line in lines if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert any(line.startswith("balanceroute_client_connections ") for line in lines)


TENANTS = """
[[tenant]]
name = "t"
default = true
requests_per_minute = 3
"""


@served_by_groups(tenants=TENANTS)
async def test_a_tenants_limits_hold_over_all_groups(site: Site) -> None:
    statuses = [
        (await site.post(COMPLETIONS, ask(model))).status
        for model in ("small", "large", "small", "large", "small")
    ]
    assert statuses == [200, 200, 200, 429, 429]


@pytest.mark.parametrize("connector", ["mooncake", "mooncake-layerwise"])
def test_every_connector_may_be_behind_a_group(connector: str) -> None:
    async def scenario(site: Site) -> None:
        await asyncio.sleep(3.0)
        sent = [site.send(COMPLETIONS, ask(m, stream=True)) for m in ("small", "large") * 4]
        for one in sent:
            assert (await one.end()).status == 200, one.body
        only_their_own(site)

    groups = {
        "small": GroupSettings(replace(SMALL, connector=connector)),
        "large": GroupSettings(LARGE),
    }
    play_groups(scenario, groups=groups)


@served_by_groups()
async def test_the_log_says_which_group_it_was(site: Site) -> None:
    await site.post(COMPLETIONS, ask("large"), headers=[(b"x-request-id", b"r1")])
    (row,) = (await site.admin("/admin/requests?id=r1")).json["requests"]
    assert row["group"] == "large"


@served()
async def test_a_proxy_without_groups_says_nothing_of_them(site: Site) -> None:
    assert (await site.post(COMPLETIONS, ask("tiny"))).status == 200
    page = (await site.get("/metrics")).body.decode()
    assert "group=" not in page
    state: Any = (await site.admin("/admin/state")).json
    assert '"group":' not in json.dumps({**state, "state": {}})
    await site.post(COMPLETIONS, ask("tiny"), headers=[(b"x-request-id", b"r1")])
    (row,) = (await site.admin("/admin/requests?id=r1")).json["requests"]
    assert "group" not in row


# Ranks of one group that make no tokens while others of the group do.


GROUPS = {
    "small": GroupSettings(replace(SMALL, step_base_ns=50_000_000)),
    "large": GroupSettings(replace(LARGE, step_base_ns=50_000_000)),
}


def body(model: str, number: int) -> dict[str, object]:
    values: dict[str, object] = {"model": model, "prompt": f"t{number} t2", "max_tokens": 300}
    return values | {"ignore_eos": True, "stream": True, "temperature": 0}


@served_by_groups(groups=GROUPS, flags={"resume": "exact"})
async def test_a_rank_is_compared_with_those_of_its_own_group(site: Site) -> None:
    world = site.world
    streams = [
        site.send("/v1/completions", body(model, number)) for model in GROUPS for number in range(6)
    ]
    await asyncio.sleep(6.0)
    fleets = world.fleets  # type: ignore[attr-defined]
    # One rank of a group, and all ranks of the other: that says nothing of either of them.
    fleets["small"].faults.set("decode/0", frozen="alone")
    fleets["large"].faults.set("decode/0", frozen="barrier")
    await asyncio.sleep(3.0)
    small, large = (world.plane.deployments[name].driver.veto for name in GROUPS)
    assert (dict(small.vetoes), small.still_ranks) == ({0: 1}, 0)
    assert (dict(large.vetoes), large.still_ranks) == ({}, 2)
    page = (await site.get("/metrics")).body.decode()
    assert 'balanceroute_decode_still_ranks{group="large"} 2\n' in page
    assert 'balanceroute_decode_still_ranks{group="small"} 0\n' in page
    for fleet in fleets.values():
        fleet.faults.clear()
    for stream in streams:
        await stream.end()
        assert stream.done


# Groups that were added and removed live, over a restart of the proxy with `--roster-state`.


def ask_kept(model: str) -> dict[str, object]:
    return {"model": model, "prompt": "t1 t2", "max_tokens": 3}


def world_of(site: Site) -> GroupWorld:
    assert isinstance(site.world, GroupWorld)
    return site.world


async def add(site: Site, name: str, **more: object) -> None:
    """Add a group before the engines of `large`, which is gone."""
    fleet = world_of(site).fleets["large"]
    table = {
        "name": name,
        "prefill": [{"url": url} for url in fleet.prefill_urls],
        "decode": [{"url": url} for url in fleet.decode_urls],
    }
    assert (await site.admin("/admin/groups", table | more)).status == 200


async def remove(site: Site, name: str) -> None:
    for path in ("drain", "remove"):
        assert (await site.admin(f"/admin/groups/{path}", {"group": name})).status == 200


def names(site: Site) -> list[str]:
    return list(site.world.plane.deployments)


@served_by_groups(orders=lambda tmp_path: OrderStore(tmp_path / "orders"))
async def test_groups_are_as_they_were_ordered_after_a_restart(site: Site, tmp_path: Path) -> None:
    await remove(site, "large")
    await add(site, "huge", model=["large"], proxy={"policy": "jsq"})
    await world_of(site).restart()
    assert names(site) == ["small", "huge"]
    assert site.world.plane.deployments["huge"].policy == "jsq"
    assert (await site.post(COMPLETIONS, ask_kept("large"))).status == 200
    assert (await site.post(COMPLETIONS, ask_kept("small"))).status == 200
    # What was added is removed for good, and what the file has stays away.
    await remove(site, "huge")
    await world_of(site).restart()
    assert names(site) == ["small"]


@served_by_groups(orders=lambda tmp_path: OrderStore(tmp_path / "orders"))
async def test_a_group_that_is_added_again_is_not_as_it_was_left(
    site: Site, tmp_path: Path
) -> None:
    await remove(site, "large")
    await add(site, "large")
    # Its engines were drained when it was removed.
    assert (await site.post(COMPLETIONS, ask_kept("large"))).status == 200
    await world_of(site).restart()
    assert (await site.post(COMPLETIONS, ask_kept("large"))).status == 200


@served_by_groups()
async def test_without_a_file_groups_are_those_of_the_settings(site: Site) -> None:
    await remove(site, "large")
    await world_of(site).restart()
    assert names(site) == ["small", "large"]


def test_orders_for_other_groups_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(site: Site) -> None:
        await remove(site, "large")

    async def later(site: Site) -> None:
        assert names(site) == ["small", "large", "more"]

    keeper = OrderStore(tmp_path / "orders")
    play_groups(scenario, orders=keeper)
    more = {
        "small": GroupSettings(SMALL),
        "large": GroupSettings(LARGE),
        "more": GroupSettings(SMALL, 'model = ["more"]'),
    }
    play_groups(later, groups=more, orders=keeper)
    assert "orders about groups are dropped: the settings have other groups by now" in caplog.text


@pytest.mark.parametrize(
    "kept",
    [
        b"{",
        b'{"[[model]]": 3}',
        b'{"[[model]]": {"basis": 1}}',
        b'{"[[model]]": {"basis": "\xff"}}',
    ],
)
def test_what_cannot_be_read_is_logged_and_the_settings_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bytes
) -> None:
    async def scenario(site: Site) -> None:
        assert names(site) == ["small", "large"]

    path = tmp_path / "orders"
    path.write_bytes(kept)
    play_groups(scenario, orders=OrderStore(path))
    assert "orders about groups are lost" in caplog.messages


def test_a_group_that_cannot_be_served_any_more_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "orders"

    async def scenario(site: Site) -> None:
        await remove(site, "large")
        await add(site, "huge")
        kept = json.loads(path.read_bytes())
        kept["[[model]]"]["added"][0]["proxy"] = {"bach": 1}
        path.write_text(json.dumps(kept))
        await world_of(site).restart()
        assert names(site) == ["small"]
        assert (await site.post(COMPLETIONS, ask_kept("small"))).status == 200

    play_groups(scenario, orders=OrderStore(path))
    assert "a group that was added is lost" in caplog.messages


# Orders and requests that try what nobody should: the other groups and requests are untouched.


HOSTILE_GROUPS = {
    "small": GroupSettings(SMALL),
    "large": GroupSettings(replace(LARGE, batch_limit=1), proxy="batch = 1\npool_limit = 1"),
}
ALIAS = '[alias.auto]\ngroups = ["small", "large"]\nchooser = "static"\n'
CHAIN = ALIAS + 'fall_back = ["429", "503", "timeout"]\n'


def ask_as(model: str = "auto", **values: object) -> dict[str, object]:
    return {"model": model, "prompt": "t1 t2", "max_tokens": 3, "ignore_eos": True} | values


async def replaced(site: Site, name: str) -> None:
    """Remove a group and add it again."""
    assert (await site.world.end_group(name, force=True)).status == 200  # type: ignore[attr-defined]
    assert (await site.world.begin_group(name)).status == 200  # type: ignore[attr-defined]


@served_by_groups(groups=HOSTILE_GROUPS)
async def test_the_proxy_outlives_all_groups_that_it_began_with(site: Site) -> None:
    watching = asyncio.create_task(site.world.plane.watch())
    for name in ("small", "large"):
        await replaced(site, name)
    await asyncio.sleep(1.0)
    # It ends with what it waits for.
    assert not watching.done()
    for name in ("small", "large"):
        assert (await site.post(COMPLETIONS, ask_as(name))).status == 200
    watching.cancel()


@served_by_groups(groups=HOSTILE_GROUPS, flags=FLAGS)
async def test_traces_outlive_the_first_group(site: Site) -> None:
    collector = SpanCollector((200,))
    await collector.start()
    await replaced(site, "small")
    assert (await site.post(COMPLETIONS, ask_as("small"))).status == 200
    await asyncio.sleep(10.0)
    assert collector.spans
    await collector.close()


@served_by_groups(groups=HOSTILE_GROUPS, more=ALIAS)
async def test_no_group_is_added_by_the_name_of_an_alias(site: Site) -> None:
    for table in ({"name": "auto"}, {"name": "other", "model": ["x", "auto"]}):
        refused = await site.admin("/admin/groups", table)
        assert refused.status == 400
        assert "'auto' is an alias" in refused.json["error"]["message"]
    assert (await site.post(COMPLETIONS, ask_as())).status == 200


@served_by_groups(groups=HOSTILE_GROUPS)
async def test_a_group_that_is_added_while_all_are_paused_is_paused_too(site: Site) -> None:
    pause = await site.admin("/pause?mode=wait", {})
    assert pause.status == 200, pause.body
    await replaced(site, "small")
    waiting = site.send(COMPLETIONS, ask_as("small"))
    await asyncio.sleep(5.0)
    assert not [one for one in site.seen if one.request.path == COMPLETIONS.encode()]
    assert (await site.admin("/resume", {})).status == 200
    assert (await waiting.end()).status == 200


@served_by_groups(groups=HOSTILE_GROUPS)
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


@served_by_groups(groups=HOSTILE_GROUPS, more=CHAIN)
async def test_a_group_that_is_removed_under_a_chain_leaves_the_request_to_the_next(
    site: Site,
) -> None:
    # They run, wait in the pool, and wait in the queue.
    sent = [site.send(COMPLETIONS, ask_as(max_tokens=100)) for _ in range(6)]
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


@served_by_groups(groups=HOSTILE_GROUPS, more=CHAIN + "fall_back_after_s = 1.5\n")
async def test_a_group_that_is_removed_before_its_turn_is_left_out(site: Site) -> None:
    full = [site.send(COMPLETIONS, ask_as("large", max_tokens=200)) for _ in range(4)]
    await asyncio.sleep(0.5)
    waiting = site.send(COMPLETIONS, ask_as(stream=True))
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
        refused = await site.post(COMPLETIONS, ask_as(), headers)
        assert (refused.status, reason in refused.json["error"]["message"]) == (400, True)
        assert len(refused.body) < 1_000
        assert not site.seen
        (record,) = site.world.ended
        assert (record.status, record.group) == (400, "")

    tasks = "tasks = { chat = [0.7, 1.0] }\n"
    play_groups(
        scenario, groups=HOSTILE_GROUPS, more=CHAIN + tasks, flags={"client_deadline": True}
    )

"""Several groups of engines behind one proxy: each request is its own group's alone."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support.chaos.groups import GroupSettings
from tests.support.site import LARGE, SMALL, Site, play_groups, served, served_by_groups

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
    assert "group" not in page
    state: Any = (await site.admin("/admin/state")).json
    assert "group" not in json.dumps({**state, "state": {}})
    await site.post(COMPLETIONS, ask("tiny"), headers=[(b"x-request-id", b"r1")])
    (row,) = (await site.admin("/admin/requests?id=r1")).json["requests"]
    assert "group" not in row

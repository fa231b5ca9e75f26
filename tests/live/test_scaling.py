"""What autoscalers read of a running proxy: what bounds it, and how many engines its load needs."""

import asyncio
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.site import Exchanged, Site, play, play_groups

ON = {"scaling_signals": True, "batch": 2}
NAMES = ("bound_by", "wanted_prefillers", "wanted_ranks", "advised_role_flips")


def stream(site: Site, number: int, **values: object) -> Exchanged:
    body = {"prompt": [number, *[5] * 99], "max_tokens": 60, "ignore_eos": True, "stream": True}
    return site.send("/v1/completions", body | {"temperature": 0} | values)


async def told(site: Site) -> dict[tuple[str, ...], float]:
    """Return what the metrics say, by name and the values of labels."""
    page = (await site.admin("/metrics")).body.decode()
    return {
        (sample.name.removeprefix("balanceroute_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.name.removeprefix("balanceroute_") in NAMES
    }


async def arrivals(site: Site, seconds: int, per_s: int = 2, **values: object) -> None:
    for number in range(seconds * per_s):
        stream(site, number, **values)
        await asyncio.sleep(1.0 / per_s)


def test_full_ranks_are_told_and_more_are_wanted() -> None:
    async def scenario(site: Site) -> None:
        # Each takes 1.8 s of a slot, of which there are four.
        await arrivals(site, 60, per_s=3)
        found = await told(site)
        bound = {labels[0]: value for (name, *labels), value in found.items() if name == "bound_by"}
        assert bound.keys() == {"prefill", "decode_slots", "kv_memory", "barrier", "none"}
        assert bound["decode_slots"] + bound["barrier"] == sum(bound.values()) == 1
        # 3 x 1.8 slots, 2 a rank, 80 % of them in use.
        assert found["wanted_ranks",] in (4, 5)
        assert found["wanted_prefillers",] == 1
        assert found["advised_role_flips", "decode"] == 1
        assert found["advised_role_flips", "prefill"] == 0
        page = (await site.admin("/admin/state")).json["scaling"][""]
        assert page["wanted_ranks"] == found["wanted_ranks",]
        assert page["role_flips"] == 1
        await site.rest(600.0)

    play(scenario, flags=ON, batch_limit=2)


def test_busy_prefillers_are_told() -> None:
    async def scenario(site: Site) -> None:
        # Each takes 0.9 s of a prefiller, of which there are two, and one step of a rank.
        prompt = [7] * 1_760
        for number in range(180):
            stream(site, number, prompt=[number, *prompt], max_tokens=1)
            await asyncio.sleep(1 / 3)
        found = await told(site)
        assert found["bound_by", "prefill"] == 1
        assert found["wanted_prefillers",] in (3, 4)
        assert found["wanted_ranks",] == 1
        assert found["advised_role_flips", "prefill"] == 1
        await site.rest(600.0)

    play(
        scenario,
        flags=ON,
        batch_limit=2,
        prefill_ns_per_token=500_000.0,
    )


def test_an_idle_fleet_needs_one_of_each_and_a_dead_one_says_no_more() -> None:
    async def scenario(site: Site) -> None:
        await asyncio.sleep(5.0)
        found = await told(site)
        assert (found["bound_by", "none"], found["wanted_prefillers",]) == (1, 1)
        assert found["wanted_ranks",] == 1

    play(scenario, flags=ON)


def test_each_group_has_its_own() -> None:
    async def scenario(site: Site) -> None:
        await arrivals(site, 60, per_s=2, model="small")
        found = await told(site)
        assert found["wanted_ranks", "small"] > found["wanted_ranks", "large"] == 1
        assert (await site.admin("/admin/state")).json["scaling"].keys() == {"small", "large"}
        await site.rest(600.0)

    play_groups(scenario, flags=ON)


def test_off_there_is_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        await asyncio.sleep(2.0)
        assert await told(site) == {}
        assert "scaling" not in (await site.admin("/admin/state")).json

    names = [f"balanceroute.proxy.{name}" for name in ("capacity", "live.scaling")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    play(scenario)
    assert not sys.modules.keys() & {*names[1:]}

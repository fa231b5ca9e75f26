"""Ranks of one group that make no tokens while others of the group do."""

import asyncio
from dataclasses import replace

from tests.support.chaos.groups import GroupSettings
from tests.support.site import LARGE, SMALL, Site, served_by_groups

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

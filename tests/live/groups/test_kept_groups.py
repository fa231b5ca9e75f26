"""Groups that were added and removed live, over a restart of the proxy with `--roster-state`."""

import json
from pathlib import Path

import pytest
from tests.support.chaos.groups import GroupSettings, GroupWorld
from tests.support.site import LARGE, SMALL, Site, play_groups, served_by_groups

from balanceroute.proxy.live.control.order_store import OrderStore

COMPLETIONS = "/v1/completions"


def ask(model: str) -> dict[str, object]:
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
    assert (await site.post(COMPLETIONS, ask("large"))).status == 200
    assert (await site.post(COMPLETIONS, ask("small"))).status == 200
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
    assert (await site.post(COMPLETIONS, ask("large"))).status == 200
    await world_of(site).restart()
    assert (await site.post(COMPLETIONS, ask("large"))).status == 200


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
        assert (await site.post(COMPLETIONS, ask("small"))).status == 200

    play_groups(scenario, orders=OrderStore(path))
    assert "a group that was added is lost" in caplog.messages

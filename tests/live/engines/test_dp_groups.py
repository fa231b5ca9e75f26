"""Data-parallel groups of decode ranks, which end together."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.extended import usually
from tests.support.site import Exchanged, Site, served

from balanceroute.proxy.core.events import Eligible, PrefillerId, RankId
from balanceroute.proxy.live.engines.instances import Instances, Rank, Role, Status, Target
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.client import Endpoint

CHAT = "/v1/chat/completions"
TWO_GROUPS: dict[str, Any] = {"ranks": 4, "batch_limit": 8, "dp_size": 2}
ONE_GROUP: dict[str, Any] = {"ranks": 2, "batch_limit": 8, "dp_size": 2}
EXACT = {"batch": 8, "resume": "exact"}


def talk(number: int, tokens: int = 200, **more: object) -> dict[str, Any]:
    content = f"question {number} of many"
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "stream": True}
    return body | {"max_tokens": tokens, "ignore_eos": True, "temperature": 0} | more


def ranks_of(*servers: tuple[str, ...]) -> Instances:
    """Return ranks, by what the page of each server says their numbers are; empty for nothing."""
    endpoint: Endpoint = None  # type: ignore[assignment]
    instances = Instances()
    for place, numbers in enumerate(servers):
        target = Target(Role.DECODE, f"http://d{place}")
        for number in numbers or ("0",):
            header = number.encode() if len(numbers) > 1 else None
            rank = Rank(
                RankId(len(instances.ranks)), f"d{place}@{number}", target, endpoint, header
            )
            instances.ranks.append(rank)
    for place, numbers in enumerate(servers):
        if numbers:
            instances.groups.scraped(Target(Role.DECODE, f"http://d{place}"), frozenset(numbers))
    return instances


def learned(instances: Instances) -> list[int | None]:
    return [instances.groups.of(rank) for rank in instances.ranks]


@pytest.mark.parametrize(
    ("servers", "groups"),
    [
        ([("0",), ("1",), ("2",), ("3",)], [0, 0, 0, 0]),
        ([("0",), ("1",), ("0",), ("1",)], [0, 0, 2, 2]),
        ([("1",), ("0",), ("1",), ("0",)], [0, 0, 2, 2]),
        # Several ranks a server, as on several hosts of a group.
        ([("0", "1"), ("2", "3"), ("0", "1"), ("2", "3")], [0, 0, 0, 0, 4, 4, 4, 4]),
        # Each stands alone: the server, or a group that is a server.
        ([("0",), ("0",), ("0",)], [None, None, None]),
        ([("0", "1"), ("0", "1")], [None] * 4),
        # It does not come out even, or one has yet to tell.
        ([("0",), ("0",), ("1",), ("1",)], [None] * 4),
        ([("0",), ("1",), ("0",)], [None] * 3),
        ([("0",), ("2",)], [None] * 2),
        ([("0",), ("x",)], [None] * 2),
        ([("1",), ("2",)], [None] * 2),
        ([("0",), ()], [None] * 2),
    ],
)
def test_groups_are_what_the_pages_of_ranks_tell(
    servers: list[tuple[str, ...]], groups: list[int | None]
) -> None:
    assert learned(ranks_of(*servers)) == groups


def test_groups_are_learned_anew_when_ranks_go_and_come() -> None:
    instances = ranks_of(("0",), ("1",), ("0",), ("1",))
    for rank in instances.ranks[2:]:
        rank.status = Status.REMOVED
    instances.groups.scraped(instances.ranks[0].target, frozenset({"0", "5"}))
    assert learned(instances) == [None] * 4
    instances.groups.scraped(instances.ranks[0].target, frozenset({"0"}))
    assert learned(instances) == [0, 0, None, None]


def test_the_setting_says_which_ranks_form_a_group() -> None:
    instances = ranks_of(("0",), ("1",), ("2",), ("3",))
    for size, groups in ((2, [0, 0, 1, 1]), (1, [None] * 4), (3, [0, 0, 0, 1])):
        told = Instances(dp_size=size)
        told.ranks = instances.ranks
        assert learned(told) == groups
    mates = instances.groups.mates(instances.ranks[1].target)
    assert [rank.id for rank in mates] == [0, 2, 3]


def test_a_rank_that_comes_takes_the_place_of_one_that_was_removed() -> None:
    many = ranks_of(*[("0",)] * 8).ranks
    told = Instances(dp_size=2)
    told.ranks = many[:4]
    assert learned(told) == [0, 0, 1, 1]
    many[1].status = many[2].status = Status.REMOVED
    told.ranks = many[:7]
    assert learned(told) == [0, 0, 1, 1, 0, 1, 2]
    many[
        1
    ].status = Status.UP  # It is back at its address: its group has one too many, and no other.
    told.ranks = many
    assert learned(told) == [0, 0, 1, 1, 0, 1, 2, 2]


def test_a_fleet_has_ended_if_all_its_groups_have() -> None:
    instances = ranks_of(("0",), ("1",), ("0",), ("1",))
    for rank in instances.ranks[:2]:
        rank.status = Status.QUARANTINED
    first = Eligible(frozenset({PrefillerId(0)}), frozenset({RankId(0), RankId(1)}))
    assert not instances.groups.ended(None)
    assert instances.groups.ended(first)
    assert not ranks_of(("0",), ("0",)).groups.ended(None)


# In a whole proxy.


async def streams(site: Site, count: int, tokens: int = 200) -> list[Exchanged]:
    """Begin streams, once the proxy has read the pages of all engines."""
    await asyncio.sleep(6.0)
    exchanges = [site.send(CHAT, talk(number, tokens)) for number in range(count)]
    for one in exchanges:
        await one.until_events(5)
    return exchanges


async def right(site: Site, exchanges: list[Exchanged]) -> None:
    for number, one in enumerate(exchanges):
        await one.end()
        assert one.done, (one.status, one.body[-300:])
        alone = await site.ask("prefill/0", CHAT, talk(number))
        assert one.text == alone.text


@pytest.mark.parametrize("death_s", usually([0.0, 1.0], [0.0, 0.3, 1.0, 2.5]))
@pytest.mark.parametrize("streaming", [1, 2, 16])
@served(flags=EXACT, dp_death_s=lambda death_s: death_s, **TWO_GROUPS)
async def test_streams_of_a_group_that_dies_go_on_in_another(
    site: Site, death_s: float, streaming: int
) -> None:
    """They went on with a rank that was about to die, and were held to have killed both."""
    exchanges = await streams(site, streaming)
    (victim, *_) = [
        engine for engine in site.fleet.engines if engine.name[:6] == "decode" and not engine.idle
    ]
    site.fleet.kill(victim.name)
    await right(site, exchanges)
    records = site.world.ended
    assert {record.outcome for record in records} == {Outcome.OK}
    # A short answer is over before the second death.
    assert max(record.itl_max_ns for record in records) < 5e9
    assert not site.world.plane.deployment.driver.context.suspects.deaths(b"")
    page = (await site.get("/metrics")).body.decode()
    assert "balanceroute_suspected_poison_total 0" in page


@served(flags=EXACT, dp_death_s=2.0, **TWO_GROUPS)
async def test_nothing_new_goes_to_a_group_that_dies(site: Site) -> None:
    await asyncio.sleep(6.0)
    site.fleet.kill("decode/0")
    await site.until(lambda: site.world.plane.deployment.instances.ranks[1].doomed, 5.0)
    before = len(site.received("decode/1"))
    exchanges = [site.send(CHAT, talk(number)) for number in range(8)]
    await right(site, exchanges)
    assert len(site.received("decode/1")) == before
    state = await site.state()
    assert state["ranks"][0]["dp_group"] == state["ranks"][1]["dp_group"] == 0


@served(flags={**EXACT, "dp_size": 2}, ranks=2, batch_limit=8)
async def test_a_rank_that_outlives_the_death_of_another_is_used_again(site: Site) -> None:
    """The setting was wrong, or the engines of this model stand alone: nothing is lost."""
    exchanges = await streams(site, 8)
    site.fleet.kill("decode/0")
    await right(site, exchanges)
    rank = site.world.plane.deployment.instances.ranks[1]
    await site.until(lambda: rank.usable and not rank.on_trial, 10.0)
    await right(site, [site.send(CHAT, talk(number)) for number in range(4)])


@served(flags={**EXACT, "group_return_s": 120}, **ONE_GROUP)
async def test_requests_wait_for_a_group_as_long_as_the_setting_says(site: Site) -> None:
    exchanges = await streams(site, 8)
    site.fleet.kill("decode/0")
    await asyncio.sleep(40.0)
    for name in ("decode/0", "decode/1"):
        await site.fleet.restore(name)
    await right(site, exchanges)
    assert all(record.resumes for record in site.world.ended)


@pytest.mark.parametrize("resume", ["exact", "off"])
@served(flags=lambda resume: {"batch": 8, "resume": resume}, **ONE_GROUP)
async def test_without_it_clients_are_told_at_once(site: Site, resume: str) -> None:
    """They waited for ten seconds for what takes minutes to start."""
    exchanges = await streams(site, 8)
    waiting = [site.send(CHAT, talk(number)) for number in range(8, 40)]
    began_s = site.loop.time()
    site.fleet.kill("decode/0")
    for one in (*exchanges, *waiting):
        await one.end()
    assert site.loop.time() - began_s < 6.0
    assert not any(one.done for one in (*exchanges, *waiting))
    for one in (*exchanges, *waiting):
        if one.status == 200:  # It had begun.
            assert b'"error"' in one.events[-1]
        else:
            assert one.json["error"]["message"] == "the decode group has ended"
    late = await site.post(CHAT, talk(99))
    assert (late.status, late.header(b"retry-after")) == (503, b"1")


@served(flags=EXACT, at_rest=False, **TWO_GROUPS)
async def test_a_group_that_stands_still_is_left_out_whole(site: Site) -> None:
    """A rank of it without a stream was the emptiest, and got whatever came."""
    exchanges = await streams(site, 24, tokens=600)
    ranks = site.world.plane.deployment.instances.ranks
    await asyncio.sleep(6.0)
    for name in ("decode/0", "decode/1"):
        site.fleet.faults.set(name, frozen="alone")
    await site.until(lambda: not (ranks[0].usable or ranks[1].usable), 6.0)
    assert ranks[2].usable
    assert ranks[3].usable
    for number, one in enumerate(exchanges):
        await one.end()
        assert one.done, number
    for name in ("decode/0", "decode/1"):
        site.fleet.faults.set(name, frozen=None)

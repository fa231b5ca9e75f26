"""Fall-back chains: the next group answers, once, and nothing is doubled."""

import asyncio
from dataclasses import replace

import pytest
from tests.support.chaos.groups import GroupSettings
from tests.support.site import LARGE, SMALL, Exchanged, Site, play_groups, served_by_groups

from balanceroute.proxy.live.telemetry.record import Outcome

COMPLETIONS = "/v1/completions"
GROUPS = {"small": GroupSettings(SMALL), "large": GroupSettings(LARGE)}
CHAIN = (
    '[alias.auto]\ngroups = ["small", "large"]\nchooser = "static"\n'
    'fall_back = ["429", "503", "timeout"]\n'
)


def ask(model: str = "auto", **values: object) -> dict[str, object]:
    return {"model": model, "prompt": "t1 t2", "max_tokens": 12, "ignore_eos": True} | values


async def fill(site: Site, model: str) -> list[Exchanged]:
    """Have two requests run in a group of two slots, and one wait."""
    sent = []
    for _ in range(3):
        sent.append(site.send(COMPLETIONS, ask(model, max_tokens=300)))
        await asyncio.sleep(0.3)
    return sent


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_group_leaves_requests_to_the_next_one(stream: bool) -> None:
    async def scenario(site: Site) -> None:
        full = await fill(site, "large")
        answer = await site.post(COMPLETIONS, ask(stream=stream))
        assert answer.status == 200, answer.body
        assert answer.header(b"x-balanceroute-model") == b"small"
        assert "small" in answer.body.decode()
        assert [(await one.end()).status for one in full] == [200] * 3
        (record,) = [one for one in site.world.ended if one.alias]
        assert record.fall_backs == (("large", "429"),)
        assert (record.group, record.outcome.value) == ("small", "ok")  # type: ignore[union-attr]
        page = (await site.get("/metrics")).body.decode()
        told = 'balanceroute_alias_fall_backs_total{alias="auto",group="large",reason="429"} 1'
        assert told in page
        assert 'requests_total{endpoint="/v1/completions",model="auto",outcome="ok"' in page

    groups = GROUPS | {
        "large": GroupSettings(
            replace(LARGE, batch_limit=1), proxy="batch = 1\npool_limit = 1\nqueue_limit = 1"
        )
    }
    play_groups(scenario, groups=groups, more=CHAIN)


def test_without_a_chain_the_refusal_is_the_answer() -> None:
    async def scenario(site: Site) -> None:
        full = await fill(site, "large")
        assert (await site.post(COMPLETIONS, ask())).status == 429
        for one in full:
            await one.end()
        assert not [one for one in site.seen if one.engine.startswith("small:")]

    groups = GROUPS | {
        "large": GroupSettings(
            replace(LARGE, batch_limit=1), proxy="batch = 1\npool_limit = 1\nqueue_limit = 1"
        )
    }
    without = CHAIN.replace('fall_back = ["429", "503", "timeout"]', "")
    play_groups(scenario, groups=groups, more=without)


def test_a_request_that_waits_too_long_is_answered_by_the_next_group() -> None:
    async def scenario(site: Site) -> None:
        full = [site.send(COMPLETIONS, ask("large", max_tokens=300)) for _ in range(4)]
        await asyncio.sleep(0.5)
        # It expires in the queue of the large model: 503.
        answer = await site.post(COMPLETIONS, ask())
        assert (answer.status, answer.header(b"x-balanceroute-model")) == (200, b"small")
        for one in full:
            await one.end()
        (record,) = [one for one in site.world.ended if one.alias]
        assert record.fall_backs == (("large", "503"),)

    groups = GROUPS | {
        "large": GroupSettings(
            replace(LARGE, batch_limit=1),
            proxy="batch = 1\npool_limit = 1\nqueue_ttl_s = 2",
        )
    }
    play_groups(scenario, groups=groups, more=CHAIN)


def test_a_stream_that_does_not_begin_goes_on_after_a_while() -> None:
    async def scenario(site: Site) -> None:
        full = [site.send(COMPLETIONS, ask("large", max_tokens=300)) for _ in range(4)]
        await asyncio.sleep(0.5)
        begin_s = site.loop.time()
        answer = await site.post(COMPLETIONS, ask(stream=True))
        assert (answer.status, answer.done) == (200, True)
        assert answer.header(b"x-balanceroute-model") == b"small"
        assert 1.5 <= site.loop.time() - begin_s < 3.0
        # One that has begun is left alone, however long it takes.
        for one in full:
            await one.end()
        begun = await site.post(COMPLETIONS, ask(stream=True, max_tokens=200))
        assert begun.header(b"x-balanceroute-model") == b"large"
        assert len(begun.chunks) >= 200
        records = [one for one in site.world.ended if one.alias]
        assert [one.fall_backs for one in records] == [(("large", "timeout"),), ()]
        assert {one.values["model"] for one in site.seen if one.engine[0] == "s"} == {"small"}

    groups = GROUPS | {
        "large": GroupSettings(replace(LARGE, batch_limit=1), proxy="batch = 1\npool_limit = 1")
    }
    play_groups(scenario, groups=groups, more=CHAIN + "fall_back_after_s = 1.5\n")


@pytest.mark.parametrize("why", ["timeout", "503"])
def test_a_sign_of_life_leaves_the_answer_to_whoever_gives_one(why: str) -> None:
    async def scenario(site: Site) -> None:
        full = [site.send(COMPLETIONS, ask("large", max_tokens=300)) for _ in range(4)]
        await asyncio.sleep(0.5)
        answer = await site.post(COMPLETIONS, ask(stream=True))
        assert (answer.status, answer.done) == (200, True)
        signs = answer.body.count(b": keep-alive\n\n")
        assert signs >= 1
        assert len(answer.events) == signs + 13  # Nothing is doubled.
        assert {one["model"] for one in answer.chunks} == {"small"}
        # Which model answers was not known when the head went.
        assert answer.header(b"x-balanceroute-model") is None
        for one in full:
            await one.end()
        (record,) = [one for one in site.world.ended if one.alias]
        assert record.fall_backs == (("large", why),)
        assert (record.status, record.group) == (200, "small")

    limits = "batch = 1\npool_limit = 1\nsse_keep_alive_s = 1\n"
    if why == "503":
        limits += "queue_ttl_s = 2.5\n"
    groups = {
        "small": GroupSettings(SMALL, proxy="sse_keep_alive_s = 1"),
        "large": GroupSettings(replace(LARGE, batch_limit=1), proxy=limits),
    }
    more = CHAIN + ("fall_back_after_s = 2.5\n" if why == "timeout" else "")
    play_groups(scenario, groups=groups, more=more)


@pytest.mark.parametrize("relays_away", ["small"])
def test_behind_a_sign_of_life_the_last_refusal_is_an_error_event(relays_away: str) -> None:
    async def scenario(site: Site) -> None:
        full = [site.send(COMPLETIONS, ask("large", max_tokens=300)) for _ in range(4)]
        full += await fill(site, relays_away)
        answer = await site.post(COMPLETIONS, ask(stream=True))
        assert (answer.status, answer.error is not None) == (200, True)
        assert answer.events[0] == b": keep-alive\n\n"
        assert b'"code":429' in answer.events[-1]
        (record,) = [one for one in await site.ended() if one.alias]
        assert record.status == 200
        assert record.outcome is not None
        assert record.outcome.value == "rejected"
        for one in full:
            await one.end()

    limits = "batch = 1\npool_limit = 1\n"
    large = limits + "sse_keep_alive_s = 1\nqueue_ttl_s = 2.5\n"
    groups = {
        "small": GroupSettings(replace(SMALL, batch_limit=1), proxy=limits + "queue_limit = 1\n"),
        "large": GroupSettings(replace(LARGE, batch_limit=1), proxy=large),
    }
    play_groups(scenario, groups=groups, more=CHAIN)


def test_who_leaves_behind_a_sign_of_life_has_had_its_status() -> None:
    async def scenario(site: Site) -> None:
        full = [site.send(COMPLETIONS, ask("large", max_tokens=300)) for _ in range(4)]
        full += await fill(site, "small")
        leaving = site.send(COMPLETIONS, ask(stream=True))
        await leaving.until_events(1)
        await asyncio.sleep(1.0)
        assert leaving.events == [b": keep-alive\n\n"]
        leaving.call.abort()  # While it waits for the small model, which has sent nothing.
        (record,) = [one for one in await site.ended() if one.alias]
        assert (record.group, record.fall_backs) == ("small", (("large", "timeout"),))
        assert (record.status, record.outcome) == (200, Outcome.CANCELLED)
        for one in full:
            await one.end()

    limits = "batch = 1\npool_limit = 1\n"
    groups = {
        "small": GroupSettings(replace(SMALL, batch_limit=1), proxy=limits),
        "large": GroupSettings(
            replace(LARGE, batch_limit=1), proxy=limits + "sse_keep_alive_s = 1\n"
        ),
    }
    play_groups(scenario, groups=groups, more=CHAIN + "fall_back_after_s = 1.5\n")


def test_who_leaves_meanwhile_is_one_request() -> None:
    async def scenario(site: Site) -> None:
        full = [site.send(COMPLETIONS, ask("large", max_tokens=300)) for _ in range(4)]
        await asyncio.sleep(0.5)
        leaving = site.send(COMPLETIONS, ask(stream=True, max_tokens=400))
        await leaving.until_events(3)  # Of the small model.
        leaving.call.abort()
        for one in full:
            await one.end()
        (record,) = [one for one in site.world.ended if one.alias]
        assert (record.group, record.outcome.value) == ("small", "cancelled")  # type: ignore[union-attr]

    groups = GROUPS | {
        "large": GroupSettings(replace(LARGE, batch_limit=1), proxy="batch = 1\npool_limit = 1")
    }
    play_groups(scenario, groups=groups, more=CHAIN + "fall_back_after_s = 1.5\n")


def test_the_last_groups_refusal_is_the_answer() -> None:
    async def scenario(site: Site) -> None:
        one, two = [await fill(site, model) for model in ("large", "small")]
        answer = await site.post(COMPLETIONS, ask())
        assert answer.status == 429
        for other in (*one, *two):
            await other.end()
        (record,) = [one for one in site.world.ended if one.alias]
        assert (record.group, record.fall_backs) == ("small", (("large", "429"),))
        assert record.outcome is not None

    full = "batch = 1\npool_limit = 1\nqueue_limit = 1"
    groups = {
        "small": GroupSettings(replace(SMALL, batch_limit=1, step_base_ns=40_000_000), proxy=full),
        "large": GroupSettings(replace(LARGE, batch_limit=1), proxy=full),
    }
    play_groups(scenario, groups=groups, more=CHAIN)


TENANTS = """
[[tenant]]
name = "t"
default = true
requests_per_minute = 1
"""


@served_by_groups(groups=GROUPS, more=CHAIN, tenants=TENANTS)
async def test_a_tenant_that_is_over_its_limit_falls_back_on_nobody(site: Site) -> None:
    assert (await site.post(COMPLETIONS, ask())).status == 200
    assert (await site.post(COMPLETIONS, ask())).status == 429
    assert not [one for one in site.seen if one.engine.startswith("small:")]


@served_by_groups(groups=GROUPS, more=CHAIN)
async def test_a_bad_request_falls_back_on_nobody(site: Site) -> None:
    assert (await site.post(COMPLETIONS, ask(max_tokens=0))).status == 400
    assert not [one for one in site.seen if one.engine.startswith("small:")]

"""The memory of the ranks, as the settings and as the engines' metrics tell it."""

import asyncio
import logging
from typing import Any

import pytest
from tests.support.site import Site, play, served

from balanceroute.proxy.live.control.memory import KvCapacity, RankSlots
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Role, Target

RANKS = [Target(Role.DECODE, f"http://d{number}:8000") for number in range(2)]
PREFILLER = Target(Role.PREFILL, "http://p0:8000")


def gauges(kv_tokens: int | None) -> EngineGauges:
    return EngineGauges(0.0, None, frozenset({"0"}), kv_tokens=kv_tokens)


def test_the_least_that_a_present_engine_says_holds_for_all() -> None:
    present = {*RANKS, PREFILLER}
    memory = KvCapacity(None, used=True)
    seen = []
    for target, tokens in (
        (PREFILLER, 5),
        (RANKS[0], None),
        (RANKS[0], 900),
        (RANKS[1], 700),
        (RANKS[1], 700),
        (RANKS[0], 800),
    ):
        memory.scraped(target, gauges(tokens))
        seen.append((memory.settle(present.__contains__), memory.tokens))
    assert seen == [(False, None)] * 2 + [(True, 900), (True, 700)] + [(False, 700)] * 2
    present.remove(RANKS[1])
    memory.scraped(RANKS[0], gauges(900))
    assert memory.settle(present.__contains__)
    assert memory.tokens == memory.least_tokens == 900


@pytest.mark.parametrize("given", [None, 800])
def test_what_ranks_keep_is_known_where_it_limits_nothing(given: int | None) -> None:
    memory = KvCapacity(given, used=False)
    assert memory.least_tokens == given
    memory.scraped(RANKS[0], gauges(700))
    assert not memory.settle(RANKS.__contains__)
    assert (memory.tokens, memory.least_tokens) == (given, 700)


def test_an_engine_that_says_another_size_each_time_changes_all_ranks_rarely() -> None:
    memory = KvCapacity(None, used=True)
    changes = 0
    for scrape in range(100):
        memory.scraped(RANKS[0], gauges(700 + scrape % 2))
        changes += memory.is_due(float(scrape)) and memory.settle(RANKS.__contains__)
    assert (changes, memory.tokens) == (1, 700)
    # What shrinks again and again changes them twice a second, and what grows every five seconds.
    for step, most in ((-1, 50), (1, 5)):
        changes = 0
        for scrape in range(250):
            memory.scraped(RANKS[0], gauges(10_000 + step * scrape))
            now_s = 1_000.0 * (2 + step) + scrape / 10
            changes += memory.is_due(now_s) and memory.settle(RANKS.__contains__)
        assert most <= changes <= most + 2
    assert [memory.is_due(1e9 + wait_s) for wait_s in (0.0, 60.0)] == [True, False]


def test_a_rank_with_less_than_it_should_have_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = KvCapacity(800, used=True)
    with caplog.at_level(logging.WARNING):
        for tokens in (700, 699, 700):
            memory.scraped(RANKS[0], gauges(900))
            memory.scraped(RANKS[1], gauges(tokens))
            assert not memory.settle(RANKS.__contains__)
    assert memory.tokens == 800
    (record,) = caplog.records
    assert record.__dict__["fields"] == {
        "url": RANKS[1].url,
        "kv_tokens": 700,
        "rank_kv_tokens": 800,
    }


@pytest.mark.parametrize(("given", "known"), [(None, 640), (5_000, 5_000)])
def test_the_quantile_of_the_peak_is_of_what_the_engines_say(given: int | None, known: int) -> None:
    async def scenario(site: Site) -> None:
        await asyncio.sleep(3.0)
        deployment = site.world.proxy.deployment
        assert deployment.roster.memory.tokens == known
        assert deployment.driver.scheduler.config.rank_kv_tokens == known

    flags = {"kv_peak_quantile": 0.99, "rank_kv_tokens": given}
    play(scenario, flags=flags, rank_kv_tokens=640)


@served(rank_kv_tokens=640)
async def test_without_the_quantile_what_engines_say_limits_nothing(site: Site) -> None:
    await asyncio.sleep(3.0)
    assert site.world.proxy.deployment.roster.memory.tokens is None


# Ranks with fewer slots than the settings say.


RANK = Target(Role.DECODE, "http://d0:8000")
STREAM: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 600,
    "ignore_eos": True,
    "stream": True,
}
FULL = (4.0, 2.0, 0.3)


def warnings(
    caplog: pytest.LogCaptureFixture, *seen: tuple[float, float, float], target: Target = RANK
) -> int:
    """Return how often it warns of what runs, what waits, and how full the KV cache is."""
    slots = RankSlots(8)
    with caplog.at_level(logging.WARNING):
        for running, waiting, usage in seen:
            gauges = EngineGauges(usage, None, frozenset("0"), waiting=waiting, running=running)
            slots.scraped(target, gauges)
    return len(caplog.records)


def test_as_many_that_run_while_others_wait_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings(caplog, *[FULL] * 20) == 1
    assert caplog.records[0].__dict__["fields"] == {
        "url": RANK.url,
        "batch": 8,
        "running": 4.0,
        "waiting": 2.0,
    }


@pytest.mark.parametrize(
    "seen",
    [
        [FULL] * 4,
        # Requests whose KV cache is on its way wait, too.
        [FULL, (5.0, 1.0, 0.3), FULL, (3.0, 3.0, 0.3), FULL, (5.0, 1.0, 0.3)] * 3,
        [*[FULL] * 4, (4.0, 0.0, 0.3)] * 3,
        [(4.0, 2.0, 0.95)] * 20,  # Memory.
        [(8.0, 2.0, 0.3)] * 20,
        [(0.0, 2.0, 0.3)] * 20,  # It computes nothing at all.
    ],
)
def test_no_other_wait_is_told_of(
    caplog: pytest.LogCaptureFixture, seen: list[tuple[float, float, float]]
) -> None:
    assert warnings(caplog, *seen) == 0


def test_a_prefiller_has_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(Role.PREFILL, "http://p0:8000")
    assert warnings(caplog, *[FULL] * 20, target=target) == 0


@pytest.mark.parametrize(("batch", "told"), [(8, True), (4, False)])
def test_an_engine_with_half_the_slots_is_told_of(
    caplog: pytest.LogCaptureFixture, batch: int, told: bool
) -> None:
    async def scenario(site: Site) -> None:
        exchanges = [site.send("/v1/completions", STREAM) for _ in range(12)]
        await asyncio.gather(*(one.end() for one in exchanges))

    with caplog.at_level(logging.WARNING):
        play(scenario, flags={"batch": batch}, batch_limit=4, step_base_ns=20_000_000.0)
    messages = [one.message for one in caplog.records if "than --batch" in one.message]
    assert len(messages) == 2 * told

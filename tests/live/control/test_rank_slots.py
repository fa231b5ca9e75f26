"""Ranks with fewer slots than the settings say."""

import asyncio
import logging
from typing import Any

import pytest
from tests.support.site import Site, play

from balanceroute.proxy.live.control.memory import RankSlots
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Role, Target

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

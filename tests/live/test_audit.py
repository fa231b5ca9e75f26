"""The audit of an emulated fleet: its figures are the engines' own, and its prediction comes true."""

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from balanceroute.proxy.audit.looking import Engines
from balanceroute.proxy.audit.observation import Observation, observe
from balanceroute.proxy.audit.replica import recover
from balanceroute.proxy.audit.verdict import Bound

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

FLEET = {
    "ranks": 4,
    "prefillers": 3,
    "batch_limit": 8,
    "step_ns_per_token": 5_000.0,
    "prefill_base_ns": 1_000_000,
    "prefill_ns_per_token": 10_000.0,
    "rank_kv_tokens": 200_000,
    "max_model_len": 16_384,
}
WARM_UP_S, WATCHED_S = 15.0, 60.0
IN_FLIGHT = 60


@dataclass
class Seen:
    """What the audit found of one policy, and what the engines count themselves."""

    observation: Observation
    idle: float
    tokens_per_s: float


def lengths(rng: random.Random) -> tuple[int, int]:
    """Return a prompt's and an answer's tokens; a few prompts are very long."""
    return min(12_000, round(rng.lognormvariate(6.6, 1.0))), 20 + round(rng.expovariate(1 / 80))


async def keep_busy(site: "Site", rng: random.Random) -> None:
    while True:
        prompt, output = lengths(rng)
        await site.post(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": [rng.randrange(1, 1000)] * prompt,
                "max_tokens": output,
                "ignore_eos": True,
                "stream": True,
            },
        )


def seen_with(play: "Play", policy: str) -> Seen:
    found: list[Seen] = []

    async def scenario(site: "Site") -> None:
        clients = [
            asyncio.create_task(keep_busy(site, random.Random(number)))
            for number in range(IN_FLIGHT)
        ]
        await asyncio.sleep(WARM_UP_S)
        engines = Engines(site.fleet.prefill_urls, site.fleet.decode_urls, timeout_s=5.0)
        before = site.fleet.stats()
        looks = await engines.watch(seconds=WATCHED_S, interval_s=0.25, progress=lambda _: None)
        after = site.fleet.stats()
        engines.close()
        idle, capacity, tokens = (
            after[name] - before[name]
            for name in ("idle_tokens", "capacity_tokens", "output_tokens")
        )
        found.append(Seen(observe(looks), idle / capacity, tokens / WATCHED_S))
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    play(scenario, flags={"policy": policy, "batch": 8}, at_rest=False, **FLEET)
    return found[0]


def test_its_idle_is_the_engines_own_and_its_prediction_comes_true(play: "Play") -> None:
    before, after = seen_with(play, "jsq"), seen_with(play, "br-h")
    seen = before.observation
    assert seen.saturated
    assert len(seen.ranks) == 4
    assert seen.batch == 8
    for one in (before, after):
        assert one.observation.idle == pytest.approx(one.idle, abs=0.02)
        assert one.observation.output_tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.03)
    assert seen.fit is not None
    assert seen.fit.us_per_token == pytest.approx(5.0, rel=0.15)
    assert seen.verdict.bound is Bound.BARRIER
    recovery = recover(seen, None, step_base_ms=30.0, step_us_per_token=0.2)
    (ours,) = [one for one in recovery.predictions if one.policy == "br-h"]
    gain = after.tokens_per_s / before.tokens_per_s - 1.0
    assert gain > 0.05
    assert ours.gain == pytest.approx(gain, abs=0.03)

"""The audit of an emulated fleet: its figures are the engines' own, and its prediction comes true."""

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tests.support.site import Site, play
from tests.two_leg_router import TwoLegRouter

from balanceroute.proxy.capacity import Bound
from balanceroute.proxy.lab.audit.observation import AuditedEngines, Observation, observe
from balanceroute.proxy.lab.audit.replica import recover
from balanceroute.proxy.page_client import PageClient

FLEET: dict[str, Any] = {
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


async def keep_busy(site: Site, rng: random.Random, port: int) -> None:
    while True:
        prompt, output = lengths(rng)
        values = {
            "model": "tiny",
            "prompt": [rng.randrange(1, 1000)] * prompt,
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
        }
        await site.send("/v1/completions", values, port=port).end()


@cache
def seen_with(policy: str | None) -> Seen:
    """Return what is seen of this proxy with a policy, or of a router that holds nothing back."""
    found: list[Seen] = []

    async def scenario(site: Site) -> None:
        router = TwoLegRouter(site.fleet.prefill_urls, site.fleet.decode_urls)
        port = await router.start() if policy is None else site.world.port
        rng = random.Random(1)  # One list of requests, whoever of the clients sends the next.
        clients = [asyncio.create_task(keep_busy(site, rng, port)) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(WARM_UP_S)
        async with PageClient.of_flags(None, timeout_s=5.0) as pages:
            engines = AuditedEngines(site.fleet.prefill_urls, site.fleet.decode_urls, pages)
            before = site.fleet.stats()
            looks = await engines.watch(seconds=WATCHED_S, interval_s=0.25, progress=lambda _: None)
            after = site.fleet.stats()
        idle, capacity, tokens = (
            after[name] - before[name]
            for name in ("idle_tokens", "capacity_tokens", "output_tokens")
        )
        found.append(Seen(observe(looks), idle / capacity, tokens / WATCHED_S))
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        router.close()

    flags = {"policy": policy or "br-h", "batch": 8}
    play(scenario, flags=flags, at_rest=False, **FLEET)
    return found[0]


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["jsq", None])
def test_its_idle_is_the_engines_own_and_its_prediction_comes_true(policy: str | None) -> None:
    before, after = seen_with(policy), seen_with("br-h")
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
    # The same fleet and load, whoever was audited before.
    assert ours.idle == pytest.approx(after.idle, abs=0.01)

"""The advice for a fleet: right about emulated engines behind a real proxy, in virtual time."""

import asyncio
import random
from typing import Any

import numpy as np
from tests.support.site import Site, play

from balanceroute.proxy.capacity import Bound
from balanceroute.proxy.lab.advise.fleets import Fleets, Slo, plan
from balanceroute.proxy.lab.advise.report import ProxyPages
from balanceroute.proxy.lab.audit.observation import AuditedEngines, Observation, observe
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.proxy.page_client import PageClient
from balanceroute.traces import TraceRequest

BATCH = 8
TIMES: dict[str, Any] = {
    "step_base_ns": 20_000_000,
    "step_ns_per_token": 1_000.0,
    "transfer_base_ns": 2_000_000,
    "transfer_ns_per_token": 1_000.0,
}
PREFILL_NS, PREFILL_TOKEN_NS = 20_000_000, 100_000.0
SLO = Slo(ttft_p99_s=0.7, tpot_p95_s=0.045)


def load(requests: int, per_second: float) -> Workload:
    rng, now_ns, made = random.Random(5), 0.0, []
    for _ in range(requests):
        now_ns += rng.expovariate(per_second / 1e9)
        prompt, output = rng.randint(50, 1_000), 5 + round(rng.expovariate(1 / 20))
        made.append(TraceRequest(int(now_ns), prompt, output))
    return Workload(made, ())


async def replay(site: Site, workload: Workload) -> tuple[float, float]:
    """Send the requests at their times; return the p99 TTFT and the p95 TPOT, in seconds."""
    begin_s = site.loop.time()
    ttft, tpot = list[float](), list[float]()

    async def one(request: TraceRequest) -> None:
        await asyncio.sleep(request.arrival_ns / 1e9)
        sent_s = site.loop.time()
        exchange = site.send(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": [1 + request.arrival_ns % 997] * request.prompt_tokens,
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
            },
        )
        await exchange.until_events(1)
        first_s = site.loop.time()
        assert (await exchange.end()).done
        ttft.append(first_s - sent_s)
        tpot.append((site.loop.time() - first_s) / (request.output_tokens - 1))

    await asyncio.gather(*map(one, workload.requests))
    assert site.loop.time() > begin_s
    steady = slice(len(ttft) // 10, None)
    return float(np.percentile(ttft[steady], 99)), float(np.percentile(tpot[steady], 95))


def fleet(prefillers: int, ranks: int) -> dict[str, Any]:
    return {
        "prefillers": prefillers,
        "ranks": ranks,
        "batch_limit": BATCH,
        "prefill_base_ns": PREFILL_NS,
        "prefill_ns_per_token": PREFILL_TOKEN_NS,
        "rank_kv_tokens": 100_000,
        **TIMES,
        "flags": {"batch": BATCH, "policy": "br-0", "probe_limit": None},
    }


def test_the_planned_fleet_keeps_its_targets_and_smaller_ones_do_not() -> None:
    workload = load(240, 20.0)
    deployment = SimulatedDeployment(
        ranks=1,
        batch_limit=BATCH,
        prefill=PrefillModel(1, PREFILL_NS, PREFILL_TOKEN_NS),
        probe_limit=None,
        **TIMES,
    )
    found = plan(
        Fleets(deployment, workload, "br-0", forecast_called("none"), seed=0), SLO, most=32
    )

    def measured(prefillers: int, ranks: int) -> bool:
        latencies: list[tuple[float, float]] = []

        async def scenario(site: Site) -> None:
            latencies.append(await replay(site, workload))

        play(scenario, **fleet(prefillers, ranks))
        ((ttft_s, tpot_s),) = latencies
        return ttft_s <= SLO.ttft_p99_s and tpot_s <= SLO.tpot_p95_s

    assert measured(found.chosen.prefillers, found.chosen.ranks)
    assert len(found.fewer) == 2
    for one in found.fewer:
        assert not measured(one.prefillers, one.ranks)


def looked(prefillers: int, ranks: int) -> tuple[Observation, Observation]:
    """Return what the engines and the proxy tell under the same load."""
    seen: list[Observation] = []

    async def scenario(site: Site) -> None:
        clients = asyncio.create_task(replay(site, load(160, 20.0)))
        await asyncio.sleep(2.0)
        assert site.world.plane.admin is not None
        url = f"http://127.0.0.1:{site.world.plane.admin.port}"
        async with PageClient.of_flags(None, timeout_s=5.0) as pages:
            engines = AuditedEngines(site.fleet.prefill_urls, site.fleet.decode_urls, pages)
            proxy = ProxyPages(url, pages)
            looks = await asyncio.gather(
                *(
                    one.watch(seconds=5.0, interval_s=0.2, progress=lambda _: None)
                    for one in (engines, proxy)
                )
            )
        seen.append(observe(looks[0], batch=BATCH))
        seen.append(observe(looks[1], batch=proxy.batch, outputs_known=False))
        await clients

    play(scenario, **fleet(prefillers, ranks))
    return seen[0], seen[1]


def test_the_proxy_and_its_engines_tell_the_same() -> None:
    for sizes, bound in (((1, 4), Bound.PREFILL), ((4, 1), Bound.DECODE), ((4, 4), Bound.NOTHING)):
        engines, proxy = looked(*sizes)
        assert engines.verdict.bound is proxy.verdict.bound is bound, sizes
        assert abs(engines.slots_share - proxy.slots_share) < 0.15

"""Ranks that compute short prompts: neither none nor all of them is better than where it pays."""

import random
from functools import cache

import pytest

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import make_simulation
from balanceroute.proxy.lab.sim.recorder import RunMetrics
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

LIMIT = 2_048
PREFILL = PrefillModel(4, 20_000_000, 50_000.0)


def mixed(short: float, load: float, requests: int) -> Workload:
    """Return requests of which a share has short prompts; the prefillers' utilisation is `load`."""
    rng = random.Random(f"{short} of {requests}")
    prompts = [
        rng.randint(50, 1_000) if rng.random() < short else rng.randint(3_000, 13_000)
        for _ in range(requests)
    ]
    gap_ns = sum(map(PREFILL.service_ns, prompts)) / requests / PREFILL.servers / load
    traced, now_ns = [], 0.0
    for prompt in prompts:
        now_ns += rng.expovariate(1.0 / gap_ns)
        output = 1 + min(2_000, int(rng.expovariate(1 / 200)))
        traced.append(TraceRequest(int(now_ns), prompt, output))
    return Workload(traced, [], rate=1.0)


@cache
def played(short: float, limit: int | None, *, always: bool = False) -> RunMetrics:
    deployment = SimulatedDeployment(
        8,
        64,
        step_base_ns=10_000_000,
        step_ns_per_token=20.0,
        prefill=PREFILL,
        probe_limit=None,
        transfer_base_ns=2_000_000,
        transfer_ns_per_token=1_000.0,
        local_prefill_tokens=limit,
        local_prefill_always=always,
    )
    forecast = lambda *_: NoPrediction()  # noqa: E731
    simulation = make_simulation(
        deployment, mixed(short, 1.0, 1_500), "br-0", PolicySettings(), forecast, seed="0"
    )
    metrics = simulation.run().metrics()
    simulation.scheduler.check()
    return metrics


@pytest.mark.parametrize("short", [0.25, 0.5, 0.75])
def test_the_rule_beats_none_and_all(short: float) -> None:
    never, rule = played(short, None), played(short, LIMIT)
    always = played(short, LIMIT, always=True)
    assert rule.latency_s_mean < 1.01 * min(never.latency_s_mean, always.latency_s_mean)
    assert rule.ttft_s_p95 < 0.9 * never.ttft_s_p95
    assert rule.tpot_ms_p50 < 1.06 * never.tpot_ms_p50
    assert 0 < rule.local_prefills < always.local_prefills


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_where_nothing_is_to_gain_nothing_is_lost(short: float) -> None:
    never, rule = played(short, None), played(short, LIMIT)
    assert rule.latency_s_mean < 1.01 * never.latency_s_mean

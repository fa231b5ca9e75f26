"""Limits on what is let in and on what is in flight, in the simulator."""

from functools import partial

import pytest
from tests.lab.sim.service_run import run

from balanceroute.proxy.core.admission import ADMISSIONS, AimdSettings
from balanceroute.proxy.lab.service_levels import ServiceGroup, ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.recorder import Recorder
from balanceroute.traces import TraceRequest

MS = 1_000_000
FIXED = AimdSettings(cap_min=3, cap_max=3, cap_initial=3)


def run_400(deployment: SimulatedDeployment, *, deadline_ns: int | None = None) -> Recorder:
    """Run 400 requests, half as many again as the ranks can do with three each."""
    requests = [
        TraceRequest(40 * MS * number, 100, 20, deadline_ns=deadline_ns) for number in range(400)
    ]
    return run(deployment, requests)


def test_no_more_run_than_the_limit_says() -> None:
    free = run_400(SimulatedDeployment(2, 16)).metrics().mean_running
    assert free > 12
    assert run_400(SimulatedDeployment(2, 16, aimd=FIXED)).metrics().mean_running == pytest.approx(
        6, abs=0.1
    )


def test_a_wait_before_prefill_ends_with_its_time_to_live() -> None:
    unlimited = run_400(SimulatedDeployment(2, 16, aimd=FIXED)).metrics()
    limited = run_400(SimulatedDeployment(2, 16, aimd=FIXED, queue_ttl_ns=500 * MS)).metrics()
    assert unlimited.ttft_s_max > 3
    assert limited.ttft_s_max < 0.6


def test_the_limit_follows_the_time_to_first_token() -> None:
    settings = AimdSettings(target_ns=100 * MS, cap_min=1, cap_max=16, cap_initial=1)
    simulated = run_400(SimulatedDeployment(2, 16, aimd=settings, queue_ttl_ns=50 * MS)).metrics()
    assert simulated.mean_running > 3


@pytest.mark.parametrize("early", [False, True])
def test_the_limit_follows_the_token_that_clients_get(*, early: bool) -> None:
    settings = AimdSettings(target_ns=100 * MS, cap_min=1, cap_max=400, cap_initial=300)
    prefill = PrefillModel(2, 10 * MS, 0.0)
    deployment = SimulatedDeployment(
        1, 4, aimd=settings, prefill=prefill, probe_limit=4, early_tokens=early
    )
    recorder = run(deployment, [TraceRequest(50 * MS * n, 100, 20) for n in range(400)])
    service = recorder.service
    assert service is not None
    # The rank is overloaded, and whose clients have the prefiller's token do not see that.
    assert (recorder.metrics().ttft_s_p99 < 0.05) == early
    assert (min(limit for _, limit in service.limits) < 300) == (not early)


def test_the_hopeless_are_refused_instead_of_expiring() -> None:
    deployment = SimulatedDeployment(2, 16, aimd=FIXED)
    early = SimulatedDeployment(
        2, 16, aimd=FIXED, admission=partial(ADMISSIONS["early"], 10**6), expects_first_tokens=True
    )
    figures = {}
    for name, one in (("bounded", deployment), ("early", early)):
        service = run_400(one, deadline_ns=1_000 * MS).service
        assert service is not None
        figures[name] = service.figures(ServiceTargets())[ServiceGroup("", 0)]
    assert figures["bounded"].refused == 0
    assert figures["early"].refused > 0.2 * figures["early"].requests
    assert figures["early"].unserved < 0.5 * figures["bounded"].unserved

"""Pictures of tenants and classes over time: what they show."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from tests.lab.sim.service_run import run

from balanceroute.proxy.core.admission import AimdSettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import METRICS, PolicyResult
from balanceroute.proxy.lab.sim.plots import kv_shares, p99_s, write_service_plots
from balanceroute.proxy.lab.sim.recorder import ServiceLog
from balanceroute.traces import TraceRequest

MS = 1_000_000
FIXED = AimdSettings(cap_min=7, cap_max=7, cap_initial=7)


def measured(aimd: AimdSettings | None = None) -> ServiceLog:
    """`a` sends for 8 s, and `b` from 4 s on as much, of the same size."""
    one = TraceRequest(0, 100, 20)
    requests = [replace(one, arrival_ns=20 * MS * i, tenant="a") for i in range(400)]
    requests += [replace(one, arrival_ns=(4_000 + 20 * i) * MS, tenant="b") for i in range(200)]
    service = run(SimulatedDeployment(1, 64, step_base_ns=5 * MS, aimd=aimd), requests).service
    assert service is not None
    return service


def result(service: ServiceLog | None) -> PolicyResult:
    zeros = dict.fromkeys(METRICS, 0.0)
    return PolicyResult("fifo", zeros, zeros, [], service=service)


def test_shares_are_those_of_each_window() -> None:
    alone, between, both = kv_shares(measured(), np.array([0.0, 3.0, 5.0, 7.0])).T
    assert alone == pytest.approx([1.0, 0.0])
    assert 0.5 < between[0] < 1.0
    assert both == pytest.approx([0.5, 0.5], abs=0.02)


def test_first_tokens_count_where_they_came() -> None:
    service = measured()
    before, after = p99_s(service, 1, np.array([0.0, 4.0, 7.0]))
    assert isnan(before)
    # They join the step after the one that runs as they arrive.
    assert 0.005 < after < 0.1
    came, took = service.first_tokens(0)
    assert len(came) == len(took) == 400


@pytest.mark.parametrize("aimd", [None, FIXED])
def test_each_policy_that_was_measured_has_its_picture(
    tmp_path: Path, aimd: AimdSettings | None
) -> None:
    service = measured(aimd)
    # One rank is open. A limit that stays is noted once.
    assert [limit for _, limit in service.limits] == ([] if aimd is None else [7])
    paths = write_service_plots([result(service), result(None)], tmp_path, title="$x_{")
    assert paths == [tmp_path / "service_fifo.png"]
    assert paths[0].stat().st_size > 10_000

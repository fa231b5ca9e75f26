"""Hints: said where policies could not differ, and only there."""

import pytest

from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import METRICS, PolicyResult
from balanceroute.proxy.lab.sim.report import hints, unending
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

REQUESTS = [TraceRequest(i, 100 * (1 + i % 2), 5) for i in range(10)]


def hinted(*running: float, kv_capacity: int | None = None) -> list[str]:
    results = [
        PolicyResult("p", dict.fromkeys(METRICS, 0.0) | {"mean_running": mean}, {}, [])
        for mean in running
    ]
    deployment = SimulatedDeployment(ranks=2, batch_limit=50, rank_kv_tokens=kv_capacity)
    return hints(results, deployment, [Workload(REQUESTS, [])])


def test_ranks_that_were_nearly_empty_are_told() -> None:
    (hint,) = hinted(3.0, 9.0)
    assert "9.0 % full" in hint
    assert "--backlog 64" in hint
    assert hinted(3.0, 10.0) == []


@pytest.mark.parametrize(("capacity", "count"), [(99, 10), (100, 5), (199, 5), (200, 0)])
def test_prompts_that_fit_no_rank_are_reported_if_most_do_not(capacity: int, count: int) -> None:
    found = hinted(50.0, kv_capacity=capacity)
    assert [f"{count} of 10 prompts" in hint for hint in found] == ([True] if count > 5 else [])


def test_answers_without_end_are_told() -> None:
    assert unending([TraceRequest(0, 1, 1_000_000)]) is None
    hint = unending([TraceRequest(0, 1, 10**9), TraceRequest(0, 1, 5)])
    assert hint is not None
    assert hint.startswith("1 answers of more than 1,000,000 tokens, the longest 1,000,000,000")

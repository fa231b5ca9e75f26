"""Tenants and classes in whole simulated runs."""

from dataclasses import replace
from functools import partial

import pytest
from tests.lab.sim.service_run import run

from balanceroute.proxy.core.admission import BoundedQueue, Ending
from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.service_levels import ByGroup, ServiceGroup, ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel, SimulatedEngineOptions
from balanceroute.proxy.lab.sim.experiment import FORECASTS, make_simulation
from balanceroute.proxy.lab.sim.recorder import Recorder, RunMetrics
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

MS = 1_000_000
# One prefill takes 10 ms, so that 100 requests a second can start.
SLOW = SimulatedDeployment(
    1, 16, step_base_ns=5 * MS, prefill=PrefillModel(servers=1, base_ns=10 * MS, ns_per_token=0.0)
)


def measured(
    recorder: Recorder, targets: ServiceTargets | None = None
) -> tuple[ByGroup, RunMetrics]:
    assert recorder.service is not None
    return recorder.service.figures(targets or ServiceTargets()), recorder.metrics()


def stream(every_ms: float, count: int, **kind: object) -> list[TraceRequest]:
    """Requests at regular times."""
    return [
        replace(TraceRequest(round(every_ms * MS * i), 100, 20), **kind)  # type: ignore[arg-type]
        for i in range(count)
    ]


def test_shares_are_of_what_the_ranks_did() -> None:
    """Work by hand: b's requests hold twice the tokens of a's, and are half as many."""
    requests = stream(20, 400, tenant="a")
    requests += stream(40, 200, tenant="b", prompt_tokens=209, level=2)
    figures, _ = measured(run(SimulatedDeployment(1, 64, step_base_ns=MS), requests))
    a, b = figures[ServiceGroup("a", 0)], figures[ServiceGroup("b", 2)]
    assert a.share_requests == pytest.approx(2 / 3, abs=0.01)
    assert a.share_tokens == pytest.approx(240 / 469, abs=0.01)
    # A request holds its prompt and on average 9.5 tokens of its answer for 20 steps.
    assert a.share_kv == pytest.approx(2 * 109.5 / (2 * 109.5 + 218.5), abs=0.01)
    assert a.share_kv is not None
    assert b.share_kv == pytest.approx(1.0 - a.share_kv)


@pytest.mark.parametrize(
    "options",
    [
        SimulatedEngineOptions(),
        SimulatedEngineOptions(tokens_per_step=3.0),
        SimulatedEngineOptions(pause_above=0.1),
    ],
)
def test_the_sums_of_the_groups_are_what_the_fleet_held(options: SimulatedEngineOptions) -> None:
    requests = stream(1, 300, tenant="a") + stream(1.5, 200, tenant="b", prompt_tokens=40)
    deployment = SimulatedDeployment(
        2, 8, step_base_ns=MS, rank_kv_tokens=700, transfer_base_ns=MS, engines=options
    )
    recorder = run(deployment, requests)
    assert recorder.service is not None
    assert recorder.metrics().recomputes > 0
    # All requests have left: what is still counted as held would be a leak.
    assert not recorder.service._loads.any()
    assert not recorder.service._running.any()


def test_tenants_share_the_prefills_by_weight() -> None:
    requests = stream(5, 800, tenant="a", weight=2.0) + stream(5, 800, tenant="b")
    figures, _ = measured(run(replace(SLOW, fair_queue="request"), requests))
    assert figures[ServiceGroup("a", 0)].share_requests == pytest.approx(2 / 3, abs=0.02)
    figures, _ = measured(run(SLOW, requests))
    assert figures[ServiceGroup("a", 0)].share_requests == pytest.approx(1 / 2, abs=0.02)


def test_refused_requests_are_counted_and_not_served() -> None:
    requests = stream(5, 800, tenant="a")
    admission = partial(BoundedQueue, 4)
    figures, metrics = measured(
        run(replace(SLOW, admission=admission), requests), ServiceTargets(0.1)
    )
    row = figures[ServiceGroup("a", 0)]
    assert row.refused == pytest.approx(row.requests / 2, rel=0.05)
    assert row.unserved == 0
    assert row.goodput == pytest.approx(1 - row.refused / row.requests)
    assert metrics.refused == pytest.approx(row.refused, abs=2)
    # Without a limit all of them wait too long.
    figures, metrics = measured(run(SLOW, requests), ServiceTargets(0.1))
    assert figures[ServiceGroup("a", 0)].goodput == 0.0
    assert metrics.refused == 0


def test_requests_expire_at_their_deadline() -> None:
    requests = stream(5, 800, tenant="a", deadline_ns=50 * MS)
    # Slots are free for about 155 requests a second.
    figures, metrics = measured(
        run(SimulatedDeployment(1, 16, step_base_ns=5 * MS), requests), ServiceTargets(0.1)
    )
    row = figures[ServiceGroup("a", 0)]
    assert row.refused == 0
    assert row.unserved == pytest.approx(0.23 * row.requests, rel=0.2)
    assert metrics.expired == pytest.approx(row.unserved, abs=12)
    assert metrics.lease_lapses == 0
    assert row.ttft_s_p99 is not None
    assert row.ttft_s_p99 < 0.07


def test_the_level_decides_who_starts() -> None:
    requests = stream(20, 200, tenant="a", level=-1) + stream(5, 800, tenant="b")
    figures, _ = measured(run(replace(SLOW, queue_order="abs"), requests))
    late = figures[ServiceGroup("b", 0)].ttft_s_p50
    early = figures[ServiceGroup("a", -1)].ttft_s_p99
    assert early is not None
    assert late is not None
    assert early < 0.05 < late


def test_a_refused_client_of_a_closed_loop_comes_back() -> None:
    requests = stream(0, 60, tenant="a")
    workload = Workload(requests, [], concurrency=12)
    simulation = make_simulation(
        replace(SLOW, admission=partial(BoundedQueue, 4)),
        workload,
        "fifo",
        PolicySettings(),
        FORECASTS["none"],
        seed="0",
    )
    recorder = simulation.run()
    assert recorder.ended == 60
    assert recorder.metrics().refused > 0


class Ledger(BoundedQueue):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(4)
        self.begun = 0
        self.endings: list[Ending] = []

    def began(self, ticket: Ticket, now_ns: int) -> None:
        del ticket, now_ns
        self.begun += 1

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        del ticket, now_ns
        self.endings.append(ending)


def test_the_rule_is_told_how_each_request_ended_that_it_let_in() -> None:
    rule = Ledger()
    requests = stream(5, 200, tenant="a", deadline_ns=25 * MS)
    recorder = run(replace(SLOW, admission=lambda: rule), requests)
    refused = recorder.ended - len(rule.endings)
    assert refused > 0
    served = [ending for ending in rule.endings if ending.served]
    assert rule.begun == sum(ending.began for ending in rule.endings)
    assert 0 < len(served) < len(rule.endings)
    assert all(ending.output_tokens == 20 and ending.prompt_tokens == 100 for ending in served)
    assert all((ending.first_token_ns or 0) >= 10 * MS for ending in served)
    late = [ending for ending in rule.endings if not ending.served]
    assert all(ending.first_token_ns is None and not ending.output_tokens for ending in late)

"""The scheduler's queue orders in the simulator."""

import random

import pytest

from balanceroute.proxy.core.events import StartPrefill
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.policies.baselines import OldestFirst, least_kv_with_room
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import FORECASTS, make_simulation
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

# All at once; by id: a work of 250, 1,750, 300 and 46 KV tokens times steps.
REQUESTS = [TraceRequest(0, 20, 10), TraceRequest(0, 10, 50), TraceRequest(0, 5, 20)]
REQUESTS.append(TraceRequest(0, 22, 2))


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("edf", [0, 1, 2, 3]), ("srpt", [0, 3, 2, 1])]
)
def test_the_order_decides_whose_prefill_starts(order: str, expected: list[int]) -> None:
    started: list[int] = []
    deployment = SimulatedDeployment(
        1, 4, prefill=PrefillModel(servers=1, base_ns=500, ns_per_token=20.0), queue_order=order
    )
    workload = Workload(REQUESTS, [], backlog=4)
    predictor = FORECASTS["oracle"](workload, PolicySettings())
    Simulation(
        deployment,
        workload,
        OldestFirst(least_kv_with_room, slots_beyond_batch=0),
        predictor,
        observer=lambda _event, actions, _now_ns: started.extend(
            action.request for action in actions if isinstance(action, StartPrefill)
        ),
    ).run()
    # The first one starts as it arrives.
    assert started == expected


def test_an_order_that_predicts_gets_its_predictor_with_any_policy() -> None:
    rng = random.Random(5)
    requests = [TraceRequest(0, rng.randint(1, 60), rng.randint(1, 30)) for _ in range(120)]
    workload, settings = Workload(requests, [], backlog=16), PolicySettings()
    medians_s = []
    for order in ("fcfs", "srpt"):
        deployment = SimulatedDeployment(2, 4, queue_order=order)
        simulation = make_simulation(
            deployment, workload, "fifo", settings, FORECASTS["oracle"], seed="0"
        )
        medians_s.append(simulation.run().metrics().ttft_s_p50)
    assert medians_s[1] < 0.5 * medians_s[0]

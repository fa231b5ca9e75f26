"""One simulated run that is measured by tenant and class."""

from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import FORECASTS, make_simulation
from balanceroute.proxy.lab.sim.recorder import Recorder, ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest


def run(deployment: SimulatedDeployment, requests: list[TraceRequest]) -> Recorder:
    """Run requests to their end under `fifo`, and check that nothing is left."""
    requests = sorted(requests, key=lambda request: request.arrival_ns)
    simulation = make_simulation(
        deployment,
        Workload(requests, []),
        "fifo",
        PolicySettings(),
        FORECASTS["none"],
        seed="0",
        service=ServiceLog(requests),
    )
    recorder = simulation.run()
    simulation.scheduler.check()
    assert not simulation.scheduler.requests
    return recorder

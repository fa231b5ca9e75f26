"""One simulated run that is measured by tenant and class."""

from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.sim.driver import Deployment
from balanceroute.proxy.sim.experiment import make_simulation
from balanceroute.proxy.sim.forecast import FORECASTS
from balanceroute.proxy.sim.recorder import Recorder
from balanceroute.proxy.sim.service_log import ServiceLog
from balanceroute.proxy.sim.workload import Workload
from balanceroute.traces import TraceRequest


def run(deployment: Deployment, requests: list[TraceRequest]) -> Recorder:
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

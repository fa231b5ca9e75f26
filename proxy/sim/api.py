"""Simulations from Python: `from balanceroute import simulate`."""

from collections.abc import Sequence
from os import PathLike

from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.sim.driver import Deployment
from balanceroute.proxy.sim.experiment import PolicyResult, run_experiment
from balanceroute.proxy.sim.forecast import forecast_called
from balanceroute.proxy.sim.workload import playable, split
from balanceroute.traces import TraceRequest, read_trace


def simulate(
    trace: str | PathLike[str] | Sequence[TraceRequest],
    *,
    policies: Sequence[str] = ("jsq", "br-h"),
    ranks: int = 8,
    batch: int = 16,
    deployment: Deployment | None = None,
    rate: float | None = None,
    backlog: int | None = None,
    concurrency: int | None = None,
    requests: int | None = None,
    segments: int = 1,
    predictor: str = "survival",
    settings: PolicySettings | None = None,
    seed: int = 0,
) -> list[PolicyResult]:
    """Replay a trace as `balanceroute simulate` does; return the figures in the order of `policies`.

    Args:
        trace: A file, the name of a shipped trace, or requests by arrival.
        policies: Names of policies, or `module:function`.
        ranks: Decode ranks.
        batch: The batch limit of a rank.
        deployment: All of the machines, in place of `ranks` and `batch`.
        rate: Open loop, see `Workload`; 1 if no other pace is given.
        backlog: Saturated, see `Workload`.
        concurrency: Closed loop, see `Workload`.
        requests: Replay only the first ones.
        segments: Cut the trace in so many runs, of which the figures are means.
        predictor: Of `br-h`: `survival`, another name, or a file that `balanceroute train` wrote.
        settings: Parameters of the policies.
        seed: Of random policies.

    Raises:
        ConfigError: A value or a combination of values makes no sense.
        PolicyError: A policy from outside failed.
        TraceError: The trace cannot be read.
    """
    read = (
        trace if isinstance(trace, Sequence) and not isinstance(trace, str) else read_trace(trace)
    )
    if rate is None and backlog is None and concurrency is None:
        rate = 1.0
    workloads = split(
        playable(read[:requests]),
        segments=segments,
        rate=rate,
        backlog=backlog,
        concurrency=concurrency,
    )
    return list(
        run_experiment(
            deployment or Deployment(ranks=ranks, batch_limit=batch),
            workloads,
            policies,
            settings or PolicySettings(),
            forecast_called(predictor),
            seed=seed,
        )
    )

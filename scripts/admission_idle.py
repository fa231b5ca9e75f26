"""What admission costs in idle time at the barrier, beside as many requests in flight without it.

    python scripts/admission_idle.py [--segments S] [--requests N]

Simulates BR-H with a backlog on the Mooncake conversation trace, 8 ranks of 16 slots. A limit on requests
in flight that is below the slots leaves slots empty, and no candidates wait behind it: each request is
bound as soon as it is prefilled. So beside each limit there is a row with as many requests in flight
and no admission at all (closed loop), which is what the limit itself costs. Prints Markdown: idle time in
percent, with standard errors over the segments, and the requests that run on average.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from balanceroute.proxy.core.admission import POST_5, AimdSettings
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called, make_simulation
from balanceroute.proxy.lab.sim.recorder import RunMetrics
from balanceroute.proxy.lab.sim.workload import Workload, playable, split
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import TraceRequest, read_trace

TRACE = Path(__file__).parents[1] / "traces" / "public" / "mooncake_conversation.jsonl.gz"
RANKS, BATCH, POOL, BACKLOG = 8, 16, 64, 128
# Per rank: above what slots and pool hold, at the slots, and below them.
LIMITS = (32, 20, 16, 12, 8)
# A backlog waits for longer than its target, so the limit falls to its floor.
MOVING = replace(POST_5, cap_min=BATCH // 4, cap_initial=BATCH)
TENANTS = (("gold", 2.0), ("silver", 1.0))
PLAIN = SimulatedDeployment(
    RANKS, BATCH, prefill=PrefillModel(RANKS, 20_000_000, 50.0), pool_limit=POOL
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: its name, and the machines with what is let in."""

    name: str
    deployment: SimulatedDeployment


def fixed(limit: int) -> AimdSettings:
    """Return a limit per rank that does not move."""
    return replace(POST_5, cap_min=limit, cap_max=limit, cap_initial=limit)


def rows() -> list[Row]:
    """Return the rows of the table."""
    found = [Row("off", PLAIN)]
    found += [
        Row(f"`--fair-queue {cost}`", replace(PLAIN, fair_queue=cost))
        for cost in ("request", "kv-token-seconds")
    ]
    found += [Row(f"limit {limit} per rank", replace(PLAIN, aimd=fixed(limit))) for limit in LIMITS]
    moved = replace(PLAIN, aimd=MOVING)
    return [*found, Row("`--aimd post5`, target 2 s", moved)]


def segments_of(requests: int, segments: int) -> list[Workload]:
    """Return parts of the trace with so many requests each, which two tenants send in turn."""
    trace = playable(read_trace(TRACE))[: (segments + 1) * requests]
    sent = [_sent(number, one) for number, one in enumerate(trace)]
    return split(sent, segments=segments, known=requests, backlog=BACKLOG)


def _sent(number: int, request: TraceRequest) -> TraceRequest:
    tenant, weight = TENANTS[number % len(TENANTS)]
    return replace(request, tenant=tenant, weight=weight)


def figures_of(
    deployment: SimulatedDeployment, workloads: Sequence[Workload], in_flight: int | None = None
) -> list[RunMetrics]:
    """Run the parts of the trace, with a backlog or with so many requests always in flight."""
    if in_flight is not None:
        workloads = [replace(one, backlog=None, concurrency=in_flight) for one in workloads]
    return [
        make_simulation(
            deployment, workload, "br-h", PolicySettings(), forecast_called("survival"), seed="0"
        )
        .run()
        .metrics()
        for workload in workloads
    ]


def in_flight_of(limit: AimdSettings, runs: Sequence[RunMetrics]) -> int:
    """Return how many requests a limit keeps in flight; a moving one those that run on average."""
    if limit.cap_min == limit.cap_max:
        return RANKS * limit.cap_max
    return round(fmean(run.mean_running for run in runs))


def print_row(name: str, runs: Sequence[RunMetrics]) -> None:
    """Print the means of some runs."""
    idle = [100 * run.idle_fraction for run in runs]
    error = stdev(idle) / len(idle) ** 0.5 if len(idle) > 1 else 0.0
    running, output = (
        f"{fmean(values):,.0f}"
        for values in zip(
            *((run.mean_running, run.output_tokens_per_s) for run in runs), strict=True
        )
    )
    print(f"| {name} | {running} | {fmean(idle):.1f} ±{error:.1f} | {output} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--segments", type=positive, default=3, help="parts of the trace (default 3)"
    )
    parser.add_argument(
        "--requests", type=positive, default=1_000, help="of each part (default 1000)"
    )
    arguments = parser.parse_args()
    workloads = segments_of(arguments.requests, arguments.segments)
    print("| admission | running | idle % | output tokens/s |\n| --- | ---: | ---: | ---: |")
    for row in rows():
        runs = figures_of(row.deployment, workloads)
        print_row(row.name, runs)
        limit = row.deployment.aimd
        if limit is not None:
            in_flight = in_flight_of(limit, runs)
            print_row(f"off, {in_flight} in flight", figures_of(PLAIN, workloads, in_flight))


if __name__ == "__main__":
    main()

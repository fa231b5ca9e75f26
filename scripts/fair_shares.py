"""How evenly two backlogged tenants share the decode ranks, by cost of the queue and by weight.

    python scripts/fair_shares.py [--ranks G] [--predictor NAME] [--weights A:B ..] [--cost NAME ..]

The tenants are the public Azure traces: `conv` (prompts of 1,000 tokens, answers of 200) and `code`
(prompts of 2,000, answers of 30), whose requests all wait from the start. The table has the mean share
of `conv` in the KV-token-seconds that both hold on the ranks, and over all windows of 60 s after the
first minute, while both wait, the largest deviation of a share from that of the weights: in points, and
relative to the share of the tenant that it is largest for.
"""

import argparse
import random
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import FAIR_COSTS
from balanceroute.proxy.sim.driver import Deployment, Simulation
from balanceroute.proxy.sim.forecast import forecast_called
from balanceroute.proxy.sim.service_log import ServiceLog
from balanceroute.proxy.sim.workload import Workload, playable
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import TraceRequest, read_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRACES = Path(__file__).parents[1] / "traces" / "public"
KNOWN = 2_000
BATCH, POOL_PER_RANK = 16, 2
# Of each rank: five minutes' work at least, whatever the weights.
REQUESTS = {"conv": 500, "code": 2_000}
WEIGHTS = [(1.0, 1.0), (2.0, 1.0), (5.0, 1.0)]
WINDOW_S, WARM_UP_S = 60, 60


def requests_of(
    name: str, weight: float, count: int
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return the past of a tenant, for predictors, and `count` requests that all come at once."""
    requests = playable(read_trace(TRACES / f"azure_2023_{name}.csv.gz"))
    mine = [replace(one, arrival_ns=0, tenant=name, weight=weight) for one in requests]
    return mine[:KNOWN], list(islice(cycle(mine[KNOWN:]), count))


def shares_of(
    cost: str, weights: tuple[float, float], ranks: int, predictor_name: str
) -> "NDArray[np.float64]":
    """Run; return the share of `conv` in every window, float64[windows]."""
    past, requests = list[TraceRequest](), list[TraceRequest]()
    for name, weight in zip(REQUESTS, weights, strict=True):
        before, now = requests_of(name, weight, ranks * REQUESTS[name])
        past += before
        requests += now
    workload = Workload(requests, past)
    deployment = Deployment(ranks, BATCH, pool_limit=POOL_PER_RANK * ranks, fair_queue=cost)
    settings = PolicySettings()
    predictor = forecast_called(predictor_name)(workload, settings)
    inputs = PolicyInputs(ranks, BATCH, settings, random.Random(0), predictor)
    service, policy = ServiceLog(requests), make_policy("br-h", inputs)
    Simulation(deployment, workload, policy, predictor, service=service).run()
    held = np.array([sample.kv_token_ns for sample in service.samples])
    conv = [group.tenant for group in service.groups].index("conv")
    # Both wait while neither has fewer left than the ranks and the pool hold.
    sent = np.array([ranks * REQUESTS[group.tenant] for group in service.groups])
    left = (sent - np.array([sample.requests for sample in service.samples])).min(axis=1)
    until = int(np.argmax(left < (BATCH + POOL_PER_RANK) * ranks))
    begins = np.arange(WARM_UP_S, until - WINDOW_S)
    windows = held[begins + WINDOW_S] - held[begins]
    return np.asarray(windows[:, conv] / windows.sum(axis=1))


def weights_of(text: str) -> tuple[float, float]:
    """Read `A:B`."""
    one, _, other = text.partition(":")
    return float(one), float(other)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive, default=8, help="decode ranks (default 8)")
    parser.add_argument("--predictor", default="exact-match", help="(default exact-match)")
    parser.add_argument("--weights", nargs="*", type=weights_of, default=WEIGHTS)
    parser.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args()
    print("| weights | `--fair-queue` | share of `conv` | due | largest deviation | relative |")
    print("| --- " * 6 + "|")
    for weights in arguments.weights:
        due = weights[0] / sum(weights)
        for cost in arguments.cost:
            shares = shares_of(cost, weights, arguments.ranks, arguments.predictor)
            off = float(np.abs(shares - due).max())
            print(
                f"| {weights[0]:g}:{weights[1]:g} | `{cost}` | {100 * shares.mean():.1f} % | "
                f"{100 * due:.1f} % | {100 * off:.1f} points | {100 * off / min(due, 1 - due):.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()

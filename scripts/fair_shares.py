"""How evenly backlogged tenants share the decode ranks: by cost of the queue, and in windows of 1 to 60 s.

    python scripts/fair_shares.py taken [--ranks G] [--predictor NAME] [--weights A:B ..] [--cost NAME ..]
    python scripts/fair_shares.py steady [--pool N ..] [--outputs A-B ..] [--seeds N] [--cost NAME ..]

All requests wait from the start, before BR-H in virtual time; the first seconds do not count, nor do
those when a tenant has few requests left.

`taken`: the tenants are the public Azure traces, `conv` (prompts of 1,000 tokens, answers of 200) and
`code` (prompts of 2,000, answers of 30). The table has the mean share of `conv` in the KV-token-seconds
that both hold on the ranks, and over all windows of 60 s the largest deviation of a share from that of
the weights: in points, and relative to the share of the tenant that it is largest for.

`steady`: `gold` of weight 2 and `silver` of weight 1 have the same mix, on the machine of `make qos`. The
table has the share of `gold`, over all windows of 1, 10 and 60 s of all seeds: the largest standard
deviation of a seed in windows of 1 s, the least share and the largest.
"""

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import FAIR_COSTS
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.experiment import forecast_called
from balanceroute.proxy.lab.sim.recorder import ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload, playable
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
# The machine and the prompts of `make qos`, and the least steps and requests of each tenant.
STEADY = SimulatedDeployment(4, 8, step_base_ns=50_000_000)
PROMPT_TOKENS = (200, 1000)
STEADY_STEPS, STEADY_REQUESTS, STEADY_WARM_UP_S = 60_000, 500, 20
WINDOWS_S = (1, 10, 60)

Draw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Load:
    """What one tenant sends: its weight, and how its prompts and outputs are drawn."""

    tenant: str
    weight: float
    prompt_tokens: Draw
    output_tokens: Draw
    count: int

    def requests(self, rng: random.Random) -> list[TraceRequest]:
        """Draw the requests, which all come at once."""
        return [
            TraceRequest(
                0,
                self.prompt_tokens(rng),
                self.output_tokens(rng),
                tenant=self.tenant,
                weight=self.weight,
            )
            for _ in range(self.count)
        ]


def between(least: int, most: int) -> Draw:
    """Return a draw of any number from `least` to `most`."""
    return lambda rng: rng.randint(least, most)


def requests_of(
    name: str, weight: float, count: int
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return the past of a tenant, for predictors, and `count` requests that all come at once."""
    requests = playable(read_trace(TRACES / f"azure_2023_{name}.csv.gz"))
    mine = [replace(one, arrival_ns=0, tenant=name, weight=weight) for one in requests]
    return mine[:KNOWN], list(islice(cycle(mine[KNOWN:]), count))


def held_by(
    tenant: str, deployment: SimulatedDeployment, workload: Workload, predictor_name: str
) -> "NDArray[np.float64]":
    """Run; return what a tenant and what all hold at each second, float64[2, seconds].

    Only while every tenant has more requests left than the ranks and the pool hold.
    """
    settings = PolicySettings()
    predictor = forecast_called(predictor_name)(workload, settings)
    ranks, batch = deployment.ranks, deployment.batch_limit
    inputs = PolicyInputs(ranks, batch, settings, random.Random(0), predictor)
    service, policy = ServiceLog(workload.requests), make_policy("br-h", inputs)
    Simulation(deployment, workload, policy, predictor, service=service).run()
    sent = np.array(
        [sum(one.tenant == group.tenant for one in workload.requests) for group in service.groups]
    )
    left = (sent - np.array([sample.requests for sample in service.samples])).min(axis=1)
    until = int(np.argmax(left < ranks * batch + (deployment.pool_limit or 0)))
    held = np.array([sample.kv_token_ns for sample in service.samples])[:until]
    mine = [group.tenant for group in service.groups].index(tenant)
    return np.stack([held[:, mine], held.sum(axis=1)])


def shares_in(held: "NDArray[np.float64]", window_s: int, warm_up_s: int) -> "NDArray[np.float64]":
    """Return the tenant's share in every window after the first seconds, float64[windows]."""
    begins = np.arange(warm_up_s, held.shape[1] - window_s)
    windows = held[:, begins + window_s] - held[:, begins]
    return np.asarray(windows[0] / windows[1])


def shares_of(
    cost: str, weights: tuple[float, float], ranks: int, predictor_name: str
) -> "NDArray[np.float64]":
    """Run the Azure traces; return the share of `conv` in every window, float64[windows]."""
    past, requests = list[TraceRequest](), list[TraceRequest]()
    for name, weight in zip(REQUESTS, weights, strict=True):
        before, now = requests_of(name, weight, ranks * REQUESTS[name])
        past += before
        requests += now
    deployment = SimulatedDeployment(
        ranks, BATCH, pool_limit=POOL_PER_RANK * ranks, fair_queue=cost
    )
    held = held_by("conv", deployment, Workload(requests, past), predictor_name)
    return shares_in(held, WINDOW_S, WARM_UP_S)


def steady_loads(outputs: tuple[int, int]) -> list[Load]:
    """Return two tenants of weights 2 and 1 with the same mix."""
    prompts, answers = between(*PROMPT_TOKENS), between(*outputs)
    count = max(STEADY_REQUESTS, STEADY_STEPS * 2 // sum(outputs))
    return [
        Load(name, weight, prompts, answers, count)
        for name, weight in (("gold", 2.0), ("silver", 1.0))
    ]


def steady_of(cost: str, pool: int, seed: int, loads: Iterable[Load]) -> "NDArray[np.float64]":
    """Run some loads; return what the first tenant and what all hold, see `held_by`."""
    loads, rng = list(loads), random.Random(seed)
    requests = [one for load in loads for one in load.requests(rng)]
    deployment = replace(STEADY, pool_limit=pool, fair_queue=cost)
    return held_by(loads[0].tenant, deployment, Workload(requests, []), "survival")


def weights_of(text: str) -> tuple[float, float]:
    """Read `A:B`."""
    one, _, other = text.partition(":")
    return float(one), float(other)


def range_of(text: str) -> tuple[int, int]:
    """Read `A-B`."""
    least, _, most = text.partition("-")
    return int(least), int(most)


def print_taken(arguments: argparse.Namespace) -> None:
    """Print the shares of tenants whose requests differ."""
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


def print_steady(arguments: argparse.Namespace) -> None:
    """Print how steady the shares of tenants with the same mix are."""
    print("| answers | pool | `--fair-queue` | deviation in 1 s |", end="")
    print("".join(f" windows of {window_s} s |" for window_s in WINDOWS_S))
    print("| --- " * (4 + len(WINDOWS_S)) + "|")
    for outputs in arguments.outputs:
        for pool in arguments.pool:
            for cost in arguments.cost:
                loads = steady_loads(outputs)
                held = [steady_of(cost, pool, seed, loads) for seed in range(arguments.seeds)]
                print(steady_row(outputs, pool, cost, held), flush=True)


def steady_row(
    outputs: tuple[int, int], pool: int, cost: str, held: "Sequence[NDArray[np.float64]]"
) -> str:
    """Return a row of the table, from the runs of all seeds."""
    shares = [[100 * shares_in(one, w, STEADY_WARM_UP_S) for one in held] for w in WINDOWS_S]
    deviation = max(float(one.std()) for one in shares[0])
    ranges = [
        f"{min(one.min() for one in runs):.0f} to {max(one.max() for one in runs):.0f} %"
        for runs in shares
    ]
    cells = [f"{outputs[0]} to {outputs[1]}", str(pool), f"`{cost}`", f"{deviation:.1f}", *ranges]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tables = parser.add_subparsers(dest="table", required=True)
    taken = tables.add_parser("taken", help="tenants whose requests differ")
    taken.add_argument("--ranks", type=positive, default=8, help="decode ranks (default 8)")
    taken.add_argument("--predictor", default="exact-match", help="(default exact-match)")
    taken.add_argument("--weights", nargs="*", type=weights_of, default=WEIGHTS)
    steady = tables.add_parser("steady", help="tenants with the same mix, in short windows")
    steady.add_argument("--pool", nargs="*", type=positive, default=[8, 24])
    steady.add_argument("--outputs", nargs="*", type=range_of, default=[(20, 60), (200, 600)])
    steady.add_argument("--seeds", type=positive, default=5, help="0 to this less 1 (default 5)")
    for table in (taken, steady):
        table.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args()
    {"taken": print_taken, "steady": print_steady}[arguments.table](arguments)


if __name__ == "__main__":
    main()

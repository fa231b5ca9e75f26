"""How many requests are answered in time below and above capacity, by what the proxy lets in.

    python scripts/goodput.py [--workload NAME ..] [--load X ..] [--rule NAME ..]

Simulates BR-H on public traces with Poisson arrivals. A load of 1 is the rate of requests that the same
ranks finish with a backlog. A request is good if it is answered in full within both targets: time to the
first token, and mean time between tokens. The rules:

* `none`: every request is let in.
* `aimd`: `--aimd post5` with the target of the first token; requests expire after half of it.
* `srpt`: the target is the deadline of every request, and the least expected work goes first.
* `srpt, early`: also refuses at once what is not expected to begin in time.
* `clairvoyant`: as `srpt`, but every output is known.

Prints Markdown: shares of the requests in percent, with standard errors over the parts of the trace.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from balanceroute.proxy.core.admission import AimdSettings, BoundedQueue, EarlyRefusal
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.service_levels import ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called, make_simulation
from balanceroute.proxy.lab.sim.recorder import ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload, playable, split
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import TraceRequest, read_trace

TRACES = Path(__file__).parents[1] / "traces" / "public"
S = 1_000_000_000
LOADS = [0.8, 1.0, 1.3, 2.0]
BACKLOG, POOL_PER_RANK = 64, 4
PREDICTOR = "exact-match"
UNLIMITED = 10**9


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace, the machines that serve it, and what its clients want.

    Attributes:
        known: Requests that predictors learn from.
        played: Requests of each part.
        parts: Parts of the trace.
    """

    trace: str
    ranks: int
    batch: int
    prefillers: int
    targets: ServiceTargets
    known: int = 3_000
    played: int = 2_000
    parts: int = 3

    @property
    def deployment(self) -> SimulatedDeployment:
        """The machines: prefill takes 20 ms and 50 us a token."""
        return SimulatedDeployment(
            self.ranks,
            self.batch,
            prefill=PrefillModel(self.prefillers, 20_000_000, 50.0),
            pool_limit=POOL_PER_RANK * self.ranks,
        )

    def workloads(self) -> list[Workload]:
        """Return the parts, each with a backlog."""
        requests = playable(read_trace(TRACES / self.trace))
        requests = requests[: self.known + self.parts * self.played]
        return split(requests, segments=self.parts, known=self.known, backlog=BACKLOG)


SETTINGS = {
    "azure": Setting("azure_2023_conv.csv.gz", 8, 32, 4, ServiceTargets(2.0, 0.05)),
    "mooncake": Setting("mooncake_conversation.jsonl.gz", 8, 16, 8, ServiceTargets(5.0, 0.1)),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What the proxy lets in.

    Attributes:
        change: Of the deployment, for the target of the first token in ns.
        predictor: A name of `FORECASTS`.
        deadlines: Whether requests have the target as their deadline.
    """

    change: Callable[[SimulatedDeployment, int], SimulatedDeployment]
    predictor: str = PREDICTOR
    deadlines: bool = True


def with_aimd(deployment: SimulatedDeployment, target_ns: int) -> SimulatedDeployment:
    """Limit the requests in flight; there are fewer slots than the default limits are made for."""
    batch = deployment.batch_limit
    aimd = AimdSettings(target_ns=target_ns, cap_min=batch // 4, cap_initial=batch)
    return replace(deployment, aimd=aimd, queue_ttl_ns=target_ns // 2)


def with_srpt(deployment: SimulatedDeployment, _: int) -> SimulatedDeployment:
    """Put the least work first."""
    return replace(deployment, queue_order="srpt")


def with_early(deployment: SimulatedDeployment, target_ns: int) -> SimulatedDeployment:
    """Refuse early, too."""
    return replace(
        with_srpt(deployment, target_ns),
        admission=lambda: EarlyRefusal(BoundedQueue(UNLIMITED)),
        expects_first_tokens=True,
    )


RULES = {
    "none": Rule(lambda deployment, _: deployment, deadlines=False),
    "aimd": Rule(with_aimd, deadlines=False),
    "srpt": Rule(with_srpt),
    "srpt, early": Rule(with_early),
    "clairvoyant": Rule(with_srpt, "oracle"),
}


def capacity_of(setting: Setting, workload: Workload) -> float:
    """Return the requests per second that the ranks finish with a backlog."""
    simulation = make_simulation(
        setting.deployment,
        workload,
        "br-h",
        PolicySettings(),
        forecast_called(PREDICTOR),
        seed="0",
    )
    tokens_per_s = simulation.run().metrics().output_tokens_per_s
    return tokens_per_s / fmean(request.output_tokens for request in workload.requests)


def arriving(requests: Sequence[TraceRequest], rate: float, seed: int) -> list[TraceRequest]:
    """Return the requests with Poisson arrivals."""
    draw, time_s, found = random.Random(seed), 0.0, []
    for request in requests:
        time_s += draw.expovariate(rate)
        found.append(replace(request, arrival_ns=round(time_s * S)))
    return found


def goodput_of(setting: Setting, rule: Rule, workload: Workload, rate: float, seed: int) -> float:
    """Return the share of good requests among those that arrive once the ranks are full."""
    target_ns = round(setting.targets.ttft_s * S)
    requests = [
        replace(one, deadline_ns=target_ns if rule.deadlines else None)
        for one in arriving(workload.requests, rate, seed)
    ]
    service = ServiceLog(requests)
    make_simulation(
        rule.change(setting.deployment, target_ns),
        Workload(requests, workload.history),
        "br-h",
        PolicySettings(),
        forecast_called(rule.predictor),
        seed="0",
        service=service,
    ).run()
    (figures,) = service.figures(setting.targets).values()
    assert figures.goodput is not None, "no request arrived in the measured time"
    return figures.goodput


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--load", nargs="*", type=float, default=LOADS)
    parser.add_argument("--rule", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--played", type=positive, help="requests of each part (default 2000)")
    arguments = parser.parse_args()
    for name in arguments.workload:
        setting = SETTINGS[name]
        setting = replace(setting, played=arguments.played or setting.played)
        workloads = setting.workloads()
        capacities = [capacity_of(setting, workload) for workload in workloads]
        print(
            f"\n{name}: {fmean(capacities):.1f} requests/s, first token within "
            f"{setting.targets.ttft_s:g} s, {1e3 * setting.targets.tpot_s:g} ms per token\n"
        )
        print("| load | " + " | ".join(f"`{rule}`" for rule in arguments.rule) + " |")
        print("| ---: |" + " ---: |" * len(arguments.rule))
        for load in arguments.load:
            cells = []
            for rule in arguments.rule:
                shares = [
                    100 * goodput_of(setting, RULES[rule], workload, load * capacity, seed)
                    for seed, (workload, capacity) in enumerate(
                        zip(workloads, capacities, strict=True)
                    )
                ]
                error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
                cells.append(f"{fmean(shares):.1f} ±{error:.1f}")
            print(f"| {load:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

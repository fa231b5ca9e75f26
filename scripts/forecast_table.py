"""How well `--admission early` expects times to first token under fair queueing.

    python scripts/forecast_table.py [--seconds S] [--cost NAME ..]

Simulates BR-H on requests of both public Azure traces, 4 ranks of 16 slots, sent by four tenants: three that
ask for more than their share and may have 40 requests waiting each, of weights 4, 2 and 1, one of which
sends code completions, and one of weight 1 that asks for a part of its share. Nobody is refused for what is expected.
Prints Markdown: by cost and tenant, the time to first token, and what it was over what was expected: the
median, and the 10th and 90th percentile.
"""

import argparse
import random
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from balanceroute.proxy.core.admission import (
    BoundedQueue,
    Ending,
    Load,
    Refusal,
    TenantLimits,
    Tenants,
)
from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.queueing import FAIR_COSTS
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called, make_simulation
from balanceroute.proxy.lab.sim.workload import Workload, playable
from balanceroute.traces import TraceRequest, read_trace

TRACES = Path(__file__).parents[1] / "traces" / "public"
S = 1_000_000_000
KNOWN = 1_000
UNLIMITED = 10**9
DEPLOYMENT = SimulatedDeployment(
    4, 16, prefill=PrefillModel(4, 20_000_000, 50.0), pool_limit=16, expects_first_tokens=True
)
# Tells the tickets apart, and is never reached.
FAR_NS = 10**15
# Requests before the shares are those of the weights.
WARM_UP = 0.3


@dataclass(frozen=True, slots=True)
class Sender:
    """A tenant.

    Attributes:
        trace: What it sends.
        rate: Requests per second.
    """

    name: str
    trace: str
    weight: float
    rate: float
    queue_limit: int = 40


SENDERS = (
    Sender("gold", "conv", 4.0, 12.0),
    Sender("silver", "code", 2.0, 30.0),
    Sender("bronze", "conv", 1.0, 6.0),
    Sender("light", "conv", 1.0, 0.3),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """A request that was let in: whose it is, and its time to first token as expected and as it came."""

    tenant: str
    expected_ns: float
    real_ns: int


class Witness:
    """Lets all in, and notes what was expected of each and what came of it."""

    follows = True

    def __init__(self) -> None:
        self.seen: list[Expected] = []
        self._expected: dict[Ticket, list[float | None]] = {}
        self._within = BoundedQueue(UNLIMITED)

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Note what is expected."""
        # No two tickets are equal: each has its own deadline.
        self._expected[ticket] = [load.first_token_ns]
        return self._within.offer(ticket, load, now_ns)

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Pass on."""
        self._within.began(ticket, now_ns)

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Note what came."""
        (expected_ns,) = self._expected.pop(ticket)
        if expected_ns and ending.first_token_ns is not None:
            self.seen.append(Expected(ticket.tenant, expected_ns, ending.first_token_ns))
        self._within.ended(ticket, ending, now_ns)


def sent_by(sender: Sender, seed: int, span_s: float) -> list[TraceRequest]:
    """Return a tenant's requests, with Poisson arrivals until `span_s`."""
    trace = playable(read_trace(TRACES / f"azure_2023_{sender.trace}.csv.gz"))[KNOWN:]
    draw, time_s, found = random.Random(f"{seed}/{sender.name}"), 0.0, []
    while (time_s := time_s + draw.expovariate(sender.rate)) < span_s:
        arrival_ns = round(time_s * S)
        found.append(
            replace(
                draw.choice(trace),
                arrival_ns=arrival_ns,
                tenant=sender.name,
                weight=sender.weight,
                deadline_ns=FAR_NS,
            )
        )
    return found


def seen_of(cost: str, *, span_s: float, seed: int = 0) -> list[Expected]:
    """Run; return what was expected of the requests after the warm-up, in order of their ends."""
    past = playable(read_trace(TRACES / "azure_2023_conv.csv.gz"))
    requests = sorted(
        (one for sender in SENDERS for one in sent_by(sender, seed, span_s)),
        key=lambda one: one.arrival_ns,
    )
    witness = Witness()
    limits = {one.name: TenantLimits(queue_limit=one.queue_limit) for one in SENDERS}
    deployment = replace(DEPLOYMENT, fair_queue=cost, admission=lambda: Tenants(witness, limits, 0))
    make_simulation(
        deployment,
        Workload(requests, list(islice(past, KNOWN))),
        "br-h",
        PolicySettings(),
        forecast_called("survival"),
        seed="0",
    ).run()
    return witness.seen[round(WARM_UP * len(witness.seen)) :]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="of arrivals (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default 0)")
    parser.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args()
    print("| `--fair-queue` | tenant | weight | requests | TTFT p50 s | over what was expected |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for cost in arguments.cost:
        seen = seen_of(cost, span_s=arguments.seconds, seed=arguments.seed)
        for sender in SENDERS:
            own = [one for one in seen if one.tenant == sender.name]
            ratios = [one.real_ns / one.expected_ns for one in own]
            middle, low, high = np.percentile(ratios, [50, 10, 90])
            ttft_s = np.median([one.real_ns for one in own]) / S
            print(
                f"| `{cost}` | {sender.name} | {sender.weight:g} | {len(own):,} | {ttft_s:.1f} | "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()

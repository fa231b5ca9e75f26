"""What admission costs, what it keeps in time, what it expects, and how tenants share, simulated."""

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from tests.support.arguments import positive

from balanceroute.proxy.core.admission import (
    POST_5,
    AimdSettings,
    BoundedQueue,
    Ending,
    Load,
    Refusal,
    TenantLimits,
)
from balanceroute.proxy.core.admission.overload import EarlyRefusal
from balanceroute.proxy.core.admission.tenants import Tenants
from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import FAIR_COSTS
from balanceroute.proxy.lab.service_levels import ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called, make_simulation
from balanceroute.proxy.lab.sim.recorder import Recorder, RunMetrics, ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload, split
from balanceroute.traces import TraceRequest
from experiment import (
    AZURE_CONV,
    MOONCAKE,
    PUBLIC,
    UNLIMITED,
    S,
    requests_of,
    spread,
    table_head,
    table_row,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


RANKS, BATCH, POOL, BACKLOG = 8, 16, 64, 128
# Per rank: above what slots and pool hold, at the slots, and below them.
LIMITS = (32, 20, 16, 12, 8)
# A backlog waits for longer than its target, so the limit falls to its floor.
MOVING = replace(POST_5, cap_min=BATCH // 4, cap_initial=BATCH)
TENANTS = (("gold", 2.0), ("silver", 1.0))
PLAIN = SimulatedDeployment(
    RANKS, BATCH, prefill=PrefillModel(RANKS, 20_000_000, 50.0), pool_limit=POOL
)


def played(
    deployment: SimulatedDeployment,
    workload: Workload,
    predictor: str,
    service: ServiceLog | None = None,
) -> Recorder:
    """Return what a run of BR-H showed."""
    forecast = forecast_called(predictor)
    return make_simulation(
        deployment, workload, "br-h", PolicySettings(), forecast, seed="0", service=service
    ).run()


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
    trace = requests_of(MOONCAKE)[: (segments + 1) * requests]
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
    return [played(deployment, workload, "survival").metrics() for workload in workloads]


def in_flight_of(limit: AimdSettings, runs: Sequence[RunMetrics]) -> int:
    """Return how many requests a limit keeps in flight; a moving one those that run on average."""
    if limit.cap_min == limit.cap_max:
        return RANKS * limit.cap_max
    return round(fmean(run.mean_running for run in runs))


def print_row(name: str, runs: Sequence[RunMetrics]) -> None:
    """Print the means of some runs."""
    idle = [100 * run.idle_fraction for run in runs]
    running, output = (
        f"{fmean(values):,.0f}"
        for values in zip(
            *((run.mean_running, run.output_tokens_per_s) for run in runs), strict=True
        )
    )
    print(table_row(name, running, spread(idle, 1), output), flush=True)


def admission_idle(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What admission costs in idle time at the barrier, beside as many requests in flight without it.

    Simulates BR-H with a backlog on the Mooncake conversation trace, 8 ranks of 16 slots. A limit on requests
    in flight that is below the slots leaves slots empty, and no candidates wait behind it: each request is
    bound as soon as it is prefilled. So beside each limit there is a row with as many requests in flight
    and no admission at all (closed loop), which is what the limit itself costs. Prints Markdown: idle time in
    percent, with standard errors over the segments, and the requests that run on average.
    """
    parser.add_argument("--segments", type=positive, default=3, help="parts of the trace")
    parser.add_argument("--requests", type=positive, default=1_000, help="of each part")
    arguments = parser.parse_args(words)
    workloads = segments_of(arguments.requests, arguments.segments)
    print(table_head("admission", "running:", "idle %:", "output tokens/s:"))
    for row in rows():
        runs = figures_of(row.deployment, workloads)
        print_row(row.name, runs)
        limit = row.deployment.aimd
        if limit is not None:
            in_flight = in_flight_of(limit, runs)
            print_row(f"off, {in_flight} in flight", figures_of(PLAIN, workloads, in_flight))


LOADS = [0.8, 1.0, 1.3, 2.0]
WAITING, POOL_PER_RANK = 64, 4
PREDICTOR = "exact-match"


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace, the machines that serve it, and what its clients want."""

    trace: str
    ranks: int
    batch: int
    prefillers: int
    targets: ServiceTargets
    known: int = 3_000  # Requests that predictors learn from.
    played: int = 2_000  # Requests of each part.
    parts: int = 3  # Parts of the trace.

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
        requests = requests_of(PUBLIC / self.trace)
        requests = requests[: self.known + self.parts * self.played]
        return split(requests, segments=self.parts, known=self.known, backlog=WAITING)


SETTINGS = {
    "azure": Setting("azure_2023_conv.csv.gz", 8, 32, 4, ServiceTargets(2.0, 0.05)),
    "mooncake": Setting("mooncake_conversation.jsonl.gz", 8, 16, 8, ServiceTargets(5.0, 0.1)),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What the proxy lets in."""

    # Of the deployment, for the target of the first token in ns.
    change: Callable[[SimulatedDeployment, int], SimulatedDeployment]
    predictor: str = PREDICTOR  # A name of `FORECASTS`.
    deadlines: bool = True  # Whether requests have the target as their deadline.


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
    tokens_per_s = played(setting.deployment, workload, PREDICTOR).metrics().output_tokens_per_s
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
    deployment = rule.change(setting.deployment, target_ns)
    played(deployment, Workload(requests, workload.history), rule.predictor, service)
    (figures,) = service.figures(setting.targets).values()
    assert figures.goodput is not None, "no request arrived in the measured time"
    return figures.goodput


def goodput(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """How many requests are answered in time below and above capacity, by what the proxy lets in.

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
    parser.add_argument("--workload", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--load", nargs="*", type=float, default=LOADS)
    parser.add_argument("--rule", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--played", type=positive, help="requests of each part")
    arguments = parser.parse_args(words)
    for name in arguments.workload:
        setting = SETTINGS[name]
        setting = replace(setting, played=arguments.played or setting.played)
        workloads = setting.workloads()
        capacities = [capacity_of(setting, workload) for workload in workloads]
        print(
            f"\n{name}: {fmean(capacities):.1f} requests/s, first token within "
            f"{setting.targets.ttft_s:g} s, {1e3 * setting.targets.tpot_s:g} ms per token\n"
        )
        print(table_head("load:", *(f"`{rule}`:" for rule in arguments.rule)))
        for load in arguments.load:
            cells = []
            for rule in arguments.rule:
                shares = [
                    100 * goodput_of(setting, RULES[rule], workload, load * capacity, seed)
                    for seed, (workload, capacity) in enumerate(
                        zip(workloads, capacities, strict=True)
                    )
                ]
                cells.append(spread(shares, 1))
            print(table_row(f"{load:g}", *cells), flush=True)


KNOWN = 1_000
DEPLOYMENT = SimulatedDeployment(
    4, 16, prefill=PrefillModel(4, 20_000_000, 50.0), pool_limit=16, expects_first_tokens=True
)
# Tells the tickets apart, and is never reached.
FAR_NS = 10**15
# Requests before the shares are those of the weights.
WARM_UP = 0.3


@dataclass(frozen=True, slots=True)
class Sender:
    """A tenant."""

    name: str
    trace: str  # What it sends.
    weight: float
    rate: float  # Requests per second.
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
        # No two tickets are equal: each has its own deadline.
        self._expected[ticket] = [load.first_token_ns]
        return self._within.offer(ticket, load, now_ns)

    def began(self, ticket: Ticket, now_ns: int) -> None:
        self._within.began(ticket, now_ns)

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        (expected_ns,) = self._expected.pop(ticket)
        if expected_ns and ending.first_token_ns is not None:
            self.seen.append(Expected(ticket.tenant, expected_ns, ending.first_token_ns))
        self._within.ended(ticket, ending, now_ns)


def sent_by(sender: Sender, seed: int, span_s: float) -> list[TraceRequest]:
    """Return a tenant's requests, with Poisson arrivals until `span_s`."""
    trace = requests_of(PUBLIC / f"azure_2023_{sender.trace}.csv.gz")[KNOWN:]
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
    past = requests_of(AZURE_CONV)
    requests = sorted(
        (one for sender in SENDERS for one in sent_by(sender, seed, span_s)),
        key=lambda one: one.arrival_ns,
    )
    witness = Witness()
    limits = {one.name: TenantLimits(queue_limit=one.queue_limit) for one in SENDERS}
    deployment = replace(DEPLOYMENT, fair_queue=cost, admission=lambda: Tenants(witness, limits, 0))
    played(deployment, Workload(requests, past[:KNOWN]), "survival")
    return witness.seen[round(WARM_UP * len(witness.seen)) :]


def forecasts(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """How well `--admission early` expects times to first token under fair queueing.

    Simulates BR-H on requests of both public Azure traces, 4 ranks of 16 slots, sent by four tenants: three that
    ask for more than their share and may have 40 requests waiting each, of weights 4, 2 and 1, one of which
    sends code completions, and one of weight 1 that asks for a part of its share. Nobody is refused for what is expected.
    Prints Markdown: by cost and tenant, the time to first token, and what it was over what was expected: the
    median, and the 10th and 90th percentile.
    """
    parser.add_argument("--seconds", type=float, default=150.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args(words)
    print(
        table_head(
            *("`--fair-queue`", "tenant", "weight:", "requests:", "TTFT p50 s:"),
            "over what was expected:",
        )
    )
    for cost in arguments.cost:
        seen = seen_of(cost, span_s=arguments.seconds, seed=arguments.seed)
        for sender in SENDERS:
            own = [one for one in seen if one.tenant == sender.name]
            ratios = [one.real_ns / one.expected_ns for one in own]
            middle, low, high = np.percentile(ratios, [50, 10, 90])
            ttft_s = np.median([one.real_ns for one in own]) / S
            cells = (f"`{cost}`", sender.name, f"{sender.weight:g}", f"{len(own):,}")
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            print(table_row(*cells, f"{ttft_s:.1f}", ratio), flush=True)


# How tenants share the ranks, and what one that is hostile does to another.


SHARES_KNOWN = 2_000
SHARES_BATCH, SHARES_POOL = 16, 2
# Of each rank: five minutes' work at least, whatever the weights.
REQUESTS = {"conv": 500, "code": 2_000}
WEIGHTS = ((1.0, 1.0), (2.0, 1.0), (5.0, 1.0))
WINDOW_S, WARM_UP_S = 60, 60
# The machine and the prompts of `make qos`, and the least steps and requests of each tenant.
STEADY = SimulatedDeployment(4, 8, step_base_ns=50_000_000)
PROMPT_TOKENS = (200, 1000)
STEADY_STEPS, STEADY_REQUESTS, STEADY_WARM_UP_S = 60_000, 500, 20
WINDOWS_S = (1, 10, 60)
# Tokens of their answers, from and to, and requests that the pool may hold.
OUTPUTS, POOLS = ((20, 60), (200, 600)), (8, 24)

Draw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class TenantLoad:
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


def tenant_requests(
    name: str, weight: float, count: int
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return the past of a tenant, for predictors, and `count` requests that all come at once."""
    requests = requests_of(PUBLIC / f"azure_2023_{name}.csv.gz")
    mine = [replace(one, arrival_ns=0, tenant=name, weight=weight) for one in requests]
    return mine[:SHARES_KNOWN], list(islice(cycle(mine[SHARES_KNOWN:]), count))


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
        before, now = tenant_requests(name, weight, ranks * REQUESTS[name])
        past += before
        requests += now
    deployment = SimulatedDeployment(
        ranks, SHARES_BATCH, pool_limit=SHARES_POOL * ranks, fair_queue=cost
    )
    held = held_by("conv", deployment, Workload(requests, past), predictor_name)
    return shares_in(held, WINDOW_S, WARM_UP_S)


def steady_loads(outputs: tuple[int, int]) -> list[TenantLoad]:
    """Return two tenants of weights 2 and 1 with the same mix."""
    prompts, answers = between(*PROMPT_TOKENS), between(*outputs)
    count = max(STEADY_REQUESTS, STEADY_STEPS * 2 // sum(outputs))
    return [
        TenantLoad(name, weight, prompts, answers, count)
        for name, weight in (("gold", 2.0), ("silver", 1.0))
    ]


def steady_of(
    cost: str, pool: int, seed: int, loads: Iterable[TenantLoad]
) -> "NDArray[np.float64]":
    """Run some loads; return what the first tenant and what all hold, see `held_by`."""
    loads, rng = list(loads), random.Random(seed)
    requests = [one for load in loads for one in load.requests(rng)]
    deployment = replace(STEADY, pool_limit=pool, fair_queue=cost)
    return held_by(loads[0].tenant, deployment, Workload(requests, []), "survival")


def print_taken(arguments: argparse.Namespace) -> None:
    """Print the shares of tenants whose requests differ."""
    names = ("weights", "`--fair-queue`", "share of `conv`", "due", "largest deviation")
    print(table_head(*names, "relative"))
    for weights in WEIGHTS:
        due = weights[0] / sum(weights)
        for cost in arguments.cost:
            shares = shares_of(cost, weights, arguments.ranks, PREDICTOR)
            off = float(np.abs(shares - due).max())
            cells = (f"{weights[0]:g}:{weights[1]:g}", f"`{cost}`", f"{100 * shares.mean():.1f} %")
            relative = f"{100 * off / min(due, 1 - due):.1f} %"
            found = (f"{100 * due:.1f} %", f"{100 * off:.1f} points", relative)
            print(table_row(*cells, *found), flush=True)


def print_steady(arguments: argparse.Namespace) -> None:
    """Print how steady the shares of tenants with the same mix are."""
    names = ("answers", "pool", "`--fair-queue`", "deviation in 1 s")
    print(table_head(*names, *(f"windows of {window_s} s" for window_s in WINDOWS_S)))
    for outputs in OUTPUTS:
        for pool in POOLS:
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
    return table_row(
        f"{outputs[0]} to {outputs[1]}", pool, f"`{cost}`", f"{deviation:.1f}", *ranges
    )


def fair_shares(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """How evenly backlogged tenants share the decode ranks: by cost of the queue, and in windows of 1 to 60 s.

        python scripts/reproduce fair-shares taken [--ranks G] [--cost NAME ..]
        python scripts/reproduce fair-shares steady [--seeds N] [--cost NAME ..]

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
    tables = parser.add_subparsers(dest="table", required=True)
    taken = tables.add_parser("taken", help="tenants whose requests differ")
    taken.add_argument("--ranks", type=positive, default=8, help="decode ranks")
    steady = tables.add_parser("steady", help="tenants with the same mix, in short windows")
    steady.add_argument("--seeds", type=positive, default=5, help="0 to this less 1")
    for table in (taken, steady):
        table.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args(words)
    {"taken": print_taken, "steady": print_steady}[arguments.table](arguments)

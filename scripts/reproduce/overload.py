"""What the proxy lets in under overload, whose request goes next, and what is answered in time, in virtual time."""

import argparse
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, cycle, islice, product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.arguments import positive

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.admission import (
    POST_4,
    POST_5,
    AimdSettings,
    BoundedQueue,
    Ending,
    TenantLimits,
)
from balanceroute.proxy.core.admission.overload import Budget, EarlyRefusal
from balanceroute.proxy.core.admission.tenants import Tenants
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    PrefillDone,
    ReleasePrefill,
    RequestArrived,
    RequestFinished,
    RequestId,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.fair_queueing import fair_queueing
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import FAIR_COSTS, QUEUE_ORDERS
from balanceroute.proxy.core.scheduler import Intake, Scheduler
from balanceroute.proxy.lab.service_levels import ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import EventLoop, PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called, make_simulation
from balanceroute.proxy.lab.sim.recorder import Recorder, ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload, split
from balanceroute.traces import TraceRequest
from experiment import PUBLIC, UNLIMITED, S, requests_of, spread, table_head, table_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

MS = 1_000_000
WORKERS = 2
PROMPT_TOKENS = 100
PAYING, FREE = "paying", "free"
WEIGHTS = {PAYING: 2.0, FREE: 1.0}


@dataclass(slots=True)
class Asked:
    """One request as its client sees it; times are None before, or if it never comes so far."""

    answer: int  # Its tokens.
    number: RequestId
    ticket: Ticket
    arrived_ns: int
    first_ns: int | None = None  # When its first token came.
    ended_ns: int | None = None  # When its last one came.
    began: bool = False  # Whether it started.


class Engine:
    """What waits and runs on one engine, which computes prompts, one a step, and answers in one batch."""

    def __init__(self) -> None:
        self.waiting: deque[Asked] = deque()
        self.stepping = False
        self._steps = 0
        # The step in which each ends, a tie-breaker, and the request.
        self._running: list[tuple[int, int, Asked]] = []
        self._entering: Asked | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    def begin_step(self, order: "count[int]") -> int:
        """Let in the requests that wait longest; return how long the step takes, in ns."""
        self.stepping = True
        if self.waiting:
            one = self._entering = self.waiting.popleft()
            heappush(self._running, (self._steps + one.answer, next(order), one))
        beyond = max(0, self.running - 48)
        prompts_ns = 0 if self._entering is None else 50 * MS
        return 47 * MS + 900_000 * self.running + 4 * MS * beyond + prompts_ns

    def end_step(self, now_ns: int) -> tuple[Asked | None, list[Asked]]:
        """Give each sequence a token; return the requests that had their first, and those that had their last."""
        self.stepping = False
        self._steps += 1
        entered, self._entering = self._entering, None
        if entered is not None:
            entered.first_ns = now_ns
        ended = []
        while self._running and self._running[0][0] <= self._steps:
            one = heappop(self._running)[2]
            one.ended_ns = now_ns
            ended.append(one)
        return entered, ended


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides about the requests."""

    budget: AimdSettings | None = None
    timeout_s: float | None = None  # How long one may wait before it starts.
    queues: tuple[tuple[str, int], ...] = ()  # How many of each tenant may wait.
    order: str = "fcfs"
    workers: int = WORKERS  # Engines.
    batch: int = UNLIMITED  # Sequences that an engine runs at a time.


class World:
    """The proxy's parts, the engines, and the driver between them."""

    def __init__(self, setup: Setup) -> None:
        self.requests: dict[RequestId, Asked] = {}
        self.tokens: Counter[int] = Counter()  # By second.
        self.caps: list[tuple[int, int]] = []
        self.loop = EventLoop()
        self._budget = None if setup.budget is None else Budget(setup.budget)
        limits = {name: TenantLimits(queue_limit=limit) for name, limit in setup.queues}
        self._admission = Tenants(BoundedQueue(UNLIMITED), limits, 0)
        order = QUEUE_ORDERS[setup.order]
        inputs = PolicyInputs(
            setup.workers, setup.batch, PolicySettings(), random.Random(0), NoPrediction()
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                ranks=setup.workers,
                batch_limit=setup.batch,
                queue_ttl_ns=None if setup.timeout_s is None else round(setup.timeout_s * S),
            ),
            make_policy("fifo", inputs),
            queue_order=order,
            intake=Intake(fair=fair_queueing("request", order), budget=self._budget),
        )
        self._engines = [Engine() for _ in range(setup.workers)]
        self._order = count()
        self._changed = False
        self._woken_ns = -1

    def arrive(self, ticket: Ticket, output_tokens: int) -> None:
        """Offer a request."""
        now_ns = self.loop.now_ns
        number = RequestId(len(self.requests))
        self.requests[number] = Asked(output_tokens, number, ticket, now_ns)
        scheduler = self._scheduler
        load = scheduler.intake.load(
            ticket, scheduler.prefill_queue, scheduler.waiting, len(scheduler.requests)
        )
        if self._admission.offer(ticket, load, now_ns) is None:
            self._feed(RequestArrived(number, ticket))

    def run(self) -> None:
        self.loop.run(self._settle)

    def _feed(self, event: Event) -> None:
        """Feed the scheduler an event and perform what it asks for."""
        actions: deque[Action] = deque(self._scheduler.handle(event, now_ns=self.loop.now_ns))
        while actions:
            actions.extend(self._perform(actions.popleft()))
        self._changed = not isinstance(event, Tick)

    def _perform(self, action: Action) -> list[Action]:
        """Perform an action; return those that follow at once."""
        now_ns = self.loop.now_ns
        match action:
            case StartPrefill(number, _, tokens):
                # The engines compute the prompts themselves, so this takes no time.
                self.requests[number].began = True
                self._admission.began(self.requests[number].ticket, now_ns)
                return self._scheduler.handle(PrefillDone(number, tokens), now_ns=now_ns)
            case Admit(number, rank):
                self._engines[rank].waiting.append(self.requests[number])
            case Expire(number):
                one = self.requests[number]
                ending = Ending(False, None, 0, began=one.began)
                self._admission.ended(one.ticket, ending, now_ns)
            case _:
                # Of a request that expired in the pool: there is no KV cache to free here.
                assert isinstance(action, ReleasePrefill), action
        return []

    def _settle(self) -> None:
        """Decide, then let idle engines begin a step."""
        while self._changed:
            self._feed(Tick())
        if self._budget is not None and (not self.caps or self.caps[-1][1] != self._budget.cap):
            self.caps.append((self.loop.now_ns, self._budget.cap))
        end_ns = self._scheduler.next_deadline_ns()
        if end_ns is not None and end_ns != self._woken_ns:
            self._woken_ns = max(end_ns, self.loop.now_ns)
            self.loop.call_at(self._woken_ns, self._wake)
        for engine in self._engines:
            if not engine.stepping and (engine.waiting or engine.running):
                end_ns = self.loop.now_ns + engine.begin_step(self._order)
                self.loop.call_at(end_ns, partial(self._end_step, engine))

    def _wake(self) -> None:
        self._changed = True

    def _end_step(self, engine: Engine) -> None:
        """Send the tokens of a step, and end the requests that were answered in full."""
        now_ns = self.loop.now_ns
        self.tokens[now_ns // S] += engine.running
        entered, ended = engine.end_step(now_ns)
        if entered is not None:
            self._feed(DecodeStarted(entered.number))
        for one in ended:
            self._feed(RequestFinished(one.number))
            self._admission.ended(one.ticket, Ending(True, None, one.answer), now_ns)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run showed."""

    p99_s: float  # Of the times to the first token.
    tokens_per_s: float
    low_cap: int
    high_cap: int


def overloaded(setup: Setup, seed: int, since_s: int = 300, until_s: int = 600) -> Figures:
    """Overload the engines; return the figures from `since_s` on, when the cap has settled."""
    world = World(setup)
    for tenant, weight in WEIGHTS.items():
        draw, time_s = random.Random(f"{seed}/{tenant}"), 0.0
        ticket = Ticket(PROMPT_TOKENS, tenant=tenant, weight=weight)
        while (time_s := time_s + draw.expovariate(10.0)) < until_s:
            # Answers of one length would end in waves.
            arrive = partial(world.arrive, ticket, draw.randint(64, 192))
            world.loop.call_at(round(time_s * S), arrive)
    world.run()
    waits_ns = [
        one.first_ns - one.arrived_ns
        for one in world.requests.values()
        if one.first_ns is not None and since_s * S <= one.arrived_ns
    ]
    before = [cap for time_ns, cap in world.caps if time_ns < since_s * S]
    caps = [*before[-1:], *(cap for at_ns, cap in world.caps if since_s <= at_ns / S < until_s)]
    tokens = sum(world.tokens[second] for second in range(since_s, until_s))
    p99_s = float(np.percentile(waits_ns, 99)) / S
    return Figures(p99_s, tokens / (until_s - since_s), min(caps), max(caps))


SPIRAL = replace(POST_4, cap_min=1, factor=0.5, step_down=0)
LONG, TIGHT, TIGHTEST = (
    ((PAYING, 16), (FREE, 16)),
    ((PAYING, 8), (FREE, 2)),
    ((PAYING, 2), (FREE, 1)),
)
CONTROLLERS = (
    ("timeout 30 s, queues of 16, halved, floor 1: the death spiral", Setup(SPIRAL, 30.0, LONG)),
    ("and floor 16", Setup(replace(SPIRAL, cap_min=16), 30.0, LONG)),
    ("`post4`: less 4, queues of 8 and 2, floor 16", Setup(POST_4, 30.0, TIGHT)),
    ("`post5`: timeout 1 s, times 0.75, queues of 2 and 1, floor 32", Setup(POST_5, 1.0, TIGHTEST)),
    (
        "the death spiral with a timeout of 1 s alone",
        Setup(replace(POST_5, cap_min=1, factor=0.5), 1.0, LONG),
    ),
)


def print_controllers(seed: int) -> None:
    """Print the spiral and its cures."""
    print(table_head("controller", "cap", "p99 TTFT", "output"))
    for name, setup in CONTROLLERS:
        one = overloaded(setup, seed)
        caps = f"{one.low_cap} to {one.high_cap}" if one.low_cap < one.high_cap else one.low_cap
        print(table_row(name, caps, f"{one.p99_s:.1f} s", f"{one.tokens_per_s:.0f} tok/s"))


# Of requests: their class, its share, its level, the seconds to its first token, and its answer.
CLASSES = (
    ("real-time", 0.6, -2, 1.0, 16),
    ("free, short", 0.3, -1, 2.0, 16),
    ("long", 0.1, 0, 7.0, 205),
)
ORDERS = ("fcfs", "edf", "abs", "ml")
# One engine with 16 sequences does some six of these a second.
CAPACITY_PER_S = 6.0
LOADS = (0.9, 1.3, 2.0)


def in_time(order: str, rate: float, seed: int) -> dict[str, float]:
    """Return the share of each class whose first token comes by its deadline."""
    world = World(Setup(order=order, workers=1, batch=16, queues=((PAYING, UNLIMITED),)))
    draw, time_s = random.Random(f"deadlines/{seed}"), 0.0
    for _ in range(1000):
        time_s += draw.expovariate(rate)
        name, _, level, due_s, answer = draw.choices(CLASSES, [one[1] for one in CLASSES])[0]
        arrived_ns = round(time_s * S)
        due_ns = arrived_ns + round(due_s * S)
        # One tenant for the queue: this compares orders.
        ticket = Ticket(PROMPT_TOKENS, tenant=PAYING, model=name, level=level, deadline_ns=due_ns)
        world.loop.call_at(arrived_ns, partial(world.arrive, ticket, answer))
    world.run()
    kept: dict[str, list[bool]] = {name: [] for name, *_ in CLASSES}
    for one in world.requests.values():
        due_ns = one.ticket.deadline_ns or 0
        kept[one.ticket.model].append(one.first_ns is not None and one.first_ns <= due_ns)
    return {name: fmean(some) for name, some in kept.items()}


def print_deadlines(seeds: int) -> None:
    """Print how many of each class come in time, by order and load."""
    names = [name for name, *_ in CLASSES]
    print(table_head("order", "load", *names))
    for load, order in product(LOADS, ORDERS):
        runs = [in_time(order, load * CAPACITY_PER_S, seed) for seed in range(seeds)]
        shares = (f"{100 * fmean(run[name] for run in runs):.0f} %" for name in names)
        print(table_row(f"`{order}`", f"{load:g}", *shares))


def overload(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What the controller of a budget and queue orders do under overload, in virtual time.

    The admission rule, the queue, the budget and the scheduler are the proxy's own. Around them are two
    engines that batch independently: a step takes 47 ms, 0.9 ms for each sequence, 4 ms more for each
    above 48, and 50 ms if it computes a prompt, at most one in a step; an answer has 64 to 192 tokens. The
    tenants `paying` and `free` (weights 2 and 1) send ten requests a second each, several times what the
    engines can do. Prints Markdown; the same seed gives the same tables.
    """
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of the deadlines")
    arguments = parser.parse_args(words)
    print("The controller, from 300 s to 600 s:\n")
    print_controllers(arguments.seed)
    print("\nFirst tokens in time, by class:\n")
    print_deadlines(arguments.seeds)


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


GOODPUT_LOADS = [0.8, 1.0, 1.3, 2.0]
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

    # Of the deployment, for its slots a rank and the target of the first token in ns.
    changes: Callable[[int, int], dict[str, Any]] = lambda _, __: {}
    predictor: str = PREDICTOR  # A name of `FORECASTS`.
    deadlines: bool = True  # Whether requests have the target as their deadline.


def _aimd(slots: int, target_ns: int) -> dict[str, Any]:
    # There are fewer slots than the default limits are made for.
    aimd = AimdSettings(target_ns=target_ns, cap_min=slots // 4, cap_initial=slots)
    return {"aimd": aimd, "queue_ttl_ns": target_ns // 2}


SRPT: dict[str, Any] = {"queue_order": "srpt"}
EARLY = SRPT | {
    "admission": lambda: EarlyRefusal(BoundedQueue(UNLIMITED)),
    "expects_first_tokens": True,
}
RULES = {
    "none": Rule(deadlines=False),
    "aimd": Rule(_aimd, deadlines=False),
    "srpt": Rule(lambda _, __: SRPT),
    "srpt, early": Rule(lambda _, __: EARLY),
    "clairvoyant": Rule(lambda _, __: SRPT, "oracle"),
}


def capacity_of(setting: Setting, workload: Workload) -> float:
    """Return the requests per second that the ranks finish with a backlog."""
    tokens_per_s = played(setting.deployment, workload, PREDICTOR).metrics().output_tokens_per_s
    return tokens_per_s / fmean(request.output_tokens for request in workload.requests)


def goodput_of(setting: Setting, rule: Rule, workload: Workload, rate: float, seed: int) -> float:
    """Return the share of good requests among those that arrive once the ranks are full."""
    target_ns = round(setting.targets.ttft_s * S)
    due_ns = target_ns if rule.deadlines else None
    draw, time_s, requests = random.Random(seed), 0.0, list[TraceRequest]()
    for one in workload.requests:
        time_s += draw.expovariate(rate)
        requests.append(replace(one, arrival_ns=round(time_s * S), deadline_ns=due_ns))
    service = ServiceLog(requests)
    deployment = replace(setting.deployment, **rule.changes(setting.batch, target_ns))
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
    parser.add_argument("--load", nargs="*", type=float, default=GOODPUT_LOADS)
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


SHARES_KNOWN, SHARES_BATCH, SHARES_POOL = 2_000, 16, 2
# Of each rank: five minutes' work at least, whatever the weights.
REQUESTS = {"conv": 500, "code": 2_000}
SHARE_WEIGHTS = ((1.0, 1.0), (2.0, 1.0), (5.0, 1.0))


def held_by(
    tenant: str, deployment: SimulatedDeployment, workload: Workload, predictor: str
) -> "NDArray[np.float64]":
    """Run; return what a tenant and what all hold at each second, float64[2, seconds].

    Only while every tenant has more requests left than the ranks and the pool hold.
    """
    service = ServiceLog(workload.requests)
    played(deployment, workload, predictor, service)
    sent = np.array(
        [sum(one.tenant == group.tenant for one in workload.requests) for group in service.groups]
    )
    left = (sent - np.array([sample.requests for sample in service.samples])).min(axis=1)
    most = deployment.ranks * deployment.batch_limit + (deployment.pool_limit or 0)
    held = np.array([sample.kv_token_ns for sample in service.samples])[
        : int(np.argmax(left < most))
    ]
    mine = [group.tenant for group in service.groups].index(tenant)
    return np.stack([held[:, mine], held.sum(axis=1)])


def shares_in(held: "NDArray[np.float64]", window_s: int, warm_up_s: int) -> "NDArray[np.float64]":
    """Return the tenant's share in every window after the first seconds, float64[windows]."""
    begins = np.arange(warm_up_s, held.shape[1] - window_s)
    windows = held[:, begins + window_s] - held[:, begins]
    return np.asarray(windows[0] / windows[1])


def shares_of(cost: str, weights: tuple[float, float], ranks: int) -> "NDArray[np.float64]":
    """Run the Azure traces; return the share of `conv` in every window of a minute, float64[windows]."""
    past, requests = list[TraceRequest](), list[TraceRequest]()
    for (name, number), weight in zip(REQUESTS.items(), weights, strict=True):
        trace = requests_of(PUBLIC / f"azure_2023_{name}.csv.gz")
        mine = [replace(one, arrival_ns=0, tenant=name, weight=weight) for one in trace]
        past += mine[:SHARES_KNOWN]
        requests += islice(cycle(mine[SHARES_KNOWN:]), ranks * number)
    deployment = SimulatedDeployment(
        ranks, SHARES_BATCH, pool_limit=SHARES_POOL * ranks, fair_queue=cost
    )
    held = held_by("conv", deployment, Workload(requests, past), PREDICTOR)
    return shares_in(held, 60, 60)


def fair_shares(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """How evenly backlogged tenants whose requests differ share the decode ranks, by cost of the queue.

    All requests wait from the start, before BR-H in virtual time; the first minute does not count, nor does
    the time when a tenant has few requests left. The tenants are the public Azure traces, `conv` (prompts of
    1,000 tokens, answers of 200) and `code` (prompts of 2,000, answers of 30). The table has the mean share of
    `conv` in the KV-token-seconds that both hold on the ranks, and over all windows of 60 s the largest
    deviation of a share from that of the weights: in points, and relative to the share of the tenant that it
    is largest for.
    """
    parser.add_argument("--ranks", type=positive, default=8, help="decode ranks")
    parser.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args(words)
    names = ("weights", "`--fair-queue`", "share of `conv`", "due", "largest deviation")
    print(table_head(*names, "relative"))
    for weights in SHARE_WEIGHTS:
        due = weights[0] / sum(weights)
        for cost in arguments.cost:
            shares = shares_of(cost, weights, arguments.ranks)
            off = float(np.abs(shares - due).max())
            cells = (f"{weights[0]:g}:{weights[1]:g}", f"`{cost}`", f"{100 * shares.mean():.1f} %")
            relative = f"{100 * off / min(due, 1 - due):.1f} %"
            found = (f"{100 * due:.1f} %", f"{100 * off:.1f} points", relative)
            print(table_row(*cells, *found), flush=True)

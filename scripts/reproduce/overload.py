"""The proxy's admission, queue and scheduler before two engines of their own kind, under overload."""

import argparse
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

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
from balanceroute.proxy.core.admission.overload import Budget, EarlyRefusal, FirstTokens
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
from balanceroute.proxy.core.queueing import QUEUE_ORDERS
from balanceroute.proxy.core.scheduler import Intake, Scheduler
from balanceroute.proxy.lab.sim.engines import EventLoop
from experiment import UNLIMITED, S, table_head, table_row

MS = 1_000_000
WORKERS = 2
PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """How long an engine's steps take that computes prompts and answers in one batch, and what it holds."""

    base_ns: int  # Time of any step.
    sequence_ns: int  # Time of a sequence in it.
    beyond_ns: int  # Further time of each sequence above `knee`.
    knee: int  # See `beyond_ns`.
    prompt_ns: int  # Time of a prompt token.
    prompt_tokens: int  # Prompts that are computed in one step.
    batch: int = UNLIMITED  # Sequences that run at a time.
    kv_tokens: int = UNLIMITED  # KV tokens that fit.


@dataclass(slots=True, kw_only=True)
class Answered:
    """One request."""

    prompt: int
    answer: int
    first_ns: int | None = None  # When its first token came; None before, or if it never did.
    ended_ns: int | None = None  # When its last one came.


R = TypeVar("R", bound=Answered)


@dataclass(slots=True)
class Engine(Generic[R]):
    """What waits and runs on one engine."""

    machine: Machine
    waiting: deque[R] = field(default_factory=deque)
    # The step in which each ends, a tie-breaker, and the request.
    running: list[tuple[int, int, R]] = field(default_factory=list)
    # Those of them whose prompts are computed in this step.
    entering: list[R] = field(default_factory=list)
    kv_tokens: int = 0  # In use.
    reserved: int = 0  # What the running ones will use at their ends; none is preempted.
    steps: int = 0  # Steps made.
    stepping: bool = False

    def begin_step(self, order: "count[int]") -> int:
        """Let in who fits and return how long the step takes, in ns."""
        machine, tokens = self.machine, 0
        while self.waiting and len(self.running) < machine.batch:
            one = self.waiting[0]
            need = one.prompt + one.answer
            if (
                self.reserved + need > machine.kv_tokens
                or tokens + one.prompt > machine.prompt_tokens
            ):
                break
            self.entering.append(self.waiting.popleft())
            heappush(self.running, (self.steps + one.answer, next(order), one))
            self.reserved += need
            tokens += one.prompt
        self.stepping = True
        self.kv_tokens += tokens
        batch = len(self.running)
        beyond_ns = machine.beyond_ns * max(0, batch - machine.knee)
        return (
            machine.base_ns + machine.sequence_ns * batch + beyond_ns + machine.prompt_ns * tokens
        )

    def end_step(self, now_ns: int) -> tuple[list[R], list[R]]:
        """Give each sequence a token; return those that had their first one, and their last one."""
        self.stepping = False
        self.steps += 1
        self.kv_tokens += len(self.running)
        entered, self.entering = self.entering, []
        for one in entered:
            one.first_ns = now_ns
        ended = []
        while self.running and self.running[0][0] <= self.steps:
            one = heappop(self.running)[2]
            one.ended_ns = now_ns
            self.kv_tokens -= one.prompt + one.answer
            self.reserved -= one.prompt + one.answer
            ended.append(one)
        return entered, ended


# A prompt takes 50 ms, and a step computes one.
OVERLOADED = Machine(47 * MS, 900_000, 4 * MS, 48, 500_000, PROMPT_TOKENS)
PAYING, FREE = "paying", "free"
WEIGHTS = {PAYING: 2.0, FREE: 1.0}


@dataclass(slots=True, kw_only=True)
class Served(Answered):
    """One request as its client sees it."""

    number: RequestId
    ticket: Ticket
    arrived_ns: int
    # When its first token was expected, after its arrival; None if that is unknown.
    expected_ns: float | None = None
    began: bool = False  # Whether it started.
    expired_ns: int | None = None  # When it was given up.
    refused: bool = False  # Whether it was not let in.

    @property
    def is_in_time(self) -> bool:
        """Whether its first token came by its deadline."""
        due_ns = self.ticket.deadline_ns
        return self.first_ns is not None and (due_ns is None or self.first_ns <= due_ns)


@dataclass(frozen=True, slots=True)
class Setup:
    """The proxy before the engines."""

    budget: AimdSettings | None = None  # None for no limit of requests in flight.
    timeout_s: float | None = None  # Wait before a start after which a request is refused.
    queues: tuple[tuple[str, int], ...] = ()  # By tenant, requests that may wait.
    order: str = "fcfs"  # Of the queue within a tenant, and of the pool.
    early: bool = False  # Whether what comes too late is refused at once.
    workers: int = WORKERS  # Engines.
    batch: int = UNLIMITED  # Sequences that an engine runs at a time.
    pool_limit: int | None = None  # Requests that wait for it behind the queue; None for all.


class World:
    """The proxy's parts, the engines, and the driver between them."""

    def __init__(self, setup: Setup) -> None:
        self.requests: dict[RequestId, Served] = {}
        self.tokens: Counter[int] = Counter()  # By second.
        self.caps: list[tuple[int, int]] = []
        self.loop = EventLoop()
        self.first_tokens = FirstTokens() if setup.early else None
        self.budget = None if setup.budget is None else Budget(setup.budget)
        limits = {name: TenantLimits(queue_limit=limit) for name, limit in setup.queues}
        within = BoundedQueue(UNLIMITED)
        self.admission = Tenants(EarlyRefusal(within) if setup.early else within, limits, 0)
        order = QUEUE_ORDERS[setup.order]
        inputs = PolicyInputs(
            setup.workers, setup.batch, PolicySettings(), random.Random(0), NoPrediction()
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                ranks=setup.workers,
                batch_limit=setup.batch,
                pool_limit=setup.pool_limit,
                queue_ttl_ns=None if setup.timeout_s is None else round(setup.timeout_s * S),
            ),
            make_policy("fifo", inputs),
            queue_order=order,
            intake=Intake(
                fair=fair_queueing("request", order),
                budget=self.budget,
                first_tokens=self.first_tokens,
            ),
        )
        self.engines = [Engine[Served](OVERLOADED) for _ in range(setup.workers)]
        self.order = count()
        self.changed = False
        self.woken_ns = -1

    def arrive(self, ticket: Ticket, output_tokens: int) -> None:
        """Offer a request."""
        now_ns = self.loop.now_ns
        number = RequestId(len(self.requests))
        self.requests[number] = Served(
            prompt=PROMPT_TOKENS,
            answer=output_tokens,
            number=number,
            ticket=ticket,
            arrived_ns=now_ns,
        )
        scheduler = self.scheduler
        load = scheduler.intake.load(
            ticket, scheduler.prefill_queue, scheduler.waiting, len(scheduler.requests)
        )
        self.requests[number].expected_ns = load.first_token_ns
        self.requests[number].refused = self.admission.offer(ticket, load, now_ns) is not None
        if not self.requests[number].refused:
            self.feed(RequestArrived(number, ticket))

    def feed(self, event: Event) -> None:
        """Feed the scheduler an event and perform what it asks for."""
        self.changed = True
        actions: deque[Action] = deque(self.scheduler.handle(event, now_ns=self.loop.now_ns))
        while actions:
            actions.extend(self.perform(actions.popleft()))

    def perform(self, action: Action) -> list[Action]:
        """Perform an action; return those that follow at once."""
        now_ns = self.loop.now_ns
        match action:
            case StartPrefill(number, _, tokens):
                # The engines compute the prompts themselves, so this takes no time.
                self.requests[number].began = True
                self.admission.began(self.requests[number].ticket, now_ns)
                return self.scheduler.handle(PrefillDone(number, tokens), now_ns=now_ns)
            case Admit(number, rank):
                self.engines[rank].waiting.append(self.requests[number])
            case Expire(number):
                one = self.requests[number]
                one.expired_ns = now_ns
                ending = Ending(False, None, 0, began=one.began)
                self.admission.ended(one.ticket, ending, now_ns)
            case _:
                # Of a request that expired in the pool: there is no KV cache to free here.
                assert isinstance(action, ReleasePrefill), action
        return []

    def settle(self) -> None:
        """Decide, then let idle engines begin a step."""
        while self.changed:
            self.changed = False
            actions = deque(self.scheduler.handle(Tick(), now_ns=self.loop.now_ns))
            while actions:
                actions.extend(self.perform(actions.popleft()))
        if self.budget is not None and (not self.caps or self.caps[-1][1] != self.budget.cap):
            self.caps.append((self.loop.now_ns, self.budget.cap))
        end_ns = self.scheduler.next_deadline_ns()
        if end_ns is not None and end_ns != self.woken_ns:
            self.woken_ns = max(end_ns, self.loop.now_ns)
            self.loop.call_at(self.woken_ns, self.wake)
        for engine in self.engines:
            if not engine.stepping and (engine.waiting or engine.running):
                end_ns = self.loop.now_ns + engine.begin_step(self.order)
                self.loop.call_at(end_ns, partial(self.end_step, engine))

    def wake(self) -> None:
        self.changed = True

    def end_step(self, engine: Engine[Served]) -> None:
        """Send the tokens of a step, and end the requests that were answered in full."""
        now_ns = self.loop.now_ns
        self.tokens[now_ns // S] += len(engine.running)
        entered, ended = engine.end_step(now_ns)
        for one in entered:
            self.feed(DecodeStarted(one.number))
        for one in ended:
            self.feed(RequestFinished(one.number))
            self.admission.ended(one.ticket, Ending(True, None, one.answer), now_ns)

    def run(self) -> None:
        self.loop.run(self.settle)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run showed from `since_s` to `until_s`."""

    p99_s: float
    e2e_p95_s: float
    tokens_per_s: float
    low_cap: int
    high_cap: int


def stream(world: World, tenant: str, rate: float, span_s: tuple[float, float], seed: str) -> None:
    """Schedule Poisson arrivals of a tenant."""
    draw, time_s = random.Random(f"{seed}/{tenant}"), span_s[0]
    ticket = Ticket(PROMPT_TOKENS, tenant=tenant, weight=WEIGHTS[tenant])
    while (time_s := time_s + draw.expovariate(rate)) < span_s[1]:
        # Answers of one length would end in waves.
        world.loop.call_at(round(time_s * S), partial(world.arrive, ticket, draw.randint(64, 192)))


def overloaded(setup: Setup, seed: int, *, since_s: int = 300, until_s: int = 600) -> Figures:
    """Overload the engines; return the figures from `since_s` on, when the cap has settled."""
    world = World(setup)
    for tenant in WEIGHTS:
        stream(world, tenant, 10.0, (0.0, float(until_s)), f"{seed}")
    world.run()
    served = [
        one
        for one in world.requests.values()
        if one.first_ns is not None and since_s * S <= one.arrived_ns
    ]
    caps = [cap for _, cap in world.caps] or [0]
    settled = [cap for time_ns, cap in world.caps if since_s * S <= time_ns < until_s * S]
    before = [cap for time_ns, cap in world.caps if time_ns < since_s * S] or caps[:1]
    return Figures(
        p99_s=float(np.percentile([(one.first_ns or 0) - one.arrived_ns for one in served], 99))
        / S,
        e2e_p95_s=float(
            np.percentile(
                [one.ended_ns - one.arrived_ns for one in served if one.ended_ns is not None], 95
            )
        )
        / S,
        tokens_per_s=sum(world.tokens[second] for second in range(since_s, until_s))
        / (until_s - since_s),
        low_cap=min([*settled, before[-1]]),
        high_cap=max([*settled, before[-1]]),
    )


def fixed(cap: int) -> AimdSettings:
    """Return the settings of a limit that does not move."""
    return AimdSettings(cap_min=cap, cap_max=cap, cap_initial=cap)


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


def print_shares(seed: int) -> None:
    """Print the starts of two tenants: one alone, both, and one alone again."""
    phases = (("free alone", 0, 200), ("both", 200, 400), ("free alone again", 400, 600))
    world = World(Setup(fixed(16), None, ((PAYING, 64), (FREE, 64))))
    stream(world, FREE, 10.0, (0.0, 600.0), f"{seed}")
    stream(world, PAYING, 10.0, (200.0, 400.0), f"{seed}")
    world.run()
    print(table_head("phase", "paying", "free", "requests per s"))
    for name, begin_s, end_s in phases:
        # Less what was queued before, or is queued at the end of, the phase.
        span = range((begin_s + 40) * S, end_s * S)
        counts = Counter(
            one.ticket.tenant for one in world.requests.values() if (one.first_ns or 0) in span
        )
        total = sum(counts.values())
        shares = (f"{100 * counts[tenant] / total:.0f} %" for tenant in WEIGHTS)
        print(table_row(name, *shares, f"{total / (len(span) / S):.2f}"))


@dataclass(frozen=True, slots=True)
class Class:
    """A class of requests: its share, its level, the time to its first token, and its answer."""

    name: str
    share: float
    level: int
    deadline_s: float
    output_tokens: int


CLASSES = (
    Class("real-time", 0.6, -2, 1.0, 16),
    Class("free, short", 0.3, -1, 2.0, 16),
    Class("long", 0.1, 0, 7.0, 205),
)
ORDERS = ("fcfs", "edf", "abs", "ml")
# One engine with 16 sequences does some six of these a second.
DEADLINE_SETUP = Setup(workers=1, batch=16, queues=((PAYING, UNLIMITED),))
CAPACITY_PER_S = 6.0
LOADS = (0.9, 1.3, 2.0)


def hurried(setup: Setup, rate: float, seed: int) -> World:
    """Run requests of all classes, each with its deadline."""
    world = World(setup)
    draw, time_s = random.Random(f"deadlines/{seed}"), 0.0
    for _ in range(1000):
        time_s += draw.expovariate(rate)
        kind = draw.choices(CLASSES, [kind.share for kind in CLASSES])[0]
        arrived_ns = round(time_s * S)
        ticket = Ticket(
            PROMPT_TOKENS,
            # One tenant for the queue: the order is what is compared.
            tenant=PAYING,
            model=kind.name,
            level=kind.level,
            deadline_ns=arrived_ns + round(kind.deadline_s * S),
        )
        world.loop.call_at(arrived_ns, partial(world.arrive, ticket, kind.output_tokens))
    world.run()
    return world


def in_time(order: str, rate: float, seed: int) -> dict[str, float]:
    """Return the share of each class whose first token comes by its deadline."""
    world = hurried(replace(DEADLINE_SETUP, order=order), rate, seed)
    sent, met = Counter[str](), Counter[str]()
    for one in world.requests.values():
        sent[one.ticket.model] += 1
        met[one.ticket.model] += one.is_in_time
    return {kind.name: met[kind.name] / sent[kind.name] for kind in CLASSES}


def print_deadlines(seeds: int) -> None:
    """Print how many of each class come in time, by order and load."""
    print(table_head("order", "load", *(kind.name for kind in CLASSES)))
    for load in LOADS:
        for order in ORDERS:
            runs = [in_time(order, load * CAPACITY_PER_S, seed) for seed in range(seeds)]
            shares = [100 * np.mean([run[kind.name] for run in runs]) for kind in CLASSES]
            print(table_row(f"`{order}`", f"{load:g}", *(f"{one:.0f} %" for one in shares)))


def print_early(seeds: int) -> None:
    """Print what early refusal changes: who is told when, and what is expected."""
    names = ("order", "`--admission`", "in time", "refused at once", "expired", "expired after")
    print(table_head(*names, "ratio"))
    for order in ("fcfs", "edf"):
        for early in (False, True):
            setup = replace(DEADLINE_SETUP, order=order, early=early, pool_limit=2)
            runs = [hurried(setup, 1.3 * CAPACITY_PER_S, seed) for seed in range(seeds)]
            ended = [one for world in runs for one in world.requests.values()]
            met = [one for one in ended if one.first_ns is not None and one.is_in_time]
            gone = [one for one in ended if one.expired_ns is not None]
            wait_s = np.mean([(one.expired_ns or 0) - one.arrived_ns for one in gone]) / S
            shares = [
                f"{100 * len(some) / len(ended):.0f} %"
                for some in (met, [one for one in ended if one.refused], gone)
            ]
            ratios = [
                ((one.first_ns or 0) - one.arrived_ns) / one.expected_ns
                for one in ended
                if one.first_ns is not None and one.expected_ns
            ]
            spread = (
                "-"
                if not ratios
                else "{:.2f} ({:.2f} to {:.2f})".format(*np.percentile(ratios, [50, 10, 90]))
            )
            name = "early" if early else "bounded"
            print(table_row(f"`{order}`", f"`{name}`", *shares, f"{wait_s:.1f} s", spread))


def overload(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What fair queueing, a budget, its controller and queue orders do under overload, in virtual time.

    The admission rule, the queue, the budget and the scheduler are the proxy's own. Around them are two
    engines that batch independently: a step takes 47 ms, 0.9 ms for each sequence, 4 ms more for each
    above 48, and 50 ms if it computes a prompt, at most one in a step; an answer has 64 to 192 tokens. The
    tenants `paying` and `free` (weights 2 and 1) send ten requests a second each, several times what the
    engines can do. Prints Markdown; the same seed gives the same tables.
    """
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of the deadlines")
    arguments = parser.parse_args(words)
    print("Shares, weights 2:1, at most 32 requests in flight:\n")
    print_shares(arguments.seed)
    print("\nThe controller, from 300 s to 600 s:\n")
    print_controllers(arguments.seed)
    print("\nFirst tokens in time, by class:\n")
    print_deadlines(arguments.seeds)
    print("\nHopeless requests refused at once, load 1.3:\n")
    print_early(arguments.seeds)

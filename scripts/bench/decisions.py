"""What deciding costs: a dispatch, a grant of the fair queue, a look-up of a prompt's blocks, a prediction."""

import argparse
import json
import random
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tests.support.arguments import positive

from balanceroute.predictors import PastRequest, Savable, Survival
from balanceroute.predictors.files import load as load_predictor
from balanceroute.predictors.files import save
from balanceroute.predictors.kinds import KINDS, train
from balanceroute.predictors.past import past_requests
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import (
    Admit,
    DecodeStarted,
    PrefillDone,
    PrefillerId,
    RequestArrived,
    RequestFinished,
    RequestId,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.fair_queueing import fair_queueing
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.prefill.budgets import PrefillRequest
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge, token_hashes
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory, block_keys
from balanceroute.proxy.core.queueing import FAIR_COSTS, QUEUE_ORDERS
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.scheduler import Intake, Scheduler
from balanceroute.proxy.lab.sim.workload import playable
from balanceroute.proxy.live.process_edge import settle_memory
from balanceroute.traces import TraceRequest, read_trace
from experiment import MOONCAKE, SERVEGEN, right, table_head, table_row

TRACE, LONG_TRACE = MOONCAKE, SERVEGEN
# So much that the batch limit decides: every rank with a slot is looked at, and takes a request.
SLOT_KV_TOKENS = 40_000
# Ranks, batch limit, pool, and the p99 that the total may cost, in ms.
SHAPES = ((8, 16, 64, 1), (16, 64, 256, 2), (144, 64, 1024, 8), (320, 128, 4096, 20))
BLOCK_TOKENS = 512
BURST = 1000
BURST_SHAPES = SHAPES[2:]
STEADY, IN_BURSTS, LONG = "steady", f"{BURST:,} at once", "long outputs"
LONG_SHAPES = ((8, 128, 256, 2), (144, 64, 1024, 8))
STEPS_BETWEEN = 5
WARM_UP_STEPS = 20
# So that many of those that run were candidates before, as in a fleet that has run for long.
LONG_WARM_UP_STEPS = 2000
STAGES = ("step", "projection", "stage_1", "stage_2", "rest", "total")


class Bench:
    """One saturated fleet.

    Args:
        ranks: G.
        batch: B.
        pool: Requests that wait.
        horizon: H.
        quantile: See `PolicySettings.kv_peak_quantile`.
        affinity: See `PolicySettings.prefix_affinity`.
        trace: Where requests come from.
        warm_up: Steps before the timed ones.
    """

    def __init__(
        self,
        ranks: int,
        batch: int,
        pool: int,
        horizon: int,
        quantile: float | None = None,
        *,
        affinity: float = 0.0,
        trace: Path = TRACE,
        warm_up: int = WARM_UP_STEPS,
    ) -> None:
        self._laps: dict[str, int] = {}
        self._mark = 0
        requests = playable(read_trace(trace))
        rng = random.Random(0)
        self._source = self._endless(requests, rng)
        slots = ranks * batch
        # What a step finds running is biased to long outputs and caught in the middle of its life.
        running = rng.choices(requests, [r.output_tokens for r in requests], k=slots)
        settings = PolicySettings(
            horizon_steps=horizon, kv_peak_quantile=quantile, prefix_affinity=affinity
        )
        predictor = Survival(request.output_tokens for request in requests)
        capacity = None if quantile is None else SLOT_KV_TOKENS * batch
        parts = PolicyInputs(ranks, batch, settings, rng, predictor, self._on_stage, capacity)
        self.policy = make_policy("br-h", parts)  # BR-H.
        config = SchedulerConfig(ranks=ranks, batch_limit=batch, rank_kv_tokens=capacity)
        # As many as a rank of that batch holds.
        memory = RankMemory(lambda: SLOT_KV_TOKENS * batch) if affinity else None
        self._scheduler = Scheduler(config, self.policy, intake=Intake(memory=memory))
        self._has_blocks = memory is not None
        self._arrived = 0
        self._step = 0
        self._rng = rng
        self._waiting: dict[RequestId, int] = {}
        self._ends: defaultdict[int, list[RequestId]] = defaultdict(list)
        for request in running:
            self._arrive(request, rng.randint(1, request.output_tokens))
        self._join(self._decide())
        for _ in range(pool):
            self._arrive_next()
        self.samples: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.admitted: list[int] = []
        # The first step makes the deposits of the whole fleet at once, which a running one never does.
        self.run(warm_up)
        self._forget(0)

    def run(self, steps: int) -> None:
        """Time `steps` decode steps that lead to a decision."""
        while len(self.admitted) < steps:
            self._one_step()

    def run_bursts(self, bursts: int, size: int) -> None:
        """Time `bursts` decode steps in each of which at least `size` requests end."""
        for _ in range(bursts):
            bursts_so_far = len(self.admitted)
            for _ in range(STEPS_BETWEEN):
                self._one_step()
            self._forget(bursts_so_far)
            running = [(end, request) for end, some in self._ends.items() for request in some]
            for end, request in self._rng.sample(running, size):
                self._ends[end].remove(request)
                self._ends[self._step + 1].append(request)
            self._one_step()

    def _one_step(self) -> None:
        """Make a decode step, and time it if it leads to a decision."""
        self._step += 1
        self._laps.clear()
        begin = time.thread_time_ns()
        self._scheduler.handle(StepCompleted(), now_ns=0)
        self._laps["step"] = time.thread_time_ns() - begin
        finished = self._ends.pop(self._step, [])
        if not finished:
            return
        for request in finished:
            self._scheduler.handle(RequestFinished(request), now_ns=0)
        admitted = self._decide()
        total = time.thread_time_ns() - begin
        self._laps |= {"rest": total - sum(self._laps.values()), "total": total}
        for stage in STAGES:
            self.samples[stage].append(self._laps[stage] / 1e6)
        self.admitted.append(len(admitted))
        self._join(admitted)
        for _ in admitted:
            self._arrive_next()

    def _forget(self, keep: int) -> None:
        """Forget all but the first samples."""
        for samples in self.samples.values():
            del samples[keep:]
        del self.admitted[keep:]

    def _on_stage(self, stage: str) -> None:
        now = time.thread_time_ns()
        self._laps[stage] = now - self._mark
        self._mark = now

    def _endless(self, requests: list[TraceRequest], rng: random.Random) -> Iterator[TraceRequest]:
        while True:
            yield from rng.sample(requests, len(requests))

    def _arrive_next(self) -> None:
        request = next(self._source)
        self._arrive(request, request.output_tokens)

    def _arrive(self, traced: TraceRequest, output_tokens: int) -> None:
        request = RequestId(self._arrived)
        self._arrived += 1
        self._waiting[request] = output_tokens
        blocks = traced.hash_ids if self._has_blocks else ()
        ticket = Ticket(traced.prompt_tokens, blocks=blocks, block_tokens=BLOCK_TOKENS)
        self._scheduler.handle(RequestArrived(request, ticket), now_ns=0)
        self._scheduler.handle(PrefillDone(request, traced.prompt_tokens), now_ns=0)

    def _decide(self) -> list[RequestId]:
        self._mark = time.thread_time_ns()
        actions = self._scheduler.handle(Tick(), now_ns=0)
        return [action.request for action in actions if isinstance(action, Admit)]

    def _join(self, admitted: list[RequestId]) -> None:
        for request in admitted:
            self._scheduler.handle(DecodeStarted(request), now_ns=0)
            self._ends[self._step + self._waiting.pop(request)].append(request)


def dispatch(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What one scheduling decision costs, by stage.

        python scripts/bench dispatch [--steps N] [--bursts N] [--kv-peak-quantile Q]
            [--prefix-affinity PRICE] [--only TEXT] [--json OUT]

    Each row keeps G ranks of B slots saturated with requests of a public trace and a constant number of
    them in the pool, and times on one core every decode step that frees a slot: the projection's advance
    (predictions that fell due included), the decision's view of it, Stage 1, Stage 2, and the rest of
    the scheduler (ledger, life cycles, pool). The total is what such a step costs the proxy. With
    `--kv-peak-quantile` the room of every rank that has a slot counts as projection. With `--prefix-affinity`
    ranks are known by the blocks of the trace's prompts, 14 of 512 tokens in the median.

    The rows of bursts time steps in which 1,000 requests drawn at random end together, so that one
    decision makes 1,000 admissions; five steps lie between two of them. The rows of long outputs are of
    a trace of reasoning requests, where candidates are scored by their own trajectories.

    Times are CPU times of the thread, so that other processes add little to them. Memory is settled before
    the first request arrives, as in `serve`.
    """
    parser.add_argument("--steps", type=positive, default=1000, help="timed steps per shape")
    parser.add_argument("--bursts", type=positive, default=100, help="timed bursts per shape")
    parser.add_argument("--horizon", type=int, default=80, metavar="H")
    parser.add_argument("--kv-peak-quantile", type=float, metavar="Q")
    parser.add_argument("--prefix-affinity", type=float, default=0.0, metavar="PRICE")
    parser.add_argument("--only", default="", metavar="TEXT", help="loads with this in their name")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args(words)
    print(f"br-h, survival, H = {arguments.horizon}: ms per decode step, p50 / p99\n")
    print(table_head(*right(("G", "B", "pool")), "load", *right((*STAGES, "p99 goal"))))
    rows = []
    settle_memory()
    loads = {STEADY: SHAPES, IN_BURSTS: BURST_SHAPES, LONG: LONG_SHAPES}
    plan = [(load, shape) for load, shapes in loads.items() for shape in shapes]
    for load, (ranks, batch, pool, goal) in plan:
        if arguments.only not in load:
            continue
        is_long = load == LONG
        bench = Bench(
            ranks,
            batch,
            pool,
            arguments.horizon,
            arguments.kv_peak_quantile,
            affinity=arguments.prefix_affinity,
            trace=LONG_TRACE if is_long else TRACE,
            warm_up=LONG_WARM_UP_STEPS if is_long else WARM_UP_STEPS,
        )
        if load == IN_BURSTS:
            bench.run_bursts(arguments.bursts, BURST)
        else:
            bench.run(arguments.steps)
        figures = {
            stage: [float(f) for f in np.percentile(bench.samples[stage], [50, 99])]
            for stage in STAGES
        }
        shape = {"ranks": ranks, "batch": batch, "pool": pool, "load": load, "goal_ms": goal}
        rows.append(shape | figures)
        times = (f"{figures[stage][0]:.2f} / {figures[stage][1]:.2f}" for stage in STAGES)
        print(table_row(ranks, batch, pool, load, *times, f"{goal} ms"), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


GRANTS, IN_FLIGHT, QUEUED = 20_000, 1_024, (4_096, 409_600)


def grant_times(cost: str, order: str, tenants: int, queued: int) -> list[float]:
    """Return the time of every grant, in microseconds."""
    queueing, rng = fair_queueing(cost, QUEUE_ORDERS[order]), random.Random(0)
    queue, meter = queueing.make_order(), queueing.meter
    tickets: dict[RequestId, Ticket] = {}
    running: list[RequestId] = []
    times: list[float] = []

    def add(number: int) -> None:
        ticket = tickets[RequestId(number)] = Ticket(
            rng.randint(10, 8_000),
            tenant=f"tenant-{rng.randrange(tenants)}",
            weight=float(rng.randint(1, 8)),
            deadline_ns=rng.randrange(10**9),
            predicted_tokens=rng.randint(1, 2_000),
        )
        queue.add(RequestId(number), ticket)

    for number in range(queued):
        add(number)
    for grant in range(GRANTS):
        ended = running.pop(rng.randrange(len(running))) if len(running) == IN_FLIGHT else None
        begin_s = time.perf_counter()
        if ended is not None and meter is not None:
            ticket = tickets[ended]
            meter.end(ended, ticket, ticket.prompt_tokens + ticket.predicted_tokens)
        head = queue.head()
        assert head is not None
        queue.serve(head)
        times.append(1e6 * (time.perf_counter() - begin_s))
        if meter is not None:
            meter.begin(head, tickets[head], tickets[head].prompt_tokens)
            meter.step(30_000_000)
        running.append(head)
        add(queued + grant)
    return times


def grants(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The cost of a grant: the next request among many tenants, charged, and settled when it ends.

    Prints microseconds per grant for each cost: the head of the queue, its removal and charge, and the
    settlement of an earlier one. The queue stays as long as it is; what is added for that is not counted.
    """
    parser.add_argument("--tenants", type=positive, default=1_000)
    arguments = parser.parse_args(words)
    print(table_head("tenants:", "queued:", "order", "`--fair-queue`", "p50, us:", "p99, us:"))
    for queued in QUEUED:
        for order in ("fcfs", "edf"):
            for cost in FAIR_COSTS:
                cuts = quantiles(grant_times(cost, order, arguments.tenants, queued), n=100)
                row = (arguments.tenants, queued, f"`{order}`", f"`{cost}`")
                cells = [*map(str, row), f"{cuts[49]:.1f}", f"{cuts[98]:.1f}"]
                print(table_row(*cells))


PROMPT_TOKENS = 131_072
INDEX_BLOCK_TOKENS = 16
Result = TypeVar("Result")
# As many as a prompt has, so that filling takes seconds.
_BATCH = PROMPT_TOKENS // INDEX_BLOCK_TOKENS


def filled(instances: int, blocks: int, prompt: tuple[int, ...]) -> PrefixMemory:
    """Return a memory in which each instance knows `blocks` blocks, some of them the prompt's."""
    memory = PrefixMemory(blocks)
    rng = np.random.default_rng(0)
    for instance in range(instances):
        index = memory._indices[PrefillerId(instance)]
        for _ in range(0, blocks, _BATCH):
            index.add(block_keys(tuple(rng.integers(0, 1 << 63, _BATCH).tolist())))
        known = len(prompt) * (instance + 1) // (instances + 1)
        index.add(block_keys(prompt[:known]))
    return memory


def told(instances: int, blocks: int, prompt: NDArray[np.int64]) -> tuple[EngineBlocks, float]:
    """Return the same of what instances tell, and the time that storing a block takes."""
    index = EngineBlocks(INDEX_BLOCK_TOKENS, blocks)
    rng = np.random.default_rng(0)
    spent = 0.0
    for instance in range(instances):
        prefiller, known = PrefillerId(instance), len(prompt) * (instance + 1) // (instances + 1)
        index.begin(prefiller, Knowledge.ALL)
        for number in range(blocks // _BATCH):
            tokens = rng.integers(0, 150_000, PROMPT_TOKENS)
            if number == 0:
                tokens[:known] = prompt[:known]
            names, ids = rng.integers(1, 1 << 62, _BATCH).tolist(), tokens.tolist()
            _, seconds = watched(partial(index.stored, prefiller, names, None, ids))
            spent += seconds
    return index, spent / instances / blocks


def print_told(instances: int, blocks: int) -> None:
    """Print the figures of what prefillers tell."""
    prompt = np.random.default_rng(1).integers(0, 150_000, PROMPT_TOKENS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index, block_s = told(instances, blocks, prompt)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"told: {used:,.0f} MiB more, {1e6 * block_s:.1f} us for a block")
    times: dict[str, list[float]] = {"hash ids": [], "look up": []}
    found = 0
    for _ in range(200):
        hashes, at = watched(partial(token_hashes, prompt, INDEX_BLOCK_TOKENS))
        times["hash ids"].append(at)
        found, at = watched(partial(longest, index, instances, hashes))
        times["look up"].append(at)
    print(f"longest prefix told: {INDEX_BLOCK_TOKENS * found:,} tokens")
    print_times(times)


def longest(index: EngineBlocks, instances: int, hashes: tuple[int, ...]) -> int:
    """Return how much of a prompt the instance has that has most of it."""
    return max(index.leading(PrefillerId(instance), hashes) for instance in range(instances))


def print_times(times: dict[str, list[float]]) -> None:
    """Print each median and its tail."""
    for name, samples in times.items():
        print(f"{name:10} {1e3 * median(samples):.3f} ms, p99 {1e3 * sorted(samples)[-3]:.3f} ms")


def prefix_index(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Measures the index of prompt blocks: memory, and the time of a decision about a long prompt.

    The prompt has 128k tokens in blocks of 16 as vLLM's. Every prefiller knows a beginning of its own
    length of it, in indices that are full: first of what each was sent, then of what each tells itself.
    """
    parser.add_argument("--instances", type=positive, default=16)
    parser.add_argument("--blocks", type=positive, default=1 << 20)
    arguments = parser.parse_args(words)
    rng = random.Random(1)
    prompt = tuple(rng.getrandbits(63) for _ in range(PROMPT_TOKENS // INDEX_BLOCK_TOKENS))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = filled(arguments.instances, arguments.blocks, prompt)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ticket = Ticket(PROMPT_TOKENS, blocks=prompt, block_tokens=INDEX_BLOCK_TOKENS)
    request = PrefillRequest(RequestId(0), ticket, PROMPT_TOKENS, 0)
    candidates = [PrefillerId(instance) for instance in range(arguments.instances)]
    times: dict[str, list[float]] = {"hash keys": [], "look up": [], "note": []}
    for _ in range(200):
        keys, at = watched(lambda: block_keys(prompt).tolist())
        times["hash keys"].append(at)
        _, at = watched(partial(look_up, memory, candidates, keys))
        times["look up"].append(at)
        _, at = watched(lambda: memory.add(request, candidates[0]))
        times["note"].append(at)
    found = memory.expect(request, candidates)
    print(f"{arguments.instances} instances x {arguments.blocks:,} blocks: {used:,.0f} MiB")
    print(f"longest prefix found: {max(one.cached_tokens for one in found.values()):,} tokens")
    print_times(times)
    print_told(arguments.instances, arguments.blocks)
    return 0


def look_up(memory: PrefixMemory, candidates: list[PrefillerId], keys: list[int]) -> None:
    """Find out what each instance knows of a prompt."""
    for prefiller in candidates:
        memory._indices[prefiller].leading(keys)


def watched(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return what some work returns, and its seconds."""
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


LEARNED = 8_000
ACTIVE = 1_000
HORIZON, REFRESH_TOKENS = 40, 20
# Of the dear ones a hundredth of the rounds suffices.
SLOW = {"save", "load"}


def trained(past: list[PastRequest]) -> dict[str, Savable]:
    """Return every predictor that can be made here, by name."""
    without = set[str]() if find_spec("lightgbm") else {"gbdt"}
    return {name: train(name, past) for name in KINDS if name not in without}


def operations(
    predictor: Savable, active: list[PastRequest], path: Path
) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; every call is one round."""
    rng = np.random.default_rng(0)
    requests = [RequestId(number) for number in range(len(active))]
    for request, one in zip(requests, active, strict=True):
        predictor.begin(request, one.features)
    ages = np.array([rng.integers(one.output_tokens) for one in active])
    # Begun and ended one after the other, beside those that stay.
    begun = zip((RequestId(number) for number in count(len(active))), cycle(active), strict=False)
    ended = zip((RequestId(number) for number in count(len(active))), cycle(active), strict=False)
    asked, newborn = cycle(requests), np.zeros(1, np.int64)

    def begin() -> None:
        request, one = next(begun)
        predictor.begin(request, one.features)

    def observe() -> None:
        request, one = next(ended)
        predictor.observe(request, one.output_tokens)

    return {
        "refresh": lambda: predictor.survival(requests, ages, HORIZON + REFRESH_TOKENS),
        "admission": lambda: predictor.survival([next(asked)], newborn, HORIZON),
        "begin": begin,
        "observe": observe,
        "save": lambda: save(path, predictor),
        "load": lambda: load_predictor(path),
    }


def timed(operation: Callable[[], object], rounds: int) -> list[float]:
    """Return the 10th, 50th and 90th percentile of what a call costs, in µs."""
    operation()
    samples = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        operation()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return [float(figure) for figure in np.percentile(samples, [10, 50, 90])]


def predictors(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What each predictor costs.

    Each has learned from the first requests of a public trace and is asked about later ones, in the middle
    of their lives: all active ones at once as at a refresh, and one at age 0 as at an admission. The rest
    is what it costs to be told of a request, and to be saved and loaded. One core; medians, and the range
    from the 10th to the 90th percentile.
    """
    parser.add_argument("--rounds", type=positive, default=1_000, help="timed calls of each")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args(words)
    past = past_requests(read_trace(MOONCAKE))
    active = past[LEARNED : LEARNED + ACTIVE]
    rows: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, predictor in trained(past[:LEARNED]).items():
            path = Path(folder) / f"{name}.json"
            rows[name] = {
                what: timed(operation, max(3, arguments.rounds // (100 if what in SLOW else 1)))
                for what, operation in operations(predictor, active, path).items()
            }
            sizes[name] = sum(file.stat().st_size for file in path.parent.glob(f"{name}.*"))
    print(f"µs, median (10th to 90th percentile); {ACTIVE:,} requests active\n")
    headings = ("refresh of all", "one at admission", "begin", "observe", "save", "load", "KiB")
    print(table_head("predictor", *right(headings)))
    for name, figures in rows.items():
        cells = (
            f"{median:,.0f} ({low:,.0f} to {high:,.0f})" if median >= 10
            else f"{median:.1f} ({low:.1f} to {high:.1f})"
            for low, median, high in figures.values()
        )  # fmt: skip
        print(table_row(name, *cells, f"{sizes[name] / 1024:,.0f}"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")

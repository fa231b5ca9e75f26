"""What one scheduling decision costs."""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tests.support.arguments import positive

from balanceroute.predictors import Survival
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import (
    Admit,
    DecodeStarted,
    PrefillDone,
    RequestArrived,
    RequestFinished,
    RequestId,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.sim.workload import playable
from balanceroute.proxy.live.process_edge import settle_memory
from balanceroute.traces import TraceRequest, read_trace
from experiment import MOONCAKE, SERVEGEN, right, table_head, table_row

TRACE, LONG_TRACE = MOONCAKE, SERVEGEN
# Ranks, batch limit, pool, and the p99 that the total may cost, in ms.
SHAPES = ((8, 16, 64, 1), (16, 64, 256, 2), (144, 64, 1024, 8), (320, 128, 4096, 20))
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
        trace: Where requests come from.
        warm_up: Steps before the timed ones.
    """

    def __init__(
        self,
        ranks: int,
        batch: int,
        pool: int,
        horizon: int,
        *,
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
        settings = PolicySettings(horizon_steps=horizon)
        predictor = Survival(request.output_tokens for request in requests)
        parts = PolicyInputs(ranks, batch, settings, rng, predictor, self._on_stage)
        self.policy = make_policy("br-h", parts)
        self._scheduler = Scheduler(SchedulerConfig(ranks=ranks, batch_limit=batch), self.policy)
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
        ticket = Ticket(traced.prompt_tokens)
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

    Each row keeps G ranks of B slots saturated with requests of a public trace and a constant number of
    them in the pool, and times on one core every decode step that frees a slot: the projection's advance
    (predictions that fell due included), the decision's view of it, Stage 1, Stage 2, and the rest of
    the scheduler (ledger, life cycles, pool). The total is what such a step costs the proxy.

    The rows of bursts time steps in which 1,000 requests drawn at random end together, so that one
    decision makes 1,000 admissions; five steps lie between two of them. The rows of long outputs are of
    a trace of reasoning requests, where candidates are scored by their own trajectories.

    Times are CPU times of the thread, so that other processes add little to them. Memory is settled before
    the first request arrives, as in `serve`.
    """
    parser.add_argument("--steps", type=positive, default=1000, help="timed steps per shape")
    parser.add_argument("--bursts", type=positive, default=100, help="timed bursts per shape")
    parser.add_argument("--horizon", type=int, default=80, metavar="H")
    parser.add_argument("--only", default="", metavar="TEXT", help="loads with this in their name")
    arguments = parser.parse_args(words)
    print(f"br-h, survival, H = {arguments.horizon}: ms per decode step, p50 / p99\n")
    print(table_head(*right(("G", "B", "pool")), "load", *right((*STAGES, "p99 goal"))))
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
        times = (f"{figures[stage][0]:.2f} / {figures[stage][1]:.2f}" for stage in STAGES)
        print(table_row(ranks, batch, pool, load, *times, f"{goal} ms"), flush=True)

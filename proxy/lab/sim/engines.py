"""The engines of a simulated deployment, in virtual time: a prefill fleet, and decode ranks at their barrier."""

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import TypeVar

from balanceroute.proxy.core.events import EngineLoad, PrefillerId, RankId, RequestId
from balanceroute.proxy.core.setting import check_ranges, integer, integers, number, numbers


class EventLoop:
    """Runs callbacks in order of virtual time."""

    def __init__(self) -> None:
        self.now_ns = 0  # The present time, integer nanoseconds from the start.
        self._order = 0
        self.stopped = False  # Set to end the run after this instant.
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def call_at(self, time_ns: int, callback: Callable[[], None]) -> None:
        """Schedule `callback`; a time in the past is a programming error."""
        assert time_ns >= self.now_ns, f"{time_ns} ns is before {self.now_ns} ns"
        heapq.heappush(self._heap, (time_ns, self._order, callback))
        self._order += 1

    def due(self) -> bool:
        """Return whether more callbacks are scheduled for this instant."""
        return bool(self._heap) and self._heap[0][0] == self.now_ns

    @property
    def next_ns(self) -> int | None:
        """The time of the next callback; None if nothing is scheduled."""
        return self._heap[0][0] if self._heap else None

    def advance(self, settle: Callable[[], None]) -> None:
        """Run all callbacks of the next instant, and then `settle`, which may schedule more for it."""
        self.now_ns = self._heap[0][0]
        while self._heap and self._heap[0][0] == self.now_ns:
            heapq.heappop(self._heap)[2]()
        settle()

    def run(self, settle: Callable[[], None]) -> None:
        """Advance until nothing is scheduled, or it is stopped."""
        while self._heap and not self.stopped:
            self.advance(settle)


# The options of engines beyond one token per request and step on equal ranks.

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class SimulatedEngineOptions:
    """How engines differ from plain ones. Empty lists are equal ranks.

    Raises:
        ConfigError: A value is out of range; the message begins with its name.
    """

    rank_speeds: tuple[float, ...] = numbers(
        "how fast each rank reads its KV cache, relative to b; repeated over the ranks",
        1e-3,
        1e3,
        metavar="X[,X..]",
    )
    rank_batches: tuple[int, ...] = integers(
        "batch limit of each rank, repeated over the ranks", 1, 10**9, metavar="B[,B..]"
    )
    tokens_per_step: float = number(
        1.0, "mean tokens that a request emits in a step, by speculative decoding", 1, 64
    )
    pause_above: float | None = number(
        None,
        "share of its time that the mean rank idles at the barrier, from which the heaviest rank "
        "pauses requests, as with DyntraLB",
        1e-3,
        1,
        shown_default="never",
    )
    speculation_seed: int = integer(0, "of the accepted tokens", -(1 << 63), (1 << 63) - 1)

    def __post_init__(self) -> None:
        check_ranges(self)

    def speeds_of(self, ranks: int) -> list[float] | None:
        """Return the speed of each rank; None if they are equal to b."""
        return _repeated(self.rank_speeds, ranks) if self.rank_speeds else None

    def batches_of(self, ranks: int, batch_limit: int) -> list[int]:
        return _repeated(self.rank_batches or (batch_limit,), ranks)


class Speculation:
    """Draws how many tokens a request emits in a step: one, and the drafts accepted before a rejection.

    Each draft is accepted with one probability, so that the mean is as asked. A request's draws
    depend on the seed, its id and its steps alone.
    """

    def __init__(self, mean_tokens: float, seed: int) -> None:
        assert mean_tokens > 1.0
        # Twice as many drafts as are accepted on average, as in common deployments.
        self._drafts = ceil(2.0 * (mean_tokens - 1.0))
        self._accepted = _acceptance(mean_tokens - 1.0, self._drafts)
        self._seed = seed
        self._draws: dict[RequestId, random.Random] = {}

    def draw(self, request: RequestId) -> int:
        """Return the tokens of a request's next step."""
        if request not in self._draws:
            self._draws[request] = random.Random(f"{self._seed}/{request}")
        draw = self._draws[request]
        tokens = 1
        while tokens <= self._drafts and draw.random() < self._accepted:
            tokens += 1
        return tokens

    def forget(self, request: RequestId) -> None:
        self._draws.pop(request, None)


def paused(
    batches: Sequence[Mapping[RequestId, float]],
    *,
    step_base_ns: float,
    step_ns_per_token: float,
    pause_above: float,
) -> list[RequestId]:
    """Return the requests to pause in a step, as vllm-ascend's DyntraLB would.

    While the idle share of the mean rank is at least `pause_above`, the heaviest rank pauses the
    request without which the batch emits most tokens per second; it stops when no pause adds any.
    Every step is planned anew, so a request goes on once that pays. DyntraLB's exchange of running
    for waiting requests of one rank is left out.

    Source: https://github.com/vllm-project/vllm-ascend, vllm_ascend/patch/platform/
    patch_dyntra_lb_core.py at 0b98b7e6bd45.

    Args:
        batches: By rank, the load of each running request: KV tokens / speed.
        step_base_ns: a of T = a + b x max load.
        step_ns_per_token: b.
        pause_above: Share of the heaviest rank's load.
    """
    active = [dict(batch) for batch in batches]
    loads = [sum(batch.values()) for batch in active]
    running = sum(map(len, active))
    stopped: list[RequestId] = []
    while running > 1:
        heaviest = max(loads)
        if heaviest - sum(loads) / len(loads) < pause_above * heaviest:
            break
        rank = loads.index(heaviest)
        second = max((load for one, load in enumerate(loads) if one != rank), default=0.0)
        # The largest one that does not bring the rank below the second heaviest frees most; a larger
        # one frees no more. So the best is the smallest of those that reach it, or else the largest.
        batch = active[rank]
        reach = [one for one in batch if heaviest - batch[one] <= second]
        best = min(reach, key=batch.__getitem__) if reach else max(batch, key=batch.__getitem__)
        before_ns = step_base_ns + step_ns_per_token * heaviest
        after_ns = step_base_ns + step_ns_per_token * max(heaviest - batch[best], second)
        if (running - 1) / after_ns <= running / before_ns:
            break
        loads[rank] -= batch.pop(best)
        running -= 1
        stopped.append(best)
    return stopped


def _repeated(values: Sequence[_Value], ranks: int) -> list[_Value]:
    return [values[rank % len(values)] for rank in range(ranks)]


def _acceptance(mean_accepted: float, drafts: int) -> float:
    """Return the probability with which each of `drafts` has to be accepted; to 2**-40."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if sum(middle**accepted for accepted in range(1, drafts + 1)) < mean_accepted:
            low = middle
        else:
            high = middle
    return high


# An engine's prefix cache: the full blocks of prompts, the least recently used ones out first.


class PrefixCache:
    """The blocks of one engine, at most so many; None for no limit.

    Attributes:
        dropped: Blocks that it held before its last use, or got then, and holds no more.
    """

    def __init__(self, blocks: int | None, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self.dropped: list[Hashable] = []
        self._held: dict[Hashable, None] = {}  # The least recently used first.

    def leading(self, blocks: Sequence[Hashable]) -> int:
        """Return how many of a prompt's first blocks it holds."""
        known = 0
        while known < len(blocks) and blocks[known] in self._held:
            known += 1
        return known

    def use(self, blocks: Sequence[Hashable], prompt_tokens: int) -> int:
        """Look a prompt up and keep it; return how many of its tokens were cached.

        Blocks are hashes, each of all that comes before it too, and only full ones count. The last token never
        counts: it is computed for its output.
        """
        held = self._held
        full = blocks[: prompt_tokens // self._block_tokens]
        most = (prompt_tokens - 1) // self._block_tokens
        found = 0
        while found < min(len(full), most) and full[found] in held:
            found += 1
        # From the end, as vLLM frees them: of a long prompt the beginning is kept longest.
        for block in reversed(full):
            held.pop(block, None)
            held[block] = None
        self.dropped.clear()
        while self._blocks is not None and len(held) > self._blocks:
            self.dropped.append(next(iter(held)))
            del held[self.dropped[-1]]
        return found * self._block_tokens


# The prefill engines: a prefill takes c + d x tokens to compute, one at a time on each server.
#
# Tokens in a server's prefix cache need no computation. A server computes its prompts in the
# order in which they came. Without prefill servers every prompt is prefilled at once.

_KV_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Service time of P prefill servers."""

    servers: int  # P.
    base_ns: int  # c.
    ns_per_token: float  # d.
    cache_tokens: int | None = None  # Size of a server's prefix cache; None for none.
    block_tokens: int = 512  # Tokens of its blocks.

    def service_ns(self, tokens: int) -> int:
        return self.base_ns + round(self.ns_per_token * tokens)


@dataclass(slots=True)
class PrefillJob:
    request: RequestId
    prefiller: PrefillerId
    prompt_tokens: int
    blocks: tuple[int, ...]  # Hashes of its blocks; see `PrefixCache.use`.
    done: "Callable[[PrefillJob], None]"  # Called when it is computed.
    # Found in the prefix cache, once it began; None without a cache.
    cached_tokens: int | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - (self.cached_tokens or 0)


class PrefillFleet:
    def __init__(self, model: PrefillModel, loop: EventLoop) -> None:
        self._model = model
        self._loop = loop
        self._queues: list[deque[PrefillJob]] = [deque() for _ in range(model.servers)]
        self._caches: list[PrefixCache] = []
        if model.cache_tokens is not None:
            blocks = model.cache_tokens // model.block_tokens
            self._caches = [PrefixCache(blocks, model.block_tokens) for _ in self._queues]

    def submit(self, job: PrefillJob) -> None:
        queue = self._queues[job.prefiller]
        queue.append(job)
        if len(queue) == 1:
            self._begin(job)

    def load(self, prefiller: int) -> EngineLoad:
        """Return what a server's metrics would report, with a KV cache of a million tokens."""
        queue = self._queues[prefiller]
        tokens = sum(job.prompt_tokens for job in queue)
        return EngineLoad(
            waiting=max(0, len(queue) - 1),
            running=min(1, len(queue)),
            kv_usage=min(1.0, tokens / _KV_TOKENS),
        )

    def _begin(self, job: PrefillJob) -> None:
        if self._caches:
            job.cached_tokens = self._caches[job.prefiller].use(job.blocks, job.prompt_tokens)
        end_ns = self._loop.now_ns + self._model.service_ns(job.computed_tokens)
        self._loop.call_at(end_ns, partial(self._end, job))

    def _end(self, job: PrefillJob) -> None:
        queue = self._queues[job.prefiller]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        job.done(job)


# The decode engines: G ranks with batches, queues and KV caches, and one barrier for all.
#
# A step reads every rank's KV cache and ends for all ranks together, so it takes T = a + b x
# max_g L_g. Each running request then holds one more token. A rank admits its queue in order
# between two steps. A rank whose KV cache overflows drops the request that joined last, as vLLM
# preempts. Either the request has to be prefilled again with its emitted tokens (vllm-ascend's
# `recomputed`), or it goes first in the rank's queue, and the step in which it joins again
# computes it and takes so much longer for all ranks (vLLM). So does the step in which a request
# joins whose prompt the rank computes.
#
# `SimulatedEngineOptions` says what may be otherwise: then the ranks read at different speeds, or requests
# emit more than one token in a step, or none.

_PLAIN = SimulatedEngineOptions()


@dataclass(slots=True, eq=False)
class _Job:
    request: RequestId
    rank: RankId
    kv_tokens: int  # When it joined.
    output_tokens: int  # Still to emit when it joined.
    compute_ns: int = 0  # The time of its prompt, in the step in which it joins.
    # When it would have joined, had it emitted one token in each step since; None in the queue.
    joined_step: int | None = None


@dataclass(slots=True)
class _Rank:
    queue: deque[_Job] = field(default_factory=deque)
    running: dict[RequestId, _Job] = field(default_factory=dict)


class DecodeFleet:
    """The state of all ranks.

    Args:
        ranks: G.
        batch_limit: B.
        step_base_ns: a.
        step_ns_per_token: b.
        rank_kv_tokens: KV tokens that fit on a rank; None for no limit.
        recompute_ns: How long a rank takes to compute so many tokens of a dropped request again; None
            if it does not.
        options: How the engines differ from plain ones.
    """

    def __init__(
        self,
        *,
        ranks: int,
        batch_limit: int,
        step_base_ns: int,
        step_ns_per_token: float,
        rank_kv_tokens: int | None = None,
        recompute_ns: Callable[[int], int] | None = None,
        options: SimulatedEngineOptions = _PLAIN,
    ) -> None:
        self.loads = [0] * ranks  # KV tokens of the running requests, by rank.
        self.running = 0  # Number of running requests in the fleet.
        # The load that each rank reads in the step that has begun, in KV tokens of speed 1.
        self.step_loads = self.loads
        # Tokens of each running or dropped request in the step that has begun; empty if each emits
        # one.
        self.emissions: dict[RequestId, int] = {}
        self.frozen: set[int] = set()  # Ranks that do nothing, while the rest goes on.
        self._ranks = [_Rank() for _ in range(ranks)]
        self._batch_limits = options.batches_of(ranks, batch_limit)
        self._step_base_ns = step_base_ns
        self._step_ns_per_token = step_ns_per_token
        self._rank_kv_tokens = rank_kv_tokens
        self._recompute_ns = recompute_ns
        self._dropped: dict[RequestId, _Job] = {}  # They wait to join again.
        self._computes_ns = [0] * ranks  # Prompts, in the next step.
        self._speeds = options.speeds_of(ranks)
        self._pause_above = options.pause_above
        self._speculation = (
            Speculation(options.tokens_per_step, options.speculation_seed)
            if options.tokens_per_step > 1.0
            else None
        )
        self._step = 0
        self._ends: defaultdict[int, list[_Job]] = defaultdict(list)
        self._jobs: dict[RequestId, _Job] = {}

    def submit(
        self,
        request: RequestId,
        rank: RankId,
        *,
        kv_tokens: int,
        output_tokens: int,
        compute_ns: int = 0,
    ) -> None:
        """Queue a request on `rank`; it joins the batch between two steps.

        `compute_ns` is the rank's time to compute its prompt; 0 if it has the KV cache.
        """
        assert output_tokens > 0, f"request {request} has nothing to decode"
        job = self._jobs[request] = _Job(request, rank, kv_tokens, output_tokens, compute_ns)
        self._ranks[rank].queue.append(job)

    def withdraw(self, request: RequestId) -> None:
        """Remove a queued or running request, between two steps or before `end_step`.

        It emits nothing more. One that finished, was dropped or was withdrawn is ignored.
        """
        job = self._jobs.pop(request, None)
        if job is None:
            return
        if job.joined_step is None:
            self._ranks[job.rank].queue.remove(job)
            self._dropped.pop(request, None)
            return
        self._remove_end(job)
        self._leave(job)

    def running_on(self, rank: RankId) -> int:
        return len(self._ranks[rank].running)

    def queued_on(self, rank: RankId) -> int:
        return len(self._ranks[rank].queue)

    def join(self) -> list[RequestId]:
        """Admit queued requests where there is room; return the new ones by rank, then in order."""
        joined: list[RequestId] = []
        for place, rank in enumerate(self._ranks):
            while rank.queue and self._has_room(rank, place) and place not in self.frozen:
                job = rank.queue.popleft()
                job.joined_step = self._step
                rank.running[job.request] = job
                self._ends[self._step + job.output_tokens].append(job)
                self.loads[place] += job.kv_tokens
                self.running += 1
                self._computes_ns[place] += job.compute_ns
                if self._dropped.pop(job.request, None) is None:
                    joined.append(job.request)
        return joined

    def begin_step(self) -> int:
        """Fix the loads and emissions of a step of the present batches; return its time, in ns."""
        self.step_loads = self.loads
        self.emissions = {}
        if self._pause_above is not None or self._speculation is not None:
            self._plan()
        if self._dropped:
            if not self.emissions:
                self.emissions = {one: 1 for rank in self._ranks for one in rank.running}
            self.emissions |= dict.fromkeys(self._dropped, 0)
        if self.frozen:
            if not self.emissions:
                self.emissions = {one: 1 for rank in self._ranks for one in rank.running}
            for place in self.frozen:
                self.emissions |= dict.fromkeys(self._ranks[place].running, 0)
        if self._speeds is not None:
            loads = zip(self.step_loads, self._speeds, strict=True)
            self.step_loads = [round(load / speed) for load, speed in loads]
        if not any(self._computes_ns):
            return self._step_base_ns + round(self._step_ns_per_token * max(self.step_loads))
        times = zip(self.step_loads, self._computes_ns, strict=True)
        longest_ns = max(self._step_ns_per_token * load + more_ns for load, more_ns in times)
        self._computes_ns = [0] * len(self._ranks)
        return self._step_base_ns + round(longest_ns)

    def end_step(self) -> tuple[list[RequestId], list[RequestId]]:
        """Emit the tokens of the step; return the requests that finished and those dropped."""
        self._step += 1
        for place, rank in enumerate(self._ranks):
            self.loads[place] += len(rank.running)
        for request, tokens in self.emissions.items():
            # Not one that was withdrawn since, or waits.
            job = self._jobs.get(request)
            if tokens != 1 and job is not None and job.joined_step is not None:
                self._shift(job, tokens - 1)
        finished: list[RequestId] = []
        for job in self._ends.pop(self._step, ()):
            del self._jobs[job.request]
            self._leave(job)
            finished.append(job.request)
        return finished, self._drop_overflow()

    def _has_room(self, rank: _Rank, place: int) -> bool:
        if len(rank.running) >= self._batch_limits[place]:
            return False
        if self._rank_kv_tokens is None or not rank.running:
            return True
        return self.loads[place] + rank.queue[0].kv_tokens <= self._rank_kv_tokens

    def _drop_overflow(self) -> list[RequestId]:
        dropped: list[RequestId] = []
        if self._rank_kv_tokens is None:
            return dropped
        for place, rank in enumerate(self._ranks):
            # The last one is never dropped: it could not run anywhere else either.
            while self.loads[place] > self._rank_kv_tokens and len(rank.running) > 1:
                request = next(reversed(rank.running))
                job = self._jobs[request]
                self.withdraw(request)
                if self._recompute_ns is not None:
                    self._requeue(job)
                dropped.append(request)
        return dropped

    def _requeue(self, job: _Job) -> None:
        """Let a dropped request join its rank's batch again, before those that wait for it."""
        assert job.joined_step is not None
        assert self._recompute_ns is not None
        emitted = self._step - job.joined_step
        held = job.kv_tokens + emitted
        compute_ns = self._recompute_ns(held)
        again = _Job(job.request, job.rank, held, job.output_tokens - emitted, compute_ns)
        self._jobs[job.request] = self._dropped[job.request] = again
        self._ranks[job.rank].queue.appendleft(again)

    def _plan(self) -> None:
        """Decide which requests pause, and how many tokens each of the rest emits."""
        self.step_loads = list(self.loads)
        self.emissions = {request: 1 for rank in self._ranks for request in rank.running}
        for request in self._paused():
            self.emissions[request] = 0
            self.step_loads[self._jobs[request].rank] -= self._held(self._jobs[request])
        if self._speculation is not None:
            for request, tokens in self.emissions.items():
                if tokens:
                    job = self._jobs[request]
                    assert job.joined_step is not None
                    left = job.joined_step + job.output_tokens - self._step
                    self.emissions[request] = min(self._speculation.draw(request), left)

    def _paused(self) -> list[RequestId]:
        if self._pause_above is None:
            return []
        speeds = self._speeds or [1.0] * len(self._ranks)
        return paused(
            [
                {job.request: self._held(job) / speed for job in rank.running.values()}
                for rank, speed in zip(self._ranks, speeds, strict=True)
            ],
            step_base_ns=self._step_base_ns,
            step_ns_per_token=self._step_ns_per_token,
            pause_above=self._pause_above,
        )

    def _held(self, job: _Job) -> int:
        assert job.joined_step is not None
        return job.kv_tokens + self._step - job.joined_step

    def _shift(self, job: _Job, tokens: int) -> None:
        """Let a running request be so many tokens further."""
        assert job.joined_step is not None
        self._remove_end(job)
        job.joined_step -= tokens
        self._ends[job.joined_step + job.output_tokens].append(job)
        self.loads[job.rank] += tokens

    def _remove_end(self, job: _Job) -> None:
        assert job.joined_step is not None
        end = job.joined_step + job.output_tokens
        self._ends[end].remove(job)
        if not self._ends[end]:
            del self._ends[end]

    def _leave(self, job: _Job) -> None:
        del self._ranks[job.rank].running[job.request]
        self.loads[job.rank] -= self._held(job)
        self.running -= 1
        if self._speculation is not None:
            self._speculation.forget(job.request)

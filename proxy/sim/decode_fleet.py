"""The decode engines: G ranks with batches, queues and KV caches, and one barrier for all.

A step reads every rank's KV cache and ends for all ranks together, so it takes
T = a + b x max_g L_g. Each running request then holds one more token. A rank admits its queue in order
between two steps. A rank whose KV cache overflows drops the request that joined last, as vLLM
preempts. Either the request has to be prefilled again with its emitted tokens (vllm-ascend's
`recomputed`), or it goes first in the rank's queue, and the step in which it joins again computes it
and takes so much longer for all ranks (vLLM). So does the step in which a request joins whose prompt
the rank computes.

`EngineOptions` says what may be otherwise: then the ranks read at different speeds, or requests emit
more than one token in a step, or none.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.sim.engine_options import EngineOptions, Speculation, paused

_PLAIN = EngineOptions()


@dataclass(slots=True, eq=False)
class _Job:
    request: RequestId
    rank: RankId
    kv_tokens: int  # When it joined.
    output_tokens: int  # Still to emit when it joined.
    compute_ns: int = 0  # What the rank computes in the step in which it joins.
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

    Attributes:
        loads: KV tokens of the running requests, by rank.
        running: Number of running requests in the fleet.
        step_loads: What each rank reads in the step that has begun, in KV tokens of speed 1.
        frozen: Ranks that do nothing, while the others go on.
        emissions: Tokens of each running or dropped request in the step that has begun; empty if each
            emits one.
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
        options: EngineOptions = _PLAIN,
    ) -> None:
        self.loads = [0] * ranks
        self.running = 0
        self.step_loads = self.loads
        self.emissions: dict[RequestId, int] = {}
        self.frozen: set[int] = set()
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

        `compute_ns` is what the rank takes to compute its prompt; 0 if it has the KV cache.
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
        """Return the number of running requests of a rank."""
        return len(self._ranks[rank].running)

    def queued_on(self, rank: RankId) -> int:
        """Return the number of requests that wait to join a rank's batch."""
        return len(self._ranks[rank].queue)

    def join(self) -> list[RequestId]:
        """Admit queued requests where there is room; return the new ones by rank, then in order."""
        joined: list[RequestId] = []
        for number, rank in enumerate(self._ranks):
            while rank.queue and self._has_room(rank, number) and number not in self.frozen:
                job = rank.queue.popleft()
                job.joined_step = self._step
                rank.running[job.request] = job
                self._ends[self._step + job.output_tokens].append(job)
                self.loads[number] += job.kv_tokens
                self.running += 1
                self._computes_ns[number] += job.compute_ns
                if self._dropped.pop(job.request, None) is None:
                    joined.append(job.request)
        return joined

    def begin_step(self) -> int:
        """Fix what a step of the present batches reads and emits; return how long it takes, in ns."""
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
            for number in self.frozen:
                self.emissions |= dict.fromkeys(self._ranks[number].running, 0)
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
        for number, rank in enumerate(self._ranks):
            self.loads[number] += len(rank.running)
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

    def _has_room(self, rank: _Rank, number: int) -> bool:
        if len(rank.running) >= self._batch_limits[number]:
            return False
        if self._rank_kv_tokens is None or not rank.running:
            return True
        return self.loads[number] + rank.queue[0].kv_tokens <= self._rank_kv_tokens

    def _drop_overflow(self) -> list[RequestId]:
        dropped: list[RequestId] = []
        if self._rank_kv_tokens is None:
            return dropped
        for number, rank in enumerate(self._ranks):
            # The last one is never dropped: it could not run anywhere else either.
            while self.loads[number] > self._rank_kv_tokens and len(rank.running) > 1:
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
        """Decide which requests pause, and how many tokens the others emit."""
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

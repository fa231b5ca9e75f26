"""The decode engines: G ranks with batches, queues and KV caches, and one barrier for all.

A step reads every rank's KV cache and ends for all ranks together, so it takes
T = a + b x max_g L_g. Each running request then holds one more token. A rank admits its queue in order
between two steps. A rank whose KV cache overflows drops the request that joined last, as vLLM
preempts; the request has to be prefilled again with its emitted tokens (vllm-ascend's `recomputed`).
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from balanceroute.proxy.core.events import RankId, RequestId


@dataclass(slots=True, eq=False)
class _Job:
    request: RequestId
    rank: RankId
    kv_tokens: int  # When it joined.
    output_tokens: int  # Still to emit when it joined.
    joined_step: int = -1


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

    Attributes:
        loads: KV tokens of the running requests, by rank.
        running: Number of running requests in the fleet.
    """

    def __init__(
        self,
        *,
        ranks: int,
        batch_limit: int,
        step_base_ns: int,
        step_ns_per_token: float,
        rank_kv_tokens: int | None = None,
    ) -> None:
        self.loads = [0] * ranks
        self.running = 0
        self._ranks = [_Rank() for _ in range(ranks)]
        self._batch_limit = batch_limit
        self._step_base_ns = step_base_ns
        self._step_ns_per_token = step_ns_per_token
        self._rank_kv_tokens = rank_kv_tokens
        self._step = 0
        self._ends: defaultdict[int, list[_Job]] = defaultdict(list)
        self._jobs: dict[RequestId, _Job] = {}

    def submit(
        self, request: RequestId, rank: RankId, *, kv_tokens: int, output_tokens: int
    ) -> None:
        """Queue a request on `rank`; it joins the batch between two steps."""
        assert output_tokens > 0, f"request {request} has nothing to decode"
        job = self._jobs[request] = _Job(request, rank, kv_tokens, output_tokens)
        self._ranks[rank].queue.append(job)

    def withdraw(self, request: RequestId) -> None:
        """Remove a queued or running request, between two steps or before `end_step`.

        It emits nothing more. One that finished, was dropped or was withdrawn is ignored.
        """
        job = self._jobs.pop(request, None)
        if job is None:
            return
        if job.joined_step < 0:
            self._ranks[job.rank].queue.remove(job)
            return
        end = job.joined_step + job.output_tokens
        self._ends[end].remove(job)
        if not self._ends[end]:
            del self._ends[end]
        self._leave(job)

    def running_on(self, rank: RankId) -> int:
        """Return the number of running requests of a rank."""
        return len(self._ranks[rank].running)

    def queued_on(self, rank: RankId) -> int:
        """Return the number of requests that wait to join a rank's batch."""
        return len(self._ranks[rank].queue)

    def join(self) -> list[RequestId]:
        """Admit queued requests where there is room; return them by rank, then in order."""
        joined: list[RequestId] = []
        for number, rank in enumerate(self._ranks):
            while rank.queue and self._has_room(rank, number):
                job = rank.queue.popleft()
                job.joined_step = self._step
                rank.running[job.request] = job
                self._ends[self._step + job.output_tokens].append(job)
                self.loads[number] += job.kv_tokens
                self.running += 1
                joined.append(job.request)
        return joined

    def step_ns(self) -> int:
        """Return how long a step of the present batches takes."""
        return self._step_base_ns + round(self._step_ns_per_token * max(self.loads))

    def end_step(self) -> tuple[list[RequestId], list[RequestId]]:
        """Emit one token per running request; return those that finished and those dropped."""
        self._step += 1
        for number, rank in enumerate(self._ranks):
            self.loads[number] += len(rank.running)
        finished: list[RequestId] = []
        for job in self._ends.pop(self._step, ()):
            del self._jobs[job.request]
            self._leave(job)
            finished.append(job.request)
        return finished, self._drop_overflow()

    def _has_room(self, rank: _Rank, number: int) -> bool:
        if len(rank.running) >= self._batch_limit:
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
                self.withdraw(request)
                dropped.append(request)
        return dropped

    def _leave(self, job: _Job) -> None:
        del self._ranks[job.rank].running[job.request]
        self.loads[job.rank] -= job.kv_tokens + self._step - job.joined_step
        self.running -= 1

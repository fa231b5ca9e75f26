"""The prefill engines: a prefill takes c + d x tokens to compute, one at a time on each server.

Tokens in a server's prefix cache need no computation. A server computes its prompts in the order in
which they came. Without prefill servers every prompt is prefilled at once.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import EngineLoad, PrefillerId, RequestId
from balanceroute.proxy.sim.loop import EventLoop
from balanceroute.proxy.sim.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable

_KV_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Service time of P prefill servers.

    Attributes:
        servers: P.
        base_ns: c.
        ns_per_token: d.
        cache_tokens: Size of a server's prefix cache; None for none.
        block_tokens: Tokens of its blocks.
    """

    servers: int
    base_ns: int
    ns_per_token: float
    cache_tokens: int | None = None
    block_tokens: int = 512

    def service_ns(self, tokens: int) -> int:
        """Return the duration of a prefill that computes `tokens`."""
        return self.base_ns + round(self.ns_per_token * tokens)


@dataclass(slots=True)
class PrefillJob:
    """One prompt to compute.

    Attributes:
        blocks: Hashes of its blocks; see `PrefixCache.use`.
        done: Called when it is computed.
        cached_tokens: Found in the prefix cache, once it began; None without a cache.
    """

    request: RequestId
    prefiller: PrefillerId
    prompt_tokens: int
    blocks: tuple[int, ...]
    done: "Callable[[PrefillJob], None]"
    cached_tokens: int | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens that are computed."""
        return self.prompt_tokens - (self.cached_tokens or 0)


class PrefillFleet:
    """The prefill servers."""

    def __init__(self, model: PrefillModel, loop: EventLoop) -> None:
        self._model = model
        self._loop = loop
        self._queues: list[deque[PrefillJob]] = [deque() for _ in range(model.servers)]
        self._caches: list[PrefixCache] = []
        if model.cache_tokens is not None:
            blocks = model.cache_tokens // model.block_tokens
            self._caches = [PrefixCache(blocks, model.block_tokens) for _ in self._queues]

    def submit(self, job: PrefillJob) -> None:
        """Queue a prompt at its server."""
        queue = self._queues[job.prefiller]
        queue.append(job)
        if len(queue) == 1:
            self._begin(job)

    def load(self, prefiller: int) -> EngineLoad:
        """Return what a server's metrics would tell, of a KV cache of a million tokens."""
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

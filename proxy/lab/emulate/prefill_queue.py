"""The prompts of one prefiller: computed one at a time, first in, first out."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balanceroute.proxy.lab.emulate.leases import BlockPool
from balanceroute.proxy.lab.emulate.settings import EmulationSettings

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt to compute.

    Attributes:
        begin: Called when its computation begins; returns the tokens that need none.
        num_blocks: KV blocks that its computation takes.
        done: Called when it is computed; the caller then owns the blocks.
        blocks: Its blocks, once the computation has begun.
        cached_tokens: The tokens that need none.
    """

    prompt_tokens: int
    num_blocks: int
    begin: "Callable[[], int]"
    done: "Callable[[PrefillJob], None]"
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0


class PrefillQueue:
    """Serves prompts in order; one that waits for free blocks holds up those behind it."""

    def __init__(self, settings: EmulationSettings, pool: BlockPool) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._pool = pool
        self._waiting: deque[PrefillJob] = deque()
        self._current: PrefillJob | None = None
        self._timer: asyncio.TimerHandle | None = None
        pool.on_free = self._begin_next

    @property
    def running(self) -> int:
        """Prompts being computed: none or one."""
        return int(self._current is not None)

    @property
    def waiting(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    def submit(self, job: PrefillJob) -> None:
        """Queue a prompt."""
        self._waiting.append(job)
        self._begin_next()

    def cancel(self, job: PrefillJob) -> None:
        """Remove a prompt that is not computed yet and free its blocks."""
        if job is self._current:
            assert self._timer is not None
            self._timer.cancel()
            self._current = None
            self._pool.free(job.blocks)  # Begins the next one.
        elif job in self._waiting:
            self._waiting.remove(job)
            self._begin_next()

    def _begin_next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        blocks = self._pool.take(self._waiting[0].num_blocks)
        if blocks is None:
            return
        job = self._current = self._waiting.popleft()
        job.blocks = blocks
        job.cached_tokens = job.begin()
        service_ns = self._settings.prefill.service_ns(job.prompt_tokens - job.cached_tokens)
        self._timer = self._loop.call_later(self._settings.seconds(service_ns), self._finish, job)

    def _finish(self, job: PrefillJob) -> None:
        self._current = None
        job.done(job)
        self._begin_next()

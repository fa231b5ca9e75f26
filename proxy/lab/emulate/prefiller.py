"""The work of a prefiller: compute the prompt, emit the first token, keep the KV cache.

A request for more than one token is decoded here too, in parallel to the prefill queue, as any engine
does. The prefiller has its own batch.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.lab.emulate.barrier import Barrier
from balanceroute.proxy.lab.emulate.engine_metrics import RankCounters
from balanceroute.proxy.lab.emulate.exchange import TokenSequence
from balanceroute.proxy.lab.emulate.hub import EngineCall, Hub
from balanceroute.proxy.lab.emulate.leases import (
    BlockPool,
    KvPeer,
    Lease,
    LeaseEnd,
    alien_params,
    lease_key,
    prefill_answer,
)
from balanceroute.proxy.lab.emulate.prefix_caches import KvLog, PrefixCaches
from balanceroute.proxy.lab.emulate.request import Prompt
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.topologies import CONNECTORS, KvFlow

if TYPE_CHECKING:
    from collections.abc import Callable


# The prompts of one prefiller: computed one at a time, first in, first out.


@dataclass(slots=True, eq=False)
class EmulatedPrefill:
    prompt_tokens: int
    num_blocks: int  # KV blocks that its computation takes.
    # Called when its computation begins; returns the tokens that need none.
    begin: "Callable[[], int]"
    # Called when it is computed; the caller then owns the blocks.
    done: "Callable[[EmulatedPrefill], None]"
    blocks: list[int] = field(default_factory=list)  # Its blocks, once the computation has begun.
    cached_tokens: int = 0  # The tokens that need none.


class EmulatedPrefillQueue:
    """Serves prompts in order; one that waits for free blocks holds up those behind it."""

    def __init__(self, settings: EmulationSettings, pool: BlockPool) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._pool = pool
        self._waiting: deque[EmulatedPrefill] = deque()
        self._current: EmulatedPrefill | None = None
        self._timer: asyncio.TimerHandle | None = None
        pool.on_free = self._begin_next

    @property
    def running(self) -> int:
        """Prompts being computed: none or one."""
        return int(self._current is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: EmulatedPrefill) -> None:
        self._waiting.append(job)
        self._begin_next()

    def cancel(self, job: EmulatedPrefill) -> None:
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

    def _finish(self, job: EmulatedPrefill) -> None:
        self._current = None
        job.done(job)
        self._begin_next()


class EmulatedPrefiller:
    def __init__(
        self, hub: Hub, source: KvPeer, counters: Sequence[RankCounters], log: KvLog | None = None
    ) -> None:
        settings = self._settings = hub.settings
        self._caches = PrefixCaches(settings, counters, () if log is None else (log,))
        tokens = settings.prefiller_kv_tokens
        self.pool = BlockPool(None if tokens is None else settings.blocks(tokens))
        self._source = source
        self._book = hub.book
        self._loop = asyncio.get_running_loop()
        self._queue = EmulatedPrefillQueue(settings, self.pool)
        self._barrier = Barrier(settings, ranks=1, rank_kv_tokens=None)

    def running(self, rank: int) -> int:
        return self._queue.running + self._barrier.running(rank)

    def waiting(self, rank: int) -> int:
        return self._queue.waiting + self._barrier.waiting(rank)

    def arriving(self, rank: int) -> int:
        del rank
        return 0

    def usage(self, rank: int) -> float:
        """Return the share of KV blocks in use."""
        del rank
        return self.pool.usage

    def serve(self, call: EngineCall) -> None:
        exchange = call.exchange
        if call.remote_prefill:
            exchange.fail()  # A producer has no KV cache to receive.
            return
        for number, prompt in enumerate(exchange.request.prompts):
            # A copy for each choice: vLLM keeps each one's blocks for a decoder of its own.
            job = EmulatedPrefill(
                len(prompt.tokens),
                self._settings.blocks(len(prompt.tokens)) * exchange.request.n,
                partial(self._caches.compute, 0, prompt.tokens, call.session),
                partial(self._prefilled, call, number),
            )
            exchange.stages[number] = partial(self._cancel, job)
            self._queue.submit(job)

    def close(self) -> None:
        self._barrier.close()

    def _prefilled(self, call: EngineCall, number: int, job: EmulatedPrefill) -> None:
        exchange = call.exchange
        del exchange.stages[number]
        sequences = exchange.sequences_of(number)
        share = len(job.blocks) // len(sequences)
        for place, sequence in enumerate(sequences):
            sequence.choice.cached_tokens = job.cached_tokens
            blocks = job.blocks[place * share : (place + 1) * share]
            exchange.stages[sequence] = partial(self._drop, sequence, blocks)
            sequence.on_end = partial(self._ended, call, number, blocks)
        for sequence in sequences:
            if sequence in exchange.stages and not sequence.advance():
                self._barrier.submit(sequence, 0)

    def _cancel(self, job: EmulatedPrefill, _crashed: bool) -> None:
        self._queue.cancel(job)

    def _drop(self, sequence: TokenSequence, blocks: list[int], _crashed: bool) -> None:
        self._barrier.withdraw(sequence)
        self.pool.free(blocks)

    def _ended(
        self, call: EngineCall, number: int, blocks: list[int], sequence: TokenSequence
    ) -> None:
        exchange, choice = call.exchange, sequence.choice
        del exchange.stages[sequence]
        settings, source = self._settings, self._source
        pushes = CONNECTORS[settings.connector].flow is KvFlow.DECODE_FIRST
        ended = choice.finish_reason
        if not call.remote_decode or not (ended == "length" or (pushes and ended == "stop")):
            # As in vLLM: after a stop condition in prefill nothing is left to decode. vllm-ascend's
            # layerwise connector has pushed the KV cache before the first token was drawn.
            self.pool.free(blocks)
            return
        internal_id = call.internal_id(number)
        if exchange.request.n > 1:
            internal_id = f"{choice.index % exchange.request.n}_{internal_id}"
        key = lease_key(settings.connector, source, call.kv, internal_id)
        # The last token has no KV: no step has computed with it.
        prompt, said = choice.prompt, choice.token_ids[:-1]
        if said:
            prompt = Prompt([*prompt.tokens, *said], None)
        lease_s = exchange.faults.lease_s or settings.lease_s
        short = lease_s < settings.lease_s
        lease = Lease(source.engine_id, key, prompt, blocks, self.pool, short=short)
        self._book.grant(lease, self._loop.time() + settings.seconds(1e9 * lease_s))
        if pushes and not lease.pulling:
            self._book.finish(lease, LeaseEnd.RELEASED)  # Pushed to a decoder that is gone.
        if number == 0 and sequence is exchange.sequences[0]:
            params = prefill_answer(
                settings.connector, source, lease, settings.block_tokens, choice.token_ids[-1]
            )
            if params is not None and call.alien_kv:
                params = alien_params(params)
            exchange.kv_transfer_params = None if call.drop_kv else params

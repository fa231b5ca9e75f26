"""The clock of a set of ranks that end each decode step together.

The simulator's `DecodeFleet` decides which sequences run, how long a step takes and which are dropped.
Here steps happen in the event loop's time, and sequences may leave at any moment.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.subset import idle_tokens, imbalance_tokens
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.sim.engines import DecodeFleet

# Steps whose loads are kept.
PICTURE_STEPS = 500
# Until it is looked again whether a rank that holds the barrier goes on.
_LOOK_S = 0.02
# After a pause of the process at most this much delay is made up for.
_MAX_LATE_S = 1.0


class Batched(Protocol):
    """A sequence of tokens that a batch works on; see `TokenSequence`."""

    @property
    def kv_tokens(self) -> int: ...

    @property
    def tokens_left(self) -> int: ...

    def advance(self, *, more: bool) -> bool: ...

    def dropped(self) -> None: ...


@dataclass(slots=True)
class StepCounters:
    """The barrier's measurements since the last reset, over steps in which a sequence ran."""

    steps: int = 0
    idle_tokens: int = 0  # Sum over steps and ranks of the heaviest load minus the rank's load.
    capacity_tokens: int = 0  # Sum of ranks x heaviest load.
    imbalance_tokens: int = 0  # Sum of heaviest minus lightest load.
    output_tokens: int = 0
    busy_ns: int = 0  # Emulated time of the steps.
    preemptions: int = 0
    late_s: float = 0.0  # The largest delay of a step's end, by the event loop's clock.
    total_late_s: float = 0.0  # The sum of the delays.
    # Loads by rank of the first `PICTURE_STEPS` steps.
    picture: list[list[int]] = field(default_factory=list)


class Barrier:
    """The steps of all ranks together, while any sequence runs."""

    def __init__(
        self, settings: EmulationSettings, *, ranks: int, rank_kv_tokens: int | None
    ) -> None:
        self.counters = StepCounters()
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._fleet = DecodeFleet(
            ranks=ranks,
            batch_limit=settings.batch_limit,
            step_base_ns=settings.step_base_ns,
            step_ns_per_token=settings.step_ns_per_token,
            rank_kv_tokens=rank_kv_tokens,
            options=settings.engines,
        )
        self._sequences: dict[RequestId, Batched] = {}
        self._ids: dict[Batched, RequestId] = {}
        self._running: dict[RequestId, Batched] = {}
        self._submitted = 0
        self._timer: asyncio.Handle | None = None
        self._step_end_s = 0.0
        self._step_ns = 0
        self._blocking: set[int] = set()

    @property
    def loads(self) -> list[int]:
        """KV tokens of the running sequences, by rank."""
        return list(self._fleet.loads)

    @property
    def idle(self) -> bool:
        return not self._sequences

    def running(self, rank: int) -> int:
        return self._fleet.running_on(RankId(rank))

    def waiting(self, rank: int) -> int:
        return self._fleet.queued_on(RankId(rank))

    def freeze(self, ranks: Collection[int], *, holds: bool) -> None:
        """Have ranks do nothing more; if they hold the barrier, no other rank ends its step either."""
        self._fleet.frozen.update(ranks)
        if holds:
            self._blocking.update(ranks)

    def thaw(self, ranks: Collection[int]) -> None:
        self._fleet.frozen.difference_update(ranks)
        self._blocking.difference_update(ranks)
        if self._timer is None and self._sequences:
            self._timer = self._loop.call_soon(self._begin, self._loop.time())

    def submit(self, sequence: Batched, rank: int, *, compute_ns: int = 0) -> None:
        """Queue a sequence; it joins between two steps.

        `compute_ns` is the time of its prompt, within the step in which it joins.
        """
        request = RequestId(self._submitted)
        self._submitted += 1
        self._sequences[request] = sequence
        self._ids[sequence] = request
        self._fleet.submit(
            request,
            RankId(rank),
            kv_tokens=sequence.kv_tokens,
            output_tokens=sequence.tokens_left,
            compute_ns=compute_ns,
        )
        if self._timer is None:
            # Not at once: sequences that arrive in the same instant join the same step.
            self._timer = self._loop.call_soon(self._begin, self._loop.time())

    def withdraw(self, sequence: Batched) -> None:
        """Remove a running or waiting sequence; one that has left is ignored."""
        request = self._ids.pop(sequence, None)
        if request is not None:
            self._forget(request)
            self._fleet.withdraw(request)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self, request: RequestId) -> None:
        del self._sequences[request]
        self._running.pop(request, None)

    def _begin(self, begin_s: float) -> None:
        for request in self._fleet.join():
            self._running[request] = self._sequences[request]
        if not self._running:
            self._timer = None
            return
        self._step_ns = self._fleet.begin_step()
        loads = self._fleet.step_loads
        counters = self.counters
        counters.steps += 1
        counters.idle_tokens += idle_tokens(loads)
        counters.capacity_tokens += len(loads) * max(loads)
        counters.imbalance_tokens += imbalance_tokens(loads)
        counters.busy_ns += self._step_ns
        if len(counters.picture) < PICTURE_STEPS:
            counters.picture.append(list(loads))
        self._step_end_s = begin_s + self._settings.seconds(self._step_ns)
        self._timer = self._loop.call_at(self._step_end_s, self._end)

    def _end(self) -> None:
        if self._blocking:
            self._timer = self._loop.call_later(_LOOK_S, self._end)
            return
        late_s = self._loop.time() - self._step_end_s
        self.counters.late_s = max(self.counters.late_s, late_s)
        self.counters.total_late_s += late_s
        said = 0
        emissions = self._fleet.emissions
        for request, sequence in list(self._running.items()):
            if request not in self._running:
                continue  # It was withdrawn while another one emitted its token.
            for left in reversed(range(emissions.get(request, 1))):
                said += 1
                if sequence.advance(more=left > 0):
                    self.withdraw(sequence)
                    break
        self.counters.output_tokens += said
        finished, dropped = self._fleet.end_step()
        for request in (*finished, *dropped):
            sequence = self._sequences[request]
            del self._ids[sequence]
            self._forget(request)
            if request in dropped:
                self.counters.preemptions += 1
                sequence.dropped()
        # The next step begins when this one was due to end, so that delays do not add up.
        self._begin(self._step_end_s + max(0.0, late_s - _MAX_LATE_S))

"""KV tokens and slots per decode rank: the only writer of load.

The ledger mirrors the decode engines: a request is *bound* when it is sent to a rank and *started*
once it is in the rank's batch; a started request gains one KV token per slot and step. Started
requests are not touched one by one: a rank's load grows by its started slots, and a request's own
tokens follow from the step clock. So a step costs O(ranks), whatever the batch.

A policy that looks ahead has a `Projection`, which the ledger updates with the same changes. A
projection that raises gets no further update. The ledger's own counts are updated first, so they stay
right.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVarTuple

import numpy as np
from msgspec import Struct

from balanceroute.proxy.core.events import RankId, RequestId

if TYPE_CHECKING:
    from numpy.typing import NDArray


# How fast a fleet's slots turn over, and how long requests of a size stay.

# Steps that the rate covers: some 50 departures with 8 ranks x 16 slots on the Mooncake trace.
_WINDOW_STEPS = 128
# Departures that the stay of a size covers.
_WINDOW_DEPARTURES = 32


class Turnover:
    """Requests that leave a fleet: means at first, exponential averages later.

    It counts departures, not admissions. In steady state they are as many, but the admissions that
    fill an empty fleet say nothing about how long requests stay.

    Attributes:
        per_step: Requests that leave in a step; 0 before the first step.
    """

    def __init__(self) -> None:
        self.per_step = 0.0
        self._steps = 0
        self._left = 0
        # By size class, the number of bits of the KV tokens: departures, and their mean stay.
        self._stays: dict[int, tuple[int, float]] = {}

    def leave(self, kv_tokens: int, steps: int) -> None:
        """Note that a request of `kv_tokens` left its rank after `steps`."""
        self._left += 1
        size = kv_tokens.bit_length()
        count, mean = self._stays.get(size, (0, 0.0))
        count = min(count + 1, _WINDOW_DEPARTURES)
        self._stays[size] = count, mean + (steps - mean) / count

    def step(self) -> None:
        """Advance by one step."""
        self._steps = min(self._steps + 1, _WINDOW_STEPS)
        self.per_step += (self._left - self.per_step) / self._steps
        self._left = 0

    def stay_steps(self, kv_tokens: int) -> float | None:
        """Return the mean stay of requests of about that size; None before the first departure.

        A size that never left is taken for the nearest one that did, of two the smaller.
        """
        if not self._stays:
            return None
        size = kv_tokens.bit_length()
        nearest = min(self._stays, key=lambda known: (abs(known - size), known))
        return self._stays[nearest][1]


_Arguments = TypeVarTuple("_Arguments")


class BoundRequest(NamedTuple):
    """A request that is bound to a rank.

    Attributes:
        request: Its id.
        rank: Its rank.
        kv_tokens: KV tokens that it holds.
        slots: Its sequences.
        age: Tokens that each sequence has emitted, on this rank and before.
        started: Whether it is in the rank's batch.
    """

    request: RequestId
    rank: RankId
    kv_tokens: int
    slots: int
    age: int
    started: bool


class Follower(Protocol):
    """Receives every change of a ledger; `Projection` says what each of them means."""

    ranks: int

    def clear(self) -> None:
        """Remove all requests."""
        ...

    def bind(
        self, request: RequestId, rank: RankId, kv_tokens: int, age: int, sequences: int = 1
    ) -> None:
        """Add a request."""
        ...

    def start(self, request: RequestId) -> None:
        """Let a request grow with the steps."""
        ...

    def emit(self, request: RequestId, tokens: int) -> None:
        """Correct the tokens of a request."""
        ...

    def unbind(self, request: RequestId) -> None:
        """Remove a request."""
        ...

    def step(self) -> None:
        """Advance by one step."""
        ...

    def check(self) -> None:
        """Recount and assert."""
        ...


class _Binding(Struct):
    rank: RankId
    slots: int
    kv_tokens: int  # At `since_step` if started, else now.
    base: int  # KV tokens at age 0.
    since_step: int | None = None


class Ledger:
    """Loads and counts of G ranks.

    Args:
        ranks: G.
        projection: Receives every change; None if the policy does not look ahead.
        on_failure: Called with what the projection raised; None lets the exception propagate.

    Attributes:
        projection: As given, until it fails; then None.
        loads: int64[G], KV tokens of the bound requests.
        bound: int64[G], slots of the requests that each rank was sent and has not ended.
        started: int64[G], slots of those that are in the rank's batch.
        arriving: int64[G], KV tokens of those that are not.
        turnover: How fast they leave.
    """

    def __init__(
        self,
        ranks: int,
        projection: Follower | None = None,
        *,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.loads: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.bound: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.started: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.arriving: NDArray[np.int64] = np.zeros(ranks, np.int64)
        # The same memory: to change one number by way of it takes less than half the time.
        self._loads, self._bound = self.loads.data, self.bound.data
        self._started, self._arriving = self.started.data, self.arriving.data
        self.turnover = Turnover()
        self.projection = projection
        self._on_failure = on_failure
        self._step = 0
        self._bindings: dict[RequestId, _Binding] = {}

    def __len__(self) -> int:
        """Return the number of bound requests."""
        return len(self._bindings)

    def bind(
        self, request: RequestId, rank: RankId, kv_tokens: int, *, age: int = 0, slots: int = 1
    ) -> None:
        """Add `request` to `rank`; `age` is how many tokens each sequence emitted before."""
        assert request not in self._bindings, f"request {request} is bound twice"
        # Counted from its dispatch and not from its first step: the next decision has to see
        # requests whose KV cache is still in transfer.
        self._bindings[request] = _Binding(rank, slots, kv_tokens, kv_tokens - age * slots)
        self._loads[rank] += kv_tokens
        self._arriving[rank] += kv_tokens
        self._bound[rank] += slots
        if self.projection is not None:
            self._notify(self.projection.bind, request, rank, kv_tokens, age, slots)

    def start(self, request: RequestId) -> None:
        """Note that `request` joined its rank's batch: from now on it grows with the steps."""
        # Until then its KV cache is on the way: a step gives it no token.
        binding = self._bindings[request]
        assert binding.since_step is None, f"request {request} started twice"
        binding.since_step = self._step
        self._started[binding.rank] += binding.slots
        self._arriving[binding.rank] -= binding.kv_tokens
        if self.projection is not None:
            self._notify(self.projection.start, request)

    def step(self) -> None:
        """Give every started request one more token per slot."""
        self._step += 1
        # All ranks take each step together, at the barrier, so one clock serves every request.
        self.loads += self.started
        self.turnover.step()
        if self.projection is not None:
            self._notify(self.projection.step)

    def emit(self, request: RequestId, tokens: int) -> None:
        """Correct one request's tokens by `tokens`, which may be negative."""
        # The steps assume one token per slot; speculative decoding emits more, a stalled slot none.
        binding = self._bindings[request]
        binding.kv_tokens += tokens
        self._loads[binding.rank] += tokens
        self._arriving[binding.rank] += tokens * (binding.since_step is None)
        if self.projection is not None:
            self._notify(self.projection.emit, request, tokens)

    def kv_tokens(self, request: RequestId) -> int:
        """KV tokens that `request` holds now."""
        return self._tokens(self._bindings[request])

    def unbind(self, request: RequestId) -> int:
        """Release the slots and the load of `request`; return the KV tokens it held."""
        # Also for a request that never started, as its slots were reserved since the dispatch.
        binding = self._bindings.pop(request)
        tokens = self._tokens(binding)
        self._loads[binding.rank] -= tokens
        self._bound[binding.rank] -= binding.slots
        if binding.since_step is None:
            self._arriving[binding.rank] -= tokens
        else:
            self._started[binding.rank] -= binding.slots
            self.turnover.leave(binding.base, self._step - binding.since_step)
        if self.projection is not None:
            self._notify(self.projection.unbind, request)
        return tokens

    def requests(self) -> list[BoundRequest]:
        """Return the bound requests, in the order of their binding. O(requests)."""
        found: list[BoundRequest] = []
        for request, binding in self._bindings.items():
            tokens, slots = self._tokens(binding), binding.slots
            age, started = (tokens - binding.base) // slots, binding.since_step is not None
            found.append(BoundRequest(request, binding.rank, tokens, slots, age, started))
        return found

    def check(self) -> None:
        """Recount everything from the bindings and assert that nothing drifted. O(requests)."""
        loads = np.zeros_like(self.loads)
        bound = np.zeros_like(self.bound)
        started = np.zeros_like(self.started)
        arriving = np.zeros_like(self.arriving)
        for binding in self._bindings.values():
            loads[binding.rank] += self._tokens(binding)
            bound[binding.rank] += binding.slots
            started[binding.rank] += binding.slots * (binding.since_step is not None)
            arriving[binding.rank] += self._tokens(binding) * (binding.since_step is None)
        assert np.array_equal(loads, self.loads), f"loads {self.loads}, recounted {loads}"
        assert np.array_equal(bound, self.bound), f"bound {self.bound}, recounted {bound}"
        assert np.array_equal(started, self.started), f"started {self.started}, got {started}"
        assert np.array_equal(arriving, self.arriving), f"{self.arriving} arrive, got {arriving}"
        if self.projection is not None:
            self.projection.check()

    def fail(self, what: str, error: Exception) -> None:
        """Report a failure and drop the projection, which may have failed in mid-change."""
        self.projection = None
        if self._on_failure is None:
            raise error
        self._on_failure(what, error)

    def _notify(self, change: Callable[[*_Arguments], None], *args: *_Arguments) -> None:
        try:
            change(*args)
        # Any exception: a projection calls the predictor, which may be third-party code.
        except Exception as error:
            self.fail("projection", error)

    def _tokens(self, binding: _Binding) -> int:
        if binding.since_step is None:
            return binding.kv_tokens
        return binding.kv_tokens + binding.slots * (self._step - binding.since_step)

"""The decode ranks: their loads (the ledger), which are open, and a policy's view of them."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import and_
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVarTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from balanceroute.proxy.core.config import UNLIMITED, SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Action,
    Event,
    ForeignLoad,
    PrefillerId,
    RankId,
    RequestId,
)
from balanceroute.proxy.core.steps import LearnedSpeeds
from balanceroute.proxy.core.waiting import Pool, PoolEntry
from balanceroute.proxy.core.warm_up import WarmUp, allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.core.rank_memory import Keeping, RankMemory


# KV tokens and slots per decode rank: the only writer of load.
#
# The ledger mirrors the decode engines: a request is *bound* when it is sent to a rank and
# *started* once it is in the rank's batch; a started request gains one KV token per slot and
# step. Started requests are not touched one by one: a rank's load grows by its started slots, and
# a request's own tokens follow from the step clock. So a step costs O(ranks), whatever the batch.
#
# A policy that looks ahead has a `Projection`, which the ledger updates with the same changes. A
# projection that raises gets no further update. The ledger's own counts are updated first, so
# they stay right.


# How fast a fleet's slots turn over, and how long requests of a size stay.

# Steps that the rate covers: some 50 departures with 8 ranks x 16 slots on the Mooncake trace.
_WINDOW_STEPS = 128
# Departures that the stay of a size covers.
_WINDOW_DEPARTURES = 32


class Turnover:
    """Requests that leave a fleet: means at first, exponential averages later.

    It counts departures, not admissions. In steady state they are as many, but the admissions that
    fill an empty fleet say nothing about how long requests stay.
    """

    def __init__(self) -> None:
        self.per_step = 0.0  # Requests that leave in a step; 0 before the first step.
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
    request: RequestId
    rank: RankId
    kv_tokens: int  # KV tokens that it holds.
    slots: int  # Its sequences.
    age: int  # Tokens that each sequence has emitted, on this rank and before.
    started: bool  # Whether it is in the rank's batch.


class Follower(Protocol):
    """Receives every change of a ledger; `Projection` says what each of them means."""

    ranks: int

    def clear(self) -> None: ...
    def bind(
        self, request: RequestId, rank: RankId, kv_tokens: int, age: int, sequences: int = 1
    ) -> None: ...
    def start(self, request: RequestId) -> None: ...
    def emit(self, request: RequestId, tokens: int) -> None: ...
    def unbind(self, request: RequestId) -> None: ...
    def step(self) -> None: ...
    def check(self) -> None: ...


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
        on_failure: Called with the projection's exception; None lets it propagate.
    """

    def __init__(
        self,
        ranks: int,
        projection: Follower | None = None,
        *,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        # int64[G], KV tokens of the bound requests.
        self.loads: NDArray[np.int64] = np.zeros(ranks, np.int64)
        # int64[G], slots of the requests that each rank was sent and has not ended.
        self.bound: NDArray[np.int64] = np.zeros(ranks, np.int64)
        # int64[G], slots of those that are in the rank's batch.
        self.started: NDArray[np.int64] = np.zeros(ranks, np.int64)
        # int64[G], KV tokens of those that are not.
        self.arriving: NDArray[np.int64] = np.zeros(ranks, np.int64)
        # The same memory: to change one number by way of it takes less than half the time.
        self._loads, self._bound = self.loads.data, self.bound.data
        self._started, self._arriving = self.started.data, self.arriving.data
        self.turnover = Turnover()  # How fast they leave.
        self.projection = projection  # As given, until it fails; then None.
        self._on_failure = on_failure
        self._step = 0
        self._bindings: dict[RequestId, _Binding] = {}

    def __len__(self) -> int:
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


# The interface of a policy: its inputs, its result, and the rules for it.
#
# A new policy is one new file here and a line in the registry: a class with the members of
# `Policy`, or only a choice of rank for `OldestFirst`. A policy never uses a clock, a socket, a
# log or an unseeded generator.


class Fleet(Struct, eq=False):
    """The decode ranks as a policy sees them.

    The policy owns this copy and may write to it, except to `is_open`.
    """

    is_open: NDArray[np.bool_]  # bool[G], whether each rank takes new requests.
    # int64[G], KV tokens of the bound requests, and of foreign ones, which this scheduler did not send.
    loads: NDArray[np.int64]
    bound: NDArray[np.int64]  # int64[G], slots of the same.
    # int64[G], slots that are still free, at least 0; 0 if the rank is closed.
    free_slots: NDArray[np.int64]
    free_kv_tokens: NDArray[np.int64]  # int64[G], KV tokens that still fit.
    # Returns the bound requests, in O(requests); without those of this round.
    requests: Callable[[], list[BoundRequest]] = list
    # How fast requests leave the ranks. Read-only.
    turnover: Turnover = field(default_factory=Turnover)
    # float64[G], KV tokens that each rank reads in the same time, 1 on average; None if all are
    # equally fast.
    speeds: NDArray[np.float64] | None = None
    # Admits an entry to a rank, and returns the KV tokens that then still fit; None if an entry takes
    # its `kv_tokens` of them.
    room_after: Callable[[int, PoolEntry], int] | None = None
    # int64[G], KV tokens of foreign requests; None if there are none.
    foreign_kv_tokens: NDArray[np.int64] | None = None
    # The tokens of prompts that are on the ranks; None if the scheduler remembers none.
    keeping: "Keeping | None" = None
    # Whether a rank without a free slot closes: under a policy that binds early, only a rank with a
    # window runs out of slots.
    closes: bool = False

    @property
    def free(self) -> int:
        # `ndarray.sum` takes ten times as long for a few ranks.
        return sum(self.free_slots.tolist())

    def share(self, slots: NDArray[np.int64], kv_tokens: NDArray[np.int64]) -> None:
        """Add foreign requests to the loads; `free_slots` counts them already.

        Args:
            slots: int64[G], their slots.
            kv_tokens: int64[G], their KV tokens.
        """
        self.foreign_kv_tokens = kv_tokens
        self.loads += kv_tokens
        self.bound += slots
        self.free_kv_tokens = self.free_kv_tokens - kv_tokens

    def room(self, rank: int) -> int:
        """Return the KV tokens of the largest request that fits on `rank`; slots do not count.

        A request larger than a whole rank may go to an empty one: it fails there with the engine's
        own error instead of waiting for ever.
        """
        return int(self.free_kv_tokens[rank]) if self.bound[rank] else UNLIMITED

    def allowed(self, entry: PoolEntry) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank is open, can serve the entry and need not be avoided.

        Room does not count. Read-only.
        """
        # Almost every entry; the rest is Python code per rank.
        if not entry.restricted:
            return self.is_open
        is_open = self.is_open
        if entry.ranks is not None:
            is_open = is_open & self.able(entry.ranks)
        return np.array(allowed(is_open.tolist(), entry.lost_on))

    def able(self, ranks: frozenset[RankId]) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank is one of `ranks`."""
        return np.array([rank in ranks for rank in range(len(self.is_open))], np.bool_)

    def has_room(self, entry: PoolEntry) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank is open, able, and has a slot and memory for an entry.

        One slot is enough: further sequences of the request wait in the engine. Read-only.
        """
        slots, memory = self.free_slots, self.free_kv_tokens
        if slots[slots.argmin()] > 0 and memory[memory.argmin()] >= entry.kv_tokens:
            room = self.is_open  # All of them are.
        else:
            # An empty rank takes any request, see `room`.
            room = (slots > 0) & ((memory >= entry.kv_tokens) | (self.bound == 0))
        return room if entry.ranks is None else room & self.able(entry.ranks)

    def open_to(self, entry: PoolEntry) -> NDArray[np.bool_]:
        """Return bool[G], whether each rank has room for an entry and need not be avoided."""
        if not entry.lost_on:
            return self.has_room(entry)
        return self.has_room(entry) & self.allowed(entry)

    def bind(self, rank: int, entry: PoolEntry) -> None:
        self.loads[rank] += entry.kv_tokens
        self.bound[rank] += entry.slots
        # A request of several sequences may need more slots than are free.
        self.free_slots[rank] = max(0, int(self.free_slots[rank]) - entry.slots)
        if self.closes:
            self.is_open[rank] &= self.free_slots[rank] > 0
        if self.room_after is None:
            self.free_kv_tokens[rank] -= entry.kv_tokens
        else:
            room = self.room_after(rank, entry)
            shared = self.foreign_kv_tokens
            self.free_kv_tokens[rank] = room if shared is None else room - int(shared[rank])


@dataclass(frozen=True, slots=True)
class FleetState:
    """The state of the fleet by which `LocalPrefill` decides where a prompt is computed."""

    prefillers: "Sequence[PrefillerId]"  # Those that are open and can serve the request.
    waiting_slots: int  # Slots that the requests in the pool need.
    # int64[G]; 0 on a rank that is closed or cannot serve the request.
    free_slots: NDArray[np.int64]
    loads: NDArray[np.int64]  # int64[G], KV tokens.
    bound: int  # Requests that the ranks have.
    departures_per_step: float  # Requests that leave the ranks in a step.


def lowest(values: NDArray[np.int64] | NDArray[np.float64], among: NDArray[np.bool_]) -> int | None:
    """Return the rank in `among` with the lowest value; on a tie the lowest rank. None if empty."""
    # The usual case needs no copy; `argmin` returns the first of equal values.
    if among.all():
        return int(values.argmin())
    if not among.any():
        return None
    return int(np.where(among, values, UNLIMITED).argmin())


class Assignment(NamedTuple):
    request: RequestId
    rank: RankId


class Policy(Protocol):
    """Decides which pooled requests go to which ranks."""

    @property
    def slots_beyond_batch(self) -> int | None:
        """How many slots beyond its batch limit a rank may get; None for any number.

        0 means late binding: a request stays in the pool until a slot is free. None means early
        binding: a request is sent at once and queues in the engine.
        """
        ...

    @property
    def projection(self) -> Follower | None:
        """Receives the changes of the ledger for this policy, usually a projection; None for nothing."""
        ...

    @property
    def next_decision_ns(self) -> int | None:
        """When to decide again if nothing happens before, as of the last `dispatch`; None for never.

        A policy may hold an entry that it could admit: a `Tick` at this time ends the hold.
        """
        ...

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Return the admissions to make now, and take each admitted entry out of `pool`.

        Called at each tick at which the pool is not empty. May return none. An entry may only go to
        a rank that is open to it (`Fleet.open_to`, after the admissions before it).
        """
        ...


# Slots of a decode rank that several schedulers send to, as two proxies do during an update.
#
# The engine's counts show how many of its requests are **foreign**: another scheduler sent them. Each
# scheduler stays within a limit of its own, so that together they fill the rank and not more:
#
# - While foreign requests have half of the batch or more, it takes what is free, and keeps what it has up
#   to half.
# - While they have less, it leaves as many slots free as they have, up to an eighth of the batch. So their
#   share can double with every reading until it is half. No request is preempted: slots pass over as
#   requests end.
# - Two schedulers that fill the same free slots see each other only at the next reading, so each takes
#   half of them at a time.
# - One slot is always its own, unless it leads. Without it a new scheduler would have none while the rank
#   is full, and the other one would not see that it wants one.
#
# A scheduler that is alone has no limit but the batch.

# Of the batch: the most slots left free for foreign requests.
_GIVEN_SHARE = 1 / 8
_NO_LIMIT = 1 << 62


class ForeignRequests:
    """The requests on each of G ranks that this scheduler did not send."""

    def __init__(self, ranks: int) -> None:
        # int64[G], their slots.
        self.slots: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.kv_tokens: NDArray[np.int64] = np.zeros(ranks, np.int64)  # int64[G], what those hold.
        # int64[G], the slots that this scheduler's requests may have.
        self.limits: NDArray[np.int64] = np.full(ranks, _NO_LIMIT)

    def update(self, event: ForeignLoad, *, batch: int, own: int, leads: bool) -> None:
        """Note the foreign requests of a rank.

        Args:
            own: Slots of this scheduler's requests there.
            leads: See `SchedulerConfig`.
        """
        rank = event.rank
        self.slots[rank], self.kv_tokens[rank] = event.slots, event.kv_tokens
        limit = max(0, batch - event.slots) if leads else own_limit(batch, event.slots, own)
        self.limits[rank] = limit if event.slots else _NO_LIMIT

    def grow(self, ranks: int) -> None:
        """Follow a larger number of ranks; the new ones have none."""
        new = ForeignRequests(ranks - len(self.slots))
        self.slots = np.concatenate([self.slots, new.slots])
        self.kv_tokens = np.concatenate([self.kv_tokens, new.kv_tokens])
        self.limits = np.concatenate([self.limits, new.limits])


def own_limit(batch: int, foreign: int, own: int) -> int:
    """Return the slots of a rank that this scheduler's requests may have, at least 1.

    Args:
        batch: Slots of the rank.
        foreign: Slots of foreign requests, at least 1.
        own: Slots of this scheduler's requests now.
    """
    limit = batch - foreign
    fair = batch // 2
    if foreign < fair:
        most = max(1, int(batch * _GIVEN_SHARE))
        limit -= min(foreign, most, fair - foreign)
    else:
        limit = max(limit, min(own, fair))
    if limit > own:
        limit = own + (limit - own + 1) // 2
    return max(1, limit)


_NONE = np.zeros(1, np.int64)  # NumPy makes an array of a number at each call.


class Ranks:
    """G ranks; all are open at first.

    Args:
        config: Their number, and whether to learn their speeds.
        memory: The blocks of earlier prompts on them; None if no part asks.
    """

    def __init__(self, config: SchedulerConfig, memory: "RankMemory | None" = None) -> None:
        self._memory = memory
        # bool[G], whether each takes new requests.
        self.is_open: NDArray[np.bool_] = np.ones(config.ranks, np.bool_)
        self._all_open = True
        # None if this scheduler alone sends to the ranks.
        self.foreign: ForeignRequests | None = None
        self._unlimited: NDArray[np.int64] = np.full(config.ranks, UNLIMITED)
        self._batch = _batch_limits(config)
        self._learned = _learned(config)
        # By rank, whether it has given a first token since it began.
        self.proved = [False] * config.ranks
        self.warm_up = WarmUp()  # The windows of those that began lately.

    def set_open(self, rank: RankId, is_open: bool) -> None:
        """Let a rank take new requests, or none; those that are bound to it continue.

        Raises:
            LifecycleError: The rank is unknown.
        """
        self._check_known(rank)
        self.is_open[rank] = is_open
        self._all_open = bool(self.is_open.all())
        if not is_open:
            self.proved[rank] = False
            self.warm_up.end(rank)

    def begin(self, rank: RankId, *, grows: bool, on_trial: bool) -> None:
        """Give an open rank a window, unless all ranks are as new as it is; see `WarmUp`.

        Args:
            grows: Whether the window grows; else the first token ends it.
            on_trial: Give it a window even if no other rank has proved itself.
        """
        if on_trial or any(map(and_, self.proved, self.is_open.tolist())):
            self.warm_up.begin(rank, grows=grows)
        self.proved[rank] = False

    def is_proved(self, rank: RankId) -> bool:
        """Return whether a rank that was opened with a window has answered anything since."""
        return self.proved[rank] or self.warm_up.width(rank) != 1

    def saw(self, event: Event, actions: "Sequence[Action]") -> None:
        """Follow the requests on their way to ranks with a window."""
        self.warm_up.saw(event, actions, self._batch.tolist())

    def shared(self, event: ForeignLoad, ledger: Ledger, config: SchedulerConfig) -> None:
        """Note the foreign requests of a rank.

        Raises:
            LifecycleError: The rank is unknown.
        """
        rank = event.rank
        self._check_known(rank)
        if self.foreign is None:
            self.foreign = ForeignRequests(len(self.is_open))
        limits = config.rank_batch_limits
        batch = config.batch_limit if limits is None else limits[rank]
        own = int(ledger.bound[rank])
        self.foreign.update(event, batch=batch, own=own, leads=config.leads)
        if not self.foreign.slots.any():
            self.foreign = None

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Follow another configuration, with as many ranks or more; the new ones are open."""
        new = np.ones(config.ranks - len(self.is_open), np.bool_)
        self.is_open = np.concatenate([self.is_open, new])
        self._all_open = bool(self.is_open.all())
        self.proved += [False] * len(new)
        if self.foreign is not None:
            self.foreign.grow(config.ranks)
        self._unlimited = np.full(config.ranks, UNLIMITED)
        self._batch = _batch_limits(config)
        learned = _learned(config)
        # The learned speeds of the same ranks stay.
        if len(new) or learned is None or self._learned is None:
            self._learned = learned

    def step(self, duration_ns: int | None, ledger: Ledger) -> None:
        if self._learned is not None and duration_ns is not None:
            # A rank does not read a KV cache that is on its way yet.
            self._learned.observe(ledger.loads - ledger.arriving, duration_ns)

    def corrected(self, tokens: int) -> None:
        """Note that a request was off the steps by so many tokens."""
        # It was paused, or emits another number of tokens a step.
        if tokens < 0 and self._learned is not None:
            self._learned.fell_behind()

    def speeds(self, config: SchedulerConfig) -> "NDArray[np.float64] | None":
        """Return float64[G], the ranks' speeds, 1 on average; None if all are equally fast."""
        if config.rank_speeds is None:
            return None if self._learned is None else self._learned.speeds
        speeds = np.array(config.rank_speeds)
        return np.asarray(speeds / speeds.mean())

    def loads_at_mean_speed(self, ledger: Ledger, config: SchedulerConfig) -> "NDArray[np.int64]":
        """Return int64[G], the KV tokens that a rank of mean speed would read in each rank's time."""
        speeds = self.speeds(config)
        return ledger.loads if speeds is None else np.rint(ledger.loads / speeds).astype(np.int64)

    @property
    def open(self) -> int:
        return int(self.is_open.sum())

    def fleet(self, ledger: Ledger, config: SchedulerConfig, beyond_batch: int | None) -> Fleet:
        """Return the ranks as a policy sees them.

        Args:
            beyond_batch: Slots beyond the batch limit that a rank may get; None for any number.
        """
        if beyond_batch is None:
            free_slots = self._unlimited.copy()
        else:
            free_slots = self.free_slots(ledger, beyond_batch)
        speeds = self.speeds(config)
        if self.warm_up.active:
            speeds = self._warm(free_slots, ledger, speeds)
        if not self._all_open:
            free_slots *= self.is_open
        # Early binding ignores memory as well: a request that does not fit queues in the engine.
        if config.rank_kv_tokens is None or beyond_batch is None:
            free_kv_tokens = self._unlimited.copy()
        else:
            free_kv_tokens = config.rank_kv_tokens - ledger.loads
        # Copies: the policy may write to them while it decides.
        closes = beyond_batch is None and self.warm_up.active
        fleet = Fleet(
            self.is_open & (free_slots > 0) if closes else self.is_open,
            ledger.loads.copy(),
            ledger.bound.copy(),
            free_slots,
            free_kv_tokens,
            ledger.requests,
            ledger.turnover,
            speeds,
            closes=closes,
        )
        if self.foreign is not None:
            fleet.share(self.foreign.slots, self.foreign.kv_tokens)
        if self._memory is not None:
            fleet.keeping = self._memory.keeping(config.ranks, self.open)
        return fleet

    def _warm(
        self,
        free_slots: "NDArray[np.int64]",
        ledger: Ledger,
        speeds: "NDArray[np.float64] | None",
    ) -> "NDArray[np.float64] | None":
        """Limit ranks with a window to it; return the speeds that go with their shares.

        A rank that may have a quarter of the requests of the mean warm rank counts as one of a quarter of
        its speed: so it gets a quarter of the tokens, and not the largest prompts for being the emptiest.
        """
        if not self.warm_up.binds(self.is_open.tolist()):
            return speeds
        shares = np.ones(len(self.is_open)) if speeds is None else speeds.copy()
        warm = self.is_open.copy()
        warm[list(self.warm_up.instances)] = False
        usual = max(1.0, float(ledger.bound[warm].mean()))
        for rank in self.warm_up.instances:
            room = self.warm_up.room(rank) or 0
            free_slots[rank] = min(int(free_slots[rank]), room)
            shares[rank] *= min(1.0, (int(ledger.bound[rank]) + max(1, room)) / usual)
        return np.asarray(shares / shares.mean())

    def free_slots(self, ledger: Ledger, beyond_batch: int) -> "NDArray[np.int64]":
        """Return the free slots, int64[G], of open and closed ranks."""
        # One free slot admits a request of several, which may leave a rank overbooked.
        slots = self._batch
        if self.foreign is not None:
            slots = np.minimum(slots, self.foreign.limits)
        if beyond_batch:
            slots = slots + beyond_batch
        slots = slots - ledger.bound
        return np.maximum(slots, _NONE, out=slots)

    def _check_known(self, rank: RankId) -> None:
        if not 0 <= rank < len(self.is_open):
            raise LifecycleError(f"rank {rank} is unknown: there are {len(self.is_open)}")


def repeated(speeds: tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return the speed of each rank: the given ones in turn; () if there are none."""
    return tuple(speeds[rank % len(speeds)] for rank in range(ranks)) if speeds else ()


def _batch_limits(config: SchedulerConfig) -> "NDArray[np.int64]":
    """Return the batch limit of each rank, int64[G]."""
    limits = config.rank_batch_limits
    return np.full(config.ranks, config.batch_limit) if limits is None else np.array(limits)


def _learned(config: SchedulerConfig) -> LearnedSpeeds | None:
    """Return a learner of the speeds; None if the configuration does not ask, or there is one rank."""
    asked = config.learn_speeds and config.rank_speeds is None
    return LearnedSpeeds(config.ranks) if asked and config.ranks > 1 else None

"""The resources of requests: how the scheduler takes and releases them, and the effects of KV leases.

A queued request holds its place in a queue, a prefilling one the budget of a prefiller, a pooled one
its place in the pool, and a decoding one slots and KV tokens of a rank. The prefiller's budget stays
charged until the KV cache has left it.
"""

from collections.abc import Collection, Iterable, Mapping
from math import ceil, exp, inf, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.config import UNLIMITED, SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    PrefillerId,
    PrefillLost,
    RankId,
    ReleasePrefill,
    RequestId,
)
from balanceroute.proxy.core.lifecycle import LifecycleState, Request, Trigger
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.prefill.budgets import Pairs
from balanceroute.proxy.core.ranks import Ledger
from balanceroute.proxy.core.steps import StepModel
from balanceroute.proxy.core.waiting import Pool, PoolEntry, PrefillQueue
from balanceroute.proxy.core.warm_up import with_loss

if TYPE_CHECKING:
    from balanceroute.proxy.core.fair_queueing import KvMeter

# The effects of KV leases: how many prefilled requests to hold, and the cost of a late entry.
#
# **Pool limit.** What the ranks admit in a sixth of a lease, and in 10 s at most. A policy then has
# enough to choose from. In order of arrival no entry waits for longer, so an entry that the policy
# passes over has most of its lease left. A deeper pool only holds more memory of the prefillers.
# Running prefills count too, so the limit grows by what the ranks admit during a prefill, up to twice.
#
# A **deep** pool is what they admit in half of the usable lease, and in 15 s at most. It is for clients
# that get their first token when the prefill ends: they do not wait for a place in the pool. With half
# of the lease most entries find a rank that they fit before they are late; with more, late entries and
# repeated prefills prevail. Before two windows of departures the rate is a guess: each slot is left once
# in the usable lease, or as often as in the first window, which counts too few. Without a guess the
# pool would grow only after that, and the first minute's clients would wait. The guess may be more than
# prefillers hold, so until then each takes a share of the least memory that a prefill engine reports, if
# any does.
#
# **Late entries.** An entry is late after three quarters of its lease. The scheduler then forces it into
# the rank where it costs least, or lets its lease end and has it prefilled again, whichever costs less
# rank time:
#
# * Forced with an overflow of x tokens, it lengthens every step by b x at first, until the rank has
#   shed the overflow. A rank sheds r tokens per step, those of the requests that leave it. So the sum
#   over the steps is b x^2 / 2r, and all G ranks wait that long.
# * Prefilled again, it takes its service time s from one of P prefillers, which feeds G / P ranks. Other
#   requests need the share u of that time, in which the prefiller is busy: u s G / P. The entry also
#   comes later, by the wait for a prefiller, its service and possibly another lease; it has one of B
#   slots, so a delay of d counts d / B.
#
# So forcing costs less up to x = sqrt(2 r cost / (G b)).

# The measured pace of a deployment: its steps, departures and prefills.
#
# `Leases` derives the costs of a lapsed lease and the depth of the pool from it. The scheduler measures,
# so that the live proxy and the simulator do it alike.

# Steps and prefills that the means cover: with 8 ranks x 16 slots on the Mooncake trace some 400
# departures, and with its prompts ten seconds of a prefiller at 5 us per token.
_WINDOW_STEPS = 1_024
_WINDOW_PREFILLS = 128
# The weights of a full window and of two: 1 - 1/e, 1 - 1/e^2.
_FULL, _TWICE_FULL = 0.63, 0.86


class Pace:
    """Measures one scheduler.

    Args:
        window_ns: Time that the rate of departures covers. Only time in which requests wait for a rank
            counts: in any other the rate is that of the arrivals, not what the ranks can serve.
    """

    def __init__(self, window_ns: int) -> None:
        self.step_model = StepModel()  # The cost of a token in a step.
        self._window_ns = window_ns
        # Departures and the time that they took; both decay.
        self._left = self._span_ns = 0.0
        self._since_ns: int | None = None
        self._waiting = False
        self._steps = self._left_tokens = 0.0
        # Prefills that run, each with its prefiller, its tokens and its start.
        self._running: dict[RequestId, tuple[PrefillerId, int, int]] = {}
        # How many of them each prefiller has that has any.
        self._running_on: dict[PrefillerId, int] = {}
        self._prefilled_tokens = self._prefills = self._prefill_ns = 0.0
        # Time in which each prefiller was busy, summed, and the time that passed; both decay.
        self._busy_ns = self._passed_ns = 0.0
        self._accounted_ns: int | None = None

    def left(self, kv_tokens: int) -> None:
        """Note that a request left its rank, which held `kv_tokens` of it."""
        self._left += self._waiting
        self._left_tokens += kv_tokens

    def step(self, duration_ns: int | None, loads: NDArray[np.int64]) -> None:
        """Note a step of all ranks, and int64[G], their KV tokens after it."""
        self._steps = (1 - 1 / _WINDOW_STEPS) * self._steps + 1
        self._left_tokens *= 1 - 1 / _WINDOW_STEPS
        if duration_ns is not None:
            # A third of the time of `max`.
            self.step_model.observe(loads.item(loads.argmax()), duration_ns)

    def tick(self, now_ns: int, *, waiting: bool) -> None:
        """Note a tick; `waiting` is whether requests wait in the pool after it."""
        if self._since_ns is None:
            self._since_ns = now_ns
        passed_ns = now_ns - self._since_ns if self._waiting else 0
        keep = exp(-passed_ns / self._window_ns)
        self._left *= keep
        # The integral of the weights, so that a steady rate is measured without bias.
        self._span_ns = keep * self._span_ns + self._window_ns * (1 - keep)
        self._since_ns = now_ns
        self._waiting = waiting

    def prefill_began(
        self,
        request: RequestId,
        prefiller: PrefillerId,
        prompt_tokens: int,
        now_ns: int,
    ) -> None:
        """Note a prefill that begins.

        A direct request is none: it holds its prefiller until it ends.
        """
        self._account(now_ns)
        self._running[request] = prefiller, prompt_tokens, now_ns
        self._running_on[prefiller] = self._running_on.get(prefiller, 0) + 1

    def prefill_ended(self, request: RequestId, now_ns: int, prompt_tokens: int = 0) -> None:
        """Note the end of a prefill that computed `prompt_tokens`, 0 if it was lost."""
        if request not in self._running:
            return
        self._account(now_ns)
        prefiller, _, start_ns = self._running.pop(request)
        left = self._running_on.pop(prefiller) - 1
        if left:
            self._running_on[prefiller] = left
        if not prompt_tokens:
            return
        keep = 1 - 1 / _WINDOW_PREFILLS
        self._prefilled_tokens = keep * self._prefilled_tokens + prompt_tokens
        self._busy_ns *= keep
        self._passed_ns *= keep
        self._prefills = keep * self._prefills + 1
        self._prefill_ns = keep * self._prefill_ns + now_ns - start_ns

    @property
    def departures_per_ns(self) -> float | None:
        """Requests that leave the ranks per ns while the pool has some; None before a full window."""
        return self._rate(_FULL)

    @property
    def steady_departures_per_ns(self) -> float | None:
        """The same; None before two windows.

        Requests that filled empty ranks together leave late, so the first window counts too few.
        """
        return self._rate(_TWICE_FULL)

    @property
    def tokens_left_per_step(self) -> float | None:
        """KV tokens of the requests that leave the fleet in a step; None if unknown."""
        return self._left_tokens / self._steps if self._steps and self._left_tokens else None

    @property
    def prefill_ns_per_token(self) -> float | None:
        """Time of one prefiller for a token; None before the first prefill."""
        return self._busy_ns / self._prefilled_tokens if self._prefilled_tokens else None

    @property
    def busy_prefillers(self) -> float:
        return self._busy_ns / self._passed_ns if self._passed_ns else 0.0

    @property
    def prefill_ns(self) -> float:
        """Mean time from the start of a prefill to its end; 0 before the first."""
        return self._prefill_ns / self._prefills if self._prefills else 0.0

    @property
    def prefilling_tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self._running.values())

    def _rate(self, least_weight: float) -> float | None:
        known = self._span_ns > least_weight * self._window_ns
        return self._left / self._span_ns if known else None

    def _account(self, now_ns: int) -> None:
        """Count the time of the prefillers that were busy until now."""
        passed_ns = 0 if self._accounted_ns is None else now_ns - self._accounted_ns
        self._busy_ns += len(self._running_on) * passed_ns
        self._passed_ns += passed_ns
        self._accounted_ns = now_ns


# Leases of a request that the scheduler may let end. Then it forces the request in, so that a rank
# serves it within three leases and their prefills.
MOST_LAPSES = 2
_POOL_SHARE = 1 / 6
_LONGEST_WAIT_NS = 10_000_000_000
_DEEP_SHARE = 1 / 2
_LONGEST_DEEP_WAIT_NS = 15_000_000_000
# A choice among fewer entries costs balance at any rate.
_LEAST_POOL = 24
_POOL_PER_PREFILLER = 2


class Leases:
    """The leases of one scheduler's requests.

    Attributes:
        pace: The measurements; None if KV caches are kept for ever.
        pool_limit: As set, or as derived from the last measurement; None for no limit.
    """

    def __init__(self, config: SchedulerConfig, requests: Mapping[RequestId, Request]) -> None:
        self.pace: Pace | None = None
        self._requests = requests
        self.reconfigure(config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        self._config = config
        if config.lease_ns is None:
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(config.lease_ns)
        self.pool_limit = self._pool_limit()

    def step(self, duration_ns: int | None, loads: NDArray[np.int64]) -> None:
        """Note a step; see `Pace.step`."""
        if self.pace is not None:
            self.pace.step(duration_ns, loads)

    def prefill_began(self, request: Request, now_ns: int) -> None:
        """Note that a prefiller has begun a request, a prefill or a direct one."""
        if self.pace is not None and request.decode:
            assert request.prefiller is not None
            tokens = request.prompt_tokens
            self.pace.prefill_began(request.request, request.prefiller, tokens, now_ns)

    def prefill_ended(self, request: RequestId, now_ns: int, prompt_tokens: int = 0) -> None:
        """Note the end of a prefill, if one ran; see `Pace.prefill_ended`."""
        if self.pace is not None:
            self.pace.prefill_ended(request, now_ns, prompt_tokens)

    def tick(self, now_ns: int, *, waiting: bool) -> None:
        """Note a tick, see `Pace.tick`, and derive the limit anew."""
        if self.pace is not None:
            self.pace.tick(now_ns, waiting=waiting)
            self.pool_limit = self._pool_limit()

    def room(self, held: int) -> int:
        """Return how many prefills may start while `held` requests are in prefill or in the pool."""
        return UNLIMITED if self.pool_limit is None else self.pool_limit - held

    @property
    def prefiller_kv_tokens(self) -> int | None:
        """KV tokens that one prefiller may hold; None for no limit."""
        config, pace = self._config, self.pace
        if config.prefiller_kv_tokens is not None or not config.deep_pool:
            return config.prefiller_kv_tokens
        known = pace is not None and pace.steady_departures_per_ns is not None
        return None if known else config.prefiller_memory_tokens

    def judge(self, pool: Pool, now_ns: int) -> None:
        """Set how much overflow each late entry may cost."""
        # A deadline in the configuration holds at any cost.
        if self.pace is None or self._config.deadline_ns is not None:
            return
        for entry in pool.overdue(now_ns):
            entry.overflow_limit = self._overflow_limit(entry, self.pace)

    def _pool_limit(self) -> int | None:
        config, pace = self._config, self.pace
        if config.pool_limit is not None or config.lease_ns is None or pace is None:
            return config.pool_limit
        least = max(_LEAST_POOL, config.ranks, _POOL_PER_PREFILLER * config.prefillers)
        if config.deep_pool:
            usable_ns = config.lease_ns - lease_margin_ns(config.lease_ns, config.lease_margin_ns)
            wait_ns = min(_DEEP_SHARE * usable_ns, _LONGEST_DEEP_WAIT_NS)
            rate = pace.steady_departures_per_ns
            if rate is None:
                rate = max(self._slots / usable_ns, pace.departures_per_ns or 0.0)
        else:
            wait_ns = min(_POOL_SHARE * config.lease_ns, _LONGEST_WAIT_NS)
            rate = pace.departures_per_ns
            if rate is None:
                return least
        return max(least, ceil(rate * (wait_ns + min(wait_ns, pace.prefill_ns))))

    @property
    def _slots(self) -> int:
        limits = self._config.rank_batch_limits
        return self._config.ranks * self._config.batch_limit if limits is None else sum(limits)

    def _overflow_limit(self, entry: PoolEntry, pace: Pace) -> float:
        """Return the tokens of overflow up to which a late entry is forced in; inf if unknown."""
        config, request = self._config, self._requests[entry.request]
        token_ns, left = pace.step_model.ns_per_token, pace.tokens_left_per_step
        prefill_ns = pace.prefill_ns_per_token
        if token_ns is None or left is None or prefill_ns is None:
            return inf
        if request.lapses >= MOST_LAPSES or request.prefilled_ns is None:
            return inf
        assert entry.lease_ends_ns is not None
        service_ns = prefill_ns * entry.prompt_tokens
        queue_ns = prefill_ns * pace.prefilling_tokens / config.prefillers
        late_ns = queue_ns + service_ns + entry.lease_ends_ns - request.prefilled_ns
        needed = pace.busy_prefillers / config.prefillers
        cost_ns = needed * service_ns * config.ranks / config.prefillers
        cost_ns += late_ns / config.batch_limit
        return sqrt(2 * left / config.ranks * cost_ns / (config.ranks * token_ns))


# When a request's wait ends: before prefill, in the pool, and with its KV cache under a lease.

# Share of its usable lease after which an entry is late.
_LATE_SHARE = 0.75


def queue_end_ns(request: Request, config: SchedulerConfig) -> int | None:
    """Return when a request that waits before prefill expires; None for never."""
    ttl_ns = config.queue_ttl_ns
    return None if ttl_ns is None else request.waiting_since_ns + ttl_ns


def lease_margin_ns(lease_ns: int, margin_ns: int) -> int:
    """Return how long before the end of a lease its KV cache counts as lost.

    The margin covers the way to the rank and its pull. It is at most half of the lease: one shorter than
    the margin could never be used.
    """
    return min(margin_ns, lease_ns // 2)


def lease_used(pool: Pool, config: SchedulerConfig, now_ns: int) -> float | None:
    """Return the largest share of its usable lease that an entry has used, 0 to 1; None without leases."""
    if config.lease_ns is None:
        return None
    ends_ns = pool.first_lease_end_ns()
    if ends_ns is None:
        return 0.0
    usable_ns = config.lease_ns - lease_margin_ns(config.lease_ns, config.lease_margin_ns)
    return min(1.0, max(0.0, 1.0 - (ends_ns - now_ns) / usable_ns))


def pool_entry(request: Request, config: SchedulerConfig, pairs: Pairs) -> PoolEntry:
    since_ns = request.pooled_ns
    assert since_ns is not None
    deadline_ns = None if config.deadline_ns is None else since_ns + config.deadline_ns
    expires_ns = request.due_ns
    if config.ttl_ns is not None:
        end_ns = since_ns + config.ttl_ns
        expires_ns = end_ns if expires_ns is None else min(end_ns, expires_ns)
    lease_ends_ns = request.lease_expires_ns
    if lease_ends_ns is not None:
        assert request.prefilled_ns is not None
        left_ns = max(0, lease_ends_ns - request.prefilled_ns)
        lease_ends_ns -= lease_margin_ns(left_ns, config.lease_margin_ns)
        if deadline_ns is None:
            usable_ns = lease_ends_ns - request.prefilled_ns
            deadline_ns = request.prefilled_ns + round(_LATE_SHARE * usable_ns)
    return PoolEntry(
        request.request,
        request.ticket,
        request.prompt_tokens,
        age=request.emitted_before,
        deadline_ns=deadline_ns,
        expires_ns=expires_ns,
        lease_ends_ns=lease_ends_ns,
        lost_on=request.lost_on_ranks,
        overtaken=request.overtaken,
        since_ns=since_ns,
        # A rank that lost it, or gave it back, need not have that part any more.
        home=None if request.lost_on_ranks or request.emitted_before else request.ticket.home,
        partners=pairs.ranks_of(request.prefiller),
    )


class Resources:
    """Takes and releases the resources of one scheduler's requests."""

    def __init__(
        self,
        prefill_queue: PrefillQueue,
        prefillers: Prefillers,
        pool: Pool,
        ledger: Ledger,
        leases: Leases,
        *,
        meter: "KvMeter | None" = None,
    ) -> None:
        self.ledger = ledger  # Of the ranks; replaced when their number or the policy changes.
        self._leases = leases
        self._meter = meter
        self._prefill_queue = prefill_queue
        self._prefillers = prefillers
        self._pool = pool

    def release(self, request: Request, state: LifecycleState, *, gone: bool) -> list[Action]:
        """Release everything that `request` held in `state`; return the driver's actions.

        `gone` means that the engine has ended its part already, so there is nothing to abort.
        """
        actions: list[Action] = []
        if self._meter is not None and state is not LifecycleState.QUEUED:
            self._settle(self._meter, request, state)
        match state:  # The usual end first.
            case LifecycleState.DECODING:
                if not gone:
                    assert request.rank is not None
                    actions.append(AbortDecode(request.request, request.rank))
                    if request.prefiller is not None:
                        # No rank will pull these blocks, unless a pull is already in progress.
                        actions.append(ReleasePrefill(request.request, request.prefiller))
                self.release_prefill(request)
                self.unbind(request)
                return actions
            case LifecycleState.QUEUED:
                self._prefill_queue.remove(request)
            case LifecycleState.PREFILLING:
                assert request.prefiller is not None
                if request.decode:
                    self.end_prefill(request)
                else:
                    self._prefillers.end_direct(request.prefiller, request.ticket.slots)
                if not gone:
                    actions.append(AbortPrefill(request.request, request.prefiller))
            case LifecycleState.POOLED:
                entry = self._pool.remove(request.request)
                # For when it comes back.
                request.overtaken = entry.overtaken
                request.lapses += 1
                # No rank will pull these blocks; without the action the prefiller keeps them until
                # their lease ends.
                if request.prefiller is not None:
                    cheaper = gone and entry.overflow_limit < inf
                    actions.append(ReleasePrefill(request.request, request.prefiller, cheaper))
            case LifecycleState.DONE | LifecycleState.FAILED | LifecycleState.CANCELLED:
                raise AssertionError(f"request {request.request} ended twice")
        # After the actions, which name the prefiller.
        self.release_prefill(request)
        return actions

    def emitted(self, request: Request) -> int:
        """Return the KV tokens that a bound request holds beyond its prompt."""
        return self.ledger.kv_tokens(request.request) - request.kv_tokens()

    def end_prefill(self, request: Request) -> None:
        """Free the place of its prefill; its tokens stay charged."""
        assert request.prefiller is not None
        assert request.prefilling
        self._prefillers.end_prefill(request.prefiller)
        request.prefilling = False

    def release_prefill(self, request: Request) -> None:
        """Release its prefiller's budget, if it holds one."""
        if request.prefiller is not None:
            self._prefillers.release(request.prefiller, request.held_tokens())
            request.prefiller = None

    def bind(self, request: Request, rank: RankId) -> None:
        request.rank = rank
        _bind(self.ledger, request, rank)
        if self._meter is not None:
            self._meter.held_shares.bind(request.request, request.ticket, request.kv_tokens())

    def unbind(self, request: Request) -> None:
        """Release its slots and its load on its rank."""
        tokens = self.ledger.unbind(request.request)
        if self._meter is not None:
            self._meter.held_shares.unbind(request.request)
        # If it is decoded again, the emitted tokens are prefilled with the prompt. Of several
        # sequences it is their mean, rounded up: too high an estimate never overfills a rank.
        emitted = -(-(tokens - request.kv_tokens()) // request.ticket.slots)
        if self._leases.pace is not None:
            self._leases.pace.left(tokens)
        request.emitted_before += emitted
        request.prompt_tokens += emitted
        request.rank = None
        request.started = False

    def _settle(self, meter: "KvMeter", request: Request, state: LifecycleState) -> None:
        """Have the tenant pay for what the request held, before it is released."""
        if request.decode:
            bound = state is LifecycleState.DECODING
            held = self.ledger.kv_tokens(request.request) if bound else 0
            meter.end(request.request, request.ticket, held)
        else:
            meter.end_direct(request.request)

    def move(self, requests: Iterable[Request], ledger: Ledger) -> None:
        """Bind all bound requests in a new ledger, with the tokens that they hold in this one."""
        for request in requests:
            if request.rank is None:
                continue
            _bind(ledger, request, request.rank, emitted=self.emitted(request))
        ledger.turnover = self.ledger.turnover
        self.ledger = ledger

    def check(self, requests: Collection[Request], waiting: int) -> None:
        """Recount what requests hold, from their states, and assert that nothing leaked."""
        prefillers, pool, ledger = self._prefillers, self._pool, self.ledger
        ledger.check()
        held = [0] * len(prefillers.held_tokens)
        prefills, direct = held.copy(), held.copy()
        slots = [0] * len(ledger.bound)
        for request in requests:
            state, decodes = request.state, request.decode
            # Rule 2 of `lifecycle`: what a request holds follows from its state.
            if request.prefiller is not None:
                assert request.ticket.prefill
                held[request.prefiller] += request.held_tokens()
                prefills[request.prefiller] += request.prefilling
                direct[request.prefiller] += 0 if decodes else request.ticket.slots
            if request.rank is not None:
                slots[request.rank] += request.ticket.slots
            # A direct request holds sequences instead of a prefill.
            assert request.prefilling == (state is LifecycleState.PREFILLING and decodes)
            assert (request.rank is not None) == (state is LifecycleState.DECODING)
            assert (request.request in pool) == (state is LifecycleState.POOLED)
            assert (request in self._prefill_queue) == (state is LifecycleState.QUEUED)
            assert request.ticket.prefill or state is not LifecycleState.PREFILLING
            assert decodes or state in {LifecycleState.QUEUED, LifecycleState.PREFILLING}
        assert direct == prefillers.direct, f"{direct} != {prefillers.direct}"
        assert held == prefillers.held_tokens, f"{held} != {prefillers.held_tokens}"
        assert prefills == prefillers.prefills, f"{prefills} != {prefillers.prefills}"
        assert sum(prefills) == prefillers.prefilling
        assert slots == ledger.bound.tolist(), f"{slots} != {ledger.bound}"
        assert pool.slots == sum(entry.slots for entry in pool)
        # The count that bounds admission, derived from its complement.
        answered = sum(
            request.rank is not None
            or (request.state is LifecycleState.PREFILLING and not request.decode)
            for request in requests
        )
        assert waiting == len(requests) - answered


def _bind(ledger: Ledger, request: Request, rank: RankId, *, emitted: int = 0) -> None:
    """Bind a request with its prompt first, then with what it emitted, as a projection needs the age."""
    ledger.bind(
        request.request,
        rank,
        request.kv_tokens(),
        age=request.emitted_before,
        slots=request.ticket.slots,
    )
    if request.started:
        ledger.emit(request.request, emitted)
        ledger.start(request.request)


# A request whose engine lost it: its resources, and the instances that it avoids from then on.


def lose_prefill(
    request: Request, event: PrefillLost, resources: Resources, now_ns: int
) -> list[Action]:
    """Release the resources of a request that has to be prefilled again; the caller queues it.

    Raises:
        LifecycleError: Its rank has the KV cache already, or it has no prefill.
    """
    if request.started:
        # From the first token on the rank holds the KV cache, and its loss is a
        # `RequestRecomputed`.
        raise LifecycleError(f"request {request.request} has pulled its KV cache already")
    if not request.ticket.prefill:
        raise LifecycleError(f"request {request.request} has no prefill to lose")
    # Read first: what it holds follows from the state before the move, and `release` clears them.
    state, prefiller, rank = request.state, request.prefiller, request.rank
    request.move(Trigger.PREFILL_LOST)
    actions = resources.release(request, state, gone=True)
    if rank is not None and not event.same_rank:
        request.lost_on_ranks = with_loss(request.lost_on_ranks, rank)
    if event.elsewhere:
        assert prefiller is not None
        request.lost_on_prefillers = with_loss(request.lost_on_prefillers, prefiller)
    request.decode = request.decode and event.decode
    if request.answered:
        # The limit of the wait before prefill is for the first token.
        request.waiting_since_ns = now_ns
    return actions


def lose_decode(request: Request, resources: Resources) -> None:
    """Release the rank of a request that never joined its batch; the caller puts it in the pool.

    Raises:
        LifecycleError: It is on no rank, or in the batch.
    """
    if request.started:
        # Likewise: a request in the batch can be recomputed, but not go back to the pool as it
        # was.
        raise LifecycleError(f"request {request.request} is in its rank's batch already")
    request.move(Trigger.DECODE_LOST)
    assert request.rank is not None
    request.lost_on_ranks = with_loss(request.lost_on_ranks, request.rank)
    # Only the rank's slots: the prefiller still holds the KV cache, under the same lease.
    resources.unbind(request)


def recompute(
    request: Request, resources: Resources, now_ns: int, *, elsewhere: bool
) -> list[Action]:
    """Release the resources of a request whose rank dropped it; the caller queues it.

    Raises:
        LifecycleError: It is on no rank.
    """
    state, rank = request.state, request.rank
    request.move(Trigger.RECOMPUTE)
    actions = resources.release(request, state, gone=True)
    if elsewhere:
        assert rank is not None
        request.lost_on_ranks = with_loss(request.lost_on_ranks, rank)
        # Either end of the KV transfer may be at fault.
        if request.pulled_from is not None:
            lost_on = with_loss(request.lost_on_prefillers, request.pulled_from)
            request.lost_on_prefillers = lost_on
    # It was served in between, so a new wait begins, with new time limits.
    request.wait_anew(now_ns)
    return actions


def unpaired(requests: Mapping[RequestId, Request], pairs: Pairs) -> list[RequestId]:
    """Return the pooled requests whose KV caches no open rank can use."""
    if not pairs.limited:
        return []
    return [
        request.request
        for request in requests.values()
        if request.state is LifecycleState.POOLED
        and request.prefiller is not None
        and not pairs.feeds(request.prefiller, request.ticket.eligible)
    ]

"""The sans-IO scheduler: events in, actions out.

It owns every request's life cycle, the prefillers' budgets, the prompt pool and the decode ledger,
and asks one policy where pooled requests go. It has no socket, no clock and no loop: the live proxy
and the simulator drive the same object.

The driver's duty: feed events in order of time, then a `Tick`; perform the returned actions in
order before the next event. A tick decides admissions, so feed every event that is due before it.
If no event is due, feed a tick at `Scheduler.next_deadline_ns`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.admission import Load
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError, LifecycleError, PolicyError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
    FirstToken,
    ForeignLoad,
    InstanceEvent,
    Observer,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    PrefillLost,
    RankClosed,
    RankOpened,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.lifecycle import (
    ADMIT,
    DECODING,
    FINISH,
    PREFILLED,
    QUEUED,
    LifecycleState,
    Request,
    Trigger,
    check_ticket,
)
from balanceroute.proxy.core.policies.oldest_first import OldestFirst, least_kv_with_room
from balanceroute.proxy.core.prefill import FewestTokens, MakePrefillChoice, Prefillers
from balanceroute.proxy.core.ranks import Assignment, Fleet, FleetState, Ledger, Policy, Ranks
from balanceroute.proxy.core.resources import (
    Leases,
    Resources,
    lose_decode,
    lose_prefill,
    pool_entry,
    queue_end_ns,
    recompute,
    unpaired,
)
from balanceroute.proxy.core.waiting import (
    Fcfs,
    MakeQueueOrder,
    MakeStartOrder,
    Pool,
    PoolEntry,
    PrefillQueue,
    earliest,
)

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission.overload import Budget, FirstTokens
    from balanceroute.proxy.core.fair_queueing import FairQueueing
    from balanceroute.proxy.core.local_prefill import LocalPrefill
    from balanceroute.proxy.core.rank_memory import RankMemory

# The parts that limit, measure and charge the starts of one scheduler's requests. Each may be missing.

_Start = TypeVar("_Start")


class Intake:
    """Reports a scheduler's events to the parts that need them.

    Attributes:
        fair: Shares the starts among tenants; None for no sharing.
        meter: Replaces what `fair` charged at a start by the real cost; None if the charge is final.
        budget: Limits the requests in flight; None for no limit.
        first_tokens: Predicts times to first token; None if no part asks.
        local_prefill: Decides which prompts ranks compute; None for none.
        memory: The blocks of earlier prompts on the ranks; None if no part asks.
        follows_time: Whether the scheduler calls `advance`.
        held: Whether nothing may start; see `hold`.
        barred: Whether nothing may start because another process may decide; the driver then feeds no tick.
        queues_all: Whether the queue may also have requests that need no prefiller.
    """

    def __init__(
        self,
        *,
        fair: "FairQueueing | None" = None,
        budget: "Budget | None" = None,
        first_tokens: "FirstTokens | None" = None,
        local_prefill: "LocalPrefill | None" = None,
        memory: "RankMemory | None" = None,
    ) -> None:
        self.fair = fair
        self.meter = None if fair is None else fair.meter
        self.budget = budget
        self.first_tokens = first_tokens
        self.local_prefill = local_prefill
        self.memory = memory if local_prefill is None else local_prefill.memory
        self.follows_time = budget is not None or first_tokens is not None
        self.held = self.barred = False
        # `first_tokens` measures waits in the queue.
        self.queues_all = self.follows_time

    @property
    def observer(self) -> Observer | None:
        """Learns from every event; None if no part does."""
        return None if self.local_prefill is None else self.local_prefill.observe

    def orders(self, order: MakeQueueOrder) -> tuple[MakeStartOrder, MakeQueueOrder]:
        """Return the makers of the orders of the queues before prefill, and of the pool's order."""
        fair = self.fair
        return (order, order) if fair is None else (fair.make_order, fair.make_pool)

    def advance(self, now_ns: int, requests: int, waiting: int) -> None:
        """Note the time of an event, and the requests before it: all, and those before prefill."""
        if self.budget is not None:
            self.budget.advance(now_ns, demand=requests > 0)
        if self.first_tokens is not None:
            self.first_tokens.advance(now_ns, waiting=waiting > 0)

    def hold(self, *, held: bool) -> None:
        """Let nothing start from now on, or let it start again."""
        self.held = held
        self.queues_all = True  # From now on: some may be in the queue when the hold ends.

    def room(self, room: int, held: int, ledger: Ledger, ranks: Ranks) -> int:
        """Return how many of `room` requests may start while `held` are in prefill or in the pool."""
        if self.budget is None:
            return room
        return min(room, self.budget.room(held + len(ledger), ranks.open))

    def let(self, starts: Iterable[_Start]) -> Iterable[_Start]:
        """Return the starts that are allowed now: all, or none while held or barred."""
        return () if self.held or self.barred else starts

    def next_ns(self, waiting: int) -> int | None:
        """Return when a tick may let one of the waiting requests start; None for never."""
        return self.budget.next_tick_ns if waiting and self.budget is not None else None

    def load(self, ticket: Ticket, queue: PrefillQueue, waiting: int, requests: int) -> Load:
        """Return the load that an admission rule decides by when a request arrives."""
        if self.first_tokens is None:
            return Load(waiting)
        expected_ns = self.first_tokens.expected_ns(
            ticket.prompt_tokens, queue.ahead(ticket), early=_may_come_early(ticket)
        )
        return Load(waiting, expected_ns, idle=requests == 0)

    def left_queue(self, request: Request, now_ns: int) -> None:
        """Note that a request left the queue before prefill."""
        request.left_queue_ns = now_ns
        if self.first_tokens is not None and now_ns > request.waiting_since_ns:
            self.first_tokens.started()

    def step(self, duration_ns: int | None, loads: "NDArray[np.int64]", now_ns: int) -> None:
        """Note a decode step; `loads` are int64[G], the KV tokens of the ranks after it."""
        if self.meter is not None:
            self.meter.step(duration_ns)
        if self.budget is not None and duration_ns is not None:
            self.budget.step(duration_ns, now_ns)
        if self.local_prefill is not None and duration_ns is not None:
            self.local_prefill.step(duration_ns, int(loads.max()))

    def started(self, request: Request, ledger: Ledger, now_ns: int) -> None:
        """Note that a request joined its rank's batch."""
        if self.meter is not None:
            tokens = ledger.kv_tokens(request.request)
            self.meter.begin(request.request, request.ticket, tokens)
        self.answered(request, now_ns)

    def answered(self, request: Request, now_ns: int) -> None:
        """Note that the client of a request has its first token; later calls change nothing."""
        if request.answered:
            return
        request.begin_answer()
        if self.budget is not None:
            self.budget.first_token(now_ns - request.arrived_ns, now_ns)
        if self.first_tokens is not None and request.left_queue_ns is not None:
            left_ns = request.left_queue_ns
            prefilled_ns = left_ns if request.prefilled_ns is None else request.prefilled_ns
            if request.state is LifecycleState.PREFILLING:  # The token is the prefiller's.
                prefilled_ns = now_ns
            self.first_tokens.came(
                request.prompt_tokens,
                max(0, prefilled_ns - left_ns),
                now_ns - prefilled_ns,
                early=_may_come_early(request.ticket),
            )


def _may_come_early(ticket: Ticket) -> bool:
    """Return whether the client may get its first token from a prefiller."""
    return ticket.early_token or not ticket.decode


# One round of admissions: decided by the policy, or oldest first if it fails.
#
# A policy takes entries out of the pool while it decides. If it raises, or decides something impossible,
# the scheduler puts all of them back: a round takes effect as a whole or not at all.

OnFailure = Callable[[str, Exception], None]
"""Called with the failed part ("policy" or "projection") and the exception."""

# Without a projection or any state, so it does not fail for the same reason.
_OLDEST_FIRST = OldestFirst(least_kv_with_room, slots_beyond_batch=0)


def decide(
    policy: Policy,
    make_fleet: Callable[[], Fleet],
    pool: Pool,
    now_ns: int,
    *,
    on_failure: OnFailure,
) -> list[Assignment]:
    """Return the admissions to make now, whose entries have left the pool.

    Args:
        pool: Not empty. Restored if the policy fails.
        on_failure: Called if the policy fails. The round is then decided oldest first: each request
            goes to the least loaded rank with room.
    """
    fleet = make_fleet()
    # The policy may write to its fleet, so the check needs its own copy.
    free_slots = fleet.free_slots.copy()
    pool.begin_round()
    try:
        assignments = policy.dispatch(fleet, pool, now_ns)
        _check(assignments, free_slots, pool)
    # Any exception: a policy may be third-party code, and no request may be lost by its failure.
    except Exception as error:
        # First, as `on_failure` may raise.
        pool.undo_round()
        on_failure("policy", error)
        # Another fleet: the policy may have written to the first one.
        return _OLDEST_FIRST.dispatch(make_fleet(), pool, now_ns)
    pool.end_round()
    return assignments


def _check(assignments: Sequence[Assignment], free_slots: NDArray[np.int64], pool: Pool) -> None:
    """Reject a decision that cannot be carried out.

    Raises:
        PolicyError: An entry or a rank is unknown, a rank has no slot or cannot serve the entry, or
            an entry was taken and not assigned.
    """
    taken, ranks = pool.taken, len(free_slots)
    free: dict[int, int] = {}
    for number, rank in assignments:
        entry = taken.pop(number, None)
        if entry is None:
            raise PolicyError(f"request {number!r} was not taken from the pool, or is there twice")
        if not 0 <= rank < ranks:
            raise PolicyError(f"rank {rank!r} is unknown: there are {ranks}")
        if entry.ranks is not None and rank not in entry.ranks:
            raise PolicyError(f"rank {rank} cannot serve request {number}")
        # One free slot is enough, so the last request of a rank may take the count below 0.
        left = free[rank] if rank in free else free_slots.item(rank)
        if left < 1:
            raise PolicyError(f"rank {rank} is closed or has no slot for request {number}")
        free[rank] = left - entry.slots
    # Neither in the pool nor on a rank, such an entry would be lost.
    for number in taken:
        raise PolicyError(f"request {number} was taken from the pool, but has no rank")


__all__ = ["Scheduler", "SchedulerConfig"]

_ENDINGS = {
    RequestFinished: Trigger.FINISH,
    RequestFailed: Trigger.FAIL,
    RequestCancelled: Trigger.CANCEL,
}


class Scheduler:
    """One decode fleet, its prefillers and its pool.

    Args:
        config: The deployment and its limits. All ranks and prefillers are open at first.
        policy: Decides admissions. Not shared between schedulers: it may keep a projection.
        queue_order: Makes the order of each queue before prefill, and of the pool.
        prefill_choice: Makes the rule that chooses a request's prefiller.
        intake: Limits and measures what starts. If it shares starts among tenants, `queue_order`
            holds within each before prefill, and it makes the pool's order. None for none of it.
        on_failure: Called when the policy or its projection raises. That round is decided oldest
            first, and the projection is rebuilt for the next one. None lets the exception
            propagate; all other state stays consistent.
        observer: See `Observer`; None for none.

    Raises:
        ConfigError: The policy was made for another number of ranks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        *,
        queue_order: MakeQueueOrder = Fcfs,
        prefill_choice: MakePrefillChoice = FewestTokens,
        intake: Intake | None = None,
        on_failure: OnFailure | None = None,
        observer: Observer | None = None,
    ) -> None:
        _check_ranks(config, policy)
        self.config = config
        self.policy = policy
        self._on_failure = on_failure
        choice = prefill_choice()
        self.intake = intake = intake or Intake()
        observers = (choice.observer, intake.observer, observer)
        self._observers = [one for one in observers if one is not None]
        self.prefillers = Prefillers(
            config.prefillers,
            probe_limit=config.probe_limit,
            kv_capacity_tokens=config.prefiller_kv_tokens,
            direct_limit=config.direct_limit,
            choice=choice,
        )
        self.requests: dict[RequestId, Request] = {}
        make_order, make_pool = intake.orders(queue_order)
        meter = intake.meter
        self.pool = Pool(make_pool(), None if meter is None else meter.held_shares.held_back)
        self.prefill_queue = PrefillQueue(self.requests, self.prefillers, make_order)
        self.leases = Leases(config, self.requests)
        ledger = self._new_ledger(config, policy)
        self._resources = Resources(
            self.prefill_queue, self.prefillers, self.pool, ledger, self.leases, meter=meter
        )
        self.ranks = Ranks(config, intake.memory)
        self._handlers = _handlers_of(self)

    @property
    def ledger(self) -> Ledger:
        return self._resources.ledger

    @property
    def waiting(self) -> int:
        """Requests that no engine answers yet: queued, prefilling or pooled."""
        return self.prefill_queue.waiting + self.prefillers.prefilling + len(self.pool.entries)

    def emitted(self, number: RequestId) -> int:
        """Return the tokens that a bound request has emitted there, of all its sequences.

        Raises:
            LifecycleError: The request is unknown.
        """
        return self._resources.emitted(self._get(number))

    def free_slots(self) -> "NDArray[np.int64]":
        """Return the free slots, int64[G], of open and closed ranks; with early binding those of the batch."""
        beyond = self.policy.slots_beyond_batch or 0
        return self.ranks.free_slots(self.ledger, beyond)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Process one event and return the actions to perform, in order.

        Raises:
            LifecycleError: The request, rank or prefiller is unknown, or the request's state does
                not allow the event. Nothing was changed.
        """
        if self.intake.follows_time:
            self.intake.advance(now_ns, len(self.requests), self.prefill_queue.waiting)
        actions = self._handlers[type(event)](event, now_ns)
        for observe in self._observers:
            observe(event, actions, now_ns)
        return actions

    def next_deadline_ns(self) -> int | None:
        """Return the earliest time at which a `Tick` acts without another event; None for never.

        That is when a time to live, a KV lease or a policy's hold ends, or when the budget may
        grow. It may be in the past. Deadlines in the pool do not count: they only decide which entry
        goes first once there is room.
        """
        hold_ns = self.policy.next_decision_ns if self.pool.slots else None
        queue, budget_ns = self.prefill_queue, self.intake.next_ns(self.prefill_queue.waiting)
        return earliest(self.pool.next_removal_ns(), queue.next_expiry_ns(), hold_ns, budget_ns)

    def reconfigure(self, config: SchedulerConfig, policy: Policy) -> None:
        """Change the deployment, its limits or the policy while requests are in flight.

        The result is as if the scheduler had been configured so from the start: times to live and
        leases follow the new settings, and a projection starts with a fresh prediction for every
        request. New ranks and prefillers are open, closed ones stay closed. Feed a `Tick` next:
        there may be room for prefills and admissions.

        Args:
            config: The new configuration. Ranks and prefillers keep their ids, so their numbers can
                only grow.
            policy: A new one, made for the new configuration.

        Raises:
            ConfigError: The number of ranks or prefillers shrinks, the policy was made for another
                number of ranks, or its projection is in use already. Nothing was changed.
        """
        config.check_grown(self.config)
        _check_ranks(config, policy)
        if policy.projection is not None and policy.projection is self.policy.projection:
            # A shared projection would count every request twice.
            raise ConfigError("the policy is in use: its projection counts every request already")
        # All checks come first: a ConfigError leaves everything unchanged.
        self._resources.move(self.requests.values(), self._new_ledger(config, policy))
        self.config, self.policy = config, policy
        self.leases.reconfigure(config)
        self.ranks.reconfigure(config)
        self.prefillers.reconfigure(
            config.prefillers,
            probe_limit=config.probe_limit,
            kv_capacity_tokens=config.prefiller_kv_tokens,
            direct_limit=config.direct_limit,
        )
        # Time limits were set from the old configuration.
        for request in self.requests.values():
            if request.state is LifecycleState.POOLED:
                self.pool.replace(self._pool_entry(request))
            elif request.state is LifecycleState.QUEUED:
                self.prefill_queue.expire_at(request, queue_end_ns(request, self.config))

    def check(self) -> None:
        """Recount what requests hold, from their states, and assert that nothing leaked."""
        self._resources.check(self.requests.values(), self.waiting)

    def _get(self, number: RequestId) -> Request:
        request = self.requests.get(number)
        if request is None:
            raise LifecycleError(f"request {number} is unknown or has ended")
        return request

    # Before decode.

    def _arrive(self, event: RequestArrived, now_ns: int) -> list[Action]:
        number = event.request
        # Ids break every tie, so none may be used twice.
        if number in self.requests:
            raise LifecycleError(f"request {number} has arrived already")
        check_ticket(number, event.ticket)
        request = self.requests[number] = Request(number, event.ticket, waiting_since_ns=now_ns)
        self._queue(request, now_ns)
        return self._start_prefills(now_ns)

    def _queue(self, request: Request, now_ns: int) -> None:
        """Queue it, or pool it if it needs no prefiller and nothing limits the requests in flight."""
        if request.ticket.prefill or self.intake.queues_all:
            self.prefill_queue.add(request, queue_end_ns(request, self.config))
        else:
            self._to_pool(request, now_ns)

    def _start_prefills(self, now_ns: int) -> list[Action]:
        """Start the prefills that the budgets and the pool's depth allow."""
        if not self.prefill_queue.waiting:
            return []
        # A tick may come too late for this.
        actions = self._expire(self.prefill_queue.take_due(now_ns))
        # Requests in prefill count too: they will be in the pool soon. Each holds KV blocks under a
        # lease, so a deep pool outlasts its leases, while a request before prefill holds nothing.
        held = self.prefillers.prefilling + len(self.pool.entries)
        self.prefillers.kv_capacity_tokens = self.leases.prefiller_kv_tokens
        room = self.intake.room(self.leases.room(held), held, self._resources.ledger, self.ranks)
        for request, prefiller in self.intake.let(self.prefill_queue.start(room, now_ns)):
            self.intake.left_queue(request, now_ns)
            if prefiller is None:
                self._to_pool(request, now_ns)
                continue
            request.begin_prefill(prefiller)
            if self.prefillers.warm_up.active:
                self.prefillers.warm_up.sent(prefiller, request.request)
            self.leases.prefill_began(request, now_ns)
            actions.append(StartPrefill(request.request, prefiller, request.prompt_tokens))
        return actions

    def _prefilled(self, event: PrefillDone, now_ns: int) -> list[Action]:
        request = self._get(event.request)
        if event.prompt_tokens < 1:
            raise LifecycleError(
                f"request {request.request}: prefill of {event.prompt_tokens} tokens"
            )
        if not request.decode:
            raise LifecycleError(f"request {request.request} is answered by its prefiller")
        request.move(PREFILLED)
        self._resources.end_prefill(request)
        self.leases.prefill_ended(event.request, now_ns, event.prompt_tokens)
        assert request.prefiller is not None
        self.prefillers.proved[request.prefiller] = True
        # The budget has an estimate of its length until now, when the engine has counted the tokens.
        charged, counted = request.prompt_tokens, event.prompt_tokens
        self.prefillers.correct(request.prefiller, charged_tokens=charged, prompt_tokens=counted)
        request.prefilled(event, now_ns)
        self._to_pool(request, now_ns)
        return self._start_prefills(now_ns)

    def _first_token(self, event: FirstToken, now_ns: int) -> list[Action]:
        request = self._get(event.request)
        if request.state is not LifecycleState.PREFILLING:
            raise LifecycleError(f"request {request.request} is not on a prefiller")
        self.intake.answered(request, now_ns)
        return []

    def _to_pool(self, request: Request, now_ns: int) -> None:
        if request.state is QUEUED:
            request.move(Trigger.SKIP_PREFILL)
        # Deadline and time to live run from the first entry: a repeated prefill extends neither.
        if request.pooled_ns is None:
            request.pooled_ns = now_ns
        self.pool.add(self._pool_entry(request))

    def _pool_entry(self, request: Request) -> PoolEntry:
        return pool_entry(request, self.config, self.prefillers.pairs)

    def _prefill_lost(self, event: PrefillLost, now_ns: int) -> list[Action]:
        actions = self._lose_prefill(self._get(event.request), event, now_ns)
        self.leases.prefill_ended(event.request, now_ns)
        return actions + self._start_prefills(now_ns)

    def _lose_prefill(self, request: Request, event: PrefillLost, now_ns: int) -> list[Action]:
        actions = lose_prefill(request, event, self._resources, now_ns)
        self.prefill_queue.add(request, queue_end_ns(request, self.config))
        return actions

    # In decode.

    def _start(self, event: DecodeStarted, now_ns: int) -> list[Action]:
        request = self._get(event.request)
        if request.state is not DECODING or request.started:
            raise LifecycleError(f"request {request.request} cannot start in {request.state.name}")
        request.started = True
        if event.token_seen:
            assert request.rank is not None
            self.ranks.proved[request.rank] = True
        # It decodes here, so earlier losses no longer restrict a later choice.
        request.lost_on_ranks = ()
        ledger = self._resources.ledger
        ledger.start(request.request)
        self.intake.started(request, ledger, now_ns)
        request.pulled_from = request.prefiller
        # The first token proves that the KV transfer is over: the prefiller frees its blocks.
        self._resources.release_prefill(request)
        return self._start_prefills(now_ns)

    def _step(self, event: StepCompleted, now_ns: int) -> list[Action]:
        self.ledger.step()
        self.leases.step(event.duration_ns, self.ledger.loads)
        self.ranks.step(event.duration_ns, self.ledger)
        self.intake.step(event.duration_ns, self.ledger.loads, now_ns)
        return []

    def _emit(self, event: TokensEmitted, now_ns: int) -> list[Action]:
        del now_ns
        number, tokens = event.request, event.tokens
        self.ranks.corrected(tokens)
        request = self._get(number)
        if not request.started:
            raise LifecycleError(f"request {number} cannot emit {tokens} tokens now")
        # A correction takes back tokens that the steps gave in excess, never tokens of the prompt.
        if tokens < 0 and self._resources.emitted(request) + tokens < 0:
            raise LifecycleError(f"request {number} has not emitted {-tokens} tokens to take back")
        self.ledger.emit(number, tokens)
        return []

    def _lose_decode(self, event: DecodeLost, now_ns: int) -> list[Action]:
        request = self._get(event.request)
        lose_decode(request, self._resources)
        self._to_pool(request, now_ns)
        return []

    def _recompute(self, event: RequestRecomputed, now_ns: int) -> list[Action]:
        request = self._get(event.request)
        if event.anew and request.started:
            self.ledger.emit(event.request, -self._resources.emitted(request))
        actions = recompute(request, self._resources, now_ns, elsewhere=event.elsewhere)
        self._queue(request, now_ns)
        return actions + self._start_prefills(now_ns)

    # Anywhere.

    def _ended(
        self, event: RequestFinished | RequestFailed | RequestCancelled, now_ns: int
    ) -> list[Action]:
        self.leases.prefill_ended(event.request, now_ns)
        request, memory = self._get(event.request), self.intake.memory
        if memory is not None and request.rank is not None and request.ticket.session:
            memory.ended(request.ticket, request.rank, self.ledger.kv_tokens(request.request))
        actions = self._end(request, _ENDINGS[type(event)])
        return actions + self._start_prefills(now_ns)

    def _switch(self, event: InstanceEvent, now_ns: int) -> list[Action]:
        """Note that an instance opened, closed, has other pairs or load, or runs foreign requests."""
        may_start = self._switched(event)
        if self.intake.memory is not None and isinstance(event, RankClosed):
            self.intake.memory.forget(event.rank)
        warms = self.ranks.warm_up.active or self.prefillers.warm_up.active
        if warms and self._warm not in self._observers:
            self._observers = [self._warm, *self._observers]
        return self._start_prefills(now_ns) if may_start else []

    def _switched(self, event: InstanceEvent) -> bool:
        """Note it; return whether prefills may start that could not before."""
        ranks, prefillers = self.ranks, self.prefillers
        match event:
            case PrefillerScraped():
                return False  # Only the choice of prefillers uses it, as an observer.
            case ForeignLoad():
                ranks.shared(event, self.ledger, self.config)
                return False
            case RankClosed(rank) | RankOpened(rank):
                is_open = isinstance(event, RankOpened)
                ranks.set_open(rank, is_open)
                if isinstance(event, RankOpened) and (event.on_trial or event.cold):
                    ranks.begin(rank, grows=event.cold, on_trial=event.on_trial)
                self.pool.set_open(rank, is_open)
                prefillers.pairs.set_open(rank, is_open)
                return prefillers.pairs.limited
            case PrefillerPaired(prefiller, able):
                prefillers.check_known(prefiller)
                prefillers.pairs.set(prefiller, able)
                for request in self.requests.values():
                    if request.state is LifecycleState.POOLED and request.prefiller == prefiller:
                        self.pool.replace(self._pool_entry(request))
            case PrefillerClosed(prefiller):
                prefillers.set_open(prefiller, False)
            case PrefillerOpened(prefiller, on_trial, cold):
                prefillers.set_open(prefiller, True, on_trial=on_trial)
                if cold:
                    prefillers.begin(prefiller)
        # Also after a close: a request that avoids another prefiller may go there once no other one
        # is open (see `allowed`).
        return True

    def _warm(self, event: Event, actions: Sequence[Action], _: int) -> None:
        """Follow the requests on their way to instances with a window, while there are any."""
        self.ranks.saw(event, actions)
        self.prefillers.saw(event, actions)
        if not (self.ranks.warm_up.active or self.prefillers.warm_up.active):
            self._observers = [one for one in self._observers if one != self._warm]

    def _end(self, request: Request, trigger: Trigger) -> list[Action]:
        state = request.state
        request.move(trigger)
        # A request that finished has ended in the engine: there is nothing to abort.
        finished = trigger is FINISH
        actions = self._resources.release(request, state, gone=finished)
        del self.requests[request.request]
        return actions

    def _expire(self, numbers: list[RequestId]) -> list[Action]:
        if not numbers:
            return []
        ended = [(self._end(self.requests[number], Trigger.FAIL), number) for number in numbers]
        return [one for actions, number in ended for one in (*actions, Expire(number))]

    # Decisions.

    def _tick(self, _: Tick, now_ns: int) -> list[Action]:
        # Expired ones before the leases: one that does both ends instead of being prefilled again.
        actions = self._expire(self.prefill_queue.take_expired(now_ns) + self.pool.expired(now_ns))
        # Before admissions: the prefiller may reuse blocks past their lease, and a rank that pulled
        # them would decode from another request's KV cache.
        lost = self.pool.lapsed(now_ns) + unpaired(self.requests, self.prefillers.pairs)
        for number in dict.fromkeys(lost):
            actions += self._lose_prefill(self.requests[number], PrefillLost(number), now_ns)
        if self.intake.queues_all:
            # So that requests without prefill are in the pool when the policy decides.
            actions += self._start_prefills(now_ns)
        pooled = -1
        while len(self.pool.entries) > pooled:
            if self.pool.slots:
                actions += self._admit(now_ns)
            pooled = len(self.pool.entries)
            # Last: everything above made room, and so may `reconfigure` have done. What needs no
            # prefiller comes to the pool at once, and is decided on, too.
            actions += self._start_prefills(now_ns)
        self.leases.tick(now_ns, waiting=self.pool.slots > 0)
        return actions

    def _admit(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        policy, projection = self.policy, self.policy.projection
        # The ledger drops a projection that raised: its state is unknown, so it is built again from
        # the requests.
        if projection is not None and self._resources.ledger.projection is None:
            projection.clear()
            fresh = self._new_ledger(self.config, policy)
            self._resources.move(self.requests.values(), fresh)
        ledger = self._resources.ledger
        make_fleet = partial(self.ranks.fleet, ledger, self.config, policy.slots_beyond_batch)
        self.leases.judge(self.pool, now_ns)
        # These entries have left the pool, so each of them has to be bound.
        decided = decide(policy, make_fleet, self.pool, now_ns, on_failure=ledger.fail)
        memory = self.intake.memory
        for number, rank in decided:
            request = self.requests[number]
            request.move(ADMIT)
            self._resources.bind(request, rank)
            if memory is not None:
                memory.add(request.ticket, rank)
            if self.ranks.warm_up.active:
                self.ranks.warm_up.sent(rank, number)
            actions.append(Admit(number, rank))
        return actions

    def _new_ledger(self, config: SchedulerConfig, policy: Policy) -> Ledger:
        return Ledger(config.ranks, policy.projection, on_failure=self._on_failure)


def _handlers_of(scheduler: Scheduler) -> dict[type[Event], Callable[[Any, int], list[Action]]]:
    # A table, because `match` tries one class after the other, and a struct's class is asked
    # whether something is its instance by a call.
    return {
        TokensEmitted: scheduler._emit,
        StepCompleted: scheduler._step,
        Tick: scheduler._tick,
        RequestArrived: scheduler._arrive,
        PrefillDone: scheduler._prefilled,
        FirstToken: scheduler._first_token,
        DecodeStarted: scheduler._start,
        RequestFinished: scheduler._ended,
        RequestFailed: scheduler._ended,
        RequestCancelled: scheduler._ended,
        PrefillLost: scheduler._prefill_lost,
        DecodeLost: scheduler._lose_decode,
        RequestRecomputed: scheduler._recompute,
        **dict.fromkeys(get_args(InstanceEvent), scheduler._switch),
    }


def _check_ranks(config: SchedulerConfig, policy: Policy) -> None:
    projection = policy.projection
    if projection is not None and projection.ranks != config.ranks:
        raise ConfigError(f"the policy is for {projection.ranks} ranks, there are {config.ranks}")


# Who computes the prompt of a request that arrives: a prefiller, or the rank that decodes it.


def placed(scheduler: Scheduler, ticket: Ticket, now_ns: int) -> Ticket:
    """Return the ticket of a request that is about to arrive; without prefill if a rank computes it."""
    local = scheduler.intake.local_prefill
    if local is None:
        return ticket
    able, ledger = ticket.eligible, scheduler.ledger
    is_open = enumerate(scheduler.prefillers.is_open)
    free_slots = scheduler.free_slots() * scheduler.ranks.is_open
    if able is not None:
        free_slots *= [rank in able.ranks for rank in range(len(free_slots))]
    state = FleetState(
        [
            PrefillerId(n)
            for n, yes in is_open
            if yes
            and (able is None or n in able.prefillers)
            and scheduler.prefillers.pairs.feeds(PrefillerId(n), able)
        ],
        waiting_slots=scheduler.pool.slots,
        free_slots=free_slots,
        loads=ledger.loads,
        bound=len(ledger),
        departures_per_step=ledger.turnover.per_step,
    )
    return local.placed(ticket, state, now_ns)

"""The sans-IO scheduler: events in, actions out.

It owns every request's life cycle, the prefillers' budgets, the prompt pool and the decode ledger,
and asks one policy where pooled requests go. It has no socket, no clock and no loop: the live proxy
and the simulator drive the same object.

The driver's duty: feed events in order of time, then a `Tick`; perform the returned actions in
order before the next event. Ticks decide admissions, so feed all events that are due before one.
"""

from dataclasses import dataclass

import numpy as np

from balanceroute.proxy.core.errors import ConfigError, LifecycleError
from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    PrefillDone,
    PrefillLost,
    ReleasePrefill,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    TokensEmitted,
)
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.lifecycle import Request, State, Trigger
from balanceroute.proxy.core.policies.base import UNLIMITED, Fleet, Policy
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.prefill import Prefillers


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The shape of the deployment and the pool's limits.

    Attributes:
        ranks: G, decode ranks.
        batch_limit: B, requests in a rank's batch.
        rank_kv_tokens: KV tokens that fit on one rank; None for no limit.
        prefillers: P, at least 1.
        probe_limit: Probes that run on one prefiller at a time; None for no limit.
        prefiller_kv_tokens: KV tokens that one prefiller may hold; None for no limit.
        pool_limit: Requests that may be in prefill or in the pool; the others wait before prefill,
            where they hold no KV cache. None for no limit.
        deadline_ns: Time in the pool after which an entry goes first; None for never.
        ttl_ns: Time in the pool after which an entry is given up; None for never.
        lease_margin_ns: How long before its lease ends an entry's KV cache counts as lost; at most
            half of what is left of the lease, so that a short lease can be used at all.
    """

    ranks: int
    batch_limit: int
    rank_kv_tokens: int | None = None
    prefillers: int = 1
    probe_limit: int | None = None
    prefiller_kv_tokens: int | None = None
    pool_limit: int | None = None
    deadline_ns: int | None = None
    ttl_ns: int | None = None
    lease_margin_ns: int = 5_000_000_000

    def __post_init__(self) -> None:
        for name in (
            "ranks",
            "batch_limit",
            "rank_kv_tokens",
            "prefillers",
            "probe_limit",
            "prefiller_kv_tokens",
            "pool_limit",
            "deadline_ns",
            "ttl_ns",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        if self.lease_margin_ns < 0:
            raise ConfigError(f"lease_margin_ns is {self.lease_margin_ns}, must be at least 0")


class Scheduler:
    """One decode fleet, its prefillers and its pool."""

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.pool = Pool()
        self.ledger = Ledger(config.ranks, policy.projection)
        self.prefillers = Prefillers(
            config.prefillers,
            probe_limit=config.probe_limit,
            kv_capacity_tokens=config.prefiller_kv_tokens,
        )
        self.requests: dict[RequestId, Request] = {}
        # Insertion order is arrival order, but for a request that came back: it goes to the front.
        self._queue: dict[RequestId, Request] = {}
        self._returned: dict[RequestId, Request] = {}

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event and return what to do about it, in order.

        Raises:
            LifecycleError: The request is unknown, or its state does not allow the event. Nothing
                was changed.
        """
        match event:
            case StepCompleted():
                self.ledger.step()
                return []
            case Tick():
                return self._tick(now_ns)
            case RequestArrived(number, prompt_tokens):
                return self._arrive(number, prompt_tokens)
            case PrefillDone(number, prompt_tokens, lease_ends_ns):
                return self._prefilled(self._get(number), prompt_tokens, lease_ends_ns, now_ns)
            case PrefillLost(number):
                return self._prefill_again(self._get(number), Trigger.PREFILL_LOST)
            case DecodeStarted(number):
                return self._start(self._get(number))
            case TokensEmitted(number, tokens):
                return self._emit(self._get(number), tokens)
            case RequestRecomputed(number):
                return self._prefill_again(self._get(number), Trigger.RECOMPUTE)
            case RequestFinished(number):
                return self._end(self._get(number), Trigger.FINISH)
            case RequestFailed(number):
                return self._end(self._get(number), Trigger.FAIL)
            case RequestCancelled(number):
                return self._end(self._get(number), Trigger.CANCEL)

    def check(self) -> None:
        """Recount every holding from the requests' states and assert that nothing leaked."""
        self.ledger.check()
        held = [0] * self.config.prefillers
        probes = [0] * self.config.prefillers
        for request in self.requests.values():
            if request.prefiller is not None:
                held[request.prefiller] += request.prompt_tokens
                probes[request.prefiller] += request.probing
            assert request.probing == (request.state is State.PREFILLING)
            assert (request.rank is not None) == (request.state is State.DECODING)
            assert (request.request in self.pool) == (request.state is State.POOLED)
            waiting = request.request in self._queue or request.request in self._returned
            assert waiting == (request.state is State.QUEUED)
        assert held == self.prefillers.held_tokens, f"{held} != {self.prefillers.held_tokens}"
        assert probes == self.prefillers.probes, f"{probes} != {self.prefillers.probes}"
        decoding = sum(request.rank is not None for request in self.requests.values())
        assert int(self.ledger.bound.sum()) == decoding

    def _get(self, number: RequestId) -> Request:
        request = self.requests.get(number)
        if request is None:
            raise LifecycleError(f"request {number} is unknown or has ended")
        return request

    def _arrive(self, number: RequestId, prompt_tokens: int) -> list[Action]:
        if number in self.requests:
            raise LifecycleError(f"request {number} has arrived already")
        if prompt_tokens < 1:
            raise LifecycleError(f"request {number} arrived with {prompt_tokens} prompt tokens")
        request = Request(number, prompt_tokens)
        self.requests[number] = request
        self._queue[number] = request
        return self._probe()

    def _probe(self) -> list[Action]:
        """Start the probes that budgets and the pool's depth allow, in order of arrival."""
        actions: list[Action] = []
        limit = self.config.pool_limit
        while self._queue or self._returned:
            if limit is not None and sum(self.prefillers.probes) + len(self.pool) >= limit:
                break
            line = self._returned or self._queue
            request = next(iter(line.values()))
            prefiller = self.prefillers.choose(request.prompt_tokens)
            if prefiller is None:
                break
            request.move(Trigger.PROBE)
            del line[request.request]
            self.prefillers.begin_probe(prefiller, request.prompt_tokens)
            request.prefiller = prefiller
            request.probing = True
            actions.append(StartPrefill(request.request, prefiller, request.prompt_tokens))
        return actions

    def _prefilled(
        self, request: Request, prompt_tokens: int, lease_ends_ns: int | None, now_ns: int
    ) -> list[Action]:
        if prompt_tokens < 1:
            raise LifecycleError(f"request {request.request}: prefill of {prompt_tokens} tokens")
        request.move(Trigger.PREFILLED)
        self._end_probe(request)
        assert request.prefiller is not None
        self.prefillers.correct(
            request.prefiller, charged_tokens=request.prompt_tokens, prompt_tokens=prompt_tokens
        )
        request.prompt_tokens = prompt_tokens
        # Deadline and time to live run from the first time here: a repeated prefill gains no time.
        if request.pooled_ns is None:
            request.pooled_ns = now_ns
        since_ns = request.pooled_ns
        if lease_ends_ns is not None:
            left_ns = max(0, lease_ends_ns - now_ns)
            lease_ends_ns -= min(self.config.lease_margin_ns, left_ns // 2)
        config = self.config
        self.pool.add(
            PoolEntry(
                request.request,
                prompt_tokens,
                age=request.emitted_before,
                deadline_ns=None if config.deadline_ns is None else since_ns + config.deadline_ns,
                expires_ns=None if config.ttl_ns is None else since_ns + config.ttl_ns,
                lease_ends_ns=lease_ends_ns,
            )
        )
        return self._probe()

    def _start(self, request: Request) -> list[Action]:
        if request.state is not State.DECODING or request.started:
            raise LifecycleError(f"request {request.request} cannot start in {request.state.name}")
        request.started = True
        self.ledger.start(request.request)
        # The first token proves that the KV cache left the prefiller.
        self._release_prefill(request)
        return self._probe()

    def _emit(self, request: Request, tokens: int) -> list[Action]:
        if not request.started or tokens < 0:
            raise LifecycleError(f"request {request.request} cannot emit {tokens} tokens now")
        self.ledger.emit(request.request, tokens)
        return []

    def _prefill_again(self, request: Request, trigger: Trigger) -> list[Action]:
        if trigger is Trigger.PREFILL_LOST and request.started:
            raise LifecycleError(f"request {request.request} has pulled its KV cache already")
        state = request.state
        request.move(trigger)
        actions = self._drop(request, state, gone=True)
        if trigger is Trigger.RECOMPUTE:
            request.pooled_ns = None  # It was served in between; this is a wait of its own.
        # It has waited its turn once: it goes ahead of what was never prefilled.
        self._returned[request.request] = request
        return actions + self._probe()

    def _end(self, request: Request, trigger: Trigger) -> list[Action]:
        state = request.state
        request.move(trigger)
        finished = trigger is Trigger.FINISH
        actions = self._drop(request, state, gone=finished)
        del self.requests[request.request]
        return actions + self._probe()

    def _drop(self, request: Request, state: State, *, gone: bool) -> list[Action]:
        """Release everything that `request` held in `state`.

        `gone` says that the engine has ended its part already, so that there is nothing to abort.
        """
        actions: list[Action] = []
        match state:
            case State.QUEUED:
                line = self._queue if request.request in self._queue else self._returned
                del line[request.request]
            case State.PREFILLING:
                assert request.prefiller is not None
                self._end_probe(request)
                if not gone:
                    actions.append(AbortPrefill(request.request, request.prefiller))
            case State.POOLED:
                self.pool.remove(request.request)
                assert request.prefiller is not None
                actions.append(ReleasePrefill(request.request, request.prefiller))
            case State.DECODING:
                if not gone:
                    assert request.rank is not None
                    actions.append(AbortDecode(request.request, request.rank))
                    if request.prefiller is not None:
                        # Nobody will pull these blocks any more, unless the pull is under way.
                        actions.append(ReleasePrefill(request.request, request.prefiller))
                self._release_prefill(request)
                self._unbind(request)
            case State.DONE | State.FAILED | State.CANCELLED:
                raise AssertionError(f"request {request.request} ended twice")
        self._release_prefill(request)
        return actions

    def _unbind(self, request: Request) -> None:
        held = self.ledger.unbind(request.request)
        # If it is decoded again, what it emitted has to be prefilled with the prompt.
        request.emitted_before += held - request.prompt_tokens
        request.prompt_tokens = held
        request.rank = None
        request.started = False

    def _end_probe(self, request: Request) -> None:
        assert request.prefiller is not None
        assert request.probing
        self.prefillers.end_probe(request.prefiller)
        request.probing = False

    def _release_prefill(self, request: Request) -> None:
        if request.prefiller is not None:
            self.prefillers.release(request.prefiller, request.prompt_tokens)
            request.prefiller = None

    def _tick(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for number in self.pool.expired(now_ns):
            actions += [*self._end(self.requests[number], Trigger.FAIL), Expire(number)]
        for number in self.pool.lapsed(now_ns):
            actions += self._prefill_again(self.requests[number], Trigger.PREFILL_LOST)
        if len(self.pool) == 0:
            return actions
        for number, rank in self.policy.dispatch(self._fleet(), self.pool, now_ns):
            request = self.requests[number]
            request.move(Trigger.ADMIT)
            request.rank = rank
            self.ledger.bind(number, rank, request.prompt_tokens, age=request.emitted_before)
            actions.append(Admit(number, rank))
        # Admissions made room in the pool.
        return actions + self._probe()

    def _fleet(self) -> Fleet:
        ledger = self.ledger
        beyond = self.policy.slots_beyond_batch
        if beyond is None:
            free_slots = np.full(self.config.ranks, UNLIMITED)
        else:
            free_slots = self.config.batch_limit + beyond - ledger.bound
        if self.config.rank_kv_tokens is None or beyond is None:
            free_kv_tokens = np.full(self.config.ranks, UNLIMITED)
        else:
            free_kv_tokens = self.config.rank_kv_tokens - ledger.loads
        return Fleet(ledger.loads.copy(), ledger.bound.copy(), free_slots, free_kv_tokens)

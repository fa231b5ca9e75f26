"""The simulator's driver: feeds the scheduler virtual events and performs its actions.

One run is one policy on one workload. An instant is processed in this order: every due event is
handled; the scheduler decides; requests join the batches if no step is running; in a saturated run
each one that joined is replaced in the backlog; when nothing changes any more, the next step begins.
In a closed loop each request that finishes is replaced.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from statistics import median_low

from msgspec import structs

from balanceroute.predictors import Predictor
from balanceroute.predictors.past import features_of
from balanceroute.proxy.core.admission import Admission, AimdSettings, Ending, Load, Refusal
from balanceroute.proxy.core.admission.overload import Budget, FirstTokens
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    FirstToken,
    Observer,
    PrefillDone,
    PrefillerId,
    PrefillerScraped,
    RankId,
    ReleasePrefill,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.fair_queueing import fair_queueing
from balanceroute.proxy.core.local_prefill import LocalPrefill
from balanceroute.proxy.core.policies import Policy
from balanceroute.proxy.core.prediction import mean_output_tokens
from balanceroute.proxy.core.prefill import (
    PREFILL_CHOICES,
    USING_LOADS,
    FewestTokens,
    MakePrefillChoice,
    ScoreSettings,
)
from balanceroute.proxy.core.queueing import PREDICTING_ORDERS, QUEUE_ORDERS
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig, placed
from balanceroute.proxy.core.setting import choice, flag, integer, part, words
from balanceroute.proxy.lab.sim.engines import (
    DecodeFleet,
    EventLoop,
    PrefillFleet,
    PrefillJob,
    PrefillModel,
    PrefixCache,
    SimulatedEngineOptions,
)
from balanceroute.proxy.lab.sim.recorder import Recorder, ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

# The way in: asks the admission rule about each arrival, and reports to it how accepted requests ended.


@dataclass(slots=True)
class _Guest:
    ticket: Ticket
    arrived_ns: int
    began: bool = False
    first_token_ns: int | None = None


class Entrance:
    """The way from the clients of a simulation to its scheduler: an admission rule, or none."""

    def __init__(self, make_admission: Callable[[], Admission] | None) -> None:
        self._admission = None if make_admission is None else make_admission()
        self._guests: dict[RequestId, _Guest] = {}

    def offer(self, request: RequestId, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Return why a request that arrives now is rejected, or None."""
        if self._admission is None:
            return None
        refusal = self._admission.offer(ticket, load, now_ns)
        if refusal is None:
            self._guests[request] = _Guest(ticket, now_ns)
        return refusal

    def began(self, request: RequestId, now_ns: int) -> None:
        guest = self._guests.get(request)
        if guest is not None and self._admission is not None and not guest.began:
            guest.began = True
            self._admission.began(guest.ticket, now_ns)

    def first_token(self, request: RequestId, now_ns: int) -> None:
        """Note a first token; after a recompute the request's own first one stays."""
        guest = self._guests.get(request)
        if guest is not None and guest.first_token_ns is None:
            guest.first_token_ns = now_ns - guest.arrived_ns

    def ended(self, request: RequestId, output_tokens: int, now_ns: int, *, served: bool) -> None:
        """Note that a request was answered in full, or was not decoded in time."""
        guest = self._guests.pop(request, None)
        if guest is not None and self._admission is not None:
            prompt_tokens = guest.ticket.prompt_tokens if guest.began else 0
            ending = Ending(
                served, guest.first_token_ns, output_tokens, prompt_tokens, began=guest.began
            )
            self._admission.ended(guest.ticket, ending, now_ns)


# The way of a request to its rank: its KV cache is transferred, or the rank computes the prompt.
#
# A KV transfer takes e + f x KV tokens. A rank takes d for each token of a prompt that it
# computes, as a prefill server does. Those in its own prefix cache it neither pulls nor computes:
# of prompts, and where the trace names conversations, of the answer that the next turn's prompt
# repeats.


class Handover:
    """Gives requests to a fleet, after e + f x KV tokens of `transfer_ns`, by ranks with prefix caches or none."""

    def __init__(
        self,
        fleet: DecodeFleet,
        loop: EventLoop,
        *,
        transfer_ns: tuple[int, float],
        prefill: PrefillModel | None,
        cache_tokens: Sequence[int | None],
    ) -> None:
        self._fleet = fleet
        self._loop = loop
        self._transfer_ns = transfer_ns
        self._prefill = prefill
        size = 1 if prefill is None else prefill.block_tokens
        self._caches = [
            None if tokens is None else PrefixCache(tokens // size, size) for tokens in cache_tokens
        ]
        self._block_tokens = size
        # By conversation: its rank, and the latest turn.
        self._turns: dict[str, tuple[RankId, TraceRequest]] = {}

    def send(
        self, request: RequestId, rank: RankId, trace: TraceRequest, *, emitted: int, local: bool
    ) -> int:
        """Send a request, of which `emitted` tokens exist, to a rank; return the KV tokens that are transferred.

        A `local` one has its prompt computed by the rank.
        """
        kv_tokens = trace.prompt_tokens + emitted
        cached = self._cached(rank, trace)
        token_ns = 0.0 if self._prefill is None else self._prefill.ns_per_token
        base_ns, each_ns = self._transfer_ns
        pulled = 0 if local else kv_tokens - cached
        transfer_ns = 0 if local else base_ns + round(each_ns * pulled)
        submit = partial(
            self._fleet.submit,
            request,
            rank,
            kv_tokens=kv_tokens,
            output_tokens=trace.output_tokens - emitted,
            compute_ns=round(token_ns * (kv_tokens - cached)) if local else 0,
        )
        if transfer_ns:
            self._loop.call_at(self._loop.now_ns + transfer_ns, submit)
        else:
            submit()
        return pulled

    def _cached(self, rank: RankId, trace: TraceRequest) -> int:
        """Return how many tokens of a prompt a rank has; it has all of them from now on."""
        cache, size = self._caches[rank], self._block_tokens
        if cache is None:
            return 0
        cached = cache.use(trace.hash_ids, trace.prompt_tokens)
        if not trace.session:
            return cached
        home, before = self._turns.get(trace.session, (rank, trace))
        self._turns[trace.session] = rank, trace
        if home != rank or before is trace or cached < before.prompt_tokens // size * size:
            return cached
        held = before.prompt_tokens + before.output_tokens
        return max(cached, min(held, trace.prompt_tokens - 1) // size * size)


_HASH = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    ranks: int = integer(8, "decode ranks", 1, 10_000, metavar="G")
    batch_limit: int = integer(16, "batch limit of a rank", 1, 10**9, metavar="B", name="batch")
    step_base_ns: int = 30_000_000  # a of T = a + b x max load.
    step_ns_per_token: float = 200.0  # b.
    rank_kv_tokens: int | None = integer(
        None,
        "KV tokens per rank",
        1,
        10**9,
        shown_default="no limit",
        metavar="TOKENS",
        name="kv_capacity",
    )
    # What a rank takes to compute a request again that its KV cache had no room for, within a step;
    # None if it is prefilled again.
    recompute_ns_per_token: float | None = None
    prefill: PrefillModel | None = None  # The prefill servers; None prefills at once.
    prefill_choice: str = choice(
        "fewest-tokens", "which prefiller with room takes a request", words(PREFILL_CHOICES)
    )
    scores: ScoreSettings = ScoreSettings()  # For choices by a score.
    # Time between two scrapes of the servers, for choices by their metrics.
    scrape_ns: int = 1_000_000_000
    probe_limit: int | None = integer(
        1, "prefills at a time on one prefiller, where they wait in turn", 1, 10**6, word="none"
    )
    prefiller_kv_tokens: int | None = integer(
        None,
        "KV tokens that one prefiller may hold for the pool",
        1,
        10**9,
        shown_default="no limit",
        metavar="TOKENS",
    )
    # e of the KV transfer's time e + f x KV tokens, from admission to the rank's queue; 0 with f =
    # 0 lets a request join at once.
    transfer_base_ns: int = 0
    transfer_ns_per_token: float = 0.0  # f.
    local_prefill_tokens: int | None = integer(
        None,
        "a rank computes prompts of at most so many tokens itself, d for each, where that delays "
        "all requests less",
        1,
        10**9,
        shown_default="prefillers compute all",
        metavar="TOKENS",
    )
    local_prefill_always: bool = flag("let ranks compute all such prompts, whatever it costs")
    rank_cache_tokens: int | None = integer(
        None,
        "tokens in a rank's prefix cache, which it neither pulls nor computes again",
        0,
        10**12,
        shown_default="no cache",
        metavar="TOKENS",
        name="rank_prefix_cache",
    )
    deadline_ns: int | None = None  # Pool wait after which a request goes first; None for never.
    pool_limit: int | None = integer(
        None,
        "requests in prefill or in the pool; others wait before prefill",
        1,
        10**9,
        shown_default="no limit; with leases as in `serve`",
    )
    deep_pool: bool = flag(
        "a pool limit as deep as leases allow, as of `serve --first-token prefill`"
    )
    # Whether clients get the first token when the prefill ends.
    early_tokens: bool = False
    queue_order: str = choice(
        "fcfs", "in what order requests wait, before prefill and in the pool", words(QUEUE_ORDERS)
    )
    # A name of `FAIR_COSTS`, by which tenants share the starts; None for no sharing.
    fair_queue: str | None = None
    # Makes the rule that lets requests in; None lets in all.
    admission: Callable[[], Admission] | None = None
    # Whether that rule gets the expected times to first token.
    expects_first_tokens: bool = False
    aimd: AimdSettings | None = None  # The limit on requests in flight; None for none.
    # Wait before prefill after which a request expires; None for never.
    queue_ttl_ns: int | None = None
    # How long a prefiller keeps a KV cache for a rank; None for ever. As in the proxy, it counts
    # from the start of the prefill, the earliest moment at which it can have begun.
    lease_ns: int | None = None
    lease_margin_ns: int = 5_000_000_000  # See `SchedulerConfig`.
    # How the decode ranks differ from plain ones.
    engines: SimulatedEngineOptions = field(default_factory=SimulatedEngineOptions)
    speeds_known: bool = True  # Whether the scheduler gets the speeds of the ranks.
    learn_speeds: bool = flag("let the scheduler learn the --rank-speeds instead of telling it")

    def intake(self) -> Intake:
        """Return the intake of one run."""
        cost, order = self.fair_queue, QUEUE_ORDERS[self.queue_order]
        limit = self.local_prefill_tokens
        kept = self.rank_cache_tokens
        memory = None if kept is None and limit is None else RankMemory(lambda: kept)
        always = self.local_prefill_always
        local = None if limit is None else LocalPrefill(limit, memory, always=always)
        return Intake(
            fair=None if cost is None else fair_queueing(cost, order),
            budget=None if self.aimd is None else Budget(self.aimd),
            first_tokens=FirstTokens() if self.expects_first_tokens else None,
            local_prefill=local,
            memory=memory,
        )

    @property
    def expects_output(self) -> bool:
        return self.queue_order in PREDICTING_ORDERS

    @property
    def rank_batch_limits(self) -> tuple[int, ...] | None:
        if not self.engines.rank_batches:
            return None
        return tuple(self.engines.batches_of(self.ranks, self.batch_limit))

    @property
    def known_speeds(self) -> tuple[float, ...] | None:
        """The speeds of the ranks as the scheduler knows them; None if they are equal for it."""
        speeds = self.engines.speeds_of(self.ranks) if self.speeds_known else None
        return None if speeds is None else tuple(speeds)

    @property
    def recompute_ns(self) -> Callable[[int], int] | None:
        """How long a rank takes to compute so many tokens again; None if it does not."""
        per_token_ns = self.recompute_ns_per_token
        return None if per_token_ns is None else lambda tokens: round(per_token_ns * tokens)


class Simulation:
    """One run.

    Args:
        on_finished: Called after each step with the number of requests that finished in it.
        clock_ns: Real time, for the cost of decisions.
    """

    def __init__(
        self,
        deployment: SimulatedDeployment,
        workload: Workload,
        policy: Policy,
        predictor: Predictor,
        *,
        service: ServiceLog | None = None,
        prefill_choice: MakePrefillChoice = FewestTokens,
        observer: Observer | None = None,
        on_finished: Callable[[int], None] = lambda _: None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        prefill, order = deployment.prefill, QUEUE_ORDERS[deployment.queue_order]
        self.scheduler = Scheduler(
            _scheduler_config(deployment),
            policy,
            queue_order=order,
            intake=deployment.intake(),
            prefill_choice=prefill_choice,
            observer=observer,
        )
        self.recorder = Recorder(len(workload.requests), service, self.scheduler.config.prefillers)
        self._deployment = deployment
        self._workload = workload
        self._predictor = predictor
        self._entrance = Entrance(deployment.admission)
        self._on_finished = on_finished
        self._clock_ns = clock_ns
        self._loop = EventLoop()
        self._prefill = None if prefill is None else PrefillFleet(prefill, self._loop)
        self._fleet = DecodeFleet(
            ranks=deployment.ranks,
            batch_limit=deployment.batch_limit,
            step_base_ns=deployment.step_base_ns,
            step_ns_per_token=deployment.step_ns_per_token,
            rank_kv_tokens=deployment.rank_kv_tokens,
            recompute_ns=deployment.recompute_ns,
            options=deployment.engines,
        )
        self._handover = Handover(
            self._fleet,
            self._loop,
            transfer_ns=(deployment.transfer_base_ns, deployment.transfer_ns_per_token),
            prefill=prefill,
            cache_tokens=[deployment.rank_cache_tokens] * deployment.ranks,
        )
        self._arrived = 0
        self._emitted: dict[RequestId, int] = {}  # Of recomputed requests, before their next try.
        self._first_tokens: list[RequestId] = []
        self._stepping = False
        self._undecided = False
        self._woken_ns = -1  # The latest time at which the scheduler asked for a tick.
        self._idle_since_ns = self._step_began_ns = 0

    def run(self) -> Recorder:
        """Replay the whole workload; return the measurements."""
        if self._workload.open_loop:
            for number, time_ns in enumerate(self._workload.arrivals_ns()):
                self.offer(RequestId(number), time_ns)
        else:
            self._loop.call_at(0, self._fill)
        if self._deployment.prefill_choice in USING_LOADS:
            self._loop.call_at(0, self._scrape)
        self._loop.run(self._settle)
        ended, total = self.recorder.ended, len(self._workload.requests)
        assert ended == total or self._loop.stopped, f"{ended} of {total} requests ended"
        return self.recorder

    # One of several that share a clock: it is given its requests, and played instant by instant.

    @property
    def next_ns(self) -> int | None:
        """When something happens next; None if nothing will."""
        return self._loop.next_ns

    def offer(self, request: RequestId, time_ns: int) -> None:
        """Let a request of the workload, named by its place, arrive at a time not yet past."""
        self._loop.call_at(time_ns, partial(self._arrive, request))

    def advance(self) -> None:
        self._loop.advance(self._settle)

    def stop(self) -> None:
        """End the run now, and with it the measured time."""
        self._loop.stopped = True
        self.recorder.close(self._loop.now_ns)

    def _scrape(self) -> None:
        """Report how busy the prefill servers are, until all is done."""
        if self._prefill is None or self.recorder.ended == len(self._workload.requests):
            return
        for number in range(self.scheduler.config.prefillers):
            self._feed(PrefillerScraped(PrefillerId(number), self._prefill.load(number)))
        self._loop.call_at(self._loop.now_ns + self._deployment.scrape_ns, self._scrape)

    def _feed(self, event: Event) -> list[Action]:
        actions = self.scheduler.handle(event, now_ns=self._loop.now_ns)
        for action in actions:
            self._perform(action)
        return actions

    def _perform(self, action: Action) -> None:
        now_ns = self._loop.now_ns
        match action:
            case StartPrefill(request, prefiller, prompt_tokens):
                self._entrance.began(request, now_ns)
                lease_ns = self._deployment.lease_ns
                lease_end_ns = None if lease_ns is None else now_ns + lease_ns
                blocks = self._workload.requests[request].hash_ids
                done = partial(self._prefilled, lease_end_ns)
                job = PrefillJob(request, prefiller, prompt_tokens, blocks, done)
                if self._prefill is None:
                    self._loop.call_at(now_ns, partial(done, job))
                else:
                    self._prefill.submit(job)
            case Admit(request, rank):
                self._entrance.began(request, now_ns)
                local = not self.scheduler.requests[request].ticket.prefill
                traced = self._workload.requests[request]
                emitted = self._emitted.get(request, 0)
                pulled = self._handover.send(request, rank, traced, emitted=emitted, local=local)
                if not local:
                    self.recorder.pulled(pulled, traced.prompt_tokens + emitted)
            case ReleasePrefill(request):
                # One that has expired is gone; any other one leaves the pool as its lease has ended.
                if request in self.scheduler.requests:
                    self.recorder.lapsed()
            case Expire(request):
                self._expire(request)
            case _:
                raise AssertionError(f"nothing in a simulation leads to {action}")

    def _arrive(self, request: RequestId) -> None:
        self._arrived += 1
        traced, now_ns = self._workload.requests[request], self._loop.now_ns
        self.recorder.arrived(request, now_ns)
        ticket = self._ticket(traced, now_ns)
        scheduler = self.scheduler
        load = scheduler.intake.load(
            ticket, scheduler.prefill_queue, scheduler.waiting, len(scheduler.requests)
        )
        refusal = self._entrance.offer(request, ticket, load, now_ns)
        if refusal is None:
            self._predictor.begin(request, features_of(traced))
            if self._deployment.expects_output:
                tokens = mean_output_tokens(self._predictor, request, None)
                ticket = structs.replace(ticket, predicted_tokens=tokens)
            ticket = placed(scheduler, ticket, now_ns)
            if not ticket.prefill:
                self.recorder.local_prefill()
                self.recorder.prefilled(request, now_ns)
                self._undecided = True
            self._feed(RequestArrived(request, ticket))
        else:
            self.recorder.refused(request, now_ns)
            if not self._workload.open_loop:
                # A client that may not repeat its request sends its next one after a second.
                retry_ns = (refusal.retry_after_s or 1) * 1_000_000_000
                self._loop.call_at(now_ns + retry_ns, self._arrive_next)
        if self._arrived == len(self._workload.requests):
            self.recorder.close(now_ns)

    def _ticket(self, traced: TraceRequest, now_ns: int) -> Ticket:
        ticket = Ticket(
            traced.prompt_tokens,
            tenant=traced.tenant,
            level=traced.level,
            weight=traced.weight,
            deadline_ns=None if traced.deadline_ns is None else now_ns + traced.deadline_ns,
            early_token=self._deployment.early_tokens,
            session=_session_of(traced),
        )
        prefill = self._deployment.prefill
        if prefill is None or not traced.hash_ids:
            return ticket
        # Only full blocks are cached. A trace's own hashes may have more bits than a ticket's.
        full = traced.hash_ids[: traced.prompt_tokens // prefill.block_tokens]
        blocks = tuple(one & _HASH for one in full)
        return structs.replace(ticket, blocks=blocks, block_tokens=prefill.block_tokens)

    def _fill(self) -> None:
        for _ in range(self._workload.backlog or self._workload.concurrency or 0):
            self._arrive_next()

    def _arrive_next(self) -> None:
        if self._arrived < len(self._workload.requests):
            self._arrive(RequestId(self._arrived))

    def _expire(self, request: RequestId) -> None:
        now_ns = self._loop.now_ns
        self.recorder.expired(request, now_ns)
        self._predictor.forget(request)
        self._entrance.ended(request, 0, now_ns, served=False)
        if not self._workload.open_loop:
            self._loop.call_at(now_ns, self._arrive_next)

    def _prefilled(self, lease_end_ns: int | None, job: PrefillJob) -> None:
        self.recorder.prefilled(job.request, self._loop.now_ns)
        self.recorder.computed(job.prefiller, job.computed_tokens, job.prompt_tokens)
        if self._deployment.early_tokens:
            self._answer(job.request)
        self._feed(PrefillDone(job.request, job.prompt_tokens, lease_end_ns, job.cached_tokens))
        self._undecided = True

    def _answer(self, number: RequestId) -> None:
        """Give the client the prefiller's token, unless it has it, or it comes too late."""
        request, now_ns = self.scheduler.requests[number], self._loop.now_ns
        if request.answered or (request.due_ns is not None and request.due_ns <= now_ns):
            return
        self.recorder.first_token(number, now_ns)
        self._entrance.first_token(number, now_ns)
        self._feed(FirstToken(number))

    def _wake(self) -> None:
        """See that the scheduler gets a tick when it needs one without an event."""
        end_ns = self.scheduler.next_deadline_ns()
        if end_ns is None or end_ns == self._woken_ns:
            return
        self._woken_ns = max(end_ns, self._loop.now_ns)
        self._loop.call_at(self._woken_ns, self._wake_up)

    def _wake_up(self) -> None:
        # The request that was due may have left in the meantime.
        end_ns = self.scheduler.next_deadline_ns()
        self._undecided |= end_ns is not None and end_ns <= self._loop.now_ns

    def _settle(self) -> None:
        if self._undecided:
            self._undecided = False
            begin = self._clock_ns()
            actions = self._feed(Tick())
            if actions:
                self.recorder.dispatched(self._clock_ns() - begin)
        self._wake()
        if self._stepping:
            return
        for request in self._fleet.join():
            # If its rank computes its prompt, the first token is the sign, as in the live proxy.
            if self.scheduler.requests[request].ticket.prefill:
                self._feed(DecodeStarted(request))
            kv_tokens = self.scheduler.ledger.kv_tokens(request)
            self.recorder.joined(request, kv_tokens, self._loop.now_ns)
            self._first_tokens.append(request)
            # A recomputed request was replaced when it first joined.
            if self._workload.backlog is not None and request not in self._emitted:
                self._loop.call_at(self._loop.now_ns, self._arrive_next)
        if self._fleet.running and not self._loop.due():
            self._begin_step()

    def _begin_step(self) -> None:
        fleet, now_ns = self._fleet, self._loop.now_ns
        duration_ns = fleet.begin_step()
        self.recorder.idle_time(now_ns - self._idle_since_ns)
        budget, service = self.scheduler.intake.budget, self.recorder.service
        if budget is not None and service is not None:
            service.limit(budget.cap * self.scheduler.ranks.open, now_ns)
        self.recorder.held(sum(self.scheduler.prefillers.held_tokens))
        self.recorder.step(fleet.step_loads, fleet.running, duration_ns, now_ns, fleet.emissions)
        self._stepping = True
        self._step_began_ns = now_ns
        self._loop.call_at(now_ns + duration_ns, self._end_step)

    def _end_step(self) -> None:
        now_ns = self._loop.now_ns
        self._stepping = False
        self._idle_since_ns = now_ns
        emissions = self._fleet.emissions
        finished, dropped = self._fleet.end_step()
        for request in self._first_tokens:
            if not self.scheduler.requests[request].started:
                self._feed(DecodeStarted(request))
        self._feed_progress(emissions, now_ns - self._step_began_ns)
        for request in self._first_tokens:
            if emissions.get(request, 1):
                self.recorder.first_token(request, now_ns)
                self._entrance.first_token(request, now_ns)
        self._first_tokens = [one for one in self._first_tokens if not emissions.get(one, 1)]
        for request in finished:
            output_tokens = self._workload.requests[request].output_tokens
            self._feed(RequestFinished(request))
            self._predictor.observe(request, output_tokens)
            self.recorder.finish(request, output_tokens, now_ns)
            self._entrance.ended(request, output_tokens, now_ns, served=True)
            if self._workload.concurrency is not None:
                self._loop.call_at(now_ns, self._arrive_next)
        if self._deployment.recompute_ns_per_token is not None:
            self.recorder.preempted(len(dropped))
            dropped = []
        for request in dropped:
            held = self.scheduler.ledger.kv_tokens(request)
            self._emitted[request] = held - self._workload.requests[request].prompt_tokens
            self._feed(RequestRecomputed(request))
            self.recorder.recomputed(request, held)
            if not self.scheduler.requests[request].ticket.prefill:
                self.recorder.prefilled(request, now_ns)
        if finished or dropped:
            self._undecided = True
            self._on_finished(len(finished))

    def _feed_progress(self, emissions: dict[RequestId, int], duration_ns: int) -> None:
        """Bring the ledger forward: by the usual tokens at once, by each request's difference singly.

        The live proxy's step clock does the same, with a tolerance.
        """
        usual = median_low(emissions.values()) if emissions else 1
        for _ in range(usual):
            self._feed(StepCompleted(duration_ns // usual))
        for request, tokens in emissions.items():
            if tokens != usual:
                self._feed(TokensEmitted(request, tokens - usual))


def _session_of(traced: TraceRequest) -> int:
    """Return the conversation as tickets name it; 0 for none."""
    if not traced.session:
        return 0
    digest = blake2b(f"{traced.tenant}\0{traced.session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & _HASH or 1


def _scheduler_config(deployment: SimulatedDeployment) -> SchedulerConfig:
    prefill = deployment.prefill
    return part(
        SchedulerConfig,
        deployment,
        prefillers=1 if prefill is None else prefill.servers,
        probe_limit=None if prefill is None else deployment.probe_limit,
        rank_batch_limits=deployment.rank_batch_limits,
        rank_speeds=deployment.known_speeds,
    )

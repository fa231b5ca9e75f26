"""The live driver: feeds the scheduler what happens on the sockets and performs what it decides.

The same role as the simulator's driver, with the loop's clock. Admissions are decided in ticks. A
tick comes at once when a request enters the pool; when a slot becomes free it comes a moment later,
so that all requests that end with the same step are seen by one decision.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from balanceroute.predictors import RequestFeatures
from balanceroute.proxy.core.admission import Admission, Ending, Load, Refusal
from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Eligible,
    Event,
    Expire,
    PrefillDone,
    PrefillerClosed,
    PrefillerOpened,
    PrefillLost,
    RankClosed,
    RankOpened,
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
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.fscore import idle_tokens
from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Target
from balanceroute.proxy.live.engines.kv_transfers import KvTransfers
from balanceroute.proxy.live.openai.prompt_keys import prompt_keys
from balanceroute.proxy.live.openai.shape import Shape
from balanceroute.proxy.live.openai.token_estimate import TokenEstimate
from balanceroute.proxy.live.request.direct import Direct
from balanceroute.proxy.live.request.leg_settings import LegSettings
from balanceroute.proxy.live.request.lost_engines import LostEngines
from balanceroute.proxy.live.request.retry_budget import RetryBudget
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.stall_watch import StallWatch
from balanceroute.proxy.live.scheduling.isolation import Isolation
from balanceroute.proxy.live.scheduling.step_clock import StepClock
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.connectors import Connector
    from balanceroute.proxy.live.engines.health import Health
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.prediction.predictor_set import PredictorSet
    from balanceroute.proxy.live.request.hand_off import HandOff
    from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
    from balanceroute.proxy.live.telemetry.metrics import Metrics
    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.server import Reply

_log = logging.getLogger(__name__)
# How often deadlines are looked at and progress is taken, in seconds.
_SWEEP_S = 0.25
# Tokens of an answer from which its time tells the time of a step.
_TELLING = 16
# After these a slot may be free for a request that waits.
_FREEING = (RequestFinished, RequestFailed, RequestCancelled, RequestRecomputed, RankOpened)
# After these a request is on no rank.
_UNBINDING = (RequestRecomputed, DecodeLost, PrefillLost)
# After these a request may be new in the pool.
_POOLING = (PrefillDone, RequestArrived, DecodeLost)


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """How the driver works.

    Attributes:
        legs: Time limits and retries.
        lease_s: How long a prefiller keeps a KV cache; None for ever.
        settle_s: How long a tick waits for further requests to end with the same step.
        stranded_s: How long requests wait for a role of which no instance is up. Less than that is
            an engine that restarts; who comes meanwhile is refused at once.
    """

    legs: LegSettings
    lease_s: float | None
    settle_s: float = 0.002
    stranded_s: float = 10.0


class Log(Protocol):
    """Writes down requests that ended."""

    def request_ended(self, record: RequestRecord) -> None:
        """Write one request's line."""


class Driver:
    """One scheduler and the sessions it decides for.

    Args:
        scheduler: Its numbers of ranks and prefillers are those of `instances`.
        instances: The engines.
        connector: How KV caches travel.
        predictors: Told of every request; asked by the core.
        health: Told how legs end.
        metrics: Told of everything countable.
        failures: Told of exceptions, none of which ends service.
        log: Told of every request that ended.
        admission: Asked before a request is let in.
        settings: Limits and times.
        rng: Makes tokens that name transfers.
        stopwatch: Real seconds, for the cost of decisions.

    Attributes:
        sessions: All live requests.
        idle_tokens: Sum of the missing tokens over the inferred steps; see `Snapshot`.
        capacity_tokens: See `Snapshot`.
        steps: The inferred steps.
        transfers: Judges who is at fault when KV caches cannot be pulled.
        stalls: Tells what is new from what waited while the process stood still.
        lost: Moves requests away from engines that do not answer.
        isolation: Ends alone what failed.
        draining: Whether new requests are refused.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        instances: Instances,
        connector: "Connector",
        predictors: "PredictorSet",
        *,
        health: "Health",
        metrics: "Metrics",
        failures: "DecisionFailures",
        log: Log,
        admission: Admission,
        settings: DriverSettings,
        rng: random.Random,
        stopwatch: Callable[[], float],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.scheduler = scheduler
        self.instances = instances
        self.connector = connector
        self.legs = settings.legs
        self.lease_s = settings.lease_s
        self.stalls = StallWatch(_SWEEP_S, loop.time)
        self.clock = loop.time
        self.call_later = loop.call_later
        self.observe_gap = metrics.legs.observe_itl
        self.sessions: dict[RequestId, Session] = {}
        self.steps = StepClock()
        self.idle_tokens = self.capacity_tokens = 0
        self.draining = False
        self._loop = loop
        self._predictors = predictors
        self._health = health
        self._metrics = metrics
        self.isolation = isolation = Isolation(self, failures)
        self.guarded, self.crashed = isolation.guarded, isolation.crashed
        self._log = log
        self._admission = admission
        self._settle_s = settings.settle_s
        self._stranded_s = settings.stranded_s
        self._unready_since_s: dict[Eligible | None, float] = {}  # By the engines needed.
        self._rng = rng
        self._stopwatch = stopwatch
        self._stage_start_s = 0.0
        self._retries = RetryBudget()
        self._arrived = 0
        self._ids: Counter[str] = Counter()  # Client request ids in use.
        self._estimate = TokenEstimate()
        self._serving = instances.serving()
        self._open_prefillers = [(True, False)] * len(instances.prefillers)
        self._open_ranks = [True] * len(instances.ranks)  # As the scheduler was told.
        # In their rank's batch; and admitted, without a stream to tell when they join it.
        self._started: dict[RequestId, Session] = {}
        self._unheard: dict[RequestId, float] = {}
        self._transfer_s = 0.0
        self._hand_offs: dict[str, HandOff] = {}
        self.lost = LostEngines(self.sessions, self._loop.call_soon)
        self.transfers = KvTransfers(
            health.enough,
            pulling=lambda: [s.pair for s in self.sessions.values() if s.pair is not None],
            convict=health.convict,
            is_on_trial=health.is_on_trial,
            count=metrics.legs.kv_transfer_failed,
            passed=self.reopen,
        )
        self._tick_timer: asyncio.Handle | None = None
        self._tick_soon = False
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    # What the gateway does.

    def ticket(self, shape: Shape, body: "RequestBody", eligible: Eligible | None) -> Ticket:
        """Return what is known of a request; `eligible` are the engines of its model."""
        legs = self.legs
        decode = not (shape.direct and legs.direct is Direct.PREFILL)
        split = not shape.direct and not self.connector.facts.decode_first
        return Ticket(
            prompt_tokens=self._estimate.tokens(shape),
            slots=shape.sequences,
            prefill=split or not decode,
            decode=decode,
            eligible=eligible,
            max_tokens=shape.max_tokens,
            keys=prompt_keys(shape.api, body) if self._predictors.uses_keys else (),
            model=shape.model,
        )

    def refuse(self, ticket: Ticket) -> Refusal | None:
        """Return why a request that comes now cannot be taken, or None."""
        if self.draining:
            return Refusal(503, "the proxy is shutting down", 1)
        return self._admission.offer(ticket, Load(self.scheduler.waiting), self._now_ns())

    def submit(
        self,
        ticket: Ticket,
        *,
        shape: Shape,
        body: "RequestBody",
        headers: "Headers",
        reply: "Reply",
        record: RequestRecord,
    ) -> None:
        """Take a request that was not refused."""
        number = RequestId(self._arrived)
        self._arrived += 1
        self._retries.earn()
        record.prompt_estimate = ticket.prompt_tokens
        record.keys = ticket.keys
        session = Session(
            number,
            self,
            ticket=ticket,
            shape=shape,
            body=body,
            headers=headers,
            reply=reply,
            record=record,
        )
        self.sessions[number] = session
        self._ids[record.request_id] += 1
        self._empty.clear()
        if self._sweep_timer is None:
            self._unready_since_s.clear()  # Nobody looked meanwhile.
            self.stalls.begin()
            self._sweep_timer = self.call_later(_SWEEP_S, self._sweep, self.clock() + _SWEEP_S)
        self.isolation.run_for(session, "arrival", self._take, session)

    def _take(self, session: Session) -> None:
        number, ticket = session.number, session.ticket
        features = RequestFeatures(ticket.prompt_tokens, ticket.max_tokens, ticket.keys)
        self._predictors.begin(number, features)
        if not ticket.prefill:
            session.pooled()
        self.feed(RequestArrived(number, ticket))

    @property
    def uses_keys(self) -> bool:
        """Whether the keys of requests are asked for; see `prompt_keys`."""
        return self._predictors.uses_keys

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now, and decided about as it should be."""
        return self.instances.ready and not self.draining and not self.isolation.failures.persist

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        kept = (self.sessions, self._ids, self._started, self._unheard, self._hand_offs)
        return not any(kept)

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._empty.wait()

    def shut_down(self) -> None:
        """End every request and every timer."""
        for session in list(self.sessions.values()):
            self.isolation.run_for(
                session, "shutdown", session.give_up, "the proxy is shutting down"
            )
        for timer in (self._tick_timer, self._sweep_timer):
            if timer is not None:
                timer.cancel()
        self._tick_timer = self._sweep_timer = None

    def stage_ended(self, stage: str) -> None:
        """Note that a stage of the present decision ended."""
        now_s = self._stopwatch()
        self._metrics.decisions.dispatched(stage, now_s - self._stage_start_s)
        self._stage_start_s = now_s

    def reopen(self) -> None:
        """Tell the scheduler which instances are open now, after any of them changed."""
        for prefiller in self.instances.prefillers:
            is_open, on_trial = state = prefiller.open, prefiller.kv_trial
            if self._open_prefillers[prefiller.id] != state:
                self._open_prefillers[prefiller.id] = state
                number = prefiller.id
                self.feed(PrefillerOpened(number, on_trial) if is_open else PrefillerClosed(number))
        for rank in self.instances.ranks:
            if self._open_ranks[rank.id] != rank.open:
                self._open_ranks[rank.id] = rank.open
                self.feed(RankOpened(rank.id) if rank.open else RankClosed(rank.id))
        self._serving = self.instances.serving()

    def grown(self) -> None:
        """Note that instances were added, which the scheduler has been told by `reconfigure`."""
        prefillers, ranks = self.instances.prefillers, self.instances.ranks
        self._open_prefillers += [(True, False)] * (len(prefillers) - len(self._open_prefillers))
        self._open_ranks += [True] * (len(ranks) - len(self._open_ranks))
        self.reopen()
        self._wake(0.0)

    def follow(self) -> None:
        """Bring the scheduler's mirror of the ranks up to date, as before every decision."""
        now_s = self.clock()
        for number, since_s in list(self._unheard.items()):
            if now_s - since_s >= self._transfer_s:
                self._join(self.sessions[number])
                self.feed(DecodeStarted(number))
        advance = self.steps.advance(self._started.values(), now_s)
        if advance.steps:
            step = StepCompleted()
            for _ in range(advance.steps):
                self.scheduler.handle(step, now_ns=0)
            self._measure_balance(advance.steps)
        for session, rounds in advance.corrections:
            assert isinstance(session, Session)
            tokens = rounds * session.shape.sequences
            self.scheduler.handle(TokensEmitted(session.number, tokens), now_ns=0)

    def engine_id(self, request_id: str) -> str:
        """Return what a request is called at the engines: its id, unless that is in use.

        Two requests of one name would be one to some engines.
        """
        if request_id in self._ids:
            return f"{request_id}-{self._rng.getrandbits(32):08x}"
        return request_id

    def hand_off(self, transfer: str) -> "HandOff | None":
        """Return the prefill that a decode rank may call for now, if there is one of that name."""
        return self._hand_offs.get(transfer)

    # What a session does: Host.

    def feed(self, event: Event) -> None:
        """Give the scheduler an event, perform what it decides, and see that a tick follows."""
        if isinstance(event, _UNBINDING):
            if isinstance(event, DecodeLost | PrefillLost) and event.request in self._started:
                event = self._without_start(event.request)
            self._started.pop(event.request, None)
            self._unheard.pop(event.request, None)
        for action in self.scheduler.handle(event, now_ns=self._now_ns()):
            self._perform(action)
        if isinstance(event, _POOLING):
            if len(self.scheduler.pool):
                self._wake(0.0)
        elif isinstance(event, _FREEING) and len(self.scheduler.pool):
            self._wake(self._settle_s)

    def unique(self) -> str:
        """Return 128 random bits in hexadecimal."""
        return f"{self._rng.getrandbits(128):032x}"

    def choose_prefiller(self, number: RequestId, other_than: Prefiller | None) -> Prefiller | None:
        """Return the open prefiller with the fewest hand-offs, another than the last if there is.

        If none is open, crowded ones are: the decode rank waits with its blocks taken.
        """
        eligible = self.scheduler.requests[number].ticket.eligible
        up = self.instances.up(None if eligible is None else eligible.prefillers)
        able = [prefiller for prefiller in up if prefiller.open] or up
        able = [prefiller for prefiller in able if prefiller is not other_than] or able
        return min(able, key=lambda prefiller: prefiller.hand_offs, default=None)

    def expect(self, transfer: str, hand_off: "HandOff") -> None:
        """Let the decode rank of `transfer` call back."""
        self._hand_offs[transfer] = hand_off

    def expect_no_more(self, transfer: str) -> None:
        """Let it call back no more."""
        self._hand_offs.pop(transfer, None)

    def may_retry(self, leg: str, fault: Fault, *, free: bool = False) -> bool:
        """Take one retry from the budget, if there is one; a free one needs none."""
        if not (free or self._retries.spend()):
            return False
        self._metrics.legs.retry(leg, fault.value)
        return True

    def leg_failed(self, target: Target, fault: Fault, reason: str) -> None:
        """Report a failure to the health checks."""
        self._health.failed(target, fault, reason)

    def leg_succeeded(self, target: Target) -> None:
        """Report a success to the health checks."""
        self._health.succeeded(target)

    def counts_dear(self, engine: Prefiller | Rank) -> None:
        """Ask an engine that recounts whole answers for its counts no more."""
        if not engine.counts_dear:
            engine.counts_dear = True
            fields = {"engine": engine.name}
            _log.warning("reasoning parser: tokens are counted by events", extra={"fields": fields})

    def counted(self, session: Session, prompt_tokens: int) -> None:
        """Learn how many tokens a prompt really has."""
        shape = session.shape
        features = RequestFeatures(prompt_tokens, shape.max_tokens, session.record.keys)
        self._predictors.begin(session.number, features)
        self._estimate.learn(shape, prompt_tokens)

    def started(self, session: Session) -> None:
        """Note that a stream began: the request is in its rank's batch."""
        self._join(session)
        assert session.record.admitted_ns is not None
        waited_s = self.clock() - session.record.admitted_ns / 1e9
        self._transfer_s += 0.1 * (waited_s - self._transfer_s)

    def ended(self, session: Session) -> None:
        """Forget a session that is over, and count it."""
        number, record = session.number, session.record
        del self.sessions[number]
        self._ids[record.request_id] -= 1
        if not self._ids[record.request_id]:
            del self._ids[record.request_id]
        self._started.pop(number, None)
        self._unheard.pop(number, None)
        if not self.sessions:
            self._empty.set()
        rounds = record.output_tokens / record.choices
        if record.outcome is Outcome.OK and record.output_tokens:
            self._predictors.ended(number, max(1, round(rounds)), by_itself=True)
            # A short answer's time is mostly not that of its steps.
            if not session.shape.stream and record.admitted_ns is not None and rounds >= _TELLING:
                self.steps.observe_answer((record.ended_ns - record.admitted_ns) / 1e9 / rounds)
        else:
            self._predictors.ended(number, int(rounds), by_itself=False)
        self._admission.ended(session.ticket, _ending(record), self._now_ns())
        self._metrics.requests.ended(record)
        self._log.request_ended(record)

    # Decisions.

    def _now_ns(self) -> int:
        return round(self.clock() * 1e9)

    def _wake(self, delay_s: float) -> None:
        """See that a tick comes after at most `delay_s`."""
        if self._tick_timer is not None:
            if self._tick_soon or delay_s > 0.0:
                return
            self._tick_timer.cancel()
        self._tick_soon = delay_s == 0.0
        if self._tick_soon:
            self._tick_timer = self._loop.call_soon(self._tick)
        else:
            self._tick_timer = self.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        decides = len(self.scheduler.pool) > 0
        failed_before = self.isolation.failures.rounds_failed
        well = self.isolation.run("follow", self.follow)
        well &= self.isolation.run("tick", self._decide)
        if decides or not well:
            self.isolation.failures.round_ended(
                well=well and self.isolation.failures.rounds_failed == failed_before
            )

    def _decide(self) -> None:
        self._stage_start_s = begin_s = self._stopwatch()
        actions = self.scheduler.handle(Tick(), now_ns=self._now_ns())
        took_s = self._stopwatch() - begin_s
        for action in actions:
            self._perform(action)
        self._metrics.decisions.dispatched("total", took_s)

    def _perform(self, action: Action) -> None:
        session = self.sessions.get(action.request)
        if session is not None:  # Else its end failed, and nothing is left of it.
            self.isolation.run_for(session, "action", self._act, session, action)

    def _act(self, session: Session, action: Action) -> None:
        match action:
            case StartPrefill(_, prefiller, _):
                session.start_prefill(self.instances.prefillers[prefiller])
            case AbortPrefill() | AbortDecode():
                session.drop_leg()
            case ReleasePrefill(number):
                # No engine takes such a word over HTTP: the blocks stay until their lease ends.
                if number in self.scheduler.requests:
                    self._metrics.legs.abandoned_lease(session.lease_ended())
                else:
                    self._metrics.legs.abandoned_lease("ended")
            case Admit(number, rank):
                if not session.shape.stream:
                    self._unheard[number] = self.clock()
                session.start_decode(self.instances.ranks[rank])
            case Expire():
                session.expire("the request waited longer than it may")

    # Progress.

    def _without_start(self, number: RequestId) -> RequestRecomputed:
        """Return what to say of a lost request that was taken for started without a stream to tell.

        Its KV cache may have left the prefiller, as the scheduler was told, or not: so it is
        prefilled again. What it is thought to have emitted is taken back, as no client has it.
        """
        emitted = self.scheduler.ledger.kv_tokens(number)
        emitted -= self.scheduler.requests[number].kv_tokens
        if emitted:
            self.scheduler.handle(TokensEmitted(number, -emitted), now_ns=0)
        self.sessions[number].prefill_again()
        return RequestRecomputed(number, elsewhere=True)

    def _join(self, session: Session) -> None:
        self._unheard.pop(session.number, None)
        self._started[session.number] = session
        self.steps.start(session)

    def _age(self, number: RequestId) -> int:
        """Return the tokens that each sequence of a started request has emitted."""
        session = self._started[number]
        emitted = session.emitted_tokens
        if not session.shape.stream:  # As far as the step clock tells.
            emitted = self.scheduler.ledger.kv_tokens(number)
            emitted -= self.scheduler.requests[number].kv_tokens
        return emitted // session.shape.sequences

    def _measure_balance(self, steps: int) -> None:
        loads = self.scheduler.ledger.loads[self._serving]
        self.idle_tokens += steps * idle_tokens(loads)
        self.capacity_tokens += steps * len(loads) * int(loads.max())

    def _give_up_stranded(self, now_s: float) -> None:
        """Refuse what has waited long enough for engines that are not there."""
        kinds = dict.fromkeys(
            request.ticket.eligible for request in self.scheduler.requests.values()
        )
        unready = [kind for kind in kinds if self.instances.missing_for(kind)]
        before = self._unready_since_s
        self._unready_since_s = {kind: before.get(kind, now_s) for kind in unready}
        for kind, since_s in self._unready_since_s.items():
            if now_s - since_s > self._stranded_s:
                self._give_up_waiting(kind)

    def _give_up_waiting(self, kind: Eligible | None) -> None:
        """Refuse what needs `kind` and waits."""
        requests = self.scheduler.requests
        # In this order: who leaves the pool makes room for the queue.
        for state in (State.QUEUED, State.POOLED):
            waiting = [one for one in requests.values() if one.state is state]
            for number in [one.request for one in waiting if one.ticket.eligible == kind]:
                session = self.sessions[number]
                self.isolation.run_for(
                    session, "timer", session.give_up, "no engine of each role is up"
                )

    def _sweep(self, expected_s: float) -> None:
        self._sweep_timer = None
        now_s = self.clock()
        try:
            self.isolation.run("timer", self._look_after, now_s, expected_s)
            for session in list(self.sessions.values()):
                self.isolation.run_for(session, "timer", session.check_deadline, now_s)
            self.isolation.run("predictor", self._predictors.score, self._started, self._age)
            self.isolation.run("timer", self._give_up_stranded, now_s)
        finally:
            if self.sessions:
                self._sweep_timer = self.call_later(_SWEEP_S, self._sweep, now_s + _SWEEP_S)

    def _look_after(self, now_s: float, expected_s: float) -> None:
        self._metrics.decisions.loop_lag(max(0.0, now_s - expected_s))
        self.stalls.tick()
        deadline_ns = self.scheduler.next_deadline_ns()
        if self.isolation.failures.failing or (
            deadline_ns is not None and deadline_ns <= self._now_ns()
        ):
            self._tick()
        else:
            self.follow()


def _ending(record: RequestRecord) -> Ending:
    first_ns = record.first_token_ns
    return Ending(
        served=record.outcome is Outcome.OK,
        first_token_ns=None if first_ns is None else first_ns - record.arrived_ns,
        output_tokens=record.output_tokens,
    )

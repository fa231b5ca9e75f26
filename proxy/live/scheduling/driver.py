"""The live driver: feeds the scheduler what happens on the sockets and performs what it decides.

The same role as the simulator's driver, with the loop's clock. Admissions are decided in ticks. A
tick comes at once when a request enters the pool; when a slot becomes free it comes a moment later,
so that all requests that end with the same step are seen by one decision.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from balanceroute.predictors import RequestFeatures
from balanceroute.proxy.core.admission import Admission, Ending, Load, Refusal
from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    Admit,
    DecodeLost,
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
    Tick,
    Ticket,
)
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Instances, Prefiller
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
from balanceroute.proxy.live.scheduling.progress import Progress
from balanceroute.proxy.live.scheduling.stranded import Stranded
from balanceroute.proxy.live.scheduling.tick_timer import TickTimer
from balanceroute.proxy.live.telemetry.record import Log, Outcome, RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.connectors import Connector
    from balanceroute.proxy.live.engines.health import Health
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.prediction.predictor_set import PredictorSet
    from balanceroute.proxy.live.request.hand_off import HandOff
    from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
    from balanceroute.proxy.live.telemetry.metrics import Metrics
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers

_log = logging.getLogger(__name__)
# How often deadlines are looked at and progress is taken, in seconds.
_SWEEP_S = 0.25
# After these a slot may be free for a request that waits.
_FREEING = frozenset(
    {RequestFinished, RequestFailed, RequestCancelled, RequestRecomputed, RankOpened}
)
# After these a request may be new in the pool.
_POOLING = frozenset({PrefillDone, RequestArrived, DecodeLost})


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


class Driver:
    """One scheduler and the sessions it decides for.

    Args:
        scheduler: Its numbers of ranks and prefillers are those of `instances`.
        predictors: Told of every request; asked by the core.
        health: Told how legs end.
        metrics: Told of everything countable.
        failures: Told of exceptions, none of which ends service.
        log: Told of every request that ended.
        admission: Asked before a request is let in.
        rng: Makes tokens that name transfers.
        stopwatch: Real seconds, for the cost of decisions.

    Attributes:
        sessions: All live requests.
        progress: How far those in decode are.
        hand_offs: Prefills that decode ranks may call for, by their transfers.
        transfers: Judges who is at fault when KV caches cannot be pulled.
        stalls: Tells what is new from what waited while the process stood still.
        lost: Moves requests away from engines that do not answer.
        isolation: Ends alone what failed.
        uses_keys: Whether the keys of requests are asked for; see `prompt_keys`.
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
        self.leg_failed, self.leg_succeeded = health.failed, health.succeeded
        self.sessions: dict[RequestId, Session] = {}
        self.progress = Progress(scheduler, self.feed, loop.time)
        self.started = self.progress.began
        self.hand_offs: dict[str, HandOff] = {}
        self.uses_keys = predictors.uses_keys
        self.draining = False
        self._loop = loop
        self._predictors = predictors
        self._metrics = metrics
        self.isolation = isolation = Isolation(self, failures)
        self.guarded, self.crashed = isolation.guarded, isolation.crashed
        self._log = log
        self._admission = admission
        self._settle_s = settings.settle_s
        self._stranded = Stranded(scheduler, instances, after_s=settings.stranded_s)
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
        self.lost = LostEngines(self.sessions, self._loop.call_soon)
        self.transfers = self._make_transfers(health, metrics)
        self._ticks = TickTimer(loop, self._tick)
        self._pending: deque[Action] = deque()
        self._performing = False
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def _make_transfers(self, health: "Health", metrics: "Metrics") -> KvTransfers:
        return KvTransfers(
            health.enough,
            pulling=lambda: [s.pair for s in self.sessions.values() if s.pair is not None],
            convict=health.convict,
            is_on_trial=health.is_on_trial,
            count=metrics.legs.kv_transfer_failed,
            passed=self.reopen,
        )

    # What the gateway does.

    def ticket(self, shape: Shape, eligible: Eligible | None) -> Ticket:
        """Return what is known of a request; `eligible` are the engines of its model."""
        decode = not (shape.direct and self.legs.direct is Direct.PREFILL)
        split = not shape.direct and not self.connector.facts.decode_first
        return Ticket(
            prompt_tokens=self._estimate.tokens(shape),
            slots=shape.sequences,
            prefill=split or not decode,
            decode=decode,
            eligible=eligible,
            max_tokens=shape.max_tokens,
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
        if self.uses_keys:  # Not before: hashing a prompt is wasted on a request that is refused.
            ticket = replace(ticket, keys=prompt_keys(shape.api, body))
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
            self._stranded.begin()
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
    def ready(self) -> bool:
        """Whether a request would be taken now, and decided about as it should be."""
        return self.instances.ready and not self.draining and not self.isolation.failures.persist

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        kept = self.sessions or self._ids or self.hand_offs
        return not kept and self.progress.idle

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._empty.wait()

    def shut_down(self) -> None:
        """End every request and every timer."""
        for session in list(self.sessions.values()):
            self.isolation.run_for(
                session, "shutdown", session.give_up, "the proxy is shutting down"
            )
        self._ticks.cancel()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None

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
        self._ticks.wake(0.0)

    def follow(self) -> None:
        """Bring the scheduler's mirror of the ranks up to date, as before every decision."""
        self.progress.follow(self._serving)

    def engine_id(self, request_id: str) -> str:
        """Return what a request is called at the engines: its id, unless that is in use.

        Two requests of one name would be one to some engines.
        """
        if request_id in self._ids:
            return f"{request_id}-{self._rng.getrandbits(32):08x}"
        return request_id

    # What a session does: Host.

    def feed(self, event: Event) -> None:
        """Give the scheduler an event, perform what it decides, and see that a tick follows.

        What it decides may be for the very session that feeds, which is ready for that.
        """
        if isinstance(event, RequestRecomputed | DecodeLost | PrefillLost):
            event = self.progress.left(event)
        self._perform(self.scheduler.handle(event, now_ns=self._now_ns()))
        kind = type(event)
        if kind in _POOLING:
            if len(self.scheduler.pool):
                self._ticks.wake(0.0)
        elif kind in _FREEING and len(self.scheduler.pool):
            self._ticks.wake(self._settle_s)

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

    def may_retry(self, leg: str, fault: Fault, *, free: bool = False) -> bool:
        """Take one retry from the budget, if there is one; a free one needs none."""
        if not (free or self._retries.spend()):
            return False
        self._metrics.legs.retry(leg, fault.value)
        return True

    def counted(self, session: Session, prompt_tokens: int) -> None:
        """Learn how many tokens a prompt really has."""
        ticket = session.ticket
        features = RequestFeatures(prompt_tokens, ticket.max_tokens, ticket.keys)
        self._predictors.begin(session.number, features)
        self._estimate.learn(session.shape, prompt_tokens)

    def ended(self, session: Session) -> None:
        """Forget a session that is over, and count it."""
        number, record = session.number, session.record
        del self.sessions[number]
        self._ids[record.request_id] -= 1
        if not self._ids[record.request_id]:
            del self._ids[record.request_id]
        self.progress.ended(session)
        if not self.sessions:
            self._empty.set()
        rounds = record.output_tokens / record.choices
        if record.outcome is Outcome.OK and record.output_tokens:
            self._predictors.ended(number, max(1, round(rounds)), by_itself=True)
        else:
            self._predictors.ended(number, int(rounds), by_itself=False)
        self._admission.ended(session.ticket, _ending(record), self._now_ns())
        self._metrics.requests.ended(record)
        self._log.request_ended(record)

    # Decisions.

    def _now_ns(self) -> int:
        return round(self.clock() * 1e9)

    def _tick(self) -> None:
        self._ticks.cancel()
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
        self._perform(actions)
        self._metrics.decisions.dispatched("total", took_s)

    def _perform(self, actions: list[Action]) -> None:
        """Perform actions in their order, behind those that are being performed."""
        self._pending += actions
        if self._performing:  # An action failed, and its request ends.
            return
        self._performing = True
        try:
            while self._pending:
                action = self._pending.popleft()
                session = self.sessions.get(action.request)
                if session is not None:
                    self.isolation.run_for(session, "action", self._act, session, action)
                elif isinstance(action, ReleasePrefill):
                    self.isolation.run("action", self._metrics.legs.abandoned_lease, "ended")
        finally:
            self._performing = False

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
            case Admit(_, rank):
                self.progress.admitted(session)
                session.start_decode(self.instances.ranks[rank])
            case Expire():
                session.expire("the request waited longer than it may")

    def _sweep(self, expected_s: float) -> None:
        self._sweep_timer = None
        now_s, progress = self.clock(), self.progress
        try:
            self.isolation.run("timer", self._look_after, now_s, expected_s)
            for session in list(self.sessions.values()):
                self.isolation.run_for(session, "timer", session.check_deadline, now_s)
            self.isolation.run("predictor", self._predictors.score, progress.started, progress.age)
            self.isolation.run("timer", self._give_up_stranded, now_s)
        finally:
            if self.sessions:
                self._sweep_timer = self.call_later(_SWEEP_S, self._sweep, now_s + _SWEEP_S)

    def _give_up_stranded(self, now_s: float) -> None:
        for number in self._stranded.due(now_s):
            session = self.sessions[number]
            self.isolation.run_for(
                session, "timer", session.give_up, "no engine of each role is up"
            )

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

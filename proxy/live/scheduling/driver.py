"""The live driver: the requests that clients send, and the parts that serve them.

The same role as the simulator's driver, with the loop's clock.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from balanceroute.proxy.core.admission import Admission, Ending, Refusal
from balanceroute.proxy.core.events import (
    Eligible,
    Event,
    PrefillerId,
    RankId,
    RequestArrived,
    RequestId,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.prediction import mean_output_tokens
from balanceroute.proxy.core.scheduler import Scheduler, placed
from balanceroute.proxy.live.connectors import Connector
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.health import Health
from balanceroute.proxy.live.engines.instances import (
    Instances,
    KvTransfers,
    Prefiller,
    Rank,
    Role,
    Target,
    process_of,
)
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Shape, TokenEstimate
from balanceroute.proxy.live.openai.urgency import Urgency
from balanceroute.proxy.live.prediction import ticket_features
from balanceroute.proxy.live.request.leg_settings import Direct, guessed_tokens
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import (
    EngineSeen,
    KvAbandoned,
    KvMissing,
    LegFailed,
    LegSucceeded,
    PromptCounted,
    PullFailed,
    RemotePrefillEnded,
    Report,
    SessionContext,
    SessionEnded,
    StreamLent,
    StreamReturned,
)
from balanceroute.proxy.live.scheduling.decisions import (
    Decisions,
    DriverSettings,
    Observers,
)
from balanceroute.proxy.live.scheduling.progress import Progress
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.record import OK, RequestRecord
from balanceroute.proxy.wire.http1.server import Reply

if TYPE_CHECKING:
    from balanceroute.proxy.live.scheduling.scraped_loads import RankPaces

# Requests leave an engine that does not answer any more, and KV caches that died with one.
#
# An engine that refuses connections or is silent is quarantined. What it was sent, and has not
# begun to answer, would wait there for its own time limit, of minutes: it goes elsewhere at once,
# as far as attempts allow. Where no other engine serves, the retry budget has to allow it too, so
# that a common fault of all engines makes no storm. KV caches on it are lost, and so are those of an
# engine that restarted under the same address: a request that waits in the pool with one is prefilled
# again, at the pace at which prefillers take prompts.


def sessions_on(sessions: Mapping[RequestId, Session], target: Target) -> list[Session]:
    """Return the requests in flight on an instance, of all live ones."""
    return [session for session in sessions.values() if target in session.targets]


def in_flight(sessions: Mapping[RequestId, Session]) -> Counter[Target]:
    """Return how many requests are in flight on each instance that has some."""
    return Counter(target for session in sessions.values() for target in {*session.targets})


class LostEngines:
    """Reports lost engines to the sessions that use them.

    Args:
        call_soon: Calls back from the event loop, so that a session in the middle of a failure is
            notified after it.
        group_ended: Called with each decode server that has died.
    """

    def __init__(
        self,
        sessions: Mapping[RequestId, Session],
        call_soon: Callable[[Callable[[], None]], object],
        group_ended: Callable[[Target], None],
    ) -> None:
        self._sessions = sessions
        self._call_soon = call_soon
        self._group_ended = group_ended
        # To be reported soon: many engines may go at once.
        self._gone: set[Target] = set()
        self._lost_kv = False

    def gone(self, target: Target) -> None:
        if not self._gone:
            self._call_soon(self._leave)
        self._gone.add(target)
        self.died(target)

    def died(self, target: Target) -> None:
        """Note that an engine is dead, though its server may answer."""
        if target.role is Role.DECODE:
            self._group_ended(target)

    def kv_lost(self, prefiller: Prefiller) -> None:
        """Note that the KV caches which a prefiller has handed out so far are no more."""
        prefiller.lost_kv += 1
        if not self._lost_kv:
            self._lost_kv = True
            self._call_soon(self._drop_lost_kv)

    def engine_seen(self, prefiller: Prefiller, engine_id: str) -> None:
        """Note an id of the engine behind a prefiller's address, which is new with each start."""
        engine = process_of(engine_id)
        if engine in prefiller.engines:
            return
        if prefiller.engines:
            self.kv_lost(prefiller)
        prefiller.engines.add(engine)

    def _leave(self) -> None:
        gone, self._gone = self._gone, set()
        left = [
            (session, target)
            for session in self._sessions.values()
            for target in dict.fromkeys(session.targets)
            if target in gone
        ]
        for session, target in left:
            session.engine_lost(target)

    def _drop_lost_kv(self) -> None:
        self._lost_kv = False
        for session in list(self._sessions.values()):
            session.drop_lost_kv()


# A cap on retries over the whole proxy, so that an outage is not answered with a retry storm.
#
# A fifth of the requests may be tried again, as Envoy's and Linkerd's budgets have it, and ten
# more (as many as Linkerd allows a second) so that the first failures after a quiet time are
# retried: it takes a few to find the engine at fault. Once one engine is known to be down and another
# serves, what was on it is retried whatever the budget: hundreds of requests may end with one
# engine, each of them has few attempts, and slots bound what any engine gets.


class RetryBudget:
    """Earns a share of a retry with each request.

    Args:
        most: The largest number of retries saved up.
    """

    def __init__(self, *, share: float = 0.2, reserve: float = 10.0, most: float = 100.0) -> None:
        self._share = share
        self._most = most
        self._left = reserve

    def earn(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


# Passes what sessions report and ask to the parts that all of them share.


_log = logging.getLogger(__name__)
_WARN_AGAIN_NS = 60 * 10**9
_WITHOUT_KV = (
    "a prefiller computed a prompt and left no KV cache to pull, so it is computed again: has it the "
    "--kv-transfer-config of --connector?"
)


class Feedback:
    """Takes reports; keeps the retry budget and the estimate of prompts itself."""

    def __init__(
        self,
        table: "SessionTable",
        instances: Instances,
        progress: Progress,
        observers: Observers,
        *,
        transfers: KvTransfers,
        lost: LostEngines,
        admission: Admission,
        now_ns: Callable[[], int],
    ) -> None:
        self.retries = RetryBudget()
        self.estimate = TokenEstimate()
        self._table = table
        self._instances = instances
        self._progress = progress
        self._health, self._predictors = observers.health, observers.predictors
        self._metrics, self._log = observers.metrics, observers.log
        self._transfers = transfers
        self._lost = lost
        self._admission = admission
        self._now_ns = now_ns
        self._warned_ns: dict[PrefillerId, int] = {}  # From when on, again.
        # A table, because `match` costs more, and every request has half a dozen reports.
        self._takers: dict[type[Report], Callable[[Any], None]] = {
            LegSucceeded: self._leg_succeeded,
            LegFailed: self._leg_failed,
            PullFailed: self._pull_failed,
            EngineSeen: self._engine_seen,
            KvMissing: self._kv_missing,
            PromptCounted: self._prompt_counted,
            KvAbandoned: self._kv_abandoned,
            RemotePrefillEnded: self._remote_prefill_ended,
            SessionEnded: self._session_ended,
            StreamLent: progress.lent,
            StreamReturned: progress.returned,
        }

    def take(self, report: Report) -> None:
        self._takers[type(report)](report)

    def may_retry(
        self,
        leg: str,
        fault: Fault,
        lost_with: Target | None = None,
        pulled_from: PrefillerId | None = None,
    ) -> bool:
        """Take one retry from the budget, if there is one; see `Host.may_retry`."""
        # A trial is the proxy's own doing, and its request goes on with instances that work.
        source = None if pulled_from is None else self._instances.prefillers[pulled_from]
        free = source is not None and source.kv_trial
        lost = (lost_with, None if source is None else source.target)
        free |= any(one is not None and self._instances.others_serve(one) for one in lost)
        if not (free or self.retries.spend()):
            return False
        self._metrics.legs.retry(leg, fault.value)
        return True

    def choose_prefiller(
        self, number: RequestId, rank: RankId | None, other_than: PrefillerId | None
    ) -> Prefiller | None:
        """Return the open prefiller with the fewest hand-offs, another than the last if there is.

        It fits the rank that asks. If none is open, crowded ones are: the decode rank waits with its
        blocks taken.
        """
        eligible = self._table.live[number].ticket.eligible
        up = self._instances.up(None if eligible is None else eligible.prefillers)
        up = [one for one in up if one.ranks is None or rank in one.ranks]
        able = [prefiller for prefiller in up if prefiller.open] or up
        able = [prefiller for prefiller in able if prefiller.id != other_than] or able
        chosen = min(able, key=lambda prefiller: prefiller.hand_offs, default=None)
        if chosen is not None:
            chosen.hand_offs += 1
        return chosen

    def _leg_succeeded(self, report: LegSucceeded) -> None:
        self._health.succeeded(report.target)
        if report.pull is not None:
            prefiller, rank = report.pull
            instances = self._instances
            self._transfers.succeeded(instances.prefillers[prefiller], instances.ranks[rank])

    def _leg_failed(self, report: LegFailed) -> None:
        self._metrics.engines.leg_failed(report.target, report.fault)
        self._health.failed(report.target, report.fault, report.reason)
        if report.says_dead:
            self._lost.died(report.target)
        elif report.fault is Fault.RESET and self._instances.groups.mates(report.target):
            self._health.verify(report.target)  # If it is dead, the ranks of its group are soon.

    def _pull_failed(self, report: PullFailed) -> None:
        prefiller = self._instances.prefillers[report.prefiller]
        rank = self._instances.ranks[report.rank]
        self._transfers.failed(report.request, prefiller, rank, report.fault, report.reason)

    def _engine_seen(self, report: EngineSeen) -> None:
        prefiller = self._instances.prefillers[report.prefiller]
        if prefiller.without_kv:
            prefiller.without_kv = ""
        self._lost.engine_seen(prefiller, report.engine_id)

    def _kv_missing(self, report: KvMissing) -> None:
        prefiller = self._instances.prefillers[report.prefiller]
        self._metrics.engines.left_no_kv(prefiller.target, report.kind)
        before, prefiller.without_kv = prefiller.without_kv, report.reason
        now_ns = self._now_ns()
        # An engine that keeps some KV caches and drops other ones shall not fill the log.
        if not before and now_ns - self._warned_ns.get(report.prefiller, now_ns) >= 0:
            self._warned_ns[report.prefiller] = now_ns + _WARN_AGAIN_NS
            fields = {"url": prefiller.name, "reason": report.reason}
            _log.warning(_WITHOUT_KV, extra={"fields": fields})

    def _prompt_counted(self, report: PromptCounted) -> None:
        session = self._table.live[report.request]
        if report.prompt_tokens != session.ticket.prompt_tokens:  # Of token ids it is known before.
            features = ticket_features(session.ticket, report.prompt_tokens)
            self._predictors.begin(report.request, features)
            session.record.hinted(self._predictors.active.hint_of(report.request))
        self.estimate.learn(session.shape, report.prompt_tokens)

    def _kv_abandoned(self, report: KvAbandoned) -> None:
        self._metrics.legs.abandoned_lease(report.how)

    def _remote_prefill_ended(self, report: RemotePrefillEnded) -> None:
        self._instances.prefillers[report.prefiller].hand_offs -= 1

    def _session_ended(self, report: SessionEnded) -> None:
        number, record = report.request, report.record
        session = self._table.live[number]
        began = self._table.remove(number, record)
        self._progress.ended(session)
        rounds = record.output_tokens / record.choices
        if record.outcome is OK and record.output_tokens:
            self._predictors.ended(number, max(1, round(rounds)), by_itself=True)
        else:
            self._predictors.ended(number, int(rounds), by_itself=False)
        if self._admission.follows:
            self._admission.ended(session.ticket, _ending(record, began=began), self._now_ns())
        if not record.superseded:
            self._metrics.requests.ended(record)
            self._log.request_ended(record)


def _ending(record: RequestRecord, *, began: bool) -> Ending:
    first_ns = record.first_token_ns
    return Ending(
        served=record.outcome is OK,
        first_token_ns=None if first_ns is None else first_ns - record.arrived_ns,
        output_tokens=record.output_tokens,
        prompt_tokens=record.prompt_tokens,
        began=began,
    )


class SessionTable:
    """Adds requests and forgets them; `live` has them in order of arrival."""

    def __init__(self, rng: random.Random) -> None:
        self.live: dict[RequestId, Session] = {}
        self._rng = rng
        self._arrived = 0
        self._ids: dict[str, int] = {}  # Client request ids in use, and by how many.
        self._waiting: set[RequestId] = set()  # Those that no engine was given yet.
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def arrived(self) -> int:
        """Requests that were ever numbered."""
        return self._arrived

    def next_number(self) -> RequestId:
        number = RequestId(self._arrived)
        self._arrived += 1
        return number

    def add(self, session: Session) -> None:
        self.live[session.number] = session
        self._waiting.add(session.number)
        request_id = session.record.request_id
        self._ids[request_id] = self._ids.get(request_id, 0) + 1
        self._empty.clear()

    def begin(self, number: RequestId) -> bool:
        """Note that an engine is given a request; return whether that is the first time."""
        waited = number in self._waiting
        self._waiting.discard(number)
        return waited

    def remove(self, number: RequestId, record: RequestRecord) -> bool:
        """Forget a request that is over; return whether an engine was given it."""
        del self.live[number]
        left = self._ids.pop(record.request_id) - 1
        if left:
            self._ids[record.request_id] = left
        if not self.live:
            self._empty.set()
        return not self.begin(number)

    def engine_id(self, request_id: str) -> str:
        """Return what a request is called at the engines: its id, unless that is in use.

        Two requests of one name would be one to some engines.
        """
        if request_id in self._ids:
            return f"{request_id}-{self._rng.getrandbits(32):08x}"
        return request_id

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        return not (self.live or self._ids or self._waiting)

    async def drained(self) -> None:
        await self._empty.wait()


class Arrival(Struct, frozen=True):
    """One request."""

    shape: Shape
    eligible: Eligible | None  # The engines of its model; None for all.
    # What its client expects one sequence to emit; None if it does not say.
    expected_tokens: int | None
    urgency: Urgency
    tenant: str  # Whose it is; empty without tenants.
    session: int  # See `Ticket`.
    early_token: bool  # See `Ticket`.
    # Whether its model is an adapter: its token ids are not all that its blocks depend on.
    adapter: bool
    body: RequestBody
    # Returns the lines of every engine leg, given what the engines are to call the request.
    headers: Callable[[str], bytes]
    reply: Reply
    record: RequestRecord
    refuse: Callable[[Refusal], None]  # Answers the client that it is refused.
    # Makes the session, given its number, the driver, and by name what it is about.
    make: Callable[..., Session] = Session
    # Hashes of the prompt's blocks that its client gave, and the tokens of one; see `Ticket`.
    blocks: tuple[int, ...] = ()
    block_tokens: float = 0.0

    def ticket(self, prompt_tokens: int, context: SessionContext) -> Ticket:
        """Return what the scheduler is to know of it; `prompt_tokens` may be an estimate."""
        shape = self.shape
        decode = (
            not shape.direct or context.legs.direct_of(guessed_tokens(shape)) is not Direct.PREFILL
        )
        split = not shape.direct and not context.connector.decode_first
        return Ticket(
            prompt_tokens=prompt_tokens,
            slots=shape.sequences,
            prefill=split or not decode,
            decode=decode,
            eligible=self.eligible,
            max_tokens=shape.max_tokens,
            expected_tokens=self.expected_tokens,
            model=shape.model,
            tenant=self.tenant,
            level=self.urgency.level,
            weight=self.urgency.weight,
            deadline_ns=self.urgency.deadline_ns,
            session=self.session,
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            early_token=self.early_token,
        )


# Tokens that cannot be guessed, made in batches: one call to the system's randomness for many.

_BATCH = 64
_DIGITS = 32  # Of 128 bits.


class UniqueTokens:
    """Returns a token that no other has, 32 hexadecimal digits, whenever it is called."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._made: list[str] = []

    def __call__(self) -> str:
        if not self._made:
            digits = f"{self._rng.getrandbits(_BATCH * _DIGITS * 4):0{_BATCH * _DIGITS}x}"
            self._made = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        return self._made.pop()


_NEVER_BEGUN = Ending(served=False, first_token_ns=None, output_tokens=0, began=False)


class Driver:
    """One scheduler and the sessions it decides for; their `Host`.

    Args:
        scheduler: Its numbers of ranks and prefillers are those of `instances`.
        admission: Asked before a request is let in.
        rng: Draws what tells requests of one name apart.

    Attributes:
        uses_keys: Whether a predictor uses the keys of requests; see `prompt_keys`.
        draining: Whether new requests are refused.
        paces: How far ranks are by their engines' own counters; None if nothing reads them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Instances,
        context: SessionContext,
        observers: Observers,
        *,
        admission: Admission,
        settings: DriverSettings,
        rng: random.Random,
    ) -> None:
        self.scheduler, self.instances, self.context = scheduler, instances, context
        predictors = observers.predictors
        self.draining, self.uses_keys = False, predictors.uses_keys
        self.paces: RankPaces | None = None
        self.forbids = settings.forbids  # See `DriverSettings`.
        self._predictors, self._admission, self._settings = predictors, admission, settings
        if self.uses_keys or settings.uses_blocks:
            from balanceroute.proxy.live.openai import prompt_keys  # noqa: PLC0415

            self._keys_of, self._blocks_of = prompt_keys.prompt_keys, prompt_keys.prompt_blocks
        self.table = SessionTable(rng)  # All live requests, and their names.
        self.sessions = self.table.live  # Those of the table.
        # Feeds the scheduler.
        self.decisions = Decisions(
            *(scheduler, instances, self.sessions, context),
            observers=observers,
            settings=settings,
            began=self._began,
        )
        self.isolation, self.veto = self.decisions.isolation, self.decisions.veto
        # Reports to the scheduler which instances are open now; see `Decisions.reopen`.
        self.reopen = self.decisions.reopen
        # Moves requests away from engines that do not answer.
        self.lost = LostEngines(
            self.sessions, asyncio.get_running_loop().call_soon, self.veto.group_ended
        )
        self._feedback = Feedback(
            self.table,
            instances,
            self.decisions.progress,
            observers,
            transfers=self._make_transfers(observers.health, observers.metrics),
            lost=self.lost,
            admission=admission,
            now_ns=self._now_ns,
        )
        self.report = self._feedback.take  # Takes note of something; see `Feedback.take`.
        self.may_retry = self._feedback.may_retry

    def _make_transfers(self, health: Health, metrics: Metrics) -> KvTransfers:
        return KvTransfers(
            health.enough,
            pulling=lambda: [
                s.work.pair for s in self.sessions.values() if s.work.pair is not None
            ],
            convict=health.convict,
            is_on_trial=health.is_on_trial,
            count=metrics.legs.kv_transfer_failed,
            passed=self.reopen,
        )

    def _now_ns(self) -> int:
        return int(self.context.clock() * 1e9 + 0.5)  # `round` takes three times as long.

    # What the gateway does.

    def prompt_tokens(self, shape: Shape) -> int:
        """Return the length of a request's prompt, which may be an estimate."""
        return self._feedback.estimate.tokens(shape)

    def refuse(self, ticket: Ticket, record: RequestRecord) -> Refusal | None:
        """Return why a request that comes now cannot be taken, or None."""
        if self.draining:
            return Refusal(503, "the proxy is shutting down", 1)
        if self.forbids is not None and (reason := self.forbids()):
            return Refusal(503, reason, 1)
        scheduler = self.scheduler
        # Held, it waits: an administrator has engines sleep, and wakes them up.
        if not (self.instances.ready or scheduler.intake.held) and not (
            # Ranks may compute short prompts while no prefiller is up.
            ticket.prefill
            and not placed(scheduler, ticket, self._now_ns()).prefill
            and Role.DECODE not in self.instances.missing_for(ticket.eligible)
        ):
            return Refusal(503, self.instances.why_none, 1)
        load = scheduler.intake.load(
            ticket, scheduler.prefill_queue, scheduler.waiting, len(scheduler.requests)
        )
        if load.first_token_ns is not None:
            record.expected_ttft_ns = round(load.first_token_ns)
        return self._admission.offer(ticket, load, self._now_ns())

    def submit(self, arrival: Arrival) -> None:
        shape, record = arrival.shape, arrival.record
        ticket = arrival.ticket(self.prompt_tokens(shape), self.context)
        refusal = self.refuse(ticket, record)
        if refusal is not None:
            arrival.refuse(refusal)
            return
        headers = arrival.headers(self.table.engine_id(record.request_id))
        try:  # Not before: hashing a prompt is wasted on a request that is refused.
            result = placed(self.scheduler, self._hashed(ticket, arrival), self._now_ns())
        except Exception:
            self._admission.ended(ticket, _NEVER_BEGUN, self._now_ns())
            raise
        record.local_prefill = ticket.prefill and not result.prefill
        record.prompt_estimate, record.keys = result.prompt_tokens, result.keys
        session = arrival.make(
            self.table.next_number(),
            self,
            ticket=result,
            shape=shape,
            body=arrival.body,
            headers=headers,
            reply=arrival.reply,
            record=record,
        )
        self._feedback.retries.earn()
        self.table.add(session)
        self.decisions.begin_sweeps()
        self.isolation.run_for(session, "arrival", self._take, session)

    def _hashed(self, ticket: Ticket, arrival: Arrival) -> Ticket:
        """Return a ticket with the hashes of its prompt that the settings need."""
        api, body = arrival.shape.api, arrival.body
        if self.uses_keys:
            ticket = structs.replace(ticket, keys=self._keys_of(api, body))
        if self._settings.uses_blocks and not ticket.blocks:
            blocks = self.instances.engine_blocks or self.instances.rank_blocks
            # Tokens of a block where prompts are token ids; 0 for blocks of text alone.
            tokens = 0 if blocks is None or arrival.adapter else blocks.block_tokens
            ticket = self._blocks_of(api, body, tokens).of(ticket)
        return ticket

    def _began(self, session: Session) -> None:
        if self.table.begin(session.number) and self._admission.follows:
            self._admission.began(session.ticket, self._now_ns())

    def _take(self, session: Session) -> None:
        self._predict(session, session.ticket.prompt_tokens)
        if not session.ticket.prefill:
            session.pooled()
        self.feed(RequestArrived(session.number, session.ticket))

    def expect(self, session: Session, ticket: Ticket) -> None:
        """Replace the ticket of a session; the scheduler keeps the one that it has."""
        session.ticket = ticket
        self._predict(session, ticket.prompt_tokens)

    def _predict(self, session: Session, prompt_tokens: int) -> None:
        number, ticket = session.number, session.ticket
        self._predictors.begin(number, ticket_features(ticket, prompt_tokens))
        session.record.hinted(self._predictors.active.hint_of(number))
        if self._settings.expects_output:
            tokens = mean_output_tokens(self._predictors, number, ticket.max_tokens)
            session.ticket = structs.replace(ticket, predicted_tokens=tokens)

    # What the proxy does.

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now, and decided about as it should be."""
        forbidden = self.draining or (self.forbids is not None and bool(self.forbids()))
        return self.instances.ready and not forbidden and not self.isolation.failures.persist

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        return self.table.idle and not self.context.hand_offs and self.decisions.progress.idle

    def use_connector(self, connector: Connector) -> None:
        """Take another connector from the next request on."""
        self.context = replace(self.context, connector=connector)

    def hold(self, *, held: bool) -> None:
        """Let nothing start before its prefill, or let it start again."""
        self.scheduler.intake.hold(held=held)
        self.decisions.wake()

    @property
    def unsettled(self) -> bool:
        """Whether there is a request that no rank runs, so that no rank's metrics count it."""
        return any(
            not (request.state is LifecycleState.DECODING and request.started)
            for request in self.scheduler.requests.values()
        )

    def end_waiting(self, reason: str) -> None:
        """End the requests that are on no engine; another proxy may serve them."""
        # In this order: a request that leaves the pool makes room for the queue.
        for state in (LifecycleState.QUEUED, LifecycleState.POOLED):
            requests = self.scheduler.requests.values()
            for number in [one.request for one in requests if one.state is state]:
                session = self.sessions.get(number)
                if session is not None:
                    self.isolation.run_for(session, "leader", session.give_up, reason)

    def shut_down(self) -> None:
        """End every request and every timer."""
        for session in list(self.sessions.values()):
            self.isolation.run_for(
                session, "shutdown", session.give_up, "the proxy is shutting down"
            )
        self.decisions.stop()

    def grown(self) -> None:
        """Note that `reconfigure` gave the scheduler instances, or another policy."""
        self.reopen()
        self.decisions.wake()

    # What a session does: Host.

    def feed(self, event: Event, *implied: Report) -> None:
        for report in implied:
            self.report(report)
        self.decisions.feed(event)

    def choose_prefiller(
        self, number: RequestId, other_than: PrefillerId | None
    ) -> Prefiller | None:
        request = self.scheduler.requests.get(number)
        rank = None if request is None else request.rank
        return self._feedback.choose_prefiller(number, rank, other_than)

    def group_of(self, engine: Prefiller | Rank) -> Target:
        return self.instances.groups.first(engine)

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
        self.isolation.crashed(number, request_id, what, error)

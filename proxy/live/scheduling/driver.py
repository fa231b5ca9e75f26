"""The live driver: the requests that clients send, and the parts that serve them.

The same role as the simulator's driver, with the loop's clock.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from balanceroute.proxy.core.admission import Admission, Ending, Refusal
from balanceroute.proxy.core.events import Event, PrefillerId, RequestArrived, RequestId, Ticket
from balanceroute.proxy.core.prediction import mean_output_tokens
from balanceroute.proxy.core.scheduler import placed
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Instances, KvTransfers, Prefiller, Rank, Role
from balanceroute.proxy.live.openai.prompt_keys import prompt_blocks, prompt_keys
from balanceroute.proxy.live.openai.shape import Shape
from balanceroute.proxy.live.prediction import ticket_features
from balanceroute.proxy.live.request.leg_settings import Direct, LegSettings, guessed_tokens
from balanceroute.proxy.live.request.lost_engines import LostEngines
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.session_host import Report, SessionContext, StallWatch
from balanceroute.proxy.live.request.suspects import Suspects
from balanceroute.proxy.live.scheduling.decisions import Decisions, Isolation, OpenInstances
from balanceroute.proxy.live.scheduling.feedback import Feedback, SessionTable
from balanceroute.proxy.live.scheduling.progress_veto import ProgressVeto
from balanceroute.proxy.live.scheduling.sweep import SWEEP_S, Stranded, Sweep
from balanceroute.proxy.live.telemetry.record import Log

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import Eligible
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.connectors import Connector
    from balanceroute.proxy.live.engines.health import Health
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.urgency import Urgency
    from balanceroute.proxy.live.prediction import PredictorSet
    from balanceroute.proxy.live.telemetry.component_metrics import DecisionFailures
    from balanceroute.proxy.live.telemetry.metrics import Metrics
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.pump import Pump
    from balanceroute.proxy.wire.http1.server import Reply


# A request that clients sent and that nobody has accepted or refused yet.


class Asked(Struct, frozen=True):
    """What a request asks for.

    Attributes:
        eligible: The engines of its model; None for all.
        expected_tokens: What its client expects one sequence to emit; None if it does not say.
        tenant: Whose it is; empty if tenants are not told apart.
        session: See `Ticket`.
        early_token: See `Ticket`.
        adapter: Whether its model is an adapter: its token ids are not all that its blocks depend on.
    """

    shape: "Shape"
    eligible: "Eligible | None"
    expected_tokens: int | None
    urgency: "Urgency"
    tenant: str
    session: int = 0
    early_token: bool = False
    adapter: bool = False

    def ticket(self, prompt_tokens: int, context: "SessionContext") -> Ticket:
        """Return what the scheduler is to know of it; `prompt_tokens` may be an estimate."""
        shape = self.shape
        decode = (
            not shape.direct or context.legs.direct_of(guessed_tokens(shape)) is not Direct.PREFILL
        )
        split = not shape.direct and not context.connector.facts.decode_first
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
            early_token=self.early_token,
        )


class Arrival(Struct, frozen=True):
    """One request.

    Attributes:
        headers: Returns the lines of every engine leg, given what the engines are to call the request.
        record: What is known of it.
        refuse: Answers the client that it is refused.
    """

    asked: Asked
    body: "RequestBody"
    headers: "Callable[[str], bytes]"
    reply: "Reply"
    record: "RequestRecord"
    refuse: "Callable[[Refusal], None]"


# Tokens that nobody can guess, made in batches: the system is asked for randomness once for many.

_BATCH = 64
_DIGITS = 32  # Of 128 bits.


class UniqueTokens:
    """Returns a token that no other has, 32 hexadecimal digits, whenever it is called."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._made: list[str] = []

    def __call__(self) -> str:
        """Return the next token."""
        if not self._made:
            digits = f"{self._rng.getrandbits(_BATCH * _DIGITS * 4):0{_BATCH * _DIGITS}x}"
            self._made = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        return self._made.pop()


_NEVER_BEGUN = Ending(served=False, first_token_ns=None, output_tokens=0, began=False)


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """How the driver works.

    Attributes:
        legs: Time limits and retries.
        settle_s: How long a tick waits for further requests to end with the same step.
        expects_output: Whether the queue order uses the expected output of requests.
        uses_blocks: Whether the prefill choice uses the blocks of prompts.
        stranded_s: How long requests wait for a role of which no instance is up. Less than that is
            an engine that restarts; who comes meanwhile is refused at once.
        progress_veto: Whether ranks that make no tokens are left out.
        warm_up: Whether engines that begin, or come back, get a share that grows.
    """

    legs: LegSettings
    expects_output: bool
    uses_blocks: bool
    progress_veto: bool
    warm_up: bool
    settle_s: float = 0.002
    stranded_s: float = 10.0


class Driver:
    """One scheduler and the sessions it decides for; their `Host`.

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
        uptime_s: What leases are measured by; see `Environment`.
        max_model_len: Returns a context that no engine exceeds for a model; None if one may.
        suspects: Prompts under which engines have died.
        pump: Moves the ordinary events of their streams; None if nobody else does.

    Attributes:
        context: What the sessions share.
        table: All live requests, and their names.
        sessions: Those of the table.
        decisions: Feeds the scheduler.
        lost: Moves requests away from engines that do not answer.
        veto: Leaves out ranks that make no tokens.
        isolation: Ends alone what failed.
        uses_keys: Whether the keys of requests are asked for; see `prompt_keys`.
        draining: Whether new requests are refused.
        report: Takes note of something; see `Feedback.take`.
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
        uptime_s: Callable[[], float],
        max_model_len: Callable[[str], int | None],
        suspects: Suspects,
        pump: "Pump | None" = None,
    ) -> None:
        self.scheduler, self.instances = scheduler, instances
        context = _context(connector, settings, metrics, rng, max_model_len, uptime_s=uptime_s)
        self.context = replace(context, suspects=suspects, pump=pump)
        self.draining, self.uses_keys = False, predictors.uses_keys
        self._predictors, self._admission, self._settings = predictors, admission, settings
        self.table = SessionTable(rng)
        self.sessions = self.table.live
        self.isolation = Isolation(self, scheduler.requests, self.sessions, failures)
        self._open_instances = OpenInstances(instances, self.feed, warm_up=settings.warm_up)
        self.decisions = Decisions(
            scheduler,
            self.sessions,
            instances,
            self._open_instances,
            self.isolation,
            metrics=metrics,
            suspects=suspects,
            settle_s=settings.settle_s,
            began=self._began,
            stopwatch=stopwatch,
            pumped=None if pump is None else pump.tokens,
        )
        self.lost = LostEngines(self.sessions, asyncio.get_running_loop().call_soon)
        self._feedback = Feedback(
            self.table,
            instances,
            self.decisions.progress,
            health=health,
            transfers=self._make_transfers(health, metrics),
            lost=self.lost,
            predictors=predictors,
            admission=admission,
            metrics=metrics,
            log=log,
            now_ns=self._now_ns,
        )
        self.report, self.veto = self._feedback.take, self._make_veto(health)
        self._sweep = self._make_sweep(metrics)

    def _make_sweep(self, metrics: "Metrics") -> Sweep:
        after_s = self._settings.stranded_s
        return Sweep(
            self.sessions,
            self.decisions,
            self._predictors,
            metrics.decisions,
            stalls=self.context.stalls,
            veto=self.veto,
            stranded=Stranded(self.scheduler, self.instances, after_s=after_s),
            isolation=self.isolation,
            clock=self.context.clock,
        )

    def _make_veto(self, health: "Health") -> ProgressVeto:
        loop = asyncio.get_running_loop()
        return ProgressVeto(
            *(self.scheduler, self.sessions, self.instances, self.decisions.progress),
            health=health,
            reopen=self.reopen,
            clock=loop.time,
            call_later=loop.call_later,
            active=self._settings.progress_veto,
        )

    def _make_transfers(self, health: "Health", metrics: "Metrics") -> KvTransfers:
        return KvTransfers(
            health.enough,
            pulling=lambda: [s.pair for s in self.sessions.values() if s.pair is not None],
            convict=health.convict,
            is_on_trial=health.is_on_trial,
            count=metrics.legs.kv_transfer_failed,
            passed=self.reopen,
        )

    def _now_ns(self) -> int:
        return int(self.context.clock() * 1e9 + 0.5)  # `round` takes three times as long.

    # What the gateway does.

    def ticket(self, asked: Asked) -> Ticket:
        """Return what is known of a request."""
        return asked.ticket(self.prompt_tokens(asked.shape), self.context)

    def prompt_tokens(self, shape: Shape) -> int:
        """Return the length of a request's prompt, which may be an estimate."""
        return self._feedback.estimate.tokens(shape)

    def refuse(self, ticket: Ticket, record: "RequestRecord") -> Refusal | None:
        """Return why a request that comes now cannot be taken, or None."""
        if self.draining:
            return Refusal(503, "the proxy is shutting down", 1)
        scheduler = self.scheduler
        # Held, it waits: an administrator has engines sleep, and wakes them up.
        if not (self.instances.ready or scheduler.intake.held) and not (
            # Ranks may compute short prompts while no prefiller is up.
            ticket.prefill
            and not placed(scheduler, ticket, self._now_ns()).prefill
            and Role.DECODE not in self.instances.missing_for(ticket.eligible)
        ):
            return Refusal(503, "no engine of each role is up", 1)
        load = scheduler.intake.load(
            ticket, scheduler.prefill_queue, scheduler.waiting, len(scheduler.requests)
        )
        if load.first_token_ns is not None:
            record.expected_ttft_ns = round(load.first_token_ns)
        return self._admission.offer(ticket, load, self._now_ns())

    def submit(self, arrival: Arrival) -> None:
        """Take a request, or refuse it."""
        shape, record = arrival.asked.shape, arrival.record
        ticket = self.ticket(arrival.asked)
        refusal = self.refuse(ticket, record)
        if refusal is not None:
            arrival.refuse(refusal)
            return
        headers = arrival.headers(self.table.engine_id(record.request_id))
        try:  # Not before: hashing a prompt is wasted on a request that is refused.
            ticket = self.place(self._hashed(ticket, arrival), record)
        except Exception:
            self._admission.ended(ticket, _NEVER_BEGUN, self._now_ns())
            raise
        record.prompt_estimate = ticket.prompt_tokens
        record.keys = ticket.keys
        self.take(
            Session(
                self.table.next_number(),
                self,
                ticket=ticket,
                shape=shape,
                body=arrival.body,
                headers=headers,
                reply=arrival.reply,
                record=record,
            )
        )

    @property
    def uses_blocks(self) -> bool:
        """Whether the prefill choice uses the blocks of prompts."""
        return self._settings.uses_blocks

    @property
    def token_block(self) -> int:
        """Tokens of a block where prompts are token ids; 0 for blocks of text alone."""
        blocks = self.instances.engine_blocks or self.instances.rank_blocks
        return 0 if blocks is None else blocks.block_tokens

    def _hashed(self, ticket: Ticket, arrival: Arrival) -> Ticket:
        """Return a ticket with the hashes of its prompt that somebody asks for."""
        api, body = arrival.asked.shape.api, arrival.body
        if self.uses_keys:
            ticket = structs.replace(ticket, keys=prompt_keys(api, body))
        if self.uses_blocks:
            token_block = 0 if arrival.asked.adapter else self.token_block
            ticket = prompt_blocks(api, body, token_block).of(ticket)
        return ticket

    def place(self, ticket: Ticket, record: "RequestRecord") -> Ticket:
        """Return the ticket of a request that was not refused, with who computes its prompt."""
        result = placed(self.scheduler, ticket, self._now_ns())
        record.local_prefill = ticket.prefill and not result.prefill
        return result

    def take(self, session: Session) -> None:
        """Take a request that was not refused."""
        self._feedback.retries.earn()
        self.table.add(session)
        self._sweep.begin()
        self.isolation.run_for(session, "arrival", self._take, session)

    def _began(self, session: Session) -> None:
        if self.table.begin(session.number) and self._admission.follows:
            self._admission.began(session.ticket, self._now_ns())

    def _take(self, session: Session) -> None:
        self._predict(session, session.ticket.prompt_tokens)
        if not session.ticket.prefill:
            session.pooled()
        self.feed(RequestArrived(session.number, session.ticket))

    def _predict(self, session: Session, prompt_tokens: int) -> None:
        """Have its output predicted from now on."""
        number, ticket = session.number, session.ticket
        self._predictors.begin(number, ticket_features(ticket, prompt_tokens))
        session.record.hinted(self._predictors.hint_of(number))
        if self._settings.expects_output:
            tokens = mean_output_tokens(self._predictors, number, ticket.max_tokens)
            session.ticket = structs.replace(ticket, predicted_tokens=tokens)

    # What the proxy does.

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now, and decided about as it should be."""
        return self.instances.ready and not self.draining and not self.isolation.failures.persist

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        return self.table.idle and not self.context.hand_offs and self.decisions.progress.idle

    def use_connector(self, connector: "Connector") -> None:
        """Take another connector from the next request on."""
        self.context = replace(self.context, connector=connector)

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self.table.drained()

    def hold(self, *, held: bool) -> None:
        """Let nothing start before its prefill, or let it start again."""
        self.scheduler.intake.hold(held=held)
        self.decisions.wake()

    def shut_down(self) -> None:
        """End every request and every timer."""
        for session in list(self.sessions.values()):
            self.isolation.run_for(
                session, "shutdown", session.give_up, "the proxy is shutting down"
            )
        self.decisions.stop()
        self.veto.stop()
        self._sweep.stop()

    def reopen(self, changed: "Iterable[Prefiller | Rank] | None" = None) -> None:
        """Tell the scheduler which instances are open now, after some of them changed; None for any."""
        self._open_instances.update(changed)
        self.veto.spare()

    def grown(self) -> None:
        """Note that the scheduler was told by `reconfigure` of instances, or of another policy."""
        self.reopen()
        self.decisions.wake()

    # What a session does: Host.

    def feed(self, event: Event, *implied: Report) -> None:
        """Give the scheduler an event; see `Decisions.feed`."""
        for report in implied:
            self.report(report)
        self.decisions.feed(event)

    def may_retry(self, leg: str, fault: Fault, *, pulled_from: PrefillerId | None = None) -> bool:
        """Return whether one more attempt is allowed; see `Feedback.may_retry`."""
        return self._feedback.may_retry(leg, fault, pulled_from)

    def choose_prefiller(
        self, number: RequestId, other_than: PrefillerId | None
    ) -> Prefiller | None:
        """Return who prefills; see `Feedback.choose_prefiller`."""
        request = self.scheduler.requests.get(number)
        rank = None if request is None else request.rank
        return self._feedback.choose_prefiller(number, rank, other_than)

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
        """End a session whose handling failed."""
        self.isolation.crashed(number, request_id, what, error)


def _context(
    connector: "Connector",
    settings: DriverSettings,
    metrics: "Metrics",
    rng: random.Random,
    max_model_len: Callable[[str], int | None],
    *,
    uptime_s: Callable[[], float],
) -> SessionContext:
    loop = asyncio.get_running_loop()
    return SessionContext(
        connector,
        settings.legs,
        clock=loop.time,
        uptime_s=uptime_s,
        call_later=loop.call_later,
        unique=UniqueTokens(rng),
        stalls=StallWatch(SWEEP_S, uptime_s),
        observe_gap=metrics.legs.observe_itl,
        max_model_len=max_model_len,
        hand_offs={},
    )

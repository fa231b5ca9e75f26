"""A relay's side of the protocol: what its sessions and its listener ask goes to the scheduler process."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from balanceroute.proxy.core import events
from balanceroute.proxy.core.admission import Refusal
from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.live.engines.instances import Prefiller
from balanceroute.proxy.live.openai.prompt_blocks import PromptBlocks, prompt_blocks
from balanceroute.proxy.live.openai.prompt_keys import prompt_keys
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.links import Link
from balanceroute.proxy.live.processes.orders import Orders, accept, await_anew, log_as_told
from balanceroute.proxy.live.processes.patience import Patience
from balanceroute.proxy.live.processes.questions import Questions
from balanceroute.proxy.live.processes.relay_reports import Reports, event_message
from balanceroute.proxy.live.processes.relay_sweep import RelaySweep
from balanceroute.proxy.live.processes.relay_tenancy import NO_SCHEDULER, RelayTenancy
from balanceroute.proxy.live.processes.resumption import resumed
from balanceroute.proxy.live.processes.stream_counts import StreamCounts
from balanceroute.proxy.live.request.phases import Phase
from balanceroute.proxy.live.request.reports import (
    Report,
    SessionEnded,
    StreamLent,
    StreamReturned,
)
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.stream_looks import StreamLooks
from balanceroute.proxy.live.request.suspects import EngineDied
from balanceroute.proxy.live.scheduling.arrival import Arrival
from balanceroute.proxy.live.scheduling.isolation import Isolation
from balanceroute.proxy.live.scheduling.sweep_timer import SWEEP_S

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.processes.mirror import Mirror
    from balanceroute.proxy.live.processes.uplink import Uplink
    from balanceroute.proxy.live.request.session_host import SessionContext
    from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures


_log = logging.getLogger(__name__)
_DecodeStarted = from_relay.DecodeStarted


class RemoteHost:
    """The `Host` of a relay's sessions, and the `Intake` of its listener.

    Args:
        mirror: The engines, kept up to date.
        context: What the sessions share.
        failures: Told of exceptions.
        uplink: The way to the scheduler process.
        limited: Whether there are tenants.
        waiting: Of requests that no scheduler process has answered while there is none.
        counts: Told of the streams that begin and end.
        occupancy: Returns what the relay holds, given how late its timers are, in seconds.

    Attributes:
        questions: What was asked and is not answered yet.
        sessions: All live requests.
        isolation: Ends alone what failed.
        draining: Whether new requests are refused.
        ready: Whether the scheduler process takes requests.
        refused: Why it is not welcome; empty if it is, or if nothing was said yet.
    """

    def __init__(
        self,
        mirror: "Mirror",
        context: "SessionContext",
        failures: "DecisionFailures",
        uplink: "Uplink",
        counts: StreamCounts,
        *,
        occupancy: Callable[[float], from_relay.Occupancy],
        waiting: int,
        limited: bool,
    ) -> None:
        self.context = context
        self.sessions: dict[RequestId, Session] = {}
        self.draining = self.ready = False
        self._arrived, self.refused = 0, ""
        self._said = to_relay.Welcome(0, "", 0, uses_keys=False)
        self.uplink = uplink
        self._links: dict[RequestId, Link] = {}
        self._mirror = mirror
        self._counts = counts
        self._reports = Reports(uplink)
        context.suspects.heard = self._engine_died
        self.questions = Questions(uplink.send)
        self.tenancy = RelayTenancy(self.questions, limited=limited)
        self._patience = Patience(context.call_later, waiting, self.tenancy.limit_waiting)
        self._empty = asyncio.Event()
        self._empty.set()
        self.isolation = Isolation(self, self._links, self.sessions, failures)
        orders = Orders(self._links, mirror.instances, self.isolation, self._now_ns)
        self._occupancy = occupancy
        self._sweep = RelaySweep(
            self.sessions,
            context.stalls,
            self.isolation,
            self._tell_occupancy,
            self._tell_looks,
        )
        self._looks = StreamLooks(self.sessions, context.clock, late_s=2 * SWEEP_S)
        takers: dict[type[to_relay.ToRelay], Callable[[Any], None]] = {
            to_relay.Welcome: self._welcome,
            to_relay.Unwelcome: self._unwelcome,
            to_relay.PrefillerState: mirror.take_prefiller,
            to_relay.RankState: mirror.take_rank,
            to_relay.Models: mirror.take_models,
            to_relay.Readiness: self._readiness,
            to_relay.LogLevel: log_as_told,
            to_relay.SuspectPrompts: lambda message: context.suspects.take(message.known),
            to_relay.Accepted: self._accepted,
            to_relay.StartPrefill: orders.start_prefill,
            to_relay.StartDecode: orders.start_decode,
            to_relay.Refused: self._refused,
            to_relay.RetryAnswered: self.questions.take,
            to_relay.PrefillerChosen: self._prefiller_chosen,
            to_relay.Page: self.questions.take,
            to_relay.AloneAnswered: self.tenancy.answered,
            to_relay.Drain: self._drain,
        }
        self._takers = defaultdict(lambda: orders.other, takers)
        self._reporters = self._make_reporters()

    def take(self, messages: Sequence[to_relay.ToRelay]) -> None:
        """Take the messages of a frame, in order."""
        self.isolation.run_each("relay", self._takers, messages)
        if isinstance(messages[0], to_relay.Welcome):
            self.isolation.run("relay", self._resume)

    @property
    def scheduler(self) -> str:
        """Names the scheduler process that made it welcome last; empty for none yet."""
        return self._said.scheduler

    # What the listener does: Intake.

    @property
    def uses_keys(self) -> bool:
        """Whether the keys of requests are asked for; see `prompt_keys`."""
        return self._said.uses_keys

    def submit(self, arrival: Arrival) -> None:
        """Take a request; the scheduler process accepts or refuses it later."""
        if not self.uplink.connected and len(self._unanswered()) >= self._patience.most:
            arrival.refuse(NO_SCHEDULER)
            return
        number = RequestId(self._arrived)
        self._arrived += 1
        asked, record = arrival.asked, arrival.record
        shape, urgency = asked.shape, asked.urgency
        if self.uses_keys:
            record.keys = prompt_keys(shape.api, arrival.body)
        blocks = PromptBlocks()
        if self._said.uses_blocks:
            token_block = 0 if asked.adapter else self._said.token_block
            blocks = prompt_blocks(shape.api, arrival.body, token_block)
        session = Session(
            number,
            self,
            # How long its prompt is the scheduler process says when it accepts it.
            ticket=blocks.of(asked.ticket(0, self.context)),
            shape=shape,
            body=arrival.body,
            headers=b"",
            reply=arrival.reply,
            record=record,
        )
        self.sessions[number] = session
        self._empty.clear()
        self._sweep.begin()
        if not session.ticket.prefill:
            session.pooled()
        message = from_relay.Arrival(
            number,
            shape,
            asked.expected_tokens,
            urgency.level,
            urgency.deadline_ns,
            asked.tenant,
            record.keys,
            record,
            urgency.weight,
            blocks,
            asked.session,
            asked.early_token,
        )
        self._links[number] = Link(arrival, message, session)
        self.uplink.send(message)

    def report(self, report: Report) -> None:
        """Pass a report on, or take it."""
        self._reporters[type(report)](report)

    def _make_reporters(self) -> defaultdict[type[Report], Callable[[Any], None]]:
        reporters: dict[type[Report], Callable[[Any], None]] = {
            SessionEnded: self._session_ended,
            StreamLent: self._stream_lent,
            StreamReturned: self._stream_returned,
        }
        return defaultdict(lambda: self._reports.tell, reporters)

    def _session_ended(self, report: SessionEnded) -> None:
        self.uplink.send_end(self._forget(report.request).ended(report))

    def _stream_lent(self, report: StreamLent) -> None:
        self._counts.lent(self._links[report.request].row, report.slot)

    def _stream_returned(self, report: StreamReturned) -> None:
        self._counts.returned(report.slot)

    def _engine_died(self, died: EngineDied) -> None:
        name, target = died.request_id, died.target
        self.uplink.send(
            from_relay.EngineDied(
                *(died.fingerprint, name, target.role, target.url, died.sent_s, died.died_s),
                said=died.said,
            )
        )

    # What sessions do: Host.

    def feed(self, event: events.Event, *implied: Report) -> None:
        """Pass an event on, from which the scheduler process knows what it implies."""
        number: RequestId = event.request  # type: ignore[union-attr]
        link = self._links[number]
        if link.ended_by(event, answered=bool(implied)):
            return
        message = self._event_message(link, event)
        link.fed(event, self._now_ns())
        if not link.loose:
            # Nobody decides who begins to decode.
            tell = self.uplink.send_late if type(message) is _DecodeStarted else self.uplink.send
            tell(message)
            link.sent += 1
        elif not isinstance(event, events.DecodeStarted | events.FirstToken):
            self.uplink.send(self._anew(link))

    def ask_retry(
        self,
        leg: str,
        fault: "Fault",
        answer: Callable[[bool], None],
        *,
        pulled_from: PrefillerId | None = None,
    ) -> None:
        """Ask whether one more attempt is allowed."""
        self.questions.ask(
            answer, lambda question: from_relay.AskRetry(question, leg, fault, pulled_from)
        )

    def ask_prefiller(
        self,
        number: RequestId,
        other_than: PrefillerId | None,
        answer: Callable[[Prefiller | None], None],
    ) -> None:
        """Ask who prefills."""
        self.questions.ask(
            answer, lambda question: from_relay.AskPrefiller(question, number, other_than)
        )

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
        """End a session whose handling failed."""
        self.isolation.crashed(number, request_id, what, error)

    # The scheduler process comes and goes.

    def gone(self) -> None:
        """Go on without a scheduler process: engines work on, and who waits for a decision waits."""
        self.uplink.close()
        self.ready = False
        self._counts.forget()
        self._patience.begin()
        for link in self._links.values():
            link.row = -1

    def _resume(self) -> None:
        """Tell the scheduler process, which has told of the engines, of the requests that are here."""
        self._patience.end()
        renumbered = self._mirror.renumbered()
        self.questions.renumber(renumbered.prefillers)
        lives = resumed(self._links, renumbered, self.isolation)
        anew = [self._anew(link) for _, link in self._unanswered()]
        self.uplink.open([*lives, from_relay.Resumed(), *anew, *self.questions.open()])

    def _anew(self, link: Link) -> from_relay.Arrival:
        await_anew(link.session)
        link.arrive_anew()
        if link.session.answer.opened:  # Its first token is not due any more.
            link.message = structs.replace(link.message, deadline_ns=None)
        return link.message

    # What the relay's own parts do.

    def use_connector(self, connector: "Any") -> None:
        """Take another connector from the next request on."""
        self.context = replace(self.context, connector=connector)

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._empty.wait()

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        return (
            not (self.sessions or self._links or self.questions.open() or self.context.hand_offs)
            and self._counts.idle
        )

    def shut_down(self) -> None:
        """End every request."""
        for session in list(self.sessions.values()):
            self.isolation.run_for(
                session, "shutdown", session.give_up, "the proxy is shutting down"
            )

    def stop(self) -> None:
        """End every timer."""
        self._sweep.stop()
        self._counts.stop()
        self._patience.stop()

    # Parts.

    def _now_ns(self) -> int:
        return int(self.context.clock() * 1e9 + 0.5)  # `round` takes three times as long.

    def _unanswered(self) -> list[tuple[RequestId, Link]]:
        """Return the requests that are neither accepted nor refused."""
        links = self._links.items()
        return [one for one in links if not (one[1].accepted or one[1].over)]

    def _tell_occupancy(self, lag_s: float) -> None:
        if self.uplink.connected:
            self.uplink.send(self._occupancy(lag_s))
        elif self._patience.spent:
            for number, link in self._unanswered():
                self._refuse(number, link, NO_SCHEDULER)

    def _tell_looks(self) -> None:
        elapsed_s, sightings = self._looks.look()
        if sightings and self.uplink.connected:
            self.uplink.send(from_relay.Looks(elapsed_s, tuple(sightings)))

    def _event_message(self, link: Link, event: events.Event) -> from_relay.CoreEvent:
        session = link.session
        if isinstance(event, events.DecodeStarted) and link.row >= 0:
            self._counts.started(link.row, session)
        elif isinstance(event, events.RequestRecomputed):
            self._counts.left(link.row)
        emitted = session.emitted.tokens
        return event_message(event, link.taken, pulls=session.pullable, emitted=emitted)

    def _forget(self, number: RequestId) -> Link:
        del self.sessions[number]
        link = self._links.pop(number)
        self._counts.left(link.row)
        if not self.sessions:
            self._empty.set()
            if self.draining:
                self.uplink.send(from_relay.Drained())
        return link

    # What the scheduler process says.

    def _welcome(self, message: to_relay.Welcome) -> None:
        self._said = message
        self.context.suspects.key = message.suspects_key
        self._reports.begin_anew()
        self._mirror.begin_anew()

    def _unwelcome(self, message: to_relay.Unwelcome) -> None:
        self.refused = message.reason
        fields = {"reason": message.reason}
        _log.error("the scheduler process refuses this relay", extra={"fields": fields})

    def _readiness(self, message: to_relay.Readiness) -> None:
        self.ready = message.ready

    def _drain(self, message: to_relay.Drain) -> None:
        del message
        self.draining = True
        if not self.sessions:
            self.uplink.send(from_relay.Drained())

    def _prefiller_chosen(self, message: to_relay.PrefillerChosen) -> None:
        chosen = message.prefiller
        prefiller = None if chosen is None else self._mirror.instances.prefillers[chosen]
        self.questions.answer(message.question, prefiller)

    def _accepted(self, message: to_relay.Accepted) -> None:
        link = self._links.get(RequestId(message.number))
        if link is None:
            return
        session = link.session
        link.row = message.row
        if link.accepted:  # By another scheduler process, under which it began.
            if session.phase is Phase.STREAMING and session.decodes:
                self._counts.started(link.row, session)
            return
        self.tenancy.told(link.arrival, message.allowances)
        session.headers = link.arrival.headers(message.engine_id)
        accept(session, message)
        link.accept(message.engine_id, self._now_ns())

    def _refused(self, message: to_relay.Refused) -> None:
        number = RequestId(message.number)
        link = self._links.get(number)
        if link is None or link.accepted:
            return  # Its client left, and the session told so.
        self.tenancy.told(link.arrival, message.allowances)
        refusal = Refusal(message.status, message.reason, message.retry_after_s, message.cause)
        self._refuse(number, link, refusal)

    def _refuse(self, number: RequestId, link: Link, refusal: Refusal) -> None:
        session = link.session
        if session.answer.opened:  # It was served, and handed back.
            session.give_up(refusal.reason)
            return
        session.withdraw()
        self._forget(number)
        link.arrival.refuse(refusal)

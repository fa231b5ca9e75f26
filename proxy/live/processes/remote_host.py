"""A relay's side of the protocol: what its sessions and its listener ask goes to the scheduler process."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core import events
from balanceroute.proxy.core.admission import Refusal
from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.live.engines.instances import Prefiller, Target
from balanceroute.proxy.live.openai.prompt_blocks import prompt_blocks
from balanceroute.proxy.live.openai.prompt_keys import prompt_keys
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.relay_reports import as_message
from balanceroute.proxy.live.processes.relay_sweep import RelaySweep
from balanceroute.proxy.live.processes.stream_counts import StreamCounts
from balanceroute.proxy.live.request.reports import Report, SessionEnded
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.scheduling.arrival import Arrival
from balanceroute.proxy.live.scheduling.isolation import Isolation

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.processes.mirror import Mirror
    from balanceroute.proxy.live.processes.outbox import Outbox
    from balanceroute.proxy.live.request.session_host import SessionContext
    from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Link:
    """Where a request stands with the scheduler process.

    Attributes:
        arrival: While it is neither accepted nor refused.
        sent: Core events sent.
        taken: Bindings acted on.
        over: Whether it has ended for the scheduler.
        row: Names it in `Progress`.
    """

    arrival: Arrival | None
    sent: int = 0
    taken: int = 0
    over: bool = False
    row: int = -1


class RemoteHost:
    """The `Host` of a relay's sessions, and the `Intake` of its listener.

    Args:
        mirror: The engines, kept up to date.
        context: What the sessions share.
        failures: Told of exceptions.
        out: Sends messages to the scheduler process.
        counts: Told of the streams that begin and end.
        occupancy: Returns what the relay holds, given how late its timers are, in seconds.

    Attributes:
        sessions: All live requests.
        isolation: Ends alone what failed.
        draining: Whether new requests are refused.
        ready: Whether the scheduler process takes requests.
        scheduler: Names the scheduler process that made it welcome; empty for none yet.
        refused: Why it is not welcome; empty if it is, or if nothing was said yet.
    """

    def __init__(
        self,
        mirror: "Mirror",
        context: "SessionContext",
        failures: "DecisionFailures",
        out: "Outbox[from_relay.FromRelay]",
        counts: StreamCounts,
        *,
        occupancy: Callable[[float], from_relay.Occupancy],
    ) -> None:
        self.context = context
        self.sessions: dict[RequestId, Session] = {}
        self.draining = self.ready = self.uses_keys = self._uses_blocks = False
        self.scheduler = self.refused = ""
        self.out = out
        self._links: dict[RequestId, _Link] = {}
        self._mirror = mirror
        self._counts = counts
        self._arrived = self._asked = 0
        self._questions: dict[int, Callable[[Any], None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.isolation = Isolation(self, self._links, self.sessions, failures)
        self._occupancy = occupancy
        self._sweep = RelaySweep(
            self.sessions, context.stalls, self.isolation, self._tell_occupancy
        )
        self._takers: dict[type[to_relay.ToRelay], Callable[[Any], None]] = {
            to_relay.Welcome: self._welcome,
            to_relay.Unwelcome: self._unwelcome,
            to_relay.PrefillerState: mirror.take_prefiller,
            to_relay.RankState: mirror.take_rank,
            to_relay.Models: mirror.take_models,
            to_relay.Readiness: self._readiness,
            to_relay.Accepted: self._accepted,
            to_relay.Refused: self._refused,
            to_relay.RetryAnswered: self._answered,
            to_relay.PrefillerChosen: self._prefiller_chosen,
            to_relay.Page: self._answered,
            to_relay.Drain: self._drain,
        }

    def take(self, messages: Sequence[to_relay.ToRelay]) -> None:
        """Take the messages of a frame, in order."""
        for message in messages:
            self.isolation.run("relay", self._takers.get(type(message), self._order), message)

    # What the listener does: Intake.

    def submit(self, arrival: Arrival) -> None:
        """Take a request; the scheduler process accepts or refuses it later."""
        number = RequestId(self._arrived)
        self._arrived += 1
        asked, record = arrival.asked, arrival.record
        shape, urgency = asked.shape, asked.urgency
        if self.uses_keys:
            record.keys = prompt_keys(shape.api, arrival.body)
        blocks, block_share = (
            prompt_blocks(shape.api, arrival.body) if self._uses_blocks else ((), 0.0)
        )
        session = Session(
            number,
            self,
            # How long its prompt is the scheduler process says when it accepts it.
            ticket=asked.ticket(0, self.context),
            shape=shape,
            body=arrival.body,
            headers=[],
            reply=arrival.reply,
            record=record,
        )
        self.sessions[number] = session
        self._links[number] = _Link(arrival)
        self._empty.clear()
        self._sweep.begin()
        if not session.ticket.prefill:
            session.pooled()
        self.out.send(
            from_relay.Arrival(
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
                block_share,
            )
        )

    def report(self, report: Report) -> None:
        """Pass a report on."""
        if isinstance(report, SessionEnded):
            self._forget(report.request)
        self.out.send(as_message(report))

    # What sessions do: Host.

    def feed(self, event: events.Event) -> None:
        """Pass an event on."""
        number: RequestId = event.request  # type: ignore[union-attr]
        link = self._links[number]
        if link.over:
            return
        self.out.send(self._event_message(number, link, event))
        link.sent += 1

    def ask_retry(
        self,
        leg: str,
        fault: "Fault",
        answer: Callable[[bool], None],
        *,
        pulled_from: PrefillerId | None = None,
    ) -> None:
        """Ask whether one more attempt is allowed."""
        question = self._ask(answer)
        self.out.send(from_relay.AskRetry(question, leg, fault, pulled_from))

    def ask_prefiller(
        self,
        number: RequestId,
        other_than: PrefillerId | None,
        answer: Callable[[Prefiller | None], None],
    ) -> None:
        """Ask who prefills."""
        self.out.send(from_relay.AskPrefiller(self._ask(answer), number, other_than))

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
        """End a session whose handling failed."""
        self.isolation.crashed(number, request_id, what, error)

    # What the relay's own parts do.

    def ask_page(self, path: str, answer: Callable[[bytes], None]) -> None:
        """Ask for a page that tells of all processes."""
        question = self._ask(answer)
        self.out.send(from_relay.AskPage(question, "/metrics" if path == "/metrics" else "/load"))

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
            not (self.sessions or self._links or self._questions or self.context.hand_offs)
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

    # Parts.

    def _tell_occupancy(self, lag_s: float) -> None:
        self.out.send(self._occupancy(lag_s))

    def _event_message(
        self, number: RequestId, link: _Link, event: events.Event
    ) -> from_relay.CoreEvent:
        taken = link.taken
        match event:
            case events.PrefillDone(_, prompt_tokens, lease_ns):
                pulls = self.sessions[number].pullable
                return from_relay.PrefillDone(number, taken, prompt_tokens, lease_ns, pulls)
            case events.PrefillLost(_, elsewhere, decode, same_rank):
                return from_relay.PrefillLost(number, taken, elsewhere, decode, same_rank)
            case events.DecodeLost():
                return from_relay.DecodeLost(number, taken)
            case events.DecodeStarted():
                session = self.sessions[number]
                self._counts.started(link.row, session)
                return from_relay.DecodeStarted(number, taken, session.emitted.tokens)
            case events.RequestRecomputed(_, elsewhere):
                self._counts.left(link.row)
                return from_relay.Recomputed(number, taken, elsewhere)
            case events.RequestFinished():
                return self._ended(number, link, "finished")
            case events.RequestFailed():
                return self._ended(number, link, "failed")
            case events.RequestCancelled():
                return self._ended(number, link, "cancelled")
            case _:
                raise AssertionError(f"no session feeds {event}")

    def _ended(self, number: RequestId, link: _Link, how: Any) -> from_relay.Ended:
        link.over = True
        return from_relay.Ended(number, link.taken, how)

    def _forget(self, number: RequestId) -> None:
        del self.sessions[number]
        self._counts.left(self._links.pop(number).row)
        if not self.sessions:
            self._empty.set()
            if self.draining:
                self.out.send(from_relay.Drained())

    def _ask(self, answer: Callable[[Any], None]) -> int:
        self._asked += 1
        self._questions[self._asked] = answer
        return self._asked

    # What the scheduler process says.

    def _welcome(self, message: to_relay.Welcome) -> None:
        self.uses_keys, self._uses_blocks = message.uses_keys, message.uses_blocks
        self.scheduler = message.scheduler

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
            self.out.send(from_relay.Drained())

    def _answered(self, message: to_relay.RetryAnswered | to_relay.Page) -> None:
        answer = self._questions.pop(message.question)
        answer(message.allowed if isinstance(message, to_relay.RetryAnswered) else message.body)

    def _prefiller_chosen(self, message: to_relay.PrefillerChosen) -> None:
        chosen = message.prefiller
        prefiller = None if chosen is None else self._mirror.instances.prefillers[chosen]
        self._questions.pop(message.question)(prefiller)

    def _accepted(self, message: to_relay.Accepted) -> None:
        number = RequestId(message.number)
        link = self._links.get(number)
        if link is None or link.arrival is None:
            return
        session = self.sessions[number]
        link.row = message.row
        session.headers = link.arrival.headers(message.engine_id)
        session.ticket = replace(session.ticket, prompt_tokens=message.prompt_estimate)
        session.record.prompt_estimate = message.prompt_estimate
        link.arrival = None

    def _refused(self, message: to_relay.Refused) -> None:
        number = RequestId(message.number)
        link = self._links.get(number)
        if link is None or link.arrival is None:
            return  # Its client left, and the session told so.
        session = self.sessions[number]
        session.withdraw()
        self._forget(number)
        link.arrival.refuse(
            Refusal(message.status, message.reason, message.retry_after_s, message.cause)
        )

    def _order(self, message: Any) -> None:
        """Have a session do what is said, unless it has ended or the order is void."""
        number = RequestId(message.number)
        link, session = self._links.get(number), self.sessions.get(number)
        if link is None or session is None or link.over:
            return
        if isinstance(message, to_relay.StartPrefill | to_relay.StartDecode):
            if message.heard < link.sent:
                return
            link.taken += 1
        elif isinstance(message, to_relay.Expire | to_relay.Crash):
            link.over = True
        if isinstance(message, to_relay.Crash):
            self.isolation.end(session, "relay")
        else:
            self.isolation.run_for(session, "action", self._obey, session, message)

    def _obey(self, session: Session, message: Any) -> None:
        instances = self._mirror.instances
        match message:
            case to_relay.StartPrefill(_, _, prefiller):
                session.start_prefill(instances.prefillers[prefiller])
            case to_relay.StartDecode(_, _, rank):
                session.start_decode(instances.ranks[rank])
            case to_relay.LeaseEnded(_, cheaper):
                session.lease_ended(cheaper=cheaper)
            case to_relay.PrefillAgain():
                session.prefill_again()
            case to_relay.Expire(_, reason):
                session.expire(reason)
            case to_relay.GiveUp(_, reason):
                session.give_up(reason)
            case to_relay.EngineLost(_, role, url):
                session.engine_lost(Target(role, url))
            case to_relay.DropLostKv():
                session.drop_lost_kv()
            case to_relay.InstanceRemoved(_, role, url):
                target = Target(role, url)
                if session.is_on(target):
                    session.instance_removed(target)
            case _:
                raise ValueError(f"a scheduler does not say {message}")

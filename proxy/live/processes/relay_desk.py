"""One relay, as the scheduler process serves it: its messages go to the driver, and answers back."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from balanceroute.proxy.core import events
from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.live.engines.instances import Prefiller, Target
from balanceroute.proxy.live.openai.urgency import Urgency
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.adoption import adoption
from balanceroute.proxy.live.processes.alone_requests import AloneRequests
from balanceroute.proxy.live.processes.frames import FrameError
from balanceroute.proxy.live.processes.outbox import Outbox
from balanceroute.proxy.live.processes.remote_request import RemoteRequest
from balanceroute.proxy.live.request import reports
from balanceroute.proxy.live.scheduling.arrival import Asked
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.live.processes.hub import Hub
    from balanceroute.proxy.live.telemetry.record import RequestRecord

_GONE = "internal error: its relay process ended"
_ENDINGS: dict[str, Callable[[events.RequestId], events.Event]] = {
    "finished": events.RequestFinished,
    "failed": events.RequestFailed,
    "cancelled": events.RequestCancelled,
}


class RelayDesk:
    """Serves one connection of one relay.

    Args:
        hub: What all relays share.
        write: Sends messages as one frame.

    Attributes:
        requests: Those of the relay, by its own numbers.
        occupancy: What it told last.
        drained: Whether it said so.
    """

    def __init__(self, hub: "Hub", write: Callable[[Sequence[to_relay.ToRelay]], None]) -> None:
        self.requests: dict[int, RemoteRequest] = {}
        self.occupancy = from_relay.Occupancy(0, {}, 0, 0, 0, 0, 0, 0.0)
        self.drained = False
        self.out = Outbox(hub.loop.call_soon, hub.loop.call_later, write, self._first)
        self._hub = hub
        self._alone = AloneRequests(hub.tenancy)
        self._driver = hub.driver
        self._isolation = hub.driver.isolation
        self._live_in_core = hub.driver.scheduler.requests
        self._welcome: to_relay.Welcome | None = None
        self._told: dict[tuple[str, int], to_relay.ToRelay] = {}
        self._hand_offs: Counter[events.PrefillerId] = Counter()
        takers: dict[type[from_relay.FromRelay], Callable[[Any], None]] = {
            from_relay.Hello: self._hello,
            from_relay.Live: self._live,
            from_relay.Resumed: lambda _: None,
            from_relay.Arrival: self._arrival,
            from_relay.PrefillDone: self._prefill_done,
            from_relay.FirstToken: self._first_token,
            from_relay.PrefillLost: self._event,
            from_relay.DecodeLost: self._event,
            from_relay.DecodeStarted: self._decode_started,
            from_relay.Recomputed: self._event,
            from_relay.SessionEnded: self._session_ended,
            from_relay.AskRetry: self._ask_retry,
            from_relay.AskPrefiller: self._ask_prefiller,
            from_relay.AskPage: self._ask_page,
            from_relay.Progress: self._progress,
            from_relay.RemotePrefillEnded: self._remote_prefill_ended,
            from_relay.EngineSeen: self._engine_seen,
            from_relay.Occupancy: self._take_occupancy,
            from_relay.Drained: self._take_drained,
            from_relay.Gaps: hub.take_gaps,
            from_relay.AskAlone: self._ask_alone,
            from_relay.Recorded: self._recorded,
            from_relay.LegRetried: hub.take_retry,
            from_relay.Failure: hub.take_failure,
            from_relay.EngineDied: hub.take_death,
            from_relay.Looks: partial(hub.take_looks, self),
        }
        self._takers = defaultdict(lambda: self._report, takers)

    def take(self, messages: Sequence[from_relay.FromRelay]) -> None:
        """Take the messages of a frame, in order. What fails ends one request at most.

        Raises:
            FrameError: The relay is not welcome yet, and says something else than `Hello`.
        """
        if self._welcome is None and [type(one) for one in messages] != [from_relay.Hello]:
            raise FrameError("a relay says Hello first, and nothing else until it is welcome")
        if not self._hub.gathering.over:
            self._gather(messages)
            return
        self._isolation.run_each("relay", self._takers, messages)

    def take_one(self, message: from_relay.FromRelay) -> None:
        """Take a message."""
        self._isolation.run_each("relay", self._takers, (message,))

    def welcome(self, message: to_relay.Welcome) -> None:
        """Tell the relay of the deployment from now on."""
        self._welcome = message
        self.out.flush_soon()

    def gone(self) -> None:
        """End every request of the relay, whose connection is closed, and release what it held."""
        self.out.close()
        self._hub.forget(self)
        self._alone.gone()
        self._hub.gathering.forget(self)
        driver = self._driver
        now_s = driver.context.clock()
        for request in list(self.requests.values()):
            request.record.end(Outcome.INTERNAL_ERROR, _GONE, now_s)
            self._isolation.run("relay", self._end, request, request.record)
        for number, count in self._hand_offs.items():
            driver.instances.prefillers[number].hand_offs -= count

    def _first(self) -> list[to_relay.ToRelay]:
        """Return what has changed of the deployment since it was told."""
        welcome = self._welcome
        if welcome is None:
            return []
        told, states = self._told, self._hub.states()
        if states is told:
            return []
        self._told = states
        # Most are the same object, which is compared at once.
        changed = [
            state
            for part, state in states.items()
            if (before := told.get(part)) is not state and before != state
        ]
        return changed if told else [welcome, *changed]

    def _gather(self, messages: Sequence[from_relay.FromRelay]) -> None:
        gathering = self._hub.gathering
        for message in messages:
            if gathering.over or isinstance(message, from_relay.Hello):
                self.take_one(message)
            else:
                gathering.keep(self, message)

    # Requests.

    def _hello(self, message: from_relay.Hello) -> None:
        self._hub.hello(self, message)

    def _arrival(self, message: from_relay.Arrival) -> None:
        driver = self._driver
        ticket = self._ticket(message)
        refusal = driver.refuse(ticket, message.record)
        if refusal is not None:
            self.out.send(
                to_relay.Refused(
                    message.number,
                    refusal.status,
                    refusal.reason,
                    refusal.retry_after_s,
                    refusal.cause,
                    dict(self._hub.tenancy.allowances(message.record.tenant)),
                )
            )
            return
        ticket = driver.place(ticket, message.record)
        message.record.prompt_estimate = ticket.prompt_tokens
        engine_id = driver.table.engine_id(message.record.request_id)
        driver.take(self._accept(message, ticket, engine_id))

    def _live(self, message: from_relay.Live) -> None:
        arrival, driver = message.arrival, self._driver
        record, ticket = arrival.record, self._ticket(arrival)
        ticket = structs.replace(
            ticket,
            prompt_tokens=record.prompt_estimate,
            prefill=ticket.prefill and not record.local_prefill,
        )
        request = self._accept(arrival, ticket, message.engine_id)

        def event(ticket: events.Ticket) -> events.RequestAdopted:
            request.adopt(message, driver.instances)
            return adoption(message, request.number, ticket)

        driver.adopt(request, event)

    def _ticket(self, message: from_relay.Arrival) -> events.Ticket:
        ticket = self._driver.ticket(
            Asked(
                message.shape,
                self._hub.eligible(message.shape.model),
                message.expected_tokens,
                Urgency(message.level, message.deadline_ns, message.weight),
                message.tenant,
                message.session,
                message.early_token,
            )
        )
        if message.blocks.hashes:
            ticket = message.blocks.of(ticket)
        return structs.replace(ticket, keys=message.keys) if message.keys else ticket

    def _accept(
        self, message: from_relay.Arrival, ticket: events.Ticket, engine_id: str
    ) -> RemoteRequest:
        """Have a request from now on."""
        driver, theirs = self._driver, message.number
        request = self.requests[theirs] = RemoteRequest(
            driver.table.next_number(),
            theirs,
            self._hub.counts.take(message.shape.sequences),
            ticket=ticket,
            shape=message.shape,
            record=message.record,
            counts=self._hub.counts,
            send=self.out.send,
            clock=driver.context.clock,
        )
        self.out.send(
            to_relay.Accepted(
                theirs,
                request.row,
                engine_id,
                ticket.prompt_tokens,
                message.record.local_prefill,
                dict(self._hub.tenancy.allowances(message.record.tenant)),
            )
        )
        return request

    def _prefill_done(self, message: from_relay.PrefillDone) -> None:
        request = self.requests.get(message.number)
        if request is None:
            return
        self._prove(request, message)
        number, tokens = request.number, message.prompt_tokens
        if not message.emitted:
            self._count_prompt(request, tokens)
        request.prefilled(message)
        self._feed(request, events.PrefillDone(number, tokens, message.lease_expires_ns))

    def _first_token(self, message: from_relay.FirstToken) -> None:
        request = self.requests.get(message.number)
        if request is not None:
            request.answered(message)
            self._feed(request, events.FirstToken(request.number))

    def _decode_started(self, message: from_relay.DecodeStarted) -> None:
        request = self.requests.get(message.number)
        if request is not None:
            self._prove(request, message)
            request.started(message)
            self._feed(request, events.DecodeStarted(request.number))

    def _prove(
        self,
        request: RemoteRequest,
        message: from_relay.PrefillDone | from_relay.DecodeStarted | from_relay.SessionEnded,
    ) -> None:
        """Report what a message implies. If that fails, it is an event all the same."""
        proved = request.proved(message)
        if proved is not None:
            self._isolation.run("relay", self._driver.report, proved)

    def _count_prompt(self, request: RemoteRequest, tokens: int) -> None:
        request.record.prompt_tokens = tokens
        report = reports.PromptCounted(request.number, tokens)
        self._isolation.run("relay", self._driver.report, report)

    def _event(self, message: from_relay.Loss) -> None:
        request = self.requests.get(message.number)
        if request is None:
            return
        crossed = request.lost(message)
        state = self._live_in_core.get(request.number)
        queued = state is not None and state.state is State.QUEUED
        if not (queued and isinstance(message, from_relay.PrefillLost)):
            self._feed(request, _loss(message, request.number, crossed=crossed))

    def _feed(self, request: RemoteRequest, event: events.Event) -> None:
        # Else it has ended for the scheduler, as the relay is about to hear.
        if request.number in self._live_in_core:
            self._isolation.run_for(request, "relay", self._driver.feed, event)

    def _session_ended(self, message: from_relay.SessionEnded) -> None:
        request = self.requests.get(message.number)
        if request is None:
            # It was refused, or accepted by a scheduler process that is gone.
            self._hub.take_record(from_relay.Recorded(message.record, "refused"))
            self._hub.take_record(from_relay.Recorded(message.record, "line"))
        else:
            ours = request.record
            message.record.expected_ttft_ns = ours.expected_ttft_ns
            message.record.hint, message.record.hint_source = ours.hint, ours.hint_source
            if message.answered:
                self._prove(request, message)
            number = request.number
            if message.how:
                self._feed(request, _ENDINGS[message.how](number))
            self._end(request, message.record)

    def _end(self, request: RemoteRequest, record: "RequestRecord") -> None:
        driver = self._driver
        del self.requests[request.theirs]
        if request.number in self._live_in_core:
            self._isolation.run("relay", driver.feed, events.RequestFailed(request.number))
        driver.report(reports.SessionEnded(request.number, record))
        self._hub.counts.release(request.row)

    def _progress(self, message: from_relay.Progress) -> None:
        rows, emitted = np.frombuffer(message.rows, "<u4"), np.frombuffer(message.emitted, "<u4")
        self._hub.counts.update(rows, emitted)

    # Reports.

    def _report(self, message: Any) -> None:
        report = self._driver.report
        match message:  # Ordered by frequency.
            case from_relay.LegSucceeded(role, url, pull):
                report(reports.LegSucceeded(Target(role, url), pull))
            case from_relay.PromptCounted(number, prompt_tokens):
                if number in self.requests:
                    self._count_prompt(self.requests[number], prompt_tokens)
            case from_relay.LegFailed(role, url, fault, reason):
                report(reports.LegFailed(Target(role, url), fault, reason))
            case from_relay.PullFailed(number, prefiller, rank, fault, reason):
                if number in self.requests:
                    mine = self.requests[number].number
                    report(reports.PullFailed(mine, prefiller, rank, fault, reason))
            case from_relay.KvMissing(prefiller, kind, reason):
                report(reports.KvMissing(prefiller, kind, reason))
            case from_relay.KvAbandoned(how):
                report(reports.KvAbandoned(how))
            case _:
                raise ValueError(f"a relay does not say {message} now")

    def _engine_seen(self, message: from_relay.EngineSeen) -> None:
        self._driver.report(reports.EngineSeen(message.prefiller, message.engine_id))
        self._hub.changed()  # It may be another engine than before.

    def _remote_prefill_ended(self, message: from_relay.RemotePrefillEnded) -> None:
        if not self._hand_offs[message.prefiller]:
            return  # It was chosen by a scheduler process that is gone.
        self._hand_offs[message.prefiller] -= 1
        self._driver.report(reports.RemotePrefillEnded(message.prefiller))

    def _recorded(self, message: from_relay.Recorded) -> None:
        if message.what == "passed_through":
            self._alone.ended(message.record)
        self._hub.take_record(message)

    def _take_occupancy(self, message: from_relay.Occupancy) -> None:
        self.occupancy = message

    def _take_drained(self, message: from_relay.Drained) -> None:
        del message
        self.drained = True
        self._hub.relay_drained()

    # Questions.

    def _ask_retry(self, message: from_relay.AskRetry) -> None:
        answer = partial(self._answer_retry, message.question)
        pulled_from = message.pulled_from
        self._driver.ask_retry(message.leg, message.fault, answer, pulled_from=pulled_from)

    def _answer_retry(self, question: int, allowed: bool) -> None:
        self.out.send(to_relay.RetryAnswered(question, allowed))

    def _ask_prefiller(self, message: from_relay.AskPrefiller) -> None:
        request = self.requests.get(message.number)
        answer = partial(self._answer_prefiller, message.question, request)
        if request is None:
            answer(None)
        else:
            self._driver.ask_prefiller(request.number, message.other_than, answer)

    def _answer_prefiller(
        self, question: int, request: RemoteRequest | None, prefiller: Prefiller | None
    ) -> None:
        if request is not None:
            request.prefilled_by(prefiller)
        if prefiller is not None:
            self._hand_offs[prefiller.id] += 1
        number = None if prefiller is None else prefiller.id
        self.out.send(to_relay.PrefillerChosen(question, number))

    def _ask_page(self, message: from_relay.AskPage) -> None:
        page = self._hub.page(message.path)
        self.out.send(to_relay.Page(message.question, page))

    def _ask_alone(self, message: from_relay.AskAlone) -> None:
        self.out.send(self._alone.offer(message))


def _loss(message: from_relay.Loss, number: events.RequestId, *, crossed: bool) -> events.Event:
    match message:
        case from_relay.PrefillLost(_, _, elsewhere, decode, same_rank):
            if crossed:  # Whom it was bound to meanwhile was never asked.
                return events.PrefillLost(number, decode=decode, same_rank=True)
            return events.PrefillLost(number, elsewhere, decode, same_rank)
        case from_relay.DecodeLost():
            return events.DecodeLost(number)
        case from_relay.Recomputed(_, _, elsewhere, anew):
            return events.RequestRecomputed(number, elsewhere, anew)

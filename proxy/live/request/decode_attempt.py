"""An engine that was asked for the answer: a rank, or a prefiller that does the whole request."""

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.events import DecodeStarted, FirstToken
from balanceroute.proxy.core.steps import Sighting
from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Status, Target
from balanceroute.proxy.live.openai.answer import (
    counts_of,
    is_aborted,
    is_recomputed,
    is_whole,
    stops_at_recomputed,
)
from balanceroute.proxy.live.openai.body import RequestBody, dump
from balanceroute.proxy.live.openai.completion_stream import CompletionStream, TokenStream
from balanceroute.proxy.live.openai.errors import (
    OWN_ERRORS,
    CannotResumeError,
    error_in,
    names_death,
    read_error,
)
from balanceroute.proxy.live.openai.legs import (
    BadPrefillAnswerError,
    decode_body,
    read_prefill_answer,
)
from balanceroute.proxy.live.openai.named_events import NamedEventStream, named_options
from balanceroute.proxy.live.openai.shape import AGENTS_APIS, GENERATE, Api, Shape
from balanceroute.proxy.live.openai.stream_reader import StreamReader, decoded
from balanceroute.proxy.live.openai.token_counts import (
    CountsAsked,
    TokenCounts,
    UsageRewrite,
    ask_for_counts,
    asks_total,
    with_prompt_usage,
)
from balanceroute.proxy.live.request.failures import (
    ABORTED,
    Failure,
    What,
    breakage,
    refusal,
    reported,
)
from balanceroute.proxy.live.request.hand_off import HandOff
from balanceroute.proxy.live.request.leg_settings import RESUME_OFF, Resume
from balanceroute.proxy.live.request.phases import DECODING, PREFILLING
from balanceroute.proxy.live.request.prefill_attempt import PrefillAttempt
from balanceroute.proxy.live.request.relay import BufferedLeg, Relay
from balanceroute.proxy.live.request.session import Attempt, Session, draw_seed
from balanceroute.proxy.live.request.shared import (
    KvHandle,
    LegFailed,
    LegSucceeded,
    PromptCounted,
    StreamLent,
    StreamReturned,
)
from balanceroute.proxy.live.telemetry.record import DECODE_LEG, DIRECT_LEG, Leg
from balanceroute.proxy.wire.http1.pump import EventForm, Lent
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.delivered import Delivered
    from balanceroute.proxy.live.openai.token_ids import TokenIds
    from balanceroute.proxy.live.openai.transcript import Transcript
    from balanceroute.proxy.live.request.continued import Continued
    from balanceroute.proxy.wire.http1.client import ResponseHandler

_log = logging.getLogger(__name__)
# Each makes progress.
_MOST_RECOMPUTES = 32
# Many steps.
_STILL_S = 1.0
# After this many looks with progress a stream that stops counts as a sign that its rank stands still.
_LEAST_MOVES = 3
# Of what an engine reports.
_MOST_WORDS = 200


class DecodeAttempt(Attempt):
    """One leg that brings the answer; see `StreamEvents`.

    Args:
        kv: What the prefill left; None if there was none, or none yet.

    Attributes:
        hands_back: Whether the engine may give the request back: decode ranks alone do.
        stream: Reads the answer; None if it is not streamed, or the attempt is over.
    """

    __slots__ = (
        *("_ids", "_kv", "_moves", "_new_by_s", "_rank", "_remote", "_seen_s"),
        *("_delivered", "_transcript", "_transfer", "_usage", "hands_back", "stream"),
    )

    def __init__(self, session: Session, engine: Prefiller | Rank, kv: KvHandle | None) -> None:
        self._rank = engine if isinstance(engine, Rank) else None
        super().__init__(session, DIRECT_LEG if self._rank is None else DECODE_LEG, engine)
        able = session.context.connector.facts.recomputes and self._rank is not None
        self.hands_back = able and not stops_at_recomputed(session.body)
        self.stream: Relay | None = None
        self._usage: UsageRewrite | None = None  # Of a stream.
        if session.shape.stream:
            self._usage = UsageRewrite(session.prompt_usage, session.emitted.tokens)
        self._transcript: Transcript | None = None
        self._ids: TokenIds | None = None
        self._delivered: Delivered | None = None
        if session.resuming is not None:
            session.resuming.begin_leg()
            if self.hands_back:
                self._transcript = session.resuming.transcript(session.shape)
            if session.shape.stream and session.context.legs.resume is not RESUME_OFF:
                self._keep(session.resuming, session.context.legs.resume)
        self._kv = kv  # Until the engine is known to have it.
        self._new_by_s = 0.0
        self._transfer = ""
        # When its last events had come at the last look, and looks that saw new ones.
        self._seen_s, self._moves = 0.0, 0
        self._remote: HandOff | None = None  # The prefill that the rank calls for.

    def _keep(self, emitted: "Continued", resume: Resume) -> None:
        """Keep what another engine needs to go on with the stream: ids, or all that the client has."""
        session = self._session
        if emitted.delivered is None and self._rank is not None:
            self._ids = emitted.ids_to_keep(
                session.shape,
                self._asked()[1],
                resume,
                parses=self.engine.continuous_usage_is_expensive,
                prompt_tokens=session.record.prompt_tokens or None,
            )
        if self._ids is not None:
            return
        if session.answer.opened:
            self._delivered = emitted.delivered
        else:  # The client has nothing of an earlier engine's answer.
            seed = partial(draw_seed, session)
            self._delivered = emitted.track_delivered(session.shape, session.body, resume, seed)
        if self._delivered is not None:
            self._delivered.begin_again()

    @property
    def bound(self) -> bool:
        return self._rank is not None

    @property
    def pair(self) -> tuple[Prefiller, Rank] | None:
        if self._rank is None or self._kv is None or self._kv.params is None:
            return None
        return self._kv.prefiller, self._rank

    @property
    def tokens(self) -> int | None:
        return None if self.stream is None else self.stream.read_tokens()

    @property
    def continuable(self) -> bool:
        """Whether another engine could go on with the stream, from the ids of its tokens or by beginning again."""
        if self._delivered is not None:
            return not self._delivered.lost
        resuming = self._session.resuming
        if self._ids is None or resuming is None:
            return False
        if self.stream is not None:
            self.stream.call_back()  # With the ids that the pump has kept.
        return resuming.takes(self._ids, self._session.shape)

    @property
    def complete(self) -> bool:
        """Whether all sequences have finished, though not the stream."""
        return self.stream is not None and self.stream.reader.complete

    def send(self) -> None:
        session, context = self._session, self._session.context
        legs, params = context.legs, None
        if self._kv is not None:
            self._kv.offers += 1
            params = self._kv.params
        elif context.connector.decode_first and not session.shape.direct:
            params = self._expect_prefill()
        asked, (api, asking) = None, self._asked()
        # With the ids too: only usage shows that an engine has a parser of reasoning.
        if legs.count_tokens == "usage" or self._ids is not None:
            each = not self.engine.continuous_usage_is_expensive
            asked = ask_for_counts(session.shape, asking.values, each=each)
        members = session.emitted.members
        if self._ids is not None and session.shape.api is not Api.GENERATE:
            members = {**members, "return_token_ids": True}
        body = decode_body(asking, members, params, asked, drop=legs.drop)
        handler: ResponseHandler
        if session.shape.stream:
            handler = self.stream = self._make_stream(asking, asked)
            timeout_s = legs.first_token_timeout_s
            if params is None:
                timeout_s += legs.prefill_timeout_s
        else:
            handler = BufferedLeg(self.decode_refused, self.stream_broken, legs.answer_limit_bytes)
            timeout_s = legs.answer_timeout_s
        headers = session.headers
        if self._rank is not None and self._rank.header is not None:
            headers += b"x-data-parallel-rank: %b\r\n" % self._rank.header
        self._hear_by(context.clock())
        until_s = None if self._kv is None else self._kv.expires_s
        self._post(api, headers, body, handler, timeout_s, expires_s=until_s, lines=self.stream)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The engine, and that of the prefill which the rank called for."""
        remote = () if self._remote is None else (self._remote.target,)
        return (*remote, *super().targets)

    def leg_at(self, target: Target) -> Leg | None:
        if self._remote is not None and self._remote.target == target:
            return Leg.PREFILL
        return super().leg_at(target)

    def move(self, target: Target) -> bool:
        """Have the prefill that the rank called for done elsewhere, if it is done there."""
        if self._remote is None or self._remote.target != target:
            return False
        self._remote.move()
        return True

    def check_deadline(self, now_s: float) -> None:
        """Fail if the answer takes too long to begin, or stands still."""
        session, legs, stream = self._session, self._session.context.legs, self.stream
        if self._rank is not None and self._rank.still and self._may_leave(now_s):
            session.leave_rank(self.engine.target)
            return
        if stream is not None and stream.reader.waits:
            stream.release(now_s)
        if stream is not None and stream.started:
            stream.catch_up()
            limit_s = legs.idle_stream_timeout_s
            if self.engine.status is Status.QUARANTINED and (self.continuable or self.complete):
                limit_s = min(limit_s, _STILL_S)  # Else it might as well end there.
            if session.answer.is_paused:
                return
            if stream.reader.repeating and now_s > self._new_by_s:
                silent_s = legs.idle_stream_timeout_s
                session.fail(504, f"to begin the answer again took longer than {silent_s:g} s")
                return
            if now_s <= stream.last_s + limit_s:
                return
            reason = f"the stream stood still for {limit_s:g} s"
            if self.finish():
                session.host.report(LegFailed(self.engine.target, Fault.TIMEOUT, reason))
                return
        elif now_s <= self._deadline_s:
            return
        else:
            reason = legs.overdue(prefill=False, stream=session.shape.stream)
            if self._remote is not None and not self._remote.taken:
                reason += ": the rank did not call the proxy back"
        blamed = None
        if self._remote is not None and self._remote.target is not None:
            blamed, session.silent_prefiller = self._remote.target, self._remote.prefiller
        session.failed(self, Failure(What.TIMED_OUT, Fault.TIMEOUT, reason, blamed=blamed))

    def _may_leave(self, now_s: float) -> bool:
        """Return whether another rank may have what this one, which stands still, has not done."""
        stream = self.stream
        if stream is None or not stream.started:
            return True
        stream.catch_up()
        waits = self._session.answer.is_paused or now_s <= stream.last_s + _STILL_S
        return not waits and (self.continuable or self.complete)

    def look(self) -> Sighting | None:
        """Return what its stream says of the rank since the last look; None if it has none."""
        stream, rank = self.stream, self._rank
        if rank is None or stream is None or not stream.started:
            return None
        stream.catch_up()
        session, last_s = self._session, stream.last_s
        before_s = max(self._seen_s, stream.resumed_s)
        if last_s > before_s:
            self._seen_s = last_s
            self._moves += 1
            judged = self._moves > 1 and not session.shape.holds_back
            return Sighting(rank.id, True, 0, last_s - before_s if judged else 0.0)
        # The engine of a stream that has just begun may send nothing more until its end.
        judged = self._moves >= _LEAST_MOVES and not session.shape.holds_back
        return Sighting(
            rank.id, False, int(judged and not (session.answer.is_paused or self.complete))
        )

    def resume(self) -> None:
        """Read on. The client's pause was none of the engine's."""
        if self.stream is not None:
            self._seen_s = self.stream.last_s = self._session.context.clock()
            self._hear_by(self.stream.last_s)
        super().resume()

    def _hear_by(self, now_s: float) -> None:
        """Give an engine that says again what the client has its time to come to something new."""
        self._new_by_s = now_s + self._session.context.legs.idle_stream_timeout_s

    def close(self) -> None:
        """End the exchange, and record what the client has of it."""
        super().close()
        if self._remote is not None:
            self._remote.abort()
            self._session.context.hand_offs.pop(self._transfer, None)
            self._remote = None
        if self.stream is not None:
            _count_stream(self._session, self.stream)
            self.stream = None

    def _make_stream(self, asking: RequestBody, asked: CountsAsked | None) -> Relay:
        session, resuming = self._session, self._session.resuming
        options = {
            "resumes": session.answer.opened,
            "ids": self._ids,
            "usage": self._usage,
            "asks_total": asks_total(asking.values),
            "counts": None if asked is None else TokenCounts(asked),
            "transcript": self._transcript,
            "expensive": partial(_stop_asking, self.engine),
            "may_abort": lambda: session.abort_ordered,
        }
        reader = (
            None if resuming is None else resuming.reader(session.shape, self._delivered, options)
        )
        if reader is None:
            reader = _plain_reader(session.shape, options)
        if session.emitted.early is not None:
            reader.comparison = session.emitted.early.comparison
        return Relay(
            self,
            session.answer.reply,
            reader,
            session.context.clock,
            observe_gap=session.context.observe_gap,
            resumes=session.answer.opened,
            emitted=session.emitted,
            lends=session.context.pump is not None,
        )

    # Events that the pump moves.

    def stream_waits(self, form: EventForm) -> Lent | None:
        session, call, stream = self._session, self._call, self.stream
        pump = session.context.pump
        if pump is None or call is None or stream is None:
            return None
        lent = pump.lend(call, session.answer.reply, stream, form)
        if lent is not None:
            session.host.report(StreamLent(session.number, lent.slot))
        return lent

    def stream_back(self, lent: Lent) -> None:
        self._session.host.report(StreamReturned(self._session.number, lent.slot))

    # The prefill that the rank calls for.

    def _expect_prefill(self) -> bytes:
        session, context = self._session, self._session.context
        self._transfer = context.unique()
        failed = partial(session.failed, self)
        self._remote = HandOff(session, *self._asked(), prefilled=self._prefilled, failed=failed)
        context.hand_offs[self._transfer] = self._remote.take
        return dump(context.connector.decode_params(self._transfer, None, None))

    def _prefilled(self, body: bytes) -> None:
        session, remote = self._session, self._remote
        assert remote is not None
        assert remote.prefiller is not None
        record = session.record
        record.prefiller = remote.prefiller.name
        record.prefilled_ns = round(session.context.clock() * 1e9)
        if session.emitted.tokens:
            return
        try:
            answer = read_prefill_answer(body, session.prompt_tokens, api=self._asked()[0])
        except BadPrefillAnswerError:
            remote.prefiller.endpoint.close_idle()
            return  # The rank has the KV cache; only the counts are missing.
        record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        session.prompt_usage = answer.usage
        if answer.usage is not None and self._usage is not None:
            if self.stream is not None:
                self.stream.call_back()  # Its events may be ordinary no more.
            self._usage.correct_prompt(answer.usage)
        session.host.report(PromptCounted(session.number, answer.prompt_tokens))

    # What the engine answers.

    def decode_refused(self, status: int, headers: Headers, body: bytes) -> None:
        if status != 200:
            self._session.failed(self, refusal(status, headers, body))
        elif (error := error_in(body)) is not None:
            self._session.failed(self, reported(error, body))
        elif self.hands_back and is_recomputed(self._session.shape.api, body):
            self.stream_recomputed()
        elif not self._session.abort_ordered and is_aborted(self._session.shape.api, body):
            self._session.failed(self, ABORTED)
        elif self.stream is not None and self._session.answer.reply.commented:
            reason = "the engine's answer is no stream"  # Which the client has the head of.
            self._session.failed(self, Failure(What.UNREADABLE, Fault.PROTOCOL, reason))
        elif not is_whole(body):
            reason = "the engine's answer is no JSON object"
            self._session.failed(self, Failure(What.UNREADABLE, Fault.PROTOCOL, reason))
        else:
            served = self._served()
            body = _count_whole(self._session, body)
            self._session.answered(headers, body, served)

    def stream_remarked(self, headers: Headers, event: bytes) -> None:
        """Pass a comment on at once: a gateway on the way to the client may time silence out."""
        self._session.answer.comment(headers, event)

    def stream_started(self, status: int, headers: Headers) -> None:
        session, served = self._session, self._served()
        if session.record.first_token_ns is None:
            session.record.first_token_ns = round(session.context.clock() * 1e9)
        session.emitted.early = None
        keeps_body = self.hands_back or self._delivered is not None
        session.began(self, status, headers, keeps_body=keeps_body)
        if session.decodes:
            session.host.feed(DecodeStarted(session.number), served)
        else:
            session.host.report(served)
            session.host.feed(FirstToken(session.number))

    def _served(self) -> LegSucceeded:
        pair = self.pair
        if pair is None:
            return LegSucceeded(self.engine.target)
        self._kv = None
        prefiller, rank = pair
        return LegSucceeded(self.engine.target, (prefiller.id, rank.id))

    def stream_ended(self) -> None:
        if self.stream is not None and self.stream.started:
            _count_prompt(self._session, self.stream.reader.prompt_tokens)
            self._session.finished()
        else:  # The engine has nothing to say, which is no answer.
            error = WireError(WireFault.RESET, "the stream is empty", sent=True, answered=True)
            self.stream_broken(error)

    def stream_error(self, message: str, *, cut: bool = False) -> None:
        if names_death(message):
            self._session.engine_died(self.engine, self.posted_s, said=True)
        self._session.finished(message, cut=cut)

    def stream_error_first(self, event: bytes) -> None:
        session, resuming = self._session, self._session.resuming
        stream = self.stream
        assert stream is not None
        if resuming is not None and resuming.early is not None and stream.reader.differs:
            session.host.report(self._served())
            self.close()
            session.record.first_token_differences += 1
            resuming.add_early(session.shape)
            # It may have read another prompt's KV cache, and has that in its prefix cache now.
            session.recomputed(elsewhere=True)
            return
        session.failed(self, _reported(event, opened=session.answer.opened))

    def stream_unreadable(self, reason: str) -> None:
        self._session.failed(self, Failure(What.UNREADABLE, Fault.PROTOCOL, reason))

    def stream_aborted(self) -> None:
        self._session.failed(self, ABORTED)

    def stream_recomputed(self) -> None:
        session, record, stream = self._session, self._session.record, self.stream
        self.close()
        record.recomputes += 1
        if record.recomputes > _MOST_RECOMPUTES:
            session.fail(502, f"the engine dropped the request {_MOST_RECOMPUTES} times")
            return
        advanced = False
        if self._delivered is not None:
            if self._delivered.lost or record.recomputes > session.context.legs.retry_attempts:
                session.fail(502, "the engine dropped the request, which cannot begin again")
            else:
                session.recomputed(elsewhere=True, anew=True)
            return
        if stream is not None and stream.started and self.continuable:
            self._leave_ids()
            advanced = True
        elif stream is not None and _is_past_opening(stream) and (tokens := stream.count_tokens()):
            advanced = True
            assert self._transcript is not None
            assert session.resuming is not None
            try:
                if session.resuming.add(self._transcript, tokens, session.shape, session.body):
                    session.answer.reply.write(self._transcript.withheld)
            except CannotResumeError as error:
                session.fail(502, f"the engine dropped the request, and {error}")
                return
        # A rank that did nothing for it would do so again.
        session.recomputed(elsewhere=not advanced)

    def hand_over(self) -> None:
        self.close()
        if self._delivered is None:
            self._leave_ids()
        self._session.record.resumes += 1
        self._session.recomputed(elsewhere=True, anew=self._delivered is not None)

    def _leave_ids(self) -> None:
        assert self._ids is not None
        assert self._session.resuming is not None
        self._session.resuming.add_ids(self._ids, self._session.shape)

    def stream_broken(self, error: WireError) -> None:
        # Tokens that no client has can be drawn again; a KV cache can be pulled only once.
        pulls = self._remote is not None or self.pair is not None
        if pulls or not self._send_again(error):
            self._session.failed(self, breakage(error))

    def stream_cut(self, error: WireError) -> None:
        """Finish the answer, of which nothing is missing; the engine failed nevertheless."""
        if error.is_loss:
            self._session.engine_died(self.engine, self.posted_s, said=False)
        self.stream_ended()
        self._session.host.report(LegFailed(self.engine.target, fault_of(error), str(error)))

    def finish(self) -> bool:
        if self.stream is None or not self.stream.complete():
            return False
        self.stream_ended()
        return True


def _plain_reader(shape: Shape, options: dict[str, Any]) -> StreamReader:
    if shape.api in AGENTS_APIS:
        return NamedEventStream(**named_options(options))
    plain = TokenStream if shape.api is GENERATE else CompletionStream
    return plain(shape.sequences, **options)


def _is_past_opening(stream: Relay) -> bool:
    return stream.started and stream.reader.past_opening


def _stop_asking(engine: Prefiller | Rank) -> None:
    """Ask an engine no more for its counts in every event."""
    if not engine.continuous_usage_is_expensive:
        engine.continuous_usage_is_expensive = True
        fields = {"engine": engine.name}
        _log.warning("reasoning parser: tokens are counted by events", extra={"fields": fields})


def _count_stream(session: Session, stream: Relay) -> None:
    record = session.record
    if session.answer.opened:
        # The tokens since may be the first token again, or all that there were.
        before = int(record.early_first_token)
        if session.emitted.delivered is not None:
            before = record.output_tokens
        record.output_tokens = max(before, session.emitted.tokens + stream.count_tokens())
        record.itl_max_ns = max(record.itl_max_ns, round(stream.gap_max_s * 1e9))
        if stream.started and stream.silent_since_s is None:
            session.emitted.last_sent_s = stream.last_s
        if stream.second_s is not None:
            record.second_token_came(round(stream.second_s * 1e9))


def _count_whole(session: Session, body: bytes) -> bytes:
    """Take the counts of a whole answer; return it with the cached tokens of the prefill."""
    record = session.record
    prompt_tokens, record.output_tokens = counts_of(body)
    _count_prompt(session, prompt_tokens)
    record.prompt_tokens = record.prompt_tokens or prompt_tokens
    usage = session.prompt_usage
    if usage is None:
        return body
    if session.shape.api in AGENTS_APIS:
        return usage.apply_within(body)
    return with_prompt_usage(body, usage)


def _count_prompt(session: Session, tokens: int) -> None:
    """Take the count of a prompt that the rank computed: no prefiller has counted it."""
    record = session.record
    tokens -= session.emitted.tokens  # Of an earlier rank.
    if record.local_prefill and tokens > 0 and not record.prompt_tokens:
        record.prompt_tokens = tokens
        session.host.report(PromptCounted(session.number, tokens))


def _reported(event: bytes, *, opened: bool) -> Failure:
    """Return the failure that an engine reports in an event, or the proxy's own in place of one."""
    payload = event_data(event)
    error = read_error(decoded(payload) or {})
    if error is None:  # Unreadable, but for its name.
        return Failure(What.ERROR_EVENT, Fault.SERVER_ERROR, "the engine reported an error")
    failure = reported(error, payload)
    if not opened:
        return failure
    # The status was sent long ago.
    said = error.words if event in OWN_ERRORS else f"the engine reported: {error.words or 'error'}"
    return replace(failure, reason=said[:_MOST_WORDS], answer=None)


# The legs that the scheduler decides.


def start_prefill(session: Session, prefiller: Prefiller) -> None:
    """Send the prefill leg, or the whole request if no rank decodes it."""
    if session.context.suspects.prompts and session.is_refused():
        return
    session.record.prefill_began(prefiller.name, session.context.clock())
    if session.decodes:
        session.begin(PREFILLING, PrefillAttempt(session, prefiller))
    else:
        session.begin(DECODING, DecodeAttempt(session, prefiller, None))


def start_decode(session: Session, rank: Rank) -> None:
    if session.context.suspects.prompts and session.is_refused():
        return
    session.record.bound(rank.name, session.context.clock(), pooled_s=session.pooled_s)
    session.begin(DECODING, DecodeAttempt(session, rank, session.kv))

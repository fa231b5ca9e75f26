"""One client request on its way: what it is, the leg in flight, and how it is answered.

A session reacts to its engines and its client and tells the driver; the driver tells it what the
scheduler decided. It ends exactly once. Until the first byte of the answer went to the client every
failure may be mended by another instance; after it, a failure is an SSE error event and a cut body.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core import events
from balanceroute.proxy.live.connectors import MissingKvError
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.openai.answer import (
    counts_of,
    error_words,
    is_error,
    is_recomputed,
    is_whole,
    stops_at_recomputed,
    with_cached_tokens,
)
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.leg_body import decode_body, prefill_body
from balanceroute.proxy.live.openai.prefill_answer import (
    BadPrefillAnswerError,
    PrefillAnswer,
    read_prefill_answer,
)
from balanceroute.proxy.live.openai.resume import CannotResumeError
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.openai.token_counts import CountsAsked, TokenCounts, ask_for_counts
from balanceroute.proxy.live.request.buffered_leg import BufferedLeg
from balanceroute.proxy.live.request.client_answer import ClientAnswer
from balanceroute.proxy.live.request.direct import Direct
from balanceroute.proxy.live.request.emitted import Emitted
from balanceroute.proxy.live.request.failures import (
    Blame,
    Failure,
    Next,
    What,
    breakage,
    refusal,
    triage,
)
from balanceroute.proxy.live.request.hand_off import HandOff
from balanceroute.proxy.live.request.session_host import Host
from balanceroute.proxy.live.request.short_answer import answer_shortly
from balanceroute.proxy.live.request.stream_leg import StreamLeg
from balanceroute.proxy.live.telemetry.record import Leg, Outcome, RequestRecord
from balanceroute.proxy.wire.messages import WireError, WireFault
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.live.engines.instances import Prefiller, Rank
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.wire.client import Call
    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.server import Reply

# Not every engine has these routes.
_OPTIONAL = frozenset({Api.RESPONSES, Api.MESSAGES})
# Each makes progress.
_MOST_RECOMPUTES = 32


class Session:
    """One request.

    Args:
        number: Its arrival number.
        host: The driver.
        ticket: What the scheduler knows of it.
        shape: What it asks for.
        body: What it sent.
        headers: For every engine leg.
        reply: The client.
        record: What is known of it, kept up to date.
    """

    __slots__ = (
        "_attempts",
        "_backoff",
        "_before",
        "_body",
        "_call",
        "_deadline_s",
        "_deaths",
        "_hand_off",
        "_headers",
        "_host",
        "_hung",
        "_kv",
        "_kv_taken",
        "_leg",
        "_pooled_s",
        "_prefill_sent_s",
        "_prefiller",
        "_rank",
        "_transfer",
        "_tries_of_kv",
        "answer",
        "decodes",
        "number",
        "offset",
        "record",
        "shape",
        "ticket",
    )

    def __init__(
        self,
        number: events.RequestId,
        host: Host,
        *,
        ticket: events.Ticket,
        shape: Shape,
        body: "RequestBody",
        headers: "Headers",
        reply: "Reply",
        record: RequestRecord,
    ) -> None:
        self.number = number
        self.ticket = ticket
        self.shape = shape
        self.record = record
        self.offset = 0  # The step clock's.
        # Whether a rank decodes it; else a prefiller does the whole request.
        self.decodes = ticket.decode
        self._host = host
        self._body: RequestBody | None = body
        self._headers = headers
        left = host.guarded(self, "client left", self.client_left)
        self.answer = ClientAnswer(
            reply, record, left=left, paused=self._pause, resumed=self._resume
        )
        self._call: Call | None = None  # In flight, and so the leg.
        self._leg: StreamLeg | None = None
        self._backoff: asyncio.TimerHandle | None = None
        self._hand_off: HandOff | None = None
        self._hung: Prefiller | None = None  # Left a hand-off unanswered.
        self._deadline_s = inf
        self._attempts = dict.fromkeys(Leg, 0)
        # The prefill's result.
        self._prefiller: Prefiller | None = None
        self._prefill_sent_s = 0.0
        self._transfer = ""
        self._kv: Mapping[str, Any] | None = None
        self._kv_taken = 0  # `lost_kv` of its prefiller then.
        self._tries_of_kv = 0
        self._deaths = 0  # Ranks that broke off under it.
        self._pooled_s = 0.0
        self._rank: Rank | None = None
        self._before = Emitted()

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""
        return None if self._leg is None else self._leg.tokens // self.shape.sequences

    @property
    def emitted_tokens(self) -> int:
        """Tokens emitted so far, as far as a stream tells."""
        return self._before.tokens + (0 if self._leg is None else self._leg.tokens)

    @property
    def pair(self) -> "tuple[Prefiller, Rank] | None":
        """Who is to pull its KV cache from whom; None unless a decode leg has yet to begin so."""
        if self._kv is None or self._prefiller is None or self._rank is None:
            return None
        started = self._leg is not None and self._leg.started
        return None if started else (self._prefiller, self._rank)

    @property
    def _engine(self) -> "Prefiller | Rank":
        """Whoever the leg in flight is on."""
        engine = self._prefiller if self._rank is None else self._rank
        assert engine is not None
        return engine

    @property
    def _leg_kind(self) -> Leg:
        if self._rank is not None:
            return Leg.DECODE
        return Leg.PREFILL if self.decodes else Leg.DIRECT

    # What the driver says.

    def start_prefill(self, prefiller: "Prefiller") -> None:
        """Send the prefill leg, or the whole request if nobody decodes it."""
        assert self._body is not None
        host, now_s = self._host, self._host.clock()
        self._prefiller = prefiller
        self.record.prefiller = prefiller.name
        if self.record.prefill_started_ns is None:
            self.record.prefill_started_ns = round(now_s * 1e9)
        self._attempts[self._leg_kind] += 1
        if not self.decodes:
            self._ask(prefiller, self._headers)
            return
        self._transfer = f"xfer-{host.unique()}"
        params = host.connector.prefill_params(self._transfer)
        body = prefill_body(self._body, self._before.members, params, drop=host.legs.drop)
        leg = BufferedLeg(
            self._prefill_answered, self.stream_broken, max_bytes=host.legs.answer_limit_bytes
        )
        self._prefill_sent_s = now_s
        self._deadline_s = now_s + host.legs.prefill_timeout_s
        self._call = prefiller.endpoint.request(
            b"POST", self.shape.api.value.encode(), self._headers, body, leg, crashed=self._crashed
        )

    def start_decode(self, rank: "Rank") -> None:
        """Send the decode leg."""
        assert self._body is not None
        host, now_s = self._host, self._host.clock()
        record = self.record
        self._rank = rank
        record.rank = rank.name
        record.admitted_ns = round(now_s * 1e9)
        record.pool_wait_ns += round((now_s - self._pooled_s) * 1e9)
        self._attempts[Leg.DECODE] += 1
        self._tries_of_kv += 1
        if host.connector.decode_first and not self.shape.direct:
            self._expect_hand_off()
        headers = self._headers
        if rank.header is not None:
            headers = [*headers, (b"x-data-parallel-rank", rank.header)]
        self._ask(rank, headers)

    def _ask(self, engine: "Prefiller | Rank", headers: "Headers") -> None:
        """Ask for the answer."""
        assert self._body is not None
        host = self._host
        asked = None
        if host.legs.count_tokens == "usage":
            asked = ask_for_counts(self.shape, self._body.values, each=not engine.counts_dear)
        body = decode_body(self._body, self._before.members, self._kv, asked, drop=host.legs.drop)
        leg: StreamLeg | BufferedLeg
        if self.shape.stream:
            leg = self._leg = self._make_stream_leg(asked)
            timeout_s = host.legs.first_token_timeout_s
            if self._kv is None:
                timeout_s += host.legs.prefill_timeout_s
        else:
            leg = BufferedLeg(
                self._decode_answered, self.stream_broken, max_bytes=host.legs.answer_limit_bytes
            )
            timeout_s = host.legs.answer_timeout_s
        self._deadline_s = host.clock() + timeout_s
        self._call = engine.endpoint.request(
            b"POST", self.shape.api.value.encode(), headers, body, leg, crashed=self._crashed
        )

    def _expect_hand_off(self) -> None:
        assert self._body is not None
        self._transfer = self._host.unique()
        self._kv = self._host.connector.decode_params(self._transfer, None, None)
        self._hand_off = HandOff(
            self._host,
            self.shape.api,
            self._body,
            self._before.members,
            self._headers,
            number=self.number,
            other_than=self._hung,
            prefilled=self._handed_off,
            failed=self._not_handed_off,
            crashed=self._crashed,
        )
        self._host.expect(self._transfer, self._hand_off)

    def pooled(self) -> None:
        """Note that the session waits for a rank from now on."""
        self._pooled_s = self._host.clock()

    def drop_leg(self) -> None:
        """Stop the leg in flight, if any; nothing more comes of it."""
        self._call_off()
        if self._backoff is not None:
            self._backoff.cancel()
            self._backoff = None

    def forget_kv(self) -> None:
        """Note that the KV cache is of no use any more."""
        self._prefiller = None
        self._kv = None
        self._tries_of_kv = 0

    def lease_ended(self) -> str:
        """Note that the KV cache must not be used any more; return why."""
        if self._kv is None:
            return "lost"
        self.record.lease_lapses += 1
        self.forget_kv()
        return "lapsed"

    def expire(self, reason: str) -> None:
        """Give the request up: it waited too long. The scheduler knows."""
        self._refuse(503, reason, Outcome.EXPIRED, retry_after_s=1)

    def give_up(self, reason: str) -> None:
        """End the request, which somebody else may serve later."""
        self._host.feed(events.RequestFailed(self.number))
        self._refuse(503, reason, Outcome.UPSTREAM_ERROR, retry_after_s=1)

    def crash(self) -> None:
        """End the request, whose handling failed. The scheduler knows."""
        self._refuse(500, "internal error; the proxy's log says more", Outcome.INTERNAL_ERROR)

    def is_on(self, target: Target) -> bool:
        """Return whether an instance works for this request, or holds its KV cache."""
        if self._rank is not None and self._rank.target == target:
            return True
        if self._hand_off is not None and self._hand_off.target == target:
            return True
        started = self.decodes and self._leg is not None and self._leg.started
        return self._prefiller is not None and not started and self._prefiller.target == target

    def instance_removed(self, target: Target) -> None:
        """Go on without an instance that this request was on, unless its answer came from there."""
        if self._hand_off is not None and self._hand_off.target == target:
            self._hand_off.move()
            return
        if self._leg is not None and self._leg.started:
            self._fail(502, "the engine was removed")
            return
        self.drop_leg()
        self.record.retries += 1
        # Of a KV cache that a rank was offered nobody knows whether it has been pulled.
        self._host.feed(self._probe_lost() if self._rank is None else self._prefill_lost())

    def engine_lost(self, target: Target) -> None:
        """Leave an engine that does not answer any more, unless its answer has begun."""
        if self._hand_off is not None and self._hand_off.target == target:
            engine, leg, tried = target, Leg.PREFILL, 0
        elif self._call is None or (self._leg is not None and self._leg.started):
            return  # One that waits for its next attempt leaves anyway.
        else:
            engine, leg = self._engine.target, self._leg_kind
            tried = self._attempts[leg]
        again = engine == target and tried < self._host.legs.retry_attempts
        if again and self._host.may_retry(leg.value, Fault.CONNECT):
            self.instance_removed(target)

    def drop_lost_kv(self) -> None:
        """Prefill again if it waits in the pool with a KV cache that is lost."""
        waits = self._rank is None and self._call is None and self._backoff is None
        if waits and self._kv_is_lost:
            self._host.feed(self._prefill_lost())

    @property
    def _kv_is_lost(self) -> bool:
        if self._kv is None or self._prefiller is None:
            return False
        return self._prefiller.lost_kv != self._kv_taken

    def check_deadline(self, now_s: float) -> None:
        """Act if the leg in flight takes too long."""
        leg, legs = self._leg, self._host.legs
        if leg is not None and leg.started:
            if not self.answer.is_paused and now_s > leg.last_s + legs.idle_stream_timeout_s:
                self._time_out(f"the stream stood still for {legs.idle_stream_timeout_s:g} s")
        elif now_s > self._deadline_s:
            prefill = self._leg_kind is Leg.PREFILL
            self._time_out(legs.overdue(prefill=prefill, stream=self.shape.stream))

    # What the client does.

    def client_left(self) -> None:
        """Stop everything: nobody reads the answer any more."""
        if self.record.outcome is not None:
            return
        leg = self._leg
        if leg is not None and leg.started and leg.finished >= self.shape.sequences:
            # It had the whole answer, only not the last bytes of the stream.
            self._call_off()
            self._count_tokens()
            self._host.feed(events.RequestFinished(self.number))
            self._end(Outcome.OK, 200)
            return
        self._host.feed(events.RequestCancelled(self.number))
        self._end(Outcome.CANCELLED, self.record.status)

    def _pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def _resume(self) -> None:
        if self._leg is not None:
            self._leg.last_s = self._host.clock()
        if self._call is not None:
            self._call.resume()

    # What the prefiller answers.

    def _prefill_answered(self, status: int, headers: "Headers", body: bytes) -> None:
        self._call = None
        self._deadline_s = inf
        prefiller = self._prefiller
        assert prefiller is not None
        if status != 200:
            self._mend(refusal(status, headers, body))
            return
        try:
            answer = read_prefill_answer(body)
        except BadPrefillAnswerError as error:
            self._mend(Failure(What.UNREADABLE, Fault.PROTOCOL, str(error)))
            return
        self._host.leg_succeeded(prefiller.target)
        record = self.record
        record.prefilled_ns = round(self._host.clock() * 1e9)
        if self._before.tokens == 0:
            record.prompt_tokens = answer.prompt_tokens
            record.cached_tokens = answer.cached_tokens
        missing = self._take_kv(answer, prefiller)
        if missing and not self._take_answer_without_kv(answer, missing):
            return
        self._tries_of_kv = 0
        self._enter_pool(answer.prompt_tokens)

    def _take_kv(self, answer: PrefillAnswer, prefiller: "Prefiller") -> str:
        """Note how to pull the KV cache; return why that is not possible, if so."""
        if answer.complete:
            # Prefillers keep the KV cache only of answers that were cut off at their one token.
            return "the prefill answer is complete"
        try:
            self._kv = self._host.connector.decode_params(
                self._transfer, answer.kv_transfer_params, prefiller.identity
            )
        except MissingKvError as error:
            return str(error)
        engine_id = self._kv.get("remote_engine_id")
        if type(engine_id) is str:
            self._host.lost.engine_seen(prefiller, engine_id)
        self._kv_taken = prefiller.lost_kv
        return ""

    def _take_answer_without_kv(self, answer: PrefillAnswer, reason: str) -> bool:
        """Return whether the request goes on to decode all the same."""
        self._kv = None
        if answer.complete and self._before.tokens == 0:
            self._answer_shortly(answer)
            return False
        legs = self._host.legs
        recompute = answer.complete or legs.on_missing_kv == "recompute"
        if recompute and legs.direct is Direct.DECODE:
            return True  # The decode rank computes the prompt itself.
        if recompute and legs.direct is Direct.PREFILL:
            # Whoever does the whole request tells its own cached tokens.
            self.decodes, self.record.cached_tokens = False, None
            self._host.feed(self._probe_lost())
        else:
            self._mend(Failure(What.NO_KV, Fault.PROTOCOL, reason))
        return False

    def _enter_pool(self, prompt_tokens: int) -> None:
        lease_ns = None
        lease_s = self._host.lease_s
        if lease_s is not None and self._kv is not None:
            since_s = max(self._prefill_sent_s, self._host.stalls.waiting_since_s())
            lease_ns = round((since_s + lease_s) * 1e9)
        self.pooled()
        if self._before.tokens == 0:
            self._host.counted(self, prompt_tokens)
        self._host.feed(events.PrefillDone(self.number, prompt_tokens, lease_ns))

    def _handed_off(self, body: bytes) -> None:
        """Take the answer of a prefill that the decode rank called for."""
        assert self._hand_off is not None
        assert self._hand_off.prefiller is not None
        record = self.record
        record.prefiller = self._hand_off.prefiller.name
        record.prefilled_ns = round(self._host.clock() * 1e9)
        if self._before.tokens == 0:
            try:
                answer = read_prefill_answer(body)
            except BadPrefillAnswerError:
                self._hand_off.prefiller.endpoint.close_idle()
                return  # The rank has the KV cache; only the counts are missing.
            record.prompt_tokens = answer.prompt_tokens
            record.cached_tokens = answer.cached_tokens
            if self._leg is not None and answer.cached_tokens is not None:
                self._leg.correct_cached_tokens(answer.cached_tokens)
            self._host.counted(self, answer.prompt_tokens)

    def _not_handed_off(self, fault: Fault) -> None:
        """Mend a decode leg that waits for a prefill which nobody did."""
        self._mend(Failure(What.NO_PREFILL, fault, f"prefill failed: {fault.value}"))

    def _answer_shortly(self, answer: PrefillAnswer) -> None:
        self.record.output_tokens = 1
        self.record.first_token_ns = self.record.prefilled_ns
        assert self._body is not None
        answer_shortly(self.answer, self.shape, self._body, answer.message)
        self._host.feed(events.RequestFinished(self.number))
        self._end(Outcome.OK, 200)

    def _probe_lost(self) -> events.Event:
        self._leg = None
        self.forget_kv()
        return events.PrefillLost(self.number, elsewhere=True, decode=self.decodes)

    # What the engine that was asked answers: StreamOwner.

    def _served(self) -> None:
        self._host.leg_succeeded(self._engine.target)
        if self._kv is not None and self._prefiller is not None and self._rank is not None:
            self._host.transfers.succeeded(self._prefiller, self._rank)

    def stream_started(self, status: int, headers: "Headers") -> None:
        """Open the client's stream with the first event."""
        host = self._host
        self._deadline_s = inf
        if self.record.first_token_ns is None:
            self.record.first_token_ns = round(host.clock() * 1e9)
        if not self.answer.opened:
            self.answer.open(status, headers)
        if not self._hands_back:
            self._body = None  # Large, and nothing is sent again after the first byte.
            self.answer.reply.release_body()
        self._served()
        if self.decodes:
            host.started(self)
            host.feed(events.DecodeStarted(self.number))

    def stream_ended(self) -> None:
        """Finish the answer."""
        leg = self._leg
        assert leg is not None
        self._call = None
        if not leg.started:
            # A stream without an event: the engine has nothing to say, which is no answer.
            self.stream_broken(
                WireError(WireFault.RESET, "the stream is empty", sent=True, answered=True)
            )
            return
        self._count_tokens()
        self.answer.reply.end()
        self._host.feed(events.RequestFinished(self.number))
        self._end(Outcome.OK, 200)

    def stream_error(self, message: str) -> None:
        """End a stream in which the engine reported an error of its own."""
        self._call = None
        self._count_tokens()
        self.answer.reply.end()
        self._host.feed(events.RequestFailed(self.number))
        self._end(Outcome.UPSTREAM_ERROR, 200, f"the engine reported: {message}")

    def stream_error_first(self, event: bytes) -> None:
        """Answer, or try again, when the first event is an error."""
        payload = event_data(event)
        error = json.loads(payload)["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if type(code) is int and 400 <= code <= 599 else 500
        what = What.REFUSED if status < 500 else What.ERROR_EVENT
        answer = (status, JSON_HEADERS, payload)
        self._mend(Failure(what, Fault.SERVER_ERROR, f"status {status}", answer))

    def stream_counts_dear(self) -> None:
        """Ask this engine for its counts no more."""
        self._host.counts_dear(self._engine)

    def stream_broken(self, error: WireError) -> None:
        """Mend a decode leg that broke off, or end the answer truthfully."""
        self._mend(breakage(error))

    def decode_refused(self, status: int, headers: "Headers", body: bytes) -> None:
        """Take an answer that is no stream."""
        if status == 200:
            self._decode_answered(status, headers, body)
        else:
            self._mend(refusal(status, headers, body))

    def _decode_answered(self, status: int, headers: "Headers", body: bytes) -> None:
        if status != 200:
            self._mend(refusal(status, headers, body))
            return
        self._call = None
        self._deadline_s = inf
        if self._hands_back and is_recomputed(body):
            self.stream_recomputed()
            return
        if not is_whole(body):
            reason = "the engine's answer is no JSON object"
            self._mend(Failure(What.UNREADABLE, Fault.PROTOCOL, reason))
            return
        record = self.record
        self._served()
        prompt_tokens, record.output_tokens = counts_of(body)
        record.prompt_tokens = record.prompt_tokens or prompt_tokens
        if record.cached_tokens is not None:
            body = with_cached_tokens(body, record.cached_tokens)
        self.answer.send(200, headers, body)
        self._host.feed(events.RequestFinished(self.number))
        self._end(Outcome.OK, 200)

    @property
    def _hands_back(self) -> bool:
        """Whether the engine may give the request back: decode ranks alone do."""
        able = self._host.connector.recomputes and self.decodes
        return able and self._body is not None and not stops_at_recomputed(self._body)

    def stream_recomputed(self) -> None:
        """Prefill again with what was emitted, and go on."""
        self._call_off()
        self.record.recomputes += 1
        leg = self._leg
        if self.record.recomputes > _MOST_RECOMPUTES:
            self._fail(502, f"the engine dropped the request {_MOST_RECOMPUTES} times")
            return
        advanced = leg is not None and leg.started and leg.all_tokens > 0
        if advanced:
            assert leg is not None
            assert self._body is not None
            try:
                if self._before.add(leg, self.shape, self._body):
                    self.answer.reply.write(leg.last_words)
            except CannotResumeError as error:
                self._fail(502, f"the engine dropped the request, and {error}")
                return
        # Else the client has no word of the answer: the next one starts afresh.
        self._leg = None
        self.forget_kv()
        if not self.ticket.prefill:
            self.pooled()
        self._rank = None
        # A rank that did nothing for it would do so again.
        self._host.feed(events.RequestRecomputed(self.number, elsewhere=not advanced))

    def _decode_lost(self) -> events.Event:
        if self._kv_is_lost:
            return self._prefill_lost()
        self._rank = self._leg = None
        self.pooled()
        return events.DecodeLost(self.number)

    def _prefill_lost(self, *, elsewhere: bool = False, same_rank: bool = False) -> events.Event:
        self._rank = self._leg = None
        if self._kv is None or self._host.connector.decode_first:
            self.forget_kv()
            self.pooled()
            return events.DecodeLost(self.number)  # There is no prefill to repeat.
        self.forget_kv()
        return events.PrefillLost(self.number, elsewhere=elsewhere, same_rank=same_rank)

    # Shared by both legs.

    def _mend(self, failure: Failure) -> None:
        """Do about a leg that failed what the rules say."""
        host = self._host
        self._call_off()  # What failed may be the answer, not the connection.
        leg, engine = self._leg_kind, self._engine
        self._deaths += leg is not Leg.PREFILL and failure.what is What.BROKEN
        pair = self.pair
        rule = triage(
            leg,
            failure,
            stream_open=self.answer.opened,
            pulls=pair is not None,
            offers=self._tries_of_kv,
            deaths=self._deaths,
        )
        if rule.close_idle:
            engine.endpoint.close_idle()
        if rule.blame is Blame.ENGINE:
            host.leg_failed(failure.blamed or engine.target, failure.fault, failure.reason)
        elif rule.blame is Blame.PULL and pair is not None:
            host.transfers.failed(self.number, *pair, failure.fault, failure.reason)
        # A trial is the proxy's own doing, and what follows a verdict goes to those who are able.
        free = pair is not None and pair[0].kv_trial
        # A rank that fails again, with another prefiller, is at fault itself. One that hangs is slow to.
        same_rank = failure.what is not What.TIMED_OUT and self._attempts[leg] == 1
        mends: dict[Next, Callable[[], events.Event]] = {
            Next.OTHER_PREFILLER: self._probe_lost,
            Next.OTHER_RANK: self._decode_lost,
            Next.NEW_KV: self._prefill_lost,
            Next.OTHERS_KV: partial(self._prefill_lost, elsewhere=True, same_rank=same_rank),
        }
        lost = mends.get(rule.then)
        tried = self._attempts[leg]
        spent = tried >= host.legs.retry_attempts
        if lost is None or spent or not host.may_retry(leg.value, failure.fault, free=free):
            self._give_up(leg, failure)
            return
        self.record.retries += 1
        delay_s = min(host.legs.retry_backoff_limit_s, host.legs.retry_backoff_s * 2 ** (tried - 1))
        lose = host.guarded(self, "backoff", partial(self._lose, lost))
        self._backoff = host.call_later(delay_s, lose)

    def _lose(self, lost: Callable[[], events.Event]) -> None:
        self._backoff = None
        self._host.feed(lost())

    def _give_up(self, leg: Leg, failure: Failure) -> None:
        if failure.answer is None or self.answer.opened:
            self._fail(*failure.as_error(leg))
        else:
            self._pass_on(*failure.answer)

    def _time_out(self, reason: str) -> None:
        prefilling = None if self._hand_off is None else self._hand_off.target
        if self._hand_off is not None and prefilling is not None:
            self._hung = self._hand_off.prefiller
        self._mend(Failure(What.TIMED_OUT, Fault.TIMEOUT, reason, blamed=prefilling))

    def _call_off(self) -> None:
        if self._call is not None:
            self._call.abort()
            self._call = None
        self._drop_hand_off()
        self._deadline_s = inf

    def _drop_hand_off(self) -> None:
        if self._hand_off is not None:
            self._hand_off.abort()
            self._host.expect_no_more(self._transfer)
            self._hand_off = None

    def _make_stream_leg(self, asked: CountsAsked | None) -> StreamLeg:
        host = self._host
        return StreamLeg(
            self,
            self.answer.reply,
            host.clock,
            openai=self.shape.api in (Api.CHAT, Api.COMPLETIONS),
            sequences=self.shape.sequences,
            cached_tokens=self.record.cached_tokens,
            resumed_tokens=self._before.tokens,
            opened=self.answer.opened,
            keep_text=self._hands_back,
            observe_gap=host.observe_gap,
            counts=None if asked is None else TokenCounts(asked),
        )

    # The end.

    def _crashed(self, error: Exception) -> None:
        self._host.crashed(self, "leg", error)

    def _pass_on(self, status: int, headers: "Headers", body: bytes) -> None:
        """Give the client an engine's own refusal."""
        outcome = Outcome.CLIENT_ERROR if status < 500 else Outcome.UPSTREAM_ERROR
        words = error_words(body)
        reason = f"the engine answered {status}" + (f": {words}" if words else "")
        if status == 404 and self.shape.api in _OPTIONAL and not is_error(body):
            status, reason = 501, f"no engine serves {self.shape.api.value}"
            headers = JSON_HEADERS
            body = error_body(status, reason, endpoint=self.record.endpoint)
        self.answer.send(status, headers, body)
        self._host.feed(events.RequestFailed(self.number))
        self._end(outcome, status, reason)

    def _fail(self, status: int, reason: str) -> None:
        """Give the request up, truthfully."""
        self._host.feed(events.RequestFailed(self.number))
        self._refuse(status, reason, Outcome.UPSTREAM_ERROR)

    def _refuse(
        self, status: int, reason: str, outcome: Outcome, *, retry_after_s: int | None = None
    ) -> None:
        self.drop_leg()
        if self.answer.opened:
            self._count_tokens()
        self.answer.fail(status, reason, retry_after_s=retry_after_s)
        self._end(outcome, self.record.status, reason)

    def _count_tokens(self) -> None:
        leg = self._leg
        tokens = self._before.tokens
        if leg is not None:
            tokens += leg.all_tokens
            self.record.itl_max_ns = max(self.record.itl_max_ns, round(leg.gap_max_s * 1e9))
        self.record.output_tokens = tokens

    def _end(self, outcome: Outcome, status: int, reason: str = "") -> None:
        record = self.record
        assert record.outcome is None, (
            f"request {self.number} ends as {record.outcome} and {outcome}"
        )
        if outcome is Outcome.CANCELLED:
            self._count_tokens()
        record.outcome = outcome
        record.status = status
        record.reason = reason
        record.ended_ns = round(self._host.clock() * 1e9)
        self._body = None
        self._drop_hand_off()
        self.answer.forget()
        self._host.ended(self)
        self._leg = None  # It knows the session: leave no cycle behind.

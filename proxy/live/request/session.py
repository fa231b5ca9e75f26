"""One client request on its way: what it is, where it stands, and how it is answered.

A session reacts to its engines and its client and reports to the driver; the driver passes it what
the scheduler decided. It ends exactly once. Until the first byte of the answer went to the client every
failure may be mended by another instance; after it, a failure is an SSE error event and a cut body.

The scheduler's answer to an event may come from within `Host.feed`, to this very session. So a
session is where it will be, and has let go of its engine, before it feeds.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core import events
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Role, Target
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.shape import CONTINUED_AT, OPTIONAL_APIS, Api, Shape
from balanceroute.proxy.live.request.client_answer import ClientAnswer, Emitted, answer_shortly
from balanceroute.proxy.live.request.failures import (
    LOSSES,
    Blame,
    Failure,
    Next,
    Recovery,
    Retry,
    What,
    lacks_route,
    triage,
)
from balanceroute.proxy.live.request.leg_settings import Direct, guessed_tokens
from balanceroute.proxy.live.request.phases import (
    ENDED,
    MAY_REPEAT,
    POOLED,
    QUEUED,
    STREAMING,
    TRANSITIONS,
    Phase,
    impossible,
    trace_failure,
    trace_move,
)
from balanceroute.proxy.live.request.shared import (
    MOST_DEATHS,
    REASON,
    SUSPECTED,
    EngineDied,
    Host,
    KvAbandoned,
    KvHandle,
    LegFailed,
    LegSucceeded,
    PullFailed,
    SessionEnded,
)
from balanceroute.proxy.live.telemetry.record import OK, Leg, Outcome, RequestRecord
from balanceroute.proxy.wire.http1.client import Call, ResponseHandler
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, LineHandler, Payload, WireError, WireFault

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.live.openai.token_counts import PromptUsage

_SEED_DIGITS = 7  # Of 28 bits, which every sampler takes.
_TARGETS = {api: api.value.encode() for api in Api}


class Work:
    """What a session does in its phase; here nothing: it waits for the scheduler, or has ended."""

    __slots__ = ()

    @property
    def bound(self) -> bool:
        """Whether a rank has the request."""
        return False

    @property
    def pair(self) -> tuple[Prefiller, Rank] | None:
        """The prefiller and the rank that is to pull its KV cache; None unless a decode leg has yet to begin so."""
        return None

    @property
    def tokens(self) -> int | None:
        """Tokens of the stream so far; None if nothing is streamed."""
        return None

    @property
    def complete(self) -> bool:
        """Whether the client has the whole answer, though the engine has not ended it."""
        return False

    @property
    def continuable(self) -> bool:
        """Whether another rank could go on with the stream, from the ids of its tokens."""
        return False

    @property
    def lost(self) -> bool:
        """Whether its connection is lost; the report of that follows in a moment."""
        return False

    @property
    def targets(self) -> tuple[Target, ...]:
        """The instances that work on a leg, or failed to."""
        return ()

    def leg_at(self, target: Target) -> Leg | None:
        """Return the leg that an instance works on, or failed to; None if it does not."""
        del target
        return None

    def move(self, target: Target) -> bool:
        """Have what a removed instance does for another one done elsewhere, if that is possible."""
        del target
        return False

    def finish(self) -> bool:
        """End the answer, if nothing of it is missing but its end; return whether that is so."""
        return False

    def hand_over(self) -> None:
        """Have another rank go on with the stream; only if `continuable`."""

    def check_deadline(self, now_s: float) -> None:
        """Fail if it takes too long."""

    def pause(self) -> None:
        """Read no further: the client reads too slowly."""

    def resume(self) -> None:
        """Read on."""

    def close(self) -> None:
        """Let go of everything. Nothing more comes of it, and to close it again does nothing."""


NO_WORK = Work()


class Attempt(Work):
    """One exchange with one engine, which is a part of its session.

    Attributes:
        posted_s: When the engine was asked, by the loop's clock.
    """

    __slots__ = (
        *("_again", "_call", "_deadline_s", "_sent_again", "_session", "engine", "leg", "posted_s"),
    )

    def __init__(self, session: "Session", leg: Leg, engine: Prefiller | Rank) -> None:
        self.leg = leg
        self.engine = engine
        self._session = session
        self._deadline_s = self.posted_s = 0.0
        self._sent_again = False
        self._call: Call | None = None
        self._again: asyncio.TimerHandle | None = None  # Begins the next attempt.

    @property
    def lost(self) -> bool:
        return self._call is not None and self._call.lost

    def _asked(self) -> tuple[Api, RequestBody]:
        session = self._session
        continued = session.emitted.continued
        if continued is None:
            return session.shape.api, session.body
        return CONTINUED_AT[session.shape.api], continued

    def send(self) -> None:
        """Ask the engine. The session holds the attempt by then, so that it is closed if this fails."""
        raise NotImplementedError

    @property
    def targets(self) -> tuple[Target, ...]:
        return (self.engine.target,)

    def leg_at(self, target: Target) -> Leg | None:
        return self.leg if self.engine.target == target else None

    def pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()

    def close(self) -> None:
        """End the exchange. Its handler knows the attempt: leave no cycle behind."""
        if self._call is not None:
            self._call.abort()
            self._call = None
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def wait(self, delay_s: float, again: Callable[[], None]) -> None:
        """Call `again` after a while. Until then the request is bound as it was."""
        self._again = self._session.context.call_later(delay_s, again)

    def fail(self, failure: Failure) -> None:
        session = self._session
        trace_failure(session.record, self.leg, failure.reason, session.context.clock())
        self.close()

    def _send_again(self, error: WireError) -> bool:
        """Send a leg that was lost with a reused connection once more, on a new one; return whether it is sent.

        For legs that an engine may do twice without harm.
        """
        if error.kind is not WireFault.STALE or self._sent_again:
            return False
        self._sent_again = True
        self.send()
        return True

    def _post(
        self,
        api: Api,
        headers: bytes,
        body: Payload,
        handler: ResponseHandler,
        timeout_s: float,
        *,
        expires_s: float | None = None,
        lines: LineHandler | None = None,
    ) -> None:
        session = self._session
        self.posted_s = session.context.clock()
        self._deadline_s = self.posted_s + timeout_s
        self._call = self.engine.endpoint.request(
            b"POST",
            _TARGETS[api],
            headers,
            body,
            handler,
            crashed=session.crashed,
            expires_s=expires_s,
            lines=lines,
            fresh=self._sent_again or session.fresh,
        )


def draw_seed(session: "Session") -> int:
    """Return a seed for a request whose client gave none; its record names it."""
    seed = session.record.seed = int(session.context.unique()[:_SEED_DIGITS], 16)
    return seed


# Of a stream that goes on elsewhere: all that its client has may come again before anything new.
_RESUMED_SILENCE_S = 4.0
_CRASHED = "internal error; the proxy's log says more"
_NAMES = {Role.PREFILL: "prefiller", Role.DECODE: "decode rank"}


class Session:
    """One request.

    Args:
        headers: The lines of every engine leg.
        record: Its record, kept up to date.

    Attributes:
        kv: What a prefiller left for the rank; None before, and once a rank has it.
    """

    __slots__ = (
        *("_body", "_fingerprint", "abort_ordered", "answer"),
        *("context", "decodes", "emitted", "fresh", "headers", "host", "work"),
        *("kv", "number", "offset", "pooled_s", "recovery"),
        *("phase", "prompt_usage", "record", "resuming", "shape", "silent_prefiller", "ticket"),
    )

    def __init__(
        self,
        number: events.RequestId,
        host: Host,
        *,
        ticket: events.Ticket,
        shape: Shape,
        body: RequestBody,
        headers: bytes,
        reply: Reply,
        record: RequestRecord,
    ) -> None:
        self.number = number
        self.ticket = ticket
        self.shape = shape
        self.record = record
        self.headers = headers
        self.host = host
        self.context = host.context
        self.offset = 0  # The step clock's.
        # Whether the proxy ordered engines to abort it: what they have of it is the answer.
        self.abort_ordered = False
        # Whether a rank decodes it; else a prefiller does the whole request.
        self.decodes = ticket.decode
        # Keeps what an answer needs to go on elsewhere; None if it may not.
        self.resuming = None if host.context.resuming is None else host.context.resuming()
        self.emitted: Emitted = self.resuming or Emitted()  # What earlier bindings emitted.
        # What the prefill leg reported of its prompt; None if it reported nothing.
        self.prompt_usage: PromptUsage | None = None
        # The prefiller that left a decode rank's call unanswered, to be asked last.
        self.silent_prefiller: Prefiller | None = None
        # Whether its legs go on new connections: one was lost with a reused one.
        self.fresh = False
        self.phase = QUEUED
        # The client's side of it.
        self.answer = ClientAnswer(reply, record, left=self.left, slow=self._client_slow)
        self._body: RequestBody | None = body
        self._fingerprint = b""
        self.work: Work = NO_WORK  # That of its phase.
        self.kv: KvHandle | None = None  # Until a rank has it.
        self.pooled_s = 0.0  # When it began to wait for a rank.
        self.recovery = Recovery(host.context.legs)

    @property
    def body(self) -> RequestBody:
        """The client's body. It is large, and gone once nothing can be sent again."""
        assert self._body is not None, f"the body of request {self.number} is released"
        return self._body

    @property
    def fingerprint(self) -> bytes:
        """The name of its prompt; see `Suspects`."""
        if not self._fingerprint:
            self._fingerprint = self.context.suspects.of(self.record.endpoint, self.body)
        return self._fingerprint

    @property
    def prompt_tokens(self) -> int | None:
        """The length of the next prefill; None if only an engine knows it."""
        known = self.shape.prompt_tokens
        return None if known is None else known + self.emitted.tokens

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""
        tokens = self.work.tokens
        return None if tokens is None else tokens // self.shape.sequences

    @property
    def emitted_tokens(self) -> int:
        """Tokens emitted so far, as far as a stream shows."""
        return self.emitted.tokens + (self.work.tokens or 0)

    @property
    def targets(self) -> tuple[Target, ...]:
        holder = () if self.kv is None else (self.kv.prefiller.target,)
        return (*holder, *self.work.targets)

    def check_deadline(self, now_s: float) -> None:
        """Act if the leg in flight takes too long, or the client of a stream has got nothing."""
        if self.phase is not Phase.BACKOFF:
            self.work.check_deadline(now_s)
        silence_s = self.context.legs.sse_keep_alive_s
        if silence_s is None and self.record.resumes:
            silence_s = _RESUMED_SILENCE_S
        if silence_s is not None and self.shape.stream and self.phase is not ENDED:
            self.answer.keep_alive(now_s, silence_s)

    def _enter(self, phase: Phase, work: Work = NO_WORK) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise impossible(self.number, self.phase, phase)
        record = self.record
        if record.trace is not None and (phase in MAY_REPEAT or record.trace.steps):
            trace_move(record, self.phase, phase, self.context.clock(), decodes=self.decodes)
        self.phase = phase
        before, self.work = self.work, work
        if before is not work and before is not NO_WORK:
            before.close()

    # What the driver says.

    def asks_itself(self, engine: Prefiller | Rank) -> bool:
        """Note the engine of the next leg; return whether this session moves the bytes to it and back."""
        del engine
        return True

    def begin(self, phase: Phase, attempt: Attempt) -> None:
        """Ask an engine, unless it is known to lack the route."""
        self._enter(phase, attempt)
        recovery, leg = self.recovery, attempt.leg
        if (recovery.lacking or attempt.engine.lacks) and self._passes_over(attempt):
            return
        recovery.tries[leg] = recovery.tries.get(leg, 0) + 1
        attempt.send()

    def pooled(self) -> None:
        """Note that the session waits for a rank from now on."""
        self._enter(POOLED)
        self.pooled_s = self.context.clock()

    def prefill_again(self) -> None:
        """Note that the scheduler has the prompt computed anew, if a prefiller does that at all."""
        self.kv = None
        if self.phase is not Phase.QUEUED and self.ticket.prefill:
            self._enter(Phase.QUEUED)

    def lease_ended(self, *, cheaper: bool) -> None:
        """Note that the KV cache must not be used any more; `cheaper` as in `ReleasePrefill`."""
        if self.kv is None:
            self.host.report(KvAbandoned("lost"))
        else:
            self._lapsed(cheaper=cheaper)
            self.prefill_again()

    def _lapsed(self, *, cheaper: bool) -> None:
        self.record.lease_lapsed(cheaper=cheaper)
        self.host.report(KvAbandoned("cheaper" if cheaper else "lapsed"))

    def expire(self, reason: str) -> None:
        """Give the request up: it waited too long. The scheduler knows."""
        self._enter(Phase.ENDED)
        self.answer.fail(self.context.legs.expired_status, reason, retry_after_s=1)
        self._end(None, Outcome.EXPIRED, reason)

    def fail(self, status: int, reason: str, *, retry_after_s: int | None = None) -> None:
        """Give the request up, truthfully."""
        self._enter(Phase.ENDED)
        self.answer.fail(status, reason, retry_after_s=retry_after_s)
        self._end(events.RequestFailed(self.number), Outcome.UPSTREAM_ERROR, reason)

    def refuse(self, status: int, reason: str, *, param: str | None = None) -> None:
        """End a request that cannot be served as it is; `param` names the member at fault."""
        self._enter(Phase.ENDED)
        body = error_body(status, reason, param=param, endpoint=self.record.endpoint)
        self.answer.send(status, JSON_HEADERS, body)
        self._end(events.RequestFailed(self.number), Outcome.CLIENT_ERROR, reason)

    def give_up(self, reason: str) -> None:
        """End the request; the client may try again later."""
        self.fail(503, reason, retry_after_s=1)

    def crash(self) -> None:
        """End the request, whose handling failed, its end perhaps. The scheduler knows."""
        if self.phase is not Phase.ENDED:
            self._enter(Phase.ENDED)
        self.answer.fail(500, _CRASHED)
        self._end(None, Outcome.INTERNAL_ERROR, _CRASHED)

    def abandon(self) -> None:
        """Let go of the request, whatever it takes: `crash` did not end it."""
        try:
            self.answer.reply.abort()
        finally:
            self._end(None, Outcome.INTERNAL_ERROR, _CRASHED)

    def withdraw(self) -> None:
        """Let go of the client: the request was refused, and another part of the proxy answers."""
        self._enter(Phase.ENDED)
        self._body = None
        self.answer.forget()

    def crashed(self, error: Exception) -> None:
        """Have the request ended: an engine's answer could not be handled."""
        self.host.crashed(self.number, self.record.request_id, "leg", error)

    # Engines that go.

    def instance_removed(self, target: Target, *, gently: bool = False) -> None:
        """Go on without an instance that this request was on; `gently` if it may end its answer."""
        if self.work.move(target):
            return
        if self.phase is not Phase.STREAMING:
            self.record.retries += 1
            # A rank may have pulled a KV cache that it was offered.
            self.host.feed(self._kv_lost() if self.work.bound else self._prefiller_lost())
        elif self.work.continuable:
            self.work.hand_over()
        elif not self.work.finish() and not gently:
            self.fail(502, "the engine was removed")

    def engine_lost(self, target: Target) -> None:
        """Leave an engine that does not answer any more, unless its answer has begun."""
        leg = self.work.leg_at(target)
        begun = self.phase is Phase.STREAMING and leg is not Leg.PREFILL
        # For its next attempt, or for the report of its connection: so it leaves anyway.
        waits = self.phase is Phase.BACKOFF or self.work.lost
        if leg is None or begun or waits or not self.recovery.may_try_again(leg):
            return
        if self.host.may_retry(leg.value, Fault.CONNECT, lost_with=target):
            self.instance_removed(target)

    def leave_rank(self, target: Target) -> None:
        """Go on without the rank, which stands still, as far as attempts allow.

        It takes nothing from the retry budget: other ranks step, so the fault is not common to all.
        """
        if self.phase is Phase.STREAMING or self.recovery.may_try_again(Leg.DECODE):
            self.instance_removed(target, gently=True)

    def drop_lost_kv(self) -> None:
        """Prefill again if it waits in the pool with a KV cache that is lost."""
        if self.phase is Phase.POOLED and self.kv is not None and self.kv.is_lost:
            self.host.feed(self._kv_lost())

    # What the client does.

    def left(self) -> None:
        """Take note that the client is gone, and end the request if that fails."""
        _run(self, "client left", self.client_left)

    def _client_slow(self, slow: bool) -> None:
        """Have the engine of the answer wait while the client reads too slowly."""
        (self.work.pause if slow else self.work.resume)()

    def client_left(self) -> None:
        """Stop everything: the client has left."""
        if self.phase is Phase.ENDED:
            return
        # It may have had the whole answer, only not the last bytes of the stream.
        complete = self.phase is Phase.STREAMING and self.work.complete
        self._enter(Phase.ENDED)
        ends = events.RequestFinished if complete else events.RequestCancelled
        self._end(ends(self.number), Outcome.OK if complete else Outcome.CANCELLED)

    # What a prefiller answers.

    def prefilled(self, kv: KvHandle) -> None:
        """Wait for a rank with what a prefiller has computed."""
        self.kv = kv
        self.pooled()

    def left_to_prefillers(self) -> None:
        """Have a prefiller do the whole request, as no rank can do its part."""
        # The engine that does the whole request reports its own cached tokens.
        self.decodes, self.record.cached_tokens, self.prompt_usage = False, None, None
        self.host.feed(self._prefiller_lost())

    def prefill_was_all(self, message: Mapping[str, Any]) -> None:
        """Answer with the one token of the prefill, behind which nothing comes."""
        self._enter(Phase.ENDED)
        answer_shortly(self.answer, self.shape, self.body, message)
        self.host.feed(events.FirstToken(self.number))
        self._end(events.RequestFinished(self.number), Outcome.OK)

    # What the engine answers that does the request.

    def began(self, attempt: Attempt, status: int, headers: Headers, *, keeps_body: bool) -> None:
        """Open the client's stream, unless it is open."""
        self._enter(STREAMING, attempt)
        if not self.answer.opened:
            self.answer.open(status, headers)
        if not keeps_body:
            self._fingerprint = self.fingerprint
            self._body = None
            self.answer.reply.release_body()
        self.kv = None

    def finished(self, error: str = "", *, cut: bool = False) -> None:
        """End the stream, in which the engine may have reported an error of its own."""
        self._enter(ENDED)
        (self.answer.reply.abort if cut else self.answer.reply.end)()
        if error:
            reason = f"the engine reported: {error}"
            self._end(events.RequestFailed(self.number), Outcome.UPSTREAM_ERROR, reason)
        else:
            self._end(events.RequestFinished(self.number), OK)

    def answered(self, headers: Headers, body: bytes, served: LegSucceeded) -> None:
        self._enter(ENDED)
        self.answer.send(200, headers, body)
        self.host.feed(events.RequestFinished(self.number), served)
        self._end(None, OK)

    def recomputed(self, *, elsewhere: bool, anew: bool = False) -> None:
        """Prefill again with the emitted tokens, and go on; without, the next answer starts afresh."""
        if not self.decodes:
            self.host.feed(self._prefiller_lost())
            return
        self.kv = None
        if self.ticket.prefill:
            self._enter(Phase.QUEUED)
        else:
            self.pooled()
        self.host.feed(events.RequestRecomputed(self.number, elsewhere=elsewhere, anew=anew))

    # Failures.

    def failed(self, attempt: Attempt, failure: Failure) -> None:
        """Try again what failed, or give it up."""
        # When its first token comes again, the client sees nothing of that.
        begun = self.answer.opened and self.emitted.early is None
        if failure.is_death:
            self.engine_died(attempt.engine, attempt.posted_s, said=failure.says_dead)
        deaths = self._deaths()
        retry = _judge(self, attempt, failure, stream_open=begun, deaths=deaths)
        self.fresh |= failure.what is What.STALE
        if failure.what is What.TOO_LATE:
            self._lapsed(cheaper=False)
        if failure.what is What.NO_ROUTE:
            now_s = self.context.clock()
            self.recovery.note_lacking(attempt.engine, self.shape.api, failure, now_s)
        if retry is None and deaths >= MOST_DEATHS and failure.what is not What.REFUSED:
            self._give_up_prompt()
        elif retry is None and failure.what is What.NO_ROUTE:
            self._do_without(attempt, failure)
        elif retry is None:
            self._give_up(attempt, failure)
        elif retry.then is Next.CONTINUE:
            attempt.hand_over()
        elif retry.free:
            self.record.retries += failure.what is not What.TOO_LATE
            self._go_on(retry)
        else:
            pulled_from = None if attempt.pair is None else attempt.pair[0].id
            lost = attempt.engine.target if failure.what in LOSSES else None
            leg, fault = attempt.leg.value, failure.fault
            if not self.host.may_retry(leg, fault, lost_with=lost, pulled_from=pulled_from):
                self._give_up(attempt, failure)
                return
            self.record.retries += 1
            again = partial(_run, self, "backoff", partial(self._go_on, retry))
            attempt.wait(retry.delay_s, again)
            self._enter(Phase.BACKOFF, attempt)

    def _passes_over(self, attempt: Attempt) -> bool:
        """Go on without an engine that is known to lack the route; return whether it is one."""
        known = self.recovery.foresee(
            attempt.leg, attempt.engine, self.shape.api, self.context.clock()
        )
        if isinstance(known, Retry):
            self._go_on(known)
        elif known is not None:
            self._do_without(attempt, known)
        return known is not None

    def _do_without(self, attempt: Attempt, failure: Failure) -> None:
        """Have one engine of the other role do all of a request whose route a role lacks, if it may."""
        direct = self.context.legs.direct_of(guessed_tokens(self.shape))
        begun = self.answer.opened or self.emitted.tokens
        engine = attempt.engine
        if (
            isinstance(engine, Prefiller)
            and not begun
            and attempt.leg is Leg.PREFILL
            and direct is Direct.DECODE
        ):
            tokens, self.record.local_prefill = self.ticket.prompt_tokens, True
            self.prefilled(KvHandle(engine, None))
            # None of them was computed.
            done = events.PrefillDone(self.number, tokens, None, tokens)
            self.host.feed(done, LegSucceeded(engine.target))
        elif (
            attempt.leg is Leg.DECODE
            and direct is Direct.PREFILL
            and not (begun or self.kv is None or self.kv.params is None)
        ):
            self.left_to_prefillers()
        else:
            self._give_up(attempt, failure)

    def engine_died(self, engine: Prefiller | Rank, sent_s: float, *, said: bool) -> bool:
        """Note that an engine died under the prompt; return whether another one may have it."""
        if isinstance(engine, Prefiller) or not engine.doomed:  # Else it died with its group.
            died = EngineDied(
                self.fingerprint,
                self.record.request_id,
                engine.target,
                self.host.group_of(engine),
                sent_s,
                self.context.clock(),
                said=said,
            )
            self.context.suspects.died(died)
        return self._deaths() < MOST_DEATHS

    def _deaths(self) -> int:
        suspects = self.context.suspects
        return suspects.deaths(self.fingerprint) if suspects.prompts else 0

    def is_refused(self) -> bool:
        """End the request if its prompt is not to be tried any more; return whether that is so."""
        suspects = self.context.suspects
        if suspects.refuses(self.fingerprint):
            self._give_up_prompt()
            return True
        suspects.sends(self.fingerprint, self)
        return False

    def prompt_refused(self) -> None:
        """End the request before another engine dies of it, unless its answer has begun."""
        if self.phase not in (STREAMING, ENDED):
            _run(self, "poison", self._give_up_prompt)

    def _give_up_prompt(self) -> None:
        """Give the request up: it may be what kills engines."""
        self.record.refused_for = SUSPECTED
        self._enter(Phase.ENDED)
        self.answer.fail(502, REASON, for_good=True)
        self._end(events.RequestFailed(self.number), Outcome.UPSTREAM_ERROR, REASON)

    def _give_up(self, attempt: Attempt, failure: Failure) -> None:
        """Report a failure to the client: no retry is left."""
        if failure.answer is None or self.answer.opened:
            self.fail(*failure.as_error(attempt.leg))
            return
        status, _, body = failure.answer
        if self.shape.api in OPTIONAL_APIS and lacks_route(status, body):
            role = (failure.blamed or attempt.engine.target).role
            roles = {role, *(engine.target.role for engine in self.recovery.lacking)}
            who = "engine" if len(roles) > 1 else _NAMES[role]
            self.refuse(501, f"no {who} serves {self.shape.api.value}")
            return
        self._enter(Phase.ENDED)
        reason = self.answer.pass_on(*failure.answer)
        outcome = Outcome.CLIENT_ERROR if failure.answer[0] < 500 else Outcome.UPSTREAM_ERROR
        self._end(events.RequestFailed(self.number), outcome, reason)

    def _go_on(self, retry: Retry) -> None:
        if retry.then is Next.OTHER_PREFILLER:
            event = self._prefiller_lost()
        elif retry.then is Next.NEW_KV_ELSEWHERE:
            event = self._kv_lost(elsewhere=True, same_rank=retry.same_rank)
        elif retry.then is Next.NEW_KV or (self.kv is not None and self.kv.is_lost):
            event = self._kv_lost()
        else:
            self.pooled()
            event = events.DecodeLost(self.number)
        self.host.feed(event)

    def _prefiller_lost(self) -> events.Event:
        self.kv = None
        self._enter(Phase.QUEUED)
        return events.PrefillLost(self.number, elsewhere=True, decode=self.decodes)

    def _kv_lost(self, *, elsewhere: bool = False, same_rank: bool = False) -> events.Event:
        kv, self.kv = self.kv, None
        if kv is None or kv.params is None:
            self.pooled()
            return events.DecodeLost(self.number)  # There is no prefill to repeat.
        self._enter(Phase.QUEUED)
        return events.PrefillLost(self.number, elsewhere=elsewhere, same_rank=same_rank)

    def _end(self, event: events.Event | None, outcome: Outcome, reason: str = "") -> None:
        """Report the end to the scheduler, unless it knows, and then to the driver."""
        if event is not None:
            self.host.feed(event)
        self.record.end(outcome, reason, self.context.clock())
        if self._fingerprint and self.context.suspects.prompts:
            self.context.suspects.ended(self._fingerprint, self)
        self._body = None
        self.answer.forget()
        self.host.report(SessionEnded(self.number, self.record))


def _judge(
    session: Session, attempt: Attempt, failure: Failure, *, stream_open: bool, deaths: int
) -> Retry | None:
    """End an attempt, blame the engines that the rules blame, and return how to go on; see `triage`."""
    attempt.fail(failure)  # What failed may be the answer, not the connection.
    recovery, kv = session.recovery, session.kv
    pair, engine, leg = attempt.pair, attempt.engine, attempt.leg
    rule = triage(
        leg,
        failure,
        stream_open=stream_open,
        continuable=stream_open and attempt.continuable,
        pulls=pair is not None,
        offers=0 if kv is None else kv.offers,
        deaths=deaths + recovery.note_broken(leg, failure),
    )
    if rule.close_idle:
        engine.endpoint.close_idle()
    fault, reason = failure.fault, failure.reason
    if rule.blame is Blame.ENGINE:
        blamed = failure.blamed or engine.target
        session.host.report(LegFailed(blamed, fault, reason, failure.says_dead))
    elif rule.blame is Blame.PULL and pair is not None:
        prefiller, rank = pair
        session.host.report(PullFailed(session.number, prefiller.id, rank.id, fault, reason))
    return recovery.after(leg, failure, rule.then)


def _run(session: Session, what: str, do: Callable[[], None]) -> None:
    try:
        do()
    except Exception as error:
        session.host.crashed(session.number, session.record.request_id, what, error)

"""One client request on its way: what it is, where it stands, and how it is answered.

A session reacts to its engines and its client and tells the driver; the driver tells it what the
scheduler decided. It ends exactly once. Until the first byte of the answer went to the client every
failure may be mended by another instance; after it, a failure is an SSE error event and a cut body.

The scheduler's answer to an event may come from within `Host.feed`, to this very session. So a
session is where it will be, and has let go of its engine, before it feeds.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core import events
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.shape import OPTIONAL_APIS, Shape
from balanceroute.proxy.live.request.client_answer import ClientAnswer
from balanceroute.proxy.live.request.decode_attempt import DecodeAttempt
from balanceroute.proxy.live.request.failures import Failure, Next, What, lacks_route
from balanceroute.proxy.live.request.holding import NOTHING, Attempt, Backoff, Emitted, Holding
from balanceroute.proxy.live.request.leg_settings import Direct, guessed_tokens
from balanceroute.proxy.live.request.phases import (
    DECODING,
    ENDED,
    MAY_REPEAT,
    POOLED,
    PREFILLING,
    QUEUED,
    STREAMING,
    TRANSITIONS,
    Phase,
    impossible,
    trace_move,
)
from balanceroute.proxy.live.request.prefill_attempt import PrefillAttempt
from balanceroute.proxy.live.request.recovery import Recovery, Retry, answer_shortly
from balanceroute.proxy.live.request.session_host import (
    Host,
    KvAbandoned,
    KvHandle,
    LegSucceeded,
    SessionEnded,
)
from balanceroute.proxy.live.request.suspects import (
    MOST_DEATHS,
    REASON,
    SUSPECTED,
    EngineDied,
)
from balanceroute.proxy.live.telemetry.record import OK, Leg, Outcome, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.live.engines.instances import Prefiller, Rank
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.token_counts import PromptUsage
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers

# Of a stream that goes on elsewhere: all that its client has may come again before anything new.
_RESUMED_SILENCE_S = 4.0
_CRASHED = "internal error; the proxy's log says more"
_NAMES = {Role.PREFILL: "prefiller", Role.DECODE: "decode rank"}


class Session:
    """One request.

    Args:
        ticket: What the scheduler knows of it.
        headers: The lines of every engine leg.
        reply: The client.
        record: What is known of it, kept up to date.

    Attributes:
        abort_ordered: Whether engines were told to abort it, so that what they have of it is the answer.
        answer: The client's side of it.
        decodes: Whether a rank decodes it; else a prefiller does the whole request.
        emitted: What earlier bindings emitted.
        fresh: Whether its legs go on new connections: one was lost with a reused one.
        held: What it holds in its phase.
        hung: The prefiller that left a decode rank's call unanswered, to be asked last.
        offset: The step clock's.
        phase: Where it stands.
        prompt_usage: What the prefill leg told of its prompt; None if it told nothing.
    """

    __slots__ = (
        *("_body", "_fingerprint", "_kv", "_pooled_s", "_recovery", "abort_ordered", "answer"),
        *("context", "decodes", "emitted", "fresh", "headers", "held", "host"),
        *("hung", "number", "offset"),
        *("phase", "prompt_usage", "record", "shape", "ticket"),
    )

    def __init__(
        self,
        number: events.RequestId,
        host: Host,
        *,
        ticket: events.Ticket,
        shape: Shape,
        body: "RequestBody",
        headers: bytes,
        reply: "Reply",
        record: RequestRecord,
    ) -> None:
        self.number = number
        self.ticket = ticket
        self.shape = shape
        self.record = record
        self.headers = headers
        self.host = host
        self.context = host.context
        self.offset = 0
        self.abort_ordered = False
        self.decodes = ticket.decode
        self.emitted = Emitted()
        self.prompt_usage: PromptUsage | None = None
        self.hung: Prefiller | None = None
        self.fresh = False
        self.phase = QUEUED
        self.answer = ClientAnswer(self, reply, record)
        self._body: RequestBody | None = body
        self._fingerprint = b""
        self.held: Holding = NOTHING
        self._kv: KvHandle | None = None  # Until a rank has it.
        self._pooled_s = 0.0
        self._recovery = Recovery(number, host, host.context.legs)

    @property
    def body(self) -> "RequestBody":
        """What the client sent. It is large, and gone once nothing can be sent again."""
        assert self._body is not None, f"the body of request {self.number} is released"
        return self._body

    @property
    def fingerprint(self) -> bytes:
        """What names its prompt; see `Suspects`."""
        if not self._fingerprint:
            self._fingerprint = self.context.suspects.of(self.record.endpoint, self.body)
        return self._fingerprint

    @property
    def prompt_tokens(self) -> int | None:
        """The length of what is prefilled next; None if only an engine can tell."""
        known = self.shape.prompt_tokens
        return None if known is None else known + self.emitted.tokens

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""
        tokens = self.held.tokens
        return None if tokens is None else tokens // self.shape.sequences

    @property
    def emitted_tokens(self) -> int:
        """Tokens emitted so far, as far as a stream tells."""
        return self.emitted.tokens + (self.held.tokens or 0)

    @property
    def pair(self) -> "tuple[Prefiller, Rank] | None":
        """Who is to pull its KV cache from whom; None unless a decode leg has yet to begin so."""
        return self.held.pair

    @property
    def pullable(self) -> bool:
        """Whether it has a KV cache that a rank is to pull."""
        return self._kv is not None and self._kv.params is not None

    @property
    def targets(self) -> tuple[Target, ...]:
        """The instances that work for this request, or hold its KV cache."""
        holder = () if self._kv is None else (self._kv.prefiller.target,)
        return (*holder, *self.held.targets)

    def is_on(self, target: Target) -> bool:
        """Return whether an instance is one of these."""
        return target in self.targets

    def check_deadline(self, now_s: float) -> None:
        """Act if the leg in flight takes too long, or the client of a stream has heard nothing."""
        self.held.check_deadline(now_s)
        silence_s = self.context.legs.sse_keep_alive_s
        if silence_s is None and self.record.resumes:
            silence_s = _RESUMED_SILENCE_S
        if silence_s is not None and self.shape.stream and self.phase is not ENDED:
            self.answer.keep_alive(now_s, silence_s)

    def _enter(self, phase: Phase, held: Holding = NOTHING) -> None:
        """Leave the phase that it is in, with what it holds there."""
        if phase not in TRANSITIONS[self.phase]:
            raise impossible(self.number, self.phase, phase)
        record = self.record
        if record.trace is not None and (phase in MAY_REPEAT or record.trace.steps):
            trace_move(record, self.phase, phase, self.context.clock(), decodes=self.decodes)
        self.phase = phase
        before, self.held = self.held, held
        if before is not held and before is not NOTHING:
            before.close()

    # What the driver says.

    def start_prefill(self, prefiller: "Prefiller") -> None:
        """Send the prefill leg, or the whole request if nobody decodes it."""
        if self.context.suspects.prompts and self._is_refused():
            return
        self.record.prefill_began(prefiller.name, self.context.clock())
        if self.decodes:
            self._try(PREFILLING, PrefillAttempt(self, prefiller))
        else:
            self._try(DECODING, DecodeAttempt(self, prefiller, None))

    def start_decode(self, rank: "Rank") -> None:
        """Send the decode leg."""
        if self.context.suspects.prompts and self._is_refused():
            return
        self.record.bound(rank.name, self.context.clock(), pooled_s=self._pooled_s)
        self._try(DECODING, DecodeAttempt(self, rank, self._kv))

    def _try(self, phase: Phase, attempt: Attempt) -> None:
        self._enter(phase, attempt)
        if (self._recovery.lacking or attempt.engine.lacks) and self._passes_over(attempt):
            return
        self._recovery.begin(attempt.leg)
        attempt.send()

    def pooled(self) -> None:
        """Note that the session waits for a rank from now on."""
        self._enter(POOLED)
        self._pooled_s = self.context.clock()

    def drop_leg(self) -> None:
        """Stop the leg in flight, if any; nothing more comes of it."""
        self.held.close()

    def prefill_again(self) -> None:
        """Note that the scheduler has the prompt computed anew, if a prefiller does that at all."""
        self._kv = None
        if self.phase is not Phase.QUEUED and self.ticket.prefill:
            self._enter(Phase.QUEUED)

    def lease_ended(self, *, cheaper: bool) -> None:
        """Note that the KV cache must not be used any more; `cheaper` as in `ReleasePrefill`."""
        if self._kv is None:
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

    def expect_abort(self) -> None:
        """Note that engines are told to abort it: what they answer then is the answer."""
        self.abort_ordered = True

    def give_up(self, reason: str) -> None:
        """End the request, which somebody else may serve later."""
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
        """Let go of the client, who is answered by others: the request was refused."""
        self._enter(Phase.ENDED)
        self._body = None
        self.answer.forget()

    def crashed(self, error: Exception) -> None:
        """Have the request ended: an engine's answer could not be handled."""
        self.host.crashed(self.number, self.record.request_id, "leg", error)

    # Engines that go.

    def instance_removed(self, target: Target, *, gently: bool = False) -> None:
        """Go on without an instance that this request was on; `gently` if it may end its answer."""
        if self.held.move(target):
            return
        if self.phase is not Phase.STREAMING:
            self.record.retries += 1
            # Of a KV cache that a rank was offered nobody knows whether it has been pulled.
            self.host.feed(self._kv_lost() if self.held.bound else self._prefiller_lost())
        elif self.held.continuable:
            self.held.hand_over()
        elif not self.held.finish() and not gently:
            self.fail(502, "the engine was removed")

    def engine_lost(self, target: Target) -> None:
        """Leave an engine that does not answer any more, unless its answer has begun."""
        leg = self.held.leg_at(target)
        begun = self.phase is Phase.STREAMING and leg is not Leg.PREFILL
        # For its next attempt, or for word of its connection: so it leaves anyway.
        waits = self.phase is Phase.BACKOFF or self.held.lost
        if leg is None or begun or waits or not self._recovery.may_try_again(leg):
            return
        if self.host.may_retry(leg.value, Fault.CONNECT):
            self.instance_removed(target)

    def leave_rank(self, target: Target) -> None:
        """Go on without the rank, which stands still, as far as attempts allow.

        Nothing is taken from the retry budget: others step, so this is no fault that all have in common.
        """
        if self.phase is Phase.STREAMING or self._recovery.may_try_again(Leg.DECODE):
            self.instance_removed(target, gently=True)

    def drop_lost_kv(self) -> None:
        """Prefill again if it waits in the pool with a KV cache that is lost."""
        if self.phase is Phase.POOLED and self._kv is not None and self._kv.is_lost:
            self.host.feed(self._kv_lost())

    # What the client does.

    def left(self) -> None:
        """Take note that the client is gone, and end the request if that fails."""
        _run(self, "client left", self.client_left)

    def client_left(self) -> None:
        """Stop everything: nobody reads the answer any more."""
        if self.phase is Phase.ENDED:
            return
        # It may have had the whole answer, only not the last bytes of the stream.
        complete = self.phase is Phase.STREAMING and self.held.complete
        self._enter(Phase.ENDED)
        ends = events.RequestFinished if complete else events.RequestCancelled
        self._end(ends(self.number), Outcome.OK if complete else Outcome.CANCELLED)

    # What a prefiller answers.

    def prefilled(self, kv: KvHandle) -> None:
        """Wait for a rank with what a prefiller has computed."""
        self._kv = kv
        self.pooled()

    def left_to_prefillers(self) -> None:
        """Have a prefiller do the whole request, as no rank can do its part."""
        # Whoever does the whole request tells its own cached tokens.
        self.decodes, self.record.cached_tokens, self.prompt_usage = False, None, None
        self.host.feed(self._prefiller_lost())

    def prefill_was_all(self, message: "Mapping[str, Any]") -> None:
        """Answer with the one token of the prefill, behind which nothing comes."""
        self._enter(Phase.ENDED)
        answer_shortly(self.answer, self.shape, self.body, message)
        self.host.feed(events.FirstToken(self.number))
        self._end(events.RequestFinished(self.number), Outcome.OK)

    # What the engine answers that does the request.

    def began(self, attempt: Attempt, status: int, headers: "Headers", *, keeps_body: bool) -> None:
        """Open the client's stream, unless it is open."""
        self._enter(STREAMING, attempt)
        if not self.answer.opened:
            self.answer.open(status, headers)
        if not keeps_body:
            self._fingerprint = self.fingerprint
            self._body = None
            self.answer.reply.release_body()
        self._kv = None

    def finished(self, error: str = "", *, cut: bool = False) -> None:
        """End the stream, in which the engine may have reported an error of its own."""
        self._enter(ENDED)
        (self.answer.reply.abort if cut else self.answer.reply.end)()
        if error:
            reason = f"the engine reported: {error}"
            self._end(events.RequestFailed(self.number), Outcome.UPSTREAM_ERROR, reason)
        else:
            self._end(events.RequestFinished(self.number), OK)

    def answered(self, headers: "Headers", body: bytes, served: LegSucceeded) -> None:
        """Pass on a whole answer."""
        self._enter(ENDED)
        self.answer.send(200, headers, body)
        self.host.feed(events.RequestFinished(self.number), served)
        self._end(None, OK)

    def recomputed(self, *, elsewhere: bool, anew: bool = False) -> None:
        """Prefill again with what was emitted, and go on; without, the next answer starts afresh."""
        if not self.decodes:
            self.host.feed(self._prefiller_lost())
            return
        self._kv = None
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
        retry = self._recovery.after(attempt, failure, stream_open=begun, deaths=deaths)
        self.fresh |= failure.what is What.STALE
        if failure.what is What.TOO_LATE:
            self._lapsed(cheaper=False)
        if failure.what is What.NO_ROUTE:
            self._recovery.note_lacking(attempt, self.shape.api, failure, self.context.clock())
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
            if not self.host.may_retry(attempt.leg.value, failure.fault, pulled_from=pulled_from):
                self._give_up(attempt, failure)
                return
            self.record.retries += 1
            again = partial(_run, self, "backoff", partial(self._go_on, retry))
            self._enter(Phase.BACKOFF, Backoff(self, attempt, retry.delay_s, again))

    def _passes_over(self, attempt: Attempt) -> bool:
        """Go on without an engine that is known to lack the route; return whether it is one."""
        known = self._recovery.foresee(attempt, self.shape.api, self.context.clock())
        if isinstance(known, Retry):
            self._go_on(known)
        elif known is not None:
            self._do_without(attempt, known)
        return known is not None

    def _do_without(self, attempt: Attempt, failure: Failure) -> None:
        """Have one engine of the other role do all of a request whose route a role lacks, if it may."""
        direct = self.context.legs.direct_of(guessed_tokens(self.shape))
        begun = self.answer.opened or self.emitted.tokens
        if isinstance(attempt, PrefillAttempt) and direct is Direct.DECODE and not begun:
            tokens, self.record.local_prefill = self.ticket.prompt_tokens, True
            self.prefilled(KvHandle(attempt.prefiller, None))
            # None of them was computed.
            done = events.PrefillDone(self.number, tokens, None, tokens)
            self.host.feed(done, LegSucceeded(attempt.engine.target))
        elif attempt.leg is Leg.DECODE and direct is Direct.PREFILL and self.pullable and not begun:
            self.left_to_prefillers()
        else:
            self._give_up(attempt, failure)

    def engine_died(self, engine: "Prefiller | Rank", sent_s: float, *, said: bool) -> bool:
        """Note that an engine died under the prompt; return whether another one may have it."""
        died = EngineDied(
            self.fingerprint,
            self.record.request_id,
            engine.target,
            sent_s,
            self.context.clock(),
            said=said,
        )
        self.context.suspects.died(died)
        return self._deaths() < MOST_DEATHS

    def _deaths(self) -> int:
        suspects = self.context.suspects
        return suspects.deaths(self.fingerprint) if suspects.prompts else 0

    def _is_refused(self) -> bool:
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
        """Tell the client of a failure that nothing mends."""
        if failure.answer is None or self.answer.opened:
            self.fail(*failure.as_error(attempt.leg))
            return
        status, _, body = failure.answer
        if self.shape.api in OPTIONAL_APIS and lacks_route(status, body):
            role = (failure.blamed or attempt.engine.target).role
            roles = {role, *(engine.target.role for engine in self._recovery.lacking)}
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
        elif retry.then is Next.OTHERS_KV:
            event = self._kv_lost(elsewhere=True, same_rank=retry.same_rank)
        elif retry.then is Next.NEW_KV or (self._kv is not None and self._kv.is_lost):
            event = self._kv_lost()
        else:
            self.pooled()
            event = events.DecodeLost(self.number)
        self.host.feed(event)

    def _prefiller_lost(self) -> events.Event:
        self._kv = None
        self._enter(Phase.QUEUED)
        return events.PrefillLost(self.number, elsewhere=True, decode=self.decodes)

    def _kv_lost(self, *, elsewhere: bool = False, same_rank: bool = False) -> events.Event:
        kv, self._kv = self._kv, None
        if kv is None or kv.params is None:
            self.pooled()
            return events.DecodeLost(self.number)  # There is no prefill to repeat.
        self._enter(Phase.QUEUED)
        return events.PrefillLost(self.number, elsewhere=elsewhere, same_rank=same_rank)

    def _end(self, event: events.Event | None, outcome: Outcome, reason: str = "") -> None:
        """Tell the scheduler, unless it knows, and then everybody."""
        if event is not None:
            self.host.feed(event)
        self.record.end(outcome, reason, self.context.clock())
        if self._fingerprint and self.context.suspects.prompts:
            self.context.suspects.ended(self._fingerprint, self)
        self._body = None
        self.answer.forget()
        self.host.report(SessionEnded(self.number, self.record))


def _run(session: Session, what: str, do: "Callable[[], None]") -> None:
    """Run what ends the request if it fails."""
    try:
        do()
    except Exception as error:
        session.host.crashed(session.number, session.record.request_id, what, error)

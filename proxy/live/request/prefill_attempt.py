"""A prefiller that was asked for a prompt's KV cache."""

from functools import cache, partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from balanceroute.proxy.core.events import FirstToken, PrefillDone
from balanceroute.proxy.core.resources import lease_margin_ns
from balanceroute.proxy.live.connectors import MissingKvError
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import FirstTokenTrust, Prefiller, process_of
from balanceroute.proxy.live.openai.answer import STREAM_HEADERS, is_message
from balanceroute.proxy.live.openai.body import BodyError, dump
from balanceroute.proxy.live.openai.errors import error_in
from balanceroute.proxy.live.openai.legs import (
    BadPrefillAnswerError,
    PrefillAnswer,
    least_tokens,
    prefill_body,
    read_prefill_answer,
    refuse_what_was_counted,
)
from balanceroute.proxy.live.openai.shape import SESSION_MEMBER, Api, is_greedy
from balanceroute.proxy.live.openai.token_counts import continuous_usage_is_expensive
from balanceroute.proxy.live.request.failures import ABORTED, Failure, What, breakage, refusal
from balanceroute.proxy.live.request.leg_settings import (
    FROM_DECODE,
    RESUME_OFF,
    Direct,
    LegSettings,
)
from balanceroute.proxy.live.request.relay import BufferedLeg
from balanceroute.proxy.live.request.session import Attempt, Session, draw_seed
from balanceroute.proxy.live.request.shared import (
    EngineSeen,
    KvHandle,
    KvMissing,
    LegSucceeded,
    PromptCounted,
)
from balanceroute.proxy.live.telemetry.record import PREFILL_LEG
from balanceroute.proxy.wire.messages import Headers, WireError

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.continued import Continued
    from balanceroute.proxy.live.request.early_token import EarlyToken

_DEFAULT_MAX_TOKENS = 16  # Of completions, and no chat is longer without a limit.


def pulled_within_s(legs: LegSettings) -> float | None:
    """Return how long after its beginning a KV cache may be asked for; None for ever."""
    return None if legs.lease_s is None else _pulled_within_s(legs.lease_s, legs.lease_margin_s)


@cache
def _pulled_within_s(lease_s: float, margin_s: float) -> float:
    lease_ns, given_ns = round(1e9 * lease_s), round(1e9 * margin_s)
    # The request is sent in the first half of the margin.
    return (lease_ns - lease_margin_ns(lease_ns, given_ns) / 2) / 1e9


class PrefillAttempt(Attempt):
    """One prefill leg.

    Attributes:
        sent_s: When it was asked, by the machine's uptime: its lease cannot have begun before.
    """

    __slots__ = ("_api", "_began_s", "_least", "_transfer", "prefiller", "sent_s")

    def __init__(self, session: Session, prefiller: Prefiller) -> None:
        super().__init__(session, PREFILL_LEG, prefiller)
        self.prefiller = prefiller
        self.sent_s = self._began_s = session.context.uptime_s()
        self._transfer = ""
        self._least = 1  # Tokens before which the answer must not end.
        self._api = session.shape.api  # As it was asked.

    def send(self) -> None:
        """Ask for one token, and for the KV cache to be kept."""
        session = self._session
        context, emitted = session.context, session.emitted
        legs = context.legs
        self._transfer = f"xfer-{context.unique()}"
        params = context.connector.prefill_params(self._transfer)
        early, members = self._expect_early(), emitted.members
        api, asked = self._asked()
        self._api = api
        if early is None:
            self._least = least_tokens(api, asked)
        else:
            members, self._least = {**members, **early.members}, early.min_tokens
        headers, drop = session.headers, legs.drop
        if context.name_prompt is not None and emitted.continued is None:
            name = context.name_prompt(api, asked, session.ticket)
            headers, drop = headers + name, drop | SESSION_MEMBER if name else drop
        body = prefill_body(
            *(asked, members, params),
            api=api,
            drop=drop,
            min_tokens=self._least,
            past_end=early is None and not self._least,
        )
        leg = BufferedLeg(self._answered, self._broken, legs.answer_limit_bytes, self._begin)
        self._post(api, headers, body, leg, timeout_s=legs.prefill_timeout_s)

    def check_deadline(self, now_s: float) -> None:
        """Fail if the answer takes too long."""
        if now_s > self._deadline_s:
            session = self._session
            reason = session.context.legs.overdue(prefill=True, stream=session.shape.stream)
            session.failed(self, Failure(What.TIMED_OUT, Fault.TIMEOUT, reason))

    def _begin(self) -> None:
        """Note that the answer comes; its lease has begun, however long the rest of it takes."""
        self._began_s = max(self.sent_s, self._session.context.stalls.waiting_since_s())

    def _answered(self, status: int, headers: Headers, body: bytes) -> None:
        session = self._session
        error = error_in(body) if status == 200 else None
        if status != 200 or error is not None:
            code = status if error is None else error.status
            session.failed(self, refusal(code, headers, body))
            return
        try:
            answer = read_prefill_answer(body, session.prompt_tokens, api=self._api)
        except BadPrefillAnswerError as error:
            session.failed(self, Failure(What.UNREADABLE, Fault.PROTOCOL, str(error)))
            return
        if answer.aborted and not session.abort_ordered:
            session.failed(self, ABORTED)
            return
        firsts, kv_params = self.prefiller.first_tokens, answer.kv_transfer_params
        partial = session.context.connector.computes_part(kv_params, answer.prompt_tokens)
        firsts.note(self.prefiller.name, partial=partial)
        if partial:  # What ends there is no answer: it is to another prompt.
            answer = replace(answer, complete=False)
        record = session.record
        record.prefilled_ns = round(session.context.clock() * 1e9)
        resuming, resume = session.resuming, session.context.legs.resume
        if resuming is not None and session.shape.stream and resume is not RESUME_OFF:
            # Only streams that keep ids need it, and it takes decoding the whole answer.
            resuming.parses |= continuous_usage_is_expensive(answer.message)
        again = session.emitted.delivered is not None and session.answer.opened
        if session.emitted.tokens == 0 and not again:
            record.prompt_tokens = answer.prompt_tokens
            record.cached_tokens, session.prompt_usage = answer.cached_tokens, answer.usage
            if self._refuses(answer.prompt_tokens):
                return
        try:
            lease_ns = self._lease_ns()
            kv = KvHandle(self.prefiller, self._params(answer), self._expires_s())
        except MissingKvError as error:
            self._go_on_without_kv(answer, error)
        else:
            if resuming is not None and resuming.early is not None and resuming.early.said is None:
                self._begin_early(resuming, resuming.early, answer, body)
            self._pool(kv, answer, lease_ns)

    def _refuses(self, prompt_tokens: int) -> bool:
        """Refuse a request that no rank can decode; return whether it is one."""
        session = self._session
        longest, limit = (
            session.context.max_model_len(session.shape.model),
            session.shape.max_tokens,
        )
        if longest is None or limit is None or prompt_tokens + limit <= longest:
            return False
        try:
            refuse_what_was_counted(session.shape.api, session.body, prompt_tokens, longest)
        except BodyError as error:
            session.host.report(LegSucceeded(self.prefiller.target))
            session.refuse(400, str(error), param=error.param)
            return True
        return False

    def _expect_early(self) -> "EarlyToken | None":
        """Return the first token that this leg is to bring; None if it waits for a rank."""
        session, emitted = self._session, self._session.resuming
        if emitted is None or session.context.legs.first_token is FROM_DECODE:
            return None
        if emitted.early is not None:
            return emitted.early
        if session.answer.opened or emitted.members or not self.prefiller.first_tokens.credible:
            return None
        seed = partial(draw_seed, session)
        return emitted.expect_early(session.shape, session.body.values, seed)

    def _begin_early(
        self, emitted: "Continued", early: "EarlyToken", answer: PrefillAnswer, body: bytes
    ) -> None:
        """Begin the client's stream with the answer's token, unless a rank may refuse the request.

        On probation it waits for the rank, to be compared. One that comes too late is no answer: the
        scheduler ends the request, as any that is due in the pool.
        """
        session, record, firsts = self._session, self._session.record, self.prefiller.first_tokens
        if not firsts.credible or not self._fits(answer.prompt_tokens) or self._is_late():
            return
        said = early.read(session.shape.api, answer.message, body, session.body)
        if said is None:
            return
        if not (firsts.proven or session.context.connector.facts.tells_part):
            early.doubt(said, self.prefiller)
            return
        early.give(said, self.prefiller)
        emitted.overlap = said.text
        record.first_token_ns = record.prefilled_ns
        record.early_first_token, record.output_tokens = True, 1
        session.answer.open(200, STREAM_HEADERS)
        session.answer.reply.write(said.events)
        session.host.feed(FirstToken(session.number))

    def _is_late(self) -> bool:
        due_ns, came_ns = self._session.ticket.deadline_ns, self._session.record.prefilled_ns
        return due_ns is not None and came_ns is not None and due_ns <= came_ns

    def _fits(self, prompt_tokens: int) -> bool:
        """Return whether the context surely has room for all that was asked for; this leg's is one token."""
        shape = self._session.shape
        longest = self._session.context.max_model_len(shape.model)
        asked = shape.max_tokens or _DEFAULT_MAX_TOKENS
        return longest is not None and prompt_tokens + asked <= longest

    def _params(self, answer: PrefillAnswer) -> bytes:
        """Return how a rank pulls the KV cache that this leg left behind, as JSON. Raises MissingKvError."""
        kept = type(answer.kv_transfer_params) is dict
        if answer.complete and not (kept and self._rank_draws_anew()):
            # Not every connector keeps the KV cache of an answer that was not cut off at its one token.
            raise MissingKvError("complete", "the prefill answer is complete")
        session, prefiller = self._session, self.prefiller
        params = session.context.connector.decode_params(
            self._transfer, answer.kv_transfer_params, prefiller.identity
        )
        engine_id = params.get("remote_engine_id")
        if type(engine_id) is str:
            session.host.report(EngineSeen(prefiller.id, engine_id))
            process, firsts = (process_of(engine_id), prefiller.lost_kv), prefiller.first_tokens
            if process != firsts.of:  # It may be of another version.
                prefiller.first_tokens = FirstTokenTrust(process, partial=firsts.partial)
        if params is answer.kv_transfer_params and answer.params_text:
            return answer.params_text
        return dump(params)

    def _pool(self, kv: KvHandle, answer: PrefillAnswer, lease_ns: int | None) -> None:
        session = self._session
        number, prompt_tokens = session.number, answer.prompt_tokens
        done = PrefillDone(number, prompt_tokens, lease_ns, answer.cached_tokens)
        served = LegSucceeded(self.prefiller.target)
        session.prefilled(kv)
        if session.emitted.tokens == 0:
            session.host.feed(done, served, PromptCounted(number, prompt_tokens))
        else:
            session.host.feed(done, served)

    def _lease_ns(self) -> int | None:
        """Return when the lease ends by the loop's time; a suspension to come ends it earlier."""
        context = self._session.context
        if context.legs.lease_s is None:
            return None
        age_s = context.uptime_s() - self._began_s
        return round((context.clock() - age_s + context.legs.lease_s) * 1e9)

    def _expires_s(self) -> float | None:
        within_s = pulled_within_s(self._session.context.legs)
        return None if within_s is None else self._began_s + within_s

    def _go_on_without_kv(self, answer: PrefillAnswer, error: MissingKvError) -> None:
        session, legs, reason = self._session, self._session.context.legs, str(error)
        if error.kind != "complete":
            session.host.report(KvMissing(self.prefiller.id, error.kind, reason))
        served = LegSucceeded(self.prefiller.target)
        recompute = answer.complete or legs.on_missing_kv == "recompute"
        direct = legs.direct_of(answer.prompt_tokens)
        emitted, facts = session.emitted, session.context.connector.facts
        # An answer without a least length may end before any token, and no rank will check that. And for a
        # stream that is open the proxy does not know which events came before the first token.
        surely = emitted.early is None and self._least > 0
        believed = (surely or facts.tells_part) and not session.answer.opened
        if answer.complete and emitted.tokens == 0 and believed and self._answers_client(answer):
            session.record.output_tokens = 1
            session.record.first_token_ns = session.record.prefilled_ns
            session.host.report(served)
            session.prefill_was_all(answer.message)
        elif recompute and direct is Direct.DECODE:
            self._pool(KvHandle(self.prefiller, None), answer, None)
        elif recompute and direct is Direct.PREFILL:
            session.host.report(served)
            session.left_to_prefillers()
        else:
            session.host.report(served)
            session.failed(self, Failure(What.NO_KV, Fault.PROTOCOL, reason))

    def _answers_client(self, answer: PrefillAnswer) -> bool:
        """Return whether a complete answer is one to what the client asked."""
        api = self._session.shape.api
        if api is Api.RESPONSES:
            return False  # It repeats the request, and this leg asked for less.
        if api is not Api.MESSAGES:
            return True
        return not self._rank_draws_anew() and is_message(answer.message)

    def _rank_draws_anew(self) -> bool:
        """Return whether a rank may go on behind the first token that ended this leg's answer.

        A sampled message has no seed, and this leg cannot ask for a token that does not end it. If its end
        counted, and its other tokens did not, answers would be empty about twice as often as one engine's.
        """
        api, asked = self._asked()
        return api is Api.MESSAGES and not is_greedy(asked.values)

    def _broken(self, error: WireError) -> None:
        # A KV cache that no rank pulls is freed when its lease ends.
        if not self._send_again(error):
            self._session.failed(self, breakage(error))

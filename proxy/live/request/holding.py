"""What a session holds in each of its phases; see `phases`."""

from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import (
    CannotResumeError,
    continuable,
    continued_at,
    continued_body,
    draws_otherwise,
    is_greedy,
    may_begin_again,
    resumed_members,
)
from balanceroute.proxy.live.openai.shape import PROMPT, SAMPLING, Api
from balanceroute.proxy.live.openai.stream_event import RepeatedText
from balanceroute.proxy.live.openai.token_ids import (
    BackedUpIds,
    GeneratedIds,
    TokenIds,
    asks_logprobs,
    care_of,
)
from balanceroute.proxy.live.openai.told import Told, ToldChoices, ToldEvents
from balanceroute.proxy.live.openai.transcript import Logprobs
from balanceroute.proxy.live.request.leg_settings import Resume
from balanceroute.proxy.live.request.phases import trace_failure
from balanceroute.proxy.wire.messages import WireFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.core.events import RequestId, Ticket
    from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Target
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.openai.token_counts import PromptUsage
    from balanceroute.proxy.live.openai.transcript import Transcript
    from balanceroute.proxy.live.request.client_answer import ClientAnswer
    from balanceroute.proxy.live.request.failures import Failure
    from balanceroute.proxy.live.request.leg_settings import EarlyToken
    from balanceroute.proxy.live.request.session_host import (
        Host,
        KvHandle,
        LegSucceeded,
        SessionContext,
    )
    from balanceroute.proxy.live.telemetry.record import Leg, RequestRecord
    from balanceroute.proxy.wire.http1.client import Call, ResponseHandler
    from balanceroute.proxy.wire.messages import Headers, LineHandler, Payload, WireError


_SEED_DIGITS = 7  # Of 28 bits, which every sampler takes.
_TARGETS = {api: api.value.encode() for api in Api}


class Holding:
    """Nothing: what a session holds that waits for the scheduler, or has ended."""

    __slots__ = ()

    @property
    def bound(self) -> bool:
        """Whether a rank has the request."""
        return False

    @property
    def pair(self) -> "tuple[Prefiller, Rank] | None":
        """Who is to pull its KV cache from whom; None unless a decode leg has yet to begin so."""
        return None

    @property
    def tokens(self) -> int | None:
        """What has come of a stream; None if nothing is streamed."""
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
        """Whether its connection is lost, of which it hears in a moment."""
        return False

    @property
    def targets(self) -> "tuple[Target, ...]":
        """The instances that work on a leg, or failed to."""
        return ()

    def leg_at(self, target: "Target") -> "Leg | None":
        """Return the leg that an instance works on, or failed to; None if it does not."""
        del target
        return None

    def move(self, target: "Target") -> bool:
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


NOTHING = Holding()


class AttemptOwner(Protocol):
    """What an attempt needs of its session: the request, and whom to tell what becomes of it."""

    number: "RequestId"
    ticket: "Ticket"
    shape: "Shape"
    decodes: bool
    headers: bytes
    record: "RequestRecord"
    emitted: "Emitted"
    answer: "ClientAnswer"
    prompt_usage: "PromptUsage | None"
    host: "Host"
    context: "SessionContext"
    hung: "Prefiller | None"
    fresh: bool
    abort_ordered: bool

    @property
    def body(self) -> "RequestBody": ...  # noqa: D102

    @property
    def prompt_tokens(self) -> int | None:
        """The length of what is prefilled next; None if only an engine can tell."""

    def failed(self, attempt: "Attempt", failure: "Failure") -> None:
        """Try again what failed, or give it up."""

    def fail(self, status: int, reason: str) -> None:
        """Give the request up."""

    def refuse(self, status: int, reason: str, *, param: str | None = None) -> None:
        """End a request that cannot be served as it is."""

    def crashed(self, error: Exception) -> None:
        """Have the request ended: an engine's answer could not be handled."""

    def leave_rank(self, target: "Target") -> None:
        """Go on without the rank, which stands still, as far as attempts allow."""

    def prefilled(self, kv: "KvHandle") -> None:
        """Wait for a rank with what a prefiller has computed."""

    def left_to_prefillers(self) -> None:
        """Have a prefiller do the whole request, as no rank can do its part."""

    def prefill_was_all(self, message: "Mapping[str, Any]") -> None:
        """Answer with the one token of the prefill, behind which nothing comes."""

    def began(
        self, attempt: "Attempt", status: int, headers: "Headers", *, keeps_body: bool
    ) -> None:
        """Open the client's stream; `keeps_body` says that the request may be sent once more."""

    def answered(self, headers: "Headers", body: bytes, served: "LegSucceeded") -> None:
        """Pass on a whole answer."""

    def finished(self, error: str = "", *, cut: bool = False) -> None:
        """End the stream, in which the engine may have reported an error of its own."""

    def recomputed(self, *, elsewhere: bool, anew: bool = False) -> None:
        """Prefill again with what was emitted, if anything was and the answer does not begin `anew`."""

    def engine_died(self, engine: "Prefiller | Rank", sent_s: float, *, said: bool) -> bool:
        """Note that an engine died under the prompt; return whether another one may have it."""


class Attempt(Holding):
    """One exchange with one engine, which is a part of its session.

    Attributes:
        posted_s: When the engine was asked, by the loop's clock.
    """

    __slots__ = ("_call", "_deadline_s", "_sent_again", "_session", "engine", "leg", "posted_s")

    def __init__(self, session: "AttemptOwner", leg: "Leg", engine: "Prefiller | Rank") -> None:
        self.leg = leg
        self.engine = engine
        self._session = session
        self._deadline_s = self.posted_s = 0.0
        self._sent_again = False
        self._call: Call | None = None

    @property
    def lost(self) -> bool:
        """Whether its connection is lost, of which it hears in a moment."""
        return self._call is not None and self._call.lost

    @property
    def offers(self) -> int:
        """How many ranks its KV cache was offered to."""
        return 0

    def _asked(self) -> "tuple[Api, RequestBody]":
        """Return the endpoint that is asked, and for what."""
        session = self._session
        continued = session.emitted.continued
        if continued is None:
            return session.shape.api, session.body
        return continued_at(session.shape.api), continued

    def send(self) -> None:
        """Ask the engine. The session holds the attempt by then, so that it is closed if this fails."""
        raise NotImplementedError

    @property
    def targets(self) -> "tuple[Target, ...]":
        """The engine."""
        return (self.engine.target,)

    def leg_at(self, target: "Target") -> "Leg | None":
        """Return the leg if it is the engine's."""
        return self.leg if self.engine.target == target else None

    def pause(self) -> None:
        """Slow the engine down."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Read on."""
        if self._call is not None:
            self._call.resume()

    def close(self) -> None:
        """End the exchange. Its handler knows the attempt: leave no cycle behind."""
        if self._call is not None:
            self._call.abort()
            self._call = None

    def fail(self, failure: "Failure") -> None:
        """End the exchange, which failed."""
        session = self._session
        trace_failure(session.record, self.leg, failure.reason, session.context.clock())
        self.close()

    def _send_again(self, error: "WireError") -> bool:
        """Send once more what was lost with a reused connection, on a new one; return whether it is sent.

        For legs that nothing is lost by if they were done twice.
        """
        if error.kind is not WireFault.STALE or self._sent_again:
            return False
        self._sent_again = True
        self.send()
        return True

    def _post(
        self,
        api: "Api",
        headers: bytes,
        body: "Payload",
        handler: "ResponseHandler",
        timeout_s: float,
        *,
        expires_s: float | None = None,
        lines: "LineHandler | None" = None,
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


def draw_seed(session: "AttemptOwner") -> int:
    """Return a seed for a request whose client gave none; its record names it."""
    seed = session.record.seed = int(session.context.unique()[:_SEED_DIGITS], 16)
    return seed


class Backoff(Holding):
    """The wait after an attempt that failed; until it is over the request is still bound as it was.

    Args:
        failed: The attempt, closed.
        delay_s: How long to wait.
        again: Begins what comes next.
    """

    __slots__ = ("_failed", "_timer")

    def __init__(
        self, session: "AttemptOwner", failed: Attempt, delay_s: float, again: "Callable[[], None]"
    ) -> None:
        self._failed = failed
        self._timer = session.context.call_later(delay_s, again)

    @property
    def bound(self) -> bool:
        """Whether it was a rank that failed."""
        return self._failed.bound

    @property
    def pair(self) -> "tuple[Prefiller, Rank] | None":
        """Who failed to begin."""
        return self._failed.pair

    @property
    def targets(self) -> "tuple[Target, ...]":
        """Where it failed."""
        return self._failed.targets

    def leg_at(self, target: "Target") -> "Leg | None":
        """Return the leg that failed there."""
        return self._failed.leg_at(target)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()


# What a request emitted on earlier bindings, for it to go on from there.


_NAMED = frozenset({Api.MESSAGES, Api.RESPONSES})


class Emitted(Struct, eq=False):
    """All that the client has of an answer which its rank did not end.

    Attributes:
        tokens: How many.
        early: The first token, until a rank has said more than it; None if it waits for a rank.
        drawn: Members that no client gave: the seed.
        members: Of the client's body, those that change, and these.
        kept: Of the client's body, what a continuation from ids needs; None if there can be none.
        continued: The request that continues from ids, in place of the client's; None if none does.
        overlap: Text that the client has behind `tokens`, and that comes again.
        overlap_tokens: Tokens behind them of which it has log-probabilities, which come again.
        text_offset: Of the first token behind them, as log-probabilities tell it.
        head: Of the client's first event, all that stands before the choices.
        told: What the client has of an answer that is to begin again; None if none does.
        heard_s: When the client had something last, by the loop's clock; None if it has nothing.
        parses: Whether a prefiller has shown that it has a parser of reasoning.
    """

    tokens: int = 0
    early: "EarlyToken | None" = None
    drawn: "Mapping[str, object]" = {}
    members: "Mapping[str, object]" = {}
    kept: "Mapping[str, Any] | None" = None
    continued: RequestBody | None = None
    overlap: str = ""
    overlap_tokens: int = 0
    text_offset: int = 0
    head: bytes = b""
    told: Told | None = None
    heard_s: float | None = None
    parses: bool = False
    _text: str = ""

    def repeated(self) -> RepeatedText:
        """Return what the client has, and that the next rank says again."""
        return RepeatedText(self.overlap, self.overlap_tokens)

    @property
    def comparison(self) -> "Callable[[bytes], bool] | None":
        """See `EarlyToken`."""
        return None if self.early is None else self.early.comparison

    @property
    def logprobs(self) -> Logprobs | None:
        """How log-probabilities go on; None if there are none."""
        if self.kept is None or not asks_logprobs(self.kept):
            return None
        return Logprobs(self.text_offset, self.kept.get("top_logprobs") or 0)

    def add(
        self, transcript: "Transcript", tokens: int, shape: "Shape", body: "RequestBody"
    ) -> bool:
        """Take in the text and tokens of a leg; return whether there is any text to go on from.

        Raises:
            CannotResumeError: The answer cannot be continued from text.
        """
        if transcript.text is None or self.continued is not None:
            raise CannotResumeError("its answer cannot be continued from text")
        values = body.large_values()
        told = asks_logprobs(values) or values.get("return_token_ids")
        if told and transcript.text and not transcript.is_whole:
            # The next rank would say these tokens again, and the client has them.
            raise CannotResumeError("tokens that the client was told of may have no text yet")
        text, tokens = self._text + "".join(transcript.text), self.tokens + tokens
        if not text:
            return False
        members = resumed_members(shape.api, values, text, tokens)
        self.members = {**self.drawn, **members}
        self._text, self.tokens = text, tokens
        self.overlap, self.overlap_tokens = "", 0
        return True

    def ids_to_keep(
        self,
        shape: "Shape",
        body: "RequestBody",
        resume: Resume,
        repeated: RepeatedText,
        *,
        parses: bool,
        prompt_tokens: int | None,
    ) -> TokenIds | None:
        """Return what keeps the ids of a rank's tokens, for another to go on from; None for nothing.

        Args:
            shape: The client's request.
            body: What the rank is asked.
            resume: Which streams go on; some do.
            repeated: What the client has, and that the rank says again.
            parses: Whether the rank may have a parser of reasoning: what that keeps back no answer tells.
            prompt_tokens: Of the client's prompt, as a prefiller has counted; None if none has.
        """
        if self.continued is None:
            self.kept = continuable(shape, body.values, sampled=resume is Resume.VALID)
            parses = (parses or self.parses) and shape.api is Api.CHAT
        if self.kept is None or (parses and self.continued is None):
            return None
        if shape.api is Api.GENERATE:
            return GeneratedIds(bytes(body.value_text(PROMPT)))
        care = care_of(self.kept)
        if prompt_tokens is not None:
            prompt_tokens += self.tokens
        if care is None:
            return TokenIds(repeated, prompt_tokens)
        return BackedUpIds(care, repeated, prompt_tokens)

    def told_to_keep(
        self,
        shape: "Shape",
        body: "RequestBody",
        resume: Resume,
        seed: "Callable[[], int]",
    ) -> Told | None:
        """Return what keeps all that the client of a stream gets, for another engine to begin again.

        Args:
            shape: The client's request, of which it has nothing yet.
            body: What it sent.
            resume: Which streams go on; some do.
            seed: Draws one.

        Returns:
            None if the answer must not begin again.
        """
        if self.continued is not None or self.tokens:
            return None
        sampling = may_begin_again(shape, body.values, sampled=resume is Resume.VALID)
        if sampling is None:
            return None
        if not self.drawn and draws_otherwise(sampling):
            self.draw(sampling, seed(), nested=shape.api is Api.GENERATE)
        self.told = ToldEvents() if shape.api in _NAMED else ToldChoices()
        return self.told

    def draw(self, sampling: "Mapping[str, Any]", seed: int, *, nested: bool) -> None:
        """Give the request a seed, for its tokens to be drawn alike wherever they are.

        `nested` says that the members of `sampling` are not the body's own.
        """
        drawn: dict[str, object] = {"seed": seed}
        self.drawn = {SAMPLING: {**sampling, **drawn}} if nested else drawn
        self.members = {**self.members, **self.drawn}

    def takes(self, ids: "TokenIds", shape: "Shape") -> bool:
        """Return whether the answer can be continued from the ids of a leg's tokens."""
        if self.continued is not None and not ids.begun:
            return True  # It did nothing, and what it was asked for stands.
        tokens = self.tokens + ids.count
        # A parser of reasoning may have kept a chat's first tokens back.
        begun = tokens > 0 or ids.behind or shape.api is Api.COMPLETIONS
        # Another sample would not say again what the client has.
        repeats = self.kept is not None and is_greedy(self.kept)
        if not repeats and (ids.behind or ids.tokens_behind):
            return False
        ends = shape.max_tokens is not None and tokens >= shape.max_tokens
        return ids.usable and bool(begun) and not ends

    def add_ids(self, ids: "TokenIds", shape: "Shape") -> None:
        """Take in the ids of a leg's tokens, if `takes`."""
        assert self.kept is not None
        if not ids.begun:
            return
        self.tokens += ids.count
        self.overlap, self.overlap_tokens = ids.behind, ids.tokens_behind
        self.text_offset += ids.end
        self.head = self.head or ids.head
        self._continue(b",".join(filter(None, (ids.prompt, ids.kept))), shape)

    def add_early(self, shape: "Shape") -> None:
        """Take in the first token, behind which a rank said something else than the client has."""
        assert self.early is not None
        assert self.early.said is not None
        self.early.take_back()
        self.kept, said = self.early.kept, self.early.said
        self.tokens, self.overlap, self.head = 1, "", said.head
        self._continue(said.ids, shape)

    def _continue(self, ids: bytes, shape: "Shape") -> None:
        assert self.kept is not None
        self.early, self.members = None, {}
        kept = {**self.kept, **self.drawn}
        self.continued = RequestBody(continued_body(kept, shape.api, ids, self.tokens))

"""Answers that go on elsewhere, and those that begin with a prefiller's token: what is kept for it."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from msgspec import field

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import (
    continuable,
    continued_body,
    draws_otherwise,
    may_begin_again,
    may_begin_early,
    resumed_members,
)
from balanceroute.proxy.live.openai.continuation_stream import (
    ContinuationStream,
    RepeatingCompletionStream,
    RepeatingNamedEventStream,
    RepeatingTokenStream,
    TokenContinuation,
)
from balanceroute.proxy.live.openai.delivered import Delivered, DeliveredChoices, DeliveredEvents
from balanceroute.proxy.live.openai.errors import CannotResumeError
from balanceroute.proxy.live.openai.named_events import named_options
from balanceroute.proxy.live.openai.shape import (
    AGENTS_APIS,
    CHAT,
    COMPLETIONS,
    GENERATE,
    PROMPT,
    SAMPLING,
    Api,
    Shape,
    is_greedy,
    sampling_of,
)
from balanceroute.proxy.live.openai.stream_reader import RepeatedText, StreamReader
from balanceroute.proxy.live.openai.token_ids import (
    BackedUpIds,
    GeneratedIds,
    TokenIds,
    asks_logprobs,
    care_of,
)
from balanceroute.proxy.live.openai.transcript import Logprobs, Transcript
from balanceroute.proxy.live.request.client_answer import Emitted
from balanceroute.proxy.live.request.early_token import EarlyToken
from balanceroute.proxy.live.request.leg_settings import Resume

_NAMED = frozenset({Api.MESSAGES, Api.RESPONSES})


class Continued(Emitted):
    """What the client has of an answer, and how another engine goes on with it."""

    drawn: Mapping[str, object] = {}  # Members that no client gave: the seed.
    # Of the client's body, what a continuation from ids needs; None if there can be none.
    kept: Mapping[str, Any] | None = None
    overlap: str = ""  # Text that the client has behind `tokens`, and that comes again.
    # Tokens behind them of which it has log-probabilities, which come again.
    overlap_tokens: int = 0
    # What of all this has yet to come again.
    repeated: RepeatedText = field(default_factory=RepeatedText)
    text_offset: int = 0  # Of the first token behind them, by the log-probabilities.
    head: bytes = b""  # Of the client's first event, all that stands before the choices.
    parses: bool = False  # Whether a prefiller has shown that it has a parser of reasoning.
    _text: str = ""
    may_begin_early: ClassVar = staticmethod(may_begin_early)

    def begin_leg(self) -> None:
        """Expect again what the client has behind `tokens`."""
        self.repeated = RepeatedText(self.overlap, self.overlap_tokens)

    def transcript(self, shape: Shape) -> Transcript:
        """Return what keeps the text of a leg; it does not carry the named events of agents."""
        return Transcript(0 if shape.api in AGENTS_APIS else shape.sequences)

    @property
    def logprobs(self) -> Logprobs | None:
        """How log-probabilities go on; None if there are none."""
        if self.kept is None or not asks_logprobs(self.kept):
            return None
        return Logprobs(self.text_offset, self.kept.get("top_logprobs") or 0)

    def add(self, transcript: Transcript, tokens: int, shape: Shape, body: RequestBody) -> bool:
        """Take in the text and tokens of a leg; return whether there is any text to go on from.

        Raises:
            CannotResumeError: The answer cannot be continued from text.
        """
        if transcript.text is None or self.continued is not None:
            raise CannotResumeError("its answer cannot be continued from text")
        values = body.large_values()
        by_token = asks_logprobs(values) or values.get("return_token_ids")
        if by_token and transcript.text and not transcript.is_whole:
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
        shape: Shape,
        body: "RequestBody",
        resume: Resume,
        *,
        parses: bool,
        prompt_tokens: int | None,
    ) -> TokenIds | None:
        """Return what keeps the ids of a rank's tokens, for another to go on from; None for nothing.

        Args:
            shape: The client's request.
            body: What the rank is asked.
            resume: Which streams go on; some do.
            parses: Whether the rank may have a parser of reasoning: no answer shows what that withholds.
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
            return TokenIds(self.repeated, prompt_tokens)
        return BackedUpIds(care, self.repeated, prompt_tokens)

    def track_delivered(
        self,
        shape: Shape,
        body: "RequestBody",
        resume: Resume,
        seed: Callable[[], int],
    ) -> Delivered | None:
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
        self.delivered = DeliveredEvents() if shape.api in _NAMED else DeliveredChoices()
        return self.delivered

    def draw(self, sampling: Mapping[str, Any], seed: int, *, nested: bool) -> None:
        """Give the request a seed, for its tokens to be drawn alike wherever they are.

        `nested` says that the members of `sampling` are not the body's own.
        """
        drawn: dict[str, object] = {"seed": seed}
        self.drawn = {SAMPLING: {**sampling, **drawn}} if nested else drawn
        self.members = {**self.members, **self.drawn}

    def takes(self, ids: TokenIds, shape: Shape) -> bool:
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

    def add_ids(self, ids: TokenIds, shape: Shape) -> None:
        """Take in the ids of a leg's tokens, if `takes`."""
        assert self.kept is not None
        if not ids.begun:
            return
        self.tokens += ids.count
        self.overlap, self.overlap_tokens = ids.behind, ids.tokens_behind
        self.text_offset += ids.end
        self.head = self.head or ids.head
        self._continue(b",".join(filter(None, (ids.prompt, ids.kept))), shape)

    def add_early(self, shape: Shape) -> None:
        """Take in the first token, behind which a rank said something else than the client has."""
        assert self.early is not None
        assert self.early.said is not None
        self.early.take_back()
        self.kept, said = self.early.kept, self.early.said
        self.tokens, self.overlap, self.head = 1, "", said.head
        self._continue(said.ids, shape)

    def _continue(self, ids: bytes, shape: Shape) -> None:
        assert self.kept is not None
        self.early, self.members = None, {}
        kept = {**self.kept, **self.drawn}
        self.continued = RequestBody(continued_body(kept, shape.api, ids, self.tokens))

    def expect_early(
        self, shape: Shape, values: Mapping[str, Any], seed: Callable[[], int]
    ) -> "EarlyToken | None":
        """Return the first token that a prefiller may say; None if it must not; `seed` draws one."""
        kept = may_begin_early(shape, values)
        if kept is None:
            return None
        sampling = sampling_of(kept)
        if not is_greedy(kept) and sampling.get("seed") is None:
            self.draw(sampling, seed(), nested=sampling is not kept)
        self.early = EarlyToken(kept)
        return self.early

    def reader(
        self, shape: Shape, delivered: Delivered | None, options: dict[str, Any]
    ) -> StreamReader | None:
        """Return what reads a stream for a client who has the beginning; None if it has none.

        Args:
            shape: The client's request.
            delivered: What the client has; None if it is not tracked.
            options: Of every `CompletionStream`.
        """
        if delivered is not None:
            options = options | {"resumes": False}
            if shape.api is GENERATE:
                return RepeatingTokenStream(shape.sequences, delivered, **options)
            if shape.api in (CHAT, COMPLETIONS):
                return RepeatingCompletionStream(shape.sequences, delivered, **options)
            return RepeatingNamedEventStream(delivered, **named_options(options))
        if shape.api is GENERATE:
            said = None if self.early is None else self.early.said
            if said is None and not self.tokens:
                return None
            again, before = None if said is None else said.id, self.tokens
            return TokenContinuation(shape.sequences, before=before, again=again, **options)
        if shape.api in AGENTS_APIS or (self.continued is None and not self.overlap):
            return None
        completes_chat = self.continued is not None and shape.api is CHAT
        return ContinuationStream(
            shape.sequences,
            head=self.head if completes_chat else b"",
            repeated=self.repeated,
            logprobs=self.logprobs,
            **options,
        )

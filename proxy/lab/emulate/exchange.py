"""One generation request at one engine, from its arrival to the last byte of its answer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from balanceroute.proxy.lab.emulate.answer import (
    DONE,
    TOKEN_TEXTS_JSON,
    AnswerFormat,
    Channel,
    Choice,
    Delta,
)
from balanceroute.proxy.lab.emulate.faults import Faults, keep_alive, malformed_write
from balanceroute.proxy.lab.emulate.request import (
    ApiError,
    GenerationRequest,
    Prompt,
    internal_error,
)
from balanceroute.proxy.lab.emulate.tokens import EOS, TOKEN_TEXTS

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers


Cancel = Callable[[bool], None]
"""Cancels a stage of a request; the argument is whether the engine crashed."""


class TokenSequence:
    """One choice of the answer, as a member of the batch."""

    __slots__ = ("_event", "_exchange", "choice", "late", "on_drop", "on_end")

    def __init__(self, exchange: "EngineExchange", choice: Choice) -> None:
        self.choice = choice
        # Called when it has emitted its last token, before that is written.
        self.on_end: Callable[[TokenSequence], None] | None = None
        # Called if the batch's KV cache had no room for it.
        self.on_drop: Callable[[TokenSequence], None] | None = None
        self.late: Delta | None = None  # To send with the next token.
        self._exchange = exchange
        self._choose_path()

    def _choose_path(self) -> None:
        exchange, choice = self._exchange, self.choice
        fast = choice.plain and not exchange.faults.by_token
        self._event = exchange.format.plain(choice) if fast else None

    def misread(self, prompt: Prompt) -> None:
        """Continue another prompt, whose KV cache was read by mistake, before the first token."""
        self.choice.begin(prompt)
        self._choose_path()

    @property
    def kv_tokens(self) -> int:
        return self.choice.kv_tokens

    @property
    def tokens_left(self) -> int:
        """The most tokens that it may still emit."""
        choice = self.choice
        return min(choice.max_tokens, choice.length or choice.max_tokens) - choice.emitted

    def advance(self, *, more: bool = False) -> bool:
        """Emit the next token; return whether it was the last.

        `more`: another token of the same step follows.
        """
        choice, exchange = self.choice, self._exchange
        event = self._event
        if event is None or not exchange.opened or more or self.late is not None:
            return exchange.advance(self, more=more)
        token = choice.next_token()
        if choice.finish_reason is None:
            if exchange.streams:
                exchange.write(event(TOKEN_TEXTS_JSON[token], choice.emitted))
            return False
        said = "" if token == EOS else TOKEN_TEXTS[token]
        exchange.say(self, Delta(said, token_ids=(choice.token_ids[-1],)))
        return True

    def dropped(self) -> None:
        """Call `on_drop`: the KV cache had no room for it."""
        assert self.on_drop is not None, "a dropped sequence has no handler"
        self.on_drop(self)


class EngineExchange:
    """One generation request, its choices in `sequences` prompt by prompt.

    `on_done` is called once, when the engine holds nothing of it any more; `respond` sends an answer that is
    not streamed: status and body.
    """

    def __init__(
        self,
        request: GenerationRequest,
        reply: "Reply",
        answer_format: AnswerFormat,
        faults: Faults,
        *,
        choices: Iterable[Choice],
        on_done: "Callable[[EngineExchange], None]",
        respond: "Callable[[EngineExchange, int, bytes], None]",
    ) -> None:
        self.request = request
        self.reply = reply
        self.format = answer_format
        self.faults = faults
        self.opened = False
        self.over = False
        self.streams = request.stream
        self.kv_transfer_params: object = None  # Those of the answer.
        # The work to cancel if the client leaves, by prompt or choice.
        self.stages: dict[object, Cancel] = {}
        self.write: Callable[[bytes], None] = reply.write  # Writes one piece of a stream.
        if faults.malformed is not None:
            self.write = malformed_write(faults.malformed, reply.write)
        self._on_done = on_done
        self._respond = respond
        # All choices, prompt by prompt.
        self.sequences = [TokenSequence(self, choice) for choice in choices]
        self._open = len(self.sequences)
        reply.on_closed = self.abandon

    def sequences_of(self, prompt: int) -> list[TokenSequence]:
        n = self.request.n
        return self.sequences[prompt * n : (prompt + 1) * n]

    def start(self, headers: "Headers") -> None:
        """Start the answer, before the first token."""
        if self.streams:
            self.reply.start(200, headers)
            if self.faults.keep_alive_s is not None:
                keep_alive(self.reply, self.faults.keep_alive_s)
        for sequence in self.sequences:
            if self.over:
                return
            self._fail_by_token(sequence)

    def advance(self, sequence: TokenSequence, *, more: bool) -> bool:
        """Emit a sequence's next token; return whether it was the last.

        `more`: another token of the same step follows, and content is sent with it.
        """
        if self.faults.stall_after_tokens == sequence.choice.emitted:
            return False
        if not self.opened:
            self._begin()
        delta = sequence.choice.advance()
        if more and delta.channel is Channel.CONTENT and sequence.choice.finish_reason is None:
            delta = replace(delta, late=True)
        self.say(sequence, delta)
        if self.over:
            return True
        return self._fail_by_token(sequence) or sequence.choice.finish_reason is not None

    def say(self, sequence: TokenSequence, delta: Delta) -> None:
        """Write a token, unless it comes late, and end the answer if it was the last of all."""
        choice = sequence.choice
        if self.streams:
            if sequence.late is not None:
                delta = sequence.late.merged(delta)
            sequence.late = delta if delta.late else None
            if not delta.late:
                self.write(self.format.event(choice, delta))
        if choice.finish_reason is not None:
            self._end(sequence)

    def recompute(self, sequence: TokenSequence) -> None:
        """End a sequence as recomputed: the proxy has to prefill it again."""
        self.say(sequence, sequence.choice.end("recomputed"))

    def fail(self, error: ApiError | None = None) -> None:
        """End the whole answer with an error, by default that of a request which failed by itself."""
        if error is None and self.streams and self.request.chat and not self.opened:
            self._begin()  # vLLM names the role before it looks at the output.
        error = error or internal_error()
        self.abandon()
        if not self.streams:
            self._respond(self, error.status, error.body(self.faults.error_form))
        elif not self.reply.closed:
            self.reply.write(error.event(self.faults.error_form))
            self.reply.write(DONE)
            self.reply.end()

    def abort(self) -> None:
        """End all that has not ended, with what it has and the finish reason of an aborted request."""
        open_ones = [one for one in self.sequences if one.choice.finish_reason is None]
        self.abandon()
        if not self.opened:
            self._begin()
        for sequence in open_ones:
            delta = sequence.choice.end(None, "abort")
            if sequence.late is not None:
                delta = sequence.late.merged(delta)
            if self.streams:
                self.write(self.format.event(sequence.choice, delta))
        self._finish()

    def abandon(self, *, crashed: bool = False) -> None:
        """Release everything that is held for the request; the answer stays as it is."""
        if self.over:
            return
        self.over = True
        stages, self.stages = self.stages, {}
        for cancel in stages.values():
            cancel(crashed)
        self._on_done(self)

    def _begin(self) -> None:
        self.opened = True
        if self.streams:
            for sequence in self.sequences:
                self.write(self.format.opening(sequence.choice))

    def _end(self, sequence: TokenSequence) -> None:
        if sequence.on_end is not None:
            sequence.on_end(sequence)
        self._open -= 1
        if self._open:
            return
        self.abandon()
        self._finish()

    def _finish(self) -> None:
        choices = [sequence.choice for sequence in self.sequences]
        if not self.streams:
            self._respond(self, 200, self.format.whole(choices, self.kv_transfer_params))
            return
        if self.faults.lose_end:
            self.reply.abort()
            return
        if self.request.include_usage:
            self.write(self.format.usage_event(choices))
        self.write(DONE)
        self.reply.end()

    def _fail_by_token(self, sequence: TokenSequence) -> bool:
        """Show the faults that are due after this token; return whether the sequence is over."""
        faults, choice = self.faults, sequence.choice
        ended = choice.finish_reason is not None
        if faults.reset_after_tokens == choice.emitted:
            self.abandon()
            self.reply.abort()
            return True
        if ended:
            return True
        if faults.end_after_tokens == choice.emitted:
            self.abandon()
            if self.streams:
                self.reply.end()
            else:
                self.reply.abort()
            return True
        if faults.error_event_after_tokens == choice.emitted:
            self.fail()
            return True
        if faults.recomputed_after_tokens == choice.emitted:
            self.recompute(sequence)
            return True
        return False

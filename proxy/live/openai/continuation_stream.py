"""The events of an answer of which the client has the beginning.

The readers leave out text that the engine repeats: the prefiller's first token, or text that the kept ids
do not cover (`token_ids.py`). They write a chat that goes on at `/v1/completions` as a chat's events.

Such events are parsed: the first ones alone, or those of a stream that failed in its midst.
"""

from collections.abc import Callable, Mapping
from typing import Any

from balanceroute.proxy.live.openai.answer import ABORT, dump_compact
from balanceroute.proxy.live.openai.completion_stream import CompletionStream, TokenStream
from balanceroute.proxy.live.openai.delivered import Delivered, DiffersError
from balanceroute.proxy.live.openai.errors import EXPERTS, LOGPROBS, OTHERWISE
from balanceroute.proxy.live.openai.named_events import NamedEventStream
from balanceroute.proxy.live.openai.stream_reader import (
    RepeatedText,
    StreamReader,
    choices_of,
    parsed,
    text_of,
)
from balanceroute.proxy.live.openai.transcript import Logprobs, LogprobsError, tokens_of
from balanceroute.proxy.wire.sse import event_data, whole_events


class ContinuationStream(CompletionStream):
    """Reads a stream for a client who has the beginning of the answer.

    Args:
        sequences: As for `CompletionStream`, like the options.
        head: Of a chat's first event, all that stood before the choices, if a completion goes on
            with it; else empty.
        repeated: What the client has, and that comes again.
        logprobs: How log-probabilities go on; None if there are none.
    """

    __slots__ = ("_goes_on", "_head", "_logprobs", "_repeated")

    def __init__(
        self,
        sequences: int,
        *,
        head: bytes,
        repeated: RepeatedText,
        logprobs: Logprobs | None,
        **options: Any,
    ) -> None:
        super().__init__(sequences, **options)
        self._head = head
        self._logprobs = logprobs
        self._repeated = repeated
        self._goes_on = False  # Something new has come.

    @property
    def plain(self) -> bool:
        return not self._head and not self._logprobs and self._goes_on and super().plain

    def read(self, event: bytes) -> bytes:
        return self._continue(super().read(event))

    def flush(self) -> bytes:
        return self._continue(super().flush())

    def ending(self) -> bytes | None:
        lacking = super().ending()
        return lacking and self._continue(lacking)

    @property
    def _may_be_mended(self) -> bool:
        return not self._goes_on or super()._may_be_mended

    def _continue(self, events: bytes) -> bytes:
        if events and (self._head or self._logprobs or self._repeated.left):
            events = b"".join(map(self._write, whole_events(events)))
        self._goes_on |= bool(events)
        return events

    def _write(self, event: bytes) -> bytes:
        message = parsed(event)
        if message is None or "choices" not in message:
            # [DONE], a comment, an error, or an unreadable event, which may have held the text.
            self.differs = bool(self._repeated.left and event_data(event))
            return self._stop() if self.differs else event
        choices = choices_of(message)
        if not all(map(self._leave_out, choices)):
            return self._stop()
        if choices and not any(map(_says_anything, choices)):
            return b""
        if not self._head:
            return b"data: %b\n\n" % dump_compact(message)
        members = {
            name: message[name] for name in ("usage", "system_fingerprint") if name in message
        }
        nulls = any(None in choice.values() for choice in choices)
        if nulls and isinstance(members.get("usage"), dict):
            # A chat's usage has this member with each token, a completion's has not.
            members["usage"].setdefault("completion_tokens_details", None)
        try:
            written = [_as_delta(choice, self._logprobs) for choice in choices]
        except LogprobsError:
            return self._stop(LOGPROBS)
        ending = dump_compact({"choices": written} | members)
        return self._head + ending[1:] + b"\n\n"

    def _stop(self, error: bytes = OTHERWISE) -> bytes:
        self.over = True
        self._opening.error = error
        return b""

    def _leave_out(self, choice: dict[str, Any]) -> bool:
        """Leave out what the client has; return whether the rest goes on with it."""
        logprobs = choice.get("logprobs")
        if self._logprobs is not None and isinstance(logprobs, dict):
            again = min(self._repeated.tokens, tokens_of(logprobs))
            self._repeated.tokens -= again
            self._logprobs.go_on(logprobs, again)
        text = text_of(choice)
        if text is None:
            return not self._repeated.left
        new = self._repeated.trim(text)
        if choice.get("finish_reason") == ABORT and self._may_abort():
            self._repeated.left = ""  # The proxy ordered it to end, with whatever the client has.
        if new is None or (choice.get("finish_reason") and self._repeated.left):
            self.differs = True
            return False
        if "delta" not in choice:
            choice["text"] = new
        elif new != text:
            choice["delta"] = {"content": new} if new else {}
        return True


def _says_anything(choice: dict[str, Any]) -> bool:
    return bool(text_of(choice) or choice.get("finish_reason") or tokens_of(choice.get("logprobs")))


def _as_delta(choice: dict[str, Any], logprobs: Logprobs | None) -> dict[str, Any]:
    """Return a completion's choice as a chat's. Raises LogprobsError."""
    listed = choice.get("logprobs")
    chats = None
    if logprobs is not None and isinstance(listed, dict):
        chats = logprobs.as_chat(listed)
    delta = {
        "index": choice.get("index"),
        "delta": {"content": choice["text"]} if choice.get("text") else {},
        "logprobs": chats,
        "finish_reason": choice.get("finish_reason"),
    }
    if delta["finish_reason"] is not None and "stop_reason" in choice:
        delta["stop_reason"] = choice["stop_reason"]
    delta["token_ids"] = None
    if None in choice.values():
        return delta
    # Of an engine that writes no member that is null.
    return {name: value for name, value in delta.items() if value is not None}


# The events of an answer of token ids of which the client has the beginning.
#
# The reader leaves out the first id if a prefiller had sent it and the engine repeats it. The spans of
# weight versions in the last event count from the first id of the whole answer; no span covers the ids of
# an engine that failed, as no event says which version computed them. Members that need one engine for
# the whole answer (`routed_experts`) cannot be combined: the reader ends the stream with an error.

# Of the first event, of which the client has them.
_ONCE = ("prompt_token_ids", "mm_placeholders")


class TokenContinuation(TokenStream):
    """Reads a stream for a client who has the beginning of the answer.

    Args:
        sequences: As for `CompletionStream`, like the options.
        before: Ids that earlier ranks gave.
        again: The id that the client has, and that comes again; None if none does.
    """

    __slots__ = ("_again", "_before", "_goes_on")

    def __init__(
        self, sequences: int, *, before: int, again: int | None = None, **options: Any
    ) -> None:
        super().__init__(sequences, **options)
        self._before = before
        self._again = again
        self._goes_on = False  # Something new has come.

    @property
    def plain(self) -> bool:
        return self._goes_on and super().plain

    def read(self, event: bytes) -> bytes:
        events = super().read(event)
        if events:
            events = b"".join(map(self._write, whole_events(events)))
        self._goes_on |= bool(events)
        return events

    @property
    def _may_be_mended(self) -> bool:
        return not self._goes_on or super()._may_be_mended

    def _write(self, event: bytes) -> bytes:
        message = parsed(event)
        choices = [] if message is None else choices_of(message)
        if message is None or not choices:
            return event
        changed = False
        for choice in choices:
            if self._again is not None:
                ids = choice.get("token_ids")
                if not ids and choice.get("finish_reason") == ABORT and self._may_abort():
                    self._again = None  # The proxy ordered it to end, with what the client has.
                    continue
                if not isinstance(ids, list) or ids[:1] != [self._again]:
                    self.differs = True
                    return self._stop(OTHERWISE)
                self._again, changed = None, True
                choice["token_ids"] = ids[1:]
            if choice.get("routed_experts") is not None and self._before:
                return self._stop(EXPERTS)
            changed |= self._shift(choice)
        if not changed:
            return event
        for name in _ONCE:
            message.pop(name, None)
        if not any(choice.get("token_ids") or choice.get("finish_reason") for choice in choices):
            return b""
        return b"data: %b\n\n" % dump_compact(message)

    def _shift(self, choice: Mapping[str, Any]) -> bool:
        """Count the spans of weight versions on; return whether there are any."""
        spans = choice.get("weight_versions")
        if not isinstance(spans, list) or not self._before:
            return False
        for span in spans:
            if isinstance(span, dict):
                for name in ("start", "end"):
                    if type(span.get(name)) is int:
                        span[name] += self._before
        return True

    def _stop(self, error: bytes) -> bytes:
        self.over = True
        self._opening.error = error
        return b""


# Streams of answers that may be begun again, or were; see `delivered.py`.
#
# Every event of such a stream is parsed.


class _Repeating(StreamReader):
    """The base of these readers: nothing reaches the client twice."""

    __slots__ = ()
    _delivered: Delivered
    _may_abort: Callable[[], bool]

    @property
    def repeating(self) -> bool:
        return self._delivered.repeating

    @property
    def plain(self) -> bool:
        return not self._delivered.repeating and super().plain

    @property
    def form(self) -> None:
        """Nothing: every event is parsed."""

    def take_token(self, event: bytes) -> bytes:
        taken = b"" if self._delivered.repeating else super().take_token(event)
        return self._delivered.deliver(taken) if taken else b""

    def read(self, event: bytes) -> bytes:
        return self._pass(super().read(event))

    def release(self) -> bytes:
        """Return the waiting events, unless the client has them."""
        return self._pass(super().release())

    def flush(self) -> bytes:
        return self._pass(super().flush())

    def ending(self) -> bytes | None:
        return None if self._delivered.repeating else super().ending()

    @property
    def _may_be_mended(self) -> bool:
        return not self._delivered.lost

    def _pass(self, events: bytes) -> bytes:
        if not events or self.over:
            return events
        try:
            return b"".join(map(self._one, whole_events(events)))
        except DiffersError:
            self.over = self.differs = True
            self._opening.error = OTHERWISE
            return b""

    def _one(self, event: bytes) -> bytes:
        delivered = self._delivered
        if not delivered.repeating:
            return delivered.deliver(event)
        left = delivered.leave_out(event, may_abort=self._may_abort())
        return b"".join(map(delivered.deliver, whole_events(left)))


class RepeatingCompletionStream(_Repeating, CompletionStream):
    """A chat, or a completion."""

    __slots__ = ("_delivered",)

    def __init__(self, sequences: int, delivered: Delivered, **options: Any) -> None:
        super().__init__(sequences, **options)
        self._delivered = delivered


class RepeatingTokenStream(_Repeating, TokenStream):
    """An answer of token ids."""

    __slots__ = ("_delivered",)

    def __init__(self, sequences: int, delivered: Delivered, **options: Any) -> None:
        super().__init__(sequences, **options)
        self._delivered = delivered


class RepeatingNamedEventStream(_Repeating, NamedEventStream):
    """A message, or a response."""

    __slots__ = ("_delivered",)

    def __init__(self, delivered: Delivered, **options: Any) -> None:
        super().__init__(**options)
        self._delivered = delivered

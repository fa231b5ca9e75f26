"""The events of an answer of which the client has the beginning.

Text that comes again is left out: the first token that the prefiller had said, or what the ids of the
tokens did not tell (`token_ids.py`). An answer that goes on at `/v1/completions` for a chat is written
as the chat's own.

Such events are parsed: the first ones alone, or those of a stream that failed in its midst.
"""

import json
from typing import Any

from balanceroute.proxy.live.openai.answer import ABORT
from balanceroute.proxy.live.openai.api_error import error_event
from balanceroute.proxy.live.openai.completion_stream import CompletionStream
from balanceroute.proxy.live.openai.repeated_text import RepeatedText
from balanceroute.proxy.live.openai.stream_event import choices_of, parsed, text_of
from balanceroute.proxy.live.openai.told_logprobs import Logprobs, UntoldError, tokens_of
from balanceroute.proxy.wire.sse import event_data, whole_events

# The errors that no engine reports.
OTHERWISE = error_event(409, "the answer goes on otherwise than it had begun")
_UNTOLD = error_event(409, "log-probabilities of a completion do not tell all that a chat's do")
OWN_ERRORS = frozenset({OTHERWISE, _UNTOLD})


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
        """Whether events go on as they are."""
        return not self._head and not self._logprobs and self._goes_on and super().plain

    def read(self, event: bytes) -> bytes:
        """Return what of any event is the client's; empty if nothing is."""
        return self._continue(super().read(event))

    def flush(self) -> bytes:
        """Return the end held, if it waits for a total that does not come; else nothing."""
        return self._continue(super().flush())

    def ending(self) -> bytes | None:
        """Return what a stream lacks that breaks off now, if all of the answer has come."""
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
            # [DONE], a comment, an error; or what nobody can read, which may have been the text.
            self.differs = bool(self._repeated.left and event_data(event))
            return self._stop() if self.differs else event
        choices = choices_of(message)
        if not all(map(self._leave_out, choices)):
            return self._stop()
        if choices and not any(map(_says_anything, choices)):
            return b""
        if not self._head:
            return b"data: %b\n\n" % _dump(message)
        members = {
            name: message[name] for name in ("usage", "system_fingerprint") if name in message
        }
        nulls = any(None in choice.values() for choice in choices)
        if nulls and isinstance(members.get("usage"), dict):
            # What a chat tells with each token, and a completion does not.
            members["usage"].setdefault("completion_tokens_details", None)
        try:
            written = [_as_delta(choice, self._logprobs) for choice in choices]
        except UntoldError:
            return self._stop(_UNTOLD)
        ending = _dump({"choices": written} | members)
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
            self._repeated.left = ""  # It was told to end, with whatever the client has.
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
    """Return a completion's choice as a chat's. Raises UntoldError."""
    told = choice.get("logprobs")
    chats = None
    if logprobs is not None and isinstance(told, dict):
        chats = logprobs.as_chat(told)
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


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()

"""The events of /v1/messages and /v1/responses that say how a stream ends.

Anthropic's streams end with `message_stop`, behind which vLLM writes [DONE], those of the Responses API
with `response.completed`, `response.incomplete` or `response.failed`. vLLM 0.32 names each event in its
first line (`wrap_data_with_event`, `_convert_stream_to_sse_events`), so those events are recognised by that.
Events without a name there are recognised by the `type` of their data, which is the same.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.live.openai.answer import CANCELLED
from balanceroute.proxy.live.openai.engine_error import read_error
from balanceroute.proxy.live.openai.stream_event import DONE, parsed
from balanceroute.proxy.live.openai.stream_reader import StreamReader
from balanceroute.proxy.live.openai.usage import token_count
from balanceroute.proxy.wire.sse import event_data

_NAME = re.compile(rb"event: ?([^\r\n]+)")
_FINAL = frozenset(
    {b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"}
)
_FAILED = frozenset({b"error", b"response.failed"})
# Anthropic's sign of life.
_PINGS = (b"event: ping\n", b"event: ping\r")
_TELLING = _FINAL | _FAILED | {b"message_delta"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What an event says of its stream.

    Attributes:
        final: Whether the answer is complete with it.
        error: What it reports; empty if it reports none.
        is_answer: Whether it is an error alone, as an answer without a stream would be.
        output_tokens: The engine's count of the answer's tokens; None if it tells none.
        aborted: Whether the engine gave the answer up: it has no reason for its end, or another status.
    """

    final: bool
    error: str
    is_answer: bool
    output_tokens: int | None
    aborted: bool = False


def read_turn(event: bytes) -> Turn | None:
    """Return what an event says of its stream, None if it only goes on."""
    named = _NAME.match(event)
    if named is not None:
        name = named[1]
        if name not in _TELLING:
            return None
        message = parsed(event) or {}
    else:
        message = parsed(event) or {}
        kind = message.get("type")
        name = kind.encode() if isinstance(kind, str) else b""
        if name not in _TELLING:
            if read_error(message) is None:
                return None
            name = b"error"
    response = _object(message, "response")
    usage = _object(message, "usage") or _object(response, "usage")
    error = ""
    if name in _FAILED:
        told = read_error(message) or read_error(response)
        error = (told and told.words) or "error"
    delta = _object(message, "delta")
    return Turn(
        final=name in _FINAL,
        aborted=delta.get("stop_reason", "") is None or response.get("status") == CANCELLED,
        error=error,
        is_answer=name == b"error",
        output_tokens=token_count(usage, "output_tokens"),
    )


def _object(message: dict[str, Any], key: str) -> dict[str, Any]:
    value = message.get(key)
    return value if isinstance(value, dict) else {}


class NamedEventStream(StreamReader):
    """Reads one stream of named events. Each with data is counted as a token.

    Args:
        resumes: As for `StreamReader`.
        may_abort: Returns whether the engine was told to give the answer up.
    """

    __slots__ = ("_complete", "_may_abort")

    def __init__(self, *, resumes: bool, may_abort: Callable[[], bool]) -> None:
        super().__init__(resumes=resumes)
        self._complete = False
        self._may_abort = may_abort

    @property
    def complete(self) -> bool:
        """Whether the answer is."""
        return self._complete

    def is_progress(self, event: bytes) -> bool:
        """Return whether an event says something of the answer."""
        return not event.startswith(_PINGS) and super().is_progress(event)

    def is_remark(self, event: bytes) -> bool:
        """Return whether an event is no part of any answer."""
        return event.startswith(_PINGS) or super().is_remark(event)

    def _read(self, event: bytes) -> bytes:
        if not self.is_progress(event):
            return self._opening.pass_empty(event)
        if not event.startswith(b"event:") and event_data(event) == DONE:
            return self._take_done(event)
        self._events += 1
        turn = read_turn(event)
        if turn is None:
            return event
        if turn.aborted and not self._may_abort():
            self.aborted = self.over = True
            return b""
        if turn.output_tokens is not None:
            self.usage_tokens = turn.output_tokens
        self._complete = self._complete or turn.final
        if not turn.error:
            return event
        if turn.is_answer and self._may_be_mended:
            self._opening.error, self.over = event, True
            return b""
        if turn.is_answer and not self._opening.pass_error(event):
            self.over = True
            return b""
        self._report(turn.error)
        return event

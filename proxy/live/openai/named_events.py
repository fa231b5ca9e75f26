"""The events of /v1/messages and /v1/responses: counted, put right, and how their streams end.

Anthropic's streams begin with `message_start`, which vLLM sends with the first token, and end with
`message_stop`, behind which vLLM writes [DONE]. Those of the Responses API begin with `response.created`
and `response.in_progress`, which vLLM 0.32 sends before it has anything of the answer, so they wait here
for what follows: until then the request may go elsewhere, and every later event names the response. They
end with `response.completed`, `response.incomplete` or `response.failed`.

vLLM 0.32 names each event in the line before its data (`wrap_data_with_event`,
`_convert_stream_to_sse_events`), so events are recognised by that. Those that begin otherwise are
recognised by the `type` of their data, which is the same: of several names the last one counts. All other
events pass unchanged. An unreadable end does not count as one.

The reader withholds an event that closes a part of the answer until another one follows, for a moment: an
engine that gives the answer up closes the part first, and the client must not see that, as another engine
goes on with it.

Only the last event of either stream counts its tokens. Until then each delta counts as one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.live.openai.answer import CANCELLED, RECOMPUTED
from balanceroute.proxy.live.openai.errors import read_error
from balanceroute.proxy.live.openai.stream_reader import DONE, StreamReader, parsed
from balanceroute.proxy.live.openai.token_counts import UsageRewrite, token_count
from balanceroute.proxy.wire.http1.pump import NAMED, EventForm, Passed
from balanceroute.proxy.wire.sse import event_data

_NAME = re.compile(rb"event: ?([^\r\n]+)(?:\r\n|\r|\n)data:")
_FINAL = frozenset(
    {b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"}
)
_FAILED = frozenset({b"error", b"response.failed"})
# Anthropic's sign of life.
_PINGS = (b"event: ping\n", b"event: ping\r")
_WITH_STATE = _FINAL | _FAILED | {b"message_delta"}
_START = b"message_start"
# They come before anything of the answer.
_AHEAD = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
_CLOSING = (b"content_block_stop", b".done")
# The last ones of a response repeat all of its text.
_MOST_CLOSING_BYTES = 4 << 20
_COUNTED = b"delta"
_BLOCK_DELTA = b"content_block_delta"
# The last delta of a thought, which engines that give the answer up write as well.
_SIGNATURE = b'"signature_delta"'
# As vLLM writes the events that bring tokens.
_BLOCK = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":'
_TOKENS = (
    _BLOCK + b'"text_delta"',
    _BLOCK + b'"thinking_delta"',
    _BLOCK + b'"input_json_delta"',
    b"event: response.output_text.delta\ndata: ",
    b"event: response.reasoning_text.delta\ndata: ",
    b"event: response.function_call_arguments.delta\ndata: ",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of a stream by one of its events."""

    final: bool  # Whether the answer is complete with it.
    error: str  # What it reports; empty if it reports none.
    is_answer: bool  # Whether it is an error alone, as an answer without a stream would be.
    output_tokens: int | None  # The engine's count of the answer's tokens; None if it reports none.
    # Whether the engine gave the answer up: it has no reason for its end, or another status.
    aborted: bool = False
    handed_back: bool = False  # Whether the rank hands the request back.


def name_of(event: bytes) -> bytes:
    """Return the name of an event that has data; empty if it has none."""
    named = _NAME.match(event)
    if named is not None:
        return named[1]
    message = parsed(event) or {}
    kind = message.get("type")
    name = kind.encode() if isinstance(kind, str) else b""
    return b"error" if name not in _WITH_STATE and read_error(message) is not None else name


def read_turn(event: bytes, name: bytes) -> Turn | None:
    """Return what an event of a name says of its stream, None if it only goes on."""
    if name not in _WITH_STATE:
        return None
    read = parsed(event)
    message = read or {}
    response = _object(message, "response")
    usage = _object(message, "usage") or _object(response, "usage")
    error = ""
    if name in _FAILED:
        found = read_error(message) or read_error(response)
        error = (found and found.words) or "error"
    delta = _object(message, "delta")
    stop = delta.get("stop_reason", "")
    return Turn(
        final=name in _FINAL and read is not None,
        aborted=stop is None or response.get("status") == CANCELLED,
        handed_back=stop == "stop_sequence" and delta.get("stop_sequence") == RECOMPUTED,
        error=error,
        is_answer=name == b"error",
        output_tokens=token_count(usage, "output_tokens"),
    )


def _object(message: dict[str, Any], key: str) -> dict[str, Any]:
    value = message.get(key)
    return value if isinstance(value, dict) else {}


class NamedEventStream(StreamReader):
    """Reads one stream of named events.

    Args:
        hands_back: Whether the engine may hand the request back.
        may_abort: Returns whether the proxy has ordered the engine to give the answer up.
    """

    __slots__ = ("_closing", "_complete", "_hands_back", "_may_abort", "_said", "_usage")

    def __init__(
        self,
        *,
        resumes: bool,
        usage: UsageRewrite,
        hands_back: bool,
        may_abort: Callable[[], bool],
    ) -> None:
        super().__init__(resumes=resumes)
        self._closing = b""  # Events that wait.
        self._complete = False
        self._usage = usage
        self._hands_back = hands_back
        self._may_abort = may_abort
        self._said = False

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def past_opening(self) -> bool:
        return self._said

    @property
    def plain(self) -> bool:
        return self._opening.begun and not (self.over or self._closing)

    @property
    def waits(self) -> bool:
        """Whether an event that opens the answer, or closes a part of it, waits for the next one."""
        return bool(self._closing) or super().waits

    def release(self) -> bytes:
        opening = super().release() if super().waits else b""
        closing, self._closing = self._closing, b""
        return opening + closing

    def is_progress(self, event: bytes) -> bool:
        """Return whether an event says something of the answer."""
        return not event.startswith(_PINGS) and super().is_progress(event)

    def is_remark(self, event: bytes) -> bool:
        return event.startswith(_PINGS) or super().is_remark(event)

    def take_token(self, event: bytes) -> bytes:
        if not event.startswith(_TOKENS):
            return b""
        self._events += 1
        self._said = True
        return event + b"\n\n"

    @property
    def form(self) -> EventForm | None:
        return EventForm(NAMED, 0, self._events)

    def take_passed(self, passed: Passed) -> None:
        super().take_passed(passed)
        self._said |= passed.events > 0

    def _read(self, event: bytes) -> bytes:
        if not self.is_progress(event):
            return self._opening.pass_empty(event)
        if not event.startswith(b"event:") and event_data(event) == DONE:
            return self._take_done(event)
        name = name_of(event)
        if name == _START:
            return self._opening.open(self._put_right(event), begins=True)
        if name in _AHEAD:
            return self._opening.open(event, begins=False)
        turn = read_turn(event, name)
        if turn is not None:
            event = self._take_turn(turn, event)
        elif name.endswith(_CLOSING) or (name == _BLOCK_DELTA and _SIGNATURE in event):
            self._closing += event
            event = b""
        elif name.endswith(_COUNTED):
            self._events += 1
        if not event and len(self._closing) <= _MOST_CLOSING_BYTES:
            return b""
        self._said = True
        closing, self._closing = self._closing, b""
        return closing + event

    def _take_turn(self, turn: Turn, event: bytes) -> bytes:
        """Note what an event says of the stream; return what of it is the client's."""
        if turn.output_tokens is not None:
            self.usage_tokens = turn.output_tokens
        if self._hands_back and turn.handed_back:
            self.handed_back = self.over = True
            return b""
        if turn.aborted and not self._may_abort():
            self.aborted = self.over = True
            return b""
        self._complete = self._complete or turn.final
        if not turn.error:
            return self._put_right(event)
        if turn.is_answer and self._may_be_mended:
            self._opening.error, self.over = event, True
            return b""
        if turn.is_answer and not self._opening.pass_error(event):
            self.over = True
            return b""
        self._report(turn.error)
        return event

    def _put_right(self, event: bytes) -> bytes:
        """Return an event with the prefiller's counts of the prompt in its usage."""
        prompt = self._usage.prompt
        if prompt is None:
            return event
        # JSON in one line, as any engine writes it; else it stays as it is.
        before, mark, data = event.partition(b"data:")
        line, end, behind = data.partition(b"\n")
        return b"".join((before, mark, prompt.apply_within(line), end, behind))


def named_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a `NamedEventStream` takes of the options of a `CompletionStream`."""
    hands_back = options["transcript"] is not None
    taken = {name: options[name] for name in ("resumes", "usage", "may_abort")}
    return taken | {"hands_back": hands_back}

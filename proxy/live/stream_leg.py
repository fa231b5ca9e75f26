"""The decode leg of a streamed request: engine events in, client bytes out, tokens counted.

The hot path. Events go to the client byte for byte, as soon as they are complete; an event that is
still in pieces waits, so that whatever happens next the client has only whole events. An ordinary
token event is told by a substring; only the first and the last events of a stream are parsed.

A content event counts as one token. That is so in vLLM without speculative decoding; the usage
object at the end, if the client asked for one, corrects the count.
"""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from balanceroute.proxy.wire.messages import WireError, WireFault
from balanceroute.proxy.wire.sse import EventScanner, event_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.server import Reply

# In every vLLM event of a token that is not the last of its sequence.
_GOING_ON = b'"finish_reason":null'
_ROLE = b'"role":"assistant"'
_USAGE = b'"usage":{'
_CACHED_TOKENS = re.compile(rb'("cached_tokens":\s*)\d+')
_COUNTS = re.compile(rb'"(prompt_tokens|completion_tokens)":\s*(\d+)')
_decoder = json.JSONDecoder()


class StreamOwner(Protocol):
    """Who is told what becomes of the stream."""

    def decode_refused(self, status: int, headers: "Headers", body: bytes) -> None:
        """The engine answered, but not with a stream."""

    def stream_started(self, status: int, headers: "Headers") -> None:
        """The first event came and goes to the client: open the client's stream."""

    def stream_error_first(self, event: bytes) -> None:
        """The very first event is an error; nothing was sent to the client."""

    def stream_recomputed(self) -> None:
        """The rank hands the request back; nothing of this event was sent."""

    def stream_ended(self) -> None:
        """The engine ended the stream as it should."""

    def stream_error(self, message: str) -> None:
        """The engine sent an error event, which was forwarded, and ended."""

    def stream_broken(self, error: WireError) -> None:
        """The stream broke off before its end."""


class StreamLeg:
    """Receives one engine stream; see `ResponseHandler`.

    Args:
        owner: Told of the turns.
        reply: The client's answer.
        clock: The loop's clock, in seconds.
        openai: Whether the events are those of the OpenAI completion APIs. Others are only counted.
        sequences: Sequences that must finish before the stream may end.
        cached_tokens: Cached tokens of the prefill leg, put into usage objects; None leaves them.
        resumed_tokens: Tokens that an earlier binding emitted: subtracted from the prompt and added
            to the completion in usage objects, and its opening event is not repeated.
        keep_text: Whether to keep the text, for a connector that may ask for a recompute.
        observe_gap: Told the seconds between two arrivals.

    Attributes:
        tokens: Content events received on this leg.
        finished: Sequences that have finished.
        last_s: When something came last.
        gap_max_s: The longest gap between two arrivals.
        text: The text emitted, if kept; None once it cannot be kept (tool calls, reasoning).
        usage_tokens: Completion tokens by the engine's count; None if it gave none.
    """

    __slots__ = (
        "_body",
        "_cached",
        "_clock",
        "_error",
        "_fix_usage",
        "_headers",
        "_observe_gap",
        "_openai",
        "_opening",
        "_over",
        "_owner",
        "_reply",
        "_resumed",
        "_scanner",
        "_sequences",
        "_started",
        "_status",
        "_streaming",
        "_then",
        "finished",
        "gap_max_s",
        "keep_text",
        "last_s",
        "text",
        "tokens",
        "usage_tokens",
    )

    def __init__(
        self,
        owner: StreamOwner,
        reply: "Reply",
        clock: "Callable[[], float]",
        *,
        openai: bool,
        sequences: int,
        cached_tokens: int | None,
        resumed_tokens: int,
        keep_text: bool,
        observe_gap: "Callable[[float], None]",
    ) -> None:
        # Per leg.
        self._owner = owner
        self._reply = reply
        self._clock = clock
        self._openai = openai
        self._sequences = sequences
        self._cached = cached_tokens
        self._resumed = resumed_tokens
        self._fix_usage = cached_tokens is not None or resumed_tokens > 0
        self._observe_gap = observe_gap
        self.keep_text = keep_text
        # Of the response.
        self._status = 0
        self._headers: Headers = []
        self._body: list[bytes] = []  # Of an answer that is no stream.
        self._streaming = False
        self._scanner = EventScanner()
        self._started = False
        self._opening = True
        self._over = False
        self._then: Callable[[], None] | None = None  # To tell once the events before are sent.
        self._error = ""
        # Of the stream so far.
        self.tokens = 0
        self.finished = 0
        self.last_s = clock()
        self.gap_max_s = 0.0
        self.text: list[str] | None = [] if keep_text else None
        self.usage_tokens: int | None = None

    @property
    def started(self) -> bool:
        """Whether anything of this leg went to the client."""
        return self._started

    def on_head(self, status: int, headers: "Headers") -> None:
        """Take the response head."""
        self._status = status
        self._headers = headers
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        self._streaming = status == 200 and kind.startswith(b"text/event-stream")

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body."""
        now_s = self._clock()
        if not self._streaming:
            self.last_s = now_s
            self._body.append(data)
            return
        events = self._scanner.feed(data)
        if self._opening or self.keep_text or self._fix_usage:
            events = self._examine(events)
        else:
            for event in events:
                if _GOING_ON in event:
                    self.tokens += 1
                else:
                    events = self._examine(events, counted=event)
                    break
        if self._started:
            gap_s = now_s - self.last_s
            self._observe_gap(gap_s)
            if gap_s > self.gap_max_s:  # noqa: PLR1730 - max() costs five times as much.
                self.gap_max_s = gap_s
        self.last_s = now_s
        if events:
            self._forward(events)
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def on_end(self) -> None:
        """Take the end of the response."""
        if self._over:
            return
        self._over = True
        if not self._streaming:
            self._owner.decode_refused(self._status, self._headers, b"".join(self._body))
        elif self._error:
            self._owner.stream_error(self._error)
        elif self._openai and self.finished < self._sequences:
            # The HTTP message is whole, but the answer is not: never a silent short end.
            self._owner.stream_broken(
                WireError(WireFault.RESET, "the answer is cut short", sent=True, answered=True)
            )
        else:
            self._owner.stream_ended()

    def on_error(self, error: WireError) -> None:
        """Take the failure of the response."""
        if not self._over:
            self._over = True
            self._owner.stream_broken(error)

    def _forward(self, events: list[bytes]) -> None:
        if not self._started:
            self._started = True
            self._owner.stream_started(self._status, self._headers)
        self._reply.write(events[0] if len(events) == 1 else b"".join(events))

    def _examine(self, events: list[bytes], counted: bytes | None = None) -> list[bytes]:
        """Look at each event closely; return those to forward.

        The events before `counted` have been counted already.
        """
        forward: list[bytes] = []
        for event in events:
            if self._over:
                break
            if counted is not None and event is not counted:
                forward.append(event)
                continue
            counted = None
            kept = self._examine_one(event) if self._openai else self._count(event)
            if kept is not None:
                forward.append(kept)
        return forward

    def _count(self, event: bytes) -> bytes:
        self._opening = False
        self.tokens += event.count(b"data:")
        return event

    def _examine_one(self, event: bytes) -> bytes | None:
        if self._fix_usage and _USAGE in event:
            event = self._corrected(event)
        if _GOING_ON in event and _ROLE not in event:
            self._opening = False
            self.tokens += 1
            if self.keep_text:
                self._keep(event)
            return event
        payload = event_data(event)
        if not payload.startswith(b"{"):
            return event  # [DONE], a comment, a heartbeat.
        try:
            message = json.loads(payload)
        except ValueError:
            return event
        if "error" in message:
            return self._take_error(event, message["error"])
        return self._take_message(event, message)

    def _take_error(self, event: bytes, error: object) -> bytes | None:
        if not self._started:
            self._over = True
            self._then = partial(self._owner.stream_error_first, event)
            return None
        text = error.get("message") if isinstance(error, dict) else error
        self._error = str(text)[:200] or "error"
        return event

    def _take_message(self, event: bytes, message: dict[str, Any]) -> bytes | None:
        usage = message.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.usage_tokens = usage["completion_tokens"]
        choices = message.get("choices")
        opening = False
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta")
            if choice.get("stop_reason") == "recomputed":
                self._over = True
                self._then = self._owner.stream_recomputed
                return None
            opening = isinstance(delta, dict) and "role" in delta and not delta.get("content")
            opening = opening and not delta.get("tool_calls") and not choice.get("finish_reason")
            if opening:
                continue
            self._opening = False
            self.tokens += 1
            if self.keep_text:
                self._keep(event)
            if choice.get("finish_reason"):
                self.finished += 1
        return None if opening and self._resumed else event

    def _keep(self, event: bytes) -> None:
        """Append the text of a token event, or give up keeping it."""
        if self.text is None:
            return
        event_text = event.decode("utf-8", "replace")
        for mark in ('"content":"', '"text":"'):
            begin = event_text.find(mark)
            if begin >= 0 and '"tool_calls":' not in event_text:
                self.text.append(_decoder.raw_decode(event_text, begin + len(mark) - 1)[0])
                return
        self.text = None

    def _corrected(self, event: bytes) -> bytes:
        """Return the event with its usage object as of one engine that did the whole request."""
        begin = event.find(_USAGE)
        head, usage = event[:begin], event[begin:]
        if self._cached is not None:
            usage = _CACHED_TOKENS.sub(rb"\g<1>%d" % self._cached, usage)
        if self._resumed:
            shift = {b"prompt_tokens": -self._resumed, b"completion_tokens": self._resumed}
            usage = _COUNTS.sub(
                lambda match: b'"%b":%d' % (match[1], int(match[2]) + shift[match[1]]), usage
            )
        return head + usage

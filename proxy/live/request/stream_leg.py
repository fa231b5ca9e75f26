"""The decode leg of a streamed request: engine events in, client bytes out, tokens counted.

The hot path. Events go to the client byte for byte, as soon as they are complete; an event that is
still in pieces waits, so that whatever happens next the client has only whole events. An ordinary
token event is told by a substring; only the first and the last events of a stream are parsed.

Tokens are counted by the engine's own word (`token_counts`), or else each content event is one token.
That is so in vLLM without speculative decoding, as long as every token ends a character and its HTTP
server keeps up with its engine: else it puts several tokens into one event (seen: 24 in 8). The usage
object at the end, if the client asked for one, then corrects the count.
"""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from balanceroute.proxy.live.openai.named_events import read_turn
from balanceroute.proxy.live.openai.token_counts import TokenCounts, is_dear, is_total
from balanceroute.proxy.live.request.buffered_leg import BufferedLeg
from balanceroute.proxy.wire.messages import WireError, WireFault
from balanceroute.proxy.wire.sse import EventScanner, event_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.server import Reply

# In every vLLM event of a token that is not the last of its sequence. The text of an answer cannot
# hold it: its quotes are escaped.
_GOING_ON = b'"finish_reason":null'
_ROLE = b'"delta":{"role":'
_USAGE = b'"usage":'
_CACHED_TOKENS = re.compile(rb'("cached_tokens":\s*)\d+')
_COUNTS = re.compile(rb'"(prompt_tokens|completion_tokens)":\s*(\d{1,9})\b')
# Where the text of a token begins, in events that carry nothing else of the answer.
_CHAT_TEXT = b'"delta":{"content":"'
_COMPLETION_TEXT = b'"index":0,"text":"'
# Of an answer to a stream's request that is no stream.
_ANSWER_BYTES = 64 << 20
_MAX_COUNT = 1 << 30
_MAX_REASON = 200


class StreamOwner(Protocol):
    """Who is told what becomes of the stream."""

    def decode_refused(self, status: int, headers: "Headers", body: bytes) -> None:
        """The engine answered, but not with a stream."""

    def stream_started(self, status: int, headers: "Headers") -> None:
        """The first event came and goes to the client: open the client's stream."""

    def stream_error_first(self, event: bytes) -> None:
        """The very first event is an error; nothing was sent to the client."""

    def stream_counts_dear(self) -> None:
        """The engine pays for its counts with the length of the answer: do not ask again."""

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
        openai: Whether the events are those of the OpenAI completion APIs. Others are counted, and
            say by their names how the stream ends.
        sequences: Sequences that must finish before the stream may end.
        cached_tokens: Cached tokens of the prefill leg, put into usage objects; None leaves them.
        resumed_tokens: Tokens that an earlier binding emitted: subtracted from the prompt and added
            to the completion in usage objects.
        opened: Whether the client's stream began on an earlier binding: its opening event is not
            repeated.
        keep_text: Whether the rank may hand the request back (`stop_reason` "recomputed"), for which
            the text of a single sequence is kept.
        observe_gap: Told the seconds between two arrivals of events.
        counts: The engine's own counts, if they were asked for.

    Attributes:
        finished: Sequences that have finished.
        last_s: When events came last.
        gap_max_s: The longest gap between two arrivals of events, in seconds.
        text: The text emitted, if kept; None once it cannot be kept (tool calls, reasoning).
        usage_tokens: Completion tokens of this leg by the engine's count; None if it gave none.
        last_words: The event with text that came with the request when the rank handed it back. It
            is the client's if the answer goes on; empty if there was none.
    """

    __slots__ = (
        "_cached",
        "_clock",
        "_counts",
        "_error",
        "_events",
        "_feed",
        "_fix_usage",
        "_handed_back",
        "_headers",
        "_held",
        "_observe_gap",
        "_openai",
        "_opened",
        "_opening",
        "_over",
        "_owner",
        "_plain",
        "_recomputes",
        "_resumed",
        "_scanner",
        "_sequences",
        "_shows_each",
        "_started",
        "_status",
        "_then",
        "_whole",
        "_write",
        "finished",
        "gap_max_s",
        "last_s",
        "last_words",
        "text",
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
        opened: bool = False,
        counts: TokenCounts | None = None,
    ) -> None:
        # Per leg.
        self._owner = owner
        self._write = reply.write
        self._clock = clock
        self._openai = openai
        self._sequences = sequences
        self._cached = cached_tokens
        self._resumed = resumed_tokens
        self._opened = opened or resumed_tokens > 0
        self._fix_usage = cached_tokens is not None or resumed_tokens > 0
        self._shows_each = counts is None or not counts.hide_each
        self._recomputes = keep_text
        self._observe_gap = observe_gap
        self._counts = counts
        # Of the response.
        self._status = 0
        self._headers: Headers = []
        self._whole: BufferedLeg | None = None  # Takes an answer that is no stream.
        self._scanner = EventScanner()
        self._feed = self._scanner.feed
        self._started = False
        self._opening = True
        self._plain = False  # Only ordinary token events are expected from here on.
        self._over = False
        self._handed_back = False
        self._held: list[bytes] = []  # What came before the first event that says anything.
        self._then: Callable[[], None] | None = None  # To tell once the events before are sent.
        self._error = ""
        # Of the stream so far.
        self._events = 0
        self.finished = 0
        self.last_s = clock()
        self.gap_max_s = 0.0
        self.text: list[str] | None = [] if keep_text and sequences == 1 else None
        self.usage_tokens: int | None = None
        self.last_words = b""

    @property
    def started(self) -> bool:
        """Whether anything of this leg went to the client."""
        return self._started

    @property
    def tokens(self) -> int:
        """Tokens received on this leg."""
        return self._events if self._counts is None else self._counts.tokens

    @property
    def all_tokens(self) -> int:
        """Tokens of this leg, by the best that is known."""
        return self.tokens if self.usage_tokens is None else self.usage_tokens

    def correct_cached_tokens(self, count: int) -> None:
        """Put the cached tokens of a prefill that ended after this leg began into usage objects."""
        self._cached = count
        self._fix_usage = True

    def on_head(self, status: int, headers: "Headers") -> None:
        """Take the response head."""
        self._status = status
        self._headers = headers
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status != 200 or not kind.lower().startswith(b"text/event-stream"):
            self._whole = BufferedLeg(
                self._answered, self._owner.stream_broken, max_bytes=_ANSWER_BYTES
            )
            self._whole.on_head(status, headers)

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body."""
        if not self._plain:
            self._take(data)
            return
        try:
            events = self._feed(data)
        except WireError as error:
            self._break_off(error)
            return
        fix_each = self._fix_usage and self._shows_each
        for event in events:
            # From the right, where it stands: a third of what `in` costs.
            if event.rfind(_GOING_ON) < 0 or (fix_each and event.rfind(_USAGE) >= 0):
                self._examine(events)
                return
        if events:
            now_s = self._clock()
            gap_s = now_s - self.last_s
            self.last_s = now_s
            self._observe_gap(gap_s)
            if gap_s > self.gap_max_s:  # noqa: PLR1730 - max() costs five times as much.
                self.gap_max_s = gap_s
            if self._counts is None:
                self._events += len(events)
            else:
                events = [self._counts.take(event) for event in events]
            if self.text is not None:
                for event in events:
                    self._keep(event)
            self._write(events[0] if len(events) == 1 else b"".join(events))

    def on_end(self) -> None:
        """Take the end of the response."""
        if not self._over and self._whole is None:
            events = self._scanner.end()
            if events:
                self._examine(events)
        if self._over:
            return
        self._let_go()
        self._over = True
        if self._whole is not None:
            self._whole.on_end()
        elif self._handed_back:
            self._owner.stream_recomputed()
        elif self._error:
            self._owner.stream_error(self._error)
        elif self.finished < self._sequences:
            # The HTTP message is whole, but the answer is not: never a silent short end.
            self._owner.stream_broken(_broken(WireFault.RESET, "the answer is cut short"))
        else:
            self._owner.stream_ended()

    def on_error(self, error: WireError) -> None:
        """Take the failure of the response."""
        if not self._over:
            self._break_off(error)

    def _break_off(self, error: WireError) -> None:
        if self._started:
            self._let_go()
        self._over = True
        self._plain = False
        if self._handed_back:
            self._owner.stream_recomputed()
        else:
            self._owner.stream_broken(error)

    def _answered(self, status: int, headers: "Headers", body: bytes) -> None:
        if status == 200 and self._opened:
            # The client has the beginning of a stream, which this cannot go on with.
            self._owner.stream_broken(_broken(WireFault.PROTOCOL, "the answer is no stream"))
        else:
            self._owner.decode_refused(status, headers, body)

    # All but ordinary token events.

    def _take(self, data: bytes) -> None:
        if self._over:
            return
        if self._whole is not None:
            self._whole.on_data(data)
            return
        try:
            events = self._feed(data)
        except WireError as error:
            self._break_off(error)
            return
        if events:
            self._examine(events)

    def _examine(self, events: list[bytes]) -> None:
        """Look at each event closely, and send on those that are the client's."""
        now_s = self._clock()
        if self._started:
            gap_s = now_s - self.last_s
            self._observe_gap(gap_s)
            self.gap_max_s = max(self.gap_max_s, gap_s)
        self.last_s = now_s
        forward: list[bytes] = []
        examine = self._examine_one if self._openai else self._count
        for event in events:
            kept = examine(event, first=not (self._started or forward))
            if self._over:
                break
            if kept is not None:
                forward.append(kept)
        self._plain = self._openai and not self._opening and not self._over
        if self._handed_back or (self._counts is not None and self.finished):
            self._plain = False  # The last event may be held: nothing overtakes it.
        if forward:
            self._send(forward)
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def _send(self, events: list[bytes]) -> None:
        if not self._started:
            self._started = True
            events = self._held + events
            self._owner.stream_started(self._status, self._headers)
        self._write(b"".join(events))

    def _let_go(self) -> None:
        """Send the last event, if it waits for one that does not come."""
        closing = b"" if self._counts is None else self._counts.release(None)[0]
        if closing:
            self._send([closing])

    def _count(self, event: bytes, *, first: bool) -> bytes | None:
        if not event_data(event):
            return self._empty(event, first=first)
        self._opening = False
        self._events += 1
        turn = read_turn(event)
        if turn is None:
            return event
        if turn.output_tokens is not None:
            self.usage_tokens = turn.output_tokens
        if turn.final:
            self.finished = self._sequences
        if turn.error:
            return self._take_error(event, turn.error, first=first and turn.is_answer)
        return event

    def _empty(self, event: bytes, *, first: bool) -> bytes | None:
        """Return an event that says nothing, a comment for example, or hold it if it came first.

        It would commit the answer, and hide from the first-token deadline that no token came.
        """
        if first:
            self._held.append(event)
            return None
        return event

    def _examine_one(self, event: bytes, *, first: bool) -> bytes | None:
        """Return what of an event goes to the client, whose first one it may be."""
        if self._handed_back:
            self._examine_last(event)
            return None
        if self._counts is not None and self.finished:
            return self._examine_late(self._counts, event, first=first)
        return self._examine_open(event, first=first)

    def _examine_late(self, counts: TokenCounts, event: bytes, *, first: bool) -> bytes | None:
        """Look at an event behind the one that ended the sequence, which may be held for it."""
        if not event_data(event):
            return event  # A comment, for example.
        message = _parsed(event)
        closing, hidden = counts.release(message)
        if hidden:
            assert message is not None
            self._take_usage(message["usage"])
            return closing or None
        kept = self._examine_open(event, first=first and not closing)
        return closing + (kept or b"") or None

    def _examine_last(self, event: bytes) -> None:
        """Look for the total behind the word that the rank hands the request back."""
        if event_data(event):  # No comment, for example.
            message = _parsed(event)
            if message is not None and is_total(message):
                self._take_usage(message["usage"])
            self._over = True
            self._then = self._owner.stream_recomputed

    def _examine_open(self, event: bytes, *, first: bool) -> bytes | None:
        if _GOING_ON in event and _ROLE not in event:
            self._opening = False
            if self.text is not None:
                self._keep(event)
            return self._corrected(self._counted(event))
        message = _parsed(event)
        if message is None:
            return self._empty(event, first=first)
        error = message.get("error")
        if error is not None:
            return self._take_error(event, error, first=first)
        return self._take_message(event, message)

    def _counted(self, event: bytes) -> bytes:
        """Count an event's tokens; return what of it is the client's."""
        if self._counts is None:
            self._events += 1
            return event
        return self._counts.take(event)

    def _take_error(self, event: bytes, error: object, *, first: bool) -> bytes | None:
        if first and not self._opened:
            self._over = True
            self._then = partial(self._owner.stream_error_first, event)
            return None
        text = error.get("message") if isinstance(error, dict) else error
        self._error = str(text or "error")[:_MAX_REASON]
        return event

    def _take_message(self, event: bytes, message: dict[str, Any]) -> bytes | None:
        opens = False
        for choice in _choices(message):
            if self._recomputes and choice.get("stop_reason") == "recomputed":
                self._take_last_words(message, choice)
                if self._counts is None or self._counts.each:
                    self._over = True
                    self._then = self._owner.stream_recomputed
                self._handed_back = True
                return None
            opens = _opens(choice)
            if opens:
                continue
            self._opening = False
            if self._counts is None:
                self._events += 1
            if self.text is not None:
                self._keep_choice(choice)
            if choice.get("finish_reason"):
                self.finished += 1
        if is_total(message) or self.finished == self._sequences == 1:
            self._take_usage(message.get("usage"))
        if self._counts is not None and message.get("choices"):
            return self._take_counted(self._counts, event, message, opens=opens)
        return None if opens and self._opened else self._corrected(event)

    def _take_counted(
        self, counts: TokenCounts, event: bytes, message: dict[str, Any], *, opens: bool
    ) -> bytes | None:
        if is_dear(message):
            self._owner.stream_counts_dear()
        if opens:
            return None if self._opened else self._corrected(counts.pass_by(event))
        event = self._corrected(self._counted(event))
        return counts.hold(event) if self.finished else event

    def _take_usage(self, usage: object) -> None:
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(count) is int and 0 <= count <= _MAX_COUNT:
            self.usage_tokens = count

    def _corrected(self, event: bytes) -> bytes:
        """Return the event with its usage object as of one engine that did the whole request."""
        begin = event.find(_USAGE) if self._fix_usage else -1
        if begin < 0:
            return event
        head, usage = event[:begin], event[begin:]
        if self._cached is not None:
            usage = _CACHED_TOKENS.sub(rb"\g<1>%d" % self._cached, usage)
        if self._resumed:
            shift = {b"prompt_tokens": -self._resumed, b"completion_tokens": self._resumed}
            usage = _COUNTS.sub(
                lambda match: b'"%b":%d' % (match[1], max(0, int(match[2]) + shift[match[1]])),
                usage,
            )
        return head + usage

    # The text.

    def _take_last_words(self, message: dict[str, Any], choice: dict[str, Any]) -> None:
        """Keep text that the rank held back until now because a stop string might begin in it."""
        if self.text is None:
            return
        words = _words(choice)
        if words is None:
            self.text = None
            return
        if not words:
            return
        self.text.append(words)
        going_on = choice | {"finish_reason": None, "stop_reason": None}
        text = json.dumps(message | {"choices": [going_on]}, separators=(",", ":"))
        event = b"data: " + text.encode() + b"\n\n"
        if self._counts is not None:
            event = self._counted(event)
        self.last_words = self._corrected(event)

    def _keep(self, event: bytes) -> None:
        """Append the text of a token event, or give up keeping it."""
        assert self.text is not None
        mark, end_mark = _CHAT_TEXT, b"}"
        begin = event.find(mark)
        if begin < 0:
            mark, end_mark = _COMPLETION_TEXT, b","
            begin = event.find(mark)
        if begin >= 0:
            begin += len(mark)
            end = event.find(b'"', begin)
            piece = event[begin:end]
            if b"\\" not in piece and event.startswith(end_mark, end + 1):
                self.text.append(piece.decode("utf-8", "replace"))
                return
        message = _parsed(event)
        if message is None:
            self.text = None
            return
        for choice in _choices(message):
            self._keep_choice(choice)

    def _keep_choice(self, choice: dict[str, Any]) -> None:
        words = _words(choice)
        if self.text is None or words is None:
            self.text = None
        else:
            self.text.append(words)


def _words(choice: dict[str, Any]) -> str | None:
    """Return the text of a choice; None if it says something that text cannot carry."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        text = delta.get("content") or ""
        more = any(value for name, value in delta.items() if name not in ("role", "content"))
    else:
        text, more = choice.get("text"), False
    return None if more or not isinstance(text, str) else text


def _parsed(event: bytes) -> dict[str, Any] | None:
    """Return the object that an event carries, if it carries one."""
    try:
        message = json.loads(event_data(event))
    except (ValueError, RecursionError):
        return None  # [DONE], a comment, a heartbeat.
    return message if isinstance(message, dict) else None


def _choices(message: dict[str, Any]) -> list[dict[str, Any]]:
    choices = message.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, dict)]


def _opens(choice: dict[str, Any]) -> bool:
    """Return whether an event only says whose turn it is."""
    delta = choice.get("delta")
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason"):
        return False
    return not any(value for name, value in delta.items() if name != "role")


def _broken(fault: WireFault, message: str) -> WireError:
    return WireError(fault, message, sent=True, answered=True)

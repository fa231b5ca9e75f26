"""Relays one engine's stream to the client: engine events in, client bytes out.

The hot path. Events go to the client as soon as they are complete; an event that is still in pieces
waits, so that whatever happens next the client has only whole events. What an event means is the
reader's to say (`openai/completion_stream.py`, `openai/named_events.py`).
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

from msgspec import Struct

from balanceroute.proxy.live.openai.answer import is_encoded
from balanceroute.proxy.live.openai.errors import error_in
from balanceroute.proxy.live.openai.stream_reader import DONE, StreamReader, decoded
from balanceroute.proxy.live.request.client_answer import Emitted
from balanceroute.proxy.wire.http1.pump import EventForm, Lent, Passed
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault, first_value
from balanceroute.proxy.wire.sse import EventScanner, event_data

# A leg whose answer is taken as a whole: prefills, answers that are not streamed, plain requests.


class BufferedLeg(Struct, eq=False):
    """Collects one response; see `ResponseHandler`."""

    answered: Callable[[int, Headers, bytes], None]  # Called with a complete response.
    # Called once with a failure. If the response is past the limit, that is before its end, which
    # may never come: the callee aborts the exchange.
    broken: Callable[[WireError], None]
    max_bytes: int  # The most bytes of a body.
    began: Callable[[], None] | None = None  # Called when the response begins.
    _status: int = 0
    _headers: Headers = []
    _size: int = 0
    _pieces: list[bytes] = []

    def on_head(self, status: int, headers: Headers) -> None:
        if self.began is not None:
            self.began()
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        size = self._size = self._size + len(data)
        if size <= self.max_bytes:
            self._pieces.append(data)
            return
        if size - len(data) > self.max_bytes:
            return  # `broken` was called, and has not ended the exchange yet.
        self._pieces.clear()
        message = f"the answer is longer than {self.max_bytes} bytes"
        self.broken(WireError(WireFault.TOO_LARGE, message, sent=True, answered=True))

    def on_end(self) -> None:
        if self._size <= self.max_bytes:
            self.answered(self._status, self._headers, b"".join(self._pieces))

    def on_error(self, error: WireError) -> None:
        self.broken(error)


# Of an answer to a stream's request that is no stream.
_ANSWER_BYTES = 64 << 20
# What fails behind its opening, or behind what closes a part of it, does so at once.
_WAITS_S = 0.2
_CUT_SHORT = "the answer is cut short"
# A stream is lent to the pump when it has waited so long before each of so many arrivals in a row, none of
# which brought more events than a busy process gathers: to lend it and get it back costs as much as to pass
# a dozen events on.
_WAIT_S, _WAITS, _MOST_EVENTS = 0.002, 3, 4
# Of those that came back with fewer events than this so many times, none is lent again.
_WORTH_EVENTS, _MOST_IN_VAIN = 32, 3


class StreamEvents(Protocol):
    """Events of the stream. All but `stream_started` and `stream_remarked` end it."""

    def decode_refused(self, status: int, headers: Headers, body: bytes) -> None:
        """The engine answered, but not with a stream."""

    def stream_started(self, status: int, headers: Headers) -> None:
        """The first event came and goes to the client: open the client's stream."""

    def stream_remarked(self, headers: Headers, event: bytes) -> None:
        """A comment came before the first event: it is for the client, whatever comes of the stream."""

    def stream_error_first(self, event: bytes) -> None:
        """The very first event is an error; nothing was sent to the client."""

    def stream_recomputed(self) -> None:
        """The rank hands the request back; nothing of this event was sent."""

    def stream_aborted(self) -> None:
        """The engine gave the answer up; nothing of this event was sent."""

    def stream_unreadable(self, reason: str) -> None:
        """The engine called the stream done, and it is no whole answer; nothing of that event was sent."""

    def stream_ended(self) -> None:
        """The engine ended the stream as it should."""

    def stream_error(self, message: str, *, cut: bool = False) -> None:
        """The engine sent an error event, which was forwarded, and ended; `cut`: not in order."""

    def stream_broken(self, error: WireError) -> None:
        """The stream broke off before its end."""

    def stream_cut(self, error: WireError) -> None:
        """The stream broke off behind the answer; what it lacked has been written."""

    def stream_waits(self, form: EventForm) -> Lent | None:
        """The engine waits between ordinary events of this form: return what moves them now, None if nothing else does.

        Only called of a `Relay` that `lends`.
        """

    def stream_back(self, lent: Lent) -> None:
        """They come here again."""


class Relay:
    """Receives one engine stream; see `LineHandler`.

    Args:
        reply: The client's answer.
        reader: Says what each event means.
        observe_gap: Called with the seconds between two arrivals of events.
        resumes: Whether the client's stream began on an earlier binding.
        emitted: What earlier bindings emitted.
        lends: Whether the native pump may move its ordinary events.

    Attributes:
        started: Whether anything of this leg went to the client, or came that it has.
        second_s: When the answer's second token came; None before, and if it came on an earlier one.
        last_s: When events with data came last. Comments keep connections alive while an engine has
            nothing to say, and its server sends them whatever has become of the engine.
        gap_max_s: The longest gap between two arrivals of events with data, in seconds, and to the
            last of an earlier binding.
        resumed_s: When the client's last pause ended while the pump moved the events; 0.0 for none.
        silent_since_s: When earlier bindings brought something last, until something comes that the client does not have; then None.
    """

    __slots__ = (
        "_before",
        "_clock",
        "_feed",
        "_headers",
        "_in_vain",
        "_lends_from_s",
        "_lent",
        "_observe_gap",
        "_over",
        "_owner",
        "_plain",
        "_resumes",
        "_scanner",
        "_status",
        "_take_token",
        "_waits",
        "_whole",
        "_write",
        "gap_max_s",
        "last_s",
        "reader",
        "resumed_s",
        "second_s",
        "silent_since_s",
        "started",
        "takes_lines",
    )

    def __init__(
        self,
        owner: StreamEvents,
        reply: Reply,
        reader: StreamReader,
        clock: Callable[[], float],
        *,
        observe_gap: Callable[[float], None],
        resumes: bool,
        emitted: Emitted,
        lends: bool = False,
    ) -> None:
        self._before = emitted.tokens
        self.silent_since_s = emitted.last_sent_s
        self._owner = owner
        self._write = reply.write
        self._clock = clock
        self._observe_gap = observe_gap
        self._resumes = resumes
        self._status = 0
        self._headers: Headers = []
        self._whole: BufferedLeg | None = None  # Takes an answer that is no stream.
        self._scanner = EventScanner()
        self._feed = self._scanner.feed
        self._take_token = reader.take_token
        self._plain = False  # Only token events are expected from here on.
        self._over = False
        self.takes_lines = False
        self.reader = reader
        self.second_s: float | None = None
        self.started = False
        self.last_s = clock()
        self.gap_max_s = self.resumed_s = 0.0
        self._lends_from_s = _WAIT_S if lends else inf
        self._waits = self._in_vain = 0
        self._lent: Lent | None = None

    def read_tokens(self) -> int:
        return self.reader.read_tokens() if self._lent is None else self._lent.tokens

    def count_tokens(self) -> int:
        """Return the tokens of this leg, by the best count there is."""
        counted = self.reader.usage_tokens
        return self.reader.read_tokens() if counted is None else counted

    def catch_up(self) -> None:
        """Note what the pump has moved. A client that reads too slowly for it is served here again."""
        lent = self._lent
        if lent is not None:
            lent.catch_up()
            if lent.paused:
                lent.stop()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        kind = first_value(headers, b"content-type") or b""
        if status != 200 or not kind.lower().startswith(b"text/event-stream"):
            self._whole = BufferedLeg(self._answered, self._owner.stream_broken, _ANSWER_BYTES)
            self._whole.on_head(status, headers)
        elif is_encoded(headers):
            self._break_off(_broken(WireFault.PROTOCOL, "the stream is compressed"))

    def on_line(self, line: bytes) -> None:
        """Take an event of one line, without the blank line behind it; see `LineHandler`."""
        passed = self._take_token(line)
        if not passed:
            self.on_lines([line])
            return
        # As `_progressed`, without a call: nearly every event comes here.
        now_s = self._clock()
        gap_s = now_s - self.last_s
        self.last_s = now_s
        self._observe_gap(gap_s)
        if gap_s > self.gap_max_s:  # noqa: PLR1730 - as there.
            self.gap_max_s = gap_s
        self._write(passed)
        if gap_s >= self._lends_from_s:
            self._lend()

    def on_lines(self, lines: list[bytes]) -> None:
        """Take several such events that came together."""
        passed: list[bytes] = []
        for line in lines:
            kept = self._take_token(line)
            if not kept:
                self._read([one + b"\n\n" for one in lines[len(passed) :]], passed)
                self.takes_lines = self._plain
                return
            passed.append(kept)
        now_s = self._clock()
        gap_s = now_s - self.last_s
        self._progressed(now_s)
        self._write(b"".join(passed))
        if len(lines) > _MOST_EVENTS:
            self._waits = 0
        elif gap_s >= self._lends_from_s and not self._scanner.tail:
            self._lend()

    def call_back(self) -> None:
        """Have all that follows come here again."""
        if self._lent is not None:
            self._lent.stop()

    def _lend(self) -> None:
        """Have the pump move the next events, once the engine has waited a few times."""
        self._waits += 1
        if self._waits < _WAITS:
            return
        form = self.reader.form
        if form is not None:
            self._lent = self._owner.stream_waits(form)
        if self._lent is None:
            self._was_in_vain()

    def _was_in_vain(self) -> None:
        self._waits = 0
        self._in_vain += 1
        if self._in_vain >= _MOST_IN_VAIN:
            self._lends_from_s = inf

    def came_back(self, passed: Passed) -> None:
        """Go on where the pump has left off; see `LentStream`."""
        lent, self._lent = self._lent, None
        self.reader.take_passed(passed)
        self.last_s = min(self.last_s, self._clock())  # The pump's is finer.
        self._waits = 0
        if passed.events < _WORTH_EVENTS:
            self._was_in_vain()
        if lent is not None:
            self._owner.stream_back(lent)

    def on_data(self, data: bytes) -> None:
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
        lines = [one[:-2] for one in events if one[-2:] == b"\n\n"] if self._plain else []
        if lines and len(lines) == len(events):
            self.on_lines(lines)
        elif events:
            self._read(events, [])
        self.takes_lines = self._plain and not self._scanner.tail

    def release(self, now_s: float) -> None:
        """Send on events that wait for the next one, if none has come for a while."""
        if self.reader.waits and not self._over and now_s >= self.last_s + _WAITS_S:
            waited = self.reader.release()
            if waited:
                self._send(waited)

    def on_end(self) -> None:
        if self._scanner.tail and not self._over and self._whole is None:
            self._read_rest()
        if self._over:
            return
        if bytes(self._scanner.tail).strip()[:1] not in (b"", b":") and not self.reader.done:
            self._break_off(_broken(WireFault.RESET, _CUT_SHORT))
            return
        self._flush()
        self._over = True
        if self._whole is not None:
            self._whole.on_end()
        elif self.reader.handed_back:
            self._owner.stream_recomputed()
        elif self.reader.error:
            self._owner.stream_error(self.reader.error)
        elif self.reader.complete:
            self._owner.stream_ended()
        else:
            # The HTTP message is whole, but the answer is not: never a silent short end.
            self._owner.stream_broken(_broken(WireFault.RESET, _CUT_SHORT))

    def on_error(self, error: WireError) -> None:
        if not self._over:
            self._break_off(error)

    def _break_off(self, error: WireError) -> None:
        if self.started:
            self._read_rest()
            if self._over:
                return
            self._flush()
        if self.complete():
            self._owner.stream_cut(error)
            return
        self._over = True
        self._plain = self.takes_lines = False
        if self.reader.handed_back:
            self._owner.stream_recomputed()
        elif self.reader.error:
            self._owner.stream_error(self.reader.error, cut=True)
        else:
            self._owner.stream_broken(error)

    def complete(self) -> bool:
        """Write what the stream lacks, if all of the answer has come; return whether it has."""
        self.call_back()
        lacking = self.reader.ending() if self.started and not self._over else None
        if lacking is None:
            return False
        self._flush()
        self._over = True
        self._plain = self.takes_lines = False
        if lacking:
            self._write(lacking)
        return True

    def _read_rest(self) -> None:
        """Read the data behind the last blank line, if only a blank line is missing at its end.

        Browsers leave such an event out, and so do OpenAI's clients; those that read line by line take it.
        With its blank line all take it. Data with only a part of an object is no event.
        """
        events = self._scanner.end()
        rest = self._scanner.rest()
        data = event_data(rest)
        if data and (data == DONE or decoded(data) is not None):
            self._scanner.tail.clear()
            events.append(rest)
        if events:
            self._read(events, [])

    def _answered(self, status: int, headers: Headers, body: bytes) -> None:
        if status == 200 and self._resumes and error_in(body) is None:
            # The client has the beginning of a stream, which this cannot go on with.
            self._owner.stream_broken(_broken(WireFault.PROTOCOL, "the answer is no stream"))
        else:
            self._owner.decode_refused(status, headers, body)

    def _progressed(self, now_s: float) -> None:
        """Note that events with data came."""
        gap_s = now_s - self.last_s
        self.last_s = now_s
        self._observe_gap(gap_s)
        if gap_s > self.gap_max_s:  # noqa: PLR1730 - max() costs five times as much.
            self.gap_max_s = gap_s

    def _read(self, events: list[bytes], passed: list[bytes]) -> None:
        """Have each event read, and send on those that are the client's, behind `passed`."""
        now_s, reader = self._clock(), self.reader
        if not self.started:
            events = self._pass_remarks(events)
        if passed or any(map(reader.is_progress, events)):
            if self.started:
                self._progressed(now_s)
            self.last_s = now_s
        for event in events:
            kept = reader.read(event)
            if reader.over:
                break
            reader.compare(event)
            if kept:
                passed.append(kept)
        self._over = reader.over
        if (reader.aborted or reader.cut_short) and not self.started:
            passed.clear()  # Whose turn it is, for example: vLLM says that with whatever comes first.
        if self.second_s is None and self._before + reader.read_tokens() > 1:
            self.second_s = now_s
        self._plain = reader.plain and self.second_s is not None and reader.comparison is None
        if passed:
            self._send(b"".join(passed))
        elif reader.repeating and not (self.started or self._over):
            self._start()
        if self._over:
            self._report_end()

    def _report_end(self) -> None:
        """Report why nothing that follows matters."""
        reader = self.reader
        if reader.handed_back:
            self._owner.stream_recomputed()
        elif reader.aborted:
            self._owner.stream_aborted()
        elif reader.cut_short:
            self._owner.stream_unreadable(_CUT_SHORT)
        else:
            self._owner.stream_error_first(reader.first_error)

    def _pass_remarks(self, events: list[bytes]) -> list[bytes]:
        """Pass on comments before the answer; return the rest."""
        for place, event in enumerate(events):
            if not self.reader.is_remark(event):
                return events[place:]
            self._owner.stream_remarked(self._headers, event)
        return []

    def _send(self, data: bytes) -> None:
        if not self.started:
            self._start()
        if self.silent_since_s is not None:
            self.gap_max_s = max(self.gap_max_s, self.last_s - self.silent_since_s)
            self.silent_since_s = None
        self._write(data)

    def _start(self) -> None:
        self.started = True
        self._owner.stream_started(self._status, self._headers)

    def _flush(self) -> None:
        held = self.reader.flush()
        if held:
            self._send(held)


def _broken(fault: WireFault, message: str) -> WireError:
    return WireError(fault, message, sent=True, answered=True)

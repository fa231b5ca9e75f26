"""One client connection of HTTP/3: a stream for each request, as many at a time as the limit allows.

It is one of the connections of an HTTP/1.1 server's `Service`: limits, deadlines, keys, the body budget
and the drain are the same, and so is the application.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from aioquic.h3.connection import ErrorCode, FrameType, StreamType
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived, WebTransportStreamDataReceived
from aioquic.quic.connection import stream_is_unidirectional
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.service import Loss, Service, loss_of_head
from balanceroute.proxy.wire.http3.framing import Framing, MalformedMessage
from balanceroute.proxy.wire.messages import Headers, Rejection, bracketed
from balanceroute.proxy.wire.quic.connection import Carrier, NetworkAddress
from balanceroute.proxy.wire.quic.stream_orders import StreamPriority
from balanceroute.proxy.wire.streams import LeakyBucket, ServerStream

if TYPE_CHECKING:
    import asyncio


# What a client says on its control stream beyond what aioquic reads: priorities (RFC 9218 section
# 7.2).
#
# It also keeps frames short that are read as a whole.

_PRIORITY_UPDATE = 0xF0700
# Of a frame that is read as a whole.
_MOST_BYTES = 4096
_WHOLE = frozenset({FrameType.SETTINGS, FrameType.MAX_PUSH_ID, _PRIORITY_UPDATE})


class ControlError(BalanceRouteError):
    """A fault that ends a connection, with HTTP/3's code for it."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ControlFrames:
    """Reads the control stream of one connection."""

    def __init__(self) -> None:
        self._control: int | None = None
        self._ignored: set[int] = set()
        # The first bytes of streams whose type is not known yet.
        self._begun: dict[int, bytes] = {}
        self._buffer = b""
        self._skip = 0

    def feed(self, event: StreamDataReceived) -> list[tuple[int, bytes]]:
        """Read the bytes of a stream; return the streams and the values of new priorities.

        Raises:
            ControlError: A frame is too long or malformed.
        """
        number, data = event.stream_id, event.data
        if not stream_is_unidirectional(number) or number in self._ignored:
            if event.end_stream:
                self._ignored.discard(number)
            return []
        if number != self._control:
            data = self._begun.pop(number, b"") + data
            kind = _varint(data)
            if kind is None:
                if not event.end_stream:
                    self._begun[number] = data
                return []
            if kind[0] != StreamType.CONTROL or self._control is not None:
                if not event.end_stream:
                    self._ignored.add(number)
                return []
            self._control, data = number, data[kind[1] :]
        return self._frames(data)

    def forget(self, number: int) -> None:
        self._ignored.discard(number)
        self._begun.pop(number, None)

    def _frames(self, data: bytes) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = self._buffer + data[skipped:]
        while (kind := _varint(data)) is not None:
            length = _varint(data[kind[1] :])
            if length is None:
                break
            begin = kind[1] + length[1]
            end = begin + length[0]
            if kind[0] not in _WHOLE:
                self._skip = max(0, end - len(data))
                data = data[end:]
                continue
            if length[0] > _MOST_BYTES:
                raise ControlError(ErrorCode.H3_EXCESSIVE_LOAD, "a control frame is too long")
            if end > len(data):
                break
            if kind[0] == _PRIORITY_UPDATE:
                found.append(_priority(data[begin:end]))
            data = data[end:]
        self._buffer = data
        return found


def _varint(data: bytes) -> tuple[int, int] | None:
    """Return the number at the beginning, and how many bytes it has; None if it is not complete."""
    if not data:
        return None
    size = 1 << (data[0] >> 6)  # RFC 9000 section 16.
    if len(data) < size:
        return None
    return int.from_bytes(data[:size]) & ((1 << (8 * size - 2)) - 1), size


def _priority(payload: bytes) -> tuple[int, bytes]:
    element = _varint(payload)
    if element is None:
        raise ControlError(ErrorCode.H3_FRAME_ERROR, "a PRIORITY_UPDATE names no stream")
    if element[0] % 4:
        raise ControlError(ErrorCode.H3_ID_ERROR, "a PRIORITY_UPDATE names no request")
    return element[0], payload[element[1] :]


# Which of a client's requests have come: a stream may overtake another one on its way.


class StreamNumbers:
    """The numbers of a client's requests: 0, 4, 8, .."""

    __slots__ = ("_overtaken", "end")

    def __init__(self) -> None:
        self.end = 0  # The first one above all that came.
        self._overtaken: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether all below `end` came."""
        return not self._overtaken

    def is_to_come(self, number: int) -> bool:
        return number >= self.end or number in self._overtaken

    def come(self, number: int) -> bool:
        """Note that a stream came; return whether it is the first time."""
        if number >= self.end:
            # No more than may be open at a time: the connection sees to that.
            self._overtaken.update(range(self.end, number, 4))
            self.end = number + 4
            return True
        if number in self._overtaken:
            self._overtaken.discard(number)
            return True
        return False


# For so long at most a connection without a place stays open to answer with its rejection.
_LINGER_S = 2.0
# For so long a connection that lost its place waits until the client has its GOAWAY: the close may overtake
# it, and a client that does not know which requests have begun repeats none. Handshakes cost so much that
# few connections wait at a time, however often clients connect.
_LEAVE_S = 0.25
# Of the shorter idle timeout: how long both sides are silent while an answer is awaited.
_SILENT_SHARE = 3
# Requests that a client may give up at once, and for ever a second.
_CANCELLED_BURST, _CANCELLED_PER_S = 400, 50.0


class OrderCounts:
    """The effect of the order of streams, over all connections. Counters are since start.

    Attributes:
        requests: By the level of the request: `raised`, `usual` or `lowered`.
        kept: Answers with a deadline that had arrived by then.
        missed: Those that had not, or were broken off.
    """

    def __init__(self) -> None:
        self.requests = {"raised": 0, "usual": 0, "lowered": 0}
        self.kept = self.missed = 0

    def began(self, level: int) -> None:
        self.requests["raised" if level > 0 else "lowered" if level < 0 else "usual"] += 1

    def ended(self, *, kept: bool) -> None:
        self.kept += kept
        self.missed += not kept


@dataclass(frozen=True, slots=True)
class Priorities:
    # Returns the priority of a request by its headers and the present time.
    priority: Callable[[Headers, float], StreamPriority]
    level: Callable[[bytes], int]  # Returns the level in the value of a Priority field.
    hard: bool = False  # A stream whose deadline passes before its answer has been sent is reset.
    counts: OrderCounts = field(default_factory=OrderCounts)


class Http3ServerConnection:
    """One connection of a client; see `SweptConnection`, `StreamOwner` and `Carried`."""

    def __init__(
        self, service: Service, carrier: Carrier, address: NetworkAddress, priorities: Priorities
    ) -> None:
        self.service = service
        self.peer = f"{bracketed(address[0])}:{address[1]}"
        self.rejection: Rejection | None = None
        self.deadline_s = inf
        self._host: str = address[0]
        self._carrier = carrier
        self._quic = carrier.quic
        self._priorities = priorities
        self._framing: Framing
        self._control = ControlFrames()
        self._streams: dict[int, ServerStream] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._due_s: dict[int, float] = {}  # When answers are due that have a deadline.
        self._early_levels: dict[int, int] = {}
        self._cancelled = LeakyBucket(_CANCELLED_BURST, _CANCELLED_PER_S, service.loop.time)
        self._numbers = StreamNumbers()
        self._turned_away: int | None = None  # The first stream that the GOAWAY refuses.
        self._leaving: tuple[ErrorCode, str] | None = None  # With which it closes, without a place.
        self._last_s = 0.0  # Until when one more request is waited for then.
        self._is_counted = self._is_served = False
        self._early: list[QuicEvent] | None = None  # Those that came before it had a place.
        self._idle_since_s = service.loop.time()

    # What happens.

    def on_event(self, event: QuicEvent) -> None:
        match event:
            case HandshakeCompleted():
                self._begin()
            case ConnectionTerminated():
                self._leaving = None
                self._gone()
            case _ if self._early is not None:
                self._early.append(event)
            case StreamDataReceived():
                self._on_data(event)
            case StreamReset() | StopSendingReceived():
                self._framing.handle_event(event)
                if stream_is_unidirectional(event.stream_id):
                    self._control.forget(event.stream_id)
                else:
                    self._on_cancel(event.stream_id)
            case _:
                pass

    def on_progress(self) -> None:
        for stream in [one for one in self._streams.values() if one.paused or one.has_left]:
            stream.resume()
            if stream.has_left:
                self._settle(stream)
        if self._leaving is not None:
            if self._knows:
                self._close(*self._leaving)
        elif self._turned_away is not None and self._is_counted:
            self._close_if_done()

    def _begin(self) -> None:
        service = self.service
        self._framing = Framing(self._quic, head_limit_bytes=service.limits.header_limit_bytes)
        self._idle_since_s = service.loop.time()
        self.deadline_s = self._idle_since_s + service.limits.header_timeout_s
        self._is_counted = True
        self._early = []
        service.add(self, self._host)

    def placed(self, *, is_served: bool) -> None:
        self._is_served = is_served
        if not is_served:
            self.rejection = self.service.limit.rejection(self)
            self.deadline_s = self._idle_since_s + _LINGER_S
            if self.rejection is None:
                self._leave(ErrorCode.H3_EXCESSIVE_LOAD, "too many connections")
        elif self.service.stopping:
            self.end(0.0)
        early, self._early = self._early or (), None
        for event in early:
            self.on_event(event)
        if early:
            self._carrier.send_soon()

    def _on_data(self, event: StreamDataReceived) -> None:
        if not self._is_counted:
            return
        number = event.stream_id
        if stream_is_unidirectional(number):
            self._on_control(event)
            self._framing.handle_event(event)
            return
        stream = self._streams.get(number)
        if stream is None:
            stream = self._open(number)
        if stream is None or not stream.reads:
            return
        for one in self._framing.handle_event(event):
            self._on_message(stream, one)
        stream.check_head(len(event.data))
        if event.end_stream and stream.reads:
            stream.lose()  # It ended before it was a request.

    def _on_message(self, stream: ServerStream, event: H3Event) -> None:
        match event:
            case HeadersReceived():
                stream.on_head(event.headers, ended=event.stream_ended)
            case DataReceived():
                stream.on_data(event.data, ended=event.stream_ended)
            case MalformedMessage():
                if stream.reads:
                    stream.refuse(Rejection(400, f"the request is malformed: {event.reason}"))
            case WebTransportStreamDataReceived():
                self._close(ErrorCode.H3_FRAME_UNEXPECTED, "no WebTransport is spoken")
            case _:
                pass

    def _on_control(self, event: StreamDataReceived) -> None:
        try:
            for number, value in self._control.feed(event):
                self._prioritise(number, self._priorities.level(value))
        except ControlError as error:
            self._close(error.code, str(error))

    def _prioritise(self, number: int, level: int) -> None:
        if number // 4 >= self._quic.stream_limit:
            raise ControlError(ErrorCode.H3_ID_ERROR, "a PRIORITY_UPDATE is for no request")
        if number in self._streams:
            self._quic.prioritise(number, self._quic.priority(number)._replace(level=level))
        elif self._numbers.is_to_come(number):  # The request may be behind it.
            self._early_levels[number] = level

    def _open(self, number: int) -> ServerStream | None:
        if not self._numbers.come(number):
            return None
        if self._turned_away is not None and number >= self._turned_away:
            self.refuse_rest(number)
            self._quic.reset_stream(number, ErrorCode.H3_REQUEST_REJECTED)
            return None
        stream = self._streams[number] = ServerStream(self, number)
        check_s = self.service.loop.time() + self._check_s
        self.deadline_s = min(self.deadline_s, stream.deadline_s, check_s)
        return stream

    def _on_cancel(self, number: int) -> None:
        stream = self._streams.get(number)
        is_open = self._numbers.come(number) if stream is None else not stream.has_left
        self._early_levels.pop(number, None)
        if is_open and not self._cancelled.take():
            self._close(ErrorCode.H3_EXCESSIVE_LOAD, "too many requests were given up")
        elif stream is not None:
            self._due_s.pop(number, None)  # The client wants no answer any more.
            self._quic.reset_stream(number, ErrorCode.H3_REQUEST_CANCELLED)
            stream.lose()

    # Called by the streams.

    def began(self, stream: ServerStream, head: RequestHead) -> None:
        number, now_s = stream.number, self.service.loop.time()
        priority = self._priorities.priority(head.headers, now_s)
        level = self._early_levels.pop(number, None)
        if level is not None:
            priority = priority._replace(level=level)
        self._quic.prioritise(number, priority)
        self._priorities.counts.began(priority.level)
        if priority.deadline_s == inf:
            return
        self._due_s[number] = priority.deadline_s
        if self._priorities.hard:
            call_at = self.service.loop.call_at
            self._timers[number] = call_at(priority.deadline_s, self._run_out, stream)

    def send_head(self, stream_id: int, fields: Headers, *, end: bool) -> None:
        self._framing.send_headers(stream_id, fields, end_stream=end)
        self._carrier.send_soon()

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> None:
        self._framing.send_data(stream_id, data, end_stream=end)
        self._carrier.send_soon()

    def refuse_rest(self, stream_id: int) -> None:
        self._framing.abandon(stream_id)
        self._quic.refuse_data(stream_id, ErrorCode.H3_NO_ERROR)
        self._carrier.send_soon()

    def reset(self, stream_id: int) -> None:
        self._end(stream_id, kept=False)
        self._quic.reset_stream(stream_id, ErrorCode.H3_INTERNAL_ERROR)
        self._carrier.send_soon()

    def unsent(self, stream_id: int) -> int:
        return self._quic.unsent(stream_id)

    def unacknowledged(self, stream_id: int) -> int:
        return self._quic.unacknowledged(stream_id)

    def left(self, stream: ServerStream) -> None:
        self._carrier.send_soon()

    # Called by the server.

    @property
    def _check_s(self) -> float:
        """How often to look at the streams: their deadlines change with what they wait for."""
        return self.service.limits.write_timeout_s / 4

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        """See `Evictable`: by the largest loss among its streams."""
        if not self._is_counted:
            return None
        if self._streams:
            found = [stream.gives_way(now_s) for stream in self._streams.values()]
            known = [one for one in found if one is not None]
            return max(known) if len(known) == len(found) else None
        if self._numbers.end:
            return Loss.IDLE, self._idle_since_s
        return loss_of_head(self._idle_since_s, now_s, begun=False)

    def evict(self) -> bool:
        if self.gives_way(self.service.loop.time()) is None:
            return False
        if self._streams:
            self._leave(ErrorCode.H3_EXCESSIVE_LOAD, "too many connections")
        else:
            self._leave(ErrorCode.H3_NO_ERROR, "")
        return True

    def end(self, idle_s: float) -> None:
        if self._turned_away is None:
            self._turn_away(self._numbers.end)
        if not self._numbers.complete:
            idle_s = max(idle_s, _LINGER_S)
        if idle_s:
            self._last_s = self.service.loop.time() + idle_s
            self.deadline_s = min(self.deadline_s, self._last_s)
        self._carrier.send_soon()
        self._close_if_done()

    def drop(self) -> None:
        """Abort now; the replies are closed."""
        self._close(ErrorCode.H3_INTERNAL_ERROR, "the server ends")

    def expire(self, now_s: float) -> None:
        for stream in list(self._streams.values()):
            if stream.deadline_s <= now_s and stream.expire(now_s):
                self._quic.reset_stream(stream.number, ErrorCode.H3_REQUEST_CANCELLED)
                stream.lose()
        if not self._is_counted:
            return
        if not self._streams:
            limit_s = self.service.limits.keep_alive_timeout_s
            if not self._numbers.end:
                limit_s = min(limit_s, self.service.limits.header_timeout_s)
            self.deadline_s = self._idle_since_s + (limit_s if self._is_served else _LINGER_S)
            if self._turned_away is not None:
                self.deadline_s = min(self.deadline_s, self._last_s)
            if self.deadline_s <= now_s:
                self._leave(ErrorCode.H3_NO_ERROR, "")
            return
        silent_s = self._quic.idle_timeout_s / _SILENT_SHARE
        if now_s - self._carrier.received_s >= silent_s:
            self._quic.send_ping(0)
        self.deadline_s = min(
            now_s + min(silent_s, self._check_s),
            *(one.deadline_s for one in self._streams.values()),
        )
        self._carrier.send_soon()

    # Ends.

    def _close_if_done(self) -> None:
        """Close a connection that is to end, behind its last answer."""
        if not self._streams and self.service.loop.time() >= self._last_s:
            self._close(ErrorCode.H3_NO_ERROR, "")

    def _run_out(self, stream: ServerStream) -> None:
        """End a stream whose deadline has passed, unless all of its answer was sent."""
        if stream.has_left and not self._quic.unsent(stream.number):
            return
        self._end(stream.number, kept=False)
        self._quic.reset_stream(stream.number, ErrorCode.H3_REQUEST_CANCELLED)
        self.refuse_rest(stream.number)
        stream.lose()

    def _settle(self, stream: ServerStream) -> None:
        """Forget a stream whose exchange has ended once all of it has arrived."""
        number = stream.number
        if stream.cut_when_sent and not self._quic.unacknowledged(number):
            stream.cut_when_sent = False
            self.reset(number)
        if not self._quic.is_sent(number):
            return
        self._streams.pop(number, None)
        self._early_levels.pop(number, None)  # Of a request that was refused.
        self._end(number, kept=self.service.loop.time() <= self._due_s.get(number, inf))
        timer = self._timers.pop(number, None)
        if timer is not None:
            timer.cancel()
        self._quic.drop_priority(number)
        self._framing.release(number)
        if not self._streams:
            self._idle_since_s = self.service.loop.time()
            self.deadline_s = self._idle_since_s + self.service.limits.keep_alive_timeout_s
            if not self._is_served:
                self._leave(ErrorCode.H3_EXCESSIVE_LOAD, "too many connections")

    def _end(self, number: int, *, kept: bool) -> None:
        """Count the end of an answer that had a deadline, once."""
        if self._due_s.pop(number, None) is not None:
            self._priorities.counts.ended(kept=kept)

    def _turn_away(self, number: int) -> None:
        """Tell the client that this stream and those behind it will not be served."""
        self._turned_away = number
        self._framing.send_goaway(number)

    def _leave(self, code: ErrorCode, reason: str) -> None:
        """Give the place up at once, and close once the client knows which requests it may repeat.

        It may repeat requests that have not begun (RFC 9114 sections 4.1.1 and 5.2): those that have not come
        whole, and all behind the last one that has.
        """
        begun = self._numbers.end
        while begun and (begun - 4 in self._streams or self._numbers.is_to_come(begun - 4)):
            begun -= 4
        for number in self._streams:
            self._quic.refuse_data(number, ErrorCode.H3_REQUEST_REJECTED)
            self._quic.reset_stream(number, ErrorCode.H3_REQUEST_REJECTED)
        if self._turned_away is None or begun < self._turned_away:
            self._turn_away(begun)
        if self._knows or self.service.stopping:
            self._close(code, reason)
            return
        self._gone()
        self._leaving = code, reason
        self.service.loop.call_later(_LEAVE_S, self._have_left)
        self._carrier.send_soon()

    @property
    def _knows(self) -> bool:
        """Whether the client has all that was said to it about the connection."""
        return not self._quic.unacknowledged(self._framing.control_stream)

    def _have_left(self) -> None:
        if self._leaving is not None:
            self._close(*self._leaving)

    def _close(self, code: ErrorCode, reason: str) -> None:
        self._leaving = None
        self._quic.close(error_code=code, reason_phrase=reason)
        self._carrier.send_soon()
        self._gone()

    def _gone(self) -> None:
        if not self._is_counted:
            return
        self._is_counted = False
        for stream in list(self._streams.values()):
            stream.lose()
        self._streams.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.service.remove(self, served=self._is_served)

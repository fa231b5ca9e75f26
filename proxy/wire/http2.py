"""HTTP/2 on the port of HTTP/1.1: for clients that begin with it (over http), or agree on it (over https).

Needs the extra `h2`, whose library has the frames, the header compression and the windows. A connection is
one of the HTTP/1.1 server's `Service`: limits, deadlines, keys, the body budget and the drain are the same,
and so is the application. What a client can make the server do or keep is bounded:

- Requests at a time, by SETTINGS; the server refuses more, as a client may send them before it knows.
- Heads, by the limits of heads; one of four times as much ends the connection.
- Bodies, by their budget: the server opens a window again as it takes the bytes in.
- Answers that the client does not read, by the write buffer of each: the proxy then pauses the engine.
- Requests that the client gives up, and frames that move nothing (PING, SETTINGS, PRIORITY, empty DATA,
  ..), by buckets. Each sent DATA frame allows for two WINDOW_UPDATEs.
- Bytes that the socket does not take: the server then reads nothing more.
"""

import asyncio
from contextlib import suppress
from math import inf
from typing import Any, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.http1.service import Loss, Service, SweptConnection, loss_of_head
from balanceroute.proxy.wire.messages import Headers, MalformedError, Rejection, bracketed
from balanceroute.proxy.wire.streams import LeakyBucket, ServerStream
from balanceroute.proxy.wire.turn_writes import TurnTransport

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# How many bytes of bodies a client may be ahead of the server, in one request and in all of a connection.
_STREAM_BYTES, _CONNECTION_BYTES = 256 << 10, 1 << 20
# Until the window of the connection was opened further.
_FIRST_WINDOW = 65_535
# Of what is read, looked at before the counts of what it held are.
_SLICE_BYTES = 4_096
# A frame with its head, as nothing larger is allowed.
_FRAME_BYTES = 16_384 + 9
# Requests that a client may give up at once, and for ever a second; likewise frames that move nothing.
_CANCELLED_BURST, _CANCELLED_PER_S = 400, 50.0
_IDLE_BURST, _IDLE_PER_S = 1_000, 200.0
_UPDATES_PER_FRAME = 2.0
_LINGER_S = 2.0
_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path", b":protocol"})
_OF_HTTP_1 = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


class Frames(H2Connection):  # type: ignore[misc, unused-ignore]
    """The frames of one connection. A fault of one request is left to its stream.

    Args:
        streams: Requests at a time.
        head_limit_bytes: The largest head that is accepted.
    """

    def __init__(self, streams: int, head_limit_bytes: int) -> None:
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._allowed = streams
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: streams,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: head_limit_bytes,
                SettingCodes.ENABLE_PUSH: 0,
            },
        )
        # Beyond that a head is read to answer it; beyond this it is not.
        self.decoder.max_header_list_size = 4 * head_limit_bytes
        self._most_kept = 4 * head_limit_bytes + _FRAME_BYTES

    def keeps_too_much(self) -> bool:
        """Return whether a frame or a head that has not come whole is too long: the library waits for its end."""
        buffer = self.incoming_buffer
        parts = sum(len(one.data) for one in buffer._headers_buffer)
        return len(buffer._data) > _FRAME_BYTES or parts > self._most_kept

    @property
    def open_inbound_streams(self) -> int:
        """As the library counts them to end a connection: those that a client may not know to be too many."""
        return max(0, super().open_inbound_streams - self._allowed)

    def _begin_new_stream(self, *given: Any, **named: Any) -> Any:
        """Leave the length of a body to its stream: the library would end the connection."""
        stream = super()._begin_new_stream(*given, **named)
        stream._initialize_content_length = _no_length  # type: ignore[method-assign, unused-ignore]
        return stream

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        """Finish running requests (RFC 9113 section 6.8): the library would end them."""
        del frame
        return [], [ConnectionTerminated()]


def _no_length(headers: object) -> None:
    """Expect a body of any length."""


def checked(fields: Headers) -> Headers:
    """Return a request's field section with its :authority, once it was checked (RFC 9113 section 8).

    Raises:
        MalformedError: It is malformed.
    """
    seen: set[bytes] = set()
    ordinary = False
    for name, value in fields:
        if name.startswith(b":"):
            if ordinary or name in seen or name not in _PSEUDO:
                raise MalformedError("the request is malformed: a pseudo-header field is misplaced")
            seen.add(name)
            continue
        ordinary = True
        if name != name.lower() or name in _OF_HTTP_1:
            raise MalformedError("the request is malformed: a header field is not of HTTP/2")
        if name == b"te" and value.lower() != b"trailers":
            raise MalformedError("the request is malformed: TE is other than trailers")
    if b":authority" in seen:
        return fields
    hosts = [value for name, value in fields if name == b"host"]
    return [(b":authority", hosts[0]), *fields] if hosts else fields


class Http2ServerConnection(asyncio.Protocol):
    """One connection of a client; see `SweptConnection` and `StreamOwner`."""

    _transport: TurnTransport

    def __init__(self, service: Service, streams: int) -> None:
        self.service = service
        self.peer = ""
        self.rejection: Rejection | None = None
        self.deadline_s = inf
        clock = service.loop.time
        self._frames = Frames(streams, service.limits.header_limit_bytes)
        self._most = streams
        self._streams: dict[int, ServerStream] = {}
        # Of each, its unsent bytes, and whether these end the answer.
        self._queues: dict[int, bytearray] = {}
        self._ended: set[int] = set()
        # Streams of which the client has more to send.
        self._sending: set[int] = set()
        self._cancelled = LeakyBucket(_CANCELLED_BURST, _CANCELLED_PER_S, clock)
        self._idle_frames = LeakyBucket(_IDLE_BURST, _IDLE_PER_S, clock)
        self._updates = _IDLE_BURST * 1.0  # WINDOW_UPDATEs that the client may send.
        self._last = 0  # The highest stream that came.
        self._turned_away = False  # Whether a GOAWAY went either way.
        self._is_served = self._is_there = self._scheduled = self._paused = False
        self._idle_since_s = clock()

    # Called by the transport.

    def take_over(self, transport: asyncio.Transport, of: SweptConnection, received: bytes) -> None:
        """Begin in place of another connection, whose client sent these bytes."""
        service, self._is_there = self.service, True
        transport.set_write_buffer_limits(high=service.limits.write_buffer_bytes)
        self._transport = TurnTransport(transport, service.turn)
        address = transport.get_extra_info("peername")
        if address:
            self.peer = f"{bracketed(address[0])}:{address[1]}"
        self._frames.initiate_connection()
        self._frames.increment_flow_control_window(_CONNECTION_BYTES - _FIRST_WINDOW)
        transport.set_protocol(self)
        self.deadline_s = self._idle_since_s + service.limits.header_timeout_s
        self.placed(is_served=service.take_place(self, of))
        self.data_received(received)

    def placed(self, *, is_served: bool) -> None:
        """See `SweptConnection`."""
        self._is_served = is_served
        if not is_served:
            self.rejection = self.service.limit.rejection(self)
            self.deadline_s = self._idle_since_s + _LINGER_S
        if self.service.stopping or (not is_served and self.rejection is None):
            self._turn_away()

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _SLICE_BYTES):
            if not self._is_there:
                return
            try:
                events = self._frames.receive_data(data[begin : begin + _SLICE_BYTES])
            except ProtocolError:
                self._close()  # The library has said why.
                return
            for event in events:
                if self._is_there:
                    self._on_event(event)
            if self._frames.keeps_too_much():
                self._end_with(ErrorCodes.FRAME_SIZE_ERROR)
        self._soon()

    def eof_received(self) -> bool:
        """Close: a client that sends nothing more opens no window, either."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_there = False
        for stream in list(self._streams.values()):
            stream.lose()
        for kept in (self._streams, self._queues, self._ended, self._sending):
            kept.clear()
        self.service.remove(self, served=self._is_served)

    def pause_writing(self) -> None:
        """Read nothing more: each answer of ours would wait as well."""
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._soon()

    # What happens.

    def _on_event(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._on_request(event)
            case DataReceived():
                self._on_data(event)
            case TrailersReceived():
                number = event.stream_id
                if number in self._streams:
                    self._sending.discard(number)
                    self._streams[number].on_head([], ended=True)
            case StreamReset():
                self._on_reset(event.stream_id)
            case ConnectionTerminated():
                self._turned_away = True  # It asks for nothing more.
                self._take_idle()
                self._close_if_done()
            case StreamEnded() | SettingsAcknowledged():
                pass
            case _ if type(event).__name__ == "WindowUpdated":
                self._updates -= 1.0
                if self._updates < 0.0:
                    self._take_idle()
            case _:
                self._take_idle()

    def _on_request(self, event: RequestReceived) -> None:
        number, ended = event.stream_id, event.stream_ended is not None
        self._last = max(self._last, number)
        if self._turned_away or len(self._streams) >= self._most:
            # It was not begun, and may be repeated.
            if not self._turned_away and not self._cancelled.take():
                self._end_with(ErrorCodes.ENHANCE_YOUR_CALM)
            else:
                self._reset(number, ErrorCodes.REFUSED_STREAM)
            return
        stream = self._streams[number] = ServerStream(self, number)
        self.deadline_s = min(self.deadline_s, stream.deadline_s, self._check_s)
        if not ended:
            self._sending.add(number)
        try:
            fields = checked(cast("Headers", [*map(tuple, event.headers or ())]))
        except MalformedError as error:
            stream.refuse(error.rejection, rest=not ended)
        else:
            stream.on_head(fields, ended=ended)

    def _on_data(self, event: DataReceived) -> None:
        number, ended = event.stream_id, event.stream_ended is not None
        size = event.flow_controlled_length or 0
        if not event.data and not ended:
            self._take_idle()
        if not self._is_there:
            return
        stream = self._streams.get(number)
        if size:
            with suppress(StreamClosedError):  # The window of the connection is open again.
                self._frames.acknowledge_received_data(size, number)
        if ended:
            self._sending.discard(number)
        if stream is not None and stream.reads:
            stream.on_data(event.data or b"", ended=ended)

    def _on_reset(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            self._take_idle()
            return
        self._forget(number)
        if not stream.has_left and not self._cancelled.take():
            stream.lose()
            self._end_with(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        stream.lose()
        self._rest()

    def _take_idle(self) -> None:
        """Count a frame that moves nothing."""
        if self._is_there and not self._idle_frames.take():
            self._end_with(ErrorCodes.ENHANCE_YOUR_CALM)

    # Called by the streams.

    def began(self, stream: ServerStream, head: RequestHead) -> None:
        """See `StreamOwner`."""

    def send_head(self, stream_id: int, fields: Headers, *, end: bool) -> None:
        """See `StreamOwner`."""
        if stream_id not in self._streams:
            return
        # The library may know by the same read that the client has given it up.
        with suppress(StreamClosedError):
            self._frames.send_headers(stream_id, fields, end_stream=end)
            self._soon()

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> None:
        """See `StreamOwner`."""
        if stream_id not in self._streams:
            return
        self._queues.setdefault(stream_id, bytearray()).extend(data)
        if end:
            self._ended.add(stream_id)
        self._soon()

    def refuse_rest(self, stream_id: int) -> None:
        """See `StreamOwner`: it drops further bytes, and resets the stream behind its answer."""

    def reset(self, stream_id: int) -> None:
        """See `StreamOwner`."""
        self._reset(stream_id, ErrorCodes.INTERNAL_ERROR)

    def unsent(self, stream_id: int) -> int:
        """See `StreamOwner`."""
        return len(self._queues.get(stream_id, b""))

    unacknowledged = unsent

    def left(self, stream: ServerStream) -> None:
        """See `StreamOwner`."""
        self._soon()

    # Sending.

    def _soon(self) -> None:
        """Send once everything that happens now has happened."""
        if not self._scheduled and self._is_there:
            self._scheduled = True
            self.service.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self._is_there:
            return
        self._write()
        # In turns, a frame of each: no answer waits for the end of another one.
        moved = True
        while moved:
            moved = False
            for number in list(self._queues):
                if self._paused:
                    break
                moved |= self._send_frame(number)
                self._write()
        for stream in list(self._streams.values()):
            stream.resume()
            if stream.has_left and stream.number not in self._queues:
                self._settle(stream)
        self._write()

    def _send_frame(self, number: int) -> bool:
        """Send one frame of a stream; return whether there was anything to send."""
        queue, frames = self._queues[number], self._frames
        try:
            room = min(frames.local_flow_control_window(number), frames.max_outbound_frame_size)
            part = bytes(queue[: max(0, room)])
            ends = number in self._ended and len(part) == len(queue)
            if not part and not ends:
                if not queue:
                    del self._queues[number]
                return False
            frames.send_data(number, part, end_stream=ends)
        except ProtocolError:  # The stream is closed already.
            self._forget(number)
            return False
        self._updates = min(_IDLE_BURST, self._updates + _UPDATES_PER_FRAME)
        del queue[: len(part)]
        if not queue:
            del self._queues[number]
        return True

    def _write(self) -> None:
        data = self._frames.data_to_send()
        if data:
            self._transport.write_at_once(data)

    def _settle(self, stream: ServerStream) -> None:
        """Forget a stream whose exchange has ended once all of it was sent."""
        number = stream.number
        if stream.cut_when_sent:
            self._reset(number, ErrorCodes.INTERNAL_ERROR)
        elif number in self._sending:
            self._reset(number, ErrorCodes.NO_ERROR)
        self._streams.pop(number, None)
        self._forget(number)
        self._rest()

    def _forget(self, number: int) -> None:
        self._queues.pop(number, None)
        self._ended.discard(number)
        self._sending.discard(number)

    def _reset(self, number: int, code: ErrorCodes) -> None:
        self._forget(number)
        if not self._is_there:
            return
        try:
            self._frames.reset_stream(number, code)
        except ProtocolError:  # It is closed already.
            return
        self._soon()

    # Called by the server.

    @property
    def _check_s(self) -> float:
        """When to look at the streams next: their deadlines change with what they wait for."""
        return self.service.loop.time() + self.service.limits.write_timeout_s / 4

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        """See `Evictable`: by the largest loss among its streams."""
        if not self._is_there:
            return None
        if self._streams:
            found = [stream.gives_way(now_s) for stream in self._streams.values()]
            known = [one for one in found if one is not None]
            return max(known) if len(known) == len(found) else None
        if self._last:
            return Loss.IDLE, self._idle_since_s
        return loss_of_head(self._idle_since_s, now_s, begun=True)

    def evict(self) -> bool:
        """See `Evictable`: the client may repeat requests that did not come whole."""
        if self.gives_way(self.service.loop.time()) is None:
            return False
        for number in self._streams:
            self._reset(number, ErrorCodes.REFUSED_STREAM)
        self._end_with(ErrorCodes.NO_ERROR, lingers=False)
        return True

    def end(self, idle_s: float) -> None:
        """See `SweptConnection`: it refuses later requests, which the client may repeat elsewhere."""
        del idle_s
        self._turn_away()

    def drop(self) -> None:
        """Abort now; the replies are closed."""
        self._is_there = False
        self._transport.abort()
        for stream in list(self._streams.values()):
            stream.lose()

    def expire(self, now_s: float) -> None:
        if not self._is_there:
            self._transport.abort()  # The client does not read the end of its connection.
            return
        for stream in list(self._streams.values()):
            if stream.deadline_s <= now_s and stream.expire(now_s):
                self._reset(stream.number, ErrorCodes.CANCEL)
                stream.lose()
        if self._streams:
            due_s = min(stream.deadline_s for stream in self._streams.values())
            self.deadline_s = min(self._check_s, due_s)
            return
        limits = self.service.limits
        limit_s = limits.keep_alive_timeout_s if self._last else limits.header_timeout_s
        self.deadline_s = self._idle_since_s + (limit_s if self._is_served else _LINGER_S)
        if self.deadline_s <= now_s:
            self._end_with(ErrorCodes.NO_ERROR)

    # Ends.

    def _rest(self) -> None:
        if self._streams or not self._is_there:
            return
        self._idle_since_s = self.service.loop.time()
        self.deadline_s = self._idle_since_s + self.service.limits.keep_alive_timeout_s
        if not self._is_served:
            self._turn_away()
        self._close_if_done()

    def _turn_away(self) -> None:
        """Serve nothing more, and send a GOAWAY: the library's own would end running requests."""
        if not self._is_there:
            return
        if not self._turned_away:
            self._turned_away = True
            self._write()
            self._transport.write(GoAwayFrame(0, last_stream_id=self._last).serialize())
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._turned_away and not self._streams:
            self._close()

    def _end_with(self, code: ErrorCodes, *, lingers: bool = True) -> None:
        if self._is_there:
            self._frames.close_connection(code, last_stream_id=self._last)
            self._close(lingers=lingers)

    def _close(self, *, lingers: bool = True) -> None:
        """Close behind the written bytes. A client that does not read them is cut off.

        Args:
            lingers: Whether more may come, which is dropped: a socket that is closed with unread bytes sends
                a reset, which can overtake what was written.
        """
        self._write()
        self._is_there = False
        for stream in list(self._streams.values()):
            stream.lose()
        self.deadline_s = self.service.loop.time() + _LINGER_S
        if lingers and self._transport.can_write_eof():
            with suppress(OSError):  # The client is gone already.
                self._transport.write_eof()
        else:
            self._transport.close()


class EitherConnection(ServerConnection):
    """A connection whose first bytes determine its protocol.

    Args:
        streams: Of HTTP/2, requests at a time.
    """

    __slots__ = ("_first", "_inner", "_known", "_placed", "_streams")

    def __init__(
        self, streams: int, service: Service, shaken: SweptConnection | None = None
    ) -> None:
        super().__init__(service, shaken)
        self._streams = streams
        self._first = b""
        self._known = self._placed = False
        self._inner: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `ServerConnection`."""
        self._inner = cast("asyncio.Transport", transport)
        super().connection_made(transport)

    def placed(self, *, is_served: bool) -> None:
        """See `SweptConnection`."""
        super().placed(is_served=is_served)
        self._placed = True
        if self._first and not self._inner.is_closing():
            self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        """Hand the connection over if it speaks HTTP/2, once its place is known."""
        if self._known:
            super().data_received(data)
            return
        self._first += data
        if PREFACE.startswith(self._first[: len(PREFACE)]):
            if len(self._first) >= len(PREFACE) and self._placed:
                first, self._first, self._known = self._first, b"", True
                connection = Http2ServerConnection(self._service, self._streams)
                connection.take_over(self._inner, self, first)
            return
        first, self._first, self._known = self._first, b"", True
        super().data_received(first)

    def eof_received(self) -> bool:
        """See `ServerConnection`."""
        self._known = True
        return super().eof_received()

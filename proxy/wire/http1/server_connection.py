"""One client connection: requests in, answers out, in order and one at a time.

Rules:
1. A request reaches the application complete or not at all. If the head alone rules it out, the server
   rejects it before it reads the body.
2. One request is in flight. Requests that a client pipelines behind it, or behind answers that it does not
   read, wait unparsed, up to a limit; above it the server does not read the connection. (It then notices a
   client that leaves only when a write fails.) One read may bring more than the limit. The server charges
   that to the budget of bodies; bytes beyond the budget are dropped, and the connection ends with its
   present answer.
3. A rejection ends the connection. The server reads and drops further bytes for a short time: if a socket
   is closed with unread bytes, the kernel sends a reset, which can overtake the answer.
4. No timer and no task per connection: the server's sweep checks `deadline_s`.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, cast

from balanceroute.proxy.wire.http1.heads import (
    STATUS_LINES,
    WITHOUT_BODY,
    RequestHead,
    connection_fields,
    encode_fields,
)
from balanceroute.proxy.wire.http1.incoming_request import IncomingRequest
from balanceroute.proxy.wire.http1.service import (
    GAVE_WAY,
    NEW_S,
    Loss,
    Service,
    SweptConnection,
    loss_of_body,
    loss_of_head,
)
from balanceroute.proxy.wire.messages import (
    AnyTransport,
    Headers,
    HttpRequest,
    MalformedError,
    Rejection,
    ReplyState,
    bracketed,
)
from balanceroute.proxy.wire.turn_writes import TurnTransport, WriteProgress, held_by_kernel

# The answer to one request, framed as HTTP/1.1; see `Reply`.

_LAST_CHUNK = b"0\r\n\r\n"
# A larger body is written separately: copying it behind its head would cost more than a second write.
_JOIN_BYTES = 65_536


class ReplyTransport(AnyTransport, Protocol):
    closes_after_answer: bool  # The present answer is the last.

    @property
    def carrier(self) -> TurnTransport:
        """The transport that takes its bytes."""

    def answered(self) -> None:
        """Continue with the next request, or close."""

    def cut(self, *, reset: bool, flush: bool) -> None:
        """Close in the middle of an answer.

        Args:
            reset: Close with a reset: without framing only that shows the client that the body is
                incomplete.
            flush: Send what was written before closing.
        """


class Http1Reply(ReplyState[ReplyTransport]):
    """The answer to one request over a connection of HTTP/1.1 or 1.0."""

    __slots__ = ("_chunked", "_common", "_http_1_0", "_write")

    def __init__(
        self,
        connection: ReplyTransport,
        write: Callable[[bytes], None],
        *,
        head_only: bool,
        http_1_0: bool,
        common: bytes = b"",
    ) -> None:
        super().__init__(connection, head_only=head_only)
        self._common = common  # Header lines, in addition to the application's.
        self._write = write
        self._http_1_0 = http_1_0
        self._chunked = False

    def _whole(self, status: int, headers: Headers, body: bytes) -> None:
        length = b"" if status in WITHOUT_BODY else b"content-length: %d\r\n" % len(body)
        head = self._head(status, headers, length)
        if self._head_only or status in WITHOUT_BODY:
            body = b""
        if len(body) > _JOIN_BYTES:
            self._send(head)
        else:
            body = head + body
        self._send(body)

    def _begin(self, status: int, headers: Headers) -> None:
        """Send the head: the body is chunked, or in HTTP/1.0 lasts until the connection closes."""
        if status in WITHOUT_BODY:
            head = self._head(status, headers, b"")
            self._head_only = True
        elif self._http_1_0:
            self._transport.closes_after_answer = True
            head = self._head(status, headers, b"")
        else:
            head = self._head(status, headers, b"transfer-encoding: chunked\r\n")
            self._chunked = not self._head_only
        self._send(head)

    @property
    def carrier(self) -> TurnTransport | None:
        """The receiver of its body's chunks at present; None if it has none, or takes no more."""
        return None if self.closed or not self._chunked or self.paused else self._transport.carrier

    def write(self, data: bytes) -> None:
        """Send one piece of a streamed answer, as one chunk."""
        if self.closed or not data:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            assert self.started or self.commented, "start the reply first"
            if self._head_only:
                return
        self.written += len(data)
        self._write(data)

    def _last(self) -> None:
        if self._chunked:
            self._send(_LAST_CHUNK)

    def abort(self) -> None:
        """Close the connection, so that the client sees an incomplete body."""
        if self.closed:
            return
        begun = self.started or self.commented
        cut_body = begun and not self._chunked and not self._head_only
        self._close()
        self._transport.cut(reset=cut_body, flush=begun)

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        fields = encode_fields([*headers, *self.more_headers]) + self._common
        option = b"keep-alive" if self._http_1_0 else b""
        if self._transport.closes_after_answer:
            option = b"close"
        return b"%b%b%b%b\r\n" % (line, fields, framing, connection_fields(status, option))

    def _send(self, data: bytes) -> None:
        self.written += len(data)
        self._write(data)


_LOG = logging.getLogger(__name__)

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Bounds how long an attacker can hold it; a usual client closes as soon as it has read its answer.
_LINGER_S = 2.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Stage(Enum):
    WAITING = (
        auto()
    )  # For a place within the connection limit: what arrives is read, and not looked at.
    HEAD = auto()  # Between requests, or reading a head.
    BODY = auto()
    ANSWER = auto()  # The application has the request.
    REJECTED = auto()  # Above the connection limit: waits for its first request, to answer that.
    LINGER = auto()  # After a rejection: drops what still arrives.
    CLOSING = auto()  # Flushing.
    GONE = auto()


_HEAD, _BODY, _ANSWER = _Stage.HEAD, _Stage.BODY, _Stage.ANSWER
_WAITING = _Stage.WAITING


class ServerConnection(asyncio.Protocol):
    """One connection of a client; see `SweptConnection` and `ReplyTransport` for its attributes."""

    __slots__ = (
        *("_advancing", "_eof", "_incoming", "_is_served", "_last_idle_s"),
        *("_peer", "_reading", "_reply", "_service", "_since_s", "_stage", "_transport", "_writes"),
        *("_shaken", "closes_after_answer", "deadline_s", "paused"),
    )

    _transport: TurnTransport

    def __init__(self, service: Service, shaken: SweptConnection | None = None) -> None:
        # The connection's life.
        self._service = service
        self._shaken = shaken  # The handshake whose place it takes.
        self._peer = ""
        self._is_served = True
        self._stage = _WAITING
        self._incoming = IncomingRequest(service.limits, service.bodies, clock=service.loop.time)
        self._eof = False
        self._reading = True
        self._advancing = False
        self.paused = False
        self.closes_after_answer = False
        self.deadline_s = 0.0
        self._since_s = 0.0  # When it became idle, or its head began.
        self._last_idle_s = 0.0  # How long it waits for one more request; 0 while it is not to end.
        # The present answer.
        self._reply: Http1Reply | None = None
        self._writes = WriteProgress(service.limits.write_timeout_s)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for the first request."""
        service = self._service
        inner = cast("asyncio.Transport", transport)
        inner.set_write_buffer_limits(high=service.limits.write_buffer_bytes)
        self._transport = TurnTransport(inner, service.turn)
        address = transport.get_extra_info("peername")
        host = ""
        if address:
            host, port = address[:2]
            self._peer = f"{bracketed(host)}:{port}"
        self._since_s = service.loop.time()
        self.deadline_s = self._since_s + service.limits.header_timeout_s
        self.closes_after_answer = service.stopping  # It was accepted just before the stop.
        shaken, self._shaken = self._shaken, None
        if shaken is None:
            service.add(self, host)
        else:
            self.placed(is_served=service.take_place(self, shaken))

    def placed(self, *, is_served: bool) -> None:
        """See `SweptConnection`."""
        self._is_served = is_served
        if self._stage is not _WAITING:
            return  # It is about to be lost.
        if is_served:
            self._stage = _HEAD
            if self._incoming.buffer or self._eof:
                self._advance()
            return
        self._stage = _Stage.REJECTED
        self.deadline_s = self._since_s + _LINGER_S
        if self._service.limit.rejection(self) is None:
            self._abort()
        elif self._incoming.buffer:
            self._refuse_connection()

    def data_received(self, data: bytes) -> None:
        incoming = self._incoming
        if self._stage is _HEAD and not self.paused:
            incoming.buffer = incoming.buffer + data if incoming.buffer else data
            self._advance()
            return
        match self._stage:
            case _Stage.BODY:
                try:
                    body = incoming.feed_body(data)
                except MalformedError as error:
                    self._refuse(error.rejection)
                else:
                    if body is not None:
                        self._dispatch(body)
                self._advance()
            case _Stage.HEAD | _Stage.ANSWER | _Stage.WAITING:
                incoming.buffer += data
                self._bound_waiting()
            case _Stage.REJECTED:
                incoming.buffer = data
                self._refuse_connection()
            case _Stage.LINGER | _Stage.CLOSING | _Stage.GONE:
                pass

    def eof_received(self) -> bool:
        """Process the client's FIN; see `ServerLimits.half_close`. True keeps the connection open."""
        if self._stage not in (_ANSWER, _WAITING):
            self._close()
            return False
        # TLS has no half-close.
        if self._service.limits.half_close and not self._transport.is_encrypted:
            self._eof = True
            return True
        self.drop()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stage = _Stage.GONE
        self._transport.reclaim()
        self._incoming.drop()
        self._service.remove(self, served=self._is_served)
        self._lose_client()

    def pause_writing(self) -> None:
        """Pause the reply: the client reads too slowly."""
        self.paused = True
        if self._reply is not None and self._reply.on_pause is not None:
            self._reply.on_pause()

    def resume_writing(self) -> None:
        """Resume the reply: the client reads again."""
        self.paused = False
        if self._reply is not None and self._reply.on_resume is not None:
            self._reply.on_resume()
        self._advance()

    # Called by the reply.

    def answered(self) -> None:
        """Continue with the next request, or close."""
        self._reply = None
        self._incoming.finish()
        if self.closes_after_answer:
            if (self._incoming.buffer or not self._reading) and not self._eof:
                self._linger()
            else:
                self._close()
            return
        self._stage = _HEAD
        self._since_s = self._service.loop.time()
        self.deadline_s = self._since_s + self._service.idle_check_s
        if self._last_idle_s:
            self.end(self._last_idle_s)
        # Not at once: this runs within a call of the application, which must not be re-entered.
        if (self._incoming.buffer or self._eof) and not self._advancing:
            self._service.loop.call_soon(self._advance)

    @property
    def carrier(self) -> TurnTransport:
        """See `ReplyTransport`."""
        return self._transport

    def release_body(self) -> None:
        self._incoming.release_body()

    def cut(self, *, reset: bool, flush: bool) -> None:
        """See `ReplyTransport`."""
        self._reply = None
        self._incoming.release_body()
        if reset:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        if flush:
            self._close()
        else:
            self._abort()

    # Called by the server.

    def end(self, idle_s: float) -> None:
        """See `SweptConnection`."""
        self._last_idle_s = idle_s
        # One whose head has gone did not say that it is the last.
        if not (idle_s and self._reply is not None and self._reply.written):
            self.closes_after_answer = True
        if self._stage is _HEAD and not self._incoming.buffer:
            self.deadline_s = min(self.deadline_s, self._service.loop.time() + idle_s)
            if not idle_s:
                self._close()

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        """See `Evictable`."""
        stage, incoming = self._stage, self._incoming
        if stage is _Stage.LINGER:
            since_s = self.deadline_s - _LINGER_S
            # Before that its answer may be on its way, and a reset would overtake it.
            return (Loss.NOTHING, since_s) if since_s <= now_s - NEW_S else None
        if stage in (_ANSWER, _WAITING, _Stage.REJECTED, _Stage.GONE):
            return None
        if self._transport.get_write_buffer_size():
            unread = self._service.limits.unread_gives_way and stage is not _BODY
            return (Loss.UNREAD, self._since_s) if unread else None
        if stage is _BODY:
            assert incoming.head is not None
            expects = incoming.head.expects_continue
            return loss_of_body(incoming.body_due_s, now_s, expects_continue=expects)
        if stage is not _HEAD:
            return None
        if incoming.begun:
            return loss_of_head(self._since_s, now_s, begun=bool(incoming.buffer))
        return None if incoming.buffer else (Loss.IDLE, self._since_s)

    def evict(self) -> bool:
        """See `Evictable`."""
        found = self.gives_way(self._service.loop.time())
        if found is None:
            return False
        if found[0] in (Loss.NOTHING, Loss.UNREAD):
            self._abort()
            return True
        if (
            self._stage is _BODY
        ):  # Else there is no request that could be answered, logged or counted.
            head = self._incoming.head
            self._transport.write(self._service.last_answer(GAVE_WAY, head, self._peer))
        # The client's part of closing TLS may never arrive, nor may it read the answer.
        if self._transport.is_encrypted or self._transport.get_write_buffer_size():
            self._abort()
        else:
            self._close()
        return True

    def drop(self) -> None:
        """Abort now; the reply is closed."""
        self._abort()
        self._lose_client()

    def expire(self, now_s: float) -> None:
        match self._stage:
            case _Stage.HEAD if self._incoming.buffer and self._incoming.begun:
                self._refuse(Rejection(408, "the request's head did not arrive in time"))
            case _Stage.HEAD if self._transport.get_write_buffer_size():
                self._since_s = now_s
                self._check_stall(now_s)
            case _Stage.HEAD:
                self.deadline_s = self._since_s + self._service.limits.keep_alive_timeout_s
                if self._incoming.begun or self.closes_after_answer or self.deadline_s <= now_s:
                    self._close()
            case _Stage.BODY:
                self.deadline_s = self._incoming.body_deadline_s
                if self.deadline_s <= now_s:
                    self._refuse(Rejection(408, "the request's body did not arrive in time"))
            case _Stage.REJECTED:
                self._refuse_connection()
            case _Stage.LINGER if not self._transport.get_write_buffer_size():
                self._abort()
            case _Stage.ANSWER | _Stage.LINGER | _Stage.CLOSING:
                self._check_stall(now_s)
            case _Stage.WAITING | _Stage.GONE:
                pass

    # Reading.

    def _advance(self) -> None:
        """Read requests until one is in flight or the bytes run out."""
        if self._advancing:
            return
        self._advancing = True
        service, incoming = self._service, self._incoming
        try:
            while incoming.buffer and self._stage is _HEAD and not self.paused:
                if not incoming.begun:
                    incoming.begin()
                    self._since_s = service.loop.time()
                    self.deadline_s = self._since_s + service.limits.header_timeout_s
                head = incoming.take_head()
                if head is None:
                    break
                self._begin_body(head)
        except MalformedError as error:
            self._refuse(error.rejection)
        finally:
            self._advancing = False
        if self._eof and self._stage in (_HEAD, _BODY) and not self.paused:
            self._close()
        elif not self._reading or len(incoming.buffer) > service.limits.header_limit_bytes:
            self._bound_waiting()

    def _bound_waiting(self) -> None:
        """Read no further while much waits, and end soon if the budget has no room for it."""
        fits = self._incoming.charge_waiting()
        self.closes_after_answer |= not fits
        if not fits and self._stage is _Stage.HEAD:
            self._linger()
        else:
            self._read_on(reads=fits and not self._incoming.charged)

    def _begin_body(self, head: RequestHead) -> None:
        service, incoming = self._service, self._incoming
        if service.admit is not None:
            rejection = service.admit(head, self._peer)
            if rejection is not None:
                # If nothing of it is still to arrive, the connection stays usable.
                if incoming.skip_body():
                    headers, body = service.refuse(rejection, head, self._peer)
                    self._begin_answer(head).send(rejection.status, headers, body)
                else:
                    self._refuse(rejection)
                return
        has_arrived = bool(incoming.buffer)
        complete = incoming.begin_body()
        if complete is not None:
            self._dispatch(complete)
            return
        self._stage = _BODY
        self.deadline_s = incoming.body_deadline_s
        if head.expects_continue and not has_arrived:
            self._transport.write(_CONTINUE)

    def _dispatch(self, body: bytes) -> None:
        head = self._incoming.head
        assert head is not None
        request = HttpRequest(
            head.method, head.path, head.query, head.headers, body, self._peer, head.learned
        )
        reply = self._begin_answer(head)
        try:
            self._service.application(request, reply)
        except Exception:
            _LOG.exception("the application failed on %r", head.path)
            self._fail(reply)

    def _begin_answer(self, head: RequestHead) -> Http1Reply:
        reply = Http1Reply(
            self,
            self._transport.write,
            head_only=head.method == b"HEAD",
            http_1_0=head.http_1_0,
            common=self._service.common_fields(head.headers),
        )
        self._reply = reply
        self._stage = _ANSWER
        if not head.keep_alive:
            self.closes_after_answer = True
        self._watch_writes()
        return reply

    def _fail(self, reply: Http1Reply) -> None:
        """End a request whose application raised."""
        self.closes_after_answer = True
        if reply.started and not reply.closed:
            reply.abort()
        elif not reply.closed:
            rejection = Rejection(500, "internal error")
            headers, body = self._service.refuse(rejection, self._incoming.head, self._peer)
            reply.send(500, headers, body)
        elif self._stage is _HEAD:
            self._close()

    # Ending.

    def _refuse(self, rejection: Rejection) -> None:
        incoming = self._incoming
        self._transport.write(
            self._service.last_answer(rejection, incoming.head, self._peer, incoming.buffer)
        )
        self._linger()

    def _refuse_connection(self) -> None:
        rejection = self._service.limit.rejection(self)
        assert rejection is not None
        self._refuse(rejection)

    def _linger(self) -> None:
        self._stage = _Stage.LINGER
        self._incoming.drop()
        self.deadline_s = self._service.loop.time() + _LINGER_S
        self._read_on(reads=True)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        self._stage = _Stage.CLOSING
        self._incoming.buffer = b""
        self._watch_writes()
        self._transport.close()

    def _abort(self) -> None:
        self._stage = _Stage.GONE
        self._incoming.buffer = b""
        self._transport.abort()

    def _lose_client(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lose_client()

    def _read_on(self, *, reads: bool) -> None:
        if reads is not self._reading:
            self._reading = reads
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def _watch_writes(self) -> None:
        now_s = self._service.loop.time()
        self._writes.begin(now_s)
        self.deadline_s = now_s + self._writes.check_s

    def _check_stall(self, now_s: float) -> None:
        """Disconnect a client that has read nothing for `write_timeout_s` while data waits."""
        waiting = self._transport.get_write_buffer_size()
        # That may have brought this up to date.
        written = 0 if self._reply is None else self._reply.written
        held = held_by_kernel(self._transport.get_extra_info("socket")) if waiting else 0
        if self._writes.has_stalled(now_s, written=written, waiting=waiting, held=held):
            self.drop()
        else:
            self.deadline_s = now_s + self._writes.check_s

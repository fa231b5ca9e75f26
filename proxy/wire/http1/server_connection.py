"""One client connection: requests in, answers out, in order and one at a time.

Rules:
1. A request reaches the application complete or not at all. If the head alone rules it out, it is
   rejected before the body is read.
2. One request is in flight. What a client pipelines behind it waits unparsed, up to a limit; above it
   the connection is not read. (A client that leaves then is only noticed when a write fails.)
3. A rejection ends the connection. What the client still sends is read and dropped for a short time:
   if a socket is closed with unread bytes, the kernel sends a reset, which can overtake the answer.
4. No timer and no task per connection: the server's sweep checks `deadline_s`.
"""

import asyncio
import logging
import socket
import struct
from enum import Enum, auto
from typing import cast

from balanceroute.proxy.wire.addresses import bracketed
from balanceroute.proxy.wire.http1.heads import (
    STATUS_LINES,
    RequestHead,
    check_partial_head,
    encode_fields,
    parse_request_head,
)
from balanceroute.proxy.wire.http1.incoming_body import IncomingBody
from balanceroute.proxy.wire.http1.reply import Http1Reply
from balanceroute.proxy.wire.http1.service import Service
from balanceroute.proxy.wire.messages import MalformedError, Rejection, Request

_LOG = logging.getLogger(__name__)

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Bounds what an attacker can hold; a usual client closes as soon as it has read its answer.
_LINGER_S = 2.0
# The request line without the target: method, spaces and version.
_REQUEST_LINE_SLACK = 64
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Stage(Enum):
    HEAD = auto()  # Between requests, or reading a head.
    BODY = auto()
    ANSWER = auto()  # The application has the request.
    REJECTED = auto()  # Above the connection limit: waits for its first request, to answer that.
    LINGER = auto()  # After a rejection: drops what still arrives.
    CLOSING = auto()  # Flushing, or gone.


class ServerConnection(asyncio.Protocol):
    """One connection of a client.

    Attributes:
        deadline_s: When the sweep calls `expire`, on the loop's clock.
        paused: The write buffer is above its limit.
        closes_after_answer: The present answer is the last.
    """

    __slots__ = (
        "_advancing",
        "_body",
        "_body_since_s",
        "_buffer",
        "_checked",
        "_drained",
        "_eof",
        "_head",
        "_idle_since_s",
        "_in_head",
        "_is_served",
        "_peer",
        "_progress_s",
        "_reading",
        "_reply",
        "_service",
        "_skip_blank",
        "_stage",
        "_transport",
        "closes_after_answer",
        "deadline_s",
        "paused",
    )

    _transport: asyncio.Transport

    def __init__(self, service: Service) -> None:
        # The connection's life.
        self._service = service
        self._peer = ""
        self._is_served = True
        self._stage = _Stage.HEAD
        self._buffer = b""  # Not parsed yet.
        self._eof = False
        self._reading = True
        self._advancing = False
        self.paused = False
        self.closes_after_answer = False
        self.deadline_s = 0.0
        # The wait for the present head, and the head.
        self._idle_since_s = 0.0
        self._in_head = True  # At first too: a new connection has the time of a head to send one.
        self._checked = 0
        self._skip_blank = True
        self._head: RequestHead | None = None
        self._body = IncomingBody(service.bodies, service.limits.body_limit_bytes)
        self._body_since_s = 0.0
        # The present answer.
        self._reply: Http1Reply | None = None
        self._drained = 0
        self._progress_s = 0.0

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for the first request."""
        self._transport = cast("asyncio.Transport", transport)
        service = self._service
        self._transport.set_write_buffer_limits(high=service.limits.write_buffer_bytes)
        address = transport.get_extra_info("peername")
        host = ""
        if address:
            host, port = address[:2]
            self._peer = f"{bracketed(host)}:{port}"
        self._idle_since_s = service.loop.time()
        self.deadline_s = self._idle_since_s + service.limits.header_timeout_s
        self.closes_after_answer = service.stopping  # It was accepted just before the stop.
        self._is_served = service.add(self, host)
        if not self._is_served:
            self._stage = _Stage.REJECTED
            self.deadline_s = self._idle_since_s + _LINGER_S
            if service.limit.rejection(self) is None:
                self._abort()

    def data_received(self, data: bytes) -> None:
        """Process the next bytes from the client."""
        match self._stage:
            case _Stage.HEAD:
                self._buffer = self._buffer + data if self._buffer else data
                self._advance()
            case _Stage.BODY:
                try:
                    self._read_body(data)
                except MalformedError as error:
                    self._refuse(error.rejection)
                self._advance()
            case _Stage.ANSWER:
                self._buffer += data
                if len(self._buffer) > self._service.limits.header_limit_bytes:
                    self._transport.pause_reading()
                    self._reading = False
            case _Stage.REJECTED:
                self._refuse_connection()
            case _Stage.LINGER | _Stage.CLOSING:
                pass

    def eof_received(self) -> bool:
        """Process the client's FIN; see `ServerLimits.half_close`. True keeps the connection open."""
        if self._stage is not _Stage.ANSWER:
            self._close()
            return False
        if (
            self._service.limits.half_close
            and self._transport.get_extra_info("sslcontext") is None  # TLS has no half-close.
        ):
            self._eof = True
            return True
        self.drop()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that the connection holds."""
        self._stage = _Stage.CLOSING
        self._buffer = b""
        self._body.drop()
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
        self._body.release()
        if self.closes_after_answer:
            if self._buffer and not self._eof:
                self._linger()
            else:
                self._close()
            return
        self._stage = _Stage.HEAD
        self._in_head = False
        self._idle_since_s = self._service.loop.time()
        self.deadline_s = self._idle_since_s + min(
            self._service.limits.keep_alive_timeout_s, self._service.limits.write_timeout_s / 4
        )
        # Not at once: this runs within a call of the application, which must not be re-entered.
        if (self._buffer or self._eof) and not self._advancing:
            self._service.loop.call_soon(self._advance)

    def release_body(self) -> None:
        """Release the request's body from the budget."""
        self._body.release()

    def cut(self, *, reset: bool, flush: bool) -> None:
        """Close in the middle of an answer.

        Args:
            reset: Close with a reset: without framing only that shows the client that the body is
                incomplete.
            flush: Send what was written before closing.
        """
        self._reply = None
        self._body.release()
        if reset:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        if flush:
            self._close()
        else:
            self._abort()

    # Called by the server.

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""
        if self._stage is _Stage.HEAD and not self._buffer:
            self._close()
        else:
            self.closes_after_answer = True

    @property
    def idle_since_s(self) -> float | None:
        """See `Evictable`."""
        if self._stage is not _Stage.HEAD or self._buffer:
            return None
        return None if self._transport.get_write_buffer_size() else self._idle_since_s

    def evict(self) -> bool:
        """Close if idle; return whether it was closed."""
        if self.idle_since_s is None:
            return False
        if self._transport.get_extra_info("sslcontext") is None:
            self._close()
        else:
            self._abort()  # The client's part of closing TLS may never arrive.
        return True

    def drop(self) -> None:
        """Abort now; the reply is closed."""
        self._abort()
        self._lose_client()

    def expire(self, now_s: float) -> None:
        """Act on a deadline that has passed."""
        limits = self._service.limits
        match self._stage:
            case _Stage.HEAD if self._buffer and self._in_head:
                self._refuse(Rejection(408, "the request's head did not arrive in time"))
            case _Stage.HEAD if self._transport.get_write_buffer_size():
                self._idle_since_s = now_s
                self._check_stall(now_s)
            case _Stage.HEAD:
                self.deadline_s = self._idle_since_s + limits.keep_alive_timeout_s
                if self._in_head or self.deadline_s <= now_s:
                    self._close()
            case _Stage.BODY:
                earned_s = self._body.size / limits.body_bytes_per_s
                self.deadline_s = self._body_since_s + limits.body_timeout_s + earned_s
                if self.deadline_s <= now_s:
                    self._refuse(Rejection(408, "the request's body did not arrive in time"))
            case _Stage.REJECTED:
                self._refuse_connection()
            case _Stage.LINGER if not self._transport.get_write_buffer_size():
                self._abort()
            case _Stage.ANSWER | _Stage.LINGER | _Stage.CLOSING:
                self._check_stall(now_s)

    # Reading.

    def _advance(self) -> None:
        """Read requests until one is in flight or the bytes run out."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._buffer and self._stage is _Stage.HEAD and not self.paused:
                if not self._in_head:
                    self._in_head = True
                    self._checked = 0
                    self._skip_blank = True
                    self._head = None
                    limits = self._service.limits
                    self.deadline_s = self._service.loop.time() + limits.header_timeout_s
                if not self._read_head():
                    break
        except MalformedError as error:
            self._refuse(error.rejection)
        finally:
            self._advancing = False
        if self._eof and self._stage in (_Stage.HEAD, _Stage.BODY) and not self.paused:
            self._close()
        elif not self._reading and len(self._buffer) <= self._service.limits.header_limit_bytes:
            self._resume_reading()

    def _read_head(self) -> bool:
        """Parse a head if it is complete, and start its body; return whether it was."""
        limits = self._service.limits
        buffer = self._buffer
        if self._skip_blank and buffer.startswith(b"\r\n"):  # RFC 9112 §2.2: ignore at least one.
            self._skip_blank = False
            buffer = self._buffer = buffer[2:]
        end = buffer.find(b"\r\n\r\n", max(0, self._checked - 3)) + 4
        if end < 4:
            check_partial_head(buffer, self._checked)
            if (
                len(buffer) > limits.target_limit_bytes + _REQUEST_LINE_SLACK
                and b"\r\n" not in buffer
            ):
                raise MalformedError("the request target is too long", 414)
            if len(buffer) > limits.header_limit_bytes:
                raise MalformedError("the request's head is too long", 431)
            self._checked = len(buffer)
            return False
        if end > limits.header_limit_bytes:
            raise MalformedError("the request's head is too long", 431)
        self._head = head = parse_request_head(
            buffer[:end],
            max_target_bytes=limits.target_limit_bytes,
            max_headers=limits.header_limit,
        )
        self._buffer = b""
        self._begin_body(head, buffer[end:])
        return True

    def _begin_body(self, head: RequestHead, rest: bytes) -> None:
        service = self._service
        length = head.content_length or 0
        is_whole = not head.chunked and len(rest) >= length
        if service.admit is not None:
            rejection = service.admit(head, self._peer)
            if rejection is not None:
                if is_whole:  # Nothing of it is still to arrive, so the connection stays usable.
                    self._buffer = rest[length:]
                    headers, body = service.refuse(rejection, head, self._peer)
                    self._begin_answer(head).send(rejection.status, headers, body)
                else:
                    self._refuse(rejection)
                return
        self._body.check_length(length)
        if is_whole:
            self._buffer = rest[length:]
            self._body.hold(length)
            self._dispatch(head, rest[:length])
            return
        self._stage = _Stage.BODY
        self._body.begin(head)
        self._body_since_s = service.loop.time()
        self.deadline_s = self._body_since_s + service.limits.body_timeout_s
        if head.expects_continue and not rest:
            self._transport.write(_CONTINUE)
        if rest:
            self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        rest = self._body.feed(data)
        if rest is not None:
            self._buffer = rest
            assert self._head is not None
            self._dispatch(self._head, self._body.take())

    def _dispatch(self, head: RequestHead, body: bytes) -> None:
        request = Request(head.method, head.path, head.query, head.headers, body, self._peer)
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
            common=self._service.common_fields(head),
        )
        self._reply = reply
        self._stage = _Stage.ANSWER
        self.closes_after_answer |= not head.keep_alive
        self._watch_writes()
        return reply

    def _fail(self, reply: Http1Reply) -> None:
        """End a request whose application raised."""
        self.closes_after_answer = True
        if reply.closed:
            if self._stage is _Stage.HEAD:
                self._close()
            return
        if reply.started:
            reply.abort()
            return
        rejection = Rejection(500, "internal error")
        headers, body = self._service.refuse(rejection, self._head, self._peer)
        reply.send(500, headers, body)

    # Ending.

    def _refuse(self, rejection: Rejection) -> None:
        headers, body = self._service.refuse(rejection, self._head, self._peer)
        fields = encode_fields(headers) + self._service.common_fields(self._head)
        self._transport.write(
            b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINES[rejection.status], fields, len(body), body)
        )
        self._linger()

    def _refuse_connection(self) -> None:
        rejection = self._service.limit.rejection(self)
        assert rejection is not None
        self._refuse(rejection)

    def _linger(self) -> None:
        self._stage = _Stage.LINGER
        self._buffer = b""
        self._body.drop()
        self.deadline_s = self._service.loop.time() + _LINGER_S
        self._resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        """Close after flushing."""
        self._stage = _Stage.CLOSING
        self._buffer = b""
        self._watch_writes()
        self._transport.close()

    def _abort(self) -> None:
        self._stage = _Stage.CLOSING
        self._buffer = b""
        self._transport.abort()

    def _lose_client(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lose_client()

    def _resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _watch_writes(self) -> None:
        now_s = self._service.loop.time()
        self._progress_s = now_s
        self._drained = -1
        self.deadline_s = now_s + self._service.limits.write_timeout_s / 4

    def _check_stall(self, now_s: float) -> None:
        """Disconnect a client that has read nothing for `write_timeout_s` while data waits."""
        waiting = self._transport.get_write_buffer_size()
        drained = (self._reply.written if self._reply is not None else 0) - waiting
        if not waiting or drained != self._drained:
            self._drained = drained
            self._progress_s = now_s
        elif now_s - self._progress_s >= self._service.limits.write_timeout_s:
            self.drop()
            return
        self.deadline_s = now_s + self._service.limits.write_timeout_s / 4

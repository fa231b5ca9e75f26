"""One connection to an engine, and the exchange on it.

Rules:
1. The response is parsed strictly (RFC 9112 §6): ambiguous framing is an error and ends the
   connection.
2. A connection is reused only in a known state: the response complete with nothing after it, the
   request written completely, and neither side about to close.
3. A handler may abort its call, or begin another one, from within any callback.
4. The pool repeats only a request without side effects. A POST whose connection was lost may have had
   some: a decode rank may have pulled the KV cache, which is then gone. Its caller gets STALE if the engine
   is still there, and decides.
"""

import asyncio
import select
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, cast

from msgspec import Struct

from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.http1.heads import (
    WITHOUT_BODY,
    ResponseHead,
    check_partial_head,
    parse_response_head,
)
from balanceroute.proxy.wire.messages import (
    LineHandler,
    MalformedError,
    Payload,
    Pieces,
    ResponseHandler,
    WireError,
    WireFault,
)
from balanceroute.proxy.wire.turn_writes import Borrower, TurnTransport, WriteTurn

_VERSION = b"HTTP/1."
_SWITCHING_PROTOCOLS = 101
# A larger body is a piece of its own: to copy it behind its head would cost more.
_JOIN_BYTES = 65_536


class ConnectionPool(Protocol):
    """The pool of a connection."""

    turn: WriteTurn  # Gathers the writes of all connections.
    stale: int  # How many POSTs in a row were lost with reused connections.

    def opened(self) -> None:
        """Count a connection."""

    def lost(self, connection: "ClientConnection") -> None:
        """Remove a connection."""

    def release(self, connection: "ClientConnection") -> None:
        """Keep a connection for another exchange, or close it."""

    def close_idle(self) -> None:
        """Close idle connections."""

    def retry(self, call: "Call") -> None:
        """Repeat a call on a new connection."""

    def fail_stale(self, call: "Call", message: str, cause: Exception | None) -> None:
        """End a call that was lost with a reused connection: STALE if a new one opens."""


class Call(Struct, eq=False):
    """One exchange in flight."""

    head: bytes
    body: Payload
    handler: ResponseHandler
    head_only: bool = False
    repeatable: bool = False
    crashed: Callable[[Exception], None] | None = None
    expires_s: float | None = None
    lines: LineHandler | None = None
    sent: bool = False  # Whether bytes of the request were written.
    answered: bool = False  # Whether any byte of a response arrived.
    done: bool = False
    lost: bool = False  # Whether its connection is lost, which the handler learns in a moment.
    paused: bool = False
    # While it uses one.
    connection: "ClientConnection | None" = None
    # Until it has one.
    connecting: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close the connection at once. No callback follows. After the end it does nothing."""
        if self.done:
            return
        self.done = True
        if self.connection is not None:
            self.connection.drop()
            self.connection = None
        elif self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None

    def pause(self) -> None:
        """Stop reading the response, so that TCP slows the engine down."""
        if not self.paused and not self.done:
            self.paused = True
            if self.connection is not None:
                self.connection.pause_reading()

    def resume(self) -> None:
        if self.paused and not self.done:
            self.paused = False
            if self.connection is not None:
                self.connection.resume_reading()

    def fail(self, kind: WireFault, message: str, cause: Exception | None = None) -> None:
        """End with an error, chained to the system's error if there is one."""
        self.done = True
        self.connection = self.connecting = None
        error = WireError(kind, message, sent=self.sent, answered=self.answered)
        if cause is not None:
            # Its traceback refers to this call, whose body and handler may be large.
            error.__cause__ = cause.with_traceback(None)
        try:
            self.handler.on_error(error)
        except Exception as crash:
            self.crash(crash)

    def crash(self, error: Exception) -> None:
        """End because the handler raised: call `crashed`, or let the exception propagate."""
        self.abort()
        if self.crashed is None:
            raise error
        self.crashed(error)


class _Stage(Enum):
    HEAD = auto()
    CHUNKED = auto()
    LENGTH = auto()
    UNTIL_CLOSE = auto()


_HEAD, _CHUNKED, _LENGTH = _Stage.HEAD, _Stage.CHUNKED, _Stage.LENGTH


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_buffer",
        "_call",
        "_checked",
        "_decoder",
        "_head_bytes",
        "_joined",
        "_keep_alive",
        "_left",
        "_lines",
        "_max_head_bytes",
        "_on_data",
        "_poll",
        "_pool",
        "_stage",
        "_transport",
        "reused",
    )

    _transport: TurnTransport
    _on_data: Callable[[bytes], None]

    def __init__(self, pool: ConnectionPool, max_head_bytes: int) -> None:
        # The connection's life.
        self._pool = pool
        self._max_head_bytes = max_head_bytes
        self.reused = False  # Whether a request went on it before.
        self._joined = False
        self._poll: Callable[[int], list[tuple[int, int]]] | None = None
        # The present exchange.
        self._call: Call | None = None
        self._lines: LineHandler | None = None
        self._stage = _HEAD
        self._buffer = b""
        self._checked = 0
        self._head_bytes = 0
        self._keep_alive = False
        self._decoder = ChunkedDecoder()
        self._left = 0

    # Called by the pool and the call.

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def is_reusable(self) -> bool:
        """Return whether a further exchange can begin: the kernel has received nothing since the last.

        The engine may have closed the connection and the loop not have read that yet. Polling the
        kernel costs half a microsecond and avoids a lost request.
        """
        if self._transport.is_closing():
            return False
        if self._poll is None:
            socket = self._transport.get_extra_info("socket")
            descriptor = socket.fileno()
            if descriptor < 0:  # Of a loop in virtual time, which answers as a poll would.
                return not socket.readable
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            self._poll = poll.poll
        return not self._poll(0)

    def join(self) -> None:
        """Join the pool.

        Not in `connection_made`: if `create_connection` is cancelled after that, uvloop does not call
        `connection_lost`.
        """
        self._joined = True
        self._pool.opened()

    def begin(self, call: Call) -> None:
        """Send a request and wait for its response."""
        self._call = call
        call.connecting = None
        call.connection = self
        self._on_data = call.handler.on_data
        self._lines = call.lines
        self._stage = _HEAD
        self._checked = self._head_bytes = 0
        call.sent = True
        body, transport = call.body, self._transport
        if isinstance(body, Pieces):
            transport.write_pieces([call.head, *body.parts])
        elif len(body) > _JOIN_BYTES:
            transport.write_pieces([call.head, body])
        elif call.expires_s is None:
            transport.write(call.head + body)
        else:
            # The process may be stopped before the end of the turn, and its time be over then.
            transport.write_at_once(call.head + body)
        if not call.repeatable:
            call.head = call.body = b""  # Frees them: they may be large, and are not sent again.
        if call.paused:
            transport.pause_reading()

    def drop(self) -> None:
        """Close at once, without a callback."""
        self._call = None
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.reclaim()
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    # Called by the pump.

    @property
    def in_use(self) -> bool:
        return self._call is not None

    def lend(self, borrower: Borrower) -> int:
        """Lend the reading of further chunks; return the descriptor, -1 if that is impossible."""
        call = self._call
        if call is None or call.paused or self._stage is not _CHUNKED or self._decoder.is_within:
            return -1
        number = self._transport.lend(borrower)
        if number >= 0:
            self._transport.pause_reading()
        return number

    def returned(self) -> None:
        """Take it back; `go_on` follows."""
        self._transport.returned(b"")

    def go_on(self, data: bytes) -> None:
        """Process bytes that the borrower read and did not take, and read on."""
        call = self._call
        if call is None:
            return
        if not call.paused:
            self._transport.resume_reading()
        if data:
            self.data_received(data)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = TurnTransport(cast("asyncio.Transport", transport), self._pool.turn)

    def data_received(self, data: bytes) -> None:
        try:
            if self._stage is _CHUNKED:
                lines = self._lines
                if lines is None or not lines.takes_lines:
                    self._read_chunked(data)
                elif line := self._decoder.take_line(data):
                    lines.on_line(line)
                elif several := self._decoder.take_lines(data):
                    lines.on_lines(several)
                else:
                    self._read_chunked(data)
            elif self._call is None:
                # No request is in flight: these bytes must not become part of a later response.
                self.drop()
            elif self._stage is _HEAD:
                self._read_head(data)
            elif self._stage is _LENGTH:
                self._read_length(data)
            else:
                self._on_data(data)
        except Exception as error:
            if self._call is None:
                raise
            self._call.crash(error)

    def eof_received(self) -> None:
        """Process the engine's FIN: the end of a body without length, or an error."""
        if self._call is None:
            return
        if self._stage is _Stage.UNTIL_CLOSE:
            self._finish(b"")
        else:
            self._fail(
                WireFault.RESET, "the connection was closed before the response was complete"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the pool; an exchange in flight has failed."""
        if self._joined:
            self._pool.lost(self)
        if self._call is not None:
            reason = "" if exc is None else f": {exc}"
            self._fail(WireFault.RESET, f"the connection was lost{reason}", exc)

    # Reading.

    def _read_chunked(self, data: bytes) -> None:
        decoder = self._decoder
        try:
            payload = decoder.feed(data)
        except MalformedError as error:
            self._fail(WireFault.PROTOCOL, str(error))
            return
        if payload:
            self._on_data(payload)
        if decoder.finished and self._call is not None:
            self._finish(decoder.rest)

    def _read_length(self, data: bytes) -> None:
        left = self._left - len(data)
        if left > 0:
            self._left = left
            self._on_data(data)
            return
        size = self._left
        self._on_data(data[:size])
        if self._call is not None:
            self._finish(data[size:])

    def _read_head(self, data: bytes) -> None:
        call = self._call
        assert call is not None
        call.answered = True
        if self._pool.stale and self.reused and not call.repeatable:
            self._pool.stale = 0
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        try:
            head, rest = self._take_head(data)
        except MalformedError as error:
            self._fail(WireFault.PROTOCOL, str(error))
            return
        if head is None:
            return
        self._keep_alive = head.keep_alive
        call.handler.on_head(head.status, head.headers)
        if self._call is not None:
            self._begin_body(call, head, rest)

    def _take_head(self, data: bytes) -> tuple[ResponseHead | None, bytes]:
        """Return the final response's head and what follows it; None if it is not complete."""
        while True:
            end = data.find(b"\r\n\r\n", self._checked and max(0, self._checked - 3)) + 4
            if end < 4:
                self._check_partial(data)
                return None, b""
            if self._head_bytes + end > self._max_head_bytes:
                raise _too_long()
            head = parse_response_head(data[:end])
            data = data[end:]
            if head.status >= 200:
                return head, data
            if head.status == _SWITCHING_PROTOCOLS:
                raise MalformedError("the engine switched protocols without being asked")
            # An interim response; all of them together must fit the limit.
            self._head_bytes += end
            self._checked = 0

    def _check_partial(self, data: bytes) -> None:
        if self._head_bytes + len(data) > self._max_head_bytes:
            raise _too_long()
        if not data.startswith(_VERSION[: len(data)]):
            raise MalformedError("the response is not HTTP/1")
        check_partial_head(data, self._checked)
        self._checked = len(data)
        self._buffer = data

    def _begin_body(self, call: Call, head: ResponseHead, rest: bytes) -> None:
        length = head.content_length
        if call.head_only or length == 0 or head.status in WITHOUT_BODY:
            self._finish(rest)
        elif head.chunked:
            self._decoder.begin()
            self._stage = _CHUNKED
            if rest:
                self._read_chunked(rest)
        elif length is None:
            self._keep_alive = False
            self._stage = _Stage.UNTIL_CLOSE
            if rest:
                self._on_data(rest)
        elif len(rest) < length:
            self._left = length
            self._stage = _LENGTH
            if rest:
                self._read_length(rest)
        else:  # As most answers that are not streamed arrive.
            self._on_data(rest[:length])
            if self._call is not None:
                self._finish(rest[length:])

    # Ending.

    def _finish(self, rest: bytes) -> None:
        call = self._call
        assert call is not None
        self._call = None
        self._stage = _HEAD
        transport = self._transport
        if (
            not self._keep_alive
            or rest
            or transport.is_busy()  # It answered before it had read all of the request.
            or transport.is_closing()
        ):
            transport.abort()
        else:
            if call.paused:
                transport.resume_reading()
            self.reused = True
            self._pool.release(self)
        call.done = True
        call.connection = None
        try:
            call.handler.on_end()
        except Exception as error:
            call.crash(error)

    def _fail(self, kind: WireFault, message: str, cause: Exception | None = None) -> None:
        call = self._call
        assert call is not None
        self._call = None
        self._stage = _HEAD
        self._transport.abort()
        if kind is WireFault.RESET and self.reused and not call.answered:
            # The engine closed an idle connection just as it was reused (RFC 9112 §9.3.1), or it
            # restarted. The other idle ones are then closed too.
            self._pool.close_idle()
            if call.repeatable:
                self._pool.retry(call)
            else:
                self._pool.fail_stale(call, message, cause)
            return
        call.fail(kind, message, cause)


def _too_long() -> MalformedError:
    return MalformedError("the response's head is too long")

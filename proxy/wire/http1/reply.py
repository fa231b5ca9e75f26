"""The answer to one request, framed as HTTP/1.1; see `Reply`."""

from collections.abc import Callable
from typing import Protocol

from balanceroute.proxy.wire.http1.heads import (
    STATUS_LINES,
    WITHOUT_BODY,
    connection_fields,
    encode_fields,
)
from balanceroute.proxy.wire.messages import Headers
from balanceroute.proxy.wire.reply import AnyTransport, Late, ReplyState
from balanceroute.proxy.wire.turn_writes import TurnTransport

_LAST_CHUNK = b"0\r\n\r\n"
# A larger body is written separately: copying it behind its head would cost more than a second write.
_JOIN_BYTES = 65_536


class ReplyTransport(AnyTransport, Protocol):
    """The connection of a reply."""

    closes_after_answer: bool  # The present answer is the last.

    @property
    def carrier(self) -> TurnTransport:
        """What its bytes go to."""

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

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        if self._late is not None:
            self.write(self._late(status, body))
            self.abort()
            return
        length = b"" if status in WITHOUT_BODY else b"content-length: %d\r\n" % len(body)
        head = self._head(status, headers, length)
        if self._head_only or status in WITHOUT_BODY:
            body = b""
        if len(body) > _JOIN_BYTES:
            self._send(head)
        else:
            body = head + body
        self._send(body)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        """Begin a streamed answer: chunked, or in HTTP/1.0 until the connection closes."""
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        if self._late is None:
            self._begin(status, headers)
        self.started = True

    def comment(self, headers: Headers, data: bytes, late: Late) -> None:
        """See `Reply`."""
        if self.closed:
            return
        if self._late is None and not self.started:
            self._begin(200, headers)
            self._late = late
        self.write(data)

    def _begin(self, status: int, headers: Headers) -> None:
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
        """What takes the chunks of its body at present; None if it has none, or takes no more."""
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

    def end(self) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert self.started, "start the reply first"
        if self._chunked:
            self._send(_LAST_CHUNK)
        self._finish()

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

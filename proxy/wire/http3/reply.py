"""The answer to one request, framed as HTTP/3; see `Reply`."""

from typing import TYPE_CHECKING, Protocol

from balanceroute.proxy.wire.http1.heads import WITHOUT_BODY
from balanceroute.proxy.wire.http3.heads import sent_fields
from balanceroute.proxy.wire.messages import Headers

if TYPE_CHECKING:
    from collections.abc import Callable


class ReplyStream(Protocol):
    """The stream of a reply.

    Attributes:
        paused: More waits to be sent than the limit.
    """

    paused: bool

    def send_head(self, fields: Headers, *, end: bool) -> None:
        """Send a field section."""

    def send_data(self, data: bytes, *, end: bool) -> None:
        """Send a part of the body."""

    def answered(self) -> None:
        """Note that the answer is complete."""

    def release_body(self) -> None:
        """Release the request's body from the budget."""

    def cut(self, *, flush: bool) -> None:
        """Reset the stream, once what was written has arrived if `flush`."""


class Http3Reply:
    """The answer to one request over one stream."""

    __slots__ = (
        *("_common", "_head_only", "_stream", "closed", "more_headers"),
        *("on_closed", "on_pause", "on_resume", "started", "written"),
    )

    def __init__(self, stream: ReplyStream, *, head_only: bool, common: Headers) -> None:
        self.closed = False
        self.on_closed: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.started = False
        self.written = 0
        self.more_headers: Headers = []
        self._stream = stream
        self._common = common
        self._head_only = head_only

    @property
    def paused(self) -> bool:
        """See `Reply`."""
        return not self.closed and self._stream.paused

    def release_body(self) -> None:
        """See `Reply`."""
        if not self.closed:
            self._stream.release_body()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        fields = self._fields(status, headers)
        if status not in WITHOUT_BODY:
            fields.append((b"content-length", b"%d" % len(body)))
        if self._head_only or status in WITHOUT_BODY:
            body = b""
        self._stream.send_head(fields, end=not body)
        if body:
            self._send(body, end=True)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        fields = self._fields(status, headers)
        self._head_only |= status in WITHOUT_BODY
        self.started = True
        self._stream.send_head(fields, end=False)

    def write(self, data: bytes) -> None:
        """See `Reply`."""
        if self.closed or not data:
            return
        assert self.started, "start the reply first"
        if not self._head_only:
            self._send(data, end=False)

    def end(self) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert self.started, "start the reply first"
        self._stream.send_data(b"", end=True)
        self._finish()

    def abort(self) -> None:
        """Reset the stream, so that the client sees an incomplete answer."""
        if self.closed:
            return
        self._close()
        self._stream.cut(flush=self.started)

    def lose_client(self) -> None:
        """Note that the client is gone; only the stream calls this."""
        on_closed = self.on_closed
        self._close()
        if on_closed is not None:
            on_closed()

    def _fields(self, status: int, headers: Headers) -> Headers:
        fields = sent_fields([*headers, *self.more_headers, *self._common])
        return [(b":status", b"%d" % status), *fields]

    def _send(self, data: bytes, *, end: bool) -> None:
        self.written += len(data)
        self._stream.send_data(data, end=end)

    def _finish(self) -> None:
        self._close()
        self._stream.answered()

    def _close(self) -> None:
        self.closed = True
        # The application's objects often refer to the reply: this breaks the reference cycle.
        self.on_closed = self.on_pause = self.on_resume = None

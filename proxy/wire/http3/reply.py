"""The answer to one request, framed as HTTP/3; see `Reply`."""

from typing import Protocol

from balanceroute.proxy.wire.http1.heads import WITHOUT_BODY
from balanceroute.proxy.wire.http3.heads import sent_fields
from balanceroute.proxy.wire.messages import Headers
from balanceroute.proxy.wire.reply import Late
from balanceroute.proxy.wire.reply_state import AnyTransport, ReplyState


class ReplyStream(AnyTransport, Protocol):
    """The stream of a reply."""

    def send_head(self, fields: Headers, *, end: bool) -> None:
        """Send a field section."""

    def send_data(self, data: bytes, *, end: bool) -> None:
        """Send a part of the body."""

    def cut(self, *, flush: bool) -> None:
        """Reset the stream, once what was written has arrived if `flush`."""


class Http3Reply(ReplyState[ReplyStream]):
    """The answer to one request over one stream."""

    __slots__ = ("_common",)

    def __init__(self, stream: ReplyStream, *, head_only: bool, common: Headers) -> None:
        super().__init__(stream, head_only=head_only)
        self._common = common

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        if self._late is not None:
            self.write(self._late(status, body))
            self.abort()
            return
        fields = self._fields(status, headers)
        if status not in WITHOUT_BODY:
            fields.append((b"content-length", b"%d" % len(body)))
        if self._head_only or status in WITHOUT_BODY:
            body = b""
        self._transport.send_head(fields, end=not body)
        if body:
            self._send(body, end=True)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        """See `Reply`."""
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
        fields = self._fields(status, headers)
        self._head_only |= status in WITHOUT_BODY
        self._transport.send_head(fields, end=False)

    def write(self, data: bytes) -> None:
        """See `Reply`."""
        if self.closed or not data:
            return
        assert self.started or self.commented, "start the reply first"
        if not self._head_only:
            self._send(data, end=False)

    def end(self) -> None:
        """See `Reply`."""
        if self.closed:
            return
        assert self.started, "start the reply first"
        self._transport.send_data(b"", end=True)
        self._finish()

    def abort(self) -> None:
        """Reset the stream, so that the client sees an incomplete answer."""
        if self.closed:
            return
        self._close()
        self._transport.cut(flush=self.started or self.commented)

    def _fields(self, status: int, headers: Headers) -> Headers:
        fields = sent_fields([*headers, *self.more_headers, *self._common])
        return [(b":status", b"%d" % status), *fields]

    def _send(self, data: bytes, *, end: bool) -> None:
        self.written += len(data)
        self._transport.send_data(data, end=end)

"""One request of a client and its answer, on a stream of its own: of HTTP/2 or HTTP/3.

The rules are those of `http1/server_connection.py`: a request reaches the application complete or not at
all, and a request that its head rules out is answered before the server reads the body.
"""

import logging
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from balanceroute.proxy.wire.http1.heads import (
    HOST,
    METHODS,
    OWN_FIELDS,
    WITHOUT_BODY,
    RequestHead,
    encode_fields,
    length_of,
    unknown_method,
)
from balanceroute.proxy.wire.http1.incoming_request import IncomingBody
from balanceroute.proxy.wire.http1.service import Loss, Service, loss_of_body, loss_of_head
from balanceroute.proxy.wire.messages import (
    AnyTransport,
    Headers,
    HttpRequest,
    MalformedError,
    Rejection,
    ReplyState,
    ServerLimits,
    UnsafeHeaderError,
)
from balanceroute.proxy.wire.turn_writes import WriteProgress

# The heads of messages, as the heads of HTTP/1.1's that mean the same (RFC 9114 section 4, RFC 9113
# section 8).

# The size of each field beside its bytes (RFC 9114 section 4.2.2, RFC 9113 section 6.5.2).
_FIELD_BYTES = 32
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*+")
_SCHEMES = frozenset({b"https", b"http"})


def request_head(fields: Headers, limits: ServerLimits) -> RequestHead:
    """Return the head that a field section is.

    Args:
        fields: With the pseudo-header fields, which were checked: each once, and first.

    Raises:
        MalformedError: It is no request, or beyond a limit; the error has the status to answer.
    """
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    headers = [field for field in fields if not field[0].startswith(b":")]
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    authority = pseudo.get(b":authority", b"")
    if len(target) > limits.target_limit_bytes:
        raise MalformedError("the request target is too long", 414)
    size = sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields)
    if size > limits.header_limit_bytes:
        raise MalformedError("the request's head is too long", 431)
    if len(headers) > limits.header_limit:
        raise MalformedError("the request has too many headers", 431)
    protocol = pseudo.get(b":protocol", b"").lower()
    if method == b"CONNECT" and protocol == b"websocket":
        # Over HTTP/1.1 this is a GET with this header (RFC 9220). Its method stays, so that no application
        # answers it with 200, which would open a tunnel.
        headers.append((b"upgrade", protocol))
    elif method not in METHODS:
        raise unknown_method(method)
    elif b":protocol" in pseudo:
        raise MalformedError("no other protocol is spoken over a request")
    if pseudo.get(b":scheme", b"").lower() not in _SCHEMES:
        raise MalformedError("the :scheme is missing, or neither https nor http")
    if not _TARGET.fullmatch(target) and (target, method) != (b"*", b"OPTIONS"):
        raise MalformedError("the request target is no absolute path")
    try:
        encode_fields(headers)
    except UnsafeHeaderError:
        raise MalformedError("a header is malformed") from None
    if not HOST.fullmatch(authority):
        raise MalformedError("the :authority is malformed")
    if any(value != authority for name, value in headers if name == b"host"):
        raise MalformedError("Host and :authority differ")
    headers = [field for field in headers if field[0] != b"host"]
    headers.append((b"host", authority))
    lengths = [value for name, value in headers if name == b"content-length"]
    expectations = [value.lower() for name, value in headers if name == b"expect"]
    if expectations not in ([], [b"100-continue"]):
        raise MalformedError("the only expectation served is 100-continue", 417)
    path, _, query = target.partition(b"?")
    return RequestHead(
        method,
        path,
        query,
        http_1_0=False,
        headers=headers,
        content_length=length_of(lengths) if lengths else None,
        chunked=False,
        keep_alive=True,
        expects_continue=bool(expectations),
    )


def sent_fields(headers: Headers) -> Headers:
    """Return headers to send, without those that frame a message of HTTP/1.1.

    Raises:
        UnsafeHeaderError: A name is no token, or a value has a control byte.
    """
    encode_fields(headers)
    return [(name, value.strip()) for name, value in headers if name not in OWN_FIELDS]


# How often something may happen: so many times at once, and so often for ever.


class LeakyBucket:
    """Counts.

    Args:
        burst: How often it may happen at once.
        per_s: How often for ever.
    """

    __slots__ = ("_allowed", "_burst", "_clock", "_counted_s", "_per_s")

    def __init__(self, burst: float, per_s: float, clock: Callable[[], float]) -> None:
        self._burst = self._allowed = burst
        self._per_s = per_s
        self._clock = clock
        self._counted_s = clock()

    def take(self) -> bool:
        """Count once; return whether it may happen."""
        now_s = self._clock()
        self._allowed = min(self._burst, self._allowed + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True


# The answer to one request, in frames of a stream; see `Reply`.


class ReplyStream(AnyTransport, Protocol):
    def send_head(self, fields: Headers, *, end: bool) -> None:
        """Send a field section."""

    def send_data(self, data: bytes, *, end: bool) -> None:
        """Send a part of the body."""

    def cut(self, *, flush: bool) -> None:
        """Reset the stream; with `flush` once the written bytes have arrived."""


class StreamReply(ReplyState[ReplyStream]):
    """The answer to one request over one stream."""

    __slots__ = ("_common",)

    def __init__(self, stream: ReplyStream, *, head_only: bool, common: Headers) -> None:
        super().__init__(stream, head_only=head_only)
        self._common = common

    def _whole(self, status: int, headers: Headers, body: bytes) -> None:
        fields = self._fields(status, headers)
        if status not in WITHOUT_BODY:
            fields.append((b"content-length", b"%d" % len(body)))
        if self._head_only or status in WITHOUT_BODY:
            body = b""
        self._transport.send_head(fields, end=not body)
        if body:
            self._send(body, end=True)

    def _begin(self, status: int, headers: Headers) -> None:
        fields = self._fields(status, headers)
        self._head_only |= status in WITHOUT_BODY
        self._transport.send_head(fields, end=False)

    def write(self, data: bytes) -> None:
        if self.closed or not data:
            return
        assert self.started or self.commented, "start the reply first"
        if not self._head_only:
            self._send(data, end=False)

    def _last(self) -> None:
        self._transport.send_data(b"", end=True)

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


_LOG = logging.getLogger(__name__)
_CONTINUE: Headers = [(b":status", b"100")]


class StreamOwner(Protocol):
    service: Service  # Shared by all connections.
    peer: str  # The client's address and port.
    rejection: Rejection | None  # Why no request of the connection is served; None if they are.

    def began(self, stream: "ServerStream", head: RequestHead) -> None:
        """Note the head of a request that is served."""

    def send_head(self, stream_id: int, fields: Headers, *, end: bool) -> None:
        """Send a field section."""

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> None:
        """Send a part of a body."""

    def refuse_rest(self, stream_id: int) -> None:
        """Read nothing more of a stream."""

    def reset(self, stream_id: int) -> None:
        """End a stream without its answer."""

    def unsent(self, stream_id: int) -> int:
        """Return the bytes of a stream that were never sent."""

    def unacknowledged(self, stream_id: int) -> int:
        """Return the bytes of a stream that the client has not acknowledged."""

    def left(self, stream: "ServerStream") -> None:
        """Note the end of a stream's exchange; written bytes may still be on their way."""


class _Stage(Enum):
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()  # The application has the request, or it was refused.
    LEFT = auto()


class ServerStream:
    """A request and its answer; see `ReplyStream`."""

    __slots__ = (
        *(
            "_body",
            "_body_since_s",
            "_head",
            "_head_bytes",
            "_origin",
            "_owner",
            "_reply",
            "_stage",
            "_written",
        ),
        *("_writes", "cut_when_sent", "deadline_s", "number", "paused"),
    )

    def __init__(self, owner: StreamOwner, number: int) -> None:
        service = owner.service
        self.number = number
        self.paused = False
        self.cut_when_sent = False  # Reset once the written bytes have arrived.
        self._owner = owner
        self._stage = _Stage.HEAD
        self._head: RequestHead | None = None
        self._head_bytes = 0
        self._origin: Headers = []  # Of a head that could not be parsed.
        self._body = IncomingBody(service.bodies, service.limits.body_limit_bytes)
        self._body_since_s = 0.0
        self._reply: StreamReply | None = None
        self._written = 0
        self._writes = WriteProgress(service.limits.write_timeout_s)
        # When the sweep calls `expire`.
        self.deadline_s = service.loop.time() + service.limits.header_timeout_s

    # What the client sends.

    @property
    def reads(self) -> bool:
        """Whether the stream still uses bytes that come."""
        return self._stage in (_Stage.HEAD, _Stage.BODY)

    @property
    def has_left(self) -> bool:
        """Whether its exchange has ended."""
        return self._stage is _Stage.LEFT

    def check_head(self, size: int) -> None:
        """Note that so many bytes were read; refuse a request whose head does not end."""
        if self._stage is _Stage.HEAD:
            self._head_bytes += size
            if self._head_bytes > self._owner.service.limits.header_limit_bytes:
                self.refuse(Rejection(431, "the request's head is too long"))

    def on_head(self, fields: Headers, *, ended: bool) -> None:
        """Take the field section before the body; the one behind it says nothing here."""
        if self._stage is not _Stage.HEAD:
            if ended and self._stage is _Stage.BODY:
                self._complete()
            return
        owner, service = self._owner, self._owner.service
        self._origin = [field for field in fields if field[0] == b"origin"]
        try:
            head = self._head = request_head(fields, service.limits)
            rejection = owner.rejection
            if rejection is None and service.admit is not None:
                rejection = service.admit(head, owner.peer)
            if rejection is None:
                self._body.check_length(head.content_length or 0)
        except MalformedError as error:
            self.refuse(error.rejection, rest=not ended)
            return
        if rejection is not None:
            self.refuse(rejection, rest=not ended)
            return
        owner.began(self, head)
        self._stage = _Stage.BODY
        self._body_since_s = service.loop.time()
        self.deadline_s = self._body_deadline_s
        if ended:
            self._complete()
        elif head.expects_continue:
            owner.send_head(self.number, _CONTINUE, end=False)

    def on_data(self, data: bytes, *, ended: bool) -> None:
        if self._stage is not _Stage.BODY:
            return
        try:
            self._body.add(data)
        except MalformedError as error:
            self.refuse(error.rejection, rest=not ended)
            return
        if ended:
            self._complete()

    def lose(self) -> None:
        """Note that the client has given up the request, or is gone."""
        reply, self._reply = self._reply, None
        self._leave()
        if reply is not None:
            reply.lose_client()

    def refuse(self, rejection: Rejection, *, rest: bool = True) -> None:
        """Answer a request that does not reach the application."""
        service = self._owner.service
        if rest:
            self._owner.refuse_rest(self.number)
        self._body.drop()
        headers, body = service.refuse(rejection, self._head, self._owner.peer)
        self._begin_answer().send(rejection.status, headers, body)

    # What the application writes.

    def send_head(self, fields: Headers, *, end: bool) -> None:
        self._owner.send_head(self.number, fields, end=end)

    def send_data(self, data: bytes, *, end: bool) -> None:
        self._written += len(data)
        self._owner.send_data(self.number, data, end=end)
        waiting = self._owner.unsent(self.number)
        if not self.paused and waiting > self._owner.service.limits.write_buffer_bytes:
            self.paused = True
            if self._reply is not None and self._reply.on_pause is not None:
                self._reply.on_pause()

    def answered(self) -> None:
        self._reply = None
        self._leave()

    def release_body(self) -> None:
        self._body.release()

    def cut(self, *, flush: bool) -> None:
        self._reply = None
        self.cut_when_sent = flush and self._owner.unacknowledged(self.number) > 0
        if not self.cut_when_sent:
            self._owner.reset(self.number)
        self._leave()

    # Called by the connection.

    def resume(self) -> None:
        """Go on with a paused reply if enough was sent."""
        limit = self._owner.service.limits.write_buffer_bytes
        if self.paused and self._owner.unsent(self.number) <= limit // 2:
            self.paused = False
            if self._reply is not None and self._reply.on_resume is not None:
                self._reply.on_resume()

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        match self._stage:
            case _Stage.HEAD:
                begun_s = self.deadline_s - self._owner.service.limits.header_timeout_s
                return loss_of_head(begun_s, now_s, begun=True)
            case _Stage.BODY:
                assert self._head is not None
                expects = self._head.expects_continue
                return loss_of_body(self._body_due_s, now_s, expects_continue=expects)
            case _Stage.ANSWER | _Stage.LEFT:
                return None

    def expire(self, now_s: float) -> bool:
        """Act on a deadline that has passed; return whether the client has stalled."""
        match self._stage:
            case _Stage.HEAD:
                self.refuse(Rejection(408, "the request's head did not arrive in time"))
            case _Stage.BODY:
                self.deadline_s = self._body_deadline_s
                if self.deadline_s <= now_s:
                    self.refuse(Rejection(408, "the request's body did not arrive in time"))
            case _Stage.ANSWER | _Stage.LEFT:
                waiting = self._owner.unacknowledged(self.number)
                if self._writes.has_stalled(now_s, written=self._written, waiting=waiting):
                    return True
                self.deadline_s = now_s + self._writes.check_s
        return False

    @property
    def _body_due_s(self) -> float:
        return self._body_since_s + self._body.size / self._owner.service.limits.body_bytes_per_s

    @property
    def _body_deadline_s(self) -> float:
        return self._body_due_s + self._owner.service.limits.body_timeout_s

    def _complete(self) -> None:
        assert self._head is not None
        if self._head.content_length not in (None, self._body.size):
            reason = "the body is not as long as Content-Length says"
            self.refuse(Rejection(400, reason), rest=False)
        else:
            self._dispatch()

    def _dispatch(self) -> None:
        head, service = self._head, self._owner.service
        assert head is not None
        body, peer = self._body.take(), self._owner.peer
        request = HttpRequest(
            head.method, head.path, head.query, head.headers, body, peer, head.learned
        )
        reply = self._begin_answer()
        try:
            service.application(request, reply)
        except Exception:
            _LOG.exception("the application failed on %r", head.path)
            if reply.started:
                reply.abort()
            elif not reply.closed:
                headers, text = service.refuse(Rejection(500, "internal error"), head, peer)
                reply.send(500, headers, text)

    def _begin_answer(self) -> StreamReply:
        head = self._head
        reply = self._reply = StreamReply(
            self,
            head_only=head is not None and head.method == b"HEAD",
            common=self._owner.service.common_headers(
                self._origin if head is None else head.headers
            ),
        )
        self._stage = _Stage.ANSWER
        now_s = self._owner.service.loop.time()
        self._writes.begin(now_s)
        self.deadline_s = now_s + self._writes.check_s
        return reply

    def _leave(self) -> None:
        self._stage = _Stage.LEFT
        self._body.drop()
        self._owner.left(self)

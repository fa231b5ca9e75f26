"""Messages and limits of HTTP, and how an exchange can fail.

BalanceRouteError
├── WireError            an exchange with an engine that failed; has the facts about it
├── MalformedError       bytes that violate HTTP/1.1; has the status that a server answers
└── UnsafeHeaderError    a header that must not be written; nothing was sent
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct, field

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.core.setting import integer, seconds

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, values without surrounding white space, in order of arrival."""


class Pieces:
    """A large body to send, as it lies in memory: put together it would be copied."""

    __slots__ = ("_size", "parts")

    def __init__(self, parts: list[bytes | memoryview]) -> None:
        self.parts = parts  # Its bytes, in order.
        self._size = sum(map(len, parts))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Payload = bytes | Pieces
"""A body to send."""


class Learned(Struct):
    """The facts that the application has derived from a head.

    Requests of a connection whose heads differ at most by the length of their bodies share it.
    """

    facts: Any = None  # The application's own; None until it has any.


class HttpRequest(Struct):
    method: bytes
    path: bytes  # The target before `?`, not percent-decoded.
    query: bytes  # The target after `?`.
    headers: Headers
    body: bytes  # The whole body, without framing.
    peer: str  # The client's address and port, for logs.
    learned: Learned = field(default_factory=Learned)  # Of its head.

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, by its lower-case name."""
        return first_value(self.headers, name)


@dataclass(frozen=True, slots=True)
class Rejection:
    status: int  # The status of the answer.
    message: str  # The message for the client.
    # Headers of the answer, in addition to those of every error.
    headers: tuple[tuple[bytes, bytes], ...] = ()
    param: str | None = None  # The field of the request that is at fault; None if there is none.


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, by its lower-case name."""
        return first_value(self.headers, name)


_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server accepts from a client, and how long it waits.

    A sweep checks the times once a second, or four times per shortest limit if that is more often. So
    each may end that much later.
    """

    # None is no limit here. For one address it leaves rule 2 of `ConnectionLimit`, which 0 turns off too.
    connection_limit: int | None = integer(
        None,
        "connections of clients; beyond it those without a complete request are closed for newcomers, "
        "and then newcomers get 503",
        1,
        10**6,
        shown_default="a third of the file descriptors left",
        word="auto",
    )
    peer_connection_limit: int | None = integer(
        None,
        "connections of one client address; beyond it newcomers get 429. auto: no such limit, but an "
        "address with more than a quarter of all takes no place of one with fewer; none: neither",
        1,
        10**6,
        word="auto",
        off="none",
    )
    body_limit_bytes: int = integer(16 * _MIB, "size of a request's body", 1, 1 << 40)  # Else 413.
    body_budget_bytes: int = integer(
        512 * _MIB,
        "all bodies of requests that are being received or wait; beyond it newcomers get 503",
        1,
        1 << 40,
    )
    # From the request line to the blank line; else 431.
    header_limit_bytes: int = integer(32_768, "size of a request's header", 256, _MIB)
    header_limit: int = integer(100, "fields in a request's header", 1, 10_000)  # Else 431.
    target_limit_bytes: int = integer(8_192, "size of a request's target", 64, _MIB)  # Else 414.
    # From the first byte of the connection, or of a further request.
    header_timeout_s: float = seconds(10.0, "for a client to send a whole header")
    # From the end of the header, extended by what the received bytes take at `body_bytes_per_s`: a large
    # upload passes, a trickle does not.
    body_timeout_s: float = seconds(60.0, "for a client to send a whole body")
    keep_alive_timeout_s: float = seconds(
        75.0, "that a client's connection may stay open without a request"
    )
    write_timeout_s: float = seconds(
        60.0, "that a client may leave its answer unread before it is cut off"
    )
    write_buffer_bytes: int = integer(
        65_536, "unread answer kept for a client before its engine is paused", 1, 1 << 30
    )
    body_bytes_per_s: int = 65_536
    # Whether a client that shuts down its sending side still gets its answer. On a socket such a client
    # looks the same as one that left: an LLM client that cancels closes its socket, which also arrives
    # as a FIN, and the engine must then stop at once. So by default a FIN during a request means that
    # the client left, as in nginx (`proxy_ignore_client_abort off`) and in every ASGI server.
    half_close: bool = False
    # Whether a connection whose answer is complete, but unread, makes room for a new one. For answers that
    # can be asked for again.
    unread_gives_way: bool = False


class WireFault(Enum):
    """Why an exchange with an engine failed."""

    CONNECT = "refused, unreachable, or no TLS"
    NO_ADDRESS = "the name did not resolve"
    CONNECT_TIMEOUT = "no connection in time"
    RESET = "closed before a complete response"
    STALE = "a reused connection closed before any response, and a new one opens"
    PROTOCOL = "malformed response"
    TOO_LARGE = "past a size limit"
    TIMEOUT = "no complete response in time"
    TOO_LATE = "not sent in time"


class WireError(BalanceRouteError):
    """An exchange that did not end with a complete response."""

    def __init__(self, kind: WireFault, message: str, *, sent: bool, answered: bool) -> None:
        super().__init__(message)
        self.kind = kind  # The kind of failure.
        # Whether bytes of the request were written; if not, the engine never saw it.
        self.sent = sent
        self.answered = answered  # Whether any byte of a response arrived.

    @property
    def is_loss(self) -> bool:
        """Whether the connection was lost after the request was sent: the engine may be dead."""
        return self.sent and self.kind is WireFault.RESET


class MalformedError(BalanceRouteError):
    """Bytes that violate HTTP/1.1 or a limit."""

    def __init__(
        self, message: str, status: int = 400, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.rejection = Rejection(status, message, headers)  # The answer of a server.


class UnsafeHeaderError(BalanceRouteError, ValueError):
    """A header whose name is no token or whose value could end its line."""


def bracketed(host: str) -> str:
    """Return a host as URLs and Host headers spell it."""
    return f"[{host}]" if ":" in host else host


def first_value(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header, by its lower-case name."""
    for key, value in headers:
        if key == name:
            return value
    return None


# How to send requests, in any version of HTTP.


class ResponseHandler(Protocol):
    """Receives one response. Nothing is called within `Caller.request`, nor after an abort."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Process the head of the final response."""

    def on_data(self, data: bytes) -> None:
        """Process payload without framing; called once per segment that contains some."""

    def on_end(self) -> None:
        """Note that the response is complete; the last call."""

    def on_error(self, error: WireError) -> None:
        """Note that the exchange failed; the last call."""


class LineHandler(ResponseHandler, Protocol):
    """Receives the events of a stream as lines, too."""

    takes_lines: bool  # Whether it does at present.

    def on_line(self, line: bytes) -> None:
        """Process, instead of by `on_data`, an event of one line, without the blank line behind it."""

    def on_lines(self, lines: list[bytes]) -> None:
        """Process several such events that came together."""


class Calling(Protocol):
    """One exchange in flight."""

    @property
    def sent(self) -> bool:
        """Whether bytes of the request were written."""

    @property
    def answered(self) -> bool:
        """Whether any byte of a response arrived."""

    def abort(self) -> None:
        """End it; nothing more is called."""


class Caller(Protocol):
    """Sends requests to one address."""

    @property
    def name(self) -> str:
        """The URL, for messages."""

    def request(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, handler: ResponseHandler
    ) -> Calling:
        """Begin an exchange.

        Args:
            method: In upper case.
            target: In origin form, encoded.
            headers: Without Host, and without those that frame the message.
            body: Possibly empty.
            handler: Receives the response, never before this returns.

        Raises:
            UnsafeHeaderError: A header, the method or the target cannot be written.
        """

    def close(self) -> None:
        """Close idle connections; the rest closes with its exchange."""


# The bytes of request bodies that one server holds: received so far, or not answered yet.
#
# A request is checked by its Content-Length, if it has one, but only received bytes are counted:
# a slow upload reserves nothing that it has not sent.


class BodyBudget:
    """Counts bytes.

    Args:
        limit: The most bytes; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.used = 0  # Bytes now.
        self.rejected = 0  # Requests that did not fit.

    def check(self, size: int) -> None:
        """Raise MalformedError (503) if there is no room for `size` more bytes."""
        if self._limit is not None and self.used + size > self._limit:
            self.rejected += 1
            message = "the bodies of the requests in flight are too large together"
            raise MalformedError(message, 503, ((b"retry-after", b"1"),))


# The answer to one request, as the application writes it, independent of the protocol.

Late = Callable[[int, bytes], bytes]
"""Returns the form of a whole answer in a stream that has begun, given its status and its body."""


class Reply(Protocol):
    """The answer to one request: one `send`, or `start`, any number of `write`, and `end` or `abort`.

    After the answer, or once the client is gone, every method does nothing.
    """

    closed: bool  # Nothing more can be sent.
    started: bool  # The head of a streamed answer was sent.
    written: int  # Bytes passed to the transport.
    # Called once if the client leaves before the answer is complete.
    on_closed: Callable[[], None] | None
    # Called when the write buffer exceeds its limit, possibly within `write`.
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None  # Called when a paused reply may be written again.
    more_headers: Headers  # Of the answer, behind those that it is given.

    @property
    def commented(self) -> bool:
        """Whether the head of a stream went with a comment, while the answer could still be any."""

    @property
    def paused(self) -> bool:
        """Whether the write buffer is above its limit."""

    def release_body(self) -> None:
        """Note that the application no longer holds the request's body."""

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer.

        Args:
            status: 200 to 599.
            headers: Written in order. The server frames the message itself and drops framing headers.
            body: Not sent in answer to HEAD, or with a status that has no body.

        Raises:
            UnsafeHeaderError: A header cannot be written; nothing was sent.
        """

    def start(self, status: int, headers: Headers) -> None:
        """Begin a streamed answer.

        Raises:
            UnsafeHeaderError: A header cannot be written; nothing was sent.
        """

    def comment(self, headers: Headers, data: bytes, late: Late) -> None:
        """Send something that is no part of the answer; the first goes behind the head of a stream.

        The answer may still begin, or be a whole one, for which it is too late then.

        Args:
            headers: Of the stream, with status 200; `start` drops its own in their place.
            late: Returns the bytes that end the stream, broken off, in place of a whole answer.

        Raises:
            UnsafeHeaderError: A header cannot be written; nothing was sent.
        """

    def write(self, data: bytes) -> None:
        """Send one piece of a streamed answer."""

    def end(self) -> None:
        """End a streamed answer."""

    def abort(self) -> None:
        """End so that the client sees an incomplete answer; written bytes are still sent."""


Application = Callable[[HttpRequest, Reply], None]


class AnyTransport(Protocol):
    """The connection or stream of a reply."""

    paused: bool  # More waits to be sent than the limit.

    def answered(self) -> None:
        """Note that the answer is complete."""

    def release_body(self) -> None:
        """Release the request's body from the budget."""


TransportT = TypeVar("TransportT", bound=AnyTransport)


class ReplyState(ABC, Generic[TransportT]):
    """The state of a reply and its callbacks; see `Reply`. Subclasses frame it.

    Args:
        head_only: Whether the request wants no body.
    """

    __slots__ = (
        "_head_only",
        "_late",
        "_transport",
        "closed",
        "more_headers",
        "on_closed",
        "on_pause",
        "on_resume",
        "started",
        "written",
    )

    def __init__(self, transport: TransportT, *, head_only: bool) -> None:
        self.closed = False
        self.on_closed: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.started = False
        self.written = 0
        self.more_headers: Headers = []
        self._transport = transport
        self._head_only = head_only
        self._late: Late | None = None  # Once the head of a stream went with a comment.

    @property
    def commented(self) -> bool:
        return self._late is not None

    @property
    def paused(self) -> bool:
        return not self.closed and self._transport.paused

    def release_body(self) -> None:
        if not self.closed:
            self._transport.release_body()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        if self._late is not None:
            self.write(self._late(status, body))
            self.abort()
            return
        self._whole(status, headers, body)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        if self.closed:
            return
        assert not self.started, "this reply is streamed"
        if self._late is None:
            self._begin(status, headers)
        self.started = True

    def comment(self, headers: Headers, data: bytes, late: Late) -> None:
        if self.closed:
            return
        if self._late is None and not self.started:
            self._begin(200, headers)
            self._late = late
        self.write(data)

    def end(self) -> None:
        if self.closed:
            return
        assert self.started, "start the reply first"
        self._last()
        self._finish()

    def lose_client(self) -> None:
        """Note that the client is gone; only the transport calls this."""
        on_closed = self.on_closed
        self._close()
        if on_closed is not None:
            on_closed()

    @abstractmethod
    def write(self, data: bytes) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def _whole(self, status: int, headers: Headers, body: bytes) -> None: ...

    @abstractmethod
    def _begin(self, status: int, headers: Headers) -> None: ...

    @abstractmethod
    def _last(self) -> None: ...

    def _finish(self) -> None:
        self._close()
        self._transport.answered()

    def _close(self) -> None:
        self.closed = True
        # The application's objects often refer to the reply: this breaks the reference cycle.
        self.on_closed = self.on_pause = self.on_resume = None

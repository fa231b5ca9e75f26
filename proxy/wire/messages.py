"""What travels: headers, requests, responses, limits, and how an exchange can fail.

BalanceRouteError
├── WireError            an exchange with an engine that did not end well; says what is known of it
├── MalformedError       bytes that break HTTP/1.1; carries the status a server answers with
└── UnsafeHeaderError    a header that must not be written; nothing was sent
"""

from dataclasses import dataclass
from enum import Enum

from balanceroute.proxy.core.errors import BalanceRouteError

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, values without surrounding white space, in order of arrival."""


@dataclass(slots=True)
class Request:
    """A complete request.

    Attributes:
        path: The target before `?`, as it came: percent signs are not decoded.
        query: The target after `?`.
        body: The whole body, without its framing.
        peer: The client's address, for logs.
    """

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    peer: str

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, by its lower-case name."""
        return first_value(self.headers, name)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not served.

    Attributes:
        status: What the server answers.
        message: For the client.
        headers: Of the answer, beside those of every error.
        param: The member of the request that is at fault; None if it is none.
    """

    status: int
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, by its lower-case name."""
        return first_value(self.headers, name)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server accepts from a client, and how long it waits for it.

    Times are checked by a sweep once a second (four times per shortest limit if that is shorter), so
    each may end that much later.

    Attributes:
        header_limit_bytes: A request's head, from the request line to the blank line; past it 431.
        header_limit: Header lines; past it 431.
        target_limit_bytes: The request target; past it 414.
        body_limit_bytes: A body without its framing; past it 413.
        header_timeout_s: From a connection's or a further request's first byte to the end of the head.
        body_timeout_s: From the end of the head to the end of the body, and as much longer as what
            came would take at `body_bytes_per_s`: a large upload passes, a trickle does not.
        keep_alive_timeout_s: Between an answer and the next request.
        write_timeout_s: A client that reads nothing of what waits for it this long is cut.
        write_buffer_bytes: Past it a reply is told to pause.
        half_close: Whether a client that shuts its sending side down still gets its answer. On a
            socket this cannot be told from a client that went away, and those are the many: an LLM
            client that cancels closes its socket, which arrives as the same FIN, and the engine must
            stop at once. So by default a FIN during a request counts as leaving, as in nginx
            (`proxy_ignore_client_abort off`) and in every ASGI server.
        connection_limit: At a time; see `ConnectionLimit` for those beyond. With TLS a connection counts
            when its handshake is over. None for no bound.
        peer_connection_limit: The same, of one address.
        body_budget_bytes: All bodies that are being received or whose requests are not answered yet;
            a request beyond it gets 503. None for no bound.
    """

    header_limit_bytes: int = 32_768
    header_limit: int = 100
    target_limit_bytes: int = 8_192
    body_limit_bytes: int = 16 << 20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    body_bytes_per_s: int = 65_536
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    write_buffer_bytes: int = 65_536
    half_close: bool = False
    connection_limit: int | None = None
    peer_connection_limit: int | None = None
    body_budget_bytes: int | None = None


class WireFault(Enum):
    """Why an exchange with an engine failed."""

    CONNECT = "refused, unreachable, or no TLS"
    NO_ADDRESS = "the name did not resolve"
    CONNECT_TIMEOUT = "no connection in time"
    RESET = "closed before a complete response"
    PROTOCOL = "malformed response"
    TOO_LARGE = "past a size limit"
    TIMEOUT = "no complete response in time"


class WireError(BalanceRouteError):
    """An exchange that did not end with a complete response.

    Attributes:
        kind: What went wrong.
        sent: Whether bytes of the request were handed to the kernel: if not, the engine never saw it.
        answered: Whether any byte of a response came.
    """

    def __init__(self, kind: WireFault, message: str, *, sent: bool, answered: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent
        self.answered = answered


class MalformedError(BalanceRouteError):
    """Bytes that break HTTP/1.1 or a limit.

    Attributes:
        rejection: What a server answers.
    """

    def __init__(
        self, message: str, status: int = 400, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.rejection = Rejection(status, message, headers)


class UnsafeHeaderError(BalanceRouteError, ValueError):
    """A header whose name is no token or whose value could end its line."""


def first_value(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header, by its lower-case name."""
    for key, value in headers:
        if key == name:
            return value
    return None

"""A request as it arrives: what of it is parsed, and what is not yet."""

from collections.abc import Callable

from balanceroute.proxy.wire.body_budget import BodyBudget
from balanceroute.proxy.wire.http1.heads import RequestHead, check_partial_head
from balanceroute.proxy.wire.http1.incoming_body import IncomingBody
from balanceroute.proxy.wire.http1.repeated_head import RepeatedHead
from balanceroute.proxy.wire.messages import MalformedError, ServerLimits

# The request line without the target: method, spaces and version.
_REQUEST_LINE_SLACK = 64


class IncomingRequest:
    """The requests of one connection, one after the other.

    Args:
        limits: What is accepted.
        bodies: The budget for the bodies of all connections.
        clock: Seconds.

    Attributes:
        buffer: Bytes that are not parsed yet.
        begun: A head is awaited or was read. Also at first: a new connection has the time of a head
            to send one.
        charged: Bytes of the buffer that are charged to the budget.
        head: The head of the present request once it is complete.
    """

    __slots__ = (
        "_body",
        "_body_since_s",
        "_budget",
        "_checked",
        "_clock",
        "_heads",
        "_limits",
        "_skip_blank",
        "begun",
        "buffer",
        "charged",
        "head",
    )

    def __init__(
        self, limits: ServerLimits, bodies: BodyBudget, *, clock: Callable[[], float]
    ) -> None:
        self.buffer = b""
        self.begun = True
        self.head: RequestHead | None = None
        self._heads = RepeatedHead()
        self._limits = limits
        self._clock = clock
        self._budget = bodies
        self.charged = 0
        self._body = IncomingBody(bodies, limits.body_limit_bytes)
        self._body_since_s = 0.0
        self._checked = 0
        self._skip_blank = True

    def begin(self) -> None:
        """Begin a further request."""
        self._release_waiting()
        self.begun = True
        self._checked = 0
        self._skip_blank = True

    def take_head(self) -> RequestHead | None:
        """Parse the head and remove it from the buffer; return None if it is not complete.

        Raises:
            MalformedError: It is invalid or too large.
        """
        limits = self._limits
        buffer = self.buffer
        if self._skip_blank and buffer[:2] == b"\r\n":  # RFC 9112 §2.2: ignore at least one.
            self._skip_blank = False
            buffer = self.buffer = buffer[2:]
        end = buffer.find(b"\r\n\r\n", self._checked and max(0, self._checked - 3)) + 4
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
            return None
        if end > limits.header_limit_bytes:
            raise MalformedError("the request's head is too long", 431)
        self.head = self._heads.parse(
            buffer[:end],
            max_target_bytes=limits.target_limit_bytes,
            max_headers=limits.header_limit,
        )
        self.buffer = buffer[end:]
        return self.head

    def skip_body(self) -> bool:
        """Remove the body from the buffer if all of it has arrived; return whether it has."""
        length = self._arrived_length()
        if length is None:
            return False
        self.buffer = self.buffer[length:]
        return True

    def begin_body(self) -> bytes | None:
        """Start the body with what has arrived; return as `feed_body` does.

        Raises:
            MalformedError: The body is invalid or too large, or exceeds the budget.
        """
        head, arrived = self.head, self.buffer
        assert head is not None
        self._body.check_length(head.content_length or 0)
        length = self._arrived_length()
        if length is not None:
            self._body.hold(length)
            self.buffer = arrived[length:]
            return arrived[:length]
        self.buffer = b""
        self._body.begin(head)
        self._body_since_s = self._clock()
        return self.feed_body(arrived) if arrived else None

    def feed_body(self, data: bytes) -> bytes | None:
        """Add the next bytes; return the body once it is complete, None before.

        Raises:
            MalformedError: As in `begin_body`.
        """
        rest = self._body.feed(data)
        if rest is None:
            return None
        self.buffer = rest
        return self._body.take()

    def charge_waiting(self) -> bool:
        """Charge what waits unparsed to the budget of bodies, less what any head may have.

        Returns:
            Whether it fits; else it is dropped.
        """
        self._release_waiting()
        waiting = max(0, len(self.buffer) - self._limits.header_limit_bytes)
        try:
            self._budget.check(waiting)
        except MalformedError:
            self.buffer = b""
            return False
        self._budget.used += waiting
        self.charged = waiting
        return True

    def _release_waiting(self) -> None:
        self._budget.used -= self.charged
        self.charged = 0

    @property
    def body_due_s(self) -> float:
        """When what has arrived of the body is due, at `ServerLimits.body_bytes_per_s`."""
        return self._body_since_s + self._body.size / self._limits.body_bytes_per_s

    @property
    def body_deadline_s(self) -> float:
        """When the rest of the body must have arrived; see `ServerLimits.body_timeout_s`."""
        return self.body_due_s + self._limits.body_timeout_s

    def release_body(self) -> None:
        """Release the body from the budget."""
        self._body.release()

    def finish(self) -> None:
        """Note that the request was answered: the next byte begins a further one."""
        self._body.release()
        self.head = None  # An idle connection keeps none of it.
        self.begun = False

    def drop(self) -> None:
        """Discard everything that has arrived, and release it from the budget."""
        self.buffer = b""
        self._release_waiting()
        self._body.drop()

    def _arrived_length(self) -> int | None:
        """Return the length of the body if it is declared and all of it has arrived."""
        assert self.head is not None
        length = self.head.content_length or 0
        return None if self.head.chunked or len(self.buffer) < length else length

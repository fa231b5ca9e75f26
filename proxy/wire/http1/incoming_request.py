"""A request as it arrives: its head, its body, and the bytes that are not parsed yet."""

import re
from collections.abc import Callable
from io import BytesIO

from msgspec.structs import replace

from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.http1.heads import RequestHead, check_partial_head, parse_request_head
from balanceroute.proxy.wire.messages import BodyBudget, MalformedError, ServerLimits

# The body of a request as it arrives, and its share of the budget until the request is answered.


class IncomingBody:
    """The bodies of one connection, one after the other.

    Args:
        limit: The most bytes of one body.
    """

    __slots__ = ("_budget", "_buffer", "_decoder", "_held", "_length", "_limit")

    def __init__(self, budget: BodyBudget, limit: int) -> None:
        self._budget = budget
        self._limit = limit
        # BytesIO: a list of tiny pieces takes many times the memory of the body, and a bytearray is
        # copied once more (1 MiB: 830 µs against 150 µs).
        self._buffer = BytesIO()
        self._decoder: ChunkedDecoder | None = None
        self._length = 0
        self._held = 0

    @property
    def size(self) -> int:
        return self._buffer.tell()

    def check_length(self, length: int) -> None:
        """Raise MalformedError if a body of `length` bytes cannot be accepted."""
        if length > self._limit:
            raise self._too_large()
        self._budget.check(length)

    def begin(self, head: RequestHead) -> None:
        self._length = head.content_length or 0
        self._decoder = ChunkedDecoder() if head.chunked else None
        self._buffer = BytesIO()

    def feed(self, data: bytes) -> bytes | None:
        """Add the next bytes; return the bytes behind the body once it is complete, None before.

        Raises:
            MalformedError: The framing is invalid, or the body is too large.
        """
        decoder = self._decoder
        if decoder is None:
            missing = self._length - self.size
            self._keep(data[:missing])
            return None if len(data) < missing else data[missing:]
        payload = decoder.feed(data)
        if self.size + len(payload) + decoder.expected > self._limit:
            raise self._too_large()
        self._keep(payload)
        return decoder.rest if decoder.finished else None

    def add(self, data: bytes) -> None:
        """Add the next bytes of a body that the transport frames. Raises MalformedError."""
        if self.size + len(data) > self._limit:
            raise self._too_large()
        self._keep(data)

    def take(self) -> bytes:
        """Return the whole body and drop it here."""
        buffer, self._buffer, self._decoder = self._buffer, BytesIO(), None
        return buffer.getvalue()

    def hold(self, size: int) -> None:
        """Charge received bytes to the budget."""
        self._held += size
        self._budget.used += size

    def release(self) -> None:
        self._budget.used -= self._held
        self._held = 0

    def drop(self) -> None:
        self.release()
        self._buffer = BytesIO()
        self._decoder = None

    def _keep(self, data: bytes) -> None:
        self._budget.check(len(data))
        self.hold(len(data))
        self._buffer.write(data)

    def _too_large(self) -> MalformedError:
        return MalformedError(f"the request's body is larger than {self._limit} bytes", 413)


# The heads of one connection's requests, most of which repeat the one before.

# As most clients write it. A head in which it is written otherwise is parsed each time.
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,18})\r\n")

# A connection keeps up to seven times as much while it is idle.
_LONGEST_KEPT = 4096


class RepeatedHead:
    """Parses heads; one that differs from the last by the length of the body alone is not parsed again.

    Long heads are parsed each time. Callers must not change the headers that it returns. A repeated head
    keeps its `Learned`.
    """

    __slots__ = ("_head", "_length", "_text")

    def __init__(self) -> None:
        self._text = b""
        self._length = 0, 0  # Where its digits begin and end; nowhere at first.
        self._head: RequestHead | None = None

    def parse(self, text: bytes, *, max_target_bytes: int, max_headers: int) -> RequestHead:
        """Return what `parse_request_head` does. Raises MalformedError."""
        head = self._head
        if head is not None and text == self._text:
            return head
        found = _LENGTH.search(text)
        begin, end = (0, 0) if found is None else found.span(1)
        before, behind = self._length
        if (
            head is not None
            and found is not None
            and (begin, text[:begin], text[end:])
            == (before, self._text[:before], self._text[behind:])
        ):
            headers = [
                (name, found[1] if name == b"content-length" else value)
                for name, value in head.headers
            ]
            head = replace(head, headers=headers, content_length=int(found[1]))
        else:
            head = parse_request_head(
                text, max_target_bytes=max_target_bytes, max_headers=max_headers
            )
        if len(text) <= _LONGEST_KEPT:
            self._text, self._length, self._head = text, (begin, end), head
        else:
            self._text, self._length, self._head = b"", (0, 0), None
        return head


# The request line without the target: method, spaces and version.
_REQUEST_LINE_SLACK = 64


class IncomingRequest:
    """The requests of one connection, one after the other."""

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
        self.buffer = b""  # Bytes that are not parsed yet.
        # A head is awaited or was read. Also at first: a new connection has the time of a head to
        # send one.
        self.begun = True
        self.head: RequestHead | None = None  # The head of the present request once it is complete.
        self._heads = RepeatedHead()
        self._limits = limits
        self._clock = clock
        self._budget = bodies
        self.charged = 0  # Bytes of the buffer that are charged to the budget.
        self._body = IncomingBody(bodies, limits.body_limit_bytes)
        self._body_since_s = 0.0
        self._checked = 0
        self._skip_blank = True

    def begin(self) -> None:
        if self.charged:
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
        assert self.head is not None
        length = self.head.content_length or 0
        if self.head.chunked or len(self.buffer) < length:
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
        body, length = self._body, head.content_length or 0
        body.check_length(length)
        if len(arrived) >= length and not head.chunked:
            body.hold(length)
            self.buffer = arrived[length:]
            return arrived[:length]
        self.buffer = b""
        body.begin(head)
        self._body_since_s = self._clock()
        return self.feed_body(arrived) if arrived else None

    def feed_body(self, data: bytes) -> bytes | None:
        """Add the next bytes; return the body once it is complete, None before. Raises MalformedError."""
        rest = self._body.feed(data)
        if rest is None:
            return None
        self.buffer = rest
        return self._body.take()

    def charge_waiting(self) -> bool:
        """Charge unparsed bytes to the budget of bodies, less the largest head.

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
        """When the received part of the body is due, at `ServerLimits.body_bytes_per_s`."""
        return self._body_since_s + self._body.size / self._limits.body_bytes_per_s

    @property
    def body_deadline_s(self) -> float:
        """When the rest of the body must have arrived; see `ServerLimits.body_timeout_s`."""
        return self.body_due_s + self._limits.body_timeout_s

    def release_body(self) -> None:
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

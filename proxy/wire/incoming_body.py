"""The body of a request while it comes, and its share of the budget until the request is answered."""

from io import BytesIO

from balanceroute.proxy.wire.body_budget import BodyBudget
from balanceroute.proxy.wire.chunked import ChunkedDecoder
from balanceroute.proxy.wire.heads import RequestHead
from balanceroute.proxy.wire.messages import MalformedError


class IncomingBody:
    """The bodies of one connection, one after the other.

    Args:
        budget: Of all connections.
        limit: Bytes of one body.
    """

    __slots__ = ("_budget", "_buffer", "_decoder", "_held", "_length", "_limit")

    def __init__(self, budget: BodyBudget, limit: int) -> None:
        self._budget = budget
        self._limit = limit
        # BytesIO, because a list of tiny pieces would weigh many times the body and a bytearray is
        # copied out once more (1 MiB: 150 µs, 830 µs).
        self._buffer = BytesIO()
        self._decoder: ChunkedDecoder | None = None
        self._length = 0
        self._held = 0

    @property
    def size(self) -> int:
        """Bytes that have come."""
        return self._buffer.tell()

    def check_length(self, length: int) -> None:
        """Raise MalformedError if a body of that many bytes cannot be taken."""
        self._check_limit(length)
        self._budget.check(length)

    def begin(self, head: RequestHead) -> None:
        """Wait for the body of a request."""
        self._length = head.content_length or 0
        self._decoder = ChunkedDecoder() if head.chunked else None
        self._buffer = BytesIO()

    def feed(self, data: bytes) -> bytes | None:
        """Take the next bytes; return what follows the body once it is whole, None before.

        Raises:
            MalformedError: The framing is broken, or there is no room for it.
        """
        decoder = self._decoder
        if decoder is None:
            missing = self._length - self.size
            self._keep(data[:missing])
            return None if len(data) < missing else data[missing:]
        payload = decoder.feed(data)
        self._check_limit(self.size + len(payload) + decoder.expected)
        self._keep(payload)
        return decoder.rest if decoder.finished else None

    def take(self) -> bytes:
        """Return the whole body, which is not kept here any longer."""
        buffer, self._buffer, self._decoder = self._buffer, BytesIO(), None
        return buffer.getvalue()

    def hold(self, size: int) -> None:
        """Count bytes that came."""
        self._held += size
        self._budget.used += size

    def release(self) -> None:
        """Count the present body no more."""
        self._budget.used -= self._held
        self._held = 0

    def drop(self) -> None:
        """Keep nothing."""
        self.release()
        self._buffer = BytesIO()
        self._decoder = None

    def _check_limit(self, length: int) -> None:
        if length > self._limit:
            raise MalformedError("the request's body is too large", 413)

    def _keep(self, data: bytes) -> None:
        self._budget.check(len(data))
        self.hold(len(data))
        self._buffer.write(data)

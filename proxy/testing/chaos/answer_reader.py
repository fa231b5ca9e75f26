"""The client's side of HTTP: responses cut out of the bytes of one connection, in order."""

from dataclasses import dataclass, field
from enum import Enum

from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.http1.heads import parse_response_head
from balanceroute.proxy.wire.messages import Headers


class Ending(Enum):
    """How an answer ended, as its client saw it."""

    OPEN = "open"  # It has not.
    COMPLETE = "complete"
    CUT = "cut"  # The connection ended first.
    UNANSWERED = "unanswered"  # It ended before any byte of the answer.


@dataclass(slots=True, eq=False)
class Received:
    """One answer, as far as it came.

    Attributes:
        status: 0 until the head came.
        ending: How it ended.
        was_reset: Whether the connection ended with a reset.
        left: Whether the client had gone by itself.
        ended_s: When it ended, on the loop's clock.
    """

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    ending: Ending = Ending.OPEN
    was_reset: bool = False
    left: bool = False
    ended_s: float = 0.0

    def header(self, name: bytes) -> bytes:
        """Return the values of a header, joined; empty if it is absent."""
        return b", ".join(value for key, value in self.headers if key == name)


class AnswerReader:
    """Reads one answer.

    Attributes:
        rest: What came after the answer, once it is complete.
    """

    def __init__(self, received: Received) -> None:
        self.rest = b""
        self._received = received
        self._head = b""
        self._decoder: ChunkedDecoder | None = None
        self._left: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            MalformedError: They are not HTTP.
        """
        received = self._received
        if received.ending is Ending.COMPLETE:
            self.rest += data
            return
        if not received.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            data = self._head[end:]
            head = parse_response_head(self._head[:end])
            received.status, received.headers = head.status, head.headers
            if head.chunked:
                self._decoder = ChunkedDecoder()
            else:
                self._left = head.content_length
        if self._decoder is not None:
            if data:
                received.body += self._decoder.feed(data)
            if self._decoder.finished:
                self._complete(self._decoder.rest)
        elif self._left is None:
            received.body += data
        else:
            received.body += data[: self._left]
            rest = data[self._left :]
            self._left -= min(self._left, len(data))
            if not self._left:
                self._complete(rest)

    def end(self, *, was_reset: bool) -> None:
        """Take the end of the connection."""
        received = self._received
        received.was_reset = was_reset
        if received.ending is not Ending.OPEN:
            return
        if not received.status:
            received.ending = Ending.UNANSWERED
        elif self._decoder is None and self._left is None and not was_reset:
            received.ending = Ending.COMPLETE
        else:
            received.ending = Ending.CUT

    def _complete(self, rest: bytes) -> None:
        self._received.ending = Ending.COMPLETE
        self.rest = rest

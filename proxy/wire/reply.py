"""The answer to one request, as the application writes it, independent of the protocol."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from balanceroute.proxy.wire.messages import Headers, HttpRequest

Late = Callable[[int, bytes], bytes]
"""Returns what a whole answer is in a stream that has begun, by its status and its body."""


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
        ...

    @property
    def paused(self) -> bool:
        """Whether the write buffer is above its limit."""
        ...

    def release_body(self) -> None:
        """Note that the application no longer holds the request's body."""
        ...

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer.

        Args:
            status: 200 to 599.
            headers: Written in order. The server frames the message itself and drops framing headers.
            body: Not sent in answer to HEAD, or with a status that has no body.

        Raises:
            UnsafeHeaderError: A header cannot be written; nothing was sent.
        """
        ...

    def start(self, status: int, headers: Headers) -> None:
        """Begin a streamed answer.

        Raises:
            UnsafeHeaderError: A header cannot be written; nothing was sent.
        """
        ...

    def comment(self, headers: Headers, data: bytes, late: Late) -> None:
        """Send something that is no part of the answer; the first goes behind the head of a stream.

        The answer may still begin, or be a whole one, for which it is too late then.

        Args:
            headers: Of the stream, with status 200; `start` drops its own in their place.
            data: What is sent.
            late: Says what the stream ends with, broken off, in place of a whole answer.

        Raises:
            UnsafeHeaderError: A header cannot be written; nothing was sent.
        """
        ...

    def write(self, data: bytes) -> None:
        """Send one piece of a streamed answer."""
        ...

    def end(self) -> None:
        """End a streamed answer."""
        ...

    def abort(self) -> None:
        """End so that the client sees an incomplete answer; what was written is still sent."""
        ...


Application = Callable[[HttpRequest, Reply], None]


# What every `Reply` has, however its answer is framed.


class AnyTransport(Protocol):
    """The connection or stream of a reply."""

    paused: bool  # More waits to be sent than the limit.

    def answered(self) -> None:
        """Note that the answer is complete."""

    def release_body(self) -> None:
        """Release the request's body from the budget."""


TransportT = TypeVar("TransportT", bound=AnyTransport)


class ReplyState(Generic[TransportT]):
    """How far a reply is, and whom it tells; see `Reply`.

    Args:
        transport: Its connection or stream.
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
        """See `Reply`."""
        return self._late is not None

    @property
    def paused(self) -> bool:
        """See `Reply`."""
        return not self.closed and self._transport.paused

    def release_body(self) -> None:
        """See `Reply`."""
        if not self.closed:
            self._transport.release_body()

    def lose_client(self) -> None:
        """Note that the client is gone; only the transport calls this."""
        on_closed = self.on_closed
        self._close()
        if on_closed is not None:
            on_closed()

    def _finish(self) -> None:
        self._close()
        self._transport.answered()

    def _close(self) -> None:
        self.closed = True
        # The application's objects often refer to the reply: this breaks the reference cycle.
        self.on_closed = self.on_pause = self.on_resume = None

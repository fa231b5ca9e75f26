"""The answer to one request, as the application writes it, independent of the protocol."""

from collections.abc import Callable
from typing import Protocol

from balanceroute.proxy.wire.messages import Headers, Request

Late = Callable[[int, bytes], bytes]
"""Returns what a whole answer is in a stream that has begun, by its status and its body."""


class Reply(Protocol):
    """The answer to one request: one `send`, or `start`, any number of `write`, and `end` or `abort`.

    After the answer, or once the client is gone, every method does nothing.

    Attributes:
        closed: Nothing more can be sent.
        started: The head of a streamed answer was sent.
        written: Bytes passed to the transport.
        on_closed: Called once if the client leaves before the answer is complete.
        on_pause: Called when the write buffer exceeds its limit, possibly within `write`.
        on_resume: Called when a paused reply may be written again.
        more_headers: Of the answer, behind those that it is given.
    """

    closed: bool
    started: bool
    written: int
    on_closed: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None
    more_headers: Headers

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


Application = Callable[[Request, Reply], None]

"""The answer to one request, as the application writes it, whatever carries it."""

from collections.abc import Callable
from typing import Protocol

from balanceroute.proxy.wire.messages import Headers, Request


class Reply(Protocol):
    """The answer to one request: one `send`, or `start`, any number of `write`, and `end` or `abort`.

    After the answer, or once the client is gone, every method does nothing.

    Attributes:
        closed: Nothing can be sent any more.
        started: The head of a streamed answer was sent.
        written: Bytes handed to the transport.
        on_closed: Called once if the client goes away before the answer is complete.
        on_pause: Called when more than the limit waits for the client to read, possibly within `write`.
        on_resume: Called when a paused reply may be written again.
    """

    closed: bool
    started: bool
    written: int
    on_closed: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    @property
    def paused(self) -> bool:
        """More than the limit waits for the client to read."""
        ...

    def release_body(self) -> None:
        """Note that the application keeps the request's body no more."""
        ...

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer.

        Args:
            status: 200 to 599.
            headers: Written in order. The server adds what frames the message and drops such a header.
            body: Not sent in answer to HEAD, or with a status that has none.

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

    def write(self, data: bytes) -> None:
        """Send one piece of a streamed answer."""
        ...

    def end(self) -> None:
        """End a streamed answer."""
        ...

    def abort(self) -> None:
        """End so that the client sees a cut answer; what was written still goes out."""
        ...


Application = Callable[[Request, Reply], None]

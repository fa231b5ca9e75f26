"""What every `Reply` has, however its answer is framed."""

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.reply import Late


class AnyTransport(Protocol):
    """The connection or stream of a reply.

    Attributes:
        paused: More waits to be sent than the limit.
    """

    paused: bool

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

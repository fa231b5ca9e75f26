"""A leg whose answer is taken as a whole: prefills, answers that are not streamed, plain requests."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.wire.messages import WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers


class BufferedLeg:
    """Collects one response; see `ResponseHandler`.

    Args:
        answered: Called with a complete response.
        broken: Called once with a failure. If the response is past the limit, that is before its end,
            which may never come: whoever is told aborts the exchange.
        max_bytes: The most bytes of a body.
    """

    __slots__ = ("_answered", "_broken", "_headers", "_left", "_max_bytes", "_pieces", "_status")

    def __init__(
        self,
        answered: "Callable[[int, Headers, bytes], None]",
        broken: Callable[[WireError], None],
        *,
        max_bytes: int,
    ) -> None:
        self._answered = answered
        self._broken = broken
        self._max_bytes = self._left = max_bytes
        self._status = 0
        self._headers: Headers = []
        self._pieces: list[bytes] = []

    def on_head(self, status: int, headers: "Headers") -> None:
        """Take the response head."""
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._left < 0:
            return
        self._left -= len(data)
        if self._left >= 0:
            self._pieces.append(data)
            return
        self._pieces.clear()
        message = f"the answer is longer than {self._max_bytes} bytes"
        self._broken(WireError(WireFault.TOO_LARGE, message, sent=True, answered=True))

    def on_end(self) -> None:
        """Hand the answer over."""
        if self._left >= 0:
            self._answered(self._status, self._headers, b"".join(self._pieces))

    def on_error(self, error: WireError) -> None:
        """Hand the failure over."""
        self._broken(error)

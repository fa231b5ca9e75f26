"""A leg whose answer is taken as a whole: prefills, answers that are not streamed, plain requests."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from balanceroute.proxy.wire.messages import WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers


class BufferedLeg(Struct, eq=False):
    """Collects one response; see `ResponseHandler`.

    Attributes:
        answered: Called with a complete response.
        broken: Called once with a failure. If the response is past the limit, that is before its end,
            which may never come: whoever is told aborts the exchange.
        max_bytes: The most bytes of a body.
        began: Called when the response begins; None if nobody asks.
    """

    answered: "Callable[[int, Headers, bytes], None]"
    broken: Callable[[WireError], None]
    max_bytes: int
    began: Callable[[], None] | None = None
    _status: int = 0
    _headers: "Headers" = []
    _size: int = 0
    _pieces: list[bytes] = []

    def on_head(self, status: int, headers: "Headers") -> None:
        """Take the response head."""
        if self.began is not None:
            self.began()
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._size > self.max_bytes:
            return
        self._size += len(data)
        if self._size <= self.max_bytes:
            self._pieces.append(data)
            return
        self._pieces.clear()
        message = f"the answer is longer than {self.max_bytes} bytes"
        self.broken(WireError(WireFault.TOO_LARGE, message, sent=True, answered=True))

    def on_end(self) -> None:
        """Hand the answer over."""
        if self._size <= self.max_bytes:
            self.answered(self._status, self._headers, b"".join(self._pieces))

    def on_error(self, error: WireError) -> None:
        """Hand the failure over."""
        self.broken(error)

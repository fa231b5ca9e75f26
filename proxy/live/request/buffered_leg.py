"""A leg whose answer is taken as a whole: prefills, answers that are not streamed, plain requests."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.wire.messages import WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers


class BufferedLeg:
    """Collects one response; see `ResponseHandler`."""

    __slots__ = ("_answered", "_broken", "_headers", "_left", "_pieces", "_status")

    def __init__(
        self,
        answered: "Callable[[int, Headers, bytes], None]",
        broken: Callable[[WireError], None],
        *,
        max_bytes: int,
    ) -> None:
        self._answered = answered
        self._broken = broken
        self._left = max_bytes
        self._status = 0
        self._headers: Headers = []
        self._pieces: list[bytes] = []

    def on_head(self, status: int, headers: "Headers") -> None:
        """Take the response head."""
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body; beyond the limit nothing more is kept."""
        self._left -= len(data)
        if self._left >= 0:
            self._pieces.append(data)
        else:
            self._pieces.clear()

    def on_end(self) -> None:
        """Hand the answer over."""
        if self._left < 0:
            self._broken(
                WireError(WireFault.TOO_LARGE, "the answer is too long", sent=True, answered=True)
            )
        else:
            self._answered(self._status, self._headers, b"".join(self._pieces))

    def on_error(self, error: WireError) -> None:
        """Hand the failure over."""
        self._broken(error)

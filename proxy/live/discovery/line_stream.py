"""A long answer, line by line."""

import asyncio
from collections import deque

from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

_LINE_BYTES = 8 << 20


class LineStream:
    """Receives one response; see `ResponseHandler`. An error answer is one line.

    Attributes:
        status: 0 until the head came.
    """

    def __init__(self) -> None:
        self.status = 0
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._error: WireError | None = None
        self._ended = False
        self._more = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Lines that have come and were not returned yet."""
        return len(self._lines)

    async def next(self) -> bytes | None:
        """Return the next line, when it came; None at the end.

        Raises:
            WireError: The answer broke off, or has a line that is too long.
        """
        while not self._lines:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._more.clear()
            await self._more.wait()
        return self._lines.popleft()

    def on_head(self, status: int, headers: Headers) -> None:
        """Keep the status."""
        del headers
        self.status = status

    def on_data(self, data: bytes) -> None:
        """Cut lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(line for line in lines if line.strip())
        if len(self._rest) > _LINE_BYTES:
            self._rest = b""
            error = WireError(WireFault.TOO_LARGE, "a line is too long", sent=True, answered=True)
            self.on_error(error)
        self._more.set()

    def on_end(self) -> None:
        """End; what has no end of line is a line too."""
        if self._rest.strip():
            self._lines.append(self._rest)
        self._ended = True
        self._more.set()

    def on_error(self, error: WireError) -> None:
        """Break off."""
        self._error = self._error or error
        self._more.set()

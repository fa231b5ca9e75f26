"""The state every 0.8 s, as server-sent events, to whoever looks at the page.

Nothing runs while nobody does.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from balanceroute.proxy.wire.messages import Headers

MAX_VIEWERS = 8
"""The admin listener has few connections, and orders need some."""
INTERVAL_S = 0.8
"""Between two events. So that 95 of 100 changes are seen within a second."""
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]
"""The headers of the stream."""

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


class Viewer(Protocol):
    """Where the events of one viewer go; see `wire.reply.Reply`."""

    closed: bool
    on_closed: Callable[[], None] | None

    @property
    def paused(self) -> bool:
        """Whether it reads more slowly than it is sent to."""
        ...

    def start(self, status: int, headers: Headers) -> None:
        """Begin a streamed answer."""
        ...

    def write(self, data: bytes) -> None:
        """Send one piece."""
        ...

    def end(self) -> None:
        """End the answer."""
        ...


class LiveView:
    """Sends what `view` returns to all viewers."""

    def __init__(self, view: Callable[[], dict[str, object]]) -> None:
        self._view = view
        self._viewers: dict[Viewer, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    @property
    def full(self) -> bool:
        """Whether there are as many viewers as may be."""
        return len(self._viewers) >= MAX_VIEWERS

    def open(self, viewer: Viewer) -> None:
        """Send to one more viewer until it leaves."""
        event = self._event()  # Before the head, which could not be taken back.
        viewer.start(200, EVENTS)
        viewer.on_closed = lambda: self._leave(viewer)
        self._viewers[viewer] = None
        viewer.write(event)
        if self._timer is None:
            self._wait()

    def close(self) -> None:
        """End all streams."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for viewer in list(self._viewers):
            viewer.end()
        self._viewers.clear()

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.pop(viewer, None)
        if not self._viewers:
            self.close()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def _tick(self) -> None:
        try:
            event = self._event()
        except Exception:
            _log.exception("admin: the live view failed")
            self.close()
            return
        for viewer in self._viewers:
            if not viewer.paused:
                viewer.write(event)
        self._wait()

    def _event(self) -> bytes:
        return b"data: " + _encode(self._view()) + b"\n\n"

"""When the next decision comes."""

import asyncio
from collections.abc import Callable


class TickTimer:
    """Calls for one decision at a time, at once or a moment later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tick: Callable[[], None]) -> None:
        self._loop = loop
        self._tick = tick
        self._timer: asyncio.Handle | None = None
        self._soon = False

    def wake(self, delay_s: float) -> None:
        """See that a decision comes after at most `delay_s`."""
        if self._timer is not None:
            if self._soon or delay_s > 0.0:
                return
            self._timer.cancel()
        self._soon = delay_s == 0.0
        if self._soon:
            self._timer = self._loop.call_soon(self._tick)
        else:
            self._timer = self._loop.call_later(delay_s, self._tick)

    def cancel(self) -> None:
        """Call for none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

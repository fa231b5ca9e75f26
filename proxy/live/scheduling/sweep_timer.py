"""Calls four times a second while there are requests."""

import asyncio
from collections.abc import Callable, Sized

# How often deadlines are looked at and progress is taken, in seconds.
SWEEP_S = 0.25
# Events that engines send meanwhile wait for a sweep, 1 to 2 ms where there are 256 streams. So it comes
# between two steps, if such a moment is found within this time.
_MOST_DEFERRED_S = 0.02


class SweepTimer:
    """Calls as long as there are requests.

    Args:
        sessions: All live requests.
        sweep: Called with the time and by how much it is late, both in seconds.
    """

    def __init__(self, sessions: Sized, sweep: Callable[[float, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sessions = sessions
        self._sweep = sweep
        self._timer: asyncio.Handle | None = None

    @property
    def runs(self) -> bool:
        """Whether a call is due."""
        return self._timer is not None

    def begin(self) -> None:
        """See that there are calls, until no request is left."""
        if self._timer is None:
            self._wait(self._loop.time())

    def stop(self) -> None:
        """Call off the next call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, now_s: float) -> None:
        self._timer = self._loop.call_later(SWEEP_S, self._due, now_s + SWEEP_S)

    def _due(self, expected_s: float) -> None:
        now_s = self._loop.time()
        # In the next turn at the earliest: uvloop looks at its timers before it looks at sockets.
        self._timer = self._loop.call_soon(self._look, expected_s, now_s, None)

    def _look(self, expected_s: float, due_s: float, before_s: float | None) -> None:
        """Call, unless the turn that ends here was a busy one."""
        now_s = self._loop.time()
        is_busy = before_s is None or now_s > before_s
        if is_busy and now_s < due_s + _MOST_DEFERRED_S:
            self._timer = self._loop.call_soon(self._look, expected_s, due_s, now_s)
        else:
            self._call(now_s, max(0.0, due_s - expected_s))

    def _call(self, now_s: float, late_s: float) -> None:
        self._timer = None
        try:
            self._sweep(now_s, late_s)
        finally:
            if self._sessions:
                self._wait(now_s)

"""Calls four times a second while there are requests."""

import asyncio
from collections.abc import Callable, Sized

# How often deadlines are looked at and progress is taken, in seconds.
SWEEP_S = 0.25


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
        self._timer: asyncio.TimerHandle | None = None

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
        self._timer = self._loop.call_later(SWEEP_S, self._call, now_s + SWEEP_S)

    def _call(self, expected_s: float) -> None:
        self._timer = None
        now_s = self._loop.time()
        try:
            self._sweep(now_s, max(0.0, now_s - expected_s))
        finally:
            if self._sessions:
                self._wait(now_s)

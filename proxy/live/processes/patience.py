"""How long who waits for a decision waits for a scheduler process that is not there."""

import asyncio
import math
from collections.abc import Callable

from balanceroute.proxy.live.processes.part import HANG_S

# So long a new one may take to begin.
_START_S = 20.0
PATIENCE_S = HANG_S + _START_S
"""As long as it takes to replace one that stands still, however it came to that."""


class Patience:
    """Bounds the wait.

    Args:
        call_later: The loop's.
        most: So many wait at a time.
        limit: Called with how many may wait, whenever that changes.

    Attributes:
        spent: Whether there has been no scheduler process for too long.
    """

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        most: int,
        limit: Callable[[float], None],
    ) -> None:
        self.most = most
        self.spent = False
        self._call_later = call_later
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Note that there is no scheduler process."""
        if self._timer is None:  # Else the last one had not made the relay welcome.
            self._limit(self.most)
            self._timer = self._call_later(PATIENCE_S, self._spend)

    def end(self) -> None:
        """Note that there is one again."""
        self.stop()
        self.spent = False
        self._limit(math.inf)

    def stop(self) -> None:
        """Call off the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _spend(self) -> None:
        self.spent = True
        self._limit(0)

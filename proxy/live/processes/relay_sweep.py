"""What a relay looks at four times a second while it has requests."""

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

from balanceroute.proxy.live.scheduling.sweep_timer import SweepTimer

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.stall_watch import StallWatch
    from balanceroute.proxy.live.scheduling.isolation import Isolation


class RelaySweep:
    """Looks after the deadlines of legs.

    Args:
        tell: Called with the latest that a sweep was, in seconds, after each.
        look: Called with each, to look at streams.
    """

    def __init__(
        self,
        sessions: Sized,
        stalls: "StallWatch",
        isolation: "Isolation",
        tell: Callable[[float], None],
        look: Callable[[], None],
    ) -> None:
        self._look = look
        self._stalls = stalls
        self._isolation = isolation
        self._tell = tell
        self._timer = SweepTimer(sessions, self._sweep)

    def begin(self) -> None:
        """See that there are sweeps, until no request is left."""
        if not self._timer.runs:
            self._stalls.begin()
            self._timer.begin()

    def stop(self) -> None:
        """Call off the next sweep."""
        self._timer.stop()

    def _sweep(self, now_s: float, late_s: float) -> None:
        isolation = self._isolation
        isolation.run("timer", self._stalls.tick)
        if not self._stalls.woke:
            isolation.check_deadlines(now_s)
        isolation.run("timer", self._look)
        isolation.run("timer", self._tell, late_s)

"""What a relay looks at four times a second while it has requests."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.live.scheduling.sweep import SWEEP_S

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.stall_watch import StallWatch
    from balanceroute.proxy.live.scheduling.isolation import Isolation


class RelaySweep:
    """Looks after the deadlines of legs.

    Args:
        tell: Called with the latest that a sweep was, in seconds, after each.
    """

    def __init__(
        self,
        sessions: "Mapping[RequestId, Session]",
        stalls: "StallWatch",
        isolation: "Isolation",
        tell: Callable[[float], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sessions = sessions
        self._stalls = stalls
        self._isolation = isolation
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """See that there are sweeps, until no request is left."""
        if self._timer is None:
            self._stalls.begin()
            self._wait(self._loop.time())

    def stop(self) -> None:
        """Call off the next sweep."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, now_s: float) -> None:
        self._timer = self._loop.call_later(SWEEP_S, self._sweep, now_s + SWEEP_S)

    def _sweep(self, expected_s: float) -> None:
        self._timer = None
        now_s, isolation = self._loop.time(), self._isolation
        isolation.run("timer", self._stalls.tick)
        for session in list(self._sessions.values()):
            isolation.run_for(session, "timer", session.check_deadline, now_s)
        isolation.run("timer", self._tell, max(0.0, now_s - expected_s))
        if self._sessions:
            self._wait(now_s)

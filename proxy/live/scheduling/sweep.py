"""What is looked at four times a second while there are requests."""

import asyncio
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.request.lost_engines import StreamLooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balanceroute.proxy.core.events import Eligible, RequestId
    from balanceroute.proxy.core.lifecycle import Request
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.engines.instances import Instances
    from balanceroute.proxy.live.prediction import PredictorSet
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.session_host import StallWatch
    from balanceroute.proxy.live.scheduling.decisions import Decisions, Isolation
    from balanceroute.proxy.live.scheduling.progress_veto import ProgressVeto
    from balanceroute.proxy.live.telemetry.component_metrics import DecisionMetrics


# Calls four times a second while there are requests.

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


class Sweep:
    """Looks after deadlines, progress, predictors and engines that are missing.

    Args:
        clock: The loop's time.
    """

    def __init__(
        self,
        sessions: "Mapping[RequestId, Session]",
        decisions: "Decisions",
        predictors: "PredictorSet",
        metrics: "DecisionMetrics",
        *,
        stalls: "StallWatch",
        veto: "ProgressVeto",
        stranded: "Stranded",
        isolation: "Isolation",
        clock: "Callable[[], float]",
    ) -> None:
        self._sessions = sessions
        self._decisions = decisions
        self._predictors = predictors
        self._metrics = metrics
        self._stalls = stalls
        self._veto = veto
        self._looks = StreamLooks(sessions, clock, late_s=2 * SWEEP_S)
        self._stranded = stranded
        self._isolation = isolation
        self._timer = SweepTimer(sessions, self._sweep)

    def begin(self) -> None:
        """See that there are sweeps, until no request is left."""
        if not self._timer.runs:
            self._stranded.begin()
            self._stalls.begin()
            self._timer.begin()

    def stop(self) -> None:
        """Call off the next sweep."""
        self._timer.stop()

    def _sweep(self, now_s: float, late_s: float) -> None:
        isolation, progress = self._isolation, self._decisions.progress
        isolation.run("timer", self._look_after, late_s)
        isolation.run("timer", self._review_ranks)
        if not self._stalls.woke:
            isolation.check_deadlines(now_s)
        isolation.run("predictor", self._predictors.score, progress.started, progress.age)
        isolation.run("timer", self._give_up_stranded, now_s)

    def _look_after(self, late_s: float) -> None:
        self._metrics.loop_lag(late_s)
        self._stalls.tick()
        self._decisions.look_after()

    def _review_ranks(self) -> None:
        self._veto.look(*self._looks.look())
        if not self._stalls.woke:
            self._veto.review()

    def _give_up_stranded(self, now_s: float) -> None:
        for number in self._stranded.due(now_s):
            session = self._sessions[number]
            self._isolation.run_for(
                session, "timer", session.give_up, "no engine of each role is up"
            )


# Requests that wait for engines of which none is there.


class Stranded:
    """Tells who has waited for long enough.

    Args:
        scheduler: Whose requests wait.
        instances: The engines.
        after_s: How long they wait for a role of which no instance is up.
    """

    def __init__(self, scheduler: "Scheduler", instances: "Instances", *, after_s: float) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._after_s = after_s
        # By the engines needed, and whether a prefiller is.
        self._unready_since_s: dict[tuple[Eligible | None, bool], float] = {}

    def begin(self) -> None:
        """Forget what was seen before: nothing was checked meanwhile."""
        self._unready_since_s.clear()

    def due(self, now_s: float) -> "Iterator[RequestId]":
        """Yield the requests to refuse, each when the one before it is gone."""
        if self._scheduler.intake.held:
            self._unready_since_s.clear()  # They wait for an administrator.
            return
        requests = self._scheduler.requests
        kinds = dict.fromkeys(map(_kind, requests.values()))
        unready = [kind for kind in kinds if self._lacks(*kind)]
        before = self._unready_since_s
        self._unready_since_s = {kind: before.get(kind, now_s) for kind in unready}
        for kind, since_s in self._unready_since_s.items():
            if now_s - since_s > self._after_s:
                # In this order: who leaves the pool makes room for the queue.
                for state in (LifecycleState.QUEUED, LifecycleState.POOLED):
                    waiting = [one for one in requests.values() if one.state is state]
                    yield from [one.request for one in waiting if _kind(one) == kind]

    def _lacks(self, eligible: "Eligible | None", prefill: bool) -> bool:
        missing = self._instances.missing_for(eligible)
        return Role.DECODE in missing or (prefill and Role.PREFILL in missing)


def _kind(request: "Request") -> "tuple[Eligible | None, bool]":
    return request.ticket.eligible, request.ticket.prefill

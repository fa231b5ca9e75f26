"""What is looked at four times a second while there are requests."""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.prediction.predictor_set import PredictorSet
    from balanceroute.proxy.live.request.live_request import LiveRequest
    from balanceroute.proxy.live.request.stall_watch import StallWatch
    from balanceroute.proxy.live.scheduling.decisions import Decisions
    from balanceroute.proxy.live.scheduling.isolation import Isolation
    from balanceroute.proxy.live.scheduling.stranded import Stranded
    from balanceroute.proxy.live.telemetry.decision_metrics import DecisionMetrics

# How often deadlines are looked at and progress is taken, in seconds.
SWEEP_S = 0.25


class Sweep:
    """Looks after deadlines, progress, predictors and engines that are missing.

    Args:
        has_deadlines: Whether sessions are to check their deadlines; other processes' do so there.
    """

    def __init__(
        self,
        sessions: "Mapping[RequestId, LiveRequest]",
        decisions: "Decisions",
        predictors: "PredictorSet",
        metrics: "DecisionMetrics",
        *,
        stalls: "StallWatch",
        stranded: "Stranded",
        isolation: "Isolation",
        has_deadlines: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sessions = sessions
        self._decisions = decisions
        self._predictors = predictors
        self._metrics = metrics
        self._stalls = stalls
        self._stranded = stranded
        self._isolation = isolation
        self._has_deadlines = has_deadlines
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """See that there are sweeps, until no request is left."""
        if self._timer is None:
            self._stranded.begin()
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
        now_s, isolation, progress = self._loop.time(), self._isolation, self._decisions.progress
        try:
            isolation.run("timer", self._look_after, now_s, expected_s)
            if self._has_deadlines:
                for session in list(self._sessions.values()):
                    isolation.run_for(session, "timer", session.check_deadline, now_s)
            isolation.run("predictor", self._predictors.score, progress.started, progress.age)
            isolation.run("timer", self._give_up_stranded, now_s)
        finally:
            if self._sessions:
                self._wait(now_s)

    def _look_after(self, now_s: float, expected_s: float) -> None:
        self._metrics.loop_lag(max(0.0, now_s - expected_s))
        self._stalls.tick()
        self._decisions.look_after()

    def _give_up_stranded(self, now_s: float) -> None:
        for number in self._stranded.due(now_s):
            session = self._sessions[number]
            self._isolation.run_for(
                session, "timer", session.give_up, "no engine of each role is up"
            )

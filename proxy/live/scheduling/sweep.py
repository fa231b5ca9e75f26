"""What is looked at four times a second while there are requests."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.request.stream_looks import StreamLooks
from balanceroute.proxy.live.scheduling.sweep_timer import SWEEP_S, SweepTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.prediction.predictor_set import PredictorSet
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.stall_watch import StallWatch
    from balanceroute.proxy.live.scheduling.decisions import Decisions
    from balanceroute.proxy.live.scheduling.isolation import Isolation
    from balanceroute.proxy.live.scheduling.progress_veto import ProgressVeto
    from balanceroute.proxy.live.scheduling.stranded import Stranded
    from balanceroute.proxy.live.telemetry.component_metrics import DecisionMetrics


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

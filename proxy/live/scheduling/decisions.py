"""Feeds the scheduler, performs what it decides, and sees that decisions come.

Admissions are decided in ticks. A tick comes at once when a request enters the pool; when a slot
becomes free it comes a moment later, so that all requests that end with the same step are seen by
one decision.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
    OthersOnRank,
    PrefillDone,
    PrefillerPaired,
    PrefillLost,
    RankClosed,
    RankOpened,
    ReleasePrefill,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    Tick,
)
from balanceroute.proxy.live.scheduling.apart import Apart
from balanceroute.proxy.live.scheduling.progress import Progress
from balanceroute.proxy.live.scheduling.tick_timer import TickTimer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.engines.instances import Instances
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.suspects import Suspects
    from balanceroute.proxy.live.scheduling.isolation import Isolation
    from balanceroute.proxy.live.scheduling.open_instances import OpenInstances
    from balanceroute.proxy.live.telemetry.metrics import Metrics

# After these a slot may be free for a request that waits.
_FREEING = frozenset(
    {
        RequestFinished,
        RequestFailed,
        RequestCancelled,
        RequestRecomputed,
        RankOpened,
        OthersOnRank,
        # What waits for ranks that its prefiller does not fit may have to go elsewhere.
        RankClosed,
        PrefillerPaired,
    }
)
# After these a request may be new in the pool.
_POOLING = frozenset({PrefillDone, RequestArrived, DecodeLost})
# With these a request leaves the rank that it is bound to.
_LEAVING = (RequestRecomputed, DecodeLost, PrefillLost)
# Of these the progress is told, too.
_FOLLOWED = frozenset({*_LEAVING, DecodeStarted})


class Decisions:
    """The way to the scheduler and back.

    Args:
        suspects: Prompts under which engines have died.
        settle_s: How long a tick waits for further requests to end with the same step.
        began: Told of a request whenever it is given to an engine.
        stopwatch: Real seconds, for the cost of decisions.
        pumped: Tokens of the streams that the pump moves, by slot; None if nobody moves any.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        sessions: "Mapping[RequestId, Session]",
        instances: "Instances",
        open_instances: "OpenInstances",
        isolation: "Isolation",
        *,
        metrics: "Metrics",
        suspects: "Suspects",
        settle_s: float,
        began: "Callable[[Session], None]",
        stopwatch: Callable[[], float],
        pumped: "NDArray[np.uint32] | None" = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.progress = Progress(scheduler, self._handle, loop.time, pumped)
        self._scheduler = scheduler
        self._sessions = sessions
        self._instances = instances
        self._open_instances = open_instances
        self._isolation = isolation
        self._metrics = metrics
        self._settle_s = settle_s
        self._began = began
        self._clock = loop.time
        self._stopwatch = stopwatch
        self._stage_start_s = 0.0
        self._ticks = TickTimer(loop, self._tick)
        self._apart = Apart(
            *(suspects, scheduler, sessions, instances, isolation),
            start=self._start,
            feed=self.feed,
        )
        self._pending: deque[Action] = deque()
        self._performing = False

    def feed(self, event: Event) -> None:
        """Give the scheduler an event, perform what it decides, and see that a tick follows.

        What it decides may be for the very session that feeds, which is ready for that.
        """
        # Not `isinstance` alone: a struct's class is asked for its instances by a call.
        if self._apart.on:
            self._apart.passed(event)
        if type(event) not in _FOLLOWED:
            self._handle(event)
            return
        if isinstance(event, DecodeStarted):
            self.progress.began(self._sessions[event.request])
        elif isinstance(event, _LEAVING):
            self._apart.lost(event)
            event = self.progress.left(event)
        self._handle(event)

    def follow(self) -> None:
        """Bring the scheduler's mirror of the ranks up to date, as before every decision."""
        self.progress.follow(self._open_instances.serving)

    def wake(self) -> None:
        """See that a decision comes at once."""
        self._ticks.wake(0.0)

    def look_after(self) -> None:
        """Decide if a deadline or an earlier failure asks for it; follow the ranks in any case."""
        deadline_ns = self._scheduler.next_deadline_ns()
        if self._isolation.failures.failing or (
            deadline_ns is not None and deadline_ns <= self._now_ns()
        ):
            self._tick()
        else:
            self.follow()

    def stage_ended(self, stage: str) -> None:
        """Note that a stage of the present decision ended."""
        now_s = self._stopwatch()
        self._metrics.decisions.dispatched(stage, now_s - self._stage_start_s)
        self._stage_start_s = now_s

    def stop(self) -> None:
        """Call off the decision that is due."""
        self._ticks.cancel()
        self._apart.stop()

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9 + 0.5)  # `round` takes three times as long.

    def _handle(self, event: Event) -> None:
        scheduler = self._scheduler
        actions = scheduler.handle(event, now_ns=int(self._clock() * 1e9 + 0.5))
        if actions:
            self._perform(actions)
        if scheduler.pool.slots:
            kind = type(event)
            if kind in _POOLING:
                self._ticks.wake(0.0)
            elif kind in _FREEING:
                self._ticks.wake(self._settle_s)

    def _tick(self) -> None:
        self._ticks.cancel()
        decides = self._scheduler.pool.slots > 0
        failures = self._isolation.failures
        failed_before = failures.rounds_failed
        well = self._isolation.run("follow", self.follow)
        well &= self._isolation.run("tick", self._decide)
        if decides or not well:
            failures.round_ended(well=well and failures.rounds_failed == failed_before)

    def _decide(self) -> None:
        self._stage_start_s = begin_s = self._stopwatch()
        actions = self._scheduler.handle(Tick(), now_ns=self._now_ns())
        took_s = self._stopwatch() - begin_s
        self._perform(actions)
        self._metrics.decisions.dispatched("total", took_s)

    def _perform(self, actions: list[Action]) -> None:
        """Perform actions in their order, behind those that are being performed."""
        self._pending += actions
        if self._performing:  # An action failed, and its request ends.
            return
        self._performing = True
        try:
            while self._pending:
                action = self._pending.popleft()
                session = self._sessions.get(action.request)
                if session is not None:
                    self._isolation.run_for(session, "action", self._act, session, action)
                elif isinstance(action, ReleasePrefill):
                    self._isolation.run("action", self._metrics.legs.abandoned_lease, "ended")
        finally:
            self._performing = False

    def _start(self, session: "Session", action: StartPrefill | Admit) -> None:
        """Give a request to an engine."""
        self._began(session)
        if type(action) is StartPrefill:
            session.start_prefill(self._instances.prefillers[action.prefiller])
        else:
            assert isinstance(action, Admit)
            self.progress.admitted(session)
            session.start_decode(self._instances.ranks[action.rank])

    def _act(self, session: "Session", action: Action) -> None:
        # Ordered by frequency. The two of every request are not found by `isinstance` or `match`: a struct's
        # class is asked for its instances by a call.
        if type(action) is StartPrefill or type(action) is Admit:
            if not (self._apart.on and self._apart.holds(action)):
                self._start(session, action)
        elif isinstance(action, AbortPrefill | AbortDecode):
            session.drop_leg()
        elif isinstance(action, ReleasePrefill):
            # No engine takes such a word over HTTP: the blocks stay until their lease ends.
            if action.request in self._scheduler.requests:
                session.lease_ended(cheaper=action.cheaper)
            else:
                self._metrics.legs.abandoned_lease("ended")
        else:
            assert isinstance(action, Expire)
            session.expire("the request waited longer than it may")

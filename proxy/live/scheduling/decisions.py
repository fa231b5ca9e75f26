"""Feeds the scheduler, performs what it decides, and sees that decisions come.

Admissions are decided in ticks. A tick comes at once when a request enters the pool; when a slot
becomes free it comes a moment later, so that all requests that end with the same step are seen by
one decision.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Eligible,
    Event,
    Expire,
    ForeignLoad,
    PrefillDone,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillLost,
    RankClosed,
    RankId,
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
from balanceroute.proxy.core.lifecycle import LifecycleState, Request
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.live.engines.health import Health
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Role, Status
from balanceroute.proxy.live.prediction import PredictorSet
from balanceroute.proxy.live.request.decode_attempt import start_decode, start_prefill
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import SessionContext
from balanceroute.proxy.live.scheduling.isolation import Apart, Isolation
from balanceroute.proxy.live.scheduling.progress import Progress
from balanceroute.proxy.live.scheduling.progress_veto import ProgressVeto, StreamLooks
from balanceroute.proxy.live.telemetry.component_metrics import DecisionFailures
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.record import Log

# When the next decision comes.


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


# After these a slot may be free for a request that waits.
_FREEING = frozenset(
    {
        RequestFinished,
        RequestFailed,
        RequestCancelled,
        RequestRecomputed,
        RankOpened,
        ForeignLoad,
        # A request whose prefiller does not fit the ranks any more may have to go elsewhere.
        RankClosed,
        PrefillerPaired,
    }
)
# After these a request may be new in the pool.
_POOLING = frozenset({PrefillDone, RequestArrived, DecodeLost})
# With these a request leaves the rank that it is bound to.
_LEAVING = (RequestRecomputed, DecodeLost, PrefillLost)
# The progress sees these, too.
_FOLLOWED = frozenset({*_LEAVING, DecodeStarted})


class StageTimes:
    """How long the last decision and its stages took. Metrics learn of them when it is over."""

    def __init__(self, stopwatch: Callable[[], float]) -> None:
        self.taken: list[tuple[str, float]] = []  # Stages as they ended, with their seconds.
        self._stopwatch = stopwatch
        self._begin_s = self._last_s = 0.0

    def begin(self) -> None:
        self.taken.clear()
        self._begin_s = self._last_s = self._stopwatch()

    def ended(self, stage: str) -> None:
        now_s = self._stopwatch()
        self.taken.append((stage, now_s - self._last_s))
        self._last_s = now_s

    def all_ended(self) -> None:
        self.taken.append(("total", self._stopwatch() - self._begin_s))


@dataclass(frozen=True, slots=True)
class Observers:
    """The parts that record events, besides the scheduler."""

    health: Health  # Gets the end of each leg.
    predictors: PredictorSet  # Gets every request; the core asks it.
    metrics: Metrics  # Gets everything countable.
    failures: DecisionFailures  # Gets exceptions, none of which ends service.
    log: Log  # Gets every request that ended.
    stages: StageTimes  # Gets each stage of a decision from the policy.


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """How the driver works."""

    expects_output: bool  # Whether the queue order uses the expected output of requests.
    uses_blocks: bool  # Whether the prefill choice uses the blocks of prompts.
    progress_veto: bool  # Whether ranks that make no tokens are left out.
    warm_up: bool  # Whether engines that begin, or come back, get a share that grows.
    settle_s: float = 0.002  # How long a tick waits for further requests to end with the same step.
    # How long requests wait for a role of which no instance is up. Less than that is an engine that
    # restarts; a request that comes meanwhile is refused at once.
    stranded_s: float = 10.0
    group_return_s: float = 0.0  # The same for data-parallel groups that have ended.
    # Returns why nothing may be given to an engine now; empty if it may. None for no check.
    forbids: Callable[[], str] | None = None


class Decisions:
    """The way to the scheduler and back, and what has to be looked at while there are requests.

    Args:
        context: What the sessions share.
        began: Called with a request whenever it is given to an engine.

    Attributes:
        progress: How far the requests in decode are.
        isolation: Ends alone what failed.
        veto: Leaves out ranks that make no tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Instances,
        sessions: Mapping[RequestId, Session],
        context: SessionContext,
        *,
        observers: Observers,
        settings: DriverSettings,
        began: Callable[[Session], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.isolation = Isolation(self.feed, scheduler.requests, sessions, observers.failures)
        pumped = None if context.pump is None else context.pump.tokens
        self.progress = Progress(scheduler, self._handle, loop.time, pumped)
        self.veto = ProgressVeto(
            *(scheduler, sessions, instances, self.progress),
            health=observers.health,
            reopen=self.reopen,
            active=settings.progress_veto,
        )
        self._open_instances = OpenInstances(instances, self.feed, warm_up=settings.warm_up)
        self._scheduler = scheduler
        self._sessions = sessions
        self._instances = instances
        self._metrics, self._predictors = observers.metrics, observers.predictors
        self._stages = observers.stages
        self._settle_s, self._forbids = settings.settle_s, settings.forbids
        self._began = began
        self._clock = loop.time
        self._stalls = context.stalls
        self._looks = StreamLooks(sessions, loop.time, late_s=2 * SWEEP_S)
        self._stranded = Stranded(scheduler, instances, settings)
        self._sweeps = SweepTimer(sessions, self._sweep)
        self._ticks = TickTimer(loop, self._tick)
        self._apart = Apart(
            *(context.suspects, scheduler, sessions, instances, self.isolation),
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
        """Bring the scheduler's ledger of the ranks up to date, as before every decision."""
        self.progress.follow(self.at_barrier)

    @property
    def at_barrier(self) -> list[RankId]:
        """The ranks whose loads make the barrier."""
        return self._open_instances.at_barrier(self._scheduler.ledger.bound)

    def wake(self) -> None:
        """See that a decision comes at once."""
        self._ticks.wake(0.0)

    def bar(self, *, barred: bool) -> None:
        """Have waiting requests wait from now on, or go on: another process may decide at present."""
        intake = self._scheduler.intake
        if intake.barred != barred:
            intake.barred = barred
            if not barred:
                self.wake()

    def stop(self) -> None:
        """Call off whatever is due."""
        self._ticks.cancel()
        self._apart.stop()
        self.veto.stop()
        self._sweeps.stop()

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9 + 0.5)  # `round` takes three times as long.

    def _handle(self, event: Event) -> None:
        scheduler = self._scheduler
        # Before: a first token may end the warm-up of its rank, which may have its full share then.
        widens = isinstance(event, DecodeStarted) and self._warms_up(event.request)
        actions = scheduler.handle(event, now_ns=int(self._clock() * 1e9 + 0.5))
        if actions:
            self._perform(actions)
        if scheduler.pool.slots:
            kind = type(event)
            if kind in _POOLING:
                self._ticks.wake(0.0)
            elif widens or kind in _FREEING:
                self._ticks.wake(self._settle_s)

    def _warms_up(self, number: RequestId) -> bool:
        """Return whether the rank of a request may have more with each of its first tokens."""
        warm_up, request = self._scheduler.ranks.warm_up, self._scheduler.requests.get(number)
        if not warm_up.active or request is None or request.rank is None:
            return False
        return warm_up.width(request.rank) is not None

    def _tick(self) -> None:
        self._ticks.cancel()
        if self._scheduler.intake.barred:
            self.isolation.run("follow", self.follow)
            return
        decides = self._scheduler.pool.slots > 0
        failures = self.isolation.failures
        failed_before = failures.rounds_failed
        well = self.isolation.run("follow", self.follow)
        well &= self.isolation.run("tick", self._decide)
        if decides or not well:
            failures.round_ended(well=well and failures.rounds_failed == failed_before)

    def _decide(self) -> None:
        self._stages.begin()
        actions = self._scheduler.handle(Tick(), now_ns=self._now_ns())
        self._stages.all_ended()
        self._perform(actions)
        for stage, took_s in self._stages.taken:
            self._metrics.decisions.dispatched(stage, took_s)
        self._predictors.report_refreshes()

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
                    self.isolation.run_for(session, "action", self._act, session, action)
                elif isinstance(action, ReleasePrefill):
                    self.isolation.run("action", self._metrics.legs.abandoned_lease, "ended")
        finally:
            self._performing = False

    def _start(self, session: Session, action: StartPrefill | Admit) -> None:
        """Give a request to an engine, unless that is forbidden by now."""
        if self._forbids is not None and (reason := self._forbids()):
            session.give_up(reason)
            return
        self._began(session)
        if type(action) is StartPrefill:
            prefiller = self._instances.prefillers[action.prefiller]
            if session.asks_itself(prefiller):
                start_prefill(session, prefiller)
        else:
            assert isinstance(action, Admit)
            self.progress.admitted(session)
            rank = self._instances.ranks[action.rank]
            if session.asks_itself(rank):
                start_decode(session, rank)

    def _act(self, session: Session, action: Action) -> None:
        # Ordered by frequency. The two of every request are not found by `isinstance` or `match`: a struct's
        # class is asked for its instances by a call.
        if type(action) is StartPrefill or type(action) is Admit:
            if not (self._apart.on and self._apart.holds(action)):
                self._start(session, action)
        elif isinstance(action, AbortPrefill | AbortDecode):
            session.work.close()
        elif isinstance(action, ReleasePrefill):
            # No engine takes such a word over HTTP: the blocks stay until their lease ends.
            if action.request in self._scheduler.requests:
                session.lease_ended(cheaper=action.cheaper)
            else:
                self._metrics.legs.abandoned_lease("ended")
        else:
            assert isinstance(action, Expire)
            session.expire("the request waited longer than it may")

    # Four times a second, while there are requests.

    def begin_sweeps(self) -> None:
        """See that there are sweeps, until no request is left."""
        if not self._sweeps.runs:
            self._stranded.begin()
            self._stalls.begin()
            self._sweeps.begin()

    def reopen(self, changed: Iterable[Prefiller | Rank] | None = None) -> None:
        """Report to the scheduler which instances are open now, after some of them changed; None for any."""
        self._open_instances.update(changed)
        self.veto.spare()

    def _sweep(self, now_s: float, late_s: float) -> None:
        isolation, progress = self.isolation, self.progress
        isolation.run("timer", self._look_after, late_s)
        isolation.run("timer", self._review_ranks)
        if not self._stalls.woke:
            isolation.check_deadlines(now_s)
        isolation.run("predictor", self._predictors.score, progress.started, progress.age)
        isolation.run("timer", self._give_up_stranded, now_s)

    def _look_after(self, late_s: float) -> None:
        """Decide if a deadline or an earlier failure asks for it; follow the ranks in any case."""
        self._metrics.decisions.loop_lag(late_s)
        self._stalls.tick()
        deadline_ns = self._scheduler.next_deadline_ns()
        if self.isolation.failures.failing or (
            deadline_ns is not None and deadline_ns <= self._now_ns()
        ):
            self._tick()
        else:
            self.follow()

    def _review_ranks(self) -> None:
        self.veto.look(*self._looks.look())
        if not self._stalls.woke:
            self.veto.review()

    def _give_up_stranded(self, now_s: float) -> None:
        for number, reason in self._stranded.due(now_s):
            session = self._sessions[number]
            self.isolation.run_for(session, "timer", session.give_up, reason)


class OpenInstances:
    """Reports to the scheduler which instances open and close. At first it takes all of them for open.

    Args:
        warm_up: Whether those that were away get a share that grows.
    """

    def __init__(
        self, instances: Instances, feed: Callable[[Event], None], *, warm_up: bool = True
    ) -> None:
        self._instances = instances
        self._feed = feed
        self._warm_up = warm_up
        # Those that were away since they were open last: not only crowded, say.
        self._cold: set[Prefiller | Rank] = set()
        self._prefillers: list[tuple[bool, bool]] = []  # Whether it is open, and on trial.
        self._ranks: list[bool] = []
        # The open ranks, and those that are not, but may take part in the other ranks' steps.
        self._taking: list[RankId] = []
        self._away: list[RankId] = []
        self._grow()
        self._sort()

    def at_barrier(self, bound: NDArray[np.int64]) -> list[RankId]:
        """Return the ranks whose loads make the barrier: those that are open, and those that still have requests.

        So a rank that is drained, quarantined, asleep or new does not count as idle while nothing is to go
        there; one that stands still, as its group may, counts for nothing: the other ranks step without it.

        Args:
            bound: int64[G], slots of the bound requests.
        """
        return self._taking + [rank for rank in self._away if bound[rank]]

    def update(self, changed: Iterable[Prefiller | Rank] | None = None) -> None:
        """Report which instances are open now.

        The scheduler knows of new ones by `Scheduler.reconfigure`, and takes them for open.

        Args:
            changed: Those that may have opened or closed; None if any of them changed, was added or
                was removed.
        """
        if changed is None:
            self._grow()
            changed = [*self._instances.prefillers, *self._instances.ranks]
        changed = list(changed)
        if any(isinstance(one, Rank) for one in changed):
            self._sort()
        for one in changed:
            if not one.usable:
                self._cold.add(one)
            if isinstance(one, Prefiller):
                state = one.open, one.kv_trial
                if self._prefillers[one.id] != state:
                    self._prefillers[one.id] = state
                    is_open, on_trial = state
                    self._feed(
                        PrefillerOpened(one.id, on_trial, self._is_cold(one))
                        if is_open
                        else PrefillerClosed(one.id)
                    )
            elif self._ranks[one.id] != one.open:
                self._ranks[one.id] = one.open
                self._feed(
                    RankOpened(one.id, one.on_trial, self._is_cold(one))
                    if one.open
                    else RankClosed(one.id)
                )

    def _is_cold(self, one: Prefiller | Rank) -> bool:
        was_away = one in self._cold
        self._cold.discard(one)
        return was_away and self._warm_up

    def _sort(self) -> None:
        ranks = [one for one in self._instances.ranks if one.status is not Status.REMOVED]
        self._taking = [one.id for one in ranks if one.open]
        self._away = [one.id for one in ranks if not (one.open or one.still)]

    def _grow(self) -> None:
        prefillers, ranks = self._instances.prefillers, self._instances.ranks
        self._prefillers += [(True, False)] * (len(prefillers) - len(self._prefillers))
        self._ranks += [True] * (len(ranks) - len(self._ranks))


# Calls four times a second while there are requests.

# How often deadlines are looked at and progress is taken, in seconds.
SWEEP_S = 0.25
# Events that engines send meanwhile wait for a sweep, 1 to 2 ms where there are 256 streams. So it comes
# between two steps, if such a moment is found within this time.
_MOST_DEFERRED_S = 0.02


class SweepTimer:
    """Calls as long as there are requests.

    Args:
        sweep: Called with the time and by how much it is late, both in seconds.
    """

    def __init__(self, sessions: Sized, sweep: Callable[[float, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sessions = sessions
        self._sweep = sweep
        self._timer: asyncio.Handle | None = None

    @property
    def runs(self) -> bool:
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


# Requests that wait for engines of which none is there.


class Stranded:
    """Finds requests that have waited for long enough.

    Args:
        settings: How long they wait for a role of which no instance is up.
    """

    def __init__(
        self, scheduler: Scheduler, instances: Instances, settings: DriverSettings
    ) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._settings = settings
        # By the engines needed, and whether a prefiller is.
        self._unready_since_s: dict[tuple[Eligible | None, bool], float] = {}

    def begin(self) -> None:
        """Forget the earlier times: nothing was checked meanwhile."""
        self._unready_since_s.clear()

    def due(self, now_s: float) -> Iterator[tuple[RequestId, str]]:
        """Yield the requests to refuse and why, each when the one before it is gone."""
        if self._scheduler.intake.held:
            self._unready_since_s.clear()  # They wait for an administrator.
            return
        requests = self._scheduler.requests
        kinds = dict.fromkeys(map(_kind, requests.values()))
        unready = [kind for kind in kinds if self._lacks(*kind)]
        before = self._unready_since_s
        self._unready_since_s = {kind: before.get(kind, now_s) for kind in unready}
        for kind, since_s in self._unready_since_s.items():
            after_s, reason = self._settings.stranded_s, self._instances.why_none
            if self._instances.groups.ended(kind[0]):
                after_s, reason = self._settings.group_return_s, "the decode group has ended"
            if now_s - since_s > after_s:
                # In this order: a request that leaves the pool makes room for the queue.
                for state in (LifecycleState.QUEUED, LifecycleState.POOLED):
                    waiting = [one for one in requests.values() if one.state is state]
                    due = [one.request for one in waiting if _kind(one) == kind]
                    yield from ((number, reason) for number in due)

    def _lacks(self, eligible: Eligible | None, prefill: bool) -> bool:
        missing = self._instances.missing_for(eligible)
        return Role.DECODE in missing or (prefill and Role.PREFILL in missing)


def _kind(request: Request) -> tuple[Eligible | None, bool]:
    return request.ticket.eligible, request.ticket.prefill

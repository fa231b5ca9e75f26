"""The proxy's scheduler under observation: what goes in and comes out, and whether the books are right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from balanceroute.proxy.core.events import (
    Action,
    Admit,
    Event,
    OthersOnRank,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    RankClosed,
    RankOpened,
    RequestId,
    StepCompleted,
    Tick,
)
from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.core.scheduler import Scheduler

_NOT_OF_A_REQUEST = (
    StepCompleted,
    Tick,
    RankClosed,
    RankOpened,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    OthersOnRank,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One event and what came of it.

    Attributes:
        event: What the scheduler was told.
        request: Whom it concerns; None for all.
        before: That request's state before; None if it had none.
        started: Whether it was in its rank's batch before.
        actions: What the scheduler wants done.
        group: Whose scheduler it is; empty for the only one.
    """

    event: Event
    request: RequestId | None
    before: State | None
    started: bool
    actions: list[Action]
    group: str = ""


class SchedulerWatch:
    """Observes the proxy's scheduler.

    Args:
        scheduler: Returns whom it observes.
        watch: Told of every event that was handled.
        check_every: How many events pass between two recounts of everything.
        group: Whose scheduler it is; empty for the only one.

    Attributes:
        stale_admissions: Requests that were sent to decode with a lease that had run out.
    """

    def __init__(
        self,
        scheduler: Callable[[], Scheduler],
        watch: Callable[[Step], None],
        *,
        check_every: int = 64,
        group: str = "",
    ) -> None:
        self._scheduler = scheduler
        self.watch = watch
        self.stale_admissions: list[RequestId] = []
        self._check_every = check_every
        self._group = group
        self._events = 0
        # State of each request, and whether it is in its rank's batch.
        self._states: dict[RequestId, tuple[State, bool]] = {}

    def forget(self) -> None:
        """Forget all requests: the scheduler is another one from now on."""
        self._states.clear()

    def __call__(self, event: Event, actions: Sequence[Action], now_ns: int) -> None:
        """See `Observer`."""
        number = None if isinstance(event, _NOT_OF_A_REQUEST) else event.request
        before, started = None, False
        if number is not None:
            before, started = self._states.get(number, (None, False))
            self._learn(number)
        for action in actions:
            self._learn(action.request)
            if isinstance(action, Admit):
                expires_ns = self._scheduler().requests[action.request].lease_expires_ns
                if expires_ns is not None and expires_ns <= now_ns:
                    self.stale_admissions.append(action.request)
        self._events += 1
        if self._events % self._check_every == 0:
            self._scheduler().check()
        self.watch(Step(event, number, before, started, list(actions), self._group))

    def _learn(self, number: RequestId) -> None:
        request = self._scheduler().requests.get(number)
        if request is None:
            self._states.pop(number, None)
        else:
            self._states[number] = request.state, request.started

"""The proxy's scheduler under observation: what goes in and comes out, and whether the books are right."""

from collections.abc import Callable
from dataclasses import dataclass

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    Event,
    PrefillerClosed,
    PrefillerOpened,
    RankClosed,
    RankOpened,
    RequestId,
    StepCompleted,
    Tick,
)
from balanceroute.proxy.core.lifecycle import State
from balanceroute.proxy.core.policies.base import Policy
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.testing.chaos.decision_faults import DecisionFaults, FaultyPolicy

_NOT_OF_A_REQUEST = (
    StepCompleted,
    Tick,
    RankClosed,
    RankOpened,
    PrefillerClosed,
    PrefillerOpened,
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
    """

    event: Event
    request: RequestId | None
    before: State | None
    started: bool
    actions: list[Action]


class WatchedScheduler(Scheduler):
    """Takes the place of a scheduler, whose state it shares.

    Args:
        scheduler: Not to be used any more.
        watch: Told of every event that was handled.
        faults: Of every policy.
        check_every: How many events pass between two recounts of everything.

    Attributes:
        stale_admissions: Requests that were sent to decode with a lease that had run out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        watch: Callable[[Step], None],
        faults: DecisionFaults,
        *,
        check_every: int = 64,
    ) -> None:
        vars(self).update(vars(scheduler))
        self._faults = faults
        self.policy = FaultyPolicy(self.policy, faults)
        self.stale_admissions: list[RequestId] = []
        self._watch = watch
        self._check_every = check_every
        self._events = 0

    def reshape(self, config: SchedulerConfig, policy: Policy) -> None:
        """Change the shape as the scheduler does."""
        super().reshape(config, FaultyPolicy(policy, self._faults))

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Handle an event as the scheduler does, and look at it."""
        number = None if isinstance(event, _NOT_OF_A_REQUEST) else event.request
        request = None if number is None else self.requests.get(number)
        before = None if request is None else request.state
        started = request is not None and request.started
        actions = super().handle(event, now_ns=now_ns)
        for action in actions:
            if isinstance(action, Admit):
                expires_ns = self.requests[action.request].lease_expires_ns
                if expires_ns is not None and expires_ns <= now_ns:
                    self.stale_admissions.append(action.request)
        self._events += 1
        if self._events % self._check_every == 0:
            self.check()
        self._watch(Step(event, number, before, started, actions))
        return actions

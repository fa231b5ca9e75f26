"""A fault in one request ends, or moves, that request alone.

Exceptions of its handling stop at `Isolation`. Requests whose engines died are kept apart by `Apart`.
"""

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeVarTuple

from balanceroute.proxy.core.events import (
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    PrefillDone,
    PrefillLost,
    RequestFailed,
    RequestId,
    StartPrefill,
)
from balanceroute.proxy.core.lifecycle import PREFILLING
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Target
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import Suspects
from balanceroute.proxy.live.telemetry.component_metrics import DecisionFailures

_Arguments = TypeVarTuple("_Arguments")


class Isolation:
    """Runs what may fail."""

    def __init__(
        self,
        feed: Callable[[Event], None],
        requests: Container[RequestId],
        sessions: Mapping[RequestId, Session],
        failures: DecisionFailures,
    ) -> None:
        self.failures = failures
        self._feed = feed
        self._requests = requests
        self._sessions = sessions
        self._ending: set[RequestId] = set()

    def run(self, what: str, do: Callable[[*_Arguments], object], *args: *_Arguments) -> bool:
        """Run what concerns no single request; return whether it worked."""
        try:
            do(*args)
        except Exception as error:
            self.failures.report(what, error)
            return False
        return True

    def run_for(
        self,
        session: Session,
        what: str,
        do: Callable[[*_Arguments], object],
        *args: *_Arguments,
    ) -> None:
        """Run what concerns one request, which ends if it fails."""
        try:
            do(*args)
        except Exception as error:
            self.crashed(session.number, session.record.request_id, what, error)

    def check_deadlines(self, now_s: float) -> None:
        """Have every request act on the deadline of its leg."""
        for session in list(self._sessions.values()):
            self.run_for(session, "timer", session.check_deadline, now_s)

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
        """End a request whose handling failed: a 500, or an error event, and nothing held."""
        self.failures.report(what, error, request_id=request_id)
        if number in self._ending:  # Ending it failed.
            return
        self._ending.add(number)
        session = self._sessions.get(number)
        if number in self._requests:
            self.run(what, self._feed, RequestFailed(number))
        if session is not None:
            self.end(session, what)
        self._ending.discard(number)

    def end(self, session: Session, what: str) -> None:
        """End a request whose handling failed, unless it is over. The scheduler knows."""
        for do in (session.crash, session.abandon):
            if session.number in self._sessions:
                self.run(what, do)


# Keeps requests apart whose engines died, so that the next death shows which of them caused it.
#
# While there are suspects (see `Suspects`), a request that lost its engine goes to an engine that
# has no other such request: to another one that is open, or it waits, a second at most. It is on
# its own there until its prefill is done, its stream has begun, or its whole answer has come.

# The longest that one waits for an engine to itself.
_PATIENCE_S = 1.0
_LOOK_S = 0.05
_LOST = (PrefillLost, DecodeLost)


class Apart:
    """Looks after the requests that lost an engine.

    Attributes:
        on: These requests, with the engine that each is on, of ranks that end together the first; None for none.
    """

    def __init__(
        self,
        suspects: Suspects,
        scheduler: Scheduler,
        sessions: Mapping[RequestId, Session],
        instances: Instances,
        isolation: Isolation,
        *,
        start: Callable[[Session, StartPrefill | Admit], None],
        feed: Callable[[Event], None],
    ) -> None:
        self.on: dict[RequestId, Target | None] = {}
        self._suspects = suspects
        self._scheduler = scheduler
        self._sessions = sessions
        self._instances = instances
        self._isolation = isolation
        self._start = start
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._held: dict[RequestId, tuple[StartPrefill | Admit, float]] = {}
        self._moves: dict[RequestId, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def lost(self, event: Event) -> None:
        if isinstance(event, _LOST) and self._suspects.prompts:
            self._forget()
            self.on[event.request] = None

    def passed(self, event: Event) -> None:
        """Note that a request is past what its engine may die of."""
        if isinstance(event, DecodeStarted):
            self.on.pop(event.request, None)
        elif isinstance(event, PrefillDone) and event.request in self.on:
            self.on[event.request] = None

    def holds(self, action: StartPrefill | Admit) -> bool:
        """Return whether a request is not to be given to an engine now, as another one is there."""
        number = action.request
        if number not in self.on:
            return False
        engines, chosen = self._engines(action)
        taken = self._taken(number)
        group_of = self._instances.groups.first  # What ends together is one engine here.
        group = group_of(chosen)
        if group not in taken:
            self.on[number] = group
            return False
        moves = self._moves.get(number, 0)
        if moves < len(engines) and any(e.open and group_of(e) not in taken for e in engines):
            self._moves[number] = moves + 1
            self._loop.call_soon(self._move, action)
            return True
        self._held[number] = action, self._loop.time() + _PATIENCE_S
        self._look_soon()
        return True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _engines(
        self, action: StartPrefill | Admit
    ) -> tuple[Sequence[Prefiller | Rank], Prefiller | Rank]:
        if isinstance(action, StartPrefill):
            return self._instances.prefillers, self._instances.prefillers[action.prefiller]
        return self._instances.ranks, self._instances.ranks[action.rank]

    def _taken(self, number: RequestId) -> set[Target | None]:
        """Return the engines that other such requests are on."""
        return {at for one, at in self.on.items() if one != number and one in self._sessions}

    def _move(self, action: StartPrefill | Admit) -> None:
        """Have a request go to another engine, unless it is elsewhere by now."""
        if not self._is_current(action):
            return
        number = action.request
        event: Event = DecodeLost(number)
        if isinstance(action, StartPrefill):
            decode = self._scheduler.requests[number].decode
            event = PrefillLost(number, elsewhere=True, decode=decode)
        self._isolation.run_for(self._sessions[number], "apart", self._feed, event)

    def _is_current(self, action: StartPrefill | Admit) -> bool:
        request = self._scheduler.requests.get(action.request)
        if request is None or action.request not in self._sessions:
            return False
        if isinstance(action, StartPrefill):
            return request.state is PREFILLING and request.prefiller == action.prefiller
        return not request.started and request.rank == action.rank

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Give those to their engines that are alone there now, or have waited for long enough.

        An engine that takes nothing any more gets nothing: its requests go elsewhere.
        """
        self._timer = None
        for number, (action, until_s) in list(self._held.items()):
            if not self._is_current(action):
                del self._held[number]
                continue
            _, chosen = self._engines(action)
            group = self._instances.groups.first(chosen)
            waits = group in self._taken(number) and self._loop.time() < until_s
            if waits and chosen.usable:
                continue
            del self._held[number]
            if not chosen.usable:  # It was drained, removed or lost meanwhile.
                self._move(action)
                continue
            self.on[number] = group
            session = self._sessions[number]
            self._isolation.run_for(session, "apart", self._start, session, action)
        if self._held:
            self._look_soon()

    def _forget(self) -> None:
        for number in [one for one in self.on if one not in self._sessions]:
            del self.on[number]
            self._moves.pop(number, None)

"""What happens to one request ends that request alone: exceptions of its handling stop here."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVarTuple

from balanceroute.proxy.core.events import RequestFailed, RequestId
from balanceroute.proxy.live.request.reports import SessionEnded
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.session_host import Host
    from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures

_Arguments = TypeVarTuple("_Arguments")


class Isolation:
    """Runs what may fail."""

    def __init__(
        self,
        host: "Host",
        scheduler: "Scheduler",
        sessions: "Mapping[RequestId, Session]",
        failures: "DecisionFailures",
    ) -> None:
        self.failures = failures
        self._host = host
        self._scheduler = scheduler
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
        session: "Session",
        what: str,
        do: Callable[[*_Arguments], object],
        *args: *_Arguments,
    ) -> None:
        """Run what concerns one request, which ends if it fails."""
        try:
            do(*args)
        except Exception as error:
            self.crashed(session.number, session.record.request_id, what, error)

    def crashed(self, number: RequestId, request_id: str, what: str, error: Exception) -> None:
        """End a request whose handling failed: a 500, or an error event, and nothing held."""
        self.failures.report(what, error, request_id=request_id)
        if number in self._ending:  # Ending it failed.
            return
        self._ending.add(number)
        session = self._sessions.get(number)
        if number in self._scheduler.requests:
            self.run(what, self._host.feed, RequestFailed(number))
        if session is not None and number in self._sessions:
            self.run(what, session.crash)
        if session is not None and number in self._sessions:
            session.record.outcome = Outcome.INTERNAL_ERROR
            session.record.ended_ns = round(self._host.context.clock() * 1e9)
            self.run(what, session.answer.reply.abort)
            self.run(what, self._host.report, SessionEnded(number, session.record))
        self._ending.discard(number)

"""What happens to one request ends that request alone: exceptions of its handling stop here."""

from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from balanceroute.proxy.core.events import RequestFailed, RequestId

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.request.session_host import Host
    from balanceroute.proxy.live.telemetry.component_metrics import DecisionFailures

_Arguments = TypeVarTuple("_Arguments")
_Message = TypeVar("_Message")


class Isolation:
    """Runs what may fail.

    Args:
        host: Fed with the failure of a request.
        requests: Those that the scheduler has.
        sessions: All live requests.
        failures: Told of every exception.
    """

    def __init__(
        self,
        host: "Host",
        requests: Container[RequestId],
        sessions: "Mapping[RequestId, Session]",
        failures: "DecisionFailures",
    ) -> None:
        self.failures = failures
        self._host = host
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
            self.run(what, self._host.feed, RequestFailed(number))
        if session is not None:
            self.end(session, what)
        self._ending.discard(number)

    def end(self, session: "Session", what: str) -> None:
        """End a request whose handling failed, unless it is over. The scheduler knows."""
        for do in (session.crash, session.abandon):
            if session.number in self._sessions:
                self.run(what, do)

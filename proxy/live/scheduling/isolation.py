"""What happens to one request ends that request alone: exceptions of its handling stop here."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

from balanceroute.proxy.core.events import RequestFailed, RequestId
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.scheduling.driver import Driver
    from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures

_Arguments = TypeVarTuple("_Arguments")


class Isolation:
    """Runs what may fail."""

    def __init__(self, driver: "Driver", failures: "DecisionFailures") -> None:
        self._driver = driver
        self.failures = failures
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
            self.crashed(session, what, error)

    def guarded(
        self, session: "Session", what: str, do: Callable[[*_Arguments], object]
    ) -> Callable[[*_Arguments], None]:
        """Return `do` as `run_for` runs it."""

        def run(*args: *_Arguments) -> None:
            self.run_for(session, what, do, *args)

        return run

    def crashed(self, session: "Session", what: str, error: Exception) -> None:
        """End a request whose handling failed: a 500, or an error event, and nothing held."""
        number, driver = session.number, self._driver
        self.failures.report(what, error, request_id=session.record.request_id)
        if number in self._ending:  # Ending it failed.
            return
        self._ending.add(number)
        if number in driver.scheduler.requests:
            self.run(what, driver.feed, RequestFailed(number))
        if number in driver.sessions:
            self.run(what, session.crash)
        if number in driver.sessions:
            session.record.outcome = Outcome.INTERNAL_ERROR
            session.record.ended_ns = round(driver.clock() * 1e9)
            self.run(what, session.answer.reply.abort)
            self.run(what, driver.ended, session)
        self._ending.discard(number)

"""The seam between the public listener and those who serve requests."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.reports import Report
    from balanceroute.proxy.live.request.session_host import SessionContext
    from balanceroute.proxy.live.scheduling.arrival import Arrival
    from balanceroute.proxy.live.scheduling.isolation import Isolation
    from balanceroute.proxy.live.telemetry.record import RequestRecord


class Intake(Protocol):
    """Who takes requests.

    Attributes:
        draining: Whether new requests are refused.
        isolation: Ends alone what failed.
    """

    draining: bool
    isolation: "Isolation"

    @property
    def context(self) -> "SessionContext": ...  # noqa: D102

    @property
    def uses_keys(self) -> bool:
        """Whether the keys of requests are asked for; see `prompt_keys`."""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now, and decided about as it should be."""

    def submit(self, arrival: "Arrival") -> None:
        """Take a request, or refuse it, at once or later."""

    def report(self, report: "Report") -> None:
        """Take note of something."""


class Pages(Protocol):
    """What is told to clients of the whole proxy. Answers come at once or later."""

    def metrics(self, answer: Callable[[bytes], None]) -> None:
        """Answer the page of metrics."""

    def load(self, passing: int, answer: Callable[[int], None]) -> None:
        """Answer how many requests there are; `passing` are those passed through here."""


class RequestCounts(Protocol):
    """Counts requests that this listener ends itself; see `RequestMetrics`."""

    def ended(self, record: "RequestRecord") -> None:
        """Count a request that was refused."""

    def passed_through(self, record: "RequestRecord") -> None:
        """Count a request that one engine answered alone."""

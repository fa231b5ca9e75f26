"""What a relay counts and logs: the scheduler process does it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.processes import from_relay

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord

_Send = Callable[[from_relay.FromRelay], None]


class RelayRecords:
    """Passes on the records of requests that the relay ends itself: `RequestCounts`, and a `Log`."""

    def __init__(self, send: _Send) -> None:
        self._send = send

    def ended(self, record: "RequestRecord") -> None:
        """Have a request counted that was refused."""
        self._send(from_relay.Recorded(record, "refused"))

    def passed_through(self, record: "RequestRecord") -> None:
        """Have a request counted that one engine answered alone."""
        self._send(from_relay.Recorded(record, "passed_through"))

    def request_ended(self, record: "RequestRecord") -> None:
        """Have a request logged."""
        self._send(from_relay.Recorded(record, "line"))

    def retried(self, leg: str, fault: str) -> None:
        """Have a leg counted that was sent again."""
        self._send(from_relay.LegRetried(leg, Fault(fault)))


class RelayFailures:
    """Has failures counted that the relay has logged."""

    def __init__(self, send: _Send) -> None:
        self._send = send

    def failed(self, what: str) -> None:
        """Have a failure counted."""
        self._send(from_relay.Failure(what))


class RelayPages:
    """Asks for what is told of the whole proxy; see `Pages`."""

    def __init__(self, ask: Callable[[str, Callable[[bytes], None]], None]) -> None:
        self._ask = ask

    def metrics(self, answer: Callable[[bytes], None]) -> None:
        """Answer the page of metrics."""
        self._ask("/metrics", answer)

    def load(self, passing: int, answer: Callable[[int], None]) -> None:
        """Answer how many requests there are, of which the relay has told all but the latest."""
        del passing
        self._ask("/load", lambda body: answer(int(body)))

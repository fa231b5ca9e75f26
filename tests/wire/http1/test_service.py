"""When the sweep of connections finds a deadline passed."""

from collections.abc import Callable
from unittest.mock import Mock

from balanceroute.proxy.wire.http1.service import Service
from balanceroute.proxy.wire.messages import ServerLimits

SWEEP_S = 1.0


class HandSetLoop:
    """A loop whose clock is set, and whose one timer is run, by hand."""

    now_s = 0.0
    due: Callable[[], None]

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Mock:
        assert delay_s == SWEEP_S
        self.due = callback
        return Mock()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Nothing is written."""

    def run_due(self, *, at_s: float) -> None:
        self.now_s = at_s
        self.due()


def test_nothing_is_overdue_right_after_a_standstill() -> None:
    loop = HandSetLoop()
    service = Service(
        loop,  # type: ignore[arg-type]
        Mock(),
        ServerLimits(),
        refuse=Mock(),
        admit=None,
        common=None,
    )
    connection = Mock(deadline_s=2.5)
    service.add(connection, "client")
    loop.run_due(at_s=1.0)
    # It stood still: what the client sent meanwhile has yet to be read.
    loop.run_due(at_s=30.0)
    connection.expire.assert_not_called()
    loop.run_due(at_s=31.0)
    connection.expire.assert_called_once_with(31.0)
    # A loop that is late each time looks at every second one.
    connection.expire.reset_mock()
    loop.run_due(at_s=60.0)
    connection.expire.assert_not_called()
    loop.run_due(at_s=90.0)
    connection.expire.assert_called_once_with(90.0)

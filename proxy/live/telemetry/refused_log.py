"""The log lines of refused requests, so many and no more: a flood of them must not fill the disk.

Each is counted in the metrics whatever is written.
"""

import asyncio
import logging
from collections.abc import Callable

from balanceroute.proxy.live.telemetry.record import RequestRecord

_log = logging.getLogger(__name__)
BURST = 100
"""Lines that may be written at once."""

PER_S = 10.0
"""Lines a second that may be written for ever."""

_REPORT_S = 60.0


class RefusedLog:
    """Passes the records of refused requests on to the log, as many as the limits allow."""

    def __init__(self, write: Callable[[RequestRecord], None]) -> None:
        """Write to a log."""
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._allowed = float(BURST)
        self._counted_s = self._loop.time()
        self._left_out = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, record: RequestRecord) -> None:
        """Write one line, or count it; the count is logged within a minute."""
        now_s = self._loop.time()
        self._allowed = min(BURST, self._allowed + (now_s - self._counted_s) * PER_S)
        self._counted_s = now_s
        if self._allowed >= 1.0:
            self._allowed -= 1.0
            self._write(record)
            return
        self._left_out += 1
        if self._timer is None:
            self._timer = self._loop.call_later(_REPORT_S, self.report)

    def report(self) -> None:
        """Log how many lines were left out since the last report, if any were."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._left_out:
            fields = {"count": self._left_out}
            _log.warning("refused requests were left out of the log", extra={"fields": fields})
            self._left_out = 0

"""The requests that ended last, kept for whoever asks for one by its id."""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import Log, RequestRecord

KEPT = 1000


class RecentRequests:
    """A log that keeps the latest records, in front of another."""

    def __init__(self, log: "Log") -> None:
        self._log = log
        self._kept: deque[RequestRecord] = deque(maxlen=KEPT)

    def request_ended(self, record: "RequestRecord") -> None:
        """Keep a record, and pass it on."""
        self._kept.append(record)
        self._log.request_ended(record)

    def find(self, request_id: str) -> "list[RequestRecord]":
        """Return those with an id, which clients may give twice; the latest last."""
        return [one for one in self._kept if request_id in (one.request_id, one.client_request_id)]

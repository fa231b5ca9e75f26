"""Who is let in at all: the seam for overload control.

A driver asks before it feeds `RequestArrived`, so that a refused request never exists for the
scheduler. What waits is bounded here and not in the scheduler, because only the driver can say no.
"""

from dataclasses import dataclass
from typing import Protocol

from balanceroute.proxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in, and in how many seconds its client may try again."""

    reason: str
    retry_after_s: int


class Admission(Protocol):
    """Decides whether one more request is let in."""

    def refuse(self, waiting: int, now_ns: int) -> Refusal | None:
        """Return why a request that comes now is refused, or None if it is welcome.

        Args:
            waiting: `Scheduler.waiting`, the requests that no rank has taken yet.
            now_ns: The driver's clock.
        """
        ...


class BoundedQueue:
    """Lets everyone in until `limit` requests wait.

    Args:
        limit: Requests that may wait, at least 1.
        retry_after_s: What a refused client is told, at least 1.

    Raises:
        ConfigError: A bound is below 1.
    """

    def __init__(self, limit: int, *, retry_after_s: int = 1) -> None:
        for name, value in (("limit", limit), ("retry_after_s", retry_after_s)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        self._limit = limit
        self._retry_after_s = retry_after_s

    def refuse(self, waiting: int, now_ns: int) -> Refusal | None:
        """Refuse once `limit` requests wait."""
        del now_ns
        if waiting < self._limit:
            return None
        return Refusal(f"{waiting} requests wait already", self._retry_after_s)

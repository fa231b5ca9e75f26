"""`bounded`: requests are accepted until a given number wait."""

from balanceroute.proxy.core.admission.base import Ending, Load, Refusal
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import Ticket

_TOO_MANY_REQUESTS = 429


class BoundedQueue:
    """Accepts requests until `limit` of them wait.

    Raises:
        ConfigError: A bound is below 1.
    """

    follows = False

    def __init__(self, limit: int, *, retry_after_s: int = 1) -> None:
        for name, value in (("limit", limit), ("retry_after_s", retry_after_s)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        self._limit = limit
        self._retry_after_s = retry_after_s

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Reject once `limit` requests wait."""
        del ticket, now_ns
        if load.waiting < self._limit:
            return None
        reason = f"{load.waiting} requests wait already"
        return Refusal(_TOO_MANY_REQUESTS, reason, self._retry_after_s)

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Do nothing."""

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Do nothing: the rule depends on the present load only."""

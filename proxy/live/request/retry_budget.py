"""A cap on retries over the whole proxy, so that an outage is not answered with a retry storm.

A fifth of the requests may be tried again, as Envoy's and Linkerd's budgets have it, and ten more (as
many as Linkerd allows a second) so that the first failures after a quiet time are retried: it takes a
few to tell who is at fault.
"""


class RetryBudget:
    """Earns a share of a retry with each request.

    Args:
        share: Retries per request.
        reserve: Retries available at the start.
        most: The largest number of retries saved up.
    """

    def __init__(self, *, share: float = 0.2, reserve: float = 10.0, most: float = 100.0) -> None:
        self._share = share
        self._most = most
        self._left = reserve

    def earn(self) -> None:
        """Note one request."""
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry; return whether there was one."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

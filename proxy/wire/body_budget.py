"""The bytes of request bodies that one server keeps at a time: received so far, or not answered yet.

A request's size is judged on its head if it tells, but only what has come is counted: a slow upload
holds nothing that it has not sent.
"""

from balanceroute.proxy.wire.messages import MalformedError


class BodyBudget:
    """Counts bytes.

    Args:
        limit: How many there may be; None for no bound.

    Attributes:
        used: How many there are.
        rejected: Requests that were too many.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.used = 0
        self.rejected = 0

    def check(self, size: int) -> None:
        """Raise MalformedError, a 503, if there is no room for so many more bytes."""
        if self._limit is not None and self.used + size > self._limit:
            self.rejected += 1
            message = "the bodies of the requests in flight are too large together"
            raise MalformedError(message, 503, ((b"retry-after", b"1"),))

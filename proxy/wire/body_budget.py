"""The bytes of request bodies that one server holds: received so far, or not answered yet.

A request is checked by its Content-Length, if it has one, but only received bytes are counted: a slow
upload reserves nothing that it has not sent.
"""

from balanceroute.proxy.wire.messages import MalformedError


class BodyBudget:
    """Counts bytes.

    Args:
        limit: The most bytes; None for no limit.

    Attributes:
        used: Bytes now.
        rejected: Requests that did not fit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.used = 0
        self.rejected = 0

    def check(self, size: int) -> None:
        """Raise MalformedError (503) if there is no room for `size` more bytes."""
        if self._limit is not None and self.used + size > self._limit:
            self.rejected += 1
            message = "the bodies of the requests in flight are too large together"
            raise MalformedError(message, 503, ((b"retry-after", b"1"),))

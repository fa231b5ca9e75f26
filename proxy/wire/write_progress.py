"""Whether a peer takes what is written to it."""


class WriteProgress:
    """Compares the bytes that have left the write buffer from check to check.

    Args:
        timeout_s: A peer that takes nothing for this long, while data waits, has stalled.

    Attributes:
        check_s: How often to check.
    """

    __slots__ = ("_drained", "_since_s", "_timeout_s", "check_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._drained: int | None = None
        self._since_s = 0.0
        self.check_s = timeout_s / 4

    def begin(self, now_s: float) -> None:
        """Begin with a new answer."""
        self._drained = None
        self._since_s = now_s

    def has_stalled(self, now_s: float, *, written: int, waiting: int) -> bool:
        """Return whether the peer has stalled.

        Args:
            now_s: The present time.
            written: Bytes of the answer that were passed to the transport.
            waiting: Bytes in its write buffer.
        """
        drained = written - waiting
        if not waiting or drained != self._drained:
            self._drained = drained
            self._since_s = now_s
            return False
        return now_s - self._since_s >= self._timeout_s

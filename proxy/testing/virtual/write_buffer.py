"""What a transport has not written yet."""

HIGH_WATER_BYTES = 64 * 1024  # asyncio's default; the low one is a quarter of the high one.


class WriteBuffer:
    """Bytes to write, and the limits at which the protocol is told to pause and to resume.

    Attributes:
        high: Above it the protocol pauses, in bytes.
        low: At it a paused protocol resumes, in bytes.
    """

    __slots__ = ("_data", "_is_paused", "high", "low")

    def __init__(self) -> None:
        self.high = HIGH_WATER_BYTES
        self.low = HIGH_WATER_BYTES // 4
        self._data = bytearray()
        self._is_paused = False

    def __len__(self) -> int:
        return len(self._data)

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Set the limits; each follows from the other if that alone is given.

        Raises:
            ValueError: They are negative, or the low one exceeds the high one.
        """
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self.high, self.low = high, low

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._data += data

    def first(self, num_bytes: int) -> bytes:
        """Return the first bytes, without removing them."""
        return bytes(memoryview(self._data)[: max(num_bytes, 0)])

    def drop(self, num_bytes: int) -> None:
        """Remove the first bytes."""
        del self._data[:num_bytes]

    def clear(self) -> None:
        """Remove all bytes."""
        self._data.clear()

    def pauses(self) -> bool:
        """Return whether the protocol has to pause now, once for each time."""
        if self._is_paused or len(self._data) <= self.high:
            return False
        self._is_paused = True
        return True

    def resumes(self) -> bool:
        """Return whether a paused protocol may resume now, once for each time."""
        if not self._is_paused or len(self._data) > self.low:
            return False
        self._is_paused = False
        return True

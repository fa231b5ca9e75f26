"""How often something may happen: so many times at once, and so often for ever."""

from collections.abc import Callable


class LeakyBucket:
    """Counts.

    Args:
        burst: How often it may happen at once.
        per_s: How often for ever.
        clock: Seconds.
    """

    __slots__ = ("_allowed", "_burst", "_clock", "_counted_s", "_per_s")

    def __init__(self, burst: float, per_s: float, clock: Callable[[], float]) -> None:
        self._burst = self._allowed = burst
        self._per_s = per_s
        self._clock = clock
        self._counted_s = clock()

    def take(self) -> bool:
        """Count once; return whether it may happen."""
        now_s = self._clock()
        self._allowed = min(self._burst, self._allowed + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True

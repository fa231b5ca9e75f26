"""Rank time lost at the barrier: since the start, and in the latest minutes."""

from collections import deque
from typing import TYPE_CHECKING

from balanceroute.proxy.core.fscore import idle_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BUCKET_S = 5.0
BUCKETS = 60
"""Buckets of `BUCKET_S` that are kept."""


class BarrierIdle:
    """Sums what ranks have less than the fullest, step by step.

    Attributes:
        idle_tokens: Sum over the steps of sum_g (max L - L_g), since the start.
        capacity_tokens: Sum over the steps of G x max L, since the start.
    """

    def __init__(self) -> None:
        self.idle_tokens = self.capacity_tokens = 0
        # The number of a bucket since the clock's zero, and both sums in it.
        self._buckets: deque[tuple[int, int, int]] = deque(maxlen=BUCKETS)

    def add(self, steps: int, loads: "NDArray[np.int64]", now_s: float) -> None:
        """Note `steps` steps that had these loads, int64[G]."""
        tokens: list[int] = loads.tolist()
        idle, capacity = steps * idle_tokens(tokens), steps * len(tokens) * max(tokens)
        self.idle_tokens += idle
        self.capacity_tokens += capacity
        place = int(now_s // BUCKET_S)
        if self._buckets and self._buckets[-1][0] == place:
            _, before, capacity_before = self._buckets.pop()
            idle, capacity = before + idle, capacity_before + capacity
        self._buckets.append((place, idle, capacity))

    def shares(self, now_s: float) -> list[float | None]:
        """Return the idle share of each bucket, the oldest first; None where there was no load."""
        last = int(now_s // BUCKET_S)
        known = {place: (idle, capacity) for place, idle, capacity in self._buckets}
        sums = [known.get(place, (0, 0)) for place in range(last - BUCKETS + 1, last + 1)]
        return [idle / capacity if capacity else None for idle, capacity in sums]

    def share(self, now_s: float) -> float:
        """Return the idle share of all buckets together; 0 if there was no load."""
        first = int(now_s // BUCKET_S) - BUCKETS
        kept = [(idle, capacity) for place, idle, capacity in self._buckets if place > first]
        total = sum(capacity for _, capacity in kept)
        return sum(idle for idle, _ in kept) / total if total else 0.0

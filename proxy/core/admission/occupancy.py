"""How many are somewhere, and how soon they leave: the source of an honest `Retry-After`."""

from math import exp, expm1, inf

# Time constant of the mean: it forgets what is a few of these ago.
_MEMORY_NS = 30_000_000_000


class Occupancy:
    """Counts who is there, and measures the rate at which they leave while anybody is.

    Attributes:
        count: How many are there.
    """

    __slots__ = ("_busy_ns", "_score", "_scored_ns", "_since_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self._since_ns = 0
        # Time in which anybody was there: an empty queue says nothing of how fast it empties.
        self._busy_ns = self._scored_ns = 0
        self._score = 0.0

    def enter(self, now_ns: int) -> None:
        """Note that one more is there."""
        self._pass(now_ns)
        self.count += 1

    def leave(self, now_ns: int) -> None:
        """Note that one is there no more."""
        assert self.count, "nobody is there"
        self._pass(now_ns)
        self.count -= 1
        self._score = self._score * exp((self._scored_ns - self._busy_ns) / _MEMORY_NS) + 1.0
        self._scored_ns = self._busy_ns

    def wait_ns(self, places: int, now_ns: int) -> float:
        """Return the time in which so many will leave; infinite if none ever did."""
        self._pass(now_ns)
        score = self._score * exp((self._scored_ns - self._busy_ns) / _MEMORY_NS)
        if not score:
            return inf
        # In a past that is shorter than the memory the same rate scores less.
        seen = -expm1(-self._busy_ns / _MEMORY_NS)
        return places * _MEMORY_NS * seen / score

    def _pass(self, now_ns: int) -> None:
        if self.count:
            self._busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns

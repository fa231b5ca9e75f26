"""A token bucket: what may be taken at a steady rate, and in bursts of a given size.

All of it is in integers, so that over any time no more is granted than rate x time + burst, exactly.
"""

from dataclasses import dataclass

from balanceroute.proxy.core.errors import ConfigError

# A bucket counts in these parts, of which each nanosecond adds `per_minute`.
_PARTS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """How much may be taken.

    Attributes:
        per_minute: In the long run.
        burst: At once, after a time in which nothing was taken.

    Raises:
        ConfigError: One of them is below 1.
    """

    per_minute: int
    burst: int

    def __post_init__(self) -> None:
        for name in ("per_minute", "burst"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")


class Bucket:
    """Refills from `now_ns` on; full at first. Times never go back."""

    __slots__ = ("_level", "_since_ns", "rate")

    def __init__(self, rate: Rate, now_ns: int) -> None:
        self.rate = rate
        self._level = rate.burst * _PARTS
        self._since_ns = now_ns

    def available(self, now_ns: int) -> int:
        """Return what may be taken now; negative if more was taken than there was."""
        self._refill(now_ns)
        return self._level // _PARTS

    def take(self, amount: int, now_ns: int) -> None:
        """Take something, whatever there is; a negative amount is given back."""
        self._refill(now_ns)
        self._level = min(self._level - amount * _PARTS, self.rate.burst * _PARTS)

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Return the time until so much may be taken; 0 if that is now.

        It is never if `amount` exceeds the burst, which the caller has to see.
        """
        self._refill(now_ns)
        return max(0, -((self._level - amount * _PARTS) // self.rate.per_minute))

    def change(self, rate: Rate, now_ns: int) -> None:
        """Refill at another rate. What was taken stays taken."""
        self._refill(now_ns)
        self._level = min(self._level, rate.burst * _PARTS)
        self.rate = rate

    def _refill(self, now_ns: int) -> None:
        assert now_ns >= self._since_ns, f"time went back from {self._since_ns} to {now_ns}"
        grown = self._level + (now_ns - self._since_ns) * self.rate.per_minute
        self._level = min(grown, self.rate.burst * _PARTS)
        self._since_ns = now_ns

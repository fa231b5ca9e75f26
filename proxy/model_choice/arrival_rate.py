"""How many requests a second come, of late."""

# About so many arrivals are remembered.
_MEMORY = 20


class ArrivalRate:
    """A mean of the last gaps between arrivals; older ones fade out."""

    def __init__(self) -> None:
        self._last_ms: float | None = None
        self._gaps = self._gap_ms = 0.0

    def observe(self, now_ms: float) -> float:
        """Take an arrival; return the requests a second with it, 0 while there is no gap."""
        if self._last_ms is not None:
            keep = 1 - 1 / _MEMORY
            self._gaps = keep * self._gaps + 1
            self._gap_ms += (max(0.0, now_ms - self._last_ms) - self._gap_ms) / self._gaps
        self._last_ms = now_ms
        return 1e3 / self._gap_ms if self._gap_ms > 0 else 0.0

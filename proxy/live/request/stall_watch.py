"""Since when something that is read now may have been waiting to be read."""

from collections.abc import Callable


class StallWatch:
    """Tells what came just now from what may have come while this process stood still.

    A process is suspended, a host paused, a loop blocked: afterwards everything that came meanwhile is
    read at once. A prefill answer among it may be as old as its lease, and a KV cache that is pulled
    after its lease is another prompt's.

    Args:
        interval_s: Time between two calls of `tick`, in seconds of the clock.
        clock: The machine's uptime, which counts what the loop's clock does not: a suspended machine.

    Attributes:
        woke: Whether the last tick was the first after a standstill: what came meanwhile has yet to be
            read, so nothing is overdue. Not twice in a row: a loop may be late for ever.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._late_s = 2 * interval_s
        self._clock = clock
        self.woke = False
        self._ticked_s = self._stalled_s = self._over_s = clock()

    def begin(self) -> None:
        """Note that ticks come from now on."""
        self._ticked_s = self._clock()

    def tick(self) -> None:
        """Note that this process runs."""
        now_s = self._clock()
        stood_still = now_s - self._ticked_s > self._late_s
        self.woke = stood_still and not self.woke
        if stood_still:
            # What waited is read after the timers that came due: for a while nothing counts as new.
            self._stalled_s, self._over_s = self._ticked_s, now_s + self._late_s
        self._ticked_s = now_s

    def waiting_since_s(self) -> float:
        """Return since when what is read now may have been here, by the clock."""
        now_s = self._clock()
        if now_s - self._ticked_s > self._late_s:
            return self._ticked_s
        return self._stalled_s if now_s < self._over_s else now_s

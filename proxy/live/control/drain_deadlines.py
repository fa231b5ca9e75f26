"""When requests leave the engines that are drained: `deadline_s` of a drain, kept over a restart."""

import asyncio
from collections.abc import Callable, Iterable

from balanceroute.proxy.live.engines.instances import Target

# A process that takes over has its engines by then.
_TAKEN_OVER_S = 1.0
_LONGEST_S = 86_400.0


class DrainDeadlines:
    """One timer for each engine that has a deadline.

    Args:
        due: Called when one has come.
        unix_s: Wall-clock time, which a restart does not begin anew.
    """

    def __init__(self, due: Callable[[Target], None], unix_s: Callable[[], float]) -> None:
        self._due = due
        self._unix_s = unix_s
        self._at: dict[Target, tuple[float, asyncio.TimerHandle]] = {}

    def set(self, target: Target, after_s: float) -> None:
        """Have an engine left after so many seconds; the latest order holds."""
        self.forget(target)
        timer = asyncio.get_running_loop().call_later(after_s, self._come, target)
        self._at[target] = self._unix_s() + after_s, timer

    def forget(self, target: Target) -> None:
        """Have an engine left by nobody: it was taken back, or is gone."""
        found = self._at.pop(target, None)
        if found is not None:
            found[1].cancel()

    def standing(self) -> tuple[tuple[Target, float], ...]:
        """Return each engine and the Unix time of its deadline."""
        return tuple((target, unix_s) for target, (unix_s, _) in self._at.items())

    def restore(self, standing: Iterable[tuple[Target, float]]) -> None:
        """Set those that another process had: one that has passed meanwhile comes soon."""
        for target, unix_s in standing:
            self.set(target, min(max(unix_s - self._unix_s(), _TAKEN_OVER_S), _LONGEST_S))

    def close(self) -> None:
        """Stop all timers."""
        for _, timer in self._at.values():
            timer.cancel()

    def _come(self, target: Target) -> None:
        del self._at[target]
        self._due(target)

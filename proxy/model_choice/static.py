"""Always the same model, while it is healthy."""

from collections.abc import Sequence

from balanceroute.proxy.model_choice.base import Outlook


class Static:
    """Takes one group; if it has no engine left, the next smaller that has, else the next larger."""

    def __init__(self, group: int) -> None:
        self._group = group

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[Outlook]) -> int:
        """Return the group; see `ModelChoice.choose`."""
        healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
        return min(healthy, key=lambda place: (place > self._group, abs(place - self._group)))

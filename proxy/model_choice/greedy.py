"""The largest model that is predicted to keep the targets now."""

from collections.abc import Sequence

from balanceroute.proxy.model_choice.base import Outlook


class Greedy:
    """Looks at no task and no future; where no group keeps the targets, it takes the nearest to it."""

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[Outlook]) -> int:
        """Return the group; see `ModelChoice.choose`."""
        healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
        kept = [place for place in healthy if outlooks[place].target_share <= 1]
        return max(kept) if kept else min(healthy, key=lambda one: outlooks[one].target_share)

"""Which instances the scheduler may use, as it was told."""

from collections.abc import Callable, Iterable

from balanceroute.proxy.core.events import (
    Event,
    PrefillerClosed,
    PrefillerOpened,
    RankClosed,
    RankOpened,
)
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank


class OpenInstances:
    """Tells the scheduler which instances open and close. At first it takes all of them for open.

    Attributes:
        serving: The ranks that are not removed, whose loads make the barrier.
    """

    def __init__(self, instances: Instances, feed: Callable[[Event], None]) -> None:
        self.serving = instances.serving()
        self._instances = instances
        self._feed = feed
        self._prefillers: list[tuple[bool, bool]] = []  # Whether it is open, and on trial.
        self._ranks: list[bool] = []
        self._grow()

    def update(self, changed: Iterable[Prefiller | Rank] | None = None) -> None:
        """Tell which instances are open now.

        The scheduler knows of new ones by `Scheduler.reconfigure`, and takes them for open.

        Args:
            changed: Those that may have opened or closed; None if any of them changed, was added or
                was removed.
        """
        if changed is None:
            self._grow()
            self.serving = self._instances.serving()
            changed = [*self._instances.prefillers, *self._instances.ranks]
        for one in changed:
            if isinstance(one, Prefiller):
                state = one.open, one.kv_trial
                if self._prefillers[one.id] != state:
                    self._prefillers[one.id] = state
                    is_open, on_trial = state
                    self._feed(
                        PrefillerOpened(one.id, on_trial) if is_open else PrefillerClosed(one.id)
                    )
            elif self._ranks[one.id] != one.open:
                self._ranks[one.id] = one.open
                self._feed(RankOpened(one.id) if one.open else RankClosed(one.id))

    def _grow(self) -> None:
        prefillers, ranks = self._instances.prefillers, self._instances.ranks
        self._prefillers += [(True, False)] * (len(prefillers) - len(self._prefillers))
        self._ranks += [True] * (len(ranks) - len(self._ranks))

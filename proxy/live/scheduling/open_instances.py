"""Which instances the scheduler may use, as it was told."""

from collections.abc import Callable

from balanceroute.proxy.core.events import (
    Event,
    PrefillerClosed,
    PrefillerOpened,
    RankClosed,
    RankOpened,
)
from balanceroute.proxy.live.engines.instances import Instances


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

    def update(self) -> None:
        """Tell which instances are open now, after any of them changed or was added.

        The scheduler knows of new ones by `Scheduler.reconfigure`, and takes them for open.
        """
        self._grow()
        for prefiller in self._instances.prefillers:
            number, state = prefiller.id, (prefiller.open, prefiller.kv_trial)
            if self._prefillers[number] != state:
                self._prefillers[number] = state
                is_open, on_trial = state
                self._feed(
                    PrefillerOpened(number, on_trial) if is_open else PrefillerClosed(number)
                )
        for rank in self._instances.ranks:
            if self._ranks[rank.id] != rank.open:
                self._ranks[rank.id] = rank.open
                self._feed(RankOpened(rank.id) if rank.open else RankClosed(rank.id))
        self.serving = self._instances.serving()

    def _grow(self) -> None:
        prefillers, ranks = self._instances.prefillers, self._instances.ranks
        self._prefillers += [(True, False)] * (len(prefillers) - len(self._prefillers))
        self._ranks += [True] * (len(ranks) - len(self._ranks))

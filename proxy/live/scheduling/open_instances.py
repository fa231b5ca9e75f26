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

    Args:
        instances: The engines.
        feed: Tells the scheduler.
        warm_up: Whether those that were away get a share that grows.

    Attributes:
        serving: The ranks that are not removed, whose loads make the barrier.
    """

    def __init__(
        self, instances: Instances, feed: Callable[[Event], None], *, warm_up: bool = True
    ) -> None:
        self.serving = instances.serving()
        self._instances = instances
        self._feed = feed
        self._warm_up = warm_up
        # Those that were away since they were open last: not only crowded, say.
        self._cold: set[Prefiller | Rank] = set()
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
            if not one.usable:
                self._cold.add(one)
            if isinstance(one, Prefiller):
                state = one.open, one.kv_trial
                if self._prefillers[one.id] != state:
                    self._prefillers[one.id] = state
                    is_open, on_trial = state
                    self._feed(
                        PrefillerOpened(one.id, on_trial, self._is_cold(one))
                        if is_open
                        else PrefillerClosed(one.id)
                    )
            elif self._ranks[one.id] != one.open:
                self._ranks[one.id] = one.open
                self._feed(
                    RankOpened(one.id, one.on_trial, self._is_cold(one))
                    if one.open
                    else RankClosed(one.id)
                )

    def _is_cold(self, one: Prefiller | Rank) -> bool:
        """Return whether an instance that opens was away."""
        was_away = one in self._cold
        self._cold.discard(one)
        return was_away and self._warm_up

    def _grow(self) -> None:
        prefillers, ranks = self._instances.prefillers, self._instances.ranks
        self._prefillers += [(True, False)] * (len(prefillers) - len(self._prefillers))
        self._ranks += [True] * (len(ranks) - len(self._ranks))

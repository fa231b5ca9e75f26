"""What a choice of a model is made from, and what makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from balanceroute.proxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Targets:
    """The latency that an answer must keep; an answer that does not is worth nothing.

    Attributes:
        tpot_ms: Time per output token; None if it does not matter.
        ttft_ms: Time to the first token; None if it does not matter.

    Raises:
        ConfigError: There is no target, or one is not positive.
    """

    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.tpot_ms, self.ttft_ms) if one is not None]
        if not given or min(given) <= 0:
            raise ConfigError("a time per output token or to the first one must be above 0 ms")

    def share_used(self, tpot_ms: float, ttft_ms: float) -> float:
        """Return which share of the tighter target a latency takes; at most 1 if both are kept."""
        used = 0.0 if self.tpot_ms is None else tpot_ms / self.tpot_ms
        return used if self.ttft_ms is None else max(used, ttft_ms / self.ttft_ms)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request would meet in a group of engines if it were sent there now.

    Attributes:
        target_share: Of the targets, what its predicted latency takes; at most 1 if they are kept.
        healthy: Whether the group has engines that take requests.
    """

    target_share: float
    healthy: bool = True


class ModelChoice(Protocol):
    """Chooses among the groups of an alias."""

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[Outlook]) -> int:
        """Return the group that is to answer.

        Args:
            task: Which of the alias's tasks the request is, from 0.
            rate_per_s: Requests that name the alias, a second, of late.
            outlooks: One for each group, from the smallest model to the largest; at least one of
                them is healthy.

        Returns:
            A healthy group's place in `outlooks`.
        """
        ...

"""The settings of prefill choices by a score."""

from dataclasses import dataclass

from balanceroute.proxy.core.prefill import ScoreLimits
from balanceroute.proxy.live.settings.setting import integer, number


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Which prefillers are scored at all; see `ScoreLimits`."""

    prefill_waiting_limit: int | None = integer(
        None,
        "with a --prefill-choice by score, requests that may wait on a prefiller",
        0,
        10**6,
        word="none",
    )
    prefill_running_limit: int | None = integer(
        None, "likewise, requests that may run on it", 0, 10**6, word="none"
    )
    prefill_share_limit: float | None = number(
        None,
        "likewise, its share of the requests between two scrapes",
        0.01,
        1,
        shown_default="no limit",
        word="none",
    )

    @property
    def limits(self) -> ScoreLimits:
        """The limits as a choice takes them."""
        return ScoreLimits(
            self.prefill_waiting_limit, self.prefill_running_limit, self.prefill_share_limit
        )

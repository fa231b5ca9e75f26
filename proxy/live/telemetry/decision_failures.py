"""Failures of the proxy's own decisions: counted, logged, and part of the readiness.

An exception out of a policy, a predictor, a timer, a probe or a request's own handling never ends
service. It is reported here.
"""

import logging
from collections.abc import Callable
from typing import Protocol

PERSISTENT_S = 10.0
"""For so long rounds of decisions must fail, with none that succeeds, to make the proxy unready."""

_LOG_INTERVAL_S = 60.0
# What the scheduler reports.
_OF_ROUNDS = ("policy", "projection")
_log = logging.getLogger(__name__)


class FailureCounts(Protocol):
    """Counts failures."""

    def failed(self, what: str) -> None:
        """Count one."""


class DecisionFailures:
    """Takes note of failures.

    Attributes:
        rounds_failed: How often a policy or a projection failed.
    """

    def __init__(self, metrics: "FailureCounts", clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._logged_s: dict[str, float] = {}
        # Since when every round failed, and the last of them that did.
        self._failing_since_s: float | None = None
        self._failed_s = 0.0
        self.rounds_failed = 0

    def report(self, what: str, error: Exception, **fields: object) -> None:
        """Count a failure, and log it unless one of the same kind was logged within a minute.

        Args:
            what: What failed, in a word of a few: the metric's label.
            error: How.
            fields: For the log.
        """
        self._metrics.failed(what)
        self.rounds_failed += what in _OF_ROUNDS
        now_s = self._clock()
        logged_s = self._logged_s.get(what)
        if logged_s is not None and now_s - logged_s < _LOG_INTERVAL_S:
            return
        self._logged_s[what] = now_s
        _log.error(
            "a decision failed; service goes on",
            exc_info=error,
            extra={"fields": {"what": what, **fields}},
        )

    def round_ended(self, *, well: bool) -> None:
        """Note how a round of decisions ended that had something to decide."""
        if well:
            self._failing_since_s = None
            return
        self._failed_s = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = self._failed_s

    @property
    def failing(self) -> bool:
        """Whether the last round failed."""
        return self._failing_since_s is not None

    @property
    def persist(self) -> bool:
        """Whether rounds have failed for `PERSISTENT_S` and go on doing so.

        A proxy that is asked nothing cannot fail: without rounds it counts as well again after
        another `PERSISTENT_S`, so that it is tried.
        """
        since_s = self._failing_since_s
        if since_s is None or self._clock() - self._failed_s >= PERSISTENT_S:
            return False
        return self._failed_s - since_s >= PERSISTENT_S

"""Metrics of the proxy's own decisions: their cost, their failures, and how late the loop is."""

from balanceroute.proxy.live.telemetry.registry import (
    MAX_REASONS,
    OTHER,
    WORK_BOUNDS_S,
    CappedLabel,
    Histogram,
    Registry,
)

MAX_STAGES = 8


class DecisionMetrics:
    """Counts decisions."""

    def __init__(self, registry: Registry) -> None:
        self._stages = registry.histograms(
            "dispatch_duration_seconds",
            "Time of one dispatch decision, by stage.",
            WORK_BOUNDS_S,
            "stage",
        )
        self._stage_label = CappedLabel(MAX_STAGES)
        self._known: dict[str, Histogram] = {}  # By stage, unless labelled `other`.
        self._reason_label = CappedLabel(MAX_REASONS)
        self._failures = registry.counter(
            "decision_failures",
            "Exceptions in the proxy's own decisions, which others took the place of.",
            "what",
        )
        self._loop_lag = registry.histogram(
            "loop_lag_seconds", "Lateness of a timer of the event loop.", WORK_BOUNDS_S
        )

    def dispatched(self, stage: str, seconds: float) -> None:
        """Count one dispatch decision and the time it took."""
        histogram = self._known.get(stage)
        if histogram is None:
            label = self._stage_label.of(stage)
            histogram = self._stages.of(label)
            if label != OTHER:
                self._known[stage] = histogram
        histogram.observe(seconds)

    def failed(self, what: str) -> None:
        """Count one exception in a decision of the proxy's own."""
        self._failures.labels(self._reason_label.of(what)).inc()

    def loop_lag(self, seconds: float) -> None:
        """Count how late a timer of the event loop fired."""
        self._loop_lag.observe(seconds)

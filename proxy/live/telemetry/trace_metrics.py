"""Metrics of traces: how many reached the collector."""

from balanceroute.proxy.live.telemetry.registry import Registry

DROPS = ("queue_full", "refused", "unreachable", "closed")


class TraceMetrics:
    """Counts the traces of requests, each of which has several spans."""

    def __init__(self, registry: Registry) -> None:
        self._exported = registry.counter(
            "traces_exported", "Traces of requests that the collector took."
        )
        self._dropped = registry.counter(
            "traces_dropped",
            "Traces of requests that were dropped, for the reason given.",
            "reason",
        )
        for reason in DROPS:
            self._dropped.labels(reason)

    def exported(self, count: int) -> None:
        """Count traces that the collector took."""
        self._exported.inc(count)

    def dropped(self, count: int, reason: str) -> None:
        """Count traces that were dropped."""
        self._dropped.labels(reason).inc(count)

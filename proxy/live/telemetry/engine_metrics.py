"""Metrics of engines: failed scrapes, quarantines, late pulls, lost KV cache events."""

from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.registry import Registry


class EngineMetrics:
    """Counts what happens to engines."""

    def __init__(self, registry: Registry) -> None:
        self._scrape_failures = registry.counter(
            "scrape_failures", "Scrapes of an engine's /metrics that failed.", "role"
        )
        self._late_pulls = registry.counter(
            "late_pulls",
            "KV caches that a prefiller was notified of when it kept them no longer: aborted, or pulled "
            "after their lease, when such an answer may be wrong. vLLM's NIXL connector tells.",
        )
        self._quarantines = registry.counter(
            "quarantines", "Times an engine was quarantined.", "role"
        )
        self._kv_events_lost = registry.counter(
            "kv_events_lost",
            "Times that what a prefiller's KV cache events told was dropped, for the reason given.",
            "reason",
        )
        for role in Role:  # An alert finds no data in a sample that is absent.
            self._quarantines.labels(role.value)
            self._scrape_failures.labels(role.value)

    def scrape_failed(self, role: Role) -> None:
        """Count one failed scrape of an engine's metrics."""
        self._scrape_failures.labels(role.value).inc()

    def pulled_late(self, count: int) -> None:
        """Count KV caches that were pulled after their lease."""
        self._late_pulls.inc(count)

    def kv_events_lost(self, reason: str) -> None:
        """Count one index of a prefiller's blocks that was emptied."""
        self._kv_events_lost.labels(reason).inc()

    def quarantined(self, role: Role) -> None:
        """Count one engine sent to quarantine."""
        self._quarantines.labels(role.value).inc()

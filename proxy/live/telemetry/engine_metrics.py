"""Metrics of engines: failed legs and scrapes, quarantines, late pulls, lost KV cache events."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.registry import MAX_ENGINES, CappedLabel, Registry

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.engines.instances import Target


class EngineMetrics:
    """Counts what happens to engines. Labels `role` and `url` name one."""

    def __init__(self, registry: Registry) -> None:
        self._url_labels = {role: CappedLabel(MAX_ENGINES) for role in Role}
        self._leg_failures = registry.counter(
            "leg_failures",
            "Legs that failed by an engine's fault, which is the reason.",
            *("role", "url", "reason"),
        )
        self._scrape_failures = registry.counter(
            "scrape_failures", "Scrapes of an engine's /metrics that failed.", "role", "url"
        )
        self._late_pulls = registry.counter(
            "late_pulls",
            "KV caches that a prefiller was notified of when it kept them no longer: aborted, or pulled "
            "after their lease, when such an answer may be wrong. vLLM's NIXL connector tells.",
        )
        self._without_kv = registry.counter(
            "prefills_without_kv",
            "Prompts that a prefiller computed and left no KV cache of, so that they are computed again.",
            *("prefiller", "reason"),
        )
        self._quarantines = registry.counter(
            "quarantines", "Times an engine was quarantined.", "role", "url"
        )
        self._kv_events_lost = registry.counter(
            "kv_events_lost",
            "Times that what a prefiller's KV cache events told was dropped, for the reason given.",
            "reason",
        )

    def added(self, target: "Target") -> None:
        """Begin at zero for an engine: an alert finds no data in a sample that is absent."""
        self._quarantines.labels(*self._labels(target))
        self._scrape_failures.labels(*self._labels(target))
        if target.role is Role.PREFILL:
            self._without_kv.labels(self._labels(target)[1], "absent")

    def leg_failed(self, target: "Target", fault: "Fault") -> None:
        """Count one leg that failed by its engine's fault."""
        self._leg_failures.labels(*self._labels(target), fault.value).inc()

    def scrape_failed(self, target: "Target") -> None:
        """Count one failed scrape of an engine's metrics."""
        self._scrape_failures.labels(*self._labels(target)).inc()

    def left_no_kv(self, target: "Target", kind: str) -> None:
        """Count one prefill that left no KV cache which a rank could pull."""
        self._without_kv.labels(self._labels(target)[1], kind).inc()

    def pulled_late(self, count: int) -> None:
        """Count KV caches that were pulled after their lease."""
        self._late_pulls.inc(count)

    def kv_events_lost(self, reason: str) -> None:
        """Count one index of a prefiller's blocks that was emptied."""
        self._kv_events_lost.labels(reason).inc()

    def quarantined(self, target: "Target") -> None:
        """Count one engine sent to quarantine."""
        self._quarantines.labels(*self._labels(target)).inc()

    def _labels(self, target: "Target") -> tuple[str, str]:
        return target.role.value, self._url_labels[target.role].of(target.url)

"""Metrics of legs: what was sent again, and KV caches that were not pulled."""

from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.telemetry.record import Leg
from balanceroute.proxy.live.telemetry.registry import (
    MAX_REASONS,
    TOKEN_GAP_BOUNDS_S,
    CappedLabel,
    Registry,
)


class LegMetrics:
    """Counts what happens to the legs of requests.

    Attributes:
        suspected_poison: Prompts under which engines died, and that are refused.
        gaps: Those between two chunks of a stream, in seconds.
        observe_itl: Counts one gap between two chunks of a stream, in seconds. Called for every
            chunk: it is the histogram's own method, with nothing in between.
    """

    def __init__(self, registry: Registry) -> None:
        self._leg_label = CappedLabel(MAX_REASONS)
        self._reason_label = CappedLabel(MAX_REASONS)
        self._retries = registry.counter(
            "retries", "Legs of a request sent again.", "leg", "reason"
        )
        self._abandoned_leases = registry.counter(
            "abandoned_leases", "KV leases given up before any rank pulled them.", "reason"
        )
        self._kv_transfer_failures = registry.counter(
            "kv_transfer_failures",
            "Decode legs that failed where the rank was to pull a KV cache.",
            "prefiller",
            "rank",
            "reason",
        )
        self.suspected_poison = registry.counter(
            "suspected_poison", "Prompts refused for a while because two engines died under each."
        )
        self.gaps = registry.histogram(
            "inter_token_latency_seconds",
            "Gap between two chunks of a stream.",
            TOKEN_GAP_BOUNDS_S,
        )
        self.observe_itl = self.gaps.observe
        # An alert finds no data in a sample that is absent.
        for leg in (*(leg.value for leg in Leg), "single_engine"):
            for fault in Fault:
                self._retries.labels(self._leg_label.of(leg), self._reason_label.of(fault.value))

    def retry(self, leg: str, reason: str) -> None:
        """Count one leg sent again."""
        self._retries.labels(self._leg_label.of(leg), self._reason_label.of(reason)).inc()

    def abandoned_lease(self, reason: str) -> None:
        """Count one KV lease given up before any rank pulled it."""
        self._abandoned_leases.labels(self._reason_label.of(reason)).inc()

    def kv_transfer_failed(self, prefiller: str, rank: str, reason: str) -> None:
        """Count one decode leg that failed where the rank was to pull a KV cache."""
        self._kv_transfer_failures.labels(prefiller, rank, reason).inc()

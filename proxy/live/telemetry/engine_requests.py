"""Metrics of requests by the engines that had them: which engine's requests end badly."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.registry import MAX_ENGINES, CappedLabel

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

# Up to Python 3.11 each look at a member of an enumeration is a call.
_PREFILL, _DECODE = Role.PREFILL, Role.DECODE


class EngineRequests(Collector):
    """Counts a request for the last prefiller and for the last rank that had it."""

    def __init__(self) -> None:
        self._prefiller_label, self._rank_label = CappedLabel(MAX_ENGINES), CappedLabel(MAX_ENGINES)
        self._ended: Counter[tuple[Role, str, Outcome]] = Counter()

    def ended(self, record: "RequestRecord") -> None:
        """Count a request whose outcome is set."""
        assert record.outcome is not None
        if record.prefiller:
            self._ended[_PREFILL, self._prefiller_label.of(record.prefiller), record.outcome] += 1
        if record.rank:
            self._ended[_DECODE, self._rank_label.of(record.rank), record.outcome] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the counts."""
        family = CounterMetricFamily(
            "balanceroute_engine_requests",
            "Requests ended, by the last prefiller and by the last rank that had them, and how.",
            labels=("role", "name", "outcome"),
        )
        for (role, name, outcome), count in self._ended.items():
            family.add_metric((role.value, name, outcome.value), count)
        yield family

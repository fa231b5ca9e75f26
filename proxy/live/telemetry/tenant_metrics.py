"""Metrics of tenants: what became of their requests, how long they waited, and their tokens.

The label `tenant` has the names of the file of tenants alone.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.telemetry.registry import (
    NS_PER_S,
    OTHER,
    REQUEST_BOUNDS_S,
    Histograms,
    Totals,
)

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord


class TenantMetrics(Collector):
    """Counts the requests that have a tenant when they have ended.

    Attributes:
        names: Those that are labels; a tenant that is gone is `other`.
    """

    def __init__(self) -> None:
        self.names: Collection[str] = ()
        self._requests = Totals(
            "balanceroute_tenant_requests",
            "Requests of a tenant ended or refused, by how.",
            *("tenant", "outcome"),
        )
        self._refusals = Totals(
            "balanceroute_tenant_refusals",
            "Requests of a tenant that admission refused, by what for.",
            *("tenant", "reason"),
        )
        self._prompt_tokens = Totals(
            "balanceroute_tenant_prompt_tokens", "Prompt tokens of a tenant.", "tenant"
        )
        self._output_tokens = Totals(
            "balanceroute_tenant_output_tokens", "Tokens that reached a tenant.", "tenant"
        )
        self._queue = Histograms(
            "balanceroute_tenant_queue_time_seconds",
            "Arrival of a tenant's request to the first engine.",
            REQUEST_BOUNDS_S,
            "tenant",
        )

    def ended(self, record: "RequestRecord") -> None:
        """Count a request whose outcome is set."""
        assert record.outcome is not None
        tenant = record.tenant if record.tenant in self.names else OTHER
        self._requests.add(1, tenant, record.outcome.value)
        self._prompt_tokens.add(record.prompt_tokens, tenant)
        self._output_tokens.add(record.output_tokens, tenant)
        if record.refused_for:
            self._refusals.add(1, tenant, record.refused_for)
        if record.begun_ns is not None:
            self._queue.of(tenant).observe((record.begun_ns - record.arrived_ns) / NS_PER_S)

    def collect(self) -> Iterator[Metric]:
        """Yield everything; nothing where no tenant had a request."""
        if not self._requests.by_values:
            return
        yield self._requests.family()
        yield self._refusals.family()
        yield self._prompt_tokens.family()
        yield self._output_tokens.family()
        yield self._queue.family()

"""Metrics of tenants: what became of their requests, how long they waited, and their tokens.

The label `tenant` has the names of the file of tenants alone.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.telemetry.registry import (
    NS_PER_S,
    OTHER,
    REQUEST_BOUNDS_S,
    Histograms,
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
        self._requests: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()
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
        self._requests[tenant, record.outcome.value] += 1
        self._prompt_tokens[tenant] += record.prompt_tokens
        self._output_tokens[tenant] += record.output_tokens
        if record.refused_for:
            self._refusals[tenant, record.refused_for] += 1
        if record.begun_ns is not None:
            self._queue.of(tenant).observe((record.begun_ns - record.arrived_ns) / NS_PER_S)

    def collect(self) -> Iterator[Metric]:
        """Yield everything; nothing where no tenant had a request."""
        if not self._requests:
            return
        requests = _counter("requests", "Requests of a tenant ended or refused, by how.")
        for (tenant, outcome), count in self._requests.items():
            _add(requests, count, tenant=tenant, outcome=outcome)
        refusals = _counter("refusals", "Requests of a tenant that admission refused, by what for.")
        for (tenant, reason), count in self._refusals.items():
            _add(refusals, count, tenant=tenant, reason=reason)
        prompts = _counter("prompt_tokens", "Prompt tokens of a tenant.")
        for tenant, tokens in self._prompt_tokens.items():
            _add(prompts, tokens, tenant=tenant)
        outputs = _counter("output_tokens", "Tokens that reached a tenant.")
        for tenant, tokens in self._output_tokens.items():
            _add(outputs, tokens, tenant=tenant)
        yield from (requests, refusals, prompts, outputs)
        yield self._queue.family()


def _counter(name: str, documentation: str) -> Metric:
    return Metric(f"balanceroute_tenant_{name}", documentation, "counter")


def _add(family: Metric, value: float, **labels: str) -> None:
    family.add_sample(f"{family.name}_total", labels, value)

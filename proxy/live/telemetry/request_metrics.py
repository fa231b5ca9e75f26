"""Metrics of requests: how many ended how, how long they took, and what they were."""

from operator import attrgetter
from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.routes import ROUTES
from balanceroute.proxy.live.telemetry.alias_metrics import AliasMetrics
from balanceroute.proxy.live.telemetry.engine_requests import EngineRequests
from balanceroute.proxy.live.telemetry.group_metrics import GroupMetrics
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.registry import (
    NS_PER_S,
    OTHER,
    RATIO_BOUNDS,
    REQUEST_BOUNDS_S,
    TOKEN_GAP_BOUNDS_S,
    TOKENS_BOUNDS,
    CappedLabel,
    Histogram,
    Registry,
)
from balanceroute.proxy.live.telemetry.tenant_metrics import TenantMetrics

if TYPE_CHECKING:
    from prometheus_client import Counter

ENDPOINTS = frozenset(route.path for route in ROUTES if not route.reason)
"""The values of the label `endpoint`, besides `other`."""

MAX_MODELS = 32
MAX_STATUSES = 32
# Up to Python 3.11 each look at a member of an enumeration is a call.
_OK = Outcome.OK


class _Latencies:
    """What clients feel, by model."""

    def __init__(self, registry: Registry) -> None:
        self.ttft = registry.histograms(
            "time_to_first_token_seconds", "Arrival to the first token.", REQUEST_BOUNDS_S, "model"
        )
        self._second = registry.histograms(
            "time_to_second_token_seconds",
            "Arrival to the second token of a stream: with `--first-token prefill` it waits for a rank.",
            REQUEST_BOUNDS_S,
            "model",
        )
        self._expectation = registry.histogram(
            "time_to_first_token_expectation_ratio",
            "Time to first token over what `--admission early` expected.",
            RATIO_BOUNDS,
        )
        self._tpot = registry.histograms(
            "request_time_per_output_token_seconds",
            "Mean gap after the first token, requests that ended well.",
            TOKEN_GAP_BOUNDS_S,
            "model",
        )
        self._e2e = registry.histograms(
            "e2e_request_latency_seconds",
            "Arrival to the end, requests that ended well.",
            REQUEST_BOUNDS_S,
            "model",
        )

    def observe(self, record: RequestRecord, model: str) -> None:
        """Count a request's latencies for the label of its model."""
        arrived_ns, first_ns, ended_ns = record.arrived_ns, record.first_token_ns, record.ended_ns
        ended_well = record.outcome is _OK
        if ended_well:
            self._e2e.of(model).observe((ended_ns - arrived_ns) / NS_PER_S)
        if first_ns is None:
            return
        self.ttft.of(model).observe((first_ns - arrived_ns) / NS_PER_S)
        if record.second_token_ns is not None:
            self._second.of(model).observe((record.second_token_ns - arrived_ns) / NS_PER_S)
        # The expectation is that of a rank's first token.
        if record.expected_ttft_ns and not record.early_first_token:
            self._expectation.observe((first_ns - arrived_ns) / record.expected_ttft_ns)
        # The choices of a request are decoded side by side.
        gaps = record.output_tokens / record.choices - 1
        if ended_well and gaps > 0:
            self._tpot.of(model).observe((ended_ns - first_ns) / NS_PER_S / gaps)


# Fields of a record of which metrics tell the sum.
_SUMMED = (
    ("cached_tokens", "prompt_tokens_cached", "Prompt tokens that the prefiller had cached."),
    (
        "local_prefill",
        "local_prefills",
        "Requests whose prompt a rank was to compute instead of a prefiller.",
    ),
    ("recomputes", "recomputes", "Times a rank gave a request back to be prefilled again."),
    ("resumes", "resumes", "Failed streams that another rank continued."),
    ("early_first_token", "early_first_tokens", "Streams whose first token a prefiller said."),
    (
        "first_token_differences",
        "first_token_differences",
        "Times a rank said something else than the prefiller's first token.",
    ),
    ("lease_lapses", "lease_lapses", "Prefills repeated because the KV lease ran out."),
)
_SUMMED_OF = attrgetter(*(field for field, _, _ in _SUMMED))


class RequestMetrics:
    """Counts requests when they have ended."""

    def __init__(
        self,
        registry: Registry,
        *,
        tenants: TenantMetrics,
        groups: GroupMetrics,
        aliases: AliasMetrics,
    ) -> None:
        self._tenants, self._groups, self._aliases = tenants, groups, aliases
        self._model_label, self._status_label = CappedLabel(MAX_MODELS), CappedLabel(MAX_STATUSES)
        self._requests = registry.counter(
            "requests",
            "Requests ended or refused, by how; status 0 if no answer was begun.",
            *("endpoint", "model", "outcome", "status"),
        )
        # By what a record has, unless labelled `other`: the library's look-up costs a lock and more.
        self._known: dict[tuple[str, str, Outcome, int], Counter] = {}
        self._retried = registry.counter(
            "retried_requests", "Requests with at least one leg sent again."
        )
        self._sums = [registry.counter(name, text) for _, name, text in _SUMMED]
        self._latencies, self._engines = _Latencies(registry), EngineRequests()
        registry.collect_from(self._engines)
        self._queue = registry.histogram(
            "request_queue_time_seconds", "Arrival to the first prefill.", REQUEST_BOUNDS_S
        )
        self._prefill = registry.histogram(
            "request_prefill_time_seconds", "Prefill request to its answer.", REQUEST_BOUNDS_S
        )
        self._pool = registry.histogram(
            "request_pool_time_seconds", "Time prefilled and unbound.", REQUEST_BOUNDS_S
        )
        self._transfer = registry.histogram(
            "request_transfer_time_seconds",
            "Binding to a rank to the first token: KV transfer and first step, streams alone.",
            REQUEST_BOUNDS_S,
        )
        self._single = registry.histogram(
            "single_engine_request_duration_seconds",
            "Arrival to the end of requests that one engine answers alone, however they ended.",
            REQUEST_BOUNDS_S,
        )
        self._prompt_tokens = registry.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKENS_BOUNDS
        )
        self._output_tokens = registry.histogram(
            "request_output_tokens", "Tokens that reached the client.", TOKENS_BOUNDS
        )

    def latencies(self) -> dict[str, Histogram]:
        """Return the histograms that show where time goes, by stage."""
        return {
            "ttft": self._latencies.ttft.total(),
            "queue": self._queue,
            "prefill": self._prefill,
            "pool": self._pool,
            "transfer": self._transfer,
        }

    def passed_through(self, record: RequestRecord) -> None:
        """Count a request that one engine answered alone, which no histogram of generation takes."""
        self._count(record)
        self._single.observe((record.ended_ns - record.arrived_ns) / NS_PER_S)

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        Its retries are not counted from here but one by one, as `LegMetrics.retry` reports them.

        Args:
            record: The request, with its outcome set.
        """
        self._count(record)
        self._latencies.observe(record, self._model(record))
        if record.prefill_started_ns is not None:
            self._queue.observe((record.prefill_started_ns - record.arrived_ns) / NS_PER_S)
            if record.prefilled_ns is not None:
                self._prefill.observe((record.prefilled_ns - record.prefill_started_ns) / NS_PER_S)
        if record.prefilled_ns is not None:
            self._pool.observe(record.pool_wait_ns / NS_PER_S)
        transfer_ns = record.transfer_ns
        if transfer_ns is not None:
            self._transfer.observe(transfer_ns / NS_PER_S)
        if record.prompt_tokens:
            self._prompt_tokens.observe(record.prompt_tokens)
            self._output_tokens.observe(record.output_tokens)
        if record.retries:
            self._retried.inc()
        counts = _SUMMED_OF(record)
        if any(counts):  # Mostly nothing, and a counter takes a lock.
            for count, counter in zip(counts, self._sums, strict=True):
                if count:
                    counter.inc(count)

    def _count(self, record: RequestRecord) -> None:
        outcome = record.outcome
        assert outcome is not None
        key = (record.endpoint, record.model, outcome, record.status)
        counter = self._known.get(key)
        if counter is None:
            counter = self._counter(key, self._model(record))
        counter.inc()
        self._engines.ended(record)
        if record.tenant:
            self._tenants.ended(record)
        if record.group:
            self._groups.ended(record)
        if record.alias:
            self._aliases.ended(record)

    def _model(self, record: RequestRecord) -> str:
        # A client can invent model names without end, but not make an engine answer for one.
        return self._model_label.of(record.model, learn=record.outcome is _OK)

    def _counter(self, key: tuple[str, str, Outcome, int], model: str) -> "Counter":
        endpoint, _, outcome, status = key
        labels = (
            endpoint if endpoint in ENDPOINTS else OTHER,
            model,
            outcome.value,
            self._status_label.of(str(status)),
        )
        counter = self._requests.labels(*labels)
        if OTHER not in labels:
            self._known[key] = counter
        return counter

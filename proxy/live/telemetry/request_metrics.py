"""Metrics of requests: how many ended how, how long they took, and what they were."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.openai.routes import ROUTES
from balanceroute.proxy.live.telemetry.component_metrics import EngineRequests
from balanceroute.proxy.live.telemetry.record import OK, Leg, Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.registry import (
    MAX_REASONS,
    MAX_TENANTS,
    NS_PER_S,
    OTHER,
    RATIO_BOUNDS,
    REQUEST_BOUNDS_S,
    TOKEN_GAP_BOUNDS_S,
    TOKENS_BOUNDS,
    CappedLabel,
    Histogram,
    Histograms,
    Registry,
    Totals,
)

_NS_PER_MS = 1e6

# Of requests that have ended, by a name that clients do not make. Nothing is exported before the first.


class _Ended(Collector):
    def __init__(self, *families: Totals | Histograms) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield everything, once there is anything."""
        if self._families[0].by_values:
            for one in self._families:
                yield one.family()


def _gap_ns(record: RequestRecord) -> float | None:
    """Return the mean gap after the first token; None if there is none."""
    assert record.first_token_ns is not None
    # The choices of a request are decoded side by side.
    gaps = record.output_tokens / record.choices - 1
    return (record.ended_ns - record.first_token_ns) / gaps if gaps > 0 else None


@dataclass(slots=True)
class Counts:
    """The outcomes of requests since the start, for the admin page."""

    outcomes: dict[str, int]  # How many ended how.
    output_tokens: int  # Tokens that reached clients, of those that ended.


class GroupMetrics(_Ended):
    """The outcomes of the requests of each of several groups."""

    def __init__(self) -> None:
        self._requests = Totals(
            "group_requests",
            "Requests ended or refused, by the group that had them last.",
            *("group", "outcome"),
        )
        self._output_tokens = Totals(
            "group_output_tokens", "Tokens that reached clients, by group.", "group"
        )
        self._ttft = Histograms(
            "group_time_to_first_token_seconds",
            "Arrival to the first token, by the group that answered.",
            *(REQUEST_BOUNDS_S, "group"),
        )
        self._tpot = Histograms(
            "group_time_per_output_token_seconds",
            "Mean gap after the first token, requests that ended well, by the group that answered.",
            *(TOKEN_GAP_BOUNDS_S, "group"),
        )
        super().__init__(self._requests, self._output_tokens, self._ttft, self._tpot)

    def counts(self, group: str) -> Counts:
        outcomes = {
            outcome: int(count)
            for (name, outcome), count in self._requests.by_values.items()
            if name == group
        }
        return Counts(outcomes, int(self._output_tokens.by_values.get((group,), 0)))

    def ended(self, record: RequestRecord) -> None:
        assert record.outcome is not None
        group = record.group
        self._requests.add(1, group, record.outcome.value)
        self._output_tokens.add(record.output_tokens, group)
        if record.first_token_ns is None:
            return
        self._ttft.of(group).observe((record.first_token_ns - record.arrived_ns) / NS_PER_S)
        if record.outcome is OK and (gap_ns := _gap_ns(record)) is not None:
            self._tpot.of(group).observe(gap_ns / NS_PER_S)


class TenantMetrics(_Ended):
    """The outcomes of the requests of each tenant, how long they waited, and their tokens.

    Attributes:
        names: Those of the file of tenants, of which the first that come are labels; the rest are `other`.
    """

    def __init__(self) -> None:
        self.names: Collection[str] = ()
        self._label = CappedLabel(MAX_TENANTS)
        self._requests = Totals(
            "tenant_requests", "Requests of a tenant ended or refused, by how.", "tenant", "outcome"
        )
        self._refusals = Totals(
            "tenant_refusals",
            "Requests of a tenant that admission refused, by what for.",
            *("tenant", "reason"),
        )
        self._prompt_tokens = Totals("tenant_prompt_tokens", "Prompt tokens of a tenant.", "tenant")
        self._output_tokens = Totals(
            "tenant_output_tokens", "Tokens that reached a tenant.", "tenant"
        )
        self._queue = Histograms(
            "tenant_queue_time_seconds",
            "Arrival of a tenant's request to the first engine.",
            *(REQUEST_BOUNDS_S, "tenant"),
        )
        self._ttft = Histograms(
            "tenant_time_to_first_token_seconds",
            "Arrival of a tenant's request to its first token.",
            *(REQUEST_BOUNDS_S, "tenant"),
        )
        counts = (self._requests, self._refusals, self._prompt_tokens, self._output_tokens)
        super().__init__(*counts, self._queue, self._ttft)

    def counts(self) -> dict[str, Counts]:
        counts: dict[str, Counts] = {}
        for (name, outcome), count in self._requests.by_values.items():
            of_one = counts.get(name)
            if of_one is None:
                tokens = self._output_tokens.by_values.get((name,), 0)
                of_one = counts[name] = Counts({}, int(tokens))
            of_one.outcomes[outcome] = int(count)
        return counts

    def ended(self, record: RequestRecord) -> None:
        assert record.outcome is not None
        tenant = self._label.of(record.tenant) if record.tenant in self.names else OTHER
        self._requests.add(1, tenant, record.outcome.value)
        self._prompt_tokens.add(record.prompt_tokens, tenant)
        self._output_tokens.add(record.output_tokens, tenant)
        if record.refused_for:
            self._refusals.add(1, tenant, record.refused_for)
        if record.begun_ns is not None:
            self._queue.of(tenant).observe((record.begun_ns - record.arrived_ns) / NS_PER_S)
        if record.first_token_ns is not None:
            self._ttft.of(tenant).observe((record.first_token_ns - record.arrived_ns) / NS_PER_S)


@dataclass(frozen=True, slots=True)
class AliasWorth:
    """The worth of answers to an alias."""

    tpot_ms: float | None  # Target of the time per output token; None if there is none.
    ttft_ms: float | None  # Target of the time to the first token; None if there is none.
    # The worth of an answer in time, by task and group; empty if it is not set.
    scores: Mapping[tuple[str, str], float]

    def is_kept(self, record: RequestRecord) -> bool:
        if record.outcome is not OK or record.first_token_ns is None:
            return False
        ttft_ms = (record.first_token_ns - record.arrived_ns) / _NS_PER_MS
        tpot_ms = (_gap_ns(record) or 0.0) / _NS_PER_MS
        in_time = self.ttft_ms is None or ttft_ms <= self.ttft_ms
        return in_time and (self.tpot_ms is None or tpot_ms <= self.tpot_ms)


class AliasMetrics(_Ended):
    """The groups that answered requests which named an alias, whether in time, and what that was worth."""

    def __init__(self) -> None:
        self.worth: Mapping[str, AliasWorth] = {}  # What answers are worth, by alias.
        self._requests = Totals(
            "alias_requests",
            "Requests that named an alias, by who answered, and whether in time.",
            *("alias", "task", "group", "in_time"),
        )
        self._scores = Totals(
            "alias_scores",
            "Worth of the answers to an alias, 0 if not in time.",
            *("alias", "task"),
        )
        self._fall_backs = Totals(
            "alias_fall_backs",
            "Times a request went on from a group, and why.",
            *("alias", "group", "reason"),
        )
        super().__init__(self._requests, self._scores, self._fall_backs)

    def answers(self, alias: str) -> dict[str, tuple[int, int]]:
        """Return how many requests each group answered for an alias, and how many of them in time."""
        answers: dict[str, tuple[int, int]] = {}
        for (name, _, group, in_time), count in self._requests.by_values.items():
            if name == alias:
                all_of, kept = answers.get(group, (0, 0))
                answers[group] = all_of + int(count), kept + int(count) * (in_time == "yes")
        return answers

    def ended(self, record: RequestRecord) -> None:
        alias, worth = record.alias, self.worth[record.alias]
        kept = worth.is_kept(record)
        self._requests.add(1, alias, record.task, record.group, "yes" if kept else "no")
        if worth.scores:
            score = worth.scores.get((record.task, record.group), 0.0) if kept else 0.0
            self._scores.add(score, alias, record.task)
        for group, reason in record.fall_backs:
            self._fall_backs.add(1, alias, group, reason)


ENDPOINTS = frozenset(route.path for route in ROUTES if not route.reason)
"""The values of the label `endpoint`, besides `other`."""

MAX_MODELS = 32
MAX_STATUSES = 32


class _Latencies:
    """Latencies that clients see, by model."""

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
        arrived_ns, first_ns = record.arrived_ns, record.first_token_ns
        ended_well = record.outcome is OK
        if ended_well:
            self._e2e.of(model).observe((record.ended_ns - arrived_ns) / NS_PER_S)
        if first_ns is None:
            return
        self.ttft.of(model).observe((first_ns - arrived_ns) / NS_PER_S)
        if record.second_token_ns is not None:
            self._second.of(model).observe((record.second_token_ns - arrived_ns) / NS_PER_S)
        # The expectation is that of a rank's first token.
        if record.expected_ttft_ns and not record.early_first_token:
            self._expectation.observe((first_ns - arrived_ns) / record.expected_ttft_ns)
        if ended_well and (gap_ns := _gap_ns(record)) is not None:
            self._tpot.of(model).observe(gap_ns / NS_PER_S)


# Fields of a record that metrics sum up.
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
        registry.register(self._engines)
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

    def counts(self) -> Counts:
        outcomes: dict[str, int] = {}
        for family in self._requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    outcome = sample.labels["outcome"]
                    outcomes[outcome] = outcomes.get(outcome, 0) + int(sample.value)
        return Counts(outcomes, int(self._output_tokens.counted()[1]))

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
        return self._model_label.of(record.model, learn=record.outcome is OK)

    def _counter(self, key: tuple[str, str, Outcome, int], model: str) -> Counter:
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
        self._retries.labels(self._leg_label.of(leg), self._reason_label.of(reason)).inc()

    def abandoned_lease(self, reason: str) -> None:
        self._abandoned_leases.labels(self._reason_label.of(reason)).inc()

    def kv_transfer_failed(self, prefiller: str, rank: str, reason: str) -> None:
        self._kv_transfer_failures.labels(prefiller, rank, reason).inc()

"""What the proxy tells Prometheus.

Rules:
- Names begin with `balanceroute_` and end with their unit. Where vLLM has a metric of the same
  meaning the rest of the name is vLLM's, so that a dashboard can show both.
- A label takes few values, whatever clients send: endpoints come from a list, a model counts under
  its own name only once an engine has answered for it, and every other label is capped. What is
  left over is `other`.
- What is a state (loads, queues) is read from a snapshot when Prometheus asks; what is an event is
  pushed by the driver when it happens.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.openai.routes import ROUTES
from balanceroute.proxy.live.telemetry import exposition
from balanceroute.proxy.live.telemetry.histogram import Histogram
from balanceroute.proxy.live.telemetry.metrics_of_state import StateCollector
from balanceroute.proxy.live.telemetry.record import Leg, Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.snapshot import Snapshot

CONTENT_TYPE = exposition.CONTENT_TYPE
"""The `content-type` of the page."""

ENDPOINTS = frozenset(route.path for route in ROUTES if not route.reason)
"""The values of the label `endpoint`, besides `other`."""

OTHER = "other"
"""The label value of all that has none of its own."""

MAX_MODELS = 32
MAX_STAGES = 8
MAX_REASONS = 32
MAX_STATUSES = 32

_NS_PER_S = 1e9
_REQUEST_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
_TOKEN_GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_WORK_BOUNDS_S = (
    *(1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_TOKENS_BOUNDS = tuple(float(4**power) for power in range(11))


class _CappedLabel:
    """Lets the first `limit` distinct values through; the others are `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str, *, learn: bool = True) -> str:
        if value in self._known:
            return value
        if not learn or not value or len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class _HistogramCollector(Collector):
    """Exports the histograms that the driver feeds."""

    def __init__(self) -> None:
        self.plain: dict[str, tuple[str, Histogram]] = {}
        self.by_stage: dict[str, Histogram] = {}

    def add(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
        """Return a new histogram that is exported under `name`."""
        histogram = Histogram(bounds)
        self.plain[name] = (documentation, histogram)
        return histogram

    def collect(self) -> Iterator[Metric]:
        """Yield every histogram, and the count of what they refused."""
        for name, (documentation, histogram) in self.plain.items():
            yield histogram.family(name, documentation)
        dispatch = Metric(
            "balanceroute_dispatch_duration_seconds",
            "Time of one dispatch decision, by stage.",
            "histogram",
        )
        refused = Metric(
            "balanceroute_refused_observations",
            "Values no histogram took because they were negative or not finite.",
            "counter",
        )
        for stage, histogram in sorted(self.by_stage.items()):
            for sample in histogram.family(dispatch.name, "").samples:
                dispatch.add_sample(sample.name, {**sample.labels, "stage": stage}, sample.value)
        histograms = [histogram for _, histogram in self.plain.values()]
        histograms += self.by_stage.values()
        refused.add_sample(
            f"{refused.name}_total", {}, sum(histogram.refused for histogram in histograms)
        )
        yield dispatch
        yield refused


class Metrics:
    """Counts what the driver reports and renders the page.

    Attributes:
        observe_itl: Counts one gap between two chunks of a stream, in seconds. Called for every
            chunk: it is the histogram's own method, with nothing in between.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        log_lines_dropped: Callable[[], int] = lambda: 0,
        descriptor_shortages: Callable[[], int] = lambda: 0,
        process: bool = True,
    ) -> None:
        """Start at zero.

        Args:
            snapshot: Gives the state to export; called once a page.
            log_lines_dropped: Lines that the logs had to drop since start.
            descriptor_shortages: How often no file descriptor was left.
            process: Whether to export the process's own CPU time, memory and open files too.
        """
        self._registry = CollectorRegistry()
        self._model_label = _CappedLabel(MAX_MODELS)
        self._stage_label = _CappedLabel(MAX_STAGES)
        self._leg_label = _CappedLabel(MAX_REASONS)
        self._reason_label = _CappedLabel(MAX_REASONS)
        self._status_label = _CappedLabel(MAX_STATUSES)
        self._create_counters()
        self._create_histograms()
        self._registry.register(
            StateCollector(
                snapshot,
                log_lines_dropped=log_lines_dropped,
                descriptor_shortages=descriptor_shortages,
            )
        )
        if process:
            ProcessCollector(registry=self._registry)

    def _create_counters(self) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"balanceroute_{name}", documentation, labels, registry=self._registry)

        self._requests = counter(
            "requests",
            "Requests ended or refused, by how; status 0 if no answer was begun.",
            *("endpoint", "model", "outcome", "status"),
        )
        # The library's own look-up costs a lock and four conversions.
        self._requests_by: dict[tuple[str, ...], Counter] = {}
        self._cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens that the prefiller had cached."
        )
        self._retries = counter("retries", "Legs of a request sent again.", "leg", "reason")
        self._retried = counter("retried_requests", "Requests with at least one leg sent again.")
        self._recomputes = counter(
            "recomputes", "Times a rank gave a request back to be prefilled again."
        )
        self._lease_lapses = counter(
            "lease_lapses", "Prefills repeated because the KV lease ran out."
        )
        self._abandoned_leases = counter(
            "abandoned_leases", "KV leases given up before any rank pulled them.", "reason"
        )
        self._refreshes = counter("predictor_refreshes", "Predictions renewed.")
        self._state_saves = counter(
            "predictor_state_saves", "Times the predictor's state was to be saved.", "outcome"
        )
        self._state_refusals = counter(
            "predictor_state_refusals", "Saved states of the predictor that could not be used."
        )
        self._scrape_failures = counter(
            "scrape_failures", "Scrapes of an engine's /metrics that failed.", "role"
        )
        self._late_pulls = counter(
            "late_pulls",
            "KV caches that a prefiller was told of when it kept them no longer: called off, or pulled "
            "after their lease, when such an answer may be wrong. vLLM's NIXL connector tells.",
        )
        self._kv_transfer_failures = counter(
            "kv_transfer_failures",
            "Decode legs that failed where the rank was to pull a KV cache.",
            "prefiller",
            "rank",
            "reason",
        )
        self._decision_failures = counter(
            "decision_failures",
            "Exceptions in the proxy's own decisions, which others took the place of.",
            "what",
        )
        self._quarantines = counter("quarantines", "Times an engine was quarantined.", "role")
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Make the samples whose labels are known: an alert sees no data in one that is absent."""
        for role in Role:
            self._quarantines.labels(role.value)
            self._scrape_failures.labels(role.value)
        for leg in (*(leg.value for leg in Leg), "single_engine"):
            for fault in Fault:
                self._retries.labels(self._leg_label(leg), self._reason_label(fault.value))
        for outcome in ("ok", "failed"):
            self._state_saves.labels(outcome)

    def _create_histograms(self) -> None:
        self._histograms = collector = _HistogramCollector()

        def histogram(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            return collector.add(f"balanceroute_{name}", documentation, bounds)

        self._ttft = histogram(
            "time_to_first_token_seconds", "Arrival to the first token.", _REQUEST_BOUNDS_S
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean gap after the first token, requests that ended well.",
            _TOKEN_GAP_BOUNDS_S,
        )
        self._itl = histogram(
            "inter_token_latency_seconds",
            "Gap between two chunks of a stream.",
            _TOKEN_GAP_BOUNDS_S,
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds",
            "Arrival to the end, requests that ended well.",
            _REQUEST_BOUNDS_S,
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to the first prefill probe.", _REQUEST_BOUNDS_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "Prefill probe to its answer.", _REQUEST_BOUNDS_S
        )
        self._pool = histogram(
            "request_pool_time_seconds", "Time prefilled and unbound.", _REQUEST_BOUNDS_S
        )
        self._transfer = histogram(
            "request_transfer_time_seconds",
            "Binding to a rank to the first token: KV transfer and first step, streams alone.",
            _REQUEST_BOUNDS_S,
        )
        self._single = histogram(
            "single_engine_request_duration_seconds",
            "Arrival to the end of requests that one engine answers alone, however they ended.",
            _REQUEST_BOUNDS_S,
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS_BOUNDS
        )
        self._output_tokens = histogram(
            "request_output_tokens", "Tokens that reached the client.", _TOKENS_BOUNDS
        )
        self._refresh = histogram(
            "predictor_refresh_duration_seconds",
            "Time of one batch of refreshed predictions.",
            _WORK_BOUNDS_S,
        )
        self._predictor_error = histogram(
            "predictor_error_tokens",
            "Distance of a prediction from what the request had left.",
            _TOKENS_BOUNDS,
        )
        self._scoring = histogram(
            "predictor_scoring_duration_seconds",
            "Time of asking all predictors, shadows too, for their scores alone.",
            _WORK_BOUNDS_S,
        )
        self._loop_lag = histogram(
            "loop_lag_seconds", "Lateness of a timer of the event loop.", _WORK_BOUNDS_S
        )
        self.observe_itl = self._itl.observe
        self._registry.register(collector)

    def passed_through(self, record: RequestRecord) -> None:
        """Count a request that one engine answered alone, which no histogram of generation takes."""
        self._count(record)
        self._single.observe((record.ended_ns - record.arrived_ns) / _NS_PER_S)

    def request_ended(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        Its retries are not counted from here but one by one, as `retry` reports them.

        Args:
            record: The request, with its outcome set.
        """
        ended_well = record.outcome is Outcome.OK
        self._count(record)
        if ended_well:
            self._e2e.observe((record.ended_ns - record.arrived_ns) / _NS_PER_S)
        if record.prefill_started_ns is not None:
            self._queue.observe((record.prefill_started_ns - record.arrived_ns) / _NS_PER_S)
            if record.prefilled_ns is not None:
                self._prefill.observe((record.prefilled_ns - record.prefill_started_ns) / _NS_PER_S)
        if record.prefilled_ns is not None:
            self._pool.observe(record.pool_wait_ns / _NS_PER_S)
        if record.first_token_ns is not None:
            self._ttft.observe((record.first_token_ns - record.arrived_ns) / _NS_PER_S)
            # The choices of a request are decoded side by side.
            gaps = record.output_tokens / record.choices - 1
            if ended_well and gaps > 0:
                self._tpot.observe((record.ended_ns - record.first_token_ns) / _NS_PER_S / gaps)
        if record.transfer_ns is not None:
            self._transfer.observe(record.transfer_ns / _NS_PER_S)
        if record.prompt_tokens:
            self._prompt_tokens.observe(record.prompt_tokens)
            self._output_tokens.observe(record.output_tokens)
        # Mostly nothing, and a counter takes a lock.
        if record.cached_tokens:
            self._cached_tokens.inc(record.cached_tokens)
        if record.recomputes:
            self._recomputes.inc(record.recomputes)
        if record.lease_lapses:
            self._lease_lapses.inc(record.lease_lapses)
        if record.retries:
            self._retried.inc()

    def _count(self, record: RequestRecord) -> None:
        outcome = record.outcome
        assert outcome is not None
        labels = (
            record.endpoint if record.endpoint in ENDPOINTS else OTHER,
            # A client can invent model names without end, but not make an engine answer for one.
            self._model_label(record.model, learn=outcome is Outcome.OK),
            outcome.value,
            self._status_label(str(record.status)),
        )
        counter = self._requests_by.get(labels)
        if counter is None:
            counter = self._requests_by[labels] = self._requests.labels(*labels)
        counter.inc()

    def dispatched(self, stage: str, seconds: float) -> None:
        """Count one dispatch decision and the time it took."""
        label = self._stage_label(stage)
        histogram = self._histograms.by_stage.get(label)
        if histogram is None:
            histogram = self._histograms.by_stage[label] = Histogram(_WORK_BOUNDS_S)
        histogram.observe(seconds)

    def retry(self, leg: str, reason: str) -> None:
        """Count one leg sent again."""
        self._retries.labels(self._leg_label(leg), self._reason_label(reason)).inc()

    def abandoned_lease(self, reason: str) -> None:
        """Count one KV lease given up before any rank pulled it."""
        self._abandoned_leases.labels(self._reason_label(reason)).inc()

    def predictor_refreshed(self, count: int, seconds: float) -> None:
        """Count one batch of `count` refreshed predictions and the time it took."""
        self._refreshes.inc(count)
        self._refresh.observe(seconds)

    def predictor_error(self, abs_tokens: float) -> None:
        """Count one prediction that has come due, by how many tokens it was off."""
        self._predictor_error.observe(abs_tokens)

    def predictors_scored(self, seconds: float) -> None:
        """Count one batch of questions to all predictors and the time it took."""
        self._scoring.observe(seconds)

    def predictor_state_saved(self, *, ok: bool) -> None:
        """Count one attempt to save what the predictor has learned."""
        self._state_saves.labels("ok" if ok else "failed").inc()

    def predictor_state_refused(self) -> None:
        """Count one saved state that could not be used."""
        self._state_refusals.inc()

    def scrape_failed(self, role: Role) -> None:
        """Count one failed scrape of an engine's metrics."""
        self._scrape_failures.labels(role.value).inc()

    def pulled_late(self, count: int) -> None:
        """Count KV caches that were pulled after their lease."""
        self._late_pulls.inc(count)

    def kv_transfer_failed(self, prefiller: str, rank: str, reason: str) -> None:
        """Count one decode leg that failed where the rank was to pull a KV cache."""
        self._kv_transfer_failures.labels(prefiller, rank, reason).inc()

    def quarantined(self, role: Role) -> None:
        """Count one engine sent to quarantine."""
        self._quarantines.labels(role.value).inc()

    def decision_failed(self, what: str) -> None:
        """Count one exception in a decision of the proxy's own."""
        self._decision_failures.labels(self._reason_label(what)).inc()

    def loop_lag(self, seconds: float) -> None:
        """Count how late a timer of the event loop fired."""
        self._loop_lag.observe(seconds)

    def render(self) -> bytes:
        """Return the page, in the text format; its type is `CONTENT_TYPE`."""
        return exposition.render(self._registry)

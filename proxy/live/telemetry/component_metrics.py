"""Metrics of the proxy's parts: decisions and their failures, engines, handshakes, predictors, traces."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import DECODE_ROLE, PREFILL_ROLE, Role, Target
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.registry import (
    MAX_ENGINES,
    MAX_REASONS,
    OTHER,
    TOKENS_BOUNDS,
    WORK_BOUNDS_S,
    CappedLabel,
    Histogram,
    Registry,
    counts_by,
    family,
)

MAX_STAGES = 8


class DecisionMetrics:
    """Counts decisions.

    Attributes:
        loop_lag: Called with how late a timer of the event loop fired.
    """

    def __init__(self, registry: Registry) -> None:
        self._stages = registry.histograms(
            "dispatch_duration_seconds",
            "Time of one dispatch decision, by stage.",
            WORK_BOUNDS_S,
            "stage",
        )
        self._stage_label = CappedLabel(MAX_STAGES)
        self._known: dict[str, Histogram] = {}  # By stage, unless labelled `other`.
        self._reason_label = CappedLabel(MAX_REASONS)
        self._failures = registry.counter(
            "decision_failures",
            "Exceptions in the proxy's own decisions, which others took the place of.",
            "what",
        )
        self.loop_lag = registry.histogram(
            "loop_lag_seconds", "Lateness of a timer of the event loop.", WORK_BOUNDS_S
        ).observe

    def dispatched(self, stage: str, seconds: float) -> None:
        histogram = self._known.get(stage)
        if histogram is None:
            label = self._stage_label.of(stage)
            histogram = self._stages.of(label)
            if label != OTHER:
                self._known[stage] = histogram
        histogram.observe(seconds)

    def failed(self, what: str) -> None:
        self._failures.labels(self._reason_label.of(what)).inc()


class EngineMetrics:
    """Counts what happens to engines. Labels `role` and `url` name one.

    Attributes:
        pulled_late: Called with how many KV caches were pulled after their lease.
    """

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
        self.pulled_late = registry.counter(
            "late_pulls",
            "KV caches that a prefiller was notified of when it kept them no longer: aborted, or pulled "
            "after their lease, when such an answer may be wrong. vLLM's NIXL connector tells.",
        ).inc
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

    def added(self, target: Target) -> None:
        """Begin at zero for an engine: an alert finds no data in a sample that is absent."""
        self._quarantines.labels(*self._labels(target))
        self._scrape_failures.labels(*self._labels(target))
        if target.role is Role.PREFILL:
            self._without_kv.labels(self._labels(target)[1], "absent")

    def leg_failed(self, target: Target, fault: Fault) -> None:
        self._leg_failures.labels(*self._labels(target), fault.value).inc()

    def scrape_failed(self, target: Target) -> None:
        self._scrape_failures.labels(*self._labels(target)).inc()

    def left_no_kv(self, target: Target, kind: str) -> None:
        self._without_kv.labels(self._labels(target)[1], kind).inc()

    def kv_events_lost(self, reason: str) -> None:
        self._kv_events_lost.labels(reason).inc()

    def quarantined(self, target: Target) -> None:
        self._quarantines.labels(*self._labels(target)).inc()

    def _labels(self, target: Target) -> tuple[str, str]:
        return target.role.value, self._url_labels[target.role].of(target.url)


@dataclass(frozen=True, slots=True)
class Http3Counts:
    """Handshakes, and the results of the order of streams. Counters are since start."""

    open: int  # Those that are not over.
    retries: int  # Newcomers that had to show that they receive at their address.
    # Newcomers that got no connection, by reason: `crowd` were not taken, `late` took too long,
    # `failed` ended otherwise.
    ended_badly: dict[str, int]
    order: str  # By which streams are sent.
    requests: dict[str, int]  # By level.
    kept: int  # Answers with a deadline that had arrived by then.
    missed: int


class Http3Metrics(Collector):
    """Exports them."""

    def __init__(self, count: Callable[[], Http3Counts]) -> None:
        self._count = count

    def collect(self) -> Iterator[Metric]:
        counts = self._count()
        yield family(
            "gauge",
            "http3_open_handshakes",
            "Handshakes of HTTP/3 that are not over.",
            *([{}], [counts.open]),
        )
        yield family(
            "counter",
            "http3_retries",
            "Newcomers over HTTP/3 that had to show their address (Retry).",
            *([{}], [counts.retries]),
        )
        yield counts_by(
            "http3_failed_handshakes",
            "Newcomers over HTTP/3 that got no connection, for the reason given.",
            *("reason", counts.ended_badly),
        )
        yield family(
            "counter",
            "http3_requests",
            "Requests over HTTP/3, by the order in which streams are sent, and the request's level.",
            [{"order": counts.order, "level": level} for level in counts.requests],
            list(counts.requests.values()),
        )
        yield family(
            "counter",
            "http3_answer_deadlines",
            "Answers with X-Answer-Deadline-Ms, by whether all of them had arrived by then.",
            [{"order": counts.order, "kept": kept} for kept in ("yes", "no")],
            [counts.kept, counts.missed],
        )


class PredictorMetrics:
    """Counts what predictors do.

    Attributes:
        state_refused: Called for each saved state that could not be used.
        error: Called with how many tokens a prediction was off, once it has come due.
        scored: Called with how long a batch of questions to all predictors took.
    """

    def __init__(self, registry: Registry) -> None:
        self._refreshes = registry.counter("predictor_refreshes", "Predictions renewed.")
        self._state_saves = registry.counter(
            "predictor_state_saves", "Times the predictor's state was to be saved.", "outcome"
        )
        self.state_refused = registry.counter(
            "predictor_state_refusals", "Saved states of the predictor that could not be used."
        ).inc
        self._refresh = registry.histogram(
            "predictor_refresh_duration_seconds",
            "Time of one batch of refreshed predictions.",
            WORK_BOUNDS_S,
        )
        self.error = registry.histogram(
            "predictor_error_tokens",
            "Distance of a prediction from what the request had left.",
            TOKENS_BOUNDS,
        ).observe
        self.scored = registry.histogram(
            "predictor_scoring_duration_seconds",
            "Time of asking all predictors, shadows too, for their scores alone.",
            WORK_BOUNDS_S,
        ).observe
        for outcome in ("ok", "failed"):  # An alert finds no data in a sample that is absent.
            self._state_saves.labels(outcome)

    def refreshed(self, count: int, seconds: float) -> None:
        self._refreshes.inc(count)
        self._refresh.observe(seconds)

    def state_saved(self, *, ok: bool) -> None:
        self._state_saves.labels("ok" if ok else "failed").inc()


# Metrics of traces: how many reached the collector.

DROPS = ("queue_full", "refused", "unreachable", "closed")


class TraceMetrics:
    """Counts the traces of requests, each of which has several spans."""

    def __init__(self, registry: Registry) -> None:
        self.exported = registry.counter(
            "traces_exported", "Traces of requests that the collector took."
        ).inc
        self._dropped = registry.counter(
            "traces_dropped",
            "Traces of requests that were dropped, for the reason given.",
            "reason",
        )
        for reason in DROPS:
            self._dropped.labels(reason)

    def dropped(self, count: int, reason: str) -> None:
        self._dropped.labels(reason).inc(count)


# Failures of the proxy's own decisions: counted, logged, and part of the readiness.
#
# An exception out of a policy, a predictor, a timer, a probe or a request's own handling never
# ends service. It is reported here.

PERSISTENT_S = 10.0
"""For so long rounds of decisions must fail, with none that succeeds, to make the proxy unready."""

_LOG_INTERVAL_S = 60.0
# What the scheduler reports.
_OF_ROUNDS = ("policy", "projection")
_log = logging.getLogger(__name__)


class DecisionFailures:
    """Takes note of failures."""

    def __init__(self, metrics: DecisionMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._logged_s: dict[str, float] = {}
        # Since when every round failed, and the last of them that did.
        self._failing_since_s: float | None = None
        self._failed_s = 0.0
        self.rounds_failed = 0  # How often a policy or a projection failed.

    def report(self, what: str, error: Exception, **fields: object) -> None:
        """Count a failure, and log it unless one of the same kind was logged within a minute.

        Args:
            what: What failed, in a word of a few: the metric's label.
            error: How.
            fields: For the log.
        """
        self._metrics.failed(what)
        self.rounds_failed += what in _OF_ROUNDS
        now_s = self._clock()
        logged_s = self._logged_s.get(what)
        if logged_s is not None and now_s - logged_s < _LOG_INTERVAL_S:
            return
        self._logged_s[what] = now_s
        _log.error(
            "a decision failed; service goes on",
            exc_info=error,
            extra={"fields": {"what": what, **fields}},
        )

    def round_ended(self, *, well: bool) -> None:
        """Note how a round of decisions ended that had something to decide."""
        if well:
            self._failing_since_s = None
            return
        self._failed_s = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = self._failed_s

    @property
    def failing(self) -> bool:
        return self._failing_since_s is not None

    @property
    def persist(self) -> bool:
        """Whether rounds have failed for `PERSISTENT_S` and go on doing so.

        A proxy that is asked nothing cannot fail: without rounds it counts as well again after
        another `PERSISTENT_S`, so that it is tried.
        """
        since_s = self._failing_since_s
        if since_s is None or self._clock() - self._failed_s >= PERSISTENT_S:
            return False
        return self._failed_s - since_s >= PERSISTENT_S


class EngineRequests(Collector):
    """Counts a request for the last prefiller and for the last rank that had it."""

    def __init__(self) -> None:
        self._prefiller_label, self._rank_label = CappedLabel(MAX_ENGINES), CappedLabel(MAX_ENGINES)
        self._ended: Counter[tuple[Role, str, Outcome]] = Counter()

    def ended(self, record: RequestRecord) -> None:
        assert record.outcome is not None
        if record.prefiller:
            self._ended[
                PREFILL_ROLE, self._prefiller_label.of(record.prefiller), record.outcome
            ] += 1
        if record.rank:
            self._ended[DECODE_ROLE, self._rank_label.of(record.rank), record.outcome] += 1

    def collect(self) -> Iterator[Metric]:
        yield family(
            "counter",
            "engine_requests",
            "Requests ended, by the last prefiller and by the last rank that had them, and how.",
            [
                {"role": role.value, "name": name, "outcome": outcome.value}
                for role, name, outcome in self._ended
            ],
            list(self._ended.values()),
        )

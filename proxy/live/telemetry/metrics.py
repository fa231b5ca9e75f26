"""The metrics that the proxy exports to Prometheus.

Rules:
- Names begin with `balanceroute_` and end with their unit. Where vLLM has a metric of the same
  meaning the rest of the name is vLLM's, so that a dashboard can show both.
- A label takes few values, whatever clients send: endpoints come from a list, a model counts under
  its own name only once an engine has answered for it, and every other label is capped. Further
  values are `other`.
- A state (loads, queues) comes from a snapshot when Prometheus asks; the driver counts an event
  when it happens.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute import __version__
from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.telemetry import registry as exposition
from balanceroute.proxy.live.telemetry.component_metrics import (
    DecisionMetrics,
    EngineMetrics,
    PredictorMetrics,
    TraceMetrics,
)
from balanceroute.proxy.live.telemetry.registry import (
    MAX_TENANTS,
    Histogram,
    Registry,
    counts_by,
    family,
)
from balanceroute.proxy.live.telemetry.request_metrics import (
    AliasMetrics,
    Counts,
    GroupMetrics,
    LegMetrics,
    RequestMetrics,
    TenantMetrics,
)
from balanceroute.proxy.live.telemetry.snapshot import (
    PredictorScores,
    RankState,
    Snapshot,
)

# The metrics that are read from a snapshot of the proxy's state: loads, queues, connections.

# Name, meaning, and an attribute of a source, or what returns a source's value; None has no sample.
_Rows = tuple[tuple[str, str, str | Callable[[Any], Any]], ...]
_RANK_GAUGES: _Rows = (
    ("rank_kv_tokens", "KV tokens on the rank.", "kv_tokens"),
    ("rank_bound_requests", "Requests bound to the rank.", "bound"),
    ("rank_started_requests", "Requests that the rank decodes.", "started"),
    ("rank_free_slots", "Slots that the rank has free.", "free_slots"),
    ("rank_other_requests", "Requests of others on the rank, as its engine tells.", "others"),
    ("rank_speed_ratio", "Speed that the rank counts with, 1 on average.", "speed"),
    (
        "rank_doubts",
        "What speaks against the place of the rank's engine; the log and /admin/instances say it.",
        lambda rank: len(rank.doubts),
    ),
    ("rank_open", "Whether the rank takes new requests.", lambda rank: int(rank.open)),
    (
        "rank_still",
        "Whether the rank is left out, as it makes no tokens while others do.",
        lambda rank: int(rank.status == "still"),
    ),
    (
        "rank_at_barrier",
        "Whether the rank counts in what is lost at the barrier: it is open, or has requests.",
        lambda rank: int(rank.at_barrier),
    ),
    (
        "rank_draining",
        "Whether an administrator drains the rank, or has drained it.",
        lambda rank: int(rank.status == Status.DRAINING.value),
    ),
)
_RANK_COUNTERS: _Rows = (
    (
        "progress_vetoes",
        "Times a decode rank was left out, as it made no tokens while others did.",
        "vetoes",
    ),
)
_PREFILLER_GAUGES: _Rows = (
    ("prefiller_probes", "Prefills that run on the prefiller.", "probes"),
    (
        "prefiller_direct_sequences",
        "Sequences of the requests that the prefiller does whole.",
        "direct",
    ),
    ("prefiller_held_tokens", "KV tokens that the prefiller holds for requests.", "held_tokens"),
    ("prefiller_utilisation_ratio", "KV-cache use that the prefiller counts with.", "utilisation"),
    (
        "prefiller_doubts",
        "What speaks against the prefiller's place; the log and /admin/instances say it.",
        lambda one: len(one.doubts),
    ),
    ("prefiller_open", "Whether the prefiller takes new prefills.", lambda one: int(one.open)),
    (
        "prefiller_draining",
        "Whether an administrator drains the prefiller, or has drained it.",
        lambda one: int(one.status == Status.DRAINING.value),
    ),
)
_ENGINE_GAUGES: _Rows = (
    (
        "engine_waiting_requests",
        "Requests that wait in the engine, as it tells; mean over its ranks.",
        "waiting",
    ),
    (
        "engine_running_requests",
        "Requests that run in the engine, as it tells; mean over its ranks.",
        "running",
    ),
    (
        "engine_kv_cache_usage_ratio",
        "Share of its KV cache in use, as the engine tells; of its fullest rank.",
        "kv_cache_usage",
    ),
)
_LIMIT_GAUGES: _Rows = (
    ("batch_limit", "Slots of a rank.", "batch"),
    ("queue_limit", "Requests that may wait for a prefiller.", "queue"),
)
_LIMIT_GAUGES_OF_ALL: _Rows = (
    (
        "connection_limit",
        "Connections of clients that are served; absent without a limit.",
        "connections",
    ),
    ("body_budget_bytes", "Room for the bodies of requests.", "body_bytes"),
)
_TENANT_GAUGES: _Rows = (
    ("tenant_requests_in_flight", "Requests of a tenant.", "in_flight"),
    ("tenant_requests_waiting", "Those that wait for an engine.", "waiting"),
    ("tenant_share_ratio", "A tenant's weight over those of all.", "share"),
)
# Without a limit there is no sample.
_TENANT_LIMITS: _Rows = (
    ("tenant_concurrency_limit", "Requests that a tenant may have in flight.", "concurrency"),
    ("tenant_queue_limit", "Those that may wait for an engine.", "queue_limit"),
    (
        "tenant_requests_per_minute_limit",
        "A tenant's rate of requests.",
        lambda limits: None if limits.requests is None else limits.requests.per_minute,
    ),
    (
        "tenant_tokens_per_minute_limit",
        "A tenant's rate of tokens, of prompts and answers.",
        lambda limits: None if limits.tokens is None else limits.tokens.per_minute,
    ),
)
# Those of one deployment, and below those of the whole proxy.
_GAUGES: _Rows = (
    ("oldest_pooled_seconds", "Age of the oldest pooled request.", "oldest_pooled_s"),
    (
        "imbalance_tokens",
        "Largest minus smallest KV load of the ranks at the barrier.",
        "imbalance_tokens",
    ),
    ("decode_step_seconds", "Mean inferred time of a decode step.", "step_s"),
    (
        "barrier_idle_ratio",
        "Share of rank time lost at the barrier in the latest five minutes.",
        "idle_ratio",
    ),
    (
        "decode_still_ranks",
        "Ranks that stand still, if none that has streams makes tokens; else 0.",
        "still_ranks",
    ),
    (
        "decode_groups",
        "Data-parallel groups of decode ranks, as far as they are known.",
        lambda state: len(_groups(state)),
    ),
    (
        "decode_groups_down",
        "Those of which no rank takes requests, but for those that are drained.",
        lambda state: sum(map(_is_down, _groups(state).values())),
    ),
)
# Those that are absent where there is no value.
_SKILL: _Rows = (
    (
        "predictor_skill_ratio",
        "Share of a prediction that counts, by those that came true; absent while none does.",
        "skill_share",
    ),
)
_POOL: _Rows = (
    (
        "pooled_lease_used_ratio",
        "Largest share of its usable lease that a pooled request has used; absent without leases.",
        "lease_used",
    ),
    (
        "pool_limit",
        "Requests that may be in prefill or in the pool; absent without a limit.",
        "pool_limit",
    ),
)
_BUDGET: _Rows = (
    ("inflight_limit", "Requests that may be in flight per open rank.", "limit_per_rank"),
    ("inflight_requests", "Requests in prefill, in the pool or in decode.", "in_flight"),
    ("inflight_ttft_p99_seconds", "Time to first token that moves it.", "ttft_p99_s"),
    ("inflight_ttft_target_seconds", "What that is to keep.", "ttft_target_s"),
    ("inflight_step_p95_seconds", "Time of a step that moves it.", "step_p95_s"),
)
_GAUGES_OF_ALL: _Rows = (
    ("client_connections", "Connections of clients.", "client_connections"),
    ("engine_connections", "Connections to engines.", "engine_connections"),
    ("body_bytes", "Bodies of requests that are being received or not answered yet.", "body_bytes"),
    ("draining", "Whether the proxy takes no new requests.", lambda state: int(state.draining)),
)
_COUNTERS_OF_ALL: _Rows = (
    (
        "evicted_connections",
        "Client connections without a complete request that were closed for a newcomer.",
        "evicted_connections",
    ),
    (
        "rejected_bodies",
        "Requests refused because the bodies in flight left no room for theirs.",
        "rejected_bodies",
    ),
    (
        "pumped_streams",
        "Times a stream was handed to the native library, which moves its ordinary events.",
        "pumped_streams",
    ),
    ("pumped_events", "Events that it moved.", "pumped_events"),
    (
        "pumped_bodies",
        "Large bodies of requests that the native library has read.",
        "pumped_bodies",
    ),
)
_COUNTERS: _Rows = (
    (
        "predictor_rows_judged",
        "Predictions that came true or not, of each predictor.",
        "rows_judged",
    ),
    ("decode_steps", "Decode steps inferred.", "steps"),
    ("decode_standstills", "Times no decode rank that had streams made tokens.", "standstills"),
    (
        "barrier_idle_tokens",
        "KV tokens that ranks had less than the fullest, summed over steps.",
        "idle_tokens",
    ),
    (
        "barrier_capacity_tokens",
        "Ranks times the KV tokens of the fullest, summed over steps.",
        "capacity_tokens",
    ),
    (
        "rank_prefix_tokens",
        "Prompt tokens that ranks should have had in their prefix caches when they got the requests.",
        "kept_tokens",
    ),
)


_SCORES: _Rows = (
    ("predictor_active", "Whether the policy asks the predictor.", lambda one: int(one.active)),
    ("predictor_failed", "Whether the shadow predictor broke.", lambda one: int(one.failed)),
    ("predictor_rows", "Judged predictions that the scores are of.", "rows"),
    ("predictor_auc_ratio", "ROC-AUC of finishing within the horizon.", "auc"),
    ("predictor_brier_ratio", "Brier score of the same.", "brier"),
    ("predictor_calibration_error_ratio", "Expected calibration error.", "ece"),
    (
        "predictor_remaining_error_tokens",
        "Mean error of the remaining length, where it was within the horizon.",
        "mae",
    ),
)
_DECILES = (
    (
        "predictor_decile_predicted_ratio",
        "Mean chance to finish within the horizon, by tenth of the scale.",
        "predicted",
    ),
    (
        "predictor_decile_observed_ratio",
        "How often those requests finished within the horizon.",
        "observed",
    ),
    ("predictor_decile_rows", "Rows in each tenth.", "decile_rows"),
)


class StateCollector(Collector):
    """Exports one snapshot of each deployment whenever the page is rendered."""

    def __init__(
        self,
        snapshots: Callable[[], Sequence[Snapshot]],
        *,
        log_lines_dropped: Callable[[], int],
        descriptor_shortages: Callable[[], int],
    ) -> None:
        self._snapshots = snapshots
        self._process_counters = (
            ("log_lines_dropped", "Log lines dropped.", log_lines_dropped),
            (
                "descriptor_shortages",
                "Seconds at which no file descriptor, or hardly any, was left.",
                descriptor_shortages,
            ),
        )

    def collect(self) -> Iterator[Metric]:
        states = self._snapshots()
        if not states[0].group:
            yield from _of_deployment(states[0])
        else:
            yield from _together({state.group: list(_of_deployment(state)) for state in states})
        # The same in each.
        state = states[0]
        yield from _table(_GAUGES_OF_ALL, state)
        yield from _table(_COUNTERS_OF_ALL, state, kind="counter")
        if tenants := state.tenants[:MAX_TENANTS]:
            labels = [{"tenant": one.name} for one in tenants]
            yield from _table(_TENANT_GAUGES, *tenants, labels=labels)
            yield from _table(_TENANT_LIMITS, *(one.limits for one in tenants), labels=labels)
        if state.limits is not None:
            yield from _table(_LIMIT_GAUGES_OF_ALL, state.limits)
        yield counts_by(
            "rejected_connections",
            "Client connections that were not served.",
            *("reason", state.rejected_connections),
        )
        yield counts_by(
            "pumped_returns",
            "Times a stream came back from the native library.",
            *("reason", state.pumped_returns),
        )
        for name, documentation, count in self._process_counters:
            yield family("counter", name, documentation, [{}], [count()])


def _groups(state: Snapshot) -> dict[int, list[RankState]]:
    groups: dict[int, list[RankState]] = {}
    for rank in state.ranks:
        if rank.dp_group is not None and rank.status != Status.REMOVED.value:
            groups.setdefault(rank.dp_group, []).append(rank)
    return groups


def _is_down(group: Sequence[RankState]) -> bool:
    drained = all(rank.status == Status.DRAINING.value for rank in group)
    return not drained and not any(rank.open for rank in group)


def _of_deployment(state: Snapshot) -> Iterator[Metric]:
    # Alerts on ranks that are closed would never end for one that is removed.
    ranks = [one for one in state.ranks if one.status != Status.REMOVED.value]
    prefillers = [one for one in state.prefillers if one.status != Status.REMOVED.value]
    # One label set for all metrics of a rank: the page escapes it once.
    labels = [{"rank": str(rank.rank), "name": rank.name} for rank in ranks]
    yield from _table(_RANK_GAUGES, *ranks, labels=labels)
    yield from _table(_RANK_COUNTERS, *ranks, labels=labels, kind="counter")
    labels = [{"prefiller": str(one.prefiller), "name": one.name} for one in prefillers]
    yield from _table(_PREFILLER_GAUGES, *prefillers, labels=labels)
    labels = [{"role": one.role, "url": one.url} for one in state.engines]
    yield from _table(_ENGINE_GAUGES, *state.engines, labels=labels)
    yield family(
        "gauge",
        "live_requests",
        "Requests in the proxy, by state.",
        [{"state": name} for name in ("queued", "prefilling", "pooled", "decoding")],
        [state.queued, state.prefilling, state.pooled, state.decoding],
    )
    yield from _table(_SKILL, state)
    yield from _predictor_families(state.predictors)
    yield from _table(_GAUGES, state)
    yield from _table(_COUNTERS, state, kind="counter")
    yield from _table(_POOL, state)
    if state.limits is not None:
        yield from _table(_LIMIT_GAUGES, state.limits)
    if state.budget is not None:
        yield from _table(_BUDGET, state.budget)
        yield counts_by(
            "inflight_limit_decisions",
            "Decisions on the limit, by what they were.",
            *("decision", state.budget.decisions),
        )
    built = {
        "version": __version__,
        "python": platform.python_version(),
        "policy": state.policy,
        "predictor": state.predictor,
    }
    yield family("gauge", "build_info", "What runs here; always 1.", [built], [1])


def _together(by_group: Mapping[str, Sequence[Metric]]) -> Iterator[Metric]:
    """Yield the families of several deployments, each once, with the label `group`."""
    families: dict[str, Metric] = {}
    for group, metrics in by_group.items():
        for one in metrics:
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [
                sample._replace(labels={"group": group, **sample.labels}) for sample in one.samples
            ]
    yield from families.values()


def _predictor_families(predictors: list[PredictorScores]) -> Iterator[Metric]:
    """Yield the scores; an undefined one has no sample."""
    yield from _table(_SCORES, *predictors, labels=[{"predictor": one.name} for one in predictors])
    labels = [
        {"predictor": one.name, "decile": str(decile)}
        for one in predictors
        for decile in range(len(one.predicted))
    ]
    for name, documentation, field in _DECILES:
        values = [value for one in predictors for value in getattr(one, field)]
        yield family("gauge", name, documentation, labels, values)


def _table(
    table: _Rows,
    *sources: object,
    labels: Sequence[dict[str, str]] = ({},),
    kind: str = "gauge",
) -> Iterator[Metric]:
    """Yield a family for each row of a table, with a sample of each source."""
    for name, documentation, field in table:
        values = [getattr(one, field) if isinstance(field, str) else field(one) for one in sources]
        yield family(kind, name, documentation, labels, values)


CONTENT_TYPE = exposition.CONTENT_TYPE
"""The `content-type` of the page."""

_KEPT_S = 1.0


class Metrics:
    """Counts what happens, by subject, and renders the page."""

    def __init__(
        self,
        snapshots: Callable[[], Sequence[Snapshot]],
        *,
        log_lines_dropped: Callable[[], int] = lambda: 0,
        descriptor_shortages: Callable[[], int] = lambda: 0,
        traces: bool = False,
        process: bool = True,
    ) -> None:
        self._registry = registry = Registry()
        self.tenants = TenantMetrics()
        registry.register(self.tenants)
        self.groups = GroupMetrics()
        registry.register(self.groups)
        self.aliases = AliasMetrics()
        registry.register(self.aliases)
        self.requests = RequestMetrics(
            registry, tenants=self.tenants, groups=self.groups, aliases=self.aliases
        )
        self.legs = LegMetrics(registry)
        self.engines = EngineMetrics(registry)
        self.predictors = PredictorMetrics(registry)
        self.decisions = DecisionMetrics(registry)
        self.traces = TraceMetrics(registry) if traces else None
        registry.register(
            StateCollector(
                snapshots,
                log_lines_dropped=log_lines_dropped,
                descriptor_shortages=descriptor_shortages,
            )
        )
        if process:
            registry.collect_process()

    def collect_from(self, collector: Collector) -> None:
        """Export another component's metrics, too."""
        self._registry.register(collector)

    def counts(self, group: str) -> Counts:
        """Return what became of a group's requests; of all, where there are none."""
        return self.groups.counts(group) if group else self.requests.counts()

    def latencies(self) -> dict[str, Histogram]:
        """Return the histograms that show where time goes, by stage."""
        return {**self.requests.latencies(), "itl": self.legs.gaps}

    def render(self) -> bytes:
        return self._registry.render()


class MetricsPage:
    """Called for the page, it renders at most once a second: that takes milliseconds of the loop.

    Args:
        kept_s: How old a page may be.
    """

    def __init__(
        self, render: Callable[[], bytes], clock: Callable[[], float], kept_s: float = _KEPT_S
    ) -> None:
        self._render, self._clock, self._kept_s = render, clock, kept_s
        self._page = b""
        self._until_s = float("-inf")

    def __call__(self) -> bytes:
        """Return a page that is not older."""
        now_s = self._clock()
        if now_s >= self._until_s:
            self._page = self._render()
            self._until_s = now_s + self._kept_s
        return self._page

"""The metrics: what the page says of requests and state, and that no label grows without end."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Info, Summary
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.live.control.test_admin import SNAPSHOT as ONE_RANK
from tests.script import script
from tests.support.site import Site, served

from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.telemetry import registry as exposition
from balanceroute.proxy.live.telemetry.component_metrics import MAX_STAGES
from balanceroute.proxy.live.telemetry.metrics import CONTENT_TYPE, Metrics
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord, stages_of
from balanceroute.proxy.live.telemetry.registry import MAX_ENGINES, MAX_REASONS, Histograms
from balanceroute.proxy.live.telemetry.request_metrics import (
    ENDPOINTS,
    MAX_MODELS,
    MAX_STATUSES,
    AliasWorth,
    Counts,
)
from balanceroute.proxy.live.telemetry.snapshot import (
    BudgetState,
    EngineState,
    LimitsState,
    PredictorScores,
    RankState,
    Snapshot,
)

MS = 1_000_000
PREFILLER, DECODER = Target(Role.PREFILL, "http://p:8000"), Target(Role.DECODE, "http://d:8000")
SCORES = PredictorScores(
    name="survival",
    active=True,
    failed=False,
    rows=40,
    auc=0.75,
    brier=0.125,
    ece=0.0625,
    mae=6.5,
    predicted=(None,) * 9 + (0.95,),
    observed=(None,) * 9 + (0.9,),
    decile_rows=(0,) * 9 + (40,),
)
NOT_YET = PredictorScores(
    name="old.json",
    active=False,
    failed=True,
    rows=0,
    auc=None,
    brier=None,
    ece=None,
    mae=None,
    predicted=(None,) * 10,
    observed=(None,) * 10,
    decile_rows=(0,) * 10,
)
SNAPSHOT = replace(
    ONE_RANK,
    ranks=[
        *ONE_RANK.ranks,
        RankState(1, "http://d:8000@1", False, "quarantined", 1000, 1, 1, 15, 0.75),
    ],
    predictors=[SCORES, NOT_YET],
    budget=BudgetState(
        limit_per_rank=12,
        in_flight=17,
        ttft_p99_s=1.5,
        step_p95_s=None,
        decisions={"increase": 3, "decrease": 1},
        ttft_target_s=2.5,
    ),
    idle_ratio=0.125,
    engines=[EngineState("decode", "http://d:8000", 1.5, 12.0, 0.75)],
    limits=LimitsState(batch=16, queue=4096, connections=None, body_bytes=1 << 29),
    skill_share=0.6,
)
RECORD = RequestRecord(
    request_id="r1",
    endpoint="/v1/chat/completions",
    arrived_ns=1000 * MS,
    arrived_unix_s=0.0,
    model="m",
    outcome=Outcome.OK,
    status=200,
    prompt_tokens=100,
    cached_tokens=60,
    output_tokens=11,
    prefill_started_ns=1010 * MS,
    prefilled_ns=1050 * MS,
    admitted_ns=1055 * MS,
    first_token_ns=1100 * MS,
    ended_ns=1600 * MS,
    pool_wait_ns=5 * MS,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(page: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def metrics(snapshot: Snapshot = SNAPSHOT) -> Metrics:
    return Metrics(lambda: [snapshot], process=False)


def value(subject: Metrics, name: str, /, **labels: str) -> float:
    return samples_of(subject.render())[f"balanceroute_{name}", tuple(sorted(labels.items()))]


def labels_seen(subject: Metrics, name: str, label: str) -> set[str]:
    return {
        dict(labels)[label]
        for sample, labels in samples_of(subject.render())
        if sample == f"balanceroute_{name}"
    }


def test_a_request_that_ended_well_is_counted_with_all_its_times() -> None:
    subject = metrics()
    subject.requests.ended(RECORD)
    labels = {"endpoint": RECORD.endpoint, "model": "m", "outcome": "ok", "status": "200"}
    assert value(subject, "requests_total", **labels) == 1
    for name, sum_expected in {
        "request_queue_time_seconds": 0.01,
        "request_prefill_time_seconds": 0.04,
        "request_pool_time_seconds": 0.005,
        "request_transfer_time_seconds": 0.045,
        "request_prompt_tokens": 100,
        "request_output_tokens": 11,
    }.items():
        assert value(subject, f"{name}_count") == 1, name
        assert value(subject, f"{name}_sum") == pytest.approx(sum_expected), name
    for name, sum_expected in {
        "time_to_first_token_seconds": 0.1,
        "request_time_per_output_token_seconds": 0.05,
        "e2e_request_latency_seconds": 0.6,
    }.items():
        assert value(subject, f"{name}_count", model="m") == 1, name
        assert value(subject, f"{name}_sum", model="m") == pytest.approx(sum_expected), name
    assert value(subject, "prompt_tokens_cached_total") == 60


def test_a_request_cancelled_in_the_queue_has_no_times() -> None:
    subject = metrics()
    subject.requests.ended(
        RequestRecord("r", "/v1/completions", 0, 0.0, outcome=Outcome.CANCELLED, ended_ns=5)
    )
    counts = {
        name: count
        for (name, labels), count in samples_of(subject.render()).items()
        if name.endswith("_count") and not labels
    }
    assert len(counts) > 6
    assert not any(counts.values())


def test_only_requests_that_ended_well_have_a_latency() -> None:
    subject = metrics()
    subject.requests.ended(structs.replace(RECORD, outcome=Outcome.UPSTREAM_ERROR))
    samples = samples_of(subject.render())
    model = (("model", "other"),)
    assert samples["balanceroute_time_to_first_token_seconds_count", model] == 1
    names = {name for name, _ in samples}
    assert "balanceroute_e2e_request_latency_seconds_count" not in names
    assert "balanceroute_request_time_per_output_token_seconds_count" not in names


def test_choices_decoded_side_by_side_share_the_time_per_token() -> None:
    subject = metrics()
    subject.requests.ended(structs.replace(RECORD, choices=2, output_tokens=22))
    total = value(subject, "request_time_per_output_token_seconds_sum", model="m")
    assert total == pytest.approx(0.05)


def test_one_token_has_no_time_per_token() -> None:
    subject = metrics()
    subject.requests.ended(structs.replace(RECORD, output_tokens=1))
    page = subject.render()
    assert b"balanceroute_request_time_per_output_token_seconds_count" not in page
    assert b"balanceroute_time_to_first_token_seconds_count" in page


def test_retries_recomputes_and_lapses_are_counted() -> None:
    subject = metrics()
    subject.requests.ended(structs.replace(RECORD, retries=3, recomputes=2, lease_lapses=1))
    subject.legs.retry("decode", "reset")
    subject.legs.retry("decode", "reset")
    assert value(subject, "retried_requests_total") == 1
    assert value(subject, "retries_total", leg="decode", reason="reset") == 2
    assert value(subject, "recomputes_total") == 2
    assert value(subject, "lease_lapses_total") == 1


def test_events_of_the_driver_are_counted() -> None:
    subject = metrics()
    subject.legs.abandoned_lease("cancelled")
    subject.predictors.refreshed(40, 0.002)
    subject.predictors.error(17.0)
    subject.predictors.scored(0.004)
    subject.predictors.state_saved(ok=True)
    subject.predictors.state_saved(ok=False)
    subject.predictors.state_refused()
    subject.engines.scrape_failed(PREFILLER)
    subject.engines.quarantined(DECODER)
    subject.engines.leg_failed(DECODER, Fault.RESET)
    subject.decisions.loop_lag(0.004)
    assert value(subject, "abandoned_leases_total", reason="cancelled") == 1
    assert value(subject, "predictor_refreshes_total") == 40
    assert value(subject, "predictor_refresh_duration_seconds_sum") == 0.002
    assert value(subject, "predictor_error_tokens_sum") == 17
    assert value(subject, "predictor_scoring_duration_seconds_sum") == 0.004
    assert value(subject, "predictor_state_saves_total", outcome="ok") == 1
    assert value(subject, "predictor_state_saves_total", outcome="failed") == 1
    assert value(subject, "predictor_state_refusals_total") == 1
    prefiller = {"role": "prefill", "url": PREFILLER.url}
    decoder = {"role": "decode", "url": DECODER.url}
    assert value(subject, "scrape_failures_total", **prefiller) == 1
    subject.engines.pulled_late(3)
    assert value(subject, "late_pulls_total") == 3
    assert value(subject, "quarantines_total", **decoder) == 1
    assert value(subject, "leg_failures_total", **decoder, reason="reset") == 1
    assert value(subject, "loop_lag_seconds_bucket", le="0.005") == 1
    assert value(subject, "loop_lag_seconds_bucket", le="0.0025") == 0


def test_dispatch_durations_are_told_apart_by_stage() -> None:
    subject = metrics()
    subject.decisions.dispatched("choose", 20e-6)
    subject.decisions.dispatched("choose", 30e-6)
    subject.decisions.dispatched("refresh", 1e-3)
    assert value(subject, "dispatch_duration_seconds_count", stage="choose") == 2
    assert value(subject, "dispatch_duration_seconds_sum", stage="choose") == 50e-6
    assert value(subject, "dispatch_duration_seconds_bucket", stage="choose", le="2.5e-05") == 1
    assert value(subject, "dispatch_duration_seconds_count", stage="refresh") == 1


def test_the_gap_between_chunks_is_a_real_histogram() -> None:
    subject = metrics()
    for gap_s in (0.0005, 0.03, 0.0300001, 99.0):
        subject.legs.observe_itl(gap_s)
    assert value(subject, "inter_token_latency_seconds_count") == 4
    assert value(subject, "inter_token_latency_seconds_bucket", le="0.03") == 2
    assert value(subject, "inter_token_latency_seconds_bucket", le="10.0") == 3
    assert value(subject, "inter_token_latency_seconds_bucket", le="+Inf") == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -1.0])
def test_a_poisoned_value_spoils_no_sum(poison: float) -> None:
    subject = metrics()
    subject.predictors.error(poison)
    subject.legs.observe_itl(poison)
    subject.decisions.dispatched("choose", poison)
    subject.predictors.error(3.0)
    assert value(subject, "predictor_error_tokens_sum") == 3.0
    assert value(subject, "predictor_error_tokens_count") == 1
    assert value(subject, "refused_observations_total") == 3


@given(st.lists(st.floats(0, 1e6), max_size=50), st.integers(1, 6))
def test_the_histogram_counts_as_the_library_does(values: list[float], times: int) -> None:
    bounds = (0.001, 0.01, 0.5, 1.0, 20.0, 1e5)
    histograms = Histograms("h", "Doc.", bounds)
    ours = histograms.of()
    registry = CollectorRegistry()
    theirs = LibraryHistogram("balanceroute_h", "Doc.", buckets=bounds, registry=registry)
    for one in values * times:  # It counts some together.
        ours.observe(one)
        theirs.observe(one)
    expected = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name != "balanceroute_h_created"
    }
    family = histograms.family()
    assert {(s.name, *s.labels.values()): s.value for s in family.samples} == pytest.approx(
        expected
    )


def test_what_is_counted_elsewhere_is_added_once() -> None:
    histogram = Histograms("h", "Doc.", (1.0, 2.0)).of()
    elsewhere = [([0, 3, 1], 9.5), ([1, 0, 0], 0.5)]
    histogram.beside = lambda: elsewhere.pop(0) if elsewhere else ([0, 0, 0], 0.0)
    histogram.observe(1.5)
    assert histogram.counted() == ([0, 4, 1], 11.0, 0)
    assert histogram.counted() == ([1, 4, 1], 11.5, 0)
    assert histogram.take() == ([1, 4, 1], 11.5, 0)
    assert histogram.counted() == ([0, 0, 0], 0.0, 0)


def test_an_endpoint_that_is_not_ours_is_other() -> None:
    subject = metrics()
    for number in range(100):
        subject.requests.ended(structs.replace(RECORD, endpoint=f"/v1/../{number}"))
    assert labels_seen(subject, "requests_total", "endpoint") == {"other"}
    for endpoint in sorted(ENDPOINTS):
        subject.requests.ended(structs.replace(RECORD, endpoint=endpoint))
    assert labels_seen(subject, "requests_total", "endpoint") == ENDPOINTS | {"other"}


def test_models_past_the_cap_are_other() -> None:
    subject = metrics()
    for number in range(MAX_MODELS + 20):
        subject.requests.ended(structs.replace(RECORD, model=f"m{number:02}"))
    expected = {f"m{number:02}" for number in range(MAX_MODELS)} | {"other"}
    assert labels_seen(subject, "requests_total", "model") == expected


def test_invented_models_do_not_take_the_place_of_real_ones() -> None:
    subject = metrics()
    for number in range(1000):
        record = structs.replace(RECORD, model=f"x{number}", outcome=Outcome.CLIENT_ERROR)
        subject.requests.ended(record)
    assert labels_seen(subject, "requests_total", "model") == {"other"}
    subject.requests.ended(RECORD)
    subject.requests.ended(structs.replace(RECORD, outcome=Outcome.CANCELLED))
    assert labels_seen(subject, "requests_total", "model") == {"m", "other"}


def test_a_request_counts_for_the_engines_that_had_it() -> None:
    subject = metrics()
    record = structs.replace(RECORD, prefiller=PREFILLER.url, rank=f"{DECODER.url}@1")
    subject.requests.ended(record)
    subject.requests.ended(structs.replace(record, outcome=Outcome.UPSTREAM_ERROR))
    subject.requests.ended(structs.replace(RECORD, outcome=Outcome.REJECTED))
    for outcome in ("ok", "upstream_error"):
        for role, name in (("prefill", record.prefiller), ("decode", record.rank)):
            labels = {"role": role, "name": name, "outcome": outcome}
            assert value(subject, "engine_requests_total", **labels) == 1
    assert labels_seen(subject, "engine_requests_total", "outcome") == {"ok", "upstream_error"}


def test_engines_past_the_cap_are_other() -> None:
    subject = metrics()
    for number in range(MAX_ENGINES + 20):
        subject.requests.ended(structs.replace(RECORD, rank=f"http://d{number}"))
    labels = {"role": "decode", "name": "other", "outcome": "ok"}
    assert value(subject, "engine_requests_total", **labels) == 20


def test_statuses_past_the_cap_are_other() -> None:
    subject = metrics()
    for status in range(200, 600):
        subject.requests.ended(structs.replace(RECORD, status=status))
    assert len(labels_seen(subject, "requests_total", "status")) == MAX_STATUSES + 1


def test_counters_whose_labels_are_known_begin_at_zero() -> None:
    subject = metrics()
    for target in (PREFILLER, DECODER):
        subject.engines.added(target)
        labels = {"role": target.role.value, "url": target.url}
        assert value(subject, "quarantines_total", **labels) == 0
        assert value(subject, "scrape_failures_total", **labels) == 0
    for leg in ("prefill", "decode", "direct", "single_engine"):
        for fault in Fault:
            assert value(subject, "retries_total", leg=leg, reason=fault.value) == 0


def test_stages_and_reasons_are_capped() -> None:
    subject = metrics()
    for number in range(100):
        subject.decisions.dispatched(f"stage {number}", 1e-4)
        subject.legs.retry("decode", f"reason {number}")
        subject.legs.abandoned_lease(f"why {number}")
    assert len(labels_seen(subject, "dispatch_duration_seconds_count", "stage")) == MAX_STAGES + 1
    assert value(subject, "dispatch_duration_seconds_count", stage="other") == 100 - MAX_STAGES
    assert len(labels_seen(subject, "retries_total", "reason")) <= MAX_REASONS + 1
    assert len(labels_seen(subject, "abandoned_leases_total", "reason")) <= MAX_REASONS + 1


def test_state_is_read_from_the_snapshot() -> None:
    subject = metrics()
    rank = {"rank": "0", "name": "http://d:8000@0"}
    assert value(subject, "rank_kv_tokens", **rank) == 4000
    assert value(subject, "rank_bound_requests", **rank) == 3
    assert value(subject, "rank_started_requests", **rank) == 2
    assert value(subject, "rank_free_slots", **rank) == 13
    assert value(subject, "rank_speed_ratio", **rank) == 1
    assert value(subject, "rank_speed_ratio", rank="1", name="http://d:8000@1") == 0.75
    assert value(subject, "rank_open", **rank) == 1
    assert value(subject, "rank_open", rank="1", name="http://d:8000@1") == 0
    prefiller = {"prefiller": "0", "name": "http://p:8000"}
    assert value(subject, "prefiller_probes", **prefiller) == 2
    assert value(subject, "prefiller_direct_sequences", **prefiller) == 1
    assert value(subject, "prefiller_held_tokens", **prefiller) == 3000
    assert value(subject, "prefiller_utilisation_ratio", **prefiller) == 0.25
    assert value(subject, "prefiller_open", **prefiller) == 1
    for state, count in {"queued": 5, "prefilling": 2, "pooled": 4, "decoding": 3}.items():
        assert value(subject, "live_requests", state=state) == count
    assert value(subject, "oldest_pooled_seconds") == 0.5
    assert value(subject, "pool_limit") == 24
    assert value(subject, "predictor_skill_ratio") == 0.6
    assert value(subject, "inflight_limit") == 12
    assert value(subject, "inflight_requests") == 17
    assert value(subject, "inflight_ttft_p99_seconds") == 1.5
    assert value(subject, "inflight_ttft_target_seconds") == 2.5
    assert value(subject, "inflight_limit_decisions_total", decision="increase") == 3
    assert value(subject, "imbalance_tokens") == 3000
    assert value(subject, "decode_steps_total") == 7
    assert value(subject, "decode_step_seconds") == 0.03
    assert value(subject, "barrier_idle_tokens_total") == 100
    assert value(subject, "barrier_capacity_tokens_total") == 400
    assert value(subject, "barrier_idle_ratio") == 0.125
    engine = {"role": "decode", "url": "http://d:8000"}
    assert value(subject, "engine_waiting_requests", **engine) == 1.5
    assert value(subject, "engine_running_requests", **engine) == 12
    assert value(subject, "engine_kv_cache_usage_ratio", **engine) == 0.75
    assert value(subject, "batch_limit") == 16
    assert value(subject, "queue_limit") == 4096
    assert value(subject, "body_budget_bytes") == 1 << 29
    assert b"\nbalanceroute_connection_limit " not in subject.render()
    assert value(subject, "client_connections") == 11
    assert value(subject, "engine_connections") == 6
    assert value(subject, "draining") == 0


def test_each_predictor_has_its_scores_as_far_as_they_are_defined() -> None:
    subject = metrics()
    assert value(subject, "predictor_rows_judged_total") == 50
    for name, score in {
        "active": 1,
        "failed": 0,
        "rows": 40,
        "auc_ratio": 0.75,
        "brier_ratio": 0.125,
        "calibration_error_ratio": 0.0625,
        "remaining_error_tokens": 6.5,
    }.items():
        assert value(subject, f"predictor_{name}", predictor="survival") == score
    last = {"predictor": "survival", "decile": "9"}
    assert value(subject, "predictor_decile_predicted_ratio", **last) == 0.95
    assert value(subject, "predictor_decile_observed_ratio", **last) == 0.9
    assert value(subject, "predictor_decile_rows", **last) == 40
    assert value(subject, "predictor_decile_rows", predictor="survival", decile="0") == 0
    assert value(subject, "predictor_active", predictor="old.json") == 0
    assert value(subject, "predictor_failed", predictor="old.json") == 1
    assert labels_seen(subject, "predictor_auc_ratio", "predictor") == {"survival"}
    assert labels_seen(subject, "predictor_decile_observed_ratio", "decile") == {"9"}


def test_an_engine_that_came_back_under_its_name_is_a_series_of_its_own() -> None:
    ranks = [SNAPSHOT.ranks[0], replace(SNAPSHOT.ranks[0], rank=7, kv_tokens=1)]
    subject = metrics(replace(SNAPSHOT, ranks=ranks))
    assert value(subject, "rank_kv_tokens", rank="7", name="http://d:8000@0") == 1


def test_hostile_label_values_cannot_leave_their_quotes() -> None:
    hostile = 'a"} 1\nballoons{b="\\'
    ranks = [replace(SNAPSHOT.ranks[0], name=hostile)]
    subject = metrics(replace(SNAPSHOT, ranks=ranks))
    subject.requests.ended(structs.replace(RECORD, model=hostile))
    assert value(subject, "rank_kv_tokens", rank="0", name=hostile) == 4000
    labels = {"endpoint": RECORD.endpoint, "model": hostile, "outcome": "ok", "status": "200"}
    assert value(subject, "requests_total", **labels) == 1


def test_the_snapshot_is_taken_once_a_page_and_not_before() -> None:
    taken = 0

    def snapshots() -> list[Snapshot]:
        nonlocal taken
        taken += 1
        return [SNAPSHOT]

    subject = Metrics(snapshots, process=False)
    assert taken == 0
    subject.render()
    assert taken == 1


def test_dropped_log_lines_are_exported() -> None:
    subject = Metrics(lambda: [SNAPSHOT], process=False, log_lines_dropped=lambda: 12)
    assert value(subject, "log_lines_dropped_total") == 12


def test_the_process_is_exported_on_request() -> None:
    page = Metrics(lambda: [SNAPSHOT], process=True).render()
    assert samples_of(page)["process_open_fds", ()] > 0


def test_equal_runs_give_equal_pages() -> None:
    pages = []
    for _ in range(2):
        subject = metrics()
        subject.requests.ended(RECORD)
        subject.decisions.dispatched("choose", 1e-4)
        pages.append(subject.render())
    assert pages[0] == pages[1]


def test_units_end_the_names() -> None:
    units = (
        "_bytes",
        "_seconds",
        "_tokens",
        "_total",
        "_ratio",
        "_requests",
        "_connections",
        "_info",
    )
    plain = {"rank_free_slots", "rank_open", "prefiller_probes", "prefiller_open", "draining"}
    plain |= {"rank_doubts", "prefiller_doubts", "rank_still", "decode_still_ranks"}
    plain |= {"decode_groups", "decode_groups_down", "rank_at_barrier"}
    plain |= {"rank_draining", "prefiller_draining"}
    plain |= {"prefiller_direct_sequences", "pool_limit", "inflight_limit"}
    plain |= {"batch_limit", "queue_limit", "connection_limit"}
    plain |= {f"predictor_{name}" for name in ("active", "failed", "rows", "decile_rows")}
    for family in text_string_to_metric_families(metrics().render().decode()):
        name = family.name.removeprefix("balanceroute_")
        name += "_total" if family.type == "counter" else ""
        assert name.endswith(units) or name in plain, name


def test_our_writer_says_what_the_librarys_says() -> None:
    registry = CollectorRegistry()
    Counter("c", 'A "counter"\\\nof things.', ["x"], registry=registry).labels('1"\\\n2é').inc(2)
    Gauge("g", "Gauge.", registry=registry).set(-1e-300)
    Gauge("n", "NaN.", registry=registry).set(math.nan)
    Gauge("i", "Infinite.", ["way"], registry=registry).labels("up").set(math.inf)
    Summary("s", "Summary.", registry=registry).observe(0.1)
    LibraryHistogram("h", "Histogram.", ["y"], registry=registry).labels("a").observe(0.3)
    Info("v", "Info.", registry=registry).info({"version": "1"})
    Enum("e", "Enum.", states=["on", "off"], registry=registry).state("off")

    def families(page: bytes) -> list[tuple[str, ...]]:
        return [
            (
                *(family.name, family.type, family.documentation, sample.name),
                *(f"{label}={text}" for label, text in sorted(sample.labels.items())),
                repr(float(sample.value)),
            )
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    assert families(exposition.render(registry)) == families(generate_latest(registry))
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


# A running proxy exports what docs/appendix/metrics.md lists.


@served()
async def test_a_running_proxy_exports_nothing_else(site: Site) -> None:
    listed = script("reproduce.reference")
    answer = await site.post("/v1/completions", {"model": "tiny", "prompt": "t1", "max_tokens": 2})
    assert answer.status == 200
    known = listed.labels_by_family(listed.full_page())
    found = listed.labels_by_family((await site.get("/metrics")).body)
    assert len(found) > 60
    for name, (kind, meaning, labels) in found.items():
        if name.startswith("process_"):
            continue  # The client library's.
        assert known[name][:2] == (kind, meaning), name
        assert labels <= known[name][2], name


# Stages of a request, by the times of its record.


def record() -> RequestRecord:
    one = RequestRecord("r", "/v1/completions", 1, 0.0, stream=True)
    one.prefiller, one.rank = "http://p:1", "http://d:1"
    one.prefill_started_ns, one.prefilled_ns, one.admitted_ns = 2, 3, 4
    return one


def test_a_stage_begins_where_the_one_before_it_ends() -> None:
    one = record()
    one.first_token_ns = 5
    names = [(step.name, step.began_ns) for step in stages_of(one)]
    assert names == [("queue", 1), ("prefill", 2), ("pool", 3), ("transfer", 4), ("decode", 5)]


def test_a_first_token_of_an_earlier_binding_began_no_stage_of_the_last_one() -> None:
    one = record()
    one.admitted_ns, one.first_token_ns = 9, 5
    names = [(step.name, step.began_ns) for step in stages_of(one)]
    assert names == [("queue", 1), ("prefill", 2), ("pool", 3), ("decode", 9)]


def test_people_are_told_what_became_of_requests() -> None:
    subject = Metrics(lambda: [SNAPSHOT])
    subject.tenants.names = {"acme"}
    subject.aliases.worth = {"auto": AliasWorth(None, 1e6, {})}
    record = structs.replace(RECORD, tenant="acme", group="large", alias="auto", output_tokens=20)
    for change in (
        {},
        {"outcome": Outcome.UPSTREAM_ERROR, "status": 502},
        {"outcome": Outcome.UPSTREAM_ERROR, "status": 500, "tenant": "nobody", "group": "small"},
    ):
        subject.requests.ended(structs.replace(record, **change))
    assert subject.counts("") == Counts({"ok": 1, "upstream_error": 2}, 60)
    assert subject.counts("large") == Counts({"ok": 1, "upstream_error": 1}, 40)
    assert subject.counts("none") == Counts({}, 0)
    assert subject.tenants.counts() == {
        "acme": Counts({"ok": 1, "upstream_error": 1}, 40),
        "other": Counts({"upstream_error": 1}, 20),
    }
    assert subject.aliases.answers("auto") == {"large": (2, 1), "small": (1, 0)}
    assert subject.aliases.answers("other") == {}


@pytest.mark.parametrize(
    ("statuses", "down"),
    [
        (("up", "quarantined"), 0),
        (("quarantined", "quarantined"), 1),
        (("draining", "draining"), 0),
        (("draining", "quarantined"), 1),
        (("draining", "removed"), 0),
    ],
)
def test_a_group_that_is_drained_is_not_down(statuses: tuple[str, ...], down: int) -> None:
    ranks = [
        RankState(i, f"r{i}", status == "up", status, 0, 0, 0, 1, dp_group=0)
        for i, status in enumerate(statuses)
    ]
    subject = Metrics(lambda: [replace(SNAPSHOT, ranks=ranks)])
    assert value(subject, "decode_groups") == 1
    assert value(subject, "decode_groups_down") == down
    draining = [value(subject, "rank_draining", rank="0", name="r0")]
    assert draining == [int(statuses[0] == "draining")]

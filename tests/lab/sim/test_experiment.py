"""Policies side by side: means and standard errors, seeds, predictors, progress."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from tests.lab.sim.service_run import run

from balanceroute.predictors import NoPrediction, Oracle, Survival
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.files import save
from balanceroute.predictors.past import features_of
from balanceroute.proxy.core.admission import ADMISSIONS, AimdSettings
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId, StartPrefill
from balanceroute.proxy.core.policies import POLICIES, PolicySettings
from balanceroute.proxy.core.policies.oldest_first import OldestFirst, least_kv_with_room
from balanceroute.proxy.lab.service_levels import ServiceGroup, ServiceTargets
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import (
    FORECASTS,
    METRICS,
    Forecast,
    PolicyResult,
    forecast_called,
    make_simulation,
    run_experiment,
)
from balanceroute.proxy.lab.sim.recorder import Recorder
from balanceroute.proxy.lab.sim.report import hints, unending
from balanceroute.proxy.lab.sim.workload import Workload, split
from balanceroute.traces import TraceRequest

DEPLOYMENT = SimulatedDeployment(ranks=3, batch_limit=4, step_base_ns=1_000, step_ns_per_token=10.0)
SETTINGS = PolicySettings(horizon_steps=8)
_RNG = random.Random(5)
TRACE = [TraceRequest(2_500 * i, _RNG.randint(1, 60), _RNG.randint(1, 30)) for i in range(240)]
SURVIVAL = FORECASTS["survival"]


def experiment(
    policies: Sequence[str], *, segments: int = 2, forecast: Forecast = SURVIVAL, seed: int = 0
) -> list[PolicyResult]:
    workloads = split(TRACE, segments=segments, backlog=6)
    return list(run_experiment(DEPLOYMENT, workloads, policies, SETTINGS, forecast, seed=seed))


def repeatable(results: Iterable[PolicyResult]) -> list[object]:
    """Return all but the cost of decisions, which is real time."""
    return [
        (
            result.policy,
            {name: value for name, value in result.mean.items() if "dispatch" not in name},
            {name: value for name, value in result.stderr.items() if "dispatch" not in name},
            result.picture,
        )
        for result in results
    ]


def test_a_figure_is_the_mean_over_the_segments_with_its_standard_error() -> None:
    # A constant clock, so that decisions cost nothing and every figure can be compared.
    runs = [
        make_simulation(
            DEPLOYMENT, workload, "br-h", SETTINGS, SURVIVAL, seed="-", clock_ns=lambda: 0
        ).run()
        for workload in split(TRACE, segments=2, backlog=6)
    ]
    first, second = (run.metrics() for run in runs)
    (result,) = experiment(["br-h"])
    assert set(result.mean) == set(result.stderr) == set(METRICS)
    for name in METRICS:
        if "dispatch" not in name:
            a, b = getattr(first, name), getattr(second, name)
            assert result.mean[name] == pytest.approx((a + b) / 2)
            # Of two values the deviation is |a - b| / sqrt 2, and the error that over sqrt 2.
            assert result.stderr[name] == pytest.approx(abs(a - b) / 2)
    assert result.stderr["mean_imbalance_tokens"] > 0.0
    assert result.picture == runs[0].picture


def test_three_segments_have_the_textbook_standard_error() -> None:
    values = [
        make_simulation(DEPLOYMENT, workload, "jsq", SETTINGS, SURVIVAL, seed="-")
        .run()
        .metrics()
        .steps
        for workload in split(TRACE, segments=3, backlog=6)
    ]
    (result,) = experiment(["jsq"], segments=3)
    mean = sum(values) / 3
    variance = sum((value - mean) ** 2 for value in values) / 2
    assert result.mean["steps"] == pytest.approx(mean)
    assert result.stderr["steps"] == pytest.approx((variance / 3) ** 0.5)


def test_one_segment_has_no_standard_error() -> None:
    (result,) = experiment(["fifo"], segments=1)
    assert set(result.stderr.values()) == {0.0}


def test_the_same_seed_gives_the_same_results() -> None:
    assert repeatable(experiment(list(POLICIES))) == repeatable(experiment(list(POLICIES)))


def test_another_seed_changes_the_policies_that_draw_and_no_other() -> None:
    one, other = (repeatable(experiment(list(POLICIES), seed=seed)) for seed in (1, 2))
    changed = {name for name, a, b in zip(POLICIES, one, other, strict=True) if a != b}
    scores = {"s1-enhanced", "s2-enhanced", "s2-dynamic-waiting"}
    assert changed == {"random", "power-of-two"} | scores


def test_the_segments_of_a_run_draw_differently() -> None:
    (workload,) = split(TRACE, segments=1, backlog=6)
    drawn, fixed = run_experiment(
        DEPLOYMENT, [workload, workload], ["random", "jsq"], SETTINGS, SURVIVAL
    )
    assert drawn.stderr["mean_imbalance_tokens"] > 0.0
    assert fixed.stderr["mean_imbalance_tokens"] == 0.0


def test_the_survival_predictor_begins_with_the_history_of_its_segment() -> None:
    second = split(TRACE, segments=2, backlog=6)[1]
    known, unknown = (
        repeatable(run_experiment(DEPLOYMENT, [workload], ["jsq", "br-h"], SETTINGS, SURVIVAL))
        for workload in (second, replace(second, history=[]))
    )
    assert known[0] == unknown[0]
    assert known[1] != unknown[1]


def test_a_result_does_not_depend_on_what_else_is_compared() -> None:
    (alone,) = repeatable(experiment(["random"]))
    assert repeatable(experiment(["jsq", "random", "br-h"]))[1] == alone


def test_predictors_matter_to_br_h_alone() -> None:
    policies = ["jsq", "br-0", "br-h"]
    none, survival, oracle = (
        repeatable(experiment(policies, forecast=FORECASTS[name]))
        for name in ("none", "survival", "oracle")
    )
    assert none[:2] == survival[:2] == oracle[:2]
    assert none[2] != survival[2] != oracle[2] != none[2]


def test_progress_is_told_step_by_step_in_order() -> None:
    reports: list[tuple[str, int]] = []
    list(
        run_experiment(
            DEPLOYMENT,
            split(TRACE, segments=3, rate=1.0),
            ["jsq", "br-0"],
            SETTINGS,
            SURVIVAL,
            progress=lambda policy, requests: reports.append((policy, requests)),
        )
    )
    assert [policy for policy, _ in groupby(reports, key=itemgetter(0))] == ["jsq", "br-0"]
    for policy in ("jsq", "br-0"):
        steps = [finished for name, finished in reports if name == policy]
        assert sum(steps) == 240
        assert max(steps) <= DEPLOYMENT.ranks * DEPLOYMENT.batch_limit


def test_the_figures_of_a_policy_are_there_before_the_next_one_begins() -> None:
    begun: list[str] = []
    results = run_experiment(
        DEPLOYMENT,
        split(TRACE, segments=2, backlog=6),
        ["jsq", "br-0"],
        SETTINGS,
        SURVIVAL,
        progress=lambda policy, _: begun.append(policy),
    )
    assert next(results).policy == "jsq"
    assert set(begun) == {"jsq"}
    assert [result.policy for result in results] == ["br-0"]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'psychic'; known: random, "):
        experiment(["psychic"])


def test_predictors_know_the_limits_of_a_trace_as_they_do_in_the_proxy() -> None:
    def figures(trace: Sequence[TraceRequest], name: str) -> list[object]:
        workloads = split(trace, segments=1, backlog=6)
        return repeatable(
            run_experiment(DEPLOYMENT, workloads, ["br-h"], SETTINGS, FORECASTS[name])
        )

    limited = [replace(one, max_tokens=one.output_tokens) for one in TRACE]
    oracle = figures(TRACE, "oracle")
    assert figures(limited, "none") == oracle
    assert figures(TRACE, "none") != oracle


# Predictors by name or file: each run has its own, which knows what came before its segment.


FORECAST = PolicySettings()
PAST = [TraceRequest(number, 100, 5 + number % 3, (number % 2,)) for number in range(60)]
WORKLOAD = Workload([TraceRequest(0, 100, 9, (0,))], PAST)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("survival", Survival),
        ("exact-match", ExactMatch),
        ("oracle", Oracle),
        ("none", NoPrediction),
    ],
)
def test_every_name_makes_its_own_kind_anew_for_each_run(name: str, kind: type) -> None:
    forecast = forecast_called(name)
    one, other = (forecast(WORKLOAD, FORECAST) for _ in range(2))
    assert type(one) is type(other) is kind
    assert one is not other


def test_gbdt_needs_a_past_to_train_on() -> None:
    with pytest.raises(ConfigError, match=r"too few to train on, .* --known N"):
        FORECASTS["gbdt"](Workload(WORKLOAD.requests, []), FORECAST)


@pytest.mark.parametrize("name", ["survival", "exact-match"])
def test_the_past_is_known(name: str) -> None:
    predictor = FORECASTS[name](WORKLOAD, FORECAST)
    predictor.begin(RequestId(0), features_of(WORKLOAD.requests[0]))
    row = predictor.survival([RequestId(0)], np.array([0]), 8)[0]
    assert row[4] > 0.9
    assert row[8] < 0.2


def test_a_file_is_read_for_every_run(tmp_path: Path) -> None:
    path = tmp_path / "trained.json"
    save(path, Survival([4] * 50))
    forecast = forecast_called(str(path))
    one, other = (forecast(WORKLOAD, FORECAST) for _ in range(2))
    for _ in range(50):
        one.observe(RequestId(0), 90)
    ask = [RequestId(1)], np.array([0]), 10
    assert one.survival(*ask)[0, 10] > 0.1
    assert other.survival(*ask)[0, 10] == 0.0


def test_what_is_neither_a_name_nor_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'crystal' is no file, and none of survival, exact"):
        forecast_called("crystal")


def test_thirds_tell_apart_and_not_more() -> None:
    played = [TraceRequest(0, 100, output) for output in (5, 50, 500)]
    past = [TraceRequest(0, 100, output) for output in (4, 6, 40, 60, 400, 600) * 50]
    predictor = FORECASTS["thirds"](Workload(played, past), FORECAST)
    requests = [RequestId(number) for number in range(3)]
    for request, traced in zip(requests, played, strict=True):
        predictor.begin(request, features_of(traced))
    survival = predictor.survival(requests, np.zeros(3, np.int64), 450)
    assert survival[0, [3, 10]] == pytest.approx([1.0, 0.0], abs=0.1)
    assert survival[1, [30, 100]] == pytest.approx([1.0, 0.0], abs=0.1)
    # Half of the long third is longer, whatever this one's own output.
    assert survival[2, 450] == pytest.approx(0.5, abs=0.1)


# Hints: said where policies could not differ, and only there.


REQUESTS = [TraceRequest(i, 100 * (1 + i % 2), 5) for i in range(10)]


def hinted(*running: float, kv_capacity: int | None = None) -> list[str]:
    results = [
        PolicyResult("p", dict.fromkeys(METRICS, 0.0) | {"mean_running": mean}, {}, [])
        for mean in running
    ]
    deployment = SimulatedDeployment(ranks=2, batch_limit=50, rank_kv_tokens=kv_capacity)
    return hints(results, deployment, [Workload(REQUESTS, [])])


def test_ranks_that_were_nearly_empty_are_told() -> None:
    (hint,) = hinted(3.0, 9.0)
    assert "9.0 % full" in hint
    assert "--backlog 64" in hint
    assert hinted(3.0, 10.0) == []


@pytest.mark.parametrize(("capacity", "count"), [(99, 10), (100, 5), (199, 5), (200, 0)])
def test_prompts_that_fit_no_rank_are_reported_if_most_do_not(capacity: int, count: int) -> None:
    found = hinted(50.0, kv_capacity=capacity)
    assert [f"{count} of 10 prompts" in hint for hint in found] == ([True] if count > 5 else [])


def test_answers_without_end_are_told() -> None:
    assert unending([TraceRequest(0, 1, 1_000_000)]) is None
    hint = unending([TraceRequest(0, 1, 10**9), TraceRequest(0, 1, 5)])
    assert hint is not None
    assert hint.startswith("1 answers of more than 1,000,000 tokens, the longest 1,000,000,000")


# The scheduler's queue orders in the simulator.


# All at once; by id: a work of 250, 1,750, 300 and 46 KV tokens times steps.
QUEUED = [TraceRequest(0, 20, 10), TraceRequest(0, 10, 50), TraceRequest(0, 5, 20)]
QUEUED.append(TraceRequest(0, 22, 2))


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("edf", [0, 1, 2, 3]), ("srpt", [0, 3, 2, 1])]
)
def test_the_order_decides_whose_prefill_starts(order: str, expected: list[int]) -> None:
    started: list[int] = []
    deployment = SimulatedDeployment(
        1, 4, prefill=PrefillModel(servers=1, base_ns=500, ns_per_token=20.0), queue_order=order
    )
    workload = Workload(QUEUED, [], backlog=4)
    predictor = FORECASTS["oracle"](workload, PolicySettings())
    Simulation(
        deployment,
        workload,
        OldestFirst(least_kv_with_room, slots_beyond_batch=0),
        predictor,
        observer=lambda _event, actions, _now_ns: started.extend(
            action.request for action in actions if isinstance(action, StartPrefill)
        ),
    ).run()
    # The first one starts as it arrives.
    assert started == expected


def test_an_order_that_predicts_gets_its_predictor_with_any_policy() -> None:
    rng = random.Random(5)
    requests = [TraceRequest(0, rng.randint(1, 60), rng.randint(1, 30)) for _ in range(120)]
    workload, settings = Workload(requests, [], backlog=16), PolicySettings()
    medians_s = []
    for order in ("fcfs", "srpt"):
        deployment = SimulatedDeployment(2, 4, queue_order=order)
        simulation = make_simulation(
            deployment, workload, "fifo", settings, FORECASTS["oracle"], seed="0"
        )
        medians_s.append(simulation.run().metrics().ttft_s_p50)
    assert medians_s[1] < 0.5 * medians_s[0]


# Limits on what is let in and on what is in flight, in the simulator.


MS = 1_000_000
FIXED = AimdSettings(cap_min=3, cap_max=3, cap_initial=3)


def run_400(deployment: SimulatedDeployment, *, deadline_ns: int | None = None) -> Recorder:
    """Run 400 requests, half as many again as the ranks can do with three each."""
    requests = [
        TraceRequest(40 * MS * number, 100, 20, deadline_ns=deadline_ns) for number in range(400)
    ]
    return run(deployment, requests)


def test_no_more_run_than_the_limit_says() -> None:
    free = run_400(SimulatedDeployment(2, 16)).metrics().mean_running
    assert free > 12
    assert run_400(SimulatedDeployment(2, 16, aimd=FIXED)).metrics().mean_running == pytest.approx(
        6, abs=0.1
    )


def test_a_wait_before_prefill_ends_with_its_time_to_live() -> None:
    unlimited = run_400(SimulatedDeployment(2, 16, aimd=FIXED)).metrics()
    limited = run_400(SimulatedDeployment(2, 16, aimd=FIXED, queue_ttl_ns=500 * MS)).metrics()
    assert unlimited.ttft_s_max > 3
    assert limited.ttft_s_max < 0.6


def test_the_limit_follows_the_time_to_first_token() -> None:
    settings = AimdSettings(target_ns=100 * MS, cap_min=1, cap_max=16, cap_initial=1)
    simulated = run_400(SimulatedDeployment(2, 16, aimd=settings, queue_ttl_ns=50 * MS)).metrics()
    assert simulated.mean_running > 3


@pytest.mark.parametrize("early", [False, True])
def test_the_limit_follows_the_token_that_clients_get(*, early: bool) -> None:
    settings = AimdSettings(target_ns=100 * MS, cap_min=1, cap_max=400, cap_initial=300)
    prefill = PrefillModel(2, 10 * MS, 0.0)
    deployment = SimulatedDeployment(
        1, 4, aimd=settings, prefill=prefill, probe_limit=4, early_tokens=early
    )
    recorder = run(deployment, [TraceRequest(50 * MS * n, 100, 20) for n in range(400)])
    service = recorder.service
    assert service is not None
    # The rank is overloaded, and whose clients have the prefiller's token do not see that.
    assert (recorder.metrics().ttft_s_p99 < 0.05) == early
    assert (min(limit for _, limit in service.limits) < 300) == (not early)


def test_the_hopeless_are_refused_instead_of_expiring() -> None:
    deployment = SimulatedDeployment(2, 16, aimd=FIXED)
    early = SimulatedDeployment(
        2, 16, aimd=FIXED, admission=partial(ADMISSIONS["early"], 10**6), expects_first_tokens=True
    )
    figures = {}
    for name, one in (("bounded", deployment), ("early", early)):
        service = run_400(one, deadline_ns=1_000 * MS).service
        assert service is not None
        figures[name] = service.figures(ServiceTargets())[ServiceGroup("", 0)]
    assert figures["bounded"].refused == 0
    assert figures["early"].refused > 0.2 * figures["early"].requests
    assert figures["early"].unserved < 0.5 * figures["bounded"].unserved

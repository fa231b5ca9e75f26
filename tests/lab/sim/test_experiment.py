"""Policies side by side: means and standard errors, seeds, predictors, progress."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import POLICIES, PolicySettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import (
    FORECASTS,
    METRICS,
    Forecast,
    PolicyResult,
    make_simulation,
    run_experiment,
)
from balanceroute.proxy.lab.sim.workload import split
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

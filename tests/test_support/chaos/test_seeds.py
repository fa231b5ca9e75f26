"""The whole proxy under faults: drawn from seeds, in virtual time, and the same each time."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.support.chaos.faults import Act
from tests.support.chaos.plan import VERSIONS, Weather, draw_plan
from tests.support.chaos.trial import Summary, run_plan, run_seed

# Of every weather, and of every connector.
SEEDS = range(12)
REQUESTS = 40


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_violates_nothing(seed: int) -> None:
    report = run_seed(seed, requests=REQUESTS)
    assert not report.violations, f"seed {seed}"
    assert sum(report.outcomes.values()) > 0


@pytest.mark.parametrize("seed", range(40, 43))
def test_a_seed_violates_nothing_with_all_of_locality(seed: int) -> None:
    report = run_seed(seed, requests=REQUESTS, near=True)
    assert not report.violations, f"seed {seed}"
    assert sum(report.outcomes.values()) > 0


def test_locality_is_forced_in_every_seed() -> None:
    plans = [draw_plan(seed, requests=REQUESTS, near=True) for seed in range(60)]
    versions = [set(plan.world.engines.engine_versions.values()) for plan in plans]
    assert all(VERSIONS[1] in one for one in versions)
    assert {plan.world.flags["prefill_choice"] for plan in plans} == {"prefix-aware"}
    assert all(plan.world.flags["local_prefill_tokens"] for plan in plans)
    assert all(plan.world.engines.prefix_cache_tokens for plan in plans)
    assert any(one.version for plan in plans for one in plan.injections)
    # Most prompts begin as others of their conversation do, and not all are of a named one.
    asked = [request for plan in plans for request in plan.requests]
    assert sum(b"talk" in request.body for request in asked) > 0.6 * len(asked)
    assert {bool(request.session) for request in asked} == {False, True}


def test_a_pair_of_two_versions_is_found() -> None:
    plan = next(
        plan
        for seed in range(60)
        for plan in [draw_plan(seed, requests=REQUESTS, near=True)]
        if plan.weather is Weather.CALM and plan.world.engines.connector == "nixl"
    )
    flags = {**plan.world.flags, "check_pairs": False, "local_prefill_tokens": None}
    violations = run_plan(replace(plan, world=replace(plan.world, flags=flags))).violations
    assert any(violation.startswith("pairs: ") for violation in violations)


def test_the_seeds_are_of_every_kind() -> None:
    plans = [draw_plan(seed, requests=REQUESTS) for seed in range(60)]
    assert {plan.weather for plan in plans} == set(Weather)
    acts = {injection.act for plan in plans for injection in plan.injections}
    kinds = {injection.name for plan in plans for injection in plan.injections}
    assert acts == set(Act)
    assert len(kinds) > 60


def test_a_plan_is_decided_by_its_seed() -> None:
    assert draw_plan(3, requests=REQUESTS) == draw_plan(3, requests=REQUESTS)
    assert draw_plan(3, requests=REQUESTS) != draw_plan(4, requests=REQUESTS)


def test_a_seed_happens_again_in_another_process() -> None:
    # With another hash of every string, and other addresses of every object.
    program = (
        "from tests.support.chaos.trial import run_seed\n"
        "junk = [bytearray(size) for size in range({junk})]\n"
        "print(*(run_seed(seed, requests=15).digest for seed in (0, 5, 23, 54)))\n"
        "print(run_seed(40, requests=15, near=True).digest)\n"
    )
    digests = [
        subprocess.run(
            [sys.executable, "-c", program.format(junk=junk)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for hash_seed, junk in (("1", 10), ("77", 3000))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 5


def test_the_summary_names_the_seed_of_a_violation() -> None:
    report = run_seed(0, requests=5)
    report.violations.append("something")
    summary = Summary()
    summary.add(report)
    assert "  seed 0: something" in list(summary.lines())

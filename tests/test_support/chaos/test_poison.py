"""Requests that kill engines, as a fault of drawn runs."""

import pytest
from tests.extended import usually
from tests.support.chaos.plan import draw_plan
from tests.support.chaos.poison import When
from tests.support.chaos.trial import TrialReport, run_plan

from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import Suspects

REQUESTS = 30
# With such requests, of every kind.
SEEDS = (7, 54, 65)


def run(seed: int) -> TrialReport:
    plan = draw_plan(seed, requests=REQUESTS)
    assert plan.poisons
    return run_plan(plan)


def test_such_requests_are_drawn_of_every_kind() -> None:
    drawn = [one for seed in range(60) for one in draw_plan(seed, requests=REQUESTS).poisons]
    assert {one.when for one in drawn} == set(When)
    assert any(one.again_s for one in drawn)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_engines_die_of_one_at_most(seed: int) -> None:
    report = run(seed)
    assert not report.violations
    assert sum(n for kind, n in report.faults.items() if "kills its engine" in kind) >= 2


@pytest.mark.parametrize("seed", usually(SEEDS[:1], SEEDS))
def test_a_proxy_that_counts_no_deaths_is_found_out(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suspects, "died", lambda *_: None)
    assert any("engines died of" in one for one in run(seed).violations)


def test_a_copy_that_nobody_calls_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = draw_plan(400, requests=100)
    assert not run_plan(plan).violations
    monkeypatch.setattr(Session, "prompt_refused", lambda _: None)
    assert any("3 engines died of" in one for one in run_plan(plan).violations)

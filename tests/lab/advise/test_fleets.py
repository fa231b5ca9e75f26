"""The smallest fleet that keeps targets: it does, and one instance less of either role does not."""

import random

import numpy as np
import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.advise.fleets import Fleets, FleetTrial, Slo, beyond, plan
from balanceroute.proxy.lab.advise.report import plan_lines
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import forecast_called
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

DEPLOYMENT = SimulatedDeployment(
    ranks=1,
    batch_limit=8,
    step_base_ns=20_000_000,
    step_ns_per_token=1_000.0,
    prefill=PrefillModel(1, 20_000_000, 50_000.0),
    probe_limit=None,
)


def load(requests: int = 400, per_second: float = 20.0) -> Workload:
    rng, now_ns, made = random.Random(3), 0.0, []
    for number in range(requests):
        now_ns += rng.expovariate(per_second / 1e9)
        prompt, output = rng.randint(100, 3_000), 5 + round(rng.expovariate(1 / 25))
        made.append(TraceRequest(int(now_ns), prompt, output, tenant=f"t{number % 2}"))
    return Workload(made, ())


def fleets(workload: Workload | None = None) -> Fleets:
    return Fleets(DEPLOYMENT, workload or load(), "br-0", forecast_called("none"), seed=0)


SLO = Slo(ttft_p99_s=0.8, tpot_p95_s=0.045)


def test_the_chosen_fleet_keeps_the_targets_and_a_smaller_one_does_not() -> None:
    tried = fleets()
    found = plan(tried, SLO, most=64)
    assert found.chosen.meets(SLO)
    assert found.chosen.prefillers > 1
    assert found.chosen.ranks > 1
    sizes = [(one.prefillers, one.ranks) for one in found.fewer]
    assert sizes == [
        (found.chosen.prefillers - 1, found.chosen.ranks),
        (found.chosen.prefillers, found.chosen.ranks - 1),
    ]
    assert not any(one.meets(SLO) for one in found.fewer)
    told = list(plan_lines(found, SLO, list(tried.trials.values()), None))
    assert sum(line.endswith(" <") for line in told) == 1
    assert any(line.startswith("wanted: ") for line in told)


def test_a_trial_that_cannot_meet_the_targets_any_more_is_stopped() -> None:
    sizes = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 3)]
    whole, stopping = fleets(), fleets()
    ended = [whole.trial(*size, Slo()) for size in sizes]
    stopped = [stopping.trial(*size, SLO) for size in sizes]
    verdicts = [one.meets(SLO) for one in ended]
    assert [one.meets(SLO) for one in stopped] == verdicts
    assert sum(one.stopped for one in ended) == 0
    assert sum(one.stopped for one in stopped) == verdicts.count(False) > 0


@pytest.mark.parametrize("percent", [95, 99])
@pytest.mark.parametrize("values", [1, 2, 20, 99, 100, 101, 1_000])
def test_so_many_beyond_a_limit_put_the_percentile_beyond_it(values: int, percent: int) -> None:
    many = beyond(values, percent)
    assert np.percentile([0.0] * (values - many) + [1.0 + 1e-9] * many, percent) > 1.0
    # With values that are not seen yet there are never more that could come.
    assert all(beyond(fewer, percent) <= many for fewer in range(1, values))
    # One less decides nothing.
    assert np.percentile([0.0] * (values - many + 1) + [1.0] * (many - 1), percent) < 1.0


def test_figures_of_a_stopped_run_are_those_until_then() -> None:
    workload = load()
    trial = fleets(workload).trial(2, 2, Slo(ttft_p99_s=0.01))
    whole = fleets(workload).trial(2, 2)
    assert trial.stopped
    assert not whole.stopped
    # The same load on the same machines.
    assert trial.prefill_work == whole.prefill_work
    assert trial.idle == pytest.approx(whole.idle, abs=0.1)


@pytest.mark.slow
def test_every_smaller_fleet_misses_too() -> None:
    """The search takes for granted that fewer instances are not better; here that is looked at."""
    tried = fleets()
    chosen = plan(tried, SLO, most=64).chosen
    for prefillers in range(1, chosen.prefillers + 1):
        for ranks in range(1, chosen.ranks + 1):
            trial = tried.trial(prefillers, ranks)
            assert trial.meets(SLO) == (trial is chosen)


def test_only_one_target_may_be_set() -> None:
    found = plan(fleets(), Slo(tpot_p95_s=0.045), most=64).chosen
    assert found.prefillers == fleets().least[0]
    assert found.meets(Slo(tpot_p95_s=0.045))


def test_a_load_that_one_of_each_serves_has_nothing_fewer() -> None:
    found = plan(fleets(load(per_second=0.5)), Slo(5.0, 1.0), most=4)
    assert (found.chosen.prefillers, found.chosen.ranks, found.fewer) == (1, 1, [])


def test_a_target_that_no_fleet_can_keep_is_refused_without_a_trial() -> None:
    tried = fleets()
    with pytest.raises(
        ConfigError, match=r"--ttft-p99 is 0\.05, and a request that is alone .* takes 0\.18"
    ):
        plan(tried, Slo(ttft_p99_s=0.05), most=64)
    with pytest.raises(ConfigError, match=r"--tpot-p95 is 0\.01, and a request .* takes 0\.02 s"):
        plan(tried, Slo(tpot_p95_s=0.01), most=64)
    assert not tried.trials


def test_too_few_to_be_tried_are_told_with_how_near_they_came() -> None:
    with pytest.raises(
        ConfigError, match="no fleet of up to 1 instances of each role meets the targets"
    ):
        plan(fleets(), SLO, most=1)


def test_a_load_at_one_instant_is_refused() -> None:
    with pytest.raises(ConfigError, match="arrive at once"):
        fleets(Workload([TraceRequest(0, 10, 10)] * 30, ()))


def test_what_bounds_a_fleet_is_the_verdict_of_the_audit() -> None:
    def bound(prefill_work: float, slots: float, idle: float) -> str:
        return FleetTrial(2, 2, 1.0, 1.0, 0.0, 0.0, idle, prefill_work, slots).verdict.bound.value

    assert bound(1.9, 0.3, 0.0) == "prefill"
    assert bound(1.0, 0.95, 0.0) == "decode"
    assert bound(1.0, 0.95, 0.3) == "barrier"
    assert bound(1.0, 0.3, 0.3) == "nothing"

"""What a fleet asks for by its own load: near the simulator's smallest fleet, whatever fleet it is."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from balanceroute.predictors.base import NoPrediction
from balanceroute.proxy.capacity import Bound, FleetSample, LoadFollower, sample_of
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestArrived
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.lab.advise.fleets import Fleets, FleetTrial, Slo, plan
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
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
SLO = Slo(ttft_p99_s=1.0, tpot_p95_s=0.05)
RATE, SECONDS, SETTLED_S = 10.0, 240.0, 90.0


@dataclass(frozen=True)
class Asked:
    """What was asked for at a time."""

    time_s: float
    bound: Bound
    prefillers: int
    ranks: int
    flips: int


def load(rate: Callable[[float], float], seconds: float = SECONDS) -> Workload:
    rng, now_s, made = random.Random(3), 0.0, []
    while now_s < seconds:
        now_s += rng.expovariate(rate(now_s))
        prompt, output = rng.randint(100, 3_000), 20 + round(rng.expovariate(1 / 80))
        made.append(TraceRequest(int(now_s * 1e9), prompt, output))
    return Workload(made, ())


def follow(workload: Workload, prefillers: int, ranks: int) -> list[Asked]:
    """Run a fleet in virtual time; return what it asked for, each second while requests come."""
    follower, asked = LoadFollower(), list[Asked]()
    arrived, next_s = 0, 1.0
    end_s = workload.arrivals_ns()[-1] / 1e9

    def observe(event: object, actions: object, now_ns: int) -> None:
        nonlocal arrived, next_s
        del actions
        arrived += isinstance(event, RequestArrived)
        now_s = now_ns / 1e9
        if not next_s <= now_s <= end_s:
            return
        next_s = now_s + 1.0
        follower.look(
            sample_of(
                simulation.scheduler,
                time_s=now_s,
                arrived=arrived,
                prefillers=[PrefillerId(one) for one in range(prefillers)],
                ranks=[RankId(one) for one in range(ranks)],
                kv_tokens=None,
                idle=0.0,
            )
        )
        if follower.prefillers is not None and follower.ranks is not None:
            wanted = follower.prefillers, follower.ranks
            asked.append(Asked(now_s, follower.bound, *wanted, follower.flips))

    prefill = DEPLOYMENT.prefill
    assert prefill is not None
    fleet = replace(DEPLOYMENT, ranks=ranks, prefill=replace(prefill, servers=prefillers))
    inputs = PolicyInputs(
        ranks, fleet.batch_limit, PolicySettings(), random.Random(1), NoPrediction()
    )
    policy = make_policy("br-0", inputs)
    simulation = Simulation(fleet, workload, policy, NoPrediction(), observer=observe)
    simulation.run()
    return asked


@cache
def smallest() -> tuple[Fleets, FleetTrial]:
    """Return the smallest fleet that keeps the targets under the usual load."""
    fleets = Fleets(DEPLOYMENT, load(lambda _: RATE), "br-0", forecast_called("none"), seed=0)
    return fleets, plan(fleets, SLO, most=32).chosen


# By how many instances a fleet differs from the smallest one, and what bounds it then.
@pytest.mark.parametrize(
    ("prefillers", "ranks", "bound"),
    [
        pytest.param(0, 0, {Bound.NOTHING}, marks=pytest.mark.extended),
        (2, 6, {Bound.NOTHING}),
        (-1, 0, {Bound.PREFILL}),
        pytest.param(0, -2, {Bound.DECODE}, marks=pytest.mark.extended),
        (2, -3, {Bound.DECODE}),
    ],
)
def test_any_fleet_asks_for_the_one_that_the_simulator_finds(
    prefillers: int, ranks: int, bound: set[Bound]
) -> None:
    _, best = smallest()
    asked = follow(load(lambda _: RATE), best.prefillers + prefillers, best.ranks + ranks)
    settled = [one for one in asked if one.time_s >= SETTLED_S]
    near = [
        abs(one.prefillers - best.prefillers) <= 1 and abs(one.ranks - best.ranks) <= 1
        for one in settled
    ]
    assert len(settled) > 140
    assert sum(near) >= 0.95 * len(near)
    assert {one.bound for one in settled[-100:]} == bound


def test_the_fleet_that_is_asked_for_keeps_the_targets_and_one_less_does_not() -> None:
    fleets, best = smallest()
    short = follow(load(lambda _: RATE), best.prefillers - 1, best.ranks - 2)[-1]
    assert fleets.trial(short.prefillers, short.ranks, SLO).meets(SLO)
    assert not fleets.trial(short.prefillers - 1, short.ranks, SLO).meets(SLO)
    assert not fleets.trial(short.prefillers, short.ranks - 1, SLO).meets(SLO)


def test_a_wrong_ratio_is_mended_by_flips() -> None:
    _, best = smallest()
    last = follow(load(lambda _: RATE), best.prefillers + 3, best.ranks - 3)[-1]
    assert last.flips == 3
    last = follow(load(lambda _: RATE), best.prefillers - 1, best.ranks + 6)[-1]
    assert last.flips == -1


def test_a_ramp_is_followed_and_not_taken_back() -> None:
    asked = follow(load(lambda time_s: 4.0 + 16.0 * time_s / SECONDS), 5, 14)
    ranks = [one.ranks for one in asked if one.time_s >= SETTLED_S]
    assert ranks == sorted(ranks)
    assert ranks[-1] - ranks[0] >= 3
    assert len(set(ranks)) == ranks[-1] - ranks[0] + 1  # One at a time.


def test_a_burst_is_answered_at_once_and_forgotten_late() -> None:
    quiet, loud, length = 8.0, 25.0, 20.0
    asked = follow(load(lambda t: loud if 120 < t < 120 + length else quiet, 400.0), 6, 14)
    by_time = {int(one.time_s): one.ranks for one in asked}
    before, after = by_time[118], max(ranks for t, ranks in by_time.items() if 120 < t < 150)
    assert after > before
    assert by_time[250] == after
    assert by_time[395] == before
    changes = sum(a.ranks != b.ranks for a, b in pairwise(asked))
    assert changes <= 12


def sample(time_s: float, **changes: Any) -> FleetSample:
    usual = FleetSample(
        time_s,
        prefillers=4,
        ranks=4,
        batch=10,
        busy=1,
        arrived=int(10 * time_s),
        requests=20,
        before=1,
        running=20,
        kv_share=0.2,
        idle=0.0,
    )
    return replace(usual, **changes)


def judged(**changes: Any) -> LoadFollower:
    follower = LoadFollower()
    for second in range(60):
        follower.look(sample(float(second), **changes))
    return follower


def test_kv_memory_and_the_barrier_bound_a_fleet_too() -> None:
    assert judged().bound is Bound.NOTHING
    memory = judged(kv_share=0.95)
    assert (memory.bound, memory.ranks) == (Bound.MEMORY, 5)
    assert judged(running=40, idle=0.3).bound is Bound.BARRIER
    assert judged(running=40, idle=0.01).bound is Bound.DECODE
    # What KV caches fill before the slots are used counts.
    assert judged(kv_share=0.8).ranks == 4
    assert judged().ranks == 3


def test_what_bounds_changes_only_once_it_has_held() -> None:
    follower = LoadFollower()
    seen = []
    for second in range(400):
        running = 40 if 100 <= second < 112 or second >= 200 else 4
        follower.look(sample(float(second), running=running))
        seen.append(follower.bound)
    assert set(seen[:200]) == {Bound.NOTHING}
    assert seen[-1] is Bound.DECODE
    assert sum(a is not b for a, b in pairwise(seen)) == 1


def test_a_fleet_without_engines_is_asked_nothing() -> None:
    follower = LoadFollower()
    for second in range(5):
        follower.look(sample(float(second), prefillers=0))
        follower.look(sample(float(second), ranks=0))
    assert (follower.prefillers, follower.ranks, follower.bound) == (None, None, Bound.NOTHING)

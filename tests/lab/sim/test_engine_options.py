"""Engines that are not plain: speeds, batches, speculative decoding, pauses."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import Survival
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import (
    DecodeFleet,
    SimulatedEngineOptions,
    Speculation,
    paused,
)
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

BASE_NS, PER_TOKEN_NS = 1_000, 10.0


def fleet(*, ranks: int = 2, batch_limit: int = 4, **options: object) -> DecodeFleet:
    return DecodeFleet(
        ranks=ranks,
        batch_limit=batch_limit,
        step_base_ns=BASE_NS,
        step_ns_per_token=PER_TOKEN_NS,
        options=SimulatedEngineOptions(**options),  # type: ignore[arg-type]
    )


def submit(engine: DecodeFleet, request: int, rank: int, *, kv: int, output: int = 50) -> None:
    engine.submit(RequestId(request), RankId(rank), kv_tokens=kv, output_tokens=output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_speeds": (1.0, 0.0)}, "rank_speeds has 0.0, must be from 0.001 to 1000"),
        ({"rank_speeds": (float("nan"),)}, "rank_speeds has nan"),
        ({"rank_batches": (4, 0)}, "rank_batches has 0"),
        ({"tokens_per_step": 0.5}, "tokens_per_step has 0.5, must be from 1 to 64"),
        ({"pause_above": 0.0}, "pause_above has 0.0"),
    ],
)
def test_a_value_out_of_range_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulatedEngineOptions(**options)  # type: ignore[arg-type]


def test_a_slow_rank_may_set_the_step_with_fewer_tokens() -> None:
    engine = fleet(ranks=3, rank_speeds=(1.0, 0.5))
    for request, kv in enumerate((150, 100, 120)):
        submit(engine, request, request, kv=kv)
    engine.join()
    assert engine.begin_step() == BASE_NS + 2_000
    assert engine.step_loads == [150, 200, 120]
    assert engine.loads == [150, 100, 120]


def test_each_rank_has_its_own_batch_limit() -> None:
    engine = fleet(ranks=3, rank_batches=(1, 3))
    for request in range(12):
        submit(engine, request, request % 3, kv=10)
    assert len(engine.join()) == 1 + 3 + 1


# Speculative decoding.


@pytest.mark.parametrize("mean", [1.01, 1.5, 2.0, 3.0, 4.7])
def test_speculation_emits_as_many_tokens_as_asked_on_average(mean: float) -> None:
    speculation = Speculation(mean, seed=3)
    drawn = [speculation.draw(RequestId(number % 50)) for number in range(20_000)]
    assert min(drawn) == 1
    assert max(drawn) <= 1 + 2 * mean
    assert fmean(drawn) == pytest.approx(mean, rel=0.02)


def test_draws_depend_on_the_seed_and_the_request_and_not_on_other_requests() -> None:
    def drawn(seed: int, request: int, others: int) -> list[int]:
        speculation, found = Speculation(3.0, seed), []
        for _ in range(30):
            for other in range(others):
                speculation.draw(RequestId(100 + other))
            found.append(speculation.draw(RequestId(request)))
        return found

    assert drawn(0, 1, 0) == drawn(0, 1, 5)
    assert len({tuple(drawn(*which)) for which in ((0, 1, 0), (0, 2, 0), (1, 1, 0))}) == 3


def test_a_request_emits_its_output_and_no_more_however_many_are_accepted() -> None:
    engine = fleet(tokens_per_step=4.0)
    submit(engine, 0, 0, kv=100, output=23)
    submit(engine, 1, 1, kv=10, output=60)
    engine.join()
    emitted = steps = 0
    while emitted < 23:
        assert engine.loads[0] == 100 + emitted
        engine.begin_step()
        emitted += engine.emissions[RequestId(0)]
        finished, _ = engine.end_step()
        assert (RequestId(0) in finished) == (emitted == 23)
        steps += 1
    assert steps < 23
    assert engine.loads[0] == 0


def test_a_request_withdrawn_in_a_step_emits_nothing() -> None:
    engine = fleet(tokens_per_step=4.0)
    submit(engine, 0, 0, kv=100)
    submit(engine, 1, 0, kv=10)
    engine.join()
    engine.begin_step()
    engine.withdraw(RequestId(0))
    others = engine.emissions[RequestId(1)]
    engine.end_step()
    assert engine.loads[0] == 10 + others


# Pauses.

BATCHES = st.lists(st.lists(st.integers(1, 60), max_size=4), min_size=2, max_size=4)


def rate(batches: list[list[int]], base_ns: int) -> float:
    loads = [sum(batch) for batch in batches]
    return sum(map(len, batches)) / (base_ns + PER_TOKEN_NS * max(loads))


@given(BATCHES, st.sampled_from([10, 300, 3_000]))
def test_each_pause_is_the_best_of_the_heaviest_rank_and_the_last_was_worth_it(
    loads: list[list[int]], base_ns: int
) -> None:
    numbered = [
        {RequestId(10 * rank + place): load for place, load in enumerate(batch)}
        for rank, batch in enumerate(loads)
    ]
    stopped = paused(
        numbered, step_base_ns=base_ns, step_ns_per_token=PER_TOKEN_NS, pause_above=0.1
    )
    left = [dict(batch) for batch in numbered]

    def without(request: RequestId) -> float:
        tried = [[v for one, v in batch.items() if one != request] for batch in left]
        return rate(tried, base_ns)

    def heaviest() -> int:
        sums = [sum(batch.values()) for batch in left]
        return sums.index(max(sums))

    for request in stopped:
        rank = heaviest()
        assert request in left[rank]
        assert without(request) == pytest.approx(max(map(without, left[rank])))
        assert without(request) > rate([list(batch.values()) for batch in left], base_ns)
        del left[rank][request]
    sums = [sum(batch.values()) for batch in left]
    running = sum(map(len, left))
    if running > 1 and max(sums) - fmean(sums) >= 0.1 * max(sums) + 1e-9:
        now = rate([list(batch.values()) for batch in left], base_ns)
        assert max(map(without, left[heaviest()])) <= now * (1 + 1e-12)


def test_a_balanced_fleet_pauses_nothing() -> None:
    batches = [{RequestId(rank): 100.0 + rank} for rank in range(4)]
    assert paused(batches, step_base_ns=1, step_ns_per_token=10.0, pause_above=0.1) == []


def test_a_paused_request_neither_emits_nor_is_read_and_goes_on_when_it_pays() -> None:
    engine = fleet(pause_above=0.2)
    for request, rank, kv, output in ((0, 0, 1_000, 5), (1, 0, 10, 3), (2, 1, 100, 3)):
        submit(engine, request, rank, kv=kv, output=output)
    engine.join()
    for step in range(3):
        engine.begin_step()
        assert engine.emissions == {0: 0, 1: 1, 2: 1}
        assert engine.step_loads == [10 + step, 100 + step]
        # Its KV cache stays where it is.
        assert engine.loads[0] == 1_010 + step
        assert engine.end_step() == ([1, 2] if step == 2 else [], [])
    # Alone it is never paused.
    for step in range(5):
        engine.begin_step()
        assert engine.emissions == {0: 1}
        assert engine.end_step() == ([0] if step == 4 else [], [])
    assert engine.loads == [0, 0]


# The scheduler's mirror in a simulation.

rng = random.Random(4)
REQUESTS = [TraceRequest(i * 2_500, rng.randint(1, 60), rng.randint(1, 30)) for i in range(60)]
UNEVEN = {
    "speeds": SimulatedEngineOptions(rank_speeds=(1.0, 1.5, 0.7)),
    "batches": SimulatedEngineOptions(rank_batches=(4, 2)),
    "speculation": SimulatedEngineOptions(tokens_per_step=3.0),
    "pauses": SimulatedEngineOptions(pause_above=0.1),
    "everything": SimulatedEngineOptions((1.0, 1.5), (4, 2), 2.5, 0.1, 7),
}


@pytest.mark.parametrize("kv", [None, 130])
@pytest.mark.parametrize("name", ["jsq", "fifo", "br-0", "br-h"])
@pytest.mark.parametrize("engines", UNEVEN.values(), ids=UNEVEN)
def test_the_scheduler_knows_the_loads_of_uneven_engines_after_every_step(
    engines: SimulatedEngineOptions, name: str, kv: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = SimulatedDeployment(
        3, 4, BASE_NS, PER_TOKEN_NS, rank_kv_tokens=kv, engines=engines
    )
    predictor = Survival([5, 12, 30])
    settings = PolicySettings(horizon_steps=8, refresh_tokens=3)
    policy = make_policy(name, PolicyInputs(3, 4, settings, random.Random(0), predictor))
    begin_step, checks = DecodeFleet.begin_step, 0

    def compare(engine: DecodeFleet) -> int:
        nonlocal checks
        checks += 1
        scheduler = simulation.scheduler
        scheduler.check()
        mirrored = scheduler.ledger.loads.tolist()
        for request in scheduler.requests.values():
            if request.state is LifecycleState.DECODING and not request.started:
                assert request.rank is not None
                mirrored[request.rank] -= request.prompt_tokens
        assert mirrored == engine.loads
        return begin_step(engine)

    monkeypatch.setattr(DecodeFleet, "begin_step", compare)
    simulation = Simulation(deployment, Workload(REQUESTS, [], backlog=7), policy, predictor)
    recorder = simulation.run()
    assert recorder.ended == len(REQUESTS)
    assert checks > 25
    assert simulation.scheduler.requests == {}
    assert recorder.metrics().output_tokens_per_s > 0

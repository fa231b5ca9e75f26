"""The decode engines: step time, growth, queues, overflow, and a naive model of all of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extended import usually

from balanceroute.predictors import Survival
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import (
    DecodeFleet,
    EventLoop,
    SimulatedEngineOptions,
    Speculation,
    paused,
)
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest


def fleet(*, ranks: int = 2, batch_limit: int = 4, kv: int | None = None) -> DecodeFleet:
    return DecodeFleet(
        ranks=ranks,
        batch_limit=batch_limit,
        step_base_ns=1_000,
        step_ns_per_token=2.5,
        rank_kv_tokens=kv,
    )


def submit(engine: DecodeFleet, request: int, rank: int, *, kv: int, output: int) -> None:
    engine.submit(RequestId(request), RankId(rank), kv_tokens=kv, output_tokens=output)


@pytest.mark.parametrize(
    ("prompts", "step_ns"),
    [
        pytest.param([], 1_000, id="nothing runs"),
        pytest.param([(0, 100)], 1_250, id="one"),
        pytest.param([(0, 100), (1, 400)], 2_000, id="the heaviest rank decides"),
        pytest.param([(0, 100), (0, 250), (1, 300)], 1_875, id="a rank's load is a sum"),
        pytest.param([(0, 3)], 1_008, id="7.5 ns are rounded to the even nanosecond"),
    ],
)
def test_a_step_takes_a_plus_b_times_the_largest_load(
    prompts: list[tuple[int, int]], step_ns: int
) -> None:
    engine = fleet()
    for number, (rank, kv) in enumerate(prompts):
        submit(engine, number, rank, kv=kv, output=9)
    engine.join()
    assert engine.begin_step() == step_ns


def test_a_queued_request_is_no_load() -> None:
    engine = fleet()
    submit(engine, 0, 0, kv=100, output=5)
    assert (engine.loads, engine.running) == ([0, 0], 0)
    engine.join()
    assert (engine.loads, engine.running) == ([100, 0], 1)


def test_each_running_request_grows_its_rank_by_one_token_a_step() -> None:
    engine = fleet()
    for request, rank, kv in ((0, 0, 10), (1, 0, 20), (2, 1, 30)):
        submit(engine, request, rank, kv=kv, output=9)
    engine.join()
    for step in range(1, 4):
        engine.end_step()
        assert engine.loads == [30 + 2 * step, 30 + step]


def test_a_rank_never_runs_more_than_its_batch_limit() -> None:
    engine = fleet(ranks=2, batch_limit=2)
    for request in range(5):
        submit(engine, request, 0, kv=10, output=3)
    submit(engine, 5, 1, kv=10, output=1)
    assert engine.join() == [0, 1, 5]
    assert engine.join() == []
    assert engine.running == 3


def test_a_rank_takes_its_queue_in_the_order_of_submission() -> None:
    engine = fleet(ranks=1, batch_limit=1)
    for request in (7, 3, 5):
        submit(engine, request, 0, kv=1, output=1)
    order: list[int] = []
    for _ in range(3):
        order += engine.join()
        engine.end_step()
    assert order == [7, 3, 5]


@pytest.mark.parametrize("output", [1, 2, 7])
def test_a_request_finishes_after_as_many_steps_as_it_has_tokens(output: int) -> None:
    engine = fleet()
    submit(engine, 1, 0, kv=50, output=100)
    engine.join()
    engine.end_step()  # So that the clock does not stand at 0 when the request joins.
    submit(engine, 0, 0, kv=5, output=output)
    engine.join()
    for _ in range(output - 1):
        assert engine.end_step() == ([], [])
    assert engine.end_step() == ([0], [])
    assert engine.loads == [50 + 1 + output, 0]
    assert engine.running == 1


def test_an_overflow_drops_who_joined_last() -> None:
    engine = fleet(ranks=1, kv=104)
    for request, kv in ((0, 40), (1, 30), (2, 30)):
        submit(engine, request, 0, kv=kv, output=50)
    assert engine.join() == [0, 1, 2]
    assert engine.end_step() == ([], [])  # 103 tokens still fit.
    assert engine.end_step() == ([], [2])  # 106 do not.
    assert engine.loads == [74]
    assert engine.running == 2


def test_an_overflow_drops_as_many_as_it_takes() -> None:
    engine = fleet(ranks=1, kv=100)
    submit(engine, 0, 0, kv=96, output=50)
    for request, kv in ((1, 2), (2, 1), (3, 1)):
        submit(engine, request, 0, kv=kv, output=50)
    engine.join()
    assert engine.end_step() == ([], [3, 2])  # 104 tokens, then 102, then 100.
    assert engine.loads == [100]


def test_who_finishes_makes_room_before_anyone_is_dropped() -> None:
    engine = fleet(ranks=1, kv=100)
    submit(engine, 0, 0, kv=60, output=1)
    submit(engine, 1, 0, kv=40, output=50)
    engine.join()
    assert engine.end_step() == ([0], [])


def test_the_only_request_of_a_rank_is_never_dropped_however_large() -> None:
    engine = fleet(ranks=1, kv=10)
    submit(engine, 0, 0, kv=500, output=3)
    submit(engine, 1, 0, kv=1, output=1)
    assert engine.join() == [0]
    assert engine.end_step() == ([], [])
    assert engine.join() == []  # And no request joins it.
    engine.end_step()
    assert engine.end_step() == ([0], [])
    assert engine.join() == [1]


def test_the_head_of_a_queue_that_does_not_fit_holds_back_what_would() -> None:
    engine = fleet(ranks=1, kv=100)
    submit(engine, 0, 0, kv=90, output=2)
    submit(engine, 1, 0, kv=20, output=1)
    submit(engine, 2, 0, kv=1, output=1)
    assert engine.join() == [0]
    engine.end_step()
    assert engine.join() == []
    assert engine.end_step() == ([0], [])
    assert engine.join() == [1, 2]


def test_a_dropped_request_does_not_finish_when_it_would_have() -> None:
    engine = fleet(ranks=1, kv=100)
    submit(engine, 0, 0, kv=60, output=20)
    submit(engine, 1, 0, kv=40, output=3)
    engine.join()
    assert engine.end_step() == ([], [1])
    assert [engine.end_step() for _ in range(5)] == [([], [])] * 5


def test_a_dropped_request_that_returns_finishes_at_its_new_end_alone() -> None:
    engine = fleet(ranks=2, kv=100)
    submit(engine, 0, 0, kv=60, output=20)
    submit(engine, 1, 0, kv=40, output=4)
    engine.join()
    assert engine.end_step() == ([], [1])
    submit(engine, 1, 1, kv=41, output=3)  # It had emitted one token.
    engine.end_step()
    engine.join()
    assert [engine.end_step() for _ in range(4)] == [([], []), ([], []), ([1], []), ([], [])]
    assert engine.loads == [66, 0]


def test_a_request_without_output_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="request 0 has nothing to decode"):
        submit(fleet(), 0, 0, kv=10, output=0)


def test_a_withdrawn_request_frees_its_slot_and_its_load_at_once() -> None:
    engine = fleet(batch_limit=1)
    submit(engine, 0, 0, kv=100, output=5)
    submit(engine, 1, 0, kv=30, output=2)
    engine.join()
    engine.end_step()
    assert (engine.running_on(RankId(0)), engine.queued_on(RankId(0))) == (1, 1)
    engine.withdraw(RequestId(0))
    assert (engine.loads, engine.running) == ([0, 0], 0)
    assert engine.join() == [1]
    assert [engine.end_step() for _ in range(5)] == [([], []), ([1], [])] + 3 * [([], [])]


def test_a_request_withdrawn_from_a_queue_never_joins() -> None:
    engine = fleet(batch_limit=1)
    for request in range(3):
        submit(engine, request, 0, kv=10, output=1)
    engine.join()
    engine.withdraw(RequestId(1))
    assert engine.queued_on(RankId(0)) == 1
    engine.end_step()
    assert engine.join() == [2]


def test_withdrawing_what_has_left_changes_nothing() -> None:
    engine = fleet(ranks=1, kv=100)
    submit(engine, 0, 0, kv=60, output=20)
    submit(engine, 1, 0, kv=40, output=3)
    engine.join()
    assert engine.end_step() == ([], [1])
    for request in (1, 7):
        engine.withdraw(RequestId(request))
    assert (engine.loads, engine.running) == ([61], 1)


@dataclass
class NaiveRank:
    """One rank as lists of [request, tokens held, tokens to go], oldest member first."""

    queue: list[list[int]] = field(default_factory=list)
    batch: list[list[int]] = field(default_factory=list)

    def load(self) -> int:
        return sum(tokens for _, tokens, _ in self.batch)

    def join(self, batch_limit: int, kv: int | None) -> list[int]:
        joined = []
        while self.queue and len(self.batch) < batch_limit:
            if kv is not None and self.batch and self.load() + self.queue[0][1] > kv:
                break
            self.batch.append(self.queue.pop(0))
            joined.append(self.batch[-1][0])
        return joined

    def withdraw(self, request: int) -> None:
        self.queue = [job for job in self.queue if job[0] != request]
        self.batch = [job for job in self.batch if job[0] != request]

    def step(self, kv: int | None) -> tuple[list[int], list[int]]:
        for job in self.batch:
            job[1] += 1
            job[2] -= 1
        finished = [request for request, _, left in self.batch if left == 0]
        self.batch = [job for job in self.batch if job[2] > 0]
        dropped = []
        while kv is not None and len(self.batch) > 1 and self.load() > kv:
            dropped.append(self.batch.pop()[0])
        return finished, dropped


SUBMISSIONS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 6)), max_size=4
)


@given(
    rounds=st.lists(SUBMISSIONS, min_size=1, max_size=15),
    batch_limit=st.integers(1, 4),
    kv=st.one_of(st.none(), st.integers(20, 60)),
    withdrawn=st.lists(st.integers(0, 40), max_size=15),
)
def test_the_fleet_does_what_a_naive_model_does(
    rounds: list[list[tuple[int, int, int]]], batch_limit: int, kv: int | None, withdrawn: list[int]
) -> None:
    engine = fleet(ranks=3, batch_limit=batch_limit, kv=kv)
    model = [NaiveRank() for _ in range(3)]
    submitted = 0
    for number, submissions in enumerate([*rounds, *([[]] * 20)]):
        for rank, tokens, output in submissions:
            submit(engine, submitted, rank, kv=tokens, output=output)
            model[rank].queue.append([submitted, tokens, output])
            submitted += 1
        assert engine.join() == [
            request for rank in model for request in rank.join(batch_limit, kv)
        ]
        assert engine.loads == [rank.load() for rank in model]
        assert engine.running == sum(len(rank.batch) for rank in model)
        assert engine.begin_step() == 1_000 + round(2.5 * max(rank.load() for rank in model))
        if number < len(withdrawn):
            engine.withdraw(RequestId(withdrawn[number]))
            for naive in model:
                naive.withdraw(withdrawn[number])
        finished, dropped = engine.end_step()
        ends = [rank.step(kv) for rank in model]
        assert sorted(finished) == sorted(request for done, _ in ends for request in done)
        assert dropped == [request for _, lost in ends for request in lost]
        assert engine.loads == [rank.load() for rank in model]


def test_a_rank_that_recomputes_takes_its_dropped_request_back_first() -> None:
    """Memory for 30: 10 and 15 grow by two each step until they do not fit."""
    computed: list[int] = []

    def recompute_ns(tokens: int) -> int:
        computed.append(tokens)
        return 1_000 * tokens

    fleet = DecodeFleet(
        ranks=2,
        batch_limit=4,
        step_base_ns=100,
        step_ns_per_token=1.0,
        rank_kv_tokens=30,
        recompute_ns=recompute_ns,
    )
    old, young, waiting = RequestId(0), RequestId(1), RequestId(2)
    fleet.submit(old, RankId(0), kv_tokens=10, output_tokens=6)
    fleet.submit(young, RankId(0), kv_tokens=15, output_tokens=9)
    assert fleet.join() == [old, young]
    fleet.submit(waiting, RankId(0), kv_tokens=25, output_tokens=1)
    for _ in range(2):
        assert fleet.begin_step() < 1_000
        assert fleet.end_step() == ([], [])
    fleet.begin_step()
    assert fleet.end_step() == ([], [young])
    # It emits nothing while it waits, and nothing overtakes it.
    for _ in range(2):
        assert fleet.join() == []
        assert fleet.begin_step() < 1_000
        assert fleet.emissions == {old: 1, young: 0}
        assert fleet.end_step() == ([], [])
    fleet.begin_step()
    assert fleet.end_step() == ([old], [])
    # The step in which it joins again computes its 18 tokens, for all ranks.
    assert fleet.join() == []
    assert fleet.begin_step() == 100 + 18 + 18_000
    assert computed == [18]
    assert fleet.end_step() == ([], [])
    assert fleet.begin_step() == 100 + 19
    assert fleet.loads == [19, 0]
    fleet.withdraw(young)
    assert fleet.end_step() == ([], [])
    assert fleet.join() == [waiting]


def test_a_dropped_request_that_is_withdrawn_is_forgotten() -> None:
    fleet = DecodeFleet(
        ranks=1,
        batch_limit=4,
        step_base_ns=100,
        step_ns_per_token=1.0,
        rank_kv_tokens=20,
        recompute_ns=lambda tokens: tokens,
    )
    old, young = RequestId(0), RequestId(1)
    for request in (old, young):
        fleet.submit(request, RankId(0), kv_tokens=10, output_tokens=5)
    fleet.join()
    fleet.begin_step()
    assert fleet.end_step() == ([], [young])
    fleet.begin_step()
    fleet.withdraw(young)
    assert fleet.end_step() == ([], [])
    assert fleet.begin_step() == 100 + 12
    assert fleet.emissions == {}


def test_a_rank_computes_a_prompt_in_the_step_in_which_its_request_joins() -> None:
    engine = fleet(batch_limit=1)
    submit(engine, 0, 0, kv=100, output=9)
    engine.submit(RequestId(1), RankId(1), kv_tokens=40, output_tokens=1, compute_ns=700)
    engine.submit(RequestId(2), RankId(1), kv_tokens=20, output_tokens=2, compute_ns=30)
    assert engine.join() == [0, 1]
    # Ranks compute side by side: 250 ns and 100 + 700 ns.
    assert engine.begin_step() == 1_800
    assert engine.end_step() == ([1], [])
    assert engine.join() == [2]
    assert engine.begin_step() == 1_252
    engine.end_step()
    assert engine.begin_step() == 1_255


# Engines that are not plain: speeds, batches, speculative decoding, pauses.


BASE_NS, PER_TOKEN_NS = 1_000, 10.0


def optioned(*, ranks: int = 2, batch_limit: int = 4, **options: object) -> DecodeFleet:
    return DecodeFleet(
        ranks=ranks,
        batch_limit=batch_limit,
        step_base_ns=BASE_NS,
        step_ns_per_token=PER_TOKEN_NS,
        options=SimulatedEngineOptions(**options),  # type: ignore[arg-type]
    )


def submit_all(engine: DecodeFleet, request: int, rank: int, *, kv: int, output: int = 50) -> None:
    engine.submit(RequestId(request), RankId(rank), kv_tokens=kv, output_tokens=output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_speeds": (1.0, 0.0)}, "rank_speeds has 0.0, must be from 0.001 to 1000"),
        ({"rank_speeds": (float("nan"),)}, "rank_speeds has nan"),
        ({"rank_batches": (4, 0)}, "rank_batches has 0"),
        ({"tokens_per_step": 0.5}, "tokens_per_step is 0.5, must be from 1 to 64"),
        ({"pause_above": 0.0}, "pause_above is 0.0"),
    ],
)
def test_a_value_out_of_range_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulatedEngineOptions(**options)  # type: ignore[arg-type]


def test_a_slow_rank_may_set_the_step_with_fewer_tokens() -> None:
    engine = optioned(ranks=3, rank_speeds=(1.0, 0.5))
    for request, kv in enumerate((150, 100, 120)):
        submit_all(engine, request, request, kv=kv)
    engine.join()
    assert engine.begin_step() == BASE_NS + 2_000
    assert engine.step_loads == [150, 200, 120]
    assert engine.loads == [150, 100, 120]


def test_each_rank_has_its_own_batch_limit() -> None:
    engine = optioned(ranks=3, rank_batches=(1, 3))
    for request in range(12):
        submit_all(engine, request, request % 3, kv=10)
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
    engine = optioned(tokens_per_step=4.0)
    submit_all(engine, 0, 0, kv=100, output=23)
    submit_all(engine, 1, 1, kv=10, output=60)
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
    engine = optioned(tokens_per_step=4.0)
    submit_all(engine, 0, 0, kv=100)
    submit_all(engine, 1, 0, kv=10)
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
    engine = optioned(pause_above=0.2)
    for request, rank, kv, output in ((0, 0, 1_000, 5), (1, 0, 10, 3), (2, 1, 100, 3)):
        submit_all(engine, request, rank, kv=kv, output=output)
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
@pytest.mark.parametrize("name", usually({"jsq", "br-h"}, ["jsq", "fifo", "br-0", "br-h"]))
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


# Virtual time: what runs when, and when an instant is settled.


class Script:
    """Callbacks that log their name, and a settle that logs `settle`, both with the time."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.log: list[tuple[int, str]] = []

    def say(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append((self.loop.now_ns, name))

    def settle(self) -> None:
        self.log.append((self.loop.now_ns, "settle"))


def test_callbacks_run_in_order_of_time_then_of_scheduling() -> None:
    script = Script()
    for time_ns, name in ((7, "c"), (3, "a"), (7, "d"), (3, "b"), (0, "first")):
        script.loop.call_at(time_ns, script.say(name))
    script.loop.run(lambda: None)
    assert script.log == [(0, "first"), (3, "a"), (3, "b"), (7, "c"), (7, "d")]


@given(times=st.lists(st.integers(0, 5), max_size=30))
def test_the_order_is_a_stable_sort_by_time(times: list[int]) -> None:
    script = Script()
    for number, time_ns in enumerate(times):
        script.loop.call_at(time_ns, script.say(str(number)))
    script.loop.run(lambda: None)
    assert script.log == sorted(
        ((time_ns, str(number)) for number, time_ns in enumerate(times)), key=lambda item: item[0]
    )


def test_an_instant_is_settled_once_everything_due_has_run() -> None:
    script = Script()

    def spawn() -> None:
        script.say("spawn")()
        script.loop.call_at(5, script.say("spawned"))

    script.loop.call_at(5, spawn)
    script.loop.call_at(5, script.say("sibling"))
    script.loop.call_at(6, script.say("later"))
    script.loop.run(script.settle)
    assert script.log == [
        (5, "spawn"),
        (5, "sibling"),
        (5, "spawned"),
        (5, "settle"),
        (6, "later"),
        (6, "settle"),
    ]


def test_an_instant_is_settled_again_while_settling_schedules_more_for_it() -> None:
    script = Script()
    left = 2

    def settle() -> None:
        nonlocal left
        script.settle()
        if left:
            left -= 1
            script.loop.call_at(script.loop.now_ns, script.say("again"))

    script.loop.call_at(4, script.say("begin"))
    script.loop.call_at(9, script.say("end"))
    script.loop.run(settle)
    assert script.log == [
        (4, "begin"),
        (4, "settle"),
        (4, "again"),
        (4, "settle"),
        (4, "again"),
        (4, "settle"),
        (9, "end"),
        (9, "settle"),
    ]


def test_due_tells_whether_this_instant_has_more_to_run() -> None:
    loop = EventLoop()
    seen: list[bool] = []
    assert not loop.due()
    loop.call_at(2, lambda: seen.append(loop.due()))
    loop.call_at(2, lambda: seen.append(loop.due()))
    loop.call_at(3, lambda: seen.append(loop.due()))
    loop.run(lambda: None)
    assert seen == [True, False, False]


def test_the_past_cannot_be_scheduled() -> None:
    loop = EventLoop()
    loop.call_at(10, lambda: loop.call_at(9, lambda: None))
    with pytest.raises(AssertionError, match="9 ns is before 10 ns"):
        loop.run(lambda: None)


def test_a_loop_without_callbacks_never_settles() -> None:
    script = Script()
    script.loop.run(script.settle)
    assert not script.log
    assert script.loop.now_ns == 0

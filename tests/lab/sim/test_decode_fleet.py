"""The decode engines: step time, growth, queues, overflow, and a naive model of all of it."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.lab.sim.engines import DecodeFleet


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

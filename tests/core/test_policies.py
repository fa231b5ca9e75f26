"""What each policy decides on small fleets, and what all of them have in common."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.extended import USUAL_POLICIES

from balanceroute.predictors import NoPrediction, Survival
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies import (
    POLICIES,
    Assignment,
    Fleet,
    Policy,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.policies.baselines import PowerOfTwo
from balanceroute.proxy.core.policies.oldest_first import OldestFirst
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Turnover
from balanceroute.proxy.core.waiting import Pool, PoolEntry

RIVALS = ["dynamo-kv", "smg-least-load", "llmd-token-load"]
SCORES = ["s1-enhanced", "s2-enhanced", "s2-dynamic-waiting"]
EARLY = ["random", "round-robin", "power-of-two", "jsq", "least-kv", *RIVALS, *SCORES]
LATE = ["fifo", "br-0", "br-h"]
BOUNDED = [*LATE, "br-0-bypass"]
# Requests that decode already have numbers from here on.
BOUND = 1_000
# No entry is held any more.
NOW_NS = 1_000_000_000


def build(
    name: str,
    ranks: int,
    *,
    batch_limit: int = 4,
    rng: random.Random | None = None,
    **parameters: Any,
) -> Policy:
    return make_policy(
        name,
        PolicyInputs(
            ranks=ranks,
            batch_limit=batch_limit,
            settings=PolicySettings(**parameters),
            rng=random.Random(1) if rng is None else rng,
            predictor=Survival([3, 7, 20, 60]),
        ),
    )


@dataclass(frozen=True)
class Ranks:
    """Decode ranks as lists of the prompts that are bound to them."""

    bound: Sequence[Sequence[int]]
    batch_limit: int = 4
    kv_limit: int | None = None
    closed: Collection[int] = ()
    turnover: Turnover = field(default_factory=Turnover)

    def fleet(self, policy: Policy) -> Fleet:
        """Return the policy's view, as the scheduler makes it."""
        loads = np.array([sum(prompts) for prompts in self.bound])
        count = np.array([len(prompts) for prompts in self.bound])
        beyond = policy.slots_beyond_batch
        slots = np.full(len(loads), UNLIMITED)
        room = slots.copy()
        if beyond is not None:
            slots = self.batch_limit + beyond - count
            if self.kv_limit is not None:
                room = self.kv_limit - loads
        is_open = np.array([rank not in self.closed for rank in range(len(loads))])
        free_slots = np.maximum(slots, 0) * is_open
        return Fleet(is_open, loads, count, free_slots, room, turnover=self.turnover)

    def fill(self, policy: Policy) -> None:
        """Tell the policy's projection who is bound."""
        number = BOUND
        for rank, prompts in enumerate(self.bound):
            for prompt_tokens in prompts:
                if policy.projection is not None:
                    policy.projection.bind(RequestId(number), RankId(rank), prompt_tokens, 0)
                number += 1

    def free_slots(self, policy: Policy) -> int:
        return sum(min(int(slots), 10**6) for slots in self.fleet(policy).free_slots)


def entry(
    number: int,
    prompt_tokens: int,
    deadline_ns: int | None = None,
    *,
    slots: int = 1,
    lost_on: Sequence[int] = (),
) -> PoolEntry:
    return PoolEntry(
        RequestId(number),
        Ticket(prompt_tokens, slots),
        prompt_tokens,
        age=0,
        deadline_ns=deadline_ns,
        expires_ns=None,
        lease_ends_ns=None,
        lost_on=tuple(map(RankId, lost_on)),
    )


def pool_of(prompts: Sequence[int]) -> Pool:
    pool = Pool(Fcfs())
    for number, prompt_tokens in enumerate(prompts):
        pool.add(entry(number, prompt_tokens))
    return pool


def decide(policy: Policy, ranks: Ranks, prompts: Sequence[int]) -> list[Assignment]:
    if not prompts:
        return []  # No policy is ever asked about an empty pool.
    ranks.fill(policy)
    return policy.dispatch(ranks.fleet(policy), pool_of(prompts), NOW_NS)


def decide_on(policy: Policy, ranks: Ranks, *entries: PoolEntry) -> list[Assignment]:
    pool = Pool(Fcfs())
    for one in entries:
        pool.add(one)
    ranks.fill(policy)
    return policy.dispatch(ranks.fleet(policy), pool, NOW_NS)


def chosen_ranks(assignments: list[Assignment]) -> list[int]:
    return [rank for _, rank in assignments]


# The baselines.


def test_round_robin_takes_the_ranks_in_turn_across_rounds() -> None:
    policy, ranks = build("round-robin", 3), Ranks([[9], [], []])
    assert chosen_ranks(decide(policy, ranks, [5, 5])) == [0, 1]
    assert chosen_ranks(decide(policy, ranks, [5, 5, 5])) == [2, 0, 1]


def test_jsq_counts_requests_and_ties_go_to_the_lowest_rank() -> None:
    ranks = Ranks([[1, 1], [900], [500], [1, 1, 1]])
    assert chosen_ranks(decide(build("jsq", 4), ranks, [7, 7, 7, 7])) == [1, 2, 0, 1]


def test_least_kv_counts_tokens_and_ties_go_to_the_lowest_rank() -> None:
    ranks = Ranks([[10, 10], [50], [20], [90]])
    assert chosen_ranks(decide(build("least-kv", 4), ranks, [5, 5, 30, 1])) == [0, 2, 0, 2]


def test_early_binding_goes_past_the_batch() -> None:
    ranks = Ranks([[10] * 4, [10] * 4], batch_limit=4, kv_limit=1)
    assert chosen_ranks(decide(build("jsq", 2), ranks, [5] * 6)) == [0, 1] * 3


def test_random_draws_from_its_own_generator_only() -> None:
    ranks, prompts = Ranks([[], [], [], []]), [5] * 40
    expected = random.Random(7)
    drawn = [expected.randrange(4) for _ in prompts]
    for ambient_seed in (1, 2):
        random.seed(ambient_seed)
        policy = build("random", 4, rng=random.Random(7))
        assert chosen_ranks(decide(policy, ranks, prompts)) == drawn
    assert set(drawn) == {0, 1, 2, 3}


class Scripted(random.Random):
    """Draws given values."""

    def __init__(self, *draws: list[int]) -> None:
        super().__init__(0)
        self._draws = iter(draws)

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        assert (list(population), k, counts) == ([0, 1, 2, 3], 2, None)
        return next(self._draws)


def early(choose: PowerOfTwo) -> OldestFirst:
    return OldestFirst(choose, slots_beyond_batch=None)


def test_power_of_two_takes_the_shorter_of_two_drawn_queues() -> None:
    ranks = Ranks([[], [1, 1], [1], [1]])
    policy = early(PowerOfTwo(Scripted([1, 2], [3, 2], [1, 0])))
    assert chosen_ranks(decide(policy, ranks, [5, 5, 5])) == [2, 3, 0]
    # A tie goes to the lower rank, whichever was drawn first.
    assert chosen_ranks(decide(early(PowerOfTwo(Scripted([3, 2]))), ranks, [5])) == [2]


def test_power_of_two_draws_two_different_ranks() -> None:
    # So the longest queue never wins, and every other rank does at times.
    ranks = Ranks([[1], [1] * 4, [], [1, 1]])
    policy = build("power-of-two", 4)
    winners = {chosen_ranks(decide(policy, ranks, [5]))[0] for _ in range(200)}
    assert winners == {0, 2, 3}


def test_power_of_two_manages_with_one_rank() -> None:
    assert chosen_ranks(decide(build("power-of-two", 1), Ranks([[1]]), [5])) == [0]


def test_fifo_sends_the_oldest_to_the_least_loaded_rank_with_a_slot() -> None:
    ranks = Ranks([[10], [1, 1], [50]], batch_limit=2)
    # Rank 1 has the least load but no slot.
    assert decide(build("fifo", 3), ranks, [45, 3, 3]) == [(0, 0), (1, 2)]


def test_fifo_waits_for_room_for_the_oldest() -> None:
    ranks = Ranks([[60], [80]], kv_limit=100)
    assert decide(build("fifo", 2), ranks, [50, 5]) == []
    assert decide(build("fifo", 2), ranks, [30, 15, 15]) == [(0, 0), (1, 1)]


def test_bypass_sends_each_to_the_best_rank_until_its_places_beyond_the_batch_are_taken() -> None:
    ranks = Ranks([[100, 100], [100]], batch_limit=2)
    policy = build("br-0-bypass", 2, bypass_slots=1)
    assert policy.slots_beyond_batch == 1
    assert decide(policy, ranks, [100, 10, 10, 10]) == [(0, 1), (1, 0), (2, 1)]


@pytest.mark.parametrize("paper", [False, True])
def test_br_0_fills_the_margin_with_the_best_subset(paper: bool) -> None:
    # One rank is 100 tokens behind and has two slots: 60 + 40 fit, though 70 is the largest.
    ranks = Ranks([[300, 300, 300, 300], [550, 550]], batch_limit=4)
    policy = build("br-0", 2, paper=paper, theta=9)
    admitted = {request for request, _ in decide(policy, ranks, [70, 35, 60, 40, 10])}
    assert admitted == {2, 3}


@pytest.mark.parametrize("paper", [False, True])
def test_br_0_admits_one_request_though_all_overflow(paper: bool) -> None:
    ranks = Ranks([[100], [95]], batch_limit=2)
    policy = build("br-0", 2, paper=paper, theta=9, window=8)
    admitted = decide(policy, ranks, [50, 30, 40])
    # Rank 1 has the margin; then rank 0 is served.
    assert admitted[0] == (1, 1)
    assert sorted(chosen_ranks(admitted)) == [0, 1]


# Closed ranks and ranks that lost a request.

prompt = st.integers(1, 300)
fleets = st.lists(st.lists(prompt, max_size=4), min_size=1, max_size=5)
# With `USUAL_POLICIES` one of those by charges and one of those by scores.
VARIED = (*USUAL_POLICIES, "br-0-bypass", "dynamo-kv", "s1-enhanced")
VARIANTS = [(name, False) for name in POLICIES] + [("br-0", True), ("br-h", True)]
variants = pytest.mark.parametrize(
    ("name", "paper"),
    [
        pytest.param(
            name,
            paper,
            id=(title := name + " --paper" * paper),
            marks=() if title in VARIED else pytest.mark.extended,
        )
        for name, paper in VARIANTS
    ],
)


def test_round_robin_leaves_out_the_turn_of_a_closed_rank() -> None:
    policy = build("round-robin", 4)
    assert chosen_ranks(decide(policy, Ranks([[]] * 4, closed=[1]), [5] * 5)) == [0, 2, 3, 0, 2]
    assert chosen_ranks(decide(policy, Ranks([[]] * 4), [5] * 2)) == [3, 0]


def test_random_draws_among_the_open_ranks_alone() -> None:
    expected = random.Random(7)
    drawn = [[0, 2, 3][expected.randrange(3)] for _ in range(40)]
    policy = build("random", 4, rng=random.Random(7))
    assert chosen_ranks(decide(policy, Ranks([[]] * 4, closed=[1]), [5] * 40)) == drawn


def test_power_of_two_draws_among_the_open_ranks_alone() -> None:
    # The longest queue of the open ones never wins.
    ranks = Ranks([[1], [], [1] * 9, [1, 1]], closed=[1])
    policy = build("power-of-two", 4)
    assert {chosen_ranks(decide(policy, ranks, [5]))[0] for _ in range(200)} == {0, 3}
    alone = Ranks([[1], [], [1] * 9, [1, 1]], closed=[0, 1, 3])
    assert chosen_ranks(decide(policy, alone, [5])) == [2]


@pytest.mark.parametrize("name", ["jsq", "least-kv", "fifo", "br-0", "br-0-bypass", "br-h"])
def test_the_best_rank_is_passed_over_while_it_is_closed(name: str) -> None:
    bound = [[500, 500], [], [90]]
    assert chosen_ranks(decide(build(name, 3), Ranks(bound), [5])) == [1]
    assert chosen_ranks(decide(build(name, 3), Ranks(bound, closed=[1]), [5])) == [2]


@variants
def test_without_an_open_rank_nothing_is_admitted(name: str, paper: bool) -> None:
    policy = build(name, 2, paper=paper, theta=0)
    assert decide(policy, Ranks([[], []], closed=[0, 1]), [5, 5]) == []


@variants
@pytest.mark.parametrize("bound", [[[], []], [[900], []], [[], [900]]], ids=str)
def test_a_rank_that_lost_a_request_does_not_get_it_again(
    name: str, paper: bool, bound: list[list[int]]
) -> None:
    for lost_on in (0, 1):
        policy = build(name, 2, paper=paper, theta=0)
        again = entry(0, 5, lost_on=[lost_on])
        assert decide_on(policy, Ranks(bound), again) == [(0, 1 - lost_on)]


@variants
def test_a_rank_that_lost_a_request_gets_it_again_when_it_is_the_only_open_one(
    name: str, paper: bool
) -> None:
    policy = build(name, 3, paper=paper, theta=0)
    ranks = Ranks([[9], [9], [9]], closed=[1, 2])
    assert decide_on(policy, ranks, entry(0, 5, lost_on=[0])) == [(0, 0)]


@variants
def test_of_ranks_that_all_lost_a_request_the_first_that_did_gets_it_again(
    name: str, paper: bool
) -> None:
    for lost_on in ([1, 0], [0, 1]):
        policy = build(name, 2, paper=paper, theta=0)
        assert decide_on(policy, Ranks([[9], [9]]), entry(0, 5, lost_on=lost_on)) == [
            (0, lost_on[0])
        ]


@pytest.mark.parametrize(("name", "paper"), [(n, False) for n in BOUNDED] + [("br-0", True)])
def test_a_request_waits_for_a_full_rank_rather_than_go_where_it_was_lost(
    name: str, paper: bool
) -> None:
    policy = build(name, 2, paper=paper, theta=0, bypass_slots=0)
    ranks = Ranks([[9], [9, 9]], batch_limit=2)
    again, other = entry(0, 5, lost_on=[0]), entry(1, 5)
    # But the one behind it need not wait for that.
    assert decide_on(policy, ranks, again, other) == [(1, 0)]


@pytest.mark.parametrize("paper", [False, True])
def test_the_candidates_of_a_rank_are_those_that_need_not_avoid_it(paper: bool) -> None:
    policy = build("br-0", 2, paper=paper, theta=9, window=1)
    ranks = Ranks([[], [9] * 4])
    again = [entry(number, 50, lost_on=[0]) for number in range(3)]
    assert decide_on(policy, ranks, *again, entry(3, 7)) == [(3, 0)]


# Requests with several slots.


@pytest.mark.parametrize("name", BOUNDED)
def test_one_free_slot_is_enough_and_then_the_rank_is_full(name: str) -> None:
    policy = build(name, 2, bypass_slots=0)
    ranks = Ranks([[9, 9], [9]], batch_limit=2)
    wide, next_one = entry(0, 1, slots=4), entry(1, 200)
    assert decide_on(policy, ranks, wide, next_one) == [(0, 1)]


@pytest.mark.parametrize("name", ["jsq", "power-of-two"])
def test_the_shorter_queue_counts_slots(name: str) -> None:
    wide = entry(0, 5, slots=4)
    others = [entry(number, 5) for number in range(1, 6)]
    admitted = decide_on(build(name, 2), Ranks([[], [1]]), wide, *others)
    assert chosen_ranks(admitted) == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("name", ["least-kv", "fifo", "br-0", "br-0-bypass", "br-h"])
def test_the_load_of_a_request_is_its_prompt_once_per_slot(name: str) -> None:
    ranks = Ranks([[100], [130]], batch_limit=9)
    policy = build(name, 2, batch_limit=9)
    wide, small = entry(0, 20, slots=3), entry(1, 10)
    # With 60 tokens more rank 0 has more than rank 1; with 20 it had less.
    assert decide_on(policy, ranks, wide, small) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("name", ["least-kv", "fifo", "br-0", "br-0-bypass"])
@given(
    bound=st.lists(st.lists(st.integers(1, 300), max_size=4), min_size=1, max_size=5),
    prompts=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 4)), min_size=1, max_size=12),
)
def test_with_slots_to_spare_only_the_load_of_a_request_counts(
    name: str, bound: list[list[int]], prompts: list[tuple[int, int]]
) -> None:
    ranks = Ranks(bound, batch_limit=99)
    wide = [entry(number, tokens, slots=slots) for number, (tokens, slots) in enumerate(prompts)]
    long = [entry(number, tokens * slots) for number, (tokens, slots) in enumerate(prompts)]
    policies = [build(name, len(bound), batch_limit=99) for _ in range(2)]
    assert decide_on(policies[0], ranks, *wide) == decide_on(policies[1], ranks, *long)


@pytest.mark.parametrize("paper", [False, True])
def test_the_best_subset_and_the_best_single_one_are_chosen_by_load(paper: bool) -> None:
    # One rank is 100 tokens behind and has four slots: 2 x 30 + 2 x 20 fit.
    ranks = Ranks([[300] * 6, [850, 850]], batch_limit=6)
    policy = build("br-0", 2, paper=paper, theta=9)
    wide = [entry(2, 30, slots=2), entry(3, 20, slots=2)]
    others = [entry(0, 70), entry(1, 35), entry(4, 10)]
    admitted = decide_on(policy, ranks, *others[:2], *wide, others[2])
    assert {request for request, _ in admitted} == {2, 3}
    # With one slot 3 x 30 is closer to it than 70.
    ranks = Ranks([[300] * 6, [340] * 5], batch_limit=6)
    policy = build("br-0", 2, paper=paper, theta=9)
    assert decide_on(policy, ranks, entry(0, 70), entry(1, 30, slots=3)) == [(1, 1)]


def test_the_candidates_of_the_paper_are_the_largest_by_load() -> None:
    policy = build("br-0", 2, paper=True, theta=9, window=1)
    ranks = Ranks([[300] * 4, [1] * 3], batch_limit=4)
    assert decide_on(policy, ranks, entry(0, 70), entry(1, 30, slots=3)) == [(1, 1)]


def test_memory_is_needed_for_every_slot() -> None:
    ranks = Ranks([[50]], kv_limit=100)
    assert decide_on(build("fifo", 1), ranks, entry(0, 25, slots=3)) == []
    assert decide_on(build("fifo", 1), ranks, entry(0, 25, slots=2)) == [(0, 0)]


def test_the_slots_that_are_left_never_go_below_none() -> None:
    fleet = Ranks([[9], []], batch_limit=2).fleet(build("fifo", 2))
    fleet.bind(0, entry(0, 5, slots=4))
    assert fleet.free_slots.tolist() == [0, 2]
    assert (fleet.loads.tolist(), fleet.bound.tolist()) == ([29, 0], [5, 0])
    assert fleet.free_kv_tokens.tolist() == [UNLIMITED - 20, UNLIMITED]


def test_stage_1_leaves_stage_2_its_slots_though_each_request_wants_several() -> None:
    # Of 8 slots 4 are left to stage 2, which takes one request; else the largest would be first.
    policy = build("br-0", 2, theta=4)
    entries = [entry(number, 10 * number + 10, slots=3) for number in range(4)]
    assert decide_on(policy, Ranks([[], []]), *entries)[0].request == 0


@pytest.mark.parametrize("theta", [0, 9])
def test_br_h_expects_an_admitted_request_to_grow_in_every_slot(theta: int) -> None:
    policy = build("br-h", 2, theta=theta, horizon_steps=3)
    projection = policy.projection
    assert isinstance(projection, Projection)
    seen: list[tuple[int, ...]] = []
    newcomers = projection.newcomers

    def spy(
        kv_tokens: Sequence[int], survival: NDArray[np.float64], sequences: Sequence[int]
    ) -> NDArray[np.float64]:
        seen.extend(zip(kv_tokens, sequences, strict=True))
        return newcomers(kv_tokens, survival, sequences)

    projection.newcomers = spy  # type: ignore[method-assign]
    decide_on(policy, Ranks([[], []]), entry(0, 20, slots=3), entry(1, 10))
    assert seen == [(60, 3), (10, 1)]


@pytest.mark.parametrize("paper", [False, True])
def test_a_subset_takes_no_more_entries_than_find_a_free_slot(paper: bool) -> None:
    # All three fill the margin exactly, but after two of them no slot is left.
    policy = build("br-0", 2, paper=paper, theta=9)
    ranks = Ranks([[300] * 4, [500]], batch_limit=4)
    wide = [entry(number, 100, slots=2) for number in range(3)]
    admitted = decide_on(policy, ranks, *wide, *(entry(number, 1) for number in range(3, 9)))
    taken = {request for request, _ in admitted}
    assert len(taken & {0, 1, 2}) <= 2
    assert sum(2 if request < 3 else 1 for request in taken) <= 4


# What all have in common.


@variants
@given(bound=fleets, prompts=st.lists(prompt, max_size=12), window=st.integers(1, 4))
def test_in_light_load_everything_is_admitted_at_once(
    name: str, paper: bool, bound: list[list[int]], prompts: list[int], window: int
) -> None:
    policy = build(name, len(bound), paper=paper, window=window, hold_s=0.0)
    ranks = Ranks(bound)
    prompts = prompts[: ranks.free_slots(policy)]
    admitted = decide(policy, ranks, prompts)
    assert sorted(request for request, _ in admitted) == list(range(len(prompts)))


@variants
@given(
    bound=fleets,
    prompts=st.lists(st.tuples(prompt, st.sampled_from([1, 1, 3])), min_size=1, max_size=30),
    kv_limit=st.none() | st.integers(50, 1_500),
    closed=st.sets(st.integers(0, 4), max_size=2),
    window=st.integers(1, 20),
    theta=st.none() | st.integers(0, 8),
)
def test_no_round_goes_past_slots_or_memory_or_admits_twice_or_to_a_closed_rank(
    name: str,
    paper: bool,
    bound: list[list[int]],
    prompts: list[tuple[int, int]],
    kv_limit: int | None,
    closed: set[int],
    window: int,
    theta: int | None,
) -> None:
    policy = build(name, len(bound), paper=paper, window=window, theta=theta)
    ranks = Ranks(bound, kv_limit=kv_limit, closed=closed)
    ranks.fill(policy)
    pool = Pool(Fcfs())
    for number, (tokens, wanted) in enumerate(prompts):
        pool.add(entry(number, tokens, slots=wanted))
    slots = ranks.fleet(policy).free_slots.tolist()
    room = ranks.fleet(policy).free_kv_tokens.tolist()
    residents = [len(on_rank) for on_rank in bound]
    admitted = policy.dispatch(ranks.fleet(policy), pool, 0)
    for request, rank in admitted:
        tokens, wanted = prompts[request]
        assert rank not in closed
        assert slots[rank] > 0
        assert tokens * wanted <= room[rank] or residents[rank] == 0
        slots[rank] -= wanted
        room[rank] -= tokens * wanted
        residents[rank] += 1
    left = [one.request for one in pool]
    assert sorted([*left, *(request for request, _ in admitted)]) == list(range(len(prompts)))
    # Else requests are held for a moment.
    if left and getattr(policy, "next_decision_ns", None) is None:
        open_residents = [held for rank, held in enumerate(residents) if rank not in closed]
        assert all(open_residents), "a rank stays empty while requests wait"
        if kv_limit is None:
            # Ranks make room for requests for which they are reserved.
            rule = getattr(policy, "_rule", policy)
            reserved = rule.reserved.values() if isinstance(rule, TwoStage) else ()
            free = any(slot > 0 for slot in slots) and not set(left) <= set(reserved)
            assert not free, "a slot stays empty while requests wait"


@pytest.mark.parametrize("paper", [False, True])
@given(
    bound=fleets,
    prompts=st.lists(prompt, max_size=30),
    kv_limit=st.none() | st.integers(50, 1_500),
    window=st.integers(1, 20),
    theta=st.none() | st.integers(0, 8),
)
def test_br_h_without_a_horizon_is_br_0(
    paper: bool,
    bound: list[list[int]],
    prompts: list[int],
    kv_limit: int | None,
    window: int,
    theta: int | None,
) -> None:
    num = len(bound)
    parameters: dict[str, Any] = {"paper": paper, "window": window, "theta": theta}
    br_0 = build("br-0", num, **parameters)
    br_h = build("br-h", num, horizon_steps=0, alpha=1.0, beta=float(num), **parameters)
    ranks = Ranks(bound, kv_limit=kv_limit)
    assert decide(br_0, ranks, prompts) == decide(br_h, ranks, prompts)


@pytest.mark.parametrize(("departures", "rank"), [(0.0, 0), (10.0, 1)])
def test_br_h_looks_ahead_only_as_far_as_slots_last(departures: float, rank: int) -> None:
    policy = build("br-h", 3)
    projection = policy.projection
    assert projection is not None
    # Rank 0 is about to be empty, rank 1 is the emptier one now.
    bound = [(100, 59), (90, 0), (300, 0)]
    for number, (kv_tokens, age) in enumerate(bound):
        projection.bind(RequestId(BOUND + number), RankId(number), kv_tokens, age)
    fleet = Ranks([[kv_tokens] for kv_tokens, _ in bound]).fleet(policy)
    fleet.turnover.per_step = 3 * departures
    assert chosen_ranks(policy.dispatch(fleet, pool_of([100]), 0)) == [rank]


@given(bound=fleets, prompts=st.lists(prompt, max_size=30), departures=st.floats(0.0, 10.0))
def test_the_discount_of_the_paper_is_constant(
    bound: list[list[int]], prompts: list[int], departures: float
) -> None:
    calm, busy = (build("br-h", len(bound), paper=True) for _ in range(2))
    quiet, lively = Ranks(bound), Ranks(bound)
    lively.turnover.per_step = departures
    assert decide(calm, quiet, prompts) == decide(busy, lively, prompts)


@pytest.mark.parametrize("name", ["least-kv", "fifo", "br-0", "br-0-bypass"])
@given(
    hundreds=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    prompts=st.lists(st.integers(1, 12), max_size=16),
    shuffle=st.randoms(use_true_random=False),
)
def test_relabelling_the_ranks_relabels_the_decision(
    name: str, hundreds: list[int], prompts: list[int], shuffle: random.Random
) -> None:
    # Loads differ in their last two digits, and prompts do not change these: there are no ties.
    bound = [[100 * load] * (load % 4) + [rank + 1] for rank, load in enumerate(hundreds)]
    sizes = [100 * size for size in prompts]
    order = list(range(len(bound)))
    shuffle.shuffle(order)
    straight = decide(build(name, len(bound)), Ranks(bound), sizes)
    relabelled = decide(build(name, len(bound)), Ranks([bound[old] for old in order]), sizes)
    assert [(request, order[rank]) for request, rank in relabelled] == straight


@given(st.permutations(range(5)))
def test_relabelling_the_ranks_relabels_the_shortest_queue(counts: list[int]) -> None:
    ranks = Ranks([[7] * count for count in counts])
    assert chosen_ranks(decide(build("jsq", 5), ranks, [7])) == [counts.index(0)]


@pytest.mark.parametrize("name", EARLY)
def test_early_binding_has_no_bound_on_slots(name: str) -> None:
    assert build(name, 2).slots_beyond_batch is None


@pytest.mark.parametrize("name", LATE)
def test_late_binding_never_sends_more_than_a_batch(name: str) -> None:
    assert build(name, 2).slots_beyond_batch == 0


def test_every_policy_binds_early_or_within_a_bound() -> None:
    assert sorted([*EARLY, *BOUNDED]) == sorted(POLICIES)


# Fairness of the two-stage rule.


def rounds_until_admitted(policy: Policy, *, deadline_ns: int | None, limit: int) -> int | None:
    """Offer the one free slot to a prompt that never fits and a small new one, round by round."""
    ranks = Ranks([[600, 400], [950]], batch_limit=2)
    ranks.fill(policy)
    pool = Pool(Fcfs())
    pool.add(entry(0, 10_000, deadline_ns))
    for number in range(1, limit + 1):
        pool.add(entry(number, 40))
        ((request, rank),) = policy.dispatch(ranks.fleet(policy), pool, number)
        assert rank == 1
        if request == 0:
            return number
        assert pool.first(1)[0].overtaken == number
    return None


@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_without_credit_a_request_that_never_fits_is_overtaken_without_bound(name: str) -> None:
    policy = build(name, 2, batch_limit=2, patience=float("inf"))
    assert rounds_until_admitted(policy, deadline_ns=None, limit=500) is None


@pytest.mark.parametrize("patience", [None, 1.0, 20.0])
@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_with_credit_a_request_that_never_fits_is_admitted_in_the_end(
    name: str, patience: float | None
) -> None:
    policy = build(name, 2, batch_limit=2, patience=patience)
    assert rounds_until_admitted(policy, deadline_ns=None, limit=500) is not None


@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_at_its_deadline_a_request_goes_first(name: str) -> None:
    policy = build(name, 2, batch_limit=2, patience=float("inf"))
    assert rounds_until_admitted(policy, deadline_ns=77, limit=500) == 77


@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_a_late_request_is_not_forced_in_beyond_its_limit(name: str) -> None:
    policy = build(name, 2, batch_limit=2, patience=float("inf"))
    ranks = Ranks([[600], [950]], batch_limit=2)
    ranks.fill(policy)
    # On rank 0 it overflows by 350 tokens. Without the small one Stage 2 has no other choice.
    for limit, first in ((349.0, 1), (350.0, 0)):
        pool = pool_of([])
        late = entry(0, 700, deadline_ns=5)
        late.overflow_limit = limit
        pool.add(late)
        pool.add(entry(1, 40))
        pool.add(entry(2, 40))
        admitted = policy.dispatch(ranks.fleet(policy), pool, 10)
        assert admitted[0].request == first


def test_overdue_requests_go_oldest_first() -> None:
    policy, ranks = build("br-0", 2), Ranks([[500, 100, 100], [100, 100, 100]])
    pool = pool_of([50])
    for number, deadline_ns in ((1, 9), (2, None), (3, 5), (4, 10)):
        pool.add(entry(number, 10_000, deadline_ns))
    admitted = policy.dispatch(ranks.fleet(policy), pool, 10)
    assert [request for request, _ in admitted] == [1, 3]


# Settings.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("horizon_steps", -1),
        ("window", 0),
        ("refresh_tokens", 0),
        ("bypass_slots", -1),
        ("theta", -1),
        ("gamma", 0.0),
        ("gamma", 1.1),
        ("gamma", float("nan")),
        ("alpha", 0.0),
        ("beta", -1.0),
        ("beta", float("nan")),
        ("patience", 0.0),
        ("hold_s", -1.0),
        ("hold_s", float("inf")),
        ("kv_peak_quantile", 0.4),
        ("kv_peak_quantile", 1.0),
        ("kv_peak_quantile", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    parameters: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        PolicySettings(**parameters)


@pytest.mark.parametrize(
    ("name", "value"),
    [("horizon_steps", 0), ("window", 1), ("bypass_slots", 0), ("theta", 0), ("gamma", 1.0)],
)
def test_settings_reach_their_bounds(name: str, value: float) -> None:
    parameters: dict[str, Any] = {name: value}
    assert getattr(PolicySettings(**parameters), name) == value


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'nope'; known: .*br-0"):
        build("nope", 2)


@pytest.mark.parametrize("name", SCORES)
def test_scores_draw_the_rank_that_is_better_in_everything(name: str) -> None:
    policy, ranks = build(name, 2, batch_limit=4), Ranks([[10, 10], [300] * 7])
    drawn = [chosen_ranks(decide(policy, ranks, [5]))[0] for _ in range(200)]
    assert drawn.count(0) > 120
    # The worst in everything scores 0, except where the range of the scores is narrower.
    assert (drawn.count(1) == 0) == (name != "s2-dynamic-waiting")


def test_parameters_are_multiples_of_the_ranks_that_are_there() -> None:
    # Numbers of ranks that are removed are never used again: of 10 numbers 4 are left.
    inputs = PolicyInputs(10, 8, PolicySettings(), random.Random(0), NoPrediction())
    assert inputs.fleet_size == 10
    assert replace(inputs, serving=4).fleet_size == 4
    assert replace(inputs, serving=0).fleet_size == 1
    small = PolicyInputs(4, 8, PolicySettings(), random.Random(0), NoPrediction())
    grown, fresh = (make_policy("br-0", one) for one in (replace(inputs, serving=4), small))
    assert isinstance(grown, TwoStage)
    assert isinstance(fresh, TwoStage)
    ours, theirs = grown._settings, fresh._settings
    assert ours.weights.beta == theirs.weights.beta == 4
    assert (ours.theta, ours.patience) == (theirs.theta, theirs.patience)

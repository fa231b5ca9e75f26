"""The hold: which newcomer waits for a moment, and until when."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import Survival
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy, stage_2
from balanceroute.proxy.core.policies.stage_2 import Oldest, _Order, candidates_of, choose_subsets
from balanceroute.proxy.core.policies.two_stage import (
    Roomiest,
    TwoStage,
    TwoStageSettings,
    fill_only_rank,
)
from balanceroute.proxy.core.prediction import OutputPredictor
from balanceroute.proxy.core.projection import Balance, Weights
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Assignment, Fleet, Turnover
from balanceroute.proxy.core.subset import discounts
from balanceroute.proxy.core.waiting import Pool, PoolEntry

if TYPE_CHECKING:
    from balanceroute.proxy.core.policies.two_stage import Round

RANKS, SLOTS = 4, 10
HOLD_NS = 1_000
LOADS = (5_000, 5_000, 5_000, 4_000)


def policy(*, hold_ns: int = HOLD_NS, paper: bool = False) -> TwoStage:
    weights = Weights(np.ones(1), alpha=1.0, beta=float(RANKS))
    settings = TwoStageSettings(
        weights, theta=RANKS, window=64, patience=40.0, hold_ns=hold_ns, paper=paper
    )
    return TwoStage(settings, None, choose_subsets)


def fleet(taken: int) -> Fleet:
    bound = np.full(RANKS, taken)
    return Fleet(
        np.ones(RANKS, np.bool_),
        np.array(LOADS),
        bound,
        SLOTS - bound,
        np.full(RANKS, UNLIMITED),
    )


def pool_of(*prompts: int, since_ns: int = 0) -> Pool:
    pool = Pool(Fcfs())
    for number, tokens in enumerate(prompts):
        ticket = Ticket(tokens)
        times = (None, None, None)
        pool.add(PoolEntry(RequestId(number), ticket, tokens, 0, *times, since_ns=since_ns))
    return pool


def admitted(rule: TwoStage, view: Fleet, pool: Pool, now_ns: int) -> list[tuple[int, int]]:
    return [(int(request), int(rank)) for request, rank in rule.dispatch(view, pool, now_ns)]


def test_a_large_newcomer_waits_for_its_moment_and_small_ones_pass_it() -> None:
    rule, pool = policy(), pool_of(20_000, 500, since_ns=7)
    assert admitted(rule, fleet(taken=8), pool, 8) == [(1, 3)]
    assert rule.next_decision_ns == 7 + HOLD_NS
    assert admitted(rule, fleet(taken=8), pool, 6 + HOLD_NS) == []
    assert admitted(rule, fleet(taken=8), pool, 7 + HOLD_NS) == [(0, 3)]
    assert rule.next_decision_ns is None


@pytest.mark.parametrize(
    ("tokens", "is_held"),
    # Three ranks wait for what is beyond the 1000 tokens of margin: at 4/3 F is 0.
    [(1_000, False), (1_333, False), (1_334, True)],
)
def test_what_fills_more_than_it_costs_is_not_held(tokens: int, *, is_held: bool) -> None:
    rule, pool = policy(), pool_of(tokens)
    assert admitted(rule, fleet(taken=8), pool, 1) == ([] if is_held else [(0, 3)])
    assert (rule.next_decision_ns is not None) == is_held


@pytest.mark.parametrize(("taken", "is_held"), [(6, False), (7, True)])
def test_nothing_is_held_while_a_third_of_the_slots_is_free(taken: int, *, is_held: bool) -> None:
    rule, pool = policy(), pool_of(20_000)
    assert bool(admitted(rule, fleet(taken), pool, 1)) != is_held


@pytest.mark.parametrize(
    ("lately", "now", "is_held"),
    # 0.7 of what it was lately and 0.3 of what it is now, against two thirds.
    [(5, 9, False), (6, 8, False), (6, 9, True), (8, 3, False), (8, 4, True)],
)
def test_a_fleet_that_was_less_full_lately_holds_less(
    lately: int, now: int, *, is_held: bool
) -> None:
    rule = policy()
    for _ in range(2_000):
        admitted(rule, fleet(lately), pool_of(10), 1)
    assert bool(admitted(rule, fleet(now), pool_of(20_000), 1)) != is_held


def test_a_fleet_without_an_open_rank_says_nothing_about_its_slots() -> None:
    rule, closed = policy(), fleet(0)
    closed.is_open[:] = False
    closed.free_slots[:] = 0
    for _ in range(2_000):
        admitted(rule, closed, pool_of(10), 1)
    assert admitted(rule, fleet(taken=8), pool_of(20_000), 1) == []


def test_nothing_is_held_while_slots_are_scarce() -> None:
    rule, pool = policy(), pool_of(*[20_000] * 5)
    assert len(admitted(rule, fleet(taken=9), pool, 1)) == RANKS
    assert rule.next_decision_ns is None


def test_a_hold_is_over_when_no_slot_is_free() -> None:
    rule, pool = policy(), pool_of(20_000)
    admitted(rule, fleet(taken=8), pool, 1)
    admitted(rule, fleet(taken=SLOTS), pool, 2)
    assert rule.next_decision_ns is None


def test_the_paper_holds_nothing() -> None:
    rule, pool = policy(paper=True), pool_of(20_000)
    assert len(admitted(rule, fleet(taken=8), pool, 1)) == 1


def test_without_a_hold_a_large_newcomer_goes_at_once() -> None:
    rule, pool = policy(hold_ns=0), pool_of(20_000)
    assert len(admitted(rule, fleet(taken=8), pool, 0)) == 1
    assert rule.next_decision_ns is None


# The rank with most room is the best rank, whenever it is found without a look at the others.


HORIZON = 3
PERSISTENCE = np.array([1.0, 0.75, 0.5, 0.25])
# Load, free slots, memory.
RANK = st.tuples(st.integers(0, 2_000), st.integers(0, 3), st.integers(0, 1_500))


def entry_of(number: int, tokens: int, rank: int | None = None) -> PoolEntry:
    entry = PoolEntry(RequestId(number), Ticket(tokens), tokens, 0, None, None, None)
    if rank is not None:
        entry.lost_on, entry.restricted = (RankId(rank),), True
    return entry


def fleet_of(ranks: list[tuple[int, int, int]], speeds: list[float] | None = None) -> Fleet:
    loads, free, memory = (np.array(column) for column in zip(*ranks, strict=True))
    bound = np.ones(len(ranks), np.int64)
    told = None if speeds is None else np.array(speeds)
    return Fleet(np.ones(len(ranks), np.bool_), loads, bound, free, memory, speeds=told)


def balance_of(fleet: Fleet) -> Balance:
    ahead = fleet.loads[:, None] * np.linspace(1.0, 0.4, HORIZON + 1)
    weights = Weights(discounts(HORIZON, 0.5), 1.0, 8.0)
    return Balance(ahead, weights, PERSISTENCE, speeds=fleet.speeds)


@given(
    ranks=st.lists(RANK, min_size=1, max_size=12),
    totals=st.lists(st.integers(1, 1_200), min_size=1, max_size=12),
    avoiding=st.sets(st.integers(0, 11)),
)
def test_it_is_the_best_rank_of_those_that_are_open(
    ranks: list[tuple[int, int, int]], totals: list[int], avoiding: set[int]
) -> None:
    fleet = fleet_of(ranks)
    balance = balance_of(fleet)
    roomiest = Roomiest(fleet, balance)
    for number, total in enumerate(totals):
        entry = entry_of(number, total, number % len(ranks) if number in avoiding else None)
        open_ranks, found = fleet.open_to(entry), roomiest.rank_for(entry)
        if not open_ranks.any():
            assert found is None
            continue
        best = balance.best_rank(total, open_ranks)
        assert found in (None, best)
        # The next one sees the admission.
        fleet.bind(best, entry)
        balance.admit(best, total * PERSISTENCE, full=not fleet.free_slots[best])
        roomiest.charged(best)


def test_one_that_fits_is_placed_without_a_look_at_the_others() -> None:
    fleet = fleet_of([(2_000, 2, 9_000), (300, 2, 9_000), (200, 2, 9_000)])
    balance = balance_of(fleet)
    roomiest = Roomiest(fleet, balance)
    found = []
    for number, total in enumerate([400, 200, 150, 100]):
        rank = roomiest.rank_for(entry_of(number, total))
        assert rank is not None
        found.append(rank)
        fleet.bind(rank, entry_of(number, total))
        balance.admit(rank, total * PERSISTENCE)
        roomiest.charged(rank)
    # The two ranks are full then, and the third has no room.
    assert found == [2, 1, 1, 2]
    assert roomiest.rank_for(entry_of(9, 1)) is None


def test_ranks_with_as_much_room_or_of_other_speeds_are_compared() -> None:
    for fleet in (
        fleet_of([(900, 1, 9_000), (300, 1, 9_000), (300, 1, 9_000)]),
        fleet_of([(900, 1, 9_000), (300, 1, 9_000), (100, 1, 9_000)], [1.0, 1.2, 0.8]),
    ):
        assert Roomiest(fleet, balance_of(fleet)).rank_for(entry_of(0, 10)) is None


def test_one_that_would_overflow_is_compared() -> None:
    fleet = fleet_of([(900, 1, 9_000), (300, 1, 9_000)])
    assert Roomiest(fleet, balance_of(fleet)).rank_for(entry_of(0, 599)) == 1
    assert Roomiest(fleet, balance_of(fleet)).rank_for(entry_of(0, 601)) is None


# Reservations: who gets a rank, what the rank takes meanwhile, and when they end.


RESERVING = 4
LARGE = RequestId(0)


def reserving(*, patience: float = 1e9) -> TwoStage:
    weights = Weights(np.ones(1), alpha=1.0, beta=float(RESERVING))
    return TwoStage(
        TwoStageSettings(weights, theta=RESERVING, window=64, patience=patience),
        None,
        choose_subsets,
    )


def entry(number: int, prompt_tokens: int, *, overtaken: int = 0) -> PoolEntry:
    return PoolEntry(
        RequestId(number),
        Ticket(prompt_tokens),
        prompt_tokens,
        age=0,
        deadline_ns=None,
        expires_ns=None,
        lease_ends_ns=None,
        overtaken=overtaken,
    )


def pool_of_sizes(*entries: PoolEntry) -> Pool:
    pool = Pool(Fcfs())
    for one in entries:
        pool.add(one)
    return pool


def reserved_fleet(
    loads: list[int],
    free: list[int],
    *,
    turnover: Turnover | None = None,
    closed: int | None = None,
) -> Fleet:
    is_open = np.array([rank != closed for rank in range(RESERVING)])
    return Fleet(
        is_open,
        np.array(loads),
        np.full(RESERVING, 9),
        np.array(free) * is_open,
        np.full(RESERVING, UNLIMITED),
        turnover=turnover or Turnover(),
    )


def late_large(overtaken: int, size: int = 8_000) -> Pool:
    """Return a pool of ten: a large entry first, then entries of 200 to 1000 tokens."""
    return pool_of_sizes(
        entry(0, size, overtaken=overtaken), *(entry(i, 100 * (11 - i)) for i in range(1, 10))
    )


def admitted_by(rule: TwoStage, view: Fleet, pool: Pool) -> list[tuple[int, int]]:
    return [(int(request), int(rank)) for request, rank in rule.dispatch(view, pool, 0)]


def test_a_reserved_rank_takes_the_smallest_until_the_large_one_is_tolerable() -> None:
    rule, pool = reserving(), late_large(overtaken=20)
    # Rank 1 has a margin of 4000: the large one would overflow it by 4000.
    assert admitted_by(rule, reserved_fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [
        (9, 1)
    ]
    # Another rank does not take it either, and chooses freely.
    assert admitted_by(rule, reserved_fleet([9_000, 5_200, 8_000, 9_000], [0, 0, 1, 0]), pool) == [
        (1, 2)
    ]
    assert admitted_by(rule, reserved_fleet([9_000, 3_100, 9_000, 9_000], [0, 1, 0, 0]), pool) == [
        (8, 1)
    ]
    # An overflow of 2000 costs the three others 6000, as much as the rank lacks.
    assert admitted_by(rule, reserved_fleet([9_000, 3_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [
        (0, 1)
    ]


def test_where_it_fits_a_large_one_goes_though_another_rank_is_reserved_for_it() -> None:
    rule, pool = reserving(), late_large(overtaken=20)
    admitted_by(rule, reserved_fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool)
    assert admitted_by(rule, reserved_fleet([9_000, 5_000, 1_000, 9_000], [0, 0, 1, 0]), pool) == [
        (0, 2)
    ]
    # Rank 1 is free of the reservation: it fills its margin.
    assert admitted_by(rule, reserved_fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [
        (1, 1)
    ]


@pytest.mark.parametrize("empty", [1, 2])
def test_an_empty_rank_takes_a_large_one_whatever_rank_is_reserved_for_it(empty: int) -> None:
    """It can shed nothing more, and while other ranks admit nothing no credit grows."""
    rule, pool = (
        reserving(),
        pool_of_sizes(entry(0, 30_000, overtaken=20), entry(1, 100)),
    )
    assert admitted_by(rule, reserved_fleet([9_000, 5_000, 9_000, 9_000], [0, 1, 0, 0]), pool) == [
        (1, 1)
    ]
    assert rule.reserved == {1: LARGE}
    pool.add(entry(2, 40_000))
    loads, free = [9_000] * RESERVING, [0] * RESERVING
    loads[empty], free[empty] = 0, 1
    view = reserved_fleet(loads, free)
    view.bound[empty] = 0
    assert admitted_by(rule, view, pool) == [(0, empty)]


@pytest.mark.parametrize(
    ("overtaken", "margin", "reserved"),
    [
        (7, 5_700, False),  # Late by 0.7 pools: 72 % of its size are needed.
        (7, 5_800, True),
        (20, 1_500, False),  # By 2: a fifth.
        (20, 1_600, True),
        (25, 0, True),
    ],
)
def test_the_later_an_entry_is_the_less_room_it_needs(
    overtaken: int, margin: int, *, reserved: bool
) -> None:
    rule, pool = reserving(), late_large(overtaken)
    loads = [9_000, 9_000 - margin, 9_000, 9_000]
    (choice,) = admitted_by(rule, reserved_fleet(loads, [0, 1, 0, 0]), pool)
    # A rank that is not reserved takes the entry that fills it best.
    assert choice[0] in ({9, 0} if reserved else {1})


def test_a_late_entry_may_fill_a_rank_beyond_the_target() -> None:
    # With the slot taken the ranks would hold some 8000 tokens each.
    loads = [9_000, 6_500, 7_000, 7_000]
    for overtaken, first in ((2, 1), (3, 0)):
        pool = late_large(overtaken, size=2_500)
        assert admitted_by(reserving(), reserved_fleet(loads, [0, 1, 0, 0]), pool) == [(first, 1)]


def test_a_closed_rank_loses_its_reservation() -> None:
    rule, pool = reserving(), late_large(overtaken=20)
    loads = [9_000, 5_000, 9_000, 9_000]
    assert admitted_by(rule, reserved_fleet(loads, [0, 1, 0, 0]), pool) == [(9, 1)]
    admitted_by(rule, reserved_fleet(loads, [0, 0, 0, 1], closed=1), pool)
    # Meanwhile another rank has more room.
    loads = [9_000, 5_000, 4_000, 9_000]
    assert admitted_by(rule, reserved_fleet(loads, [0, 0, 1, 0]), pool)[0][0] in {
        7,
        8,
    }


def test_a_rank_is_free_again_when_its_entry_avoids_it() -> None:
    rule, pool = reserving(), late_large(overtaken=20)
    loads = [9_000, 5_000, 9_000, 9_000]
    assert admitted_by(rule, reserved_fleet(loads, [0, 1, 0, 0]), pool) == [(9, 1)]
    pool.remove(LARGE)
    lost = entry(0, 8_000, overtaken=21)
    lost.lost_on, lost.restricted = (RankId(1),), True
    pool.add(lost)
    assert admitted_by(rule, reserved_fleet(loads, [0, 1, 0, 0]), pool) == [(1, 1)]


def test_a_large_one_that_stays_only_briefly_is_admitted_at_once() -> None:
    brief, lasting = Turnover(), Turnover()
    for turnover, steps in ((brief, 1), (lasting, 1_000)):
        for _ in range(40):
            turnover.leave(8_000, steps)
        turnover.per_step = 0.4
    loads = [9_000, 5_000, 9_000, 9_000]
    for turnover, first in ((brief, 0), (lasting, 9)):
        view = reserved_fleet(loads, [0, 1, 0, 0], turnover=turnover)
        assert admitted_by(reserving(), view, late_large(overtaken=20)) == [(first, 1)]


@given(size=st.integers(10_000, 1_000_000), patience=st.integers(1, 40))
def test_no_entry_is_too_large_to_be_admitted_in_the_end(size: int, patience: int) -> None:
    rule, pool = reserving(patience=float(patience)), late_large(overtaken=0, size=size)
    for number in range(10, 10_000):
        view = reserved_fleet([9_000, 8_500, 9_000, 9_000], [0, 1, 0, 0])
        if (0, 1) in admitted_by(rule, view, pool):
            return
        pool.add(entry(number, 300))
    pytest.fail("it is still there")


# Ranks whose outlooks are made together choose what they would choose one by one.


MANY_RANKS = 40
WAITING = 120


def chosen(seed: int) -> list[tuple[int, int]]:
    """Return the admissions of six rounds of a saturated fleet, of which stage 2 makes all."""
    rng = random.Random(seed)
    weights = Weights(np.ones(1), alpha=1.0, beta=float(MANY_RANKS))
    rule = TwoStage(
        TwoStageSettings(weights, theta=3 * MANY_RANKS, window=16, patience=5_000.0),
        None,
        stage_2.choose_subsets,
    )
    pool, arrived = Pool(Fcfs()), 0
    found: list[tuple[int, int]] = []
    reserved: set[int] = set()
    for _ in range(6):
        while len(pool) < WAITING:
            # The first three are larger than any rank's room, and late.
            tokens = 9_000 if arrived < 3 else rng.choice((100, 300, 900, 2_700))
            tokens += rng.randint(0, 50)
            entry = PoolEntry(RequestId(arrived), Ticket(tokens), tokens, 0, None, None, None)
            entry.overtaken = 180 if arrived < 3 else 0
            pool.add(entry)
            arrived += 1
        free = np.array([rng.choice((0, 1, 1, 1, 2, 3)) for _ in range(MANY_RANKS)])
        loads = np.array([rng.randint(6_000, 10_000) for _ in range(MANY_RANKS)])
        limit = np.where(np.arange(MANY_RANKS) % 7 == 0, 2_000, UNLIMITED)
        fleet = Fleet(np.ones(MANY_RANKS, np.bool_), loads, np.full(MANY_RANKS, 9), free, limit)
        found += [(int(request), int(rank)) for request, rank in rule.dispatch(fleet, pool, 0)]
        reserved |= set(rule.reserved)
    assert reserved, "no rank makes room for a large request"
    return found


@pytest.mark.parametrize("seed", range(8))
def test_outlooks_that_are_made_together_change_no_choice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = chosen(seed)
    # An outlook for each rank alone, of entries that are looked at anew after each admission.
    monkeypatch.setattr(stage_2, "_TOGETHER", 1)
    monkeypatch.setattr(stage_2, "_MOST_SPARE", 1)
    assert chosen(seed) == together


# A decision that fills many slots asks the predictor in few calls.


BURST_RANKS, BATCH = 20, 30


class Counted(Survival):
    """Counts the calls, and about how many requests they asked."""

    def __init__(self) -> None:
        super().__init__([3, 7, 20])
        self.asked: list[int] = []

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.asked.append(len(requests))
        return super().survival(requests, ages, steps)


# Stage 1 admits all of them; or all but as many as there are ranks, and Stage 2 the rest.
@pytest.mark.parametrize("waiting", [BURST_RANKS * BATCH, 2 * BURST_RANKS * BATCH])
def test_a_burst_asks_in_few_calls(waiting: int) -> None:
    predictor, rng, pool = Counted(), random.Random(1), Pool(Fcfs())
    for number in range(waiting):
        tokens = rng.randint(100, 9_000)
        pool.add(PoolEntry(RequestId(number), Ticket(tokens), tokens, 0, None, None, None))
    inputs = PolicyInputs(BURST_RANKS, BATCH, PolicySettings(), rng, predictor)
    none = np.zeros(BURST_RANKS, np.int64)
    free, memory = np.full(BURST_RANKS, BATCH), np.full(BURST_RANKS, UNLIMITED)
    fleet = Fleet(np.ones(BURST_RANKS, np.bool_), none.copy(), none, free, memory)
    assert len(make_policy("br-h", inputs).dispatch(fleet, pool, 0)) == BURST_RANKS * BATCH
    assert len(predictor.asked) <= 5
    assert sum(predictor.asked) <= BURST_RANKS * BATCH + 200


# The candidates of a round follow its admissions as the pool does.


WINDOW = 4


def pool_of_candidates(count: int) -> Pool:
    pool = Pool(Fcfs())
    for number in range(count):
        tokens = 100 + number
        times = (None, None, None)
        pool.add(PoolEntry(RequestId(number), Ticket(tokens), tokens, 0, *times))
    return pool


@given(st.integers(1, 20), st.lists(st.integers(0, 19), max_size=12))
def test_they_are_those_of_the_pool_after_every_admission(count: int, places: list[int]) -> None:
    pool = pool_of_candidates(count)
    # Some admissions are of entries behind all that the round looks at.
    oldest = Oldest(pool.first(WINDOW + len(places)), WINDOW, len(places), set())
    for place in places:
        if place < len(pool):
            oldest.admitted(pool.admit(pool.at(place).request))
        found, expected = oldest.first(), candidates_of(pool.first(WINDOW), set())
        assert found is not None
        left = found.is_left
        assert [found.entries[one] for one in left.nonzero()[0]] == expected.entries
        assert found.sizes[left].tolist() == expected.sizes.tolist()
        assert found.overtaken[left].tolist() == expected.overtaken.tolist()
        assert found.beyond_turn[left].tolist() == expected.beyond_turn.tolist()
        for number in range(count):
            is_there = RequestId(number) in [entry.request for entry in expected.entries]
            assert (found.place_of(RequestId(number)) is not None) == is_there


def test_one_that_may_not_go_to_every_rank_needs_another_look_once_it_is_a_candidate() -> None:
    pool = pool_of_candidates(WINDOW + 1)
    pool.at(WINDOW).restricted = True
    oldest = Oldest(pool.first(WINDOW + 1), WINDOW, 1, set())
    assert oldest.first() is not None
    oldest.admitted(pool.admit(RequestId(0)))
    assert oldest.first() is None


# The order in which stage 2 serves the ranks, against a search of all of them before each turn.


ORDER_RANK = st.tuples(st.integers(0, 300), st.integers(0, 3))


@given(
    ranks=st.lists(ORDER_RANK, min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 200), min_size=18, max_size=18),
)
def test_the_rank_with_most_room_is_next_also_when_the_envelope_rises(
    ranks: list[tuple[int, int]], sizes: list[int]
) -> None:
    loads = np.array([[load] for load, _ in ranks], np.float64)
    free = np.array([slots for _, slots in ranks])
    balance = Balance(loads, Weights(np.ones(1), 1.0, 2.0), np.ones(1))
    order = _Order(
        cast("Round", SimpleNamespace(balance=balance, fleet=SimpleNamespace(free_slots=free)))
    )
    for size in sizes:
        rank = order.roomiest()
        is_open = [g for g in range(len(ranks)) if free[g] > 0]
        if not is_open:
            assert rank is None
            return
        margins = balance.safe_margins
        assert rank == max(is_open, key=lambda g: (margins[g], free[g], -g))
        balance.admit(rank, np.array([float(size)]))
        free[rank] -= 1
        if free[rank] > 0:
            order.serve_again(rank)


# Where nothing is to choose: the stages would come to the same, and nothing is predicted.


NOW_NS = 50
ONE_BATCH = 8


class Unasked:
    """A predictor that nobody may ask."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        raise AssertionError


def one_rank(taken: Sequence[int], kv_limit: int = UNLIMITED) -> Fleet:
    bound = np.array(taken)
    loads = 10 * bound
    return Fleet(
        np.ones(len(taken), np.bool_),
        loads,
        bound,
        ONE_BATCH - bound,
        np.maximum(kv_limit - loads, 0),
    )


def pool_of_one(
    *entries: tuple[int, int], deadline_ns: int | None = None, lost_on: int = -1
) -> Pool:
    pool = Pool(Fcfs())
    avoided = () if lost_on < 0 else (RankId(lost_on),)
    for number, (tokens, slots) in enumerate(entries):
        ticket = Ticket(tokens, slots)
        times = (deadline_ns, None, None)
        pool.add(PoolEntry(RequestId(number), ticket, tokens, 0, *times, lost_on=avoided))
    return pool


def dispatched(
    view: Fleet, pool: Pool, predictor: OutputPredictor, hold_s: float = 0.0
) -> list[Assignment]:
    settings, rng = PolicySettings(hold_s=hold_s), random.Random(1)
    inputs = PolicyInputs(len(view.loads), ONE_BATCH, settings, rng, predictor)
    return make_policy("br-h", inputs).dispatch(view, pool, NOW_NS)


@given(
    taken=st.integers(0, ONE_BATCH - 1),
    full=st.integers(0, 2),
    entries=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 3)), min_size=1, max_size=9),
    kv_limit=st.integers(10, 400) | st.just(UNLIMITED),
)
def test_the_stages_come_to_the_same(
    taken: int, full: int, entries: list[tuple[int, int]], kv_limit: int
) -> None:
    view = one_rank([taken, *[ONE_BATCH] * full], kv_limit)
    pool = pool_of_one(*entries)
    forced = fill_only_rank(view, pool, NOW_NS)
    assume(forced is not None)
    other = one_rank([taken, *[ONE_BATCH] * full], kv_limit)
    # With this, entries take more room than is known beforehand, so the stages decide.
    other.room_after = lambda rank, entry: int(other.free_kv_tokens[rank]) - entry.kv_tokens
    assert forced == dispatched(other, pool_of_one(*entries), Survival([3, 7, 20]))
    assert len(pool) == 0


def test_nothing_is_predicted() -> None:
    view, pool = (
        one_rank([ONE_BATCH, 2]),
        pool_of_one((5, 1), (9, 1), (9, 2)),
    )
    assert dispatched(view, pool, Unasked()) == [(2, 1), (1, 1), (0, 1)]


OPEN = {
    "two ranks have slots": (one_rank([1, 1]), pool_of_one((5, 1))),
    "too few slots": (one_rank([7]), pool_of_one((5, 1), (5, 1))),
    "too little memory": (one_rank([1], kv_limit=14), pool_of_one((5, 1))),
    "an entry is late": (one_rank([1]), pool_of_one((5, 1), deadline_ns=NOW_NS)),
    "an entry avoids the rank": (one_rank([1]), pool_of_one((5, 1), lost_on=0)),
}


@pytest.mark.parametrize("why", OPEN)
def test_the_stages_decide_what_is_open(why: str) -> None:
    view, pool = OPEN[why]
    waiting = len(pool)
    assert fill_only_rank(view, pool, NOW_NS) is None
    assert len(pool) == waiting


def test_the_stages_decide_while_a_request_may_be_held() -> None:
    pool = pool_of_one((5, 1))
    with pytest.raises(AssertionError):
        dispatched(one_rank([7, ONE_BATCH]), pool, Unasked(), hold_s=1.0)
    assert dispatched(one_rank([7, ONE_BATCH]), pool, Unasked()) == [(0, 0)]


def test_a_rank_alone_holds_nothing() -> None:
    assert dispatched(one_rank([7]), pool_of_one((5, 1)), Unasked(), hold_s=1.0) == [(0, 0)]

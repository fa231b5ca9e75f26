"""The rank with most room is the best rank, whenever it is found without a look at the others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies.two_stage import Roomiest
from balanceroute.proxy.core.projection import Balance, Weights
from balanceroute.proxy.core.ranks import Fleet
from balanceroute.proxy.core.subset import discounts
from balanceroute.proxy.core.waiting import PoolEntry

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

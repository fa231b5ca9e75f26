"""The candidates of a round follow its admissions as the pool does."""

from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.policies.stage_2 import Oldest, candidates_of
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.waiting import Pool, PoolEntry

WINDOW = 4


def pool_of(count: int) -> Pool:
    pool = Pool(Fcfs())
    for number in range(count):
        tokens = 100 + number
        times = (None, None, None)
        pool.add(PoolEntry(RequestId(number), Ticket(tokens), tokens, 0, *times))
    return pool


@given(st.integers(1, 20), st.lists(st.integers(0, 19), max_size=12))
def test_they_are_those_of_the_pool_after_every_admission(count: int, places: list[int]) -> None:
    pool = pool_of(count)
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
    pool = pool_of(WINDOW + 1)
    pool.at(WINDOW).restricted = True
    oldest = Oldest(pool.first(WINDOW + 1), WINDOW, 1, set())
    assert oldest.first() is not None
    oldest.admitted(pool.admit(RequestId(0)))
    assert oldest.first() is None

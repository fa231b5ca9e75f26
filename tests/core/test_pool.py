"""The pool keeps order of arrival, counts overtakings, and knows whose time has come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.waiting import Pool, PoolEntry


def entry(
    number: int,
    prompt_tokens: int = 10,
    *,
    deadline_ns: int | None = None,
    expires_ns: int | None = None,
    lease_ends_ns: int | None = None,
) -> PoolEntry:
    return PoolEntry(
        RequestId(number),
        Ticket(prompt_tokens),
        prompt_tokens,
        age=0,
        deadline_ns=deadline_ns,
        expires_ns=expires_ns,
        lease_ends_ns=lease_ends_ns,
    )


def pool_of(*numbers: int) -> Pool:
    pool = Pool(Fcfs())
    for number in numbers:
        pool.add(entry(number))
    return pool


def numbers_of(pool: Pool) -> list[int]:
    return [waiting.request for waiting in pool]


def test_entries_keep_the_order_of_arrival() -> None:
    pool = pool_of(2, 3, 7, 9)
    assert numbers_of(pool) == [2, 3, 7, 9]
    assert [waiting.request for waiting in pool.first(2)] == [2, 3]
    assert [waiting.request for waiting in pool.first(9)] == [2, 3, 7, 9]
    assert len(pool) == 4


def test_an_older_request_that_comes_back_goes_to_its_place() -> None:
    pool = pool_of(2, 3, 7, 9)
    pool.admit(RequestId(3))
    pool.add(entry(3))
    pool.add(entry(0))
    assert numbers_of(pool) == [0, 2, 3, 7, 9]


def test_a_second_add_asserts() -> None:
    pool = pool_of(4)
    with pytest.raises(AssertionError, match="request 4 is pooled twice"):
        pool.add(entry(4))
    assert numbers_of(pool) == [4]


@pytest.mark.parametrize("number", [0, 3, 9])
def test_taking_out_what_is_not_there_asserts(number: int) -> None:
    pool = pool_of(2, 7)
    for take in (pool.admit, pool.remove):
        with pytest.raises(AssertionError, match=f"request {number} does not wait here"):
            take(RequestId(number))
    assert numbers_of(pool) == [2, 7]


def test_an_admission_overtakes_the_older_ones_only() -> None:
    pool = pool_of(1, 2, 3, 4)
    pool.admit(RequestId(3))
    pool.admit(RequestId(4))
    pool.admit(RequestId(1))
    assert {waiting.request: waiting.overtaken for waiting in pool} == {2: 2}


def test_leaving_for_another_reason_overtakes_no_one() -> None:
    pool = pool_of(1, 2, 3)
    pool.remove(RequestId(3))
    assert [waiting.overtaken for waiting in pool] == [0, 0]


def test_a_request_that_comes_back_is_counted_anew() -> None:
    pool = pool_of(1, 2, 3)
    pool.admit(RequestId(2))
    assert pool.remove(RequestId(1)).overtaken == 1
    pool.add(entry(1))
    pool.admit(RequestId(3))
    assert [waiting.overtaken for waiting in pool] == [1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "admit", "remove"]), st.integers(0, 15)), max_size=60
    )
)
def test_order_and_overtakings_equal_a_naive_recount(operations: list[tuple[str, int]]) -> None:
    pool = Pool(Fcfs())
    log: list[tuple[str, int]] = []
    for name, number in operations:
        present = RequestId(number) in pool
        if present == (name == "add"):
            continue
        log.append((name, number))
        if name == "add":
            pool.add(entry(number))
        else:
            (pool.admit if name == "admit" else pool.remove)(RequestId(number))
        waiting: dict[int, int] = {}  # Number -> place in the log where it entered.
        for place, (past_name, past) in enumerate(log):
            if past_name == "add":
                waiting[past] = place
            else:
                del waiting[past]
        assert numbers_of(pool) == sorted(waiting)
        assert len(pool) == len(waiting)
        for one in pool:
            later_admitted = [
                past
                for past_name, past in log[waiting[one.request] :]
                if past_name == "admit" and past > one.request
            ]
            assert one.overtaken == len(later_admitted)


@given(st.integers(1, 12), st.lists(st.integers(0, 11), unique=True), st.integers(0, 3))
def test_admitting_together_overtakes_as_one_by_one(
    count: int, admitted: list[int], first: int
) -> None:
    admitted = [number for number in admitted if number < count]
    together, alone = pool_of(*range(count)), pool_of(*range(count))
    for pool in (together, alone):
        pool.begin_round()
        for number in admitted[:first]:
            pool.admit(RequestId(number))
    together.admit_all([RequestId(number) for number in admitted[first:]])
    for number in admitted[first:]:
        alone.admit(RequestId(number))
    assert numbers_of(together) == numbers_of(alone)
    assert together.slots == alone.slots
    assert [one.overtaken for one in together] == [one.overtaken for one in alone]
    assert list(together.taken) == list(alone.taken) == admitted
    for pool in (together, alone):
        pool.undo_round()
        assert numbers_of(pool) == [*range(count)]
        assert [one.overtaken for one in pool] == [0] * count


def test_what_was_removed_in_a_round_that_is_undone_overtook_nobody() -> None:
    pool = pool_of(1, 2, 3)
    pool.begin_round()
    pool.admit(RequestId(2))
    pool.remove(RequestId(3))
    pool.undo_round()
    assert [(one.request, one.overtaken) for one in pool] == [(1, 0), (2, 0), (3, 0)]


def test_overdue_entries_come_oldest_first_and_stay() -> None:
    pool = Pool(Fcfs())
    for number, deadline_ns in ((1, 30), (2, 10), (3, None), (4, 20)):
        pool.add(entry(number, deadline_ns=deadline_ns))
    assert pool.overdue(9) == []
    assert [late.request for late in pool.overdue(10)] == [2]
    assert [late.request for late in pool.overdue(10)] == [2]
    assert [late.request for late in pool.overdue(30)] == [1, 2, 4]
    pool.admit(RequestId(2))
    assert [late.request for late in pool.overdue(10**12)] == [1, 4]
    assert numbers_of(pool) == [1, 3, 4]


CLOCKS = ["deadline_ns", "expires_ns", "lease_ends_ns"]


def due(pool: Pool, clock: str, now_ns: int) -> list[int]:
    """Return whose time has come by the named clock, in ascending order."""
    if clock == "deadline_ns":
        return sorted(late.request for late in pool.overdue(now_ns))
    return sorted((pool.expired if clock == "expires_ns" else pool.lapsed)(now_ns))


def timed(number: int, clock: str, time_ns: int | None) -> PoolEntry:
    new = entry(number)
    setattr(new, clock, time_ns)
    return new


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_time_counts_from_the_very_nanosecond(clock: str) -> None:
    pool = Pool(Fcfs())
    pool.add(timed(1, clock, 10))
    assert due(pool, clock, 9) == []
    assert due(pool, clock, 10) == [1]


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_times_of_entries_that_left_are_forgotten(clock: str) -> None:
    pool = Pool(Fcfs())
    for number in (1, 2, 3):
        pool.add(timed(number, clock, 10))
    pool.admit(RequestId(1))
    pool.remove(RequestId(2))
    assert due(pool, clock, 10) == [3]


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_request_that_comes_back_has_its_new_time_only(clock: str) -> None:
    pool = Pool(Fcfs())
    pool.add(timed(1, clock, 10))
    pool.remove(RequestId(1))
    pool.add(timed(1, clock, 20))
    assert due(pool, clock, 19) == []
    assert due(pool, clock, 20) == [1]


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_request_that_comes_back_with_the_same_time_is_due_once(clock: str) -> None:
    # A prefill that takes no time ends at the instant of the one that was lost.
    pool = Pool(Fcfs())
    for _ in range(3):
        pool.add(timed(1, clock, 10))
        pool.remove(RequestId(1))
    pool.add(timed(1, clock, 10))
    assert due(pool, clock, 10) == [1]


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_request_that_comes_back_without_a_time_is_never_due(clock: str) -> None:
    pool = Pool(Fcfs())
    pool.add(timed(1, clock, 10))
    pool.remove(RequestId(1))
    pool.add(timed(1, clock, None))
    assert due(pool, clock, 10**12) == []


@given(
    clock=st.sampled_from(CLOCKS),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["add", "leave", "ask"]),
            st.integers(0, 9),
            st.none() | st.integers(1, 40),
        ),
        max_size=60,
    ),
)
def test_the_queues_agree_with_a_look_at_every_entry(
    clock: str, operations: list[tuple[str, int, int | None]]
) -> None:
    pool, now_ns = Pool(Fcfs()), 0
    for name, number, amount in operations:
        if name == "add" and RequestId(number) not in pool:
            # Some are late already: a lease may end before its entry is pooled.
            pool.add(timed(number, clock, None if amount is None else now_ns + amount - 20))
        elif name == "leave" and RequestId(number) in pool:
            pool.remove(RequestId(number))
        elif name == "ask":
            now_ns += amount or 0
            times = {one.request: getattr(one, clock) for one in pool}
            late = [one for one, time_ns in times.items() if time_ns is not None]
            late = [one for one in late if times[one] <= now_ns]
            assert due(pool, clock, now_ns) == late
            if clock != "deadline_ns":
                for one in late:  # The caller's duty.
                    pool.remove(one)


def test_the_next_removal_is_the_earliest_expiry_or_lapse() -> None:
    pool = Pool(Fcfs())
    assert pool.next_removal_ns() is None
    pool.add(entry(1, deadline_ns=1, expires_ns=50))
    assert pool.next_removal_ns() == 50
    pool.add(entry(2, lease_ends_ns=30))
    assert pool.next_removal_ns() == 30
    pool.add(entry(3, expires_ns=20, lease_ends_ns=40))
    assert pool.next_removal_ns() == 20
    pool.remove(RequestId(3))
    pool.admit(RequestId(2))
    assert pool.next_removal_ns() == 50
    assert pool.expired(50) == [1]
    assert pool.next_removal_ns() is None


@pytest.mark.parametrize("clock", CLOCKS)
def test_replacing_an_entry_changes_its_times_and_nothing_else(clock: str) -> None:
    pool = pool_of(1, 2)
    pool.add(timed(3, clock, 10))
    pool.add(entry(4))
    pool.admit(RequestId(4))
    pool.replace(timed(3, clock, 20))
    assert numbers_of(pool) == [1, 2, 3]
    assert [waiting.overtaken for waiting in pool] == [1, 1, 1]
    assert due(pool, clock, 19) == []
    assert due(pool, clock, 20) == [3]


def test_the_slots_of_those_that_wait_are_counted() -> None:
    pool = pool_of(1)
    for number, slots in ((2, 4), (3, 2)):
        wide = PoolEntry(RequestId(number), Ticket(10, slots), 10, 0, None, None, None)
        assert wide.kv_tokens == 10 * slots
        pool.add(wide)
    assert pool.slots == 7
    pool.admit(RequestId(2))
    pool.remove(RequestId(1))
    assert pool.slots == 2


def test_the_mean_prompt_starts_at_the_first_and_leans_towards_the_later_ones() -> None:
    pool = Pool(Fcfs())
    pool.add(entry(0, prompt_tokens=100))
    assert pool.mean_prompt_tokens == 100.0
    for number in range(1, 2_000):
        pool.add(entry(number, prompt_tokens=200))
        assert 100.0 < pool.mean_prompt_tokens <= 200.0
    assert pool.mean_prompt_tokens == pytest.approx(200.0, rel=1e-3)

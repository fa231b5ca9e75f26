"""The pool keeps order of arrival, counts overtakings, and knows whose time has come."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.driver import Driver

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Admit,
    DecodeStarted,
    Eligible,
    Expire,
    FirstToken,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    RankId,
    ReleasePrefill,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.prefill import PrefillRequest, PrefillView
from balanceroute.proxy.core.prefill.budgets import Pairs
from balanceroute.proxy.core.queueing import QUEUE_ORDERS, Fcfs
from balanceroute.proxy.core.resources import lease_used, pool_entry
from balanceroute.proxy.core.waiting import Pool, PoolEntry, Timers


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


# Timers agree with a look at every time, whatever was set, cleared or set again.


A, B, C, D = (RequestId(number) for number in range(4))


def timers_of(**times: int) -> Timers:
    timers = Timers()
    for name, time_ns in times.items():
        timers.set({"a": A, "b": B, "c": C}[name], time_ns)
    return timers


def test_the_earliest_are_due_first_and_on_a_tie_the_lowest() -> None:
    timers = timers_of(c=10, a=20, b=10)
    assert timers.first_ns() == 10
    assert timers.take_due(9) == []
    assert timers.take_due(20) == [B, C, A]
    assert timers.first_ns() is None


def test_who_was_taken_is_not_due_again() -> None:
    timers = timers_of(a=10)
    assert timers.take_due(10) == [A]
    assert timers.take_due(10) == []


def test_who_was_only_asked_for_stays_due() -> None:
    timers = timers_of(a=20, b=10, c=30)
    assert timers.due(20) == [B, A]
    assert timers.due(20) == [B, A]
    assert timers.first_ns() == 10
    assert timers.take_due(30) == [B, A, C]


@pytest.mark.parametrize("time_ns", [5, 50])
def test_a_new_time_replaces_the_old_one(time_ns: int) -> None:
    timers = timers_of(a=10)
    timers.set(A, time_ns)
    assert timers.first_ns() == time_ns
    assert timers.take_due(49) == ([A] if time_ns == 5 else [])
    assert timers.take_due(50) == ([] if time_ns == 5 else [A])


def test_never_replaces_a_time() -> None:
    timers = timers_of(a=10)
    timers.set(A, None)
    assert timers.first_ns() is None
    assert timers.take_due(10) == []


def test_a_time_that_is_forgotten_and_set_again_is_due_once() -> None:
    timers = timers_of(a=10)
    timers.clear(A)
    timers.clear(A)
    timers.set(A, 10)
    assert timers.due(10) == [A]
    assert timers.take_due(10) == [A]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "set", "clear", "take", "due", "first"]),
            st.integers(0, 5),
            st.integers(0, 30),
        ),
        max_size=80,
    )
)
def test_they_agree_with_a_look_at_every_time(operations: list[tuple[str, int, int]]) -> None:
    timers = Timers()
    times: dict[RequestId, int] = {}
    for name, number, time_ns in operations:
        request = RequestId(number)
        due = sorted((due_ns, one) for one, due_ns in times.items() if due_ns <= time_ns)
        match name:
            case "set":
                timers.set(request, time_ns)
                times[request] = time_ns
            case "clear":
                timers.clear(request)
                times.pop(request, None)
            case "take":
                assert timers.take_due(time_ns) == [one for _, one in due]
                for _, one in due:
                    del times[one]
            case "due":
                assert timers.due(time_ns) == [one for _, one in due]
            case _:
                assert timers.first_ns() == min(times.values(), default=None)


def test_forgotten_times_take_no_room() -> None:
    timers = timers_of(a=1)
    for number in range(10_000):
        timers.set(B, 1_000 + number)
    timers.clear(B)
    assert len(timers._heap) < 100
    assert timers.take_due(10**9) == [A]


# How much of their leases pooled requests have used.


def limited(number: int, lease_ends_ns: int | None) -> PoolEntry:
    return PoolEntry(RequestId(number), Ticket(10), 10, 0, None, None, lease_ends_ns)


@pytest.mark.parametrize(("now_ns", "used"), [(0, 0.0), (40, 0.5), (80, 1.0), (90, 1.0)])
def test_the_lease_that_ends_first_counts(now_ns: int, used: float) -> None:
    pool, config = Pool(Fcfs()), SchedulerConfig(1, 1, lease_ns=100, lease_margin_ns=20)
    assert lease_used(pool, config, now_ns) == 0.0
    pool.add(limited(1, 95))
    pool.add(limited(2, 80))
    pool.add(limited(3, None))
    assert lease_used(pool, config, now_ns) == used


def test_a_margin_takes_half_of_a_lease_at_most() -> None:
    pool, config = Pool(Fcfs()), SchedulerConfig(1, 1, lease_ns=100, lease_margin_ns=90)
    pool.add(limited(1, 50))
    assert lease_used(pool, config, 25) == 0.5


def test_without_leases_nothing_is_used() -> None:
    assert lease_used(Pool(Fcfs()), SchedulerConfig(1, 1), 0) is None


# Requests before prefill: their order, how long they wait, and their expiry.


P0, P1 = PrefillerId(0), PrefillerId(1)
RANK0 = RankId(0)


def test_a_request_that_waits_too_long_before_prefill_is_given_up_in_silence() -> None:
    driver = Driver(probe_limit=1, queue_ttl_ns=50)
    driver(RequestArrived(A, Ticket(10)))
    driver.at(
        10,
        RequestArrived(B, Ticket(10)),
        RequestArrived(C, Ticket(10)),
    )
    assert driver.at(59, Tick()) == []
    # Its own wait ended with its prefill.
    assert driver.at(60, Tick()) == [Expire(B), Expire(C)]
    assert driver(PrefillDone(A, 10), Tick()) == [Admit(A, RANK0)]
    with pytest.raises(LifecycleError, match="unknown or has ended"):
        driver(RequestCancelled(B))


def test_who_is_given_up_makes_way_for_the_next_one() -> None:
    driver = Driver(prefiller_kv_tokens=20, queue_ttl_ns=50)
    driver(
        RequestArrived(A, Ticket(10)),
        RequestArrived(B, Ticket(15)),
    )
    driver.at(10, RequestArrived(C, Ticket(10)))
    assert driver.at(50, Tick()) == [
        Expire(B),
        StartPrefill(C, P0, 10),
    ]


def test_a_lost_prefill_gains_no_time_in_the_queue() -> None:
    driver = Driver(probe_limit=1, queue_ttl_ns=50)
    driver(
        RequestArrived(A, Ticket(10)),
        PrefillDone(A, 10),
        RequestArrived(B, Ticket(10)),
    )
    driver.at(80, PrefillLost(A))
    assert driver(Tick()) == [Expire(A)]


def test_a_lapsed_lease_has_one_chance_of_a_prefill_though_its_time_in_the_queue_is_over() -> None:
    for busy in (False, True):
        driver = Driver(probe_limit=1, queue_ttl_ns=50)
        driver.to_decode(C)
        driver(
            RequestArrived(A, Ticket(10)),
            PrefillDone(A, 10, lease_expires_ns=70),
        )
        if busy:
            driver.at(60, RequestArrived(B, Ticket(10)))
        prefills = [] if busy else [StartPrefill(A, P0, 10)]
        assert driver.at(70, Tick()) == [ReleasePrefill(A, P0), *prefills]
        assert driver(Tick()) == ([Expire(A)] if busy else [])


def test_a_recomputed_request_has_its_whole_time_in_the_queue() -> None:
    driver = Driver(probe_limit=1, queue_ttl_ns=50)
    driver.to_decode(A)
    driver(DecodeStarted(A))
    driver.at(100, RequestArrived(B, Ticket(10)), RequestRecomputed(A))
    assert driver.at(149, Tick()) == []
    assert driver.at(150, Tick()) == [Expire(A)]


def test_a_lease_that_is_shorter_than_its_margin_is_used_for_its_half() -> None:
    driver = Driver(lease_margin_ns=90)
    driver.to_decode(A)
    driver(RequestArrived(B, Ticket(10)))
    driver.at(20, PrefillDone(B, 10, lease_expires_ns=60))
    assert driver.at(39, Tick()) == []
    assert ReleasePrefill(B, P0) in driver.at(40, Tick())


def test_a_request_whose_lease_lapsed_is_still_known_as_overtaken() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver(
        RequestArrived(B, Ticket(10)),
        PrefillDone(B, 10, lease_expires_ns=70),
    )
    driver.scheduler.pool.entries[B].overtaken = 3
    assert ReleasePrefill(B, P0) in driver.at(70, Tick())
    driver(PrefillDone(B, 10))
    assert [(one.request, one.overtaken) for one in driver.scheduler.pool] == [(B, 3)]


def test_the_next_deadline_is_when_a_tick_acts_of_its_own_accord() -> None:
    driver = Driver(probe_limit=1, queue_ttl_ns=100, ttl_ns=70, deadline_ns=1, lease_margin_ns=5)
    deadline_ns = driver.scheduler.next_deadline_ns
    assert deadline_ns() is None
    driver.to_decode(A)
    assert deadline_ns() is None
    driver(RequestArrived(B, Ticket(10)))
    assert deadline_ns() is None
    driver.at(10, RequestArrived(C, Ticket(10)))
    assert deadline_ns() == 110
    driver.at(20, PrefillDone(B, 10, lease_expires_ns=60))
    assert deadline_ns() == 55
    assert driver.at(55, Tick()) == [ReleasePrefill(B, P0)]
    driver.at(56, PrefillDone(C, 10))
    assert deadline_ns() == 126
    driver.at(57, PrefillDone(B, 10))
    assert deadline_ns() == 90
    assert driver.at(90, Tick()) == [
        ReleasePrefill(B, P0),
        Expire(B),
    ]
    assert deadline_ns() == 126
    driver(RequestFinished(A), Tick())
    assert deadline_ns() is None


def test_waiting_counts_whom_no_rank_has_taken() -> None:
    driver = Driver(probe_limit=1)
    counts = []
    for event in (
        RequestArrived(A, Ticket(10)),
        RequestArrived(B, Ticket(10)),
        PrefillDone(A, 10),
        RequestArrived(C, Ticket(10, prefill=False)),
        Tick(),
        RequestCancelled(C),
        RequestFinished(A),
        RequestFailed(B),
    ):
        driver(event)
        counts.append(driver.scheduler.waiting)
    assert counts == [1, 2, 2, 3, 2, 1, 1, 0]


def test_the_queue_order_says_who_is_prefilled_next() -> None:
    driver = Driver(probe_limit=1, queue_order=QUEUE_ORDERS["abs"])
    driver(
        RequestArrived(A, Ticket(10)),
        RequestArrived(B, Ticket(20, level=1)),
        RequestArrived(C, Ticket(30, level=-1)),
        RequestArrived(D, Ticket(5)),
    )
    assert driver(PrefillLost(A)) == [StartPrefill(C, P0, 30)]
    assert driver(PrefillDone(C, 30)) == [StartPrefill(A, P0, 10)]
    assert driver(PrefillDone(A, 10)) == [StartPrefill(D, P0, 5)]
    assert driver(PrefillDone(D, 5)) == [StartPrefill(B, P0, 20)]
    assert driver.scheduler.waiting == 4


def test_the_queue_order_holds_across_the_queues_of_models() -> None:
    driver = Driver(probe_limit=1, queue_order=QUEUE_ORDERS["abs"])
    of_a_model = Eligible(frozenset({P0}), frozenset({RANK0}))
    driver(
        RequestArrived(A, Ticket(10)),
        RequestArrived(B, Ticket(20)),
        RequestArrived(C, Ticket(30, level=-1, eligible=of_a_model)),
    )
    assert driver(PrefillDone(A, 10)) == [StartPrefill(C, P0, 30)]


@pytest.mark.parametrize("policy", ["fifo", "br-0"])
def test_the_queue_order_says_who_leaves_the_pool_next(policy: str) -> None:
    driver = Driver(policy, queue_order=QUEUE_ORDERS["abs"])
    for request, level in (
        (A, 1),
        (B, 1),
        (C, 0),
    ):
        driver(RequestArrived(request, Ticket(10, level=level)), PrefillDone(request, 10))
    assert driver(Tick()) == [Admit(C, RANK0)]
    assert [entry.overtaken for entry in driver.scheduler.pool] == [0, 0]
    driver(RequestFinished(C))
    assert driver(Tick()) == [Admit(A, RANK0)]


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=12), st.integers(1, 12))
def test_no_lower_level_is_in_the_window_while_a_higher_one_waits_outside(
    levels: list[int], window: int
) -> None:
    pool = Pool(QUEUE_ORDERS["abs"]())
    for number, level in enumerate(levels):
        request = Request(RequestId(number), Ticket(10, level=level), 0, pooled_ns=0)
        pool.add(pool_entry(request, SchedulerConfig(1, 1), Pairs()))
    inside = [entry.ticket.level for entry in pool.first(window)]
    assert inside == sorted(levels)[:window]


# Deadlines of requests.


def test_a_request_that_is_due_never_starts_a_prefill() -> None:
    driver = Driver(probe_limit=1, queue_ttl_ns=90)
    driver(
        RequestArrived(A, Ticket(10)),
        RequestArrived(B, Ticket(10, deadline_ns=50)),
    )
    driver(RequestArrived(C, Ticket(10, deadline_ns=500)))
    assert driver.scheduler.next_deadline_ns() == 50
    # Before any tick: the room that A leaves goes to C.
    assert driver.at(50, PrefillDone(A, 10)) == [
        Expire(B),
        StartPrefill(C, P0, 10),
    ]
    # One that comes too late expires as it arrives, and the usual time to live stays.
    assert driver(RequestArrived(D, Ticket(10, deadline_ns=50))) == [Expire(D)]
    driver(PrefillLost(C))
    assert driver.scheduler.requests[C].due_ns == 500


def test_a_request_that_is_due_never_starts_to_decode() -> None:
    driver = Driver(ttl_ns=90)
    driver(
        RequestArrived(A, Ticket(10, deadline_ns=50)),
        PrefillDone(A, 10),
    )
    driver(RequestArrived(B, Ticket(10, prefill=False, deadline_ns=50)))
    assert driver.scheduler.next_deadline_ns() == 50
    assert driver.at(50, Tick()) == [
        ReleasePrefill(A, P0),
        Expire(A),
        Expire(B),
    ]


def test_a_request_that_was_served_is_not_due_again() -> None:
    driver = Driver()
    driver(
        RequestArrived(A, Ticket(10, deadline_ns=50)),
        PrefillDone(A, 10),
        Tick(),
    )
    driver(DecodeStarted(A))
    assert driver.at(60, RequestRecomputed(A)) == [StartPrefill(A, P0, 10)]
    assert driver.scheduler.next_deadline_ns() is None


class TheLast:
    """Takes the candidate with the highest number."""

    observer = None

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request, view
        return candidates[-1]


def test_another_prefill_choice_says_who_takes_the_prefill() -> None:
    driver = Driver(prefillers=2, probe_limit=1, prefill_choice=TheLast)
    assert driver(RequestArrived(A, Ticket(10))) == [StartPrefill(A, P1, 10)]
    assert driver(RequestArrived(B, Ticket(10))) == [StartPrefill(B, P0, 10)]


def test_a_first_token_that_came_is_not_due_any_more() -> None:
    driver = Driver()
    driver.to_decode(B)
    driver(RequestArrived(A, Ticket(10, deadline_ns=100)))
    driver.at(20, FirstToken(A), PrefillDone(A, 10))
    assert driver.at(500, Tick()) == []
    assert driver(RequestFinished(B), Tick()) == [Admit(A, RANK0)]


def test_who_is_prefilled_again_behind_a_first_token_is_not_due_and_waits_anew() -> None:
    driver = Driver(probe_limit=1, queue_ttl_ns=50)
    driver.to_decode(B)
    driver(RequestArrived(A, Ticket(10, deadline_ns=100)))
    driver.at(
        20,
        FirstToken(A),
        PrefillDone(A, 10),
        RequestArrived(C, Ticket(10)),
    )
    # The only prefiller is busy with C, so A waits before its prefill: for 50 ns from here on.
    driver.at(200, PrefillLost(A))
    assert driver.at(249, Tick()) == []
    assert driver.at(250, Tick()) == [Expire(A)]


def test_a_first_token_is_said_by_prefillers_alone() -> None:
    driver = Driver(pool_limit=1)
    driver.to_pool(A)
    driver(RequestArrived(B, Ticket(10)))
    for request in (A, B, C):
        with pytest.raises(LifecycleError):
            driver(FirstToken(request))
    driver(Tick())
    with pytest.raises(LifecycleError):
        driver(FirstToken(A))

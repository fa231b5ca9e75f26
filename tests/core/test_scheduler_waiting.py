"""Requests before prefill: their order, how long they wait, and their expiry."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from balanceroute.proxy.core.queueing import QUEUE_ORDERS
from balanceroute.proxy.core.resources import pool_entry
from balanceroute.proxy.core.waiting import Pool

if TYPE_CHECKING:
    from tests.core.conftest import Driver

P0, P1 = PrefillerId(0), PrefillerId(1)
RANK0 = RankId(0)
A, B, C, D = (RequestId(number) for number in range(4))


def test_a_request_that_waits_too_long_before_prefill_is_given_up_in_silence(
    new_driver: "type[Driver]",
) -> None:
    driver = new_driver(probe_limit=1, queue_ttl_ns=50)
    driver(RequestArrived(A, Ticket(10)))
    driver.at(10, RequestArrived(B, Ticket(10)), RequestArrived(C, Ticket(10)))
    assert driver.at(59, Tick()) == []
    # Its own wait ended with its prefill.
    assert driver.at(60, Tick()) == [Expire(B), Expire(C)]
    assert driver(PrefillDone(A, 10), Tick()) == [Admit(A, RANK0)]
    with pytest.raises(LifecycleError, match="unknown or has ended"):
        driver(RequestCancelled(B))


def test_who_is_given_up_makes_way_for_the_next_one(new_driver: "type[Driver]") -> None:
    driver = new_driver(prefiller_kv_tokens=20, queue_ttl_ns=50)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(15)))
    driver.at(10, RequestArrived(C, Ticket(10)))
    assert driver.at(50, Tick()) == [Expire(B), StartPrefill(C, P0, 10)]


def test_a_lost_prefill_gains_no_time_in_the_queue(new_driver: "type[Driver]") -> None:
    driver = new_driver(probe_limit=1, queue_ttl_ns=50)
    driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10), RequestArrived(B, Ticket(10)))
    driver.at(80, PrefillLost(A))
    assert driver(Tick()) == [Expire(A)]


def test_a_lapsed_lease_has_one_chance_of_a_prefill_though_its_time_in_the_queue_is_over(
    new_driver: "type[Driver]",
) -> None:
    for busy in (False, True):
        driver = new_driver(probe_limit=1, queue_ttl_ns=50)
        driver.to_decode(C)
        driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=70))
        if busy:
            driver.at(60, RequestArrived(B, Ticket(10)))
        prefills = [] if busy else [StartPrefill(A, P0, 10)]
        assert driver.at(70, Tick()) == [ReleasePrefill(A, P0), *prefills]
        assert driver(Tick()) == ([Expire(A)] if busy else [])


def test_a_recomputed_request_has_its_whole_time_in_the_queue(new_driver: "type[Driver]") -> None:
    driver = new_driver(probe_limit=1, queue_ttl_ns=50)
    driver.to_decode(A)
    driver(DecodeStarted(A))
    driver.at(100, RequestArrived(B, Ticket(10)), RequestRecomputed(A))
    assert driver.at(149, Tick()) == []
    assert driver.at(150, Tick()) == [Expire(A)]


def test_a_lease_that_is_shorter_than_its_margin_is_used_for_its_half(
    new_driver: "type[Driver]",
) -> None:
    driver = new_driver(lease_margin_ns=90)
    driver.to_decode(A)
    driver(RequestArrived(B, Ticket(10)))
    driver.at(20, PrefillDone(B, 10, lease_expires_ns=60))
    assert driver.at(39, Tick()) == []
    assert ReleasePrefill(B, P0) in driver.at(40, Tick())


def test_a_request_whose_lease_lapsed_is_still_known_as_overtaken(
    new_driver: "type[Driver]",
) -> None:
    driver = new_driver()
    driver.to_decode(A)
    driver(RequestArrived(B, Ticket(10)), PrefillDone(B, 10, lease_expires_ns=70))
    driver.scheduler.pool.entries[B].overtaken = 3
    assert ReleasePrefill(B, P0) in driver.at(70, Tick())
    driver(PrefillDone(B, 10))
    assert [(one.request, one.overtaken) for one in driver.scheduler.pool] == [(B, 3)]


def test_the_next_deadline_is_when_a_tick_acts_of_its_own_accord(
    new_driver: "type[Driver]",
) -> None:
    driver = new_driver(
        probe_limit=1, queue_ttl_ns=100, ttl_ns=70, deadline_ns=1, lease_margin_ns=5
    )
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
    assert driver.at(90, Tick()) == [ReleasePrefill(B, P0), Expire(B)]
    assert deadline_ns() == 126
    driver(RequestFinished(A), Tick())
    assert deadline_ns() is None


def test_waiting_counts_whom_no_rank_has_taken(new_driver: "type[Driver]") -> None:
    driver = new_driver(probe_limit=1)
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


def test_the_queue_order_says_who_is_prefilled_next(new_driver: "type[Driver]") -> None:
    driver = new_driver(probe_limit=1, queue_order=QUEUE_ORDERS["abs"])
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


def test_the_queue_order_holds_across_the_queues_of_models(new_driver: "type[Driver]") -> None:
    driver = new_driver(probe_limit=1, queue_order=QUEUE_ORDERS["abs"])
    of_a_model = Eligible(frozenset({P0}), frozenset({RANK0}))
    driver(
        RequestArrived(A, Ticket(10)),
        RequestArrived(B, Ticket(20)),
        RequestArrived(C, Ticket(30, level=-1, eligible=of_a_model)),
    )
    assert driver(PrefillDone(A, 10)) == [StartPrefill(C, P0, 30)]


@pytest.mark.parametrize("policy", ["fifo", "br-0"])
def test_the_queue_order_says_who_leaves_the_pool_next(
    new_driver: "type[Driver]", policy: str
) -> None:
    driver = new_driver(policy, queue_order=QUEUE_ORDERS["abs"])
    for request, level in ((A, 1), (B, 1), (C, 0)):
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


def test_a_request_that_is_due_never_starts_a_prefill(new_driver: "type[Driver]") -> None:
    driver = new_driver(probe_limit=1, queue_ttl_ns=90)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10, deadline_ns=50)))
    driver(RequestArrived(C, Ticket(10, deadline_ns=500)))
    assert driver.scheduler.next_deadline_ns() == 50
    # Before any tick: the room that A leaves goes to C.
    assert driver.at(50, PrefillDone(A, 10)) == [Expire(B), StartPrefill(C, P0, 10)]
    # One that comes too late expires as it arrives, and the usual time to live stays.
    assert driver(RequestArrived(D, Ticket(10, deadline_ns=50))) == [Expire(D)]
    driver(PrefillLost(C))
    assert driver.scheduler.requests[C].due_ns == 500


def test_a_request_that_is_due_never_starts_to_decode(new_driver: "type[Driver]") -> None:
    driver = new_driver(ttl_ns=90)
    driver(RequestArrived(A, Ticket(10, deadline_ns=50)), PrefillDone(A, 10))
    driver(RequestArrived(B, Ticket(10, prefill=False, deadline_ns=50)))
    assert driver.scheduler.next_deadline_ns() == 50
    assert driver.at(50, Tick()) == [ReleasePrefill(A, P0), Expire(A), Expire(B)]


def test_a_request_that_was_served_is_not_due_again(new_driver: "type[Driver]") -> None:
    driver = new_driver()
    driver(RequestArrived(A, Ticket(10, deadline_ns=50)), PrefillDone(A, 10), Tick())
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


def test_another_prefill_choice_says_who_takes_the_prefill(new_driver: "type[Driver]") -> None:
    driver = new_driver(prefillers=2, probe_limit=1, prefill_choice=TheLast)
    assert driver(RequestArrived(A, Ticket(10))) == [StartPrefill(A, P1, 10)]
    assert driver(RequestArrived(B, Ticket(10))) == [StartPrefill(B, P0, 10)]


def test_a_first_token_that_came_is_not_due_any_more(new_driver: "type[Driver]") -> None:
    driver = new_driver()
    driver.to_decode(B)
    driver(RequestArrived(A, Ticket(10, deadline_ns=100)))
    driver.at(20, FirstToken(A), PrefillDone(A, 10))
    assert driver.at(500, Tick()) == []
    assert driver(RequestFinished(B), Tick()) == [Admit(A, RANK0)]


def test_who_is_prefilled_again_behind_a_first_token_is_not_due_and_waits_anew(
    new_driver: "type[Driver]",
) -> None:
    driver = new_driver(probe_limit=1, queue_ttl_ns=50)
    driver.to_decode(B)
    driver(RequestArrived(A, Ticket(10, deadline_ns=100)))
    driver.at(20, FirstToken(A), PrefillDone(A, 10), RequestArrived(C, Ticket(10)))
    # The only prefiller is busy with C, so A waits before its prefill: for 50 ns from here on.
    driver.at(200, PrefillLost(A))
    assert driver.at(249, Tick()) == []
    assert driver.at(250, Tick()) == [Expire(A)]


def test_a_first_token_is_said_by_prefillers_alone(new_driver: "type[Driver]") -> None:
    driver = new_driver(pool_limit=1)
    driver.to_pool(A)
    driver(RequestArrived(B, Ticket(10)))
    for request in (A, B, C):
        with pytest.raises(LifecycleError):
            driver(FirstToken(request))
    driver(Tick())
    with pytest.raises(LifecycleError):
        driver(FirstToken(A))

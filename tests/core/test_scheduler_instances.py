"""Engines that lose requests, close and open: where the scheduler sends what they would have had."""

import pytest
from tests.core.driver import Driver

from balanceroute.proxy.core.errors import LifecycleError, PolicyError
from balanceroute.proxy.core.events import (
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    PrefillLost,
    RankClosed,
    RankId,
    RankOpened,
    ReleasePrefill,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.policies import POLICIES, Assignment, Fleet
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.proxy.core.waiting import Pool

P0, P1 = PrefillerId(0), PrefillerId(1)
RANK0, RANK1 = RankId(0), RankId(1)
A, B, C = (RequestId(number) for number in range(3))


# Requests that an engine lost.


def test_a_request_that_its_rank_never_took_goes_to_another_with_the_same_kv_cache() -> None:
    driver = Driver(ranks=2, deadline_ns=20, ttl_ns=90, lease_margin_ns=5)
    driver.at(7, RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=60))
    (before,) = driver.scheduler.pool
    assert driver.at(30, Tick()) == [Admit(A, RANK0)]
    assert driver.at(40, DecodeLost(A)) == []
    assert driver.held() == {"tokens": [10], "prefills": [0], "loads": [0, 0], "bound": [0, 0]}
    (entry,) = driver.scheduler.pool
    assert (entry.deadline_ns, entry.expires_ns, entry.lease_ends_ns) == (27, 97, 55)
    assert (entry.lost_on, before.lost_on) == ((RANK0,), ())
    assert driver(Tick()) == [Admit(A, RANK1)]
    assert driver(DecodeStarted(A)) == []
    assert driver.held()["tokens"] == [0]


def test_a_rank_that_lost_a_request_gets_it_again_if_it_is_the_only_open_one() -> None:
    driver = Driver(ranks=2)
    driver.to_decode(A)
    driver(DecodeLost(A), RankClosed(RANK1))
    assert driver(Tick()) == [Admit(A, RANK0)]


def test_a_request_waits_for_another_rank_than_the_one_that_lost_it() -> None:
    driver = Driver("jsq", ranks=2)
    driver.to_decode(A)
    for _ in range(3):  # Early binding knows no full rank: back and forth.
        driver(DecodeLost(A))
        assert driver(Tick()) == [Admit(A, RANK1)]
        driver(DecodeLost(A))
        assert driver(Tick()) == [Admit(A, RANK0)]
    driver = Driver("fifo", ranks=2)
    driver.to_decode(A)
    driver.to_pool(B, C)
    assert driver(Tick()) == [Admit(B, RANK1)]
    driver(DecodeLost(A))
    assert driver(Tick()) == [Admit(C, RANK0)]
    driver(RequestFinished(B))
    assert driver(Tick()) == [Admit(A, RANK1)]


def test_a_rank_that_lost_a_request_once_may_have_it_when_it_was_served_in_between() -> None:
    driver = Driver(ranks=2)
    driver.to_decode(A)
    driver(DecodeLost(A), Tick(), DecodeStarted(A), StepCompleted(), RequestRecomputed(A))
    driver(PrefillDone(A, 11))
    assert driver(Tick()) == [Admit(A, RANK0)]


def test_a_lease_that_lapsed_in_decode_leads_to_another_prefill() -> None:
    driver = Driver(ranks=2, lease_margin_ns=5)
    driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=100), Tick())
    assert driver.at(200, DecodeLost(A)) == []
    assert driver(Tick()) == [ReleasePrefill(A, P0), StartPrefill(A, P0, 10)]
    # It still avoids the rank.
    driver(PrefillDone(A, 10))
    assert driver(Tick()) == [Admit(A, RANK1)]


STARTED: list[Event] = [RequestArrived(A, Ticket(10)), PrefillDone(A, 10), Tick(), DecodeStarted(A)]
LIVES: dict[str, list[Event]] = {
    "queued": [RequestArrived(B, Ticket(1)), RequestArrived(A, Ticket(10))],
    "prefilling": STARTED[:1],
    "pooled": STARTED[:2],
    "started": STARTED,
}


@pytest.mark.parametrize("state", LIVES)
def test_only_a_request_that_its_rank_has_and_did_not_start_is_lost_by_it(state: str) -> None:
    driver = Driver(probe_limit=1)
    driver(*LIVES[state])
    before = driver.held()
    with pytest.raises(LifecycleError, match="request 0"):
        driver(DecodeLost(A))
    assert driver.held() == before


def test_a_lost_prefill_is_tried_elsewhere_though_it_has_to_wait() -> None:
    driver = Driver(prefillers=2, probe_limit=1)
    assert driver(RequestArrived(A, Ticket(10))) == [StartPrefill(A, P0, 10)]
    assert driver(PrefillLost(A, elsewhere=True)) == [StartPrefill(A, P1, 10)]
    driver = Driver(prefillers=2, probe_limit=1)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    assert driver(PrefillLost(A, elsewhere=True)) == []
    assert driver(PrefillDone(B, 10)) == [StartPrefill(A, P1, 10)]


def test_a_lost_prefill_is_tried_on_the_same_prefiller_when_the_others_are_closed() -> None:
    driver = Driver(prefillers=2, probe_limit=1)
    driver(
        RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)), PrefillLost(A, elsewhere=True)
    )
    assert driver(PrefillerClosed(P1)) == [StartPrefill(A, P0, 10)]


def test_a_lost_prefill_is_tried_where_there_is_room_unless_told_to_go_elsewhere() -> None:
    driver = Driver(prefillers=2)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    assert driver(PrefillLost(A)) == [StartPrefill(A, P0, 10)]


def test_a_prefiller_is_avoided_until_another_one_did_it() -> None:
    driver = Driver(prefillers=2)
    driver(RequestArrived(A, Ticket(10)), PrefillLost(A, elsewhere=True), PrefillDone(A, 10))
    # Lost at the decoder; no fault of the prefiller's.
    assert driver(PrefillLost(A)) == [ReleasePrefill(A, P1), StartPrefill(A, P0, 10)]


@pytest.mark.parametrize(("elsewhere", "rank"), [(False, RANK0), (True, RANK1)])
def test_a_request_that_its_rank_dropped_goes_elsewhere_if_told_to(
    elsewhere: bool, rank: RankId
) -> None:
    driver = Driver(ranks=2)
    driver.to_decode(A)
    driver(RequestRecomputed(A, elsewhere), PrefillDone(A, 10))
    assert driver(Tick()) == [Admit(A, rank)]


# Closed ranks and prefillers.


class Scripted:
    """Sends everything to one rank, and keeps the free slots that it was shown."""

    slots_beyond_batch = 0
    projection = None
    next_decision_ns = None

    def __init__(self, rank: RankId) -> None:
        self.seen: list[list[int]] = []
        self._rank = rank

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        self.seen.append(fleet.free_slots.tolist())
        entries = list(pool)
        for entry in entries:
            pool.admit(entry.request)
        return [Assignment(entry.request, self._rank) for entry in entries]


def scripted() -> tuple[Scripted, Scheduler]:
    policy = Scripted(RANK1)
    return policy, Scheduler(SchedulerConfig(ranks=3, batch_limit=4), policy)


def test_a_policy_is_shown_no_free_slots_on_overbooked_and_closed_ranks() -> None:
    policy, scheduler = scripted()
    for event in (
        RequestArrived(A, Ticket(10, slots=7, prefill=False)),
        Tick(),
        RankClosed(RANK0),
        RequestArrived(B, Ticket(10, prefill=False)),
    ):
        scheduler.handle(event, now_ns=0)
    with pytest.raises(PolicyError, match="has no slot for request 1"):
        scheduler.handle(Tick(), now_ns=0)
    assert policy.seen == [[4, 4, 4], [0, 0, 4]]


def test_free_slots_are_those_that_nobody_has_on_closed_ranks_too() -> None:
    _, scheduler = scripted()
    scheduler.handle(RequestArrived(A, Ticket(10, slots=7, prefill=False)), now_ns=0)
    scheduler.handle(Tick(), now_ns=0)
    scheduler.handle(RankClosed(RANK0), now_ns=0)
    assert scheduler.free_slots().tolist() == [4, 0, 4]


def test_a_policy_without_a_limit_has_the_free_slots_of_the_batch() -> None:
    driver = Driver("random", ranks=1, batch_limit=3)
    driver(RequestArrived(A, Ticket(10, slots=2, prefill=False)), Tick())
    assert driver.scheduler.free_slots().tolist() == [1]


def test_a_bound_request_has_emitted_what_the_steps_and_corrections_gave_it() -> None:
    driver = Driver(batch_limit=3)
    driver(RequestArrived(A, Ticket(10, slots=2, prefill=False)), Tick())
    assert driver.scheduler.emitted(A) == 0
    driver(DecodeStarted(A), StepCompleted(), StepCompleted(), TokensEmitted(A, 3))
    assert driver.scheduler.emitted(A) == 7
    with pytest.raises(LifecycleError, match="request 1 is unknown"):
        driver.scheduler.emitted(B)


def test_a_policy_that_names_a_closed_rank_is_not_obeyed() -> None:
    _, scheduler = scripted()
    scheduler.handle(RankClosed(RANK1), now_ns=0)
    scheduler.handle(RequestArrived(A, Ticket(10, prefill=False)), now_ns=0)
    with pytest.raises(PolicyError, match="rank 1 is closed"):
        scheduler.handle(Tick(), now_ns=0)
    scheduler.check()
    assert A in scheduler.pool


def test_a_closed_rank_takes_nothing_new_and_keeps_what_it_has() -> None:
    driver = Driver(ranks=2, batch_limit=3)
    driver.to_decode(A)
    assert driver(RankClosed(RANK0)) == []
    driver.to_pool(B, C)
    assert driver(Tick()) == [Admit(B, RANK1), Admit(C, RANK1)]
    driver(DecodeStarted(A), StepCompleted())
    assert driver.held()["loads"] == [11, 20]
    assert driver(RequestFinished(A)) == []


def test_without_an_open_rank_requests_wait_until_one_opens() -> None:
    for policy in POLICIES:
        driver = Driver(policy, ranks=2)
        driver.to_pool(A)
        driver(RankClosed(RANK0), RankClosed(RANK1), RankClosed(RANK1))
        assert driver(Tick()) == []
        driver(RankOpened(RANK1), RankOpened(RANK1))
        assert driver(Tick()) == [Admit(A, RANK1)]


def test_a_closed_prefiller_takes_no_prefill_and_keeps_what_it_has() -> None:
    driver = Driver(prefillers=2)
    driver(RequestArrived(A, Ticket(10)))
    assert driver(PrefillerClosed(P0)) == []
    assert driver(RequestArrived(B, Ticket(50))) == [StartPrefill(B, P1, 50)]
    assert driver(RequestArrived(C, Ticket(10))) == [StartPrefill(C, P1, 10)]
    driver(PrefillDone(A, 10))
    assert driver(Tick()) == [Admit(A, RANK0)]


def test_a_prefiller_that_opens_starts_the_waiting_prefills() -> None:
    driver = Driver(probe_limit=1)
    assert driver(PrefillerClosed(P0), PrefillerClosed(P0), RequestArrived(A, Ticket(10))) == []
    assert driver(RequestArrived(B, Ticket(10))) == []
    assert driver(PrefillerOpened(P0)) == [StartPrefill(A, P0, 10)]
    assert driver(PrefillerOpened(P0)) == []


@pytest.mark.parametrize("number", [-1, 1])
def test_an_unknown_rank_or_prefiller_is_refused(number: int) -> None:
    driver = Driver()
    rank, prefiller = RankId(number), PrefillerId(number)
    events: list[tuple[str, Event]] = [
        ("rank", RankClosed(rank)),
        ("rank", RankOpened(rank)),
        ("prefiller", PrefillerClosed(prefiller)),
        ("prefiller", PrefillerOpened(prefiller)),
    ]
    for kind, event in events:
        with pytest.raises(LifecycleError, match=f"^{kind} {number} is unknown: there are 1"):
            driver(event)
    driver.to_decode(A)

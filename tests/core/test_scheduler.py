"""Directed cases of the scheduler: what each event releases, asks for, and refuses."""

import random
from collections.abc import Callable

import pytest
from tests.core.driver import Driver

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import ConfigError, LifecycleError
from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
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
    StepCompleted,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.policies import Policy, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

P0 = PrefillerId(0)
RANK0 = RankId(0)
A, B, C, D = (RequestId(number) for number in range(4))
NOTHING = {"tokens": [0], "prefills": [0], "loads": [0], "bound": [0]}


def test_a_request_goes_from_arrival_to_its_last_token() -> None:
    driver = Driver()
    assert driver(RequestArrived(A, Ticket(10))) == [StartPrefill(A, P0, 10)]
    assert driver(Tick()) == []
    assert driver(PrefillDone(A, 12)) == []
    assert driver(Tick()) == [Admit(A, RANK0)]
    assert driver(DecodeStarted(A)) == []
    assert driver(StepCompleted(), TokensEmitted(A, 2), StepCompleted()) == []
    assert driver.held() == {"tokens": [0], "prefills": [0], "loads": [16], "bound": [1]}
    assert driver(RequestFinished(A)) == []
    assert driver.held() == NOTHING
    assert driver.scheduler.requests == {}


def test_the_first_token_releases_the_prefiller() -> None:
    driver = Driver(prefiller_kv_tokens=10)
    driver.to_decode(A)
    assert driver(RequestArrived(B, Ticket(5))) == []
    assert driver.held()["tokens"] == [10]
    assert driver(DecodeStarted(A)) == [StartPrefill(B, P0, 5)]
    assert driver.held()["tokens"] == [5]


def test_the_realised_prompt_replaces_the_estimate() -> None:
    driver = Driver(prefiller_kv_tokens=20)
    driver(RequestArrived(A, Ticket(18)), RequestArrived(B, Ticket(10)))
    assert driver(PrefillDone(A, 9)) == [StartPrefill(B, P0, 10)]
    assert driver.held()["tokens"] == [19]
    assert driver(Tick()) == [Admit(A, RANK0)]
    assert driver.held()["loads"] == [9]


def test_a_lost_prefill_is_tried_again_ahead_of_the_queue() -> None:
    driver = Driver(probe_limit=1)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    assert driver(PrefillLost(A)) == [StartPrefill(A, P0, 10)]
    assert driver(PrefillDone(A, 10)) == [StartPrefill(B, P0, 10)]
    driver(RequestArrived(C, Ticket(10)))
    # Its blocks are of no use to a decoder any more; it waits for B's prefill, but not behind C.
    assert driver(PrefillLost(A)) == [ReleasePrefill(A, P0)]
    assert driver(PrefillDone(B, 10)) == [StartPrefill(A, P0, 10)]
    assert driver(PrefillDone(A, 10)) == [StartPrefill(C, P0, 10)]


def test_a_decoder_that_finds_the_kv_cache_gone_gives_its_slot_back() -> None:
    driver = Driver()
    driver.to_decode(A)
    assert driver(PrefillLost(A)) == [StartPrefill(A, P0, 10)]
    assert driver.held() == {"tokens": [10], "prefills": [1], "loads": [0], "bound": [0]}
    assert driver(PrefillDone(A, 10), Tick()) == [Admit(A, RANK0)]


def test_a_started_request_cannot_lose_its_prefill() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver(DecodeStarted(A))
    with pytest.raises(LifecycleError, match="request 0 has pulled"):
        driver(PrefillLost(A))
    driver.scheduler.check()


def test_a_recomputed_request_is_prefilled_with_what_it_emitted() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver.to_pool(B, C)
    driver(DecodeStarted(A), StepCompleted(), StepCompleted(), TokensEmitted(A, 1))
    assert driver(RequestRecomputed(A)) == [StartPrefill(A, P0, 13)]
    assert driver.held()["loads"] == [0]
    driver(PrefillDone(A, 13))
    entries = list(driver.scheduler.pool)
    # At its place of arrival, ahead of those that were pooled before it.
    assert [entry.request for entry in entries] == [A, B, C]
    assert (entries[0].prompt_tokens, entries[0].age) == (13, 3)
    assert driver(Tick()) == [Admit(A, RANK0)]
    driver(DecodeStarted(A), StepCompleted())
    assert driver(RequestRecomputed(A)) == [StartPrefill(A, P0, 14)]
    driver(PrefillDone(A, 14))
    assert next(iter(driver.scheduler.pool)).age == 4


def test_a_lease_that_lapses_before_dispatch_leads_to_another_prefill() -> None:
    driver = Driver(lease_margin_ns=5)
    driver.to_decode(A)
    driver(RequestArrived(B, Ticket(10)), PrefillDone(B, 10, lease_expires_ns=100))
    assert driver.at(94, Tick()) == []
    assert driver.at(95, Tick()) == [ReleasePrefill(B, P0), StartPrefill(B, P0, 10)]
    driver(PrefillDone(B, 10, lease_expires_ns=200), RequestFinished(A))
    assert driver.at(194, Tick()) == [Admit(B, RANK0)]


def test_a_lapsed_lease_is_never_dispatched_though_a_slot_is_free() -> None:
    driver = Driver(lease_margin_ns=5)
    driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=100))
    assert driver.at(95, Tick()) == [ReleasePrefill(A, P0), StartPrefill(A, P0, 10)]


def test_a_lease_shorter_than_the_margin_can_still_be_used() -> None:
    driver = Driver(lease_margin_ns=5)
    driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=4))
    assert driver.at(1, Tick()) == [Admit(A, RANK0)]


def test_a_repeated_prefill_gains_no_time_to_live() -> None:
    driver = Driver(ttl_ns=50)
    driver.to_decode(A)
    driver.to_pool(B)
    driver.at(30, PrefillLost(B))
    driver(PrefillDone(B, 10))
    assert driver.at(50, Tick()) == [ReleasePrefill(B, P0), Expire(B)]


def test_a_recomputed_request_has_its_whole_time_to_live() -> None:
    driver = Driver(ttl_ns=50)
    driver.to_decode(A)
    driver(DecodeStarted(A), StepCompleted())
    driver.at(100, RequestRecomputed(A))
    driver(PrefillDone(A, 11))
    assert driver.at(149, Tick()) == [Admit(A, RANK0)]


def test_a_dispatched_request_has_no_lease_to_lapse() -> None:
    driver = Driver(lease_margin_ns=5)
    driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=100))
    assert driver(Tick()) == [Admit(A, RANK0)]
    assert driver.at(1_000, Tick()) == []


def test_a_request_that_outlives_the_pool_expires() -> None:
    driver = Driver(ttl_ns=50)
    driver.to_decode(A)
    driver.at(10)
    driver.to_pool(B)
    assert driver.at(59, Tick()) == []
    assert driver.at(60, Tick()) == [ReleasePrefill(B, P0), Expire(B)]
    with pytest.raises(LifecycleError, match="unknown or has ended"):
        driver(RequestCancelled(B))


def test_expiry_beats_a_lapsed_lease_and_a_free_slot() -> None:
    driver = Driver(ttl_ns=50, lease_margin_ns=1)
    driver(RequestArrived(A, Ticket(10)), PrefillDone(A, 10, lease_expires_ns=40))
    assert driver.at(60, Tick()) == [ReleasePrefill(A, P0), Expire(A)]


def test_a_second_prefill_of_the_same_instant_lapses_and_expires_once() -> None:
    driver = Driver(ttl_ns=50, lease_margin_ns=1, batch_limit=1)
    driver.to_decode(A)
    driver(RequestArrived(B, Ticket(10)), RequestArrived(C, Ticket(10)))
    for request in (B, C):
        lease_ns = 31 if request == B else None
        driver(PrefillDone(request, 10, lease_ns), PrefillLost(request))
        driver(PrefillDone(request, 10, lease_ns))
    assert driver.at(30, Tick()) == [ReleasePrefill(B, P0), StartPrefill(B, P0, 10)]
    assert driver.at(50, Tick()) == [ReleasePrefill(C, P0), Expire(C)]


ARRIVED, PREFILLED = RequestArrived(A, Ticket(10)), PrefillDone(A, 10)
LIVES: dict[str, tuple[list[Event], list[Action]]] = {
    "prefilling": ([ARRIVED], [AbortPrefill(A, P0)]),
    "pooled": ([ARRIVED, PREFILLED], [ReleasePrefill(A, P0)]),
    "bound": ([ARRIVED, PREFILLED, Tick()], [AbortDecode(A, RANK0), ReleasePrefill(A, P0)]),
    "started": (
        [ARRIVED, PREFILLED, Tick(), DecodeStarted(A), StepCompleted()],
        [AbortDecode(A, RANK0)],
    ),
}


@pytest.mark.parametrize("event", [RequestCancelled, RequestFailed])
@pytest.mark.parametrize("state", LIVES)
def test_giving_up_releases_everything_exactly_once(
    state: str, event: Callable[[RequestId], Event]
) -> None:
    life, expected = LIVES[state]
    driver = Driver()
    driver(*life)
    assert driver.held() != NOTHING
    assert driver(event(A)) == expected
    assert driver.held() == NOTHING
    with pytest.raises(LifecycleError):
        driver(event(A))
    assert driver.held() == NOTHING
    assert driver(Tick()) == []


@pytest.mark.parametrize("event", [RequestCancelled, RequestFailed])
def test_giving_up_in_the_queue_leaves_the_others_their_turn(
    event: Callable[[RequestId], Event],
) -> None:
    driver = Driver(probe_limit=1)
    driver(
        RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)), RequestArrived(C, Ticket(10))
    )
    assert driver(event(B)) == []
    assert driver(PrefillDone(A, 10)) == [StartPrefill(C, P0, 10)]


def test_giving_up_while_it_waits_to_be_prefilled_again_is_possible() -> None:
    driver = Driver(probe_limit=1)
    driver.to_decode(A)
    driver(DecodeStarted(A), RequestArrived(B, Ticket(10)))
    assert driver(RequestRecomputed(A)) == []
    assert driver(RequestCancelled(A)) == []
    assert driver(RequestCancelled(B)) == [AbortPrefill(B, P0)]
    assert driver.held() == NOTHING


def test_a_request_that_the_prefiller_answered_in_full_is_done() -> None:
    driver = Driver(probe_limit=1)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    assert driver(RequestFinished(A)) == [StartPrefill(B, P0, 10)]
    assert driver.held()["tokens"] == [10]


def test_a_cancelled_request_makes_room_at_once() -> None:
    driver = Driver(probe_limit=1)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    assert driver(RequestCancelled(A)) == [AbortPrefill(A, P0), StartPrefill(B, P0, 10)]


def test_the_pool_limit_holds_requests_before_prefill() -> None:
    driver = Driver(pool_limit=2)
    driver.to_decode(A)
    assert driver(RequestArrived(B, Ticket(10))) == [StartPrefill(B, P0, 10)]
    assert driver(RequestArrived(C, Ticket(10))) == [StartPrefill(C, P0, 10)]
    assert driver(RequestArrived(D, Ticket(10))) == []
    assert driver(PrefillDone(B, 10)) == []
    assert driver(PrefillDone(C, 10), Tick()) == []
    driver(RequestFinished(A))
    assert driver(Tick()) == [Admit(B, RANK0), StartPrefill(D, P0, 10)]


def test_prefills_start_in_order_of_arrival_though_a_later_one_would_fit() -> None:
    driver = Driver(prefiller_kv_tokens=20)
    driver(RequestArrived(A, Ticket(15)))
    assert driver(RequestArrived(B, Ticket(10))) == []
    assert driver(RequestArrived(C, Ticket(1))) == []
    assert driver(RequestCancelled(B)) == [StartPrefill(C, P0, 1)]


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
@pytest.mark.parametrize(("now_ns", "is_late"), [(109, False), (110, True)])
def test_an_overdue_request_goes_first(policy: str, now_ns: int, is_late: bool) -> None:
    driver = Driver(policy, ranks=2, batch_limit=2, deadline_ns=100)
    # 1,050 tokens on each rank; then 50 of them leave, so that a prompt of 40 just fits.
    driver.to_pool(A, B, prompt_tokens=50)
    driver(Tick())
    driver.to_pool(C, D, prompt_tokens=1_000)
    driver(Tick())
    assert driver.held()["loads"] == [1_050, 1_050]
    large = RequestId(4)
    driver.at(10)
    driver.to_pool(large, prompt_tokens=5_000)
    driver.at(60)
    driver.to_pool(*map(RequestId, range(5, 9)), prompt_tokens=40)
    driver.at(now_ns, RequestFinished(A))
    (admission,) = driver(Tick())
    assert isinstance(admission, Admit)
    assert (admission.request == large) == is_late


# Requests that run several sequences.


def test_a_request_takes_a_slot_and_a_prompt_for_each_sequence() -> None:
    driver = Driver(batch_limit=4)
    assert driver(RequestArrived(A, Ticket(10, slots=3))) == [StartPrefill(A, P0, 10)]
    # The prompt is computed once.
    assert driver.held()["tokens"] == [10]
    driver(PrefillDone(A, 12))
    assert driver.held()["tokens"] == [12]
    assert driver(Tick()) == [Admit(A, RANK0)]
    assert driver.held() == {"tokens": [12], "prefills": [0], "loads": [36], "bound": [3]}
    driver(DecodeStarted(A), StepCompleted(), StepCompleted(), TokensEmitted(A, 1))
    assert driver.held() == {"tokens": [0], "prefills": [0], "loads": [43], "bound": [3]}
    assert driver(RequestFinished(A)) == []
    assert driver.held() == NOTHING


def test_one_free_slot_is_enough_and_the_rank_is_full_until_all_are_free() -> None:
    driver = Driver(batch_limit=3)
    driver.to_decode(A)
    driver(RequestArrived(B, Ticket(10, slots=4)), PrefillDone(B, 10))
    driver.to_pool(C, D)
    assert driver(Tick()) == [Admit(B, RANK0)]
    assert driver.held()["bound"] == [5]
    # Four of three slots are still taken.
    driver(RequestFinished(A))
    assert driver(Tick()) == []
    driver(RequestFinished(B))
    assert driver(Tick()) == [Admit(C, RANK0), Admit(D, RANK0)]


def test_what_several_sequences_emitted_is_prefilled_again_as_their_mean() -> None:
    driver = Driver(batch_limit=4)
    driver(RequestArrived(A, Ticket(10, slots=3)), PrefillDone(A, 10), Tick(), DecodeStarted(A))
    driver(StepCompleted(), TokensEmitted(A, 2))
    assert driver.held()["loads"] == [35]
    assert driver(RequestRecomputed(A)) == [StartPrefill(A, P0, 12)]
    driver(PrefillDone(A, 12))
    assert next(iter(driver.scheduler.pool)).age == 2
    driver(Tick())
    assert driver.held()["loads"] == [36]


# Requests without prefill.


def test_a_request_without_prefill_waits_in_the_pool_and_holds_no_prefiller() -> None:
    driver = Driver(pool_limit=1, probe_limit=1)
    driver.to_pool(A)
    assert driver(RequestArrived(B, Ticket(10, prefill=False))) == []
    assert driver.held()["tokens"] == [10]
    assert [entry.request for entry in driver.scheduler.pool] == [A, B]
    assert driver(RequestFailed(A)) == [ReleasePrefill(A, P0)]
    assert driver(Tick()) == [Admit(B, RANK0)]
    assert driver(DecodeStarted(B), StepCompleted()) == []
    assert driver.held() == {"tokens": [0], "prefills": [0], "loads": [11], "bound": [1]}
    assert driver(RequestCancelled(B)) == [AbortDecode(B, RANK0)]
    assert driver.held() == NOTHING


def test_a_request_without_prefill_counts_towards_the_pool_limit() -> None:
    driver = Driver(pool_limit=1)
    driver(RequestArrived(A, Ticket(10, prefill=False)))
    assert driver(RequestArrived(B, Ticket(10))) == []
    assert driver(Tick()) == [Admit(A, RANK0), StartPrefill(B, P0, 10)]


def test_a_request_without_prefill_has_its_times_from_its_arrival() -> None:
    driver = Driver(ttl_ns=50)
    driver.to_decode(A)
    driver.at(10, RequestArrived(B, Ticket(10, prefill=False)))
    assert driver.at(59, Tick()) == []
    assert driver.at(60, Tick()) == [Expire(B)]


def test_a_recomputed_request_without_prefill_goes_straight_back_to_the_pool() -> None:
    driver = Driver(ttl_ns=50)
    driver(RequestArrived(A, Ticket(10, prefill=False)), Tick(), DecodeStarted(A), StepCompleted())
    assert driver.at(100, RequestRecomputed(A)) == []
    (entry,) = driver.scheduler.pool
    assert (entry.prompt_tokens, entry.age, entry.expires_ns) == (11, 1, 150)
    assert driver(Tick()) == [Admit(A, RANK0)]


def test_a_request_without_prefill_goes_back_to_the_pool_when_the_rank_never_took_it() -> None:
    driver = Driver()
    driver(RequestArrived(A, Ticket(10, prefill=False)), Tick())
    assert driver(DecodeLost(A)) == []
    assert driver.held() == NOTHING
    assert driver(Tick()) == [Admit(A, RANK0)]


@pytest.mark.parametrize("events", [(), (Tick(),)], ids=["pooled", "bound"])
def test_a_request_without_prefill_has_none_to_lose(events: tuple[Event, ...]) -> None:
    driver = Driver()
    driver(RequestArrived(A, Ticket(10, prefill=False)), *events)
    before = driver.held()
    with pytest.raises(LifecycleError, match="request 0 has no prefill to lose"):
        driver(PrefillLost(A))
    assert driver.held() == before


UNKNOWN_EVENTS: list[Event] = [
    PrefillDone(B, 1),
    PrefillLost(B),
    DecodeLost(B),
    DecodeStarted(B),
    TokensEmitted(B, 1),
    RequestRecomputed(B),
    RequestFinished(B),
    RequestFailed(B),
    RequestCancelled(B),
]


@pytest.mark.parametrize("event", UNKNOWN_EVENTS, ids=lambda event: type(event).__name__)
def test_an_unknown_request_is_refused_and_nothing_changes(event: Event) -> None:
    driver = Driver()
    driver(RequestArrived(A, Ticket(10)))
    with pytest.raises(LifecycleError, match="request 1 is unknown or has ended"):
        driver(event)
    assert driver.held() == {"tokens": [10], "prefills": [1], "loads": [0], "bound": [0]}
    assert list(driver.scheduler.requests) == [A]


def test_a_second_arrival_of_a_live_request_is_refused() -> None:
    driver = Driver()
    driver(RequestArrived(A, Ticket(10)))
    with pytest.raises(LifecycleError, match="request 0 has arrived already"):
        driver(RequestArrived(A, Ticket(10)))
    assert driver.held()["tokens"] == [10]


def test_a_prompt_without_tokens_is_refused() -> None:
    driver = Driver()
    with pytest.raises(LifecycleError, match="0 prompt tokens"):
        driver(RequestArrived(A, Ticket(0)))
    with pytest.raises(LifecycleError, match="0 slots"):
        driver(RequestArrived(A, Ticket(1, slots=0)))
    assert driver.scheduler.requests == {}


def test_tokens_before_the_first_are_refused() -> None:
    driver = Driver()
    driver.to_decode(A)
    with pytest.raises(LifecycleError, match="cannot emit 1 tokens now"):
        driver(TokensEmitted(A, 1))
    assert driver.held()["loads"] == [10]


def test_tokens_are_taken_back_down_to_the_prompt_and_no_further() -> None:
    driver = Driver("br-h", batch_limit=2)
    driver(RequestArrived(A, Ticket(10, slots=2)), PrefillDone(A, 10), Tick(), DecodeStarted(A))
    driver(StepCompleted(), StepCompleted(), TokensEmitted(A, -3))
    assert driver.held()["loads"] == [21]
    with pytest.raises(LifecycleError, match="has not emitted 2 tokens to take back"):
        driver(TokensEmitted(A, -2))
    assert driver.held()["loads"] == [21]
    driver(TokensEmitted(A, -1))
    assert driver.held()["loads"] == [20]
    driver(StepCompleted())
    assert driver.held()["loads"] == [22]


def test_a_recomputed_request_keeps_what_it_emitted_before() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver(DecodeStarted(A), StepCompleted(), StepCompleted(), RequestRecomputed(A))
    driver(PrefillDone(A, 12), Tick(), DecodeStarted(A))
    with pytest.raises(LifecycleError, match="has not emitted 1 tokens to take back"):
        driver(TokensEmitted(A, -1))


def test_a_request_may_finish_before_it_was_seen_to_start() -> None:
    driver = Driver()
    driver.to_decode(A)
    assert driver(RequestFinished(A)) == []
    assert driver.held() == NOTHING


def test_a_second_start_is_refused() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver(DecodeStarted(A))
    with pytest.raises(LifecycleError, match="cannot start"):
        driver(DecodeStarted(A))
    driver(StepCompleted())
    assert driver.held()["loads"] == [11]


@pytest.mark.parametrize(
    "name",
    [
        "ranks",
        "batch_limit",
        "rank_kv_tokens",
        "prefillers",
        "probe_limit",
        "prefiller_kv_tokens",
        "pool_limit",
        "deadline_ns",
        "ttl_ns",
        "queue_ttl_ns",
    ],
)
def test_a_setting_below_one_is_refused_by_name(name: str) -> None:
    limits: dict[str, int] = {"ranks": 1, "batch_limit": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        SchedulerConfig(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("counter", ["held_tokens", "prefills"])
def test_check_notices_a_leaked_budget(counter: str) -> None:
    driver = Driver()
    driver.to_decode(A)
    getattr(driver.scheduler.prefillers, counter)[0] += 1
    with pytest.raises(AssertionError):
        driver.scheduler.check()


def test_check_notices_a_leaked_slot() -> None:
    driver = Driver()
    driver.scheduler.ledger.bind(A, RANK0, 1)
    with pytest.raises(AssertionError):
        driver.scheduler.check()


@pytest.mark.parametrize("speeds", [(), (1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("nan"))])
def test_speeds_that_are_not_those_of_the_ranks_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="must be 2 positive numbers"):
        SchedulerConfig(ranks=2, batch_limit=1, rank_speeds=speeds)


@pytest.mark.parametrize("limits", [(), (4,), (4, 0)])
def test_batch_limits_that_are_not_those_of_the_ranks_are_refused(limits: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be 2 numbers of at least 1"):
        SchedulerConfig(ranks=2, batch_limit=1, rank_batch_limits=limits)


# Requests that a prefiller answers whole: what they hold, what holds them up, and whom they hold up.


FIRST, SECOND = PrefillerId(0), PrefillerId(1)


def make(**changes: int) -> Scheduler:
    config = SchedulerConfig(**({"ranks": 1, "batch_limit": 4} | changes))  # type: ignore[arg-type]
    return Scheduler(config, jsq())


def jsq() -> Policy:
    inputs = PolicyInputs(
        ranks=1,
        batch_limit=4,
        settings=PolicySettings(),
        rng=random.Random(1),
        predictor=NoPrediction(),
    )
    return make_policy("jsq", inputs)


def feed(scheduler: Scheduler, event: Event, now_ns: int = 0) -> list[Action]:
    actions = scheduler.handle(event, now_ns=now_ns)
    scheduler.check()
    return actions


def direct(number: RequestId, tokens: int = 10, slots: int = 1) -> RequestArrived:
    return RequestArrived(number, Ticket(tokens, slots, decode=False))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (RequestFinished(A), []),
        (RequestFailed(A), [AbortPrefill(A, FIRST)]),
        (RequestCancelled(A), [AbortPrefill(A, FIRST)]),
    ],
)
def test_it_holds_the_prompt_of_each_sequence_until_it_ends(
    end: Event, expected: list[Action]
) -> None:
    scheduler = make()
    assert feed(scheduler, direct(A, 10, 3)) == [StartPrefill(A, FIRST, 10)]
    assert scheduler.prefillers.held_tokens == [30]
    assert scheduler.prefillers.direct == [3]
    assert (scheduler.prefillers.prefilling, scheduler.waiting) == (0, 0)
    assert feed(scheduler, end) == expected
    assert scheduler.prefillers.held_tokens == [0]
    assert scheduler.prefillers.direct == [0]


def test_a_full_house_of_them_holds_up_nobody_else() -> None:
    scheduler = make(direct_limit=2, pool_limit=1, probe_limit=1)
    assert feed(scheduler, direct(A, slots=2)) == [StartPrefill(A, FIRST, 10)]
    assert feed(scheduler, direct(B)) == []
    assert feed(scheduler, RequestArrived(C, Ticket(7))) == [StartPrefill(C, FIRST, 7)]
    assert scheduler.waiting == 2
    assert feed(scheduler, RequestFinished(A)) == [StartPrefill(B, FIRST, 10)]


def test_more_sequences_than_the_limit_run_where_there_is_no_other() -> None:
    scheduler = make(direct_limit=2, prefillers=2)
    assert feed(scheduler, direct(A, 5)) == [StartPrefill(A, FIRST, 5)]
    assert feed(scheduler, direct(B, 5, 9)) == [StartPrefill(B, SECOND, 5)]
    assert feed(scheduler, direct(C, 5, 9)) == []
    assert feed(scheduler, RequestFinished(A)) == [StartPrefill(C, FIRST, 5)]


def test_what_waits_for_memory_is_not_passed_over() -> None:
    scheduler = make(prefiller_kv_tokens=100)
    assert feed(scheduler, RequestArrived(A, Ticket(60))) == [StartPrefill(A, FIRST, 60)]
    assert feed(scheduler, direct(B, 20, 4)) == []
    assert feed(scheduler, RequestArrived(C, Ticket(10))) == []
    assert feed(scheduler, RequestFinished(A)) == [
        StartPrefill(B, FIRST, 20),
        StartPrefill(C, FIRST, 10),
    ]


def test_a_lost_one_goes_to_another_prefiller_and_so_does_one_without_a_kv_cache() -> None:
    scheduler = make(prefillers=2)
    feed(scheduler, direct(A, 10, 2))
    assert feed(scheduler, PrefillLost(A, elsewhere=True)) == [StartPrefill(A, SECOND, 10)]
    assert scheduler.prefillers.held_tokens == [0, 20]
    assert feed(scheduler, RequestArrived(B, Ticket(7))) == [StartPrefill(B, FIRST, 7)]
    assert scheduler.prefillers.prefills == [1, 0]
    lost = PrefillLost(B, elsewhere=True, decode=False)
    assert feed(scheduler, lost) == [StartPrefill(B, SECOND, 7)]
    assert scheduler.prefillers.prefills == [0, 0]
    assert scheduler.prefillers.direct == [0, 3]
    # It stays so, wherever it goes.
    assert feed(scheduler, PrefillLost(B, elsewhere=True)) == [StartPrefill(B, FIRST, 7)]
    assert scheduler.prefillers.direct == [1, 2]


def test_a_prefilled_request_in_the_pool_can_turn_into_one() -> None:
    scheduler = make(prefillers=1)
    feed(scheduler, RequestArrived(A, Ticket(7)))
    feed(scheduler, PrefillDone(A, 8))
    assert feed(scheduler, PrefillLost(A, decode=False)) == [
        ReleasePrefill(A, FIRST),
        StartPrefill(A, FIRST, 8),
    ]
    assert not scheduler.pool


def test_one_that_waits_too_long_is_given_up() -> None:
    scheduler = make(direct_limit=1, queue_ttl_ns=5)
    feed(scheduler, direct(A))
    feed(scheduler, direct(B), now_ns=1)
    assert scheduler.next_deadline_ns() == 6
    (expiry,) = feed(scheduler, Tick(), now_ns=6)
    assert expiry.request == B


def test_its_prefill_is_never_done_and_somebody_must_compute_its_prompt() -> None:
    scheduler = make()
    feed(scheduler, direct(A))
    with pytest.raises(LifecycleError, match="is answered by its prefiller"):
        feed(scheduler, PrefillDone(A, 10))
    with pytest.raises(LifecycleError, match="neither prefill nor decode"):
        feed(scheduler, RequestArrived(B, Ticket(1, prefill=False, decode=False)))


def test_a_new_limit_holds_for_what_comes() -> None:
    scheduler = make(direct_limit=1)
    feed(scheduler, direct(A))
    feed(scheduler, direct(B))
    shape = SchedulerConfig(ranks=1, batch_limit=4, direct_limit=2)
    scheduler.reconfigure(shape, jsq())
    assert feed(scheduler, Tick()) == [StartPrefill(B, FIRST, 10)]

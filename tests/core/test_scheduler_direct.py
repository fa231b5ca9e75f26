"""Requests that a prefiller answers whole: what they hold, what holds them up, and whom they hold up."""

import random

import pytest

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    AbortPrefill,
    Action,
    Event,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    ReleasePrefill,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import Policy, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

A, B, C, D = (RequestId(number) for number in range(4))
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

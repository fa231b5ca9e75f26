"""How many KV caches are held, and whether a late request is forced in or prefilled again."""

from itertools import count
from math import inf
from typing import Any

import pytest
from tests.core.driver import Driver

from balanceroute.proxy.core.events import (
    Admit,
    DecodeStarted,
    Event,
    PrefillDone,
    PrefillerId,
    RankId,
    ReleasePrefill,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies.oldest_first import OldestFirst, least_kv_with_room
from balanceroute.proxy.core.ranks import Assignment
from balanceroute.proxy.core.ranks import Fleet as View
from balanceroute.proxy.core.resources import MOST_LAPSES
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.proxy.core.waiting import Pool

P0 = PrefillerId(0)
LEASE_NS = 30_000_000_000
STEP_NS = 30_000_000


class Fleet:
    """Two ranks that decode requests of 300 tokens, for about 100 steps each, as fast as they can."""

    def __init__(self, **limits: Any) -> None:
        limits = {"lease_ns": LEASE_NS, **limits}
        self.driver = Driver("br-0", ranks=2, batch_limit=4, probe_limit=1, **limits)
        self.scheduler = self.driver.scheduler
        self.released: list[ReleasePrefill] = []
        self.ends: dict[RequestId, int] = {}
        self.step = 0
        self._numbers = count()

    def feed(self, event: Event) -> None:
        """Perform what follows, too: prefills at 1 us per token, and the beginnings of decodes."""
        for action in self.driver(event):
            match action:
                case StartPrefill(number, _, tokens):
                    began_ns = self.driver.now_ns
                    self.driver.now_ns += 1_000 * tokens
                    self.feed(PrefillDone(number, tokens, began_ns + LEASE_NS))
                case Admit(number, _):
                    self.feed(DecodeStarted(number))
                    self.ends[number] = self.step + 100 + number % 7
                case ReleasePrefill():
                    self.released.append(action)
                case _:
                    raise AssertionError(action)

    def arrive(self, prompt_tokens: int) -> RequestId:
        number = RequestId(next(self._numbers))
        self.feed(RequestArrived(number, Ticket(prompt_tokens)))
        return number

    def run(self, steps: int) -> None:
        """Complete steps of 30 ms + 10 us per token of the heaviest rank."""
        for _ in range(steps):
            while len(self.scheduler.pool) < 4:
                self.arrive(300)
            self.feed(Tick())
            step_ns = STEP_NS + 10_000 * int(self.scheduler.ledger.loads.max())
            self.driver.now_ns += step_ns
            self.step += 1
            self.feed(StepCompleted(step_ns))
            for number in [one for one, end in self.ends.items() if end <= self.step]:
                del self.ends[number]
                self.feed(RequestFinished(number))

    def late_limit(self, prompt_tokens: int, *, lapses: int = 0) -> float:
        """Return what a request that has just become late may overflow by."""
        number = self.arrive(prompt_tokens)
        self.scheduler.requests[number].lapses = lapses
        pool = self.scheduler.pool
        self.scheduler.leases.judge(pool, self.driver.now_ns + LEASE_NS)
        return next(one.overflow_limit for one in pool if one.request == number)


class SmallOnes(OldestFirst):
    """Admits a large entry only if it must go at any cost."""

    def __init__(self) -> None:
        super().__init__(least_kv_with_room, slots_beyond_batch=0)

    def dispatch(self, fleet: View, pool: Pool, now_ns: int) -> list[Assignment]:
        admitted: list[Assignment] = []
        forced = [entry for entry in pool.overdue(now_ns) if entry.overflow_limit == inf]
        for entry in [*forced, *(one for one in pool if one.kv_tokens == 300)]:
            rank = least_kv_with_room(fleet, entry)
            if rank is not None and entry.request in pool:
                pool.admit(entry.request)
                fleet.bind(rank, entry)
                admitted.append(Assignment(entry.request, RankId(rank)))
        return admitted


def test_too_little_is_known_at_first_and_a_late_request_goes_at_any_cost() -> None:
    assert Fleet().late_limit(300) == inf


def test_the_limit_is_where_both_cost_the_same_rank_time() -> None:
    fleet = Fleet(lease_margin_ns=0, pool_limit=100)
    fleet.run(600)
    pace = fleet.scheduler.leases.pace
    assert pace is not None
    shed = pace.tokens_left_per_step
    assert shed is not None
    assert shed == pytest.approx(2 * 4 / 103 * 403, rel=0.2)  # None leaves in the first 100 steps.
    assert pace.step_model.ns_per_token == pytest.approx(10_000.0, rel=0.01)
    assert pace.prefill_ns_per_token == pytest.approx(1_000.0, rel=0.01)
    limit = fleet.late_limit(20_000)
    prefill_ns = pace.busy_prefillers * 1_000 * 20_000 * 2 + LEASE_NS / 4
    # Forced, every step is longer by b x on both ranks, until its rank has shed x.
    overflow, forced_ns = limit, 0.0
    while overflow > 0:
        forced_ns += 2 * 10_000 * overflow
        overflow -= shed / 2
    assert forced_ns == pytest.approx(prefill_ns, rel=0.1)


def test_after_two_lapses_a_request_goes_at_any_cost() -> None:
    fleet = Fleet(pool_limit=100)
    fleet.run(600)
    finite = [fleet.late_limit(20_000, lapses=lapses) < inf for lapses in range(4)]
    assert finite == [True, True, False, False]
    assert MOST_LAPSES == 2


def test_a_deadline_that_is_set_holds_at_any_cost() -> None:
    fleet = Fleet(pool_limit=100, deadline_ns=1_000_000_000)
    fleet.run(600)
    assert fleet.late_limit(20_000) == inf


def test_a_request_whose_lease_is_left_to_end_is_served_in_the_end() -> None:
    fleet = Fleet(pool_limit=100)
    fleet.scheduler.policy = SmallOnes()
    fleet.run(600)
    number = fleet.arrive(4_000)
    before_ns = fleet.driver.now_ns
    while number not in fleet.ends:
        fleet.run(1)
        assert fleet.driver.now_ns - before_ns < 3 * LEASE_NS
    assert fleet.released == [ReleasePrefill(number, P0, cheaper=True)] * MOST_LAPSES


@pytest.fixture
def scheduler() -> Scheduler:
    return Driver("br-0", lease_ns=1_000, lease_margin_ns=200).scheduler


def feed(scheduler: Scheduler, now_ns: int, *events: Event) -> None:
    for event in events:
        scheduler.handle(event, now_ns=now_ns)
        scheduler.check()


def test_an_entry_is_late_after_three_quarters_of_its_usable_lease(scheduler: Scheduler) -> None:
    number = RequestId(0)
    feed(scheduler, 0, RequestArrived(number, Ticket(10)))
    feed(
        scheduler, 100, PrefillDone(number, 10, lease_expires_ns=1_100)
    )  # 900 until 200 before it.
    assert scheduler.pool.overdue(699) == []
    assert [entry.request for entry in scheduler.pool.overdue(700)] == [number]


def test_a_request_that_lost_its_lease_is_late_again_after_the_next_one(
    scheduler: Scheduler,
) -> None:
    blocker, number, later = map(RequestId, range(3))
    for one in (blocker, number, later):
        feed(scheduler, 0, RequestArrived(one, Ticket(10)))
    feed(scheduler, 0, PrefillDone(blocker, 10), Tick(), DecodeStarted(blocker))
    feed(scheduler, 100, PrefillDone(number, 10, 1_100), PrefillDone(later, 10))
    scheduler.pool.admit(later)  # It overtakes the other.
    feed_lapse = scheduler.handle(Tick(), now_ns=900)
    assert ReleasePrefill(number, P0) in feed_lapse
    request = scheduler.requests[number]
    assert (request.lapses, request.overtaken) == (1, 1)
    scheduler.handle(PrefillDone(number, 10, 2_000), now_ns=1_000)
    (entry,) = scheduler.pool.first(1)
    assert (entry.overtaken, entry.deadline_ns) == (1, 1_600)


def test_once_it_was_served_its_lapses_are_forgotten() -> None:
    driver = Driver("br-0", lease_ns=1_000)
    number = RequestId(0)
    driver.to_decode(number)
    driver(DecodeStarted(number))
    request = driver.scheduler.requests[number]
    request.lapses = request.overtaken = 3
    driver(RequestRecomputed(number))
    assert (request.lapses, request.overtaken) == (0, 0)


# The depth of the pool.


@pytest.mark.parametrize(
    ("limits", "wait_s"),
    [
        ({}, 30 / 6),
        ({"lease_ns": 4 * LEASE_NS}, 10.0),
        ({"deep_pool": True}, (30 - 5) / 2),
        ({"deep_pool": True, "lease_ns": 4 * LEASE_NS}, 15.0),
        # The margin is at most half of the lease.
        ({"deep_pool": True, "lease_margin_ns": LEASE_NS}, 30 / 4),
    ],
)
def test_the_pool_holds_what_the_ranks_admit_in_a_part_of_a_lease(
    limits: dict[str, Any], wait_s: float
) -> None:
    fleet = Fleet(**limits)
    leases, pace = fleet.scheduler.leases, fleet.scheduler.leases.pace
    assert pace is not None
    for tick in range(400):  # A second each.
        assert leases.pool_limit == 24 or tick > 19
        leases.tick((1 + tick) * 10**9, waiting=True)
        for _ in range(10):
            pace.left(300)
    assert leases.pool_limit == pytest.approx(10 * wait_s, abs=2)


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({}, None),
        ({"pool_limit": 3}, 3),
        ({"lease_ns": LEASE_NS}, 24),
        ({"lease_ns": LEASE_NS, "pool_limit": 3}, 3),
        ({"lease_ns": LEASE_NS, "ranks": 72}, 72),
        ({"lease_ns": LEASE_NS, "prefillers": 20}, 40),
        # Half of the slots: what leaves in half of the usable lease, if all leave within it.
        ({"lease_ns": LEASE_NS, "ranks": 8, "batch_limit": 16, "deep_pool": True}, 64),
        ({"lease_ns": LEASE_NS, "ranks": 2, "batch_limit": 16, "deep_pool": True}, 24),
        ({"lease_ns": 4 * LEASE_NS, "ranks": 8, "batch_limit": 92, "deep_pool": True}, 96),
        (
            {
                "lease_ns": LEASE_NS,
                "ranks": 2,
                "deep_pool": True,
                "rank_batch_limits": (64, 128),
            },
            96,
        ),
    ],
)
def test_at_first_the_pool_feeds_every_rank_and_prefiller(
    limits: dict[str, Any], limit: int | None
) -> None:
    assert Driver(**limits).scheduler.leases.pool_limit == limit


def test_a_new_configuration_keeps_what_was_measured() -> None:
    driver = Driver(lease_ns=LEASE_NS)
    pace = driver.scheduler.leases.pace
    for lease_ns, kept in ((2 * LEASE_NS, True), (None, False)):
        config = SchedulerConfig(1, 1, lease_ns=lease_ns)
        driver.scheduler.reconfigure(config, driver.scheduler.policy)
        assert (driver.scheduler.leases.pace is pace) == kept
    assert driver.scheduler.leases.pool_limit is None

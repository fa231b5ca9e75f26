"""Changing the deployment or the policy under way: as if it had been so from the start."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.core.driver import Driver
from tests.extended import USUAL_POLICIES, usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    RankClosed,
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
    TokensEmitted,
)
from balanceroute.proxy.core.policies import (
    POLICIES,
    Assignment,
    Fleet,
    Policy,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.prediction import OutputPredictor
from balanceroute.proxy.core.prefill import PrefillRequest, PrefillView
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.resources import pool_entry
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from balanceroute.proxy.core.ranks import Follower
    from balanceroute.proxy.core.waiting import Pool

P0, P1 = PrefillerId(0), PrefillerId(1)
RANK0, RANK1 = RankId(0), RankId(1)
A, B, C, D = (RequestId(number) for number in range(4))


class Spy(NoPrediction):
    """No prediction, with a record of who was asked about at what age."""

    def __init__(self) -> None:
        self.asked: list[tuple[RequestId, int]] = []

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.asked += zip(requests, ages.tolist(), strict=True)
        return super().survival(requests, ages, steps)


def policy_for(
    name: str, config: SchedulerConfig, predictor: OutputPredictor | None = None
) -> Policy:
    # A short horizon and refresh, so that every deposit is made anew often.
    settings = PolicySettings(horizon_steps=4, refresh_tokens=3, theta=1)
    return make_policy(
        name,
        PolicyInputs(
            config.ranks,
            config.batch_limit,
            settings,
            random.Random(3),
            NoPrediction() if predictor is None else predictor,
        ),
    )


def reconfigure(driver: Driver, policy: str = "fifo", **changes: Any) -> None:
    config = replace(driver.scheduler.config, **changes)
    driver.scheduler.reconfigure(config, policy_for(policy, config))
    driver.scheduler.check()


def test_a_new_rank_takes_what_waits() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver.to_pool(B, C)
    reconfigure(driver, ranks=2)
    assert driver(Tick()) == [Admit(B, RANK1)]
    driver(DecodeStarted(A), DecodeStarted(B), StepCompleted())
    assert driver.held()["loads"] == [11, 11]
    assert driver(RequestFinished(A), Tick()) == [Admit(C, RANK0)]


def test_a_new_prefiller_starts_the_waiting_prefills_at_the_next_tick() -> None:
    driver = Driver(probe_limit=1)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    reconfigure(driver, prefillers=2)
    assert driver(Tick()) == [StartPrefill(B, P1, 10)]
    assert driver.held()["prefills"] == [1, 1]


def test_limits_may_widen_and_shrink() -> None:
    driver = Driver(pool_limit=1)
    driver(RequestArrived(A, Ticket(10)), RequestArrived(B, Ticket(10)))
    reconfigure(driver, pool_limit=2, batch_limit=2)
    assert driver(Tick()) == [StartPrefill(B, P0, 10)]
    driver(PrefillDone(A, 10), PrefillDone(B, 10))
    assert driver(Tick()) == [Admit(A, RANK0), Admit(B, RANK0)]
    driver.to_pool(C)
    reconfigure(driver, batch_limit=1)
    # One more than the batch now: both have to go before the next one is taken.
    assert driver(RequestFinished(A), Tick()) == []
    assert driver(RequestFinished(B), Tick()) == [Admit(C, RANK0)]


def test_closed_ones_stay_closed_and_new_ones_are_open() -> None:
    driver = Driver()
    driver(RankClosed(RANK0), PrefillerClosed(P0))
    reconfigure(driver, ranks=2, prefillers=2, batch_limit=2)
    assert driver(RequestArrived(A, Ticket(10))) == [StartPrefill(A, P1, 10)]
    assert driver(PrefillDone(A, 10), Tick()) == [Admit(A, RANK1)]


def test_times_to_live_and_leases_count_by_the_new_settings() -> None:
    driver = Driver(probe_limit=1, lease_margin_ns=5)
    driver.to_decode(A)
    driver.at(10, RequestArrived(B, Ticket(10)), PrefillDone(B, 10, lease_expires_ns=100))
    driver.to_pool(C)
    driver(RequestArrived(D, Ticket(10)), RequestArrived(RequestId(4), Ticket(10)))
    assert driver.scheduler.next_deadline_ns() == 95
    reconfigure(driver, ttl_ns=70, queue_ttl_ns=60, lease_margin_ns=40)
    assert driver.scheduler.next_deadline_ns() == 60
    assert driver.at(60, Tick()) == [ReleasePrefill(B, P0)]
    assert driver.at(70, Tick()) == [Expire(B), Expire(RequestId(4))]
    assert driver.at(80, Tick()) == [ReleasePrefill(C, P0), Expire(C)]
    driver(
        PrefillDone(D, 10),
        RequestArrived(RequestId(5), Ticket(10)),
        RequestArrived(RequestId(6), Ticket(10)),
    )
    assert driver.scheduler.next_deadline_ns() == 140
    reconfigure(driver, ttl_ns=None, queue_ttl_ns=None)
    assert driver.scheduler.next_deadline_ns() is None


def test_a_deadline_counts_by_the_new_settings() -> None:
    driver = Driver()
    driver.to_decode(A)
    driver.at(10)
    driver.to_pool(B)
    reconfigure(driver, deadline_ns=20)
    assert [entry.deadline_ns for entry in driver.scheduler.pool] == [30]


def test_overtakings_and_losses_are_remembered() -> None:
    driver = Driver(ranks=2)
    driver.to_decode(A)
    driver(DecodeLost(A))
    driver.to_pool(B)
    driver.scheduler.pool.admit(B)
    request = driver.scheduler.requests[B]
    entry = pool_entry(request, driver.scheduler.config, driver.scheduler.prefillers.pairs)
    driver.scheduler.pool.add(entry)
    reconfigure(driver)
    assert [(entry.overtaken, entry.lost_on) for entry in driver.scheduler.pool] == [
        (1, (RANK0,)),
        (0, ()),
    ]


def test_a_new_projection_knows_how_much_each_request_has_emitted() -> None:
    config = SchedulerConfig(ranks=1, batch_limit=9)
    spies = [Spy(), Spy()]
    scheduler = Scheduler(config, policy_for("br-h", config, spies[0]))

    def feed(*events: Event) -> None:
        for event in events:
            scheduler.handle(event, now_ns=0)

    def predict() -> None:
        projection = scheduler.policy.projection
        assert isinstance(projection, Projection)
        projection.loads_ahead(scheduler.ledger.loads)

    feed(RequestArrived(A, Ticket(10)), PrefillDone(A, 10), Tick(), DecodeStarted(A))
    feed(StepCompleted(), StepCompleted(), RequestRecomputed(A), PrefillDone(A, 12), Tick())
    predict()
    scheduler.ledger.check()
    assert spies[0].asked[-1] == (A, 2)
    feed(RequestArrived(B, Ticket(10, slots=3)), PrefillDone(B, 10), Tick())
    feed(DecodeStarted(A), DecodeStarted(B), StepCompleted(), TokensEmitted(B, 2))
    scheduler.reconfigure(config, policy_for("br-h", config, spies[1]))
    predict()
    scheduler.ledger.check()
    assert spies[1].asked == [(A, 3), (B, 1)]
    feed(TokensEmitted(B, 1))
    scheduler.ledger.check()
    assert spies[1].asked[-1] == (B, 2)


@pytest.mark.parametrize("name", ["ranks", "prefillers"])
def test_fewer_ranks_or_prefillers_are_refused(name: str) -> None:
    limits: dict[str, Any] = {name: 2}
    driver = Driver("br-h", **limits)
    driver.to_decode(A)
    before, config = driver.held(), driver.scheduler.config
    with pytest.raises(ConfigError, match=f"^{name} is 1, cannot be fewer than the 2"):
        reconfigure(driver, "br-0", **{name: 1})
    assert driver.scheduler.config is config
    assert driver.held() == before
    driver.scheduler.check()


def test_a_policy_for_another_number_of_ranks_is_refused() -> None:
    config = SchedulerConfig(ranks=2, batch_limit=1)
    policy = policy_for("br-h", replace(config, ranks=1))
    with pytest.raises(ConfigError, match="the policy is for 1 ranks, there are 2"):
        Scheduler(config, policy)
    scheduler = Scheduler(config, policy_for("br-0", config))
    with pytest.raises(ConfigError, match="the policy is for 1 ranks, there are 2"):
        scheduler.reconfigure(config, policy)


def test_a_policy_whose_projection_is_in_use_is_refused() -> None:
    config = SchedulerConfig(ranks=2, batch_limit=1)
    policy = policy_for("br-h", config)
    scheduler = Scheduler(config, policy)
    with pytest.raises(ConfigError, match="the policy is in use"):
        scheduler.reconfigure(config, policy)


# As if it had been so from the start.


class Rehearsed:
    """Sends what was agreed to where it was agreed, and then leaves it to another policy."""

    def __init__(self, then: Policy | None = None) -> None:
        self._then = then
        self.rehearsing = True

    @property
    def slots_beyond_batch(self) -> int | None:
        return None if self.rehearsing or self._then is None else self._then.slots_beyond_batch

    @property
    def projection(self) -> "Follower | None":
        return None if self._then is None else self._then.projection

    @property
    def next_decision_ns(self) -> int | None:
        return None if self._then is None else self._then.next_decision_ns

    def dispatch(self, fleet: Fleet, pool: "Pool", now_ns: int) -> list[Assignment]:
        if self.rehearsing:
            entries = [entry for entry in pool if entry.request % 3]
            for entry in entries:
                pool.admit(entry.request)
            return [Assignment(entry.request, RankId(entry.request % 2)) for entry in entries]
        assert self._then is not None
        return self._then.dispatch(fleet, pool, now_ns)


class FirstWithRoom:
    """Takes the lowest candidate, so that a prefiller more does not matter at first."""

    observer = None

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request, view
        return candidates[0]


class Life:
    """Draws legal events from the actions and the state of one scheduler."""

    def __init__(self, rng: random.Random, scheduler: Scheduler) -> None:
        self.now_ns = 0
        self._rng = rng
        self._scheduler = scheduler
        self._arrived = 0

    def next_event(self) -> Event:
        self.now_ns += self._rng.randrange(3)
        rng, requests = self._rng, list(self._scheduler.requests.values())
        request = rng.choice(requests) if requests else None
        match rng.randrange(12):
            case 0 | 1:
                self._arrived += 1
                number = RequestId(self._arrived)
                prompt_tokens, slots = rng.randint(1, 60), rng.choice([1, 1, 1, 3])
                return RequestArrived(
                    number, Ticket(prompt_tokens, slots, prefill=rng.random() < 0.8)
                )
            case 2 | 3 if prefilling := [one for one in requests if one.prefilling]:
                lease_ns = rng.choice([None, self.now_ns + rng.randint(1, 60)])
                return PrefillDone(rng.choice(prefilling).request, rng.randint(1, 60), lease_ns)
            case 4 | 5 if bound := [
                one for one in requests if one.rank is not None and not one.started
            ]:
                return DecodeStarted(rng.choice(bound).request)
            case 6 if request is not None and request.started:
                held = self._scheduler.ledger.kv_tokens(request.request)
                return TokensEmitted(request.request, rng.randint(request.kv_tokens() - held, 4))
            case 7 if request is not None and request.started:
                return RequestRecomputed(request.request)
            case 8 | 11 if request is not None and request.rank is not None:
                return RequestFinished(request.request)
            case 9 if request is not None and request.rank is not None and not request.started:
                return DecodeLost(request.request)
            case 10:
                return StepCompleted()
            case _:
                return Tick()


SHAPE = SchedulerConfig(
    ranks=4,
    batch_limit=3,
    rank_kv_tokens=400,
    prefillers=3,
    deadline_ns=30,
    ttl_ns=200,
    lease_margin_ns=10,
    queue_ttl_ns=150,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", usually(USUAL_POLICIES, POLICIES))
def test_what_follows_is_as_if_it_had_had_this_shape_from_the_start(name: str, seed: int) -> None:
    small = replace(SHAPE, ranks=2, batch_limit=7, prefillers=1, ttl_ns=None, rank_kv_tokens=None)
    reconfigured = Scheduler(small, Rehearsed(), prefill_choice=FirstWithRoom)
    policy = Rehearsed(policy_for(name, SHAPE))
    always = Scheduler(SHAPE, policy, prefill_choice=FirstWithRoom)
    life = Life(random.Random(f"{name} {seed}"), always)

    def feed(event: Event) -> list[Action]:
        actions = always.handle(event, now_ns=life.now_ns)
        assert reconfigured.handle(event, now_ns=life.now_ns) == actions
        return actions

    def ahead(scheduler: Scheduler) -> object:
        projection, loads = scheduler.policy.projection, scheduler.ledger.loads
        if isinstance(projection, Projection):
            return projection.loads_ahead(loads).tolist()
        return loads.tolist()

    # Before the times to live that differ are over.
    while life.now_ns < 150 or not always.ledger.started.any():
        feed(life.next_event())
    assert len(always.pool) > 0
    if policy.projection is not None:
        # The deposit of one that has not started is as good as it is new.
        for request in always.requests.values():
            if request.rank is not None and not request.started:
                feed(DecodeStarted(request.request))
    reconfigured.reconfigure(SHAPE, policy_for(name, SHAPE))
    reconfigured.check()
    policy.rehearsing = False
    feed(Tick())
    admitted = 0
    for _ in range(600):
        actions = feed(life.next_event())
        admitted += sum(isinstance(action, Admit) for action in actions)
        assert reconfigured.next_deadline_ns() == always.next_deadline_ns()
        assert ahead(reconfigured) == ahead(always)
    reconfigured.check()
    assert admitted > 10

"""Policies, projections and predictors that fail: no round is lost, and the books stay right."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.extended import USUAL_POLICIES, usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import PolicyError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Expire,
    PrefillDone,
    RankClosed,
    RankId,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    StepCompleted,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.core.policies import (
    POLICIES,
    PREDICTING,
    Assignment,
    Fleet,
    Policy,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.proxy.core.waiting import Pool

RANKS, BATCH = 3, 4
Choose = Callable[[Fleet, Pool], Any]


class BrokenError(Exception):
    """Raised by what is made to fail."""


class Scripted:
    """A policy that returns a given decision."""

    projection = None
    slots_beyond_batch = 0

    def __init__(self, choose: Choose, next_decision_ns: int | None = None) -> None:
        self._choose = choose
        self.next_decision_ns = next_decision_ns

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        chosen: list[Assignment] = self._choose(fleet, pool)
        return chosen


class Fickle(NoPrediction):
    """A predictor that fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[], bool] = lambda: False
        self.works = False

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        if not self.works and self.fails():
            raise BrokenError
        return super().survival(requests, ages, steps)


def policy_of(name: str, predictor: NoPrediction, **settings: Any) -> Policy:
    parts = PolicyInputs(RANKS, BATCH, PolicySettings(**settings), random.Random(0), predictor)
    return make_policy(name, parts)


class Seat:
    """A scheduler with its books checked after every event."""

    def __init__(self, policy: Policy, predictor: Fickle | None = None, **limits: Any) -> None:
        self.failures: list[tuple[str, Exception]] = []
        self.scheduler = Scheduler(
            SchedulerConfig(ranks=RANKS, batch_limit=BATCH, **limits),
            policy,
            on_failure=lambda what, error: self.failures.append((what, error)),
        )
        self.now_ns = 0
        self.predictor = predictor

    def __call__(self, *events: Any) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            if self.predictor is not None:
                self.predictor.works = False
            actions += self.scheduler.handle(event, now_ns=self.now_ns)
            if self.predictor is not None:
                self.predictor.works = True  # The check asks it too.
            self.scheduler.check()
        return actions

    def pool(self, *prompts: int) -> None:
        for number, tokens in enumerate(prompts):
            self(RequestArrived(RequestId(number), Ticket(tokens, prefill=False)))


def admit_and_raise(fleet: Fleet, pool: Pool) -> list[Assignment]:
    first, second, third = pool.first(3)
    pool.admit(third.request)
    pool.admit(first.request)
    pool.remove(second.request)
    raise BrokenError


def taken(pool: Pool, *pairs: tuple[Any, Any]) -> list[Assignment]:
    """Take requests out of the pool, and answer with these pairs."""
    for number in {number for number, _ in pairs if number in pool}:
        pool.admit(number)
    return [Assignment(*pair) for pair in pairs]


NONSENSE: dict[str, Choose] = {
    "raises": admit_and_raise,
    "is nothing": lambda fleet, pool: None,
    "is no pairs": lambda fleet, pool: [1, 2],
    "closed rank": lambda fleet, pool: taken(pool, (0, 2)),
    "rank too high": lambda fleet, pool: taken(pool, (0, RANKS)),
    "rank below 0": lambda fleet, pool: taken(pool, (0, -1)),
    "rank is a text": lambda fleet, pool: taken(pool, (0, "0")),
    "rank is nothing": lambda fleet, pool: taken(pool, (0, None)),
    "unknown request": lambda fleet, pool: taken(pool, (99, 0)),
    "request is a list": lambda fleet, pool: [([], 0)],
    "the same twice": lambda fleet, pool: taken(pool, (0, 0), (0, 1)),
    "more than the slots": lambda fleet, pool: taken(pool, *((n, 0) for n in range(BATCH + 1))),
    "left in the pool": lambda fleet, pool: [Assignment(RequestId(0), RankId(0))],
    "taken without a rank": lambda fleet, pool: (pool.admit(RequestId(1)), [])[1],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_round_without_a_usable_choice_is_decided_oldest_first(name: str) -> None:
    """Entries that a policy had taken when it raised were in no pool any more."""
    seat = Seat(Scripted(NONSENSE[name]))
    seat(RankClosed(RankId(2)))
    seat.pool(50, 10, 10, 10, 10, 10, 10)
    # To the least loaded open rank each, the lower on a tie.
    ranks = [0, 1, 1, 1, 1, 0, 0]
    assert seat(Tick()) == [Admit(RequestId(n), RankId(rank)) for n, rank in enumerate(ranks)]
    assert [what for what, _ in seat.failures] == ["policy"]


@pytest.mark.parametrize("name", NONSENSE)
def test_a_failure_nobody_is_told_of_comes_out_and_changes_nothing(name: str) -> None:
    scheduler = Scheduler(SchedulerConfig(RANKS, BATCH), Scripted(NONSENSE[name]))
    scheduler.handle(RankClosed(RankId(2)), now_ns=0)
    for number in range(7):
        scheduler.handle(RequestArrived(RequestId(number), Ticket(10, prefill=False)), now_ns=0)
    with pytest.raises((PolicyError, BrokenError, TypeError)):
        scheduler.handle(Tick(), now_ns=0)
    scheduler.check()
    assert [entry.request for entry in scheduler.pool] == list(range(7))
    assert [entry.overtaken for entry in scheduler.pool] == [0] * 7


def test_what_a_choice_took_comes_back_with_its_timers() -> None:
    pool_of_one = Seat(Scripted(admit_and_raise), ttl_ns=10, deadline_ns=5)
    scheduler = pool_of_one.scheduler
    pool_of_one(*(RankClosed(RankId(rank)) for rank in range(RANKS)))
    pool_of_one.pool(10, 10, 10)
    assert pool_of_one(Tick()) == []
    assert [entry.request for entry in scheduler.pool.overdue(5)] == [0, 1, 2]
    assert scheduler.next_deadline_ns() == 10


def test_a_policy_says_when_it_decides_again() -> None:
    seat = Seat(Scripted(lambda _fleet, _pool: [], next_decision_ns=50))
    assert seat.scheduler.next_deadline_ns() is None
    seat.pool(10)
    assert seat.scheduler.next_deadline_ns() == 50
    seat(RequestCancelled(RequestId(0)))
    assert seat.scheduler.next_deadline_ns() is None


def test_expiries_are_told_though_the_policy_fails() -> None:
    """What a tick had decided before the exception was lost with it."""
    seat = Seat(Scripted(admit_and_raise), ttl_ns=10)
    seat(RequestArrived(RequestId(0), Ticket(10, prefill=False)))
    seat.now_ns = 10
    for number in (1, 2, 3):
        seat(RequestArrived(RequestId(number), Ticket(10, prefill=False)))
    actions = seat(Tick())
    assert actions[0] == Expire(RequestId(0))
    assert [type(action) for action in actions[1:]] == [Admit] * 3


@pytest.mark.parametrize("name", usually(USUAL_POLICIES, sorted(POLICIES)))
@pytest.mark.parametrize("paper", [False, True])
def test_random_runs_with_failing_predictions_end_with_nothing_held(name: str, paper: bool) -> None:
    """A predictor that raises, in a decision or a step, leaves every book right."""
    for seed in range(12):
        rng = random.Random(seed)
        predictor = Fickle()
        policy = policy_of(name, predictor, paper=paper, horizon_steps=5, refresh_tokens=2)
        seat = Seat(policy, predictor)
        predictor.fails = lambda rng=rng: rng.random() < 0.3  # type: ignore[misc]
        live: set[RequestId] = set()
        arrived = ended = 0
        while ended < 60:
            if arrived < 60 and rng.random() < 0.6:
                seat(
                    RequestArrived(
                        RequestId(arrived), Ticket(rng.randint(1, 90), slots=rng.choice([1, 1, 3]))
                    ),
                    PrefillDone(RequestId(arrived), rng.randint(1, 90)),
                )
                arrived += 1
            for action in seat(Tick()):
                assert isinstance(action, Admit)
                live.add(action.request)
                seat(DecodeStarted(action.request))
            seat(StepCompleted())
            for number in sorted(live):
                if rng.random() < 0.2:
                    seat(TokensEmitted(number, 2))
                elif rng.random() < 0.2:
                    seat(RequestFinished(number))
                    live.remove(number)
                    ended += 1
        assert not seat.scheduler.requests
        assert not seat.scheduler.ledger.loads.any()
        assert {type(error) for _, error in seat.failures} <= {BrokenError}
        assert bool(seat.failures) == (name in PREDICTING)


def test_a_projection_that_failed_is_built_anew() -> None:
    """The loads ahead are those of a scheduler that nothing ever happened to."""
    predictor, calm = Fickle(), NoPrediction()
    failed = Seat(policy_of("br-h", predictor, horizon_steps=4), predictor)
    well = Seat(policy_of("br-h", calm, horizon_steps=4))
    for seat in (failed, well):
        seat.pool(30, 20, 10)
        seat(Tick(), *(DecodeStarted(RequestId(number)) for number in range(3)))
    predictor.fails, predictor.works = lambda: True, False
    for seat in (failed, well):
        # Without a check in between, which asks the predictor before the step does.
        for event in (TokensEmitted(RequestId(0), 3), StepCompleted(), StepCompleted()):
            seat.scheduler.handle(event, now_ns=0)
        seat(RequestArrived(RequestId(3), Ticket(7, prefill=False)))
    predictor.fails = lambda: False
    for seat in (failed, well):
        seat(Tick(), DecodeStarted(RequestId(3)), StepCompleted())
    assert [what for what, _ in failed.failures] == ["projection"]
    ahead = []
    for seat in (failed, well):
        projection = seat.scheduler.policy.projection
        assert isinstance(projection, Projection)
        assert seat.scheduler.ledger.projection is projection
        ahead.append(projection.loads_ahead(seat.scheduler.ledger.loads).tolist())
    assert ahead[0] == ahead[1]


def test_a_load_beyond_32_bits_does_not_overflow_the_projection() -> None:
    """Deposits are made of 32 bits."""
    seat = Seat(policy_of("br-h", NoPrediction(), horizon_steps=4))
    seat(RequestArrived(RequestId(0), Ticket(2**26, slots=128, prefill=False)), Tick())
    seat(RequestArrived(RequestId(1), Ticket(5, prefill=False)), Tick(), StepCompleted())
    projection = seat.scheduler.policy.projection
    assert isinstance(projection, Projection)
    ahead = projection.loads_ahead(seat.scheduler.ledger.loads)
    assert (ahead >= 0).all()
    assert ahead.max() >= 2**33
    assert seat.failures == []

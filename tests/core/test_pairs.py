"""Prefillers whose KV caches not all ranks can use."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn_deeds import INSTANCES, DrawnDeeds
from tests.core.driver import Driver
from tests.extended import USUAL_POLICIES, usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    Eligible,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    PrefillerPaired,
    RankClosed,
    RankId,
    RankOpened,
    ReleasePrefill,
    RequestArrived,
    RequestId,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import POLICIES, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.prefill.budgets import Pairs
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

A, B = RequestId(0), RequestId(1)
P0, P1 = PrefillerId(0), PrefillerId(1)
R0, R1 = RankId(0), RankId(1)


def pair(prefiller: int, *ranks: int) -> PrefillerPaired:
    return PrefillerPaired(PrefillerId(prefiller), frozenset(map(RankId, ranks)))


@pytest.fixture
def mixed() -> Driver:
    """Two engines of each role, and prefiller n fits rank n alone."""
    driver = Driver(prefillers=2, ranks=2, batch_limit=2)
    driver(pair(0, 0), pair(1, 1))
    return driver


def test_a_request_goes_to_a_rank_that_its_prefiller_fits(mixed: Driver) -> None:
    assert mixed(RequestArrived(A, Ticket(10))) == [StartPrefill(A, P0, 10)]
    assert mixed(RequestArrived(B, Ticket(10))) == [StartPrefill(B, P1, 10)]
    mixed(PrefillDone(A, 10), PrefillDone(B, 10))
    assert mixed(Tick()) == [Admit(A, R0), Admit(B, R1)]


def test_a_full_partner_holds_up_only_its_own_prefillers_requests() -> None:
    driver = Driver(prefillers=2, ranks=2, batch_limit=1)
    driver(pair(0, 0), pair(1, 1), PrefillerClosed(P1))
    driver.to_pool(A, B)
    assert driver(Tick()) == [Admit(A, R0)]
    driver(PrefillerOpened(P1), PrefillerClosed(P0))
    driver.to_pool(RequestId(2))
    assert driver(Tick()) == [Admit(RequestId(2), R1)]


def test_no_prefiller_computes_what_no_open_rank_can_use(mixed: Driver) -> None:
    mixed(RankClosed(R0), RankClosed(R1))
    assert mixed(RequestArrived(A, Ticket(10))) == []
    assert mixed(RankOpened(R1)) == [StartPrefill(A, P1, 10)]


def test_a_pooled_request_without_an_open_partner_is_prefilled_again(mixed: Driver) -> None:
    mixed.to_pool(A)
    mixed(RankClosed(R0))
    assert mixed(Tick()) == [ReleasePrefill(A, P0), StartPrefill(A, P1, 10)]


def test_the_last_partner_may_close_while_the_prefill_runs(mixed: Driver) -> None:
    mixed(RequestArrived(A, Ticket(10)), RankClosed(R0), PrefillDone(A, 10))
    assert mixed(Tick()) == [ReleasePrefill(A, P0), StartPrefill(A, P1, 10)]


def test_a_pooled_request_follows_a_change_of_the_pairs(mixed: Driver) -> None:
    mixed.to_pool(A)
    mixed(pair(0, 1))
    assert mixed(Tick()) == [Admit(A, R1)]


def test_a_rank_that_did_not_take_it_is_tried_again_if_it_alone_fits(mixed: Driver) -> None:
    mixed.to_pool(A)
    mixed(Tick(), DecodeLost(A))
    assert mixed(Tick()) == [Admit(A, R0)]


def test_a_request_without_prefill_goes_anywhere(mixed: Driver) -> None:
    mixed(RequestArrived(A, Ticket(10, prefill=False)), RankClosed(R0))
    assert mixed(Tick()) == [Admit(A, R1)]


def test_a_direct_request_needs_no_rank(mixed: Driver) -> None:
    mixed(RankClosed(R0), RankClosed(R1))
    assert mixed(RequestArrived(A, Ticket(10, decode=False))) == [StartPrefill(A, P0, 10)]


def test_pairs_and_models_hold_together(mixed: Driver) -> None:
    both = frozenset((P0, P1))
    ticket = Ticket(10, eligible=Eligible(both, frozenset((R1,))))
    assert mixed(RequestArrived(A, ticket)) == [StartPrefill(A, P1, 10)]
    mixed(PrefillDone(A, 10))
    assert mixed(Tick()) == [Admit(A, R1)]


def test_a_conversation_does_not_return_to_a_rank_that_does_not_fit() -> None:
    driver = Driver(prefillers=1, ranks=2, batch_limit=2)
    driver(pair(0, 0))
    driver(RequestArrived(A, Ticket(10, home=R1)), PrefillDone(A, 10))
    assert driver(Tick()) == [Admit(A, R0)]


def test_an_unknown_prefiller_is_refused(mixed: Driver) -> None:
    with pytest.raises(LifecycleError, match="prefiller 7 is unknown"):
        mixed(pair(7, 0))


def test_pairs_that_are_all_allowed_again_cost_nothing(mixed: Driver) -> None:
    mixed(PrefillerPaired(P0, None), PrefillerPaired(P1, None))
    assert not mixed.scheduler.prefillers.pairs.limited


def test_a_rank_that_closed_before_the_pairs_were_known_counts() -> None:
    pairs = Pairs()
    pairs.set_open(R0, False)
    pairs.set(P0, frozenset((R0,)))
    assert not pairs.feeds(P0)
    assert pairs.feeds(P1), "nothing is known of it"
    pairs.set_open(R0, True)
    assert pairs.feeds(P0)


DEEDS = st.sampled_from(
    ["arrive", "prefill", "lose prefill", "tick", "join", "bounce", "finish", "recompute"]
)
RANKS = st.none() | st.frozensets(st.integers(0, INSTANCES - 1).map(RankId))
EVENTS = (
    st.tuples(DEEDS, st.integers(0, 999))
    | st.builds(PrefillerPaired, st.integers(0, INSTANCES - 1).map(PrefillerId), RANKS)
    | st.builds(RankClosed, st.integers(0, INSTANCES - 1).map(RankId))
    | st.builds(RankOpened, st.integers(0, INSTANCES - 1).map(RankId))
    | st.builds(PrefillerClosed, st.integers(0, INSTANCES - 1).map(PrefillerId))
    | st.builds(PrefillerOpened, st.integers(0, INSTANCES - 1).map(PrefillerId))
)


class _World(DrawnDeeds):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.pairs: dict[int, frozenset[RankId] | None] = {}
        self.open = set(map(RankId, range(INSTANCES)))

    def feed(self, event: object) -> None:
        match event:
            case PrefillerPaired(prefiller, ranks):
                self.pairs[prefiller] = ranks
            case RankClosed(rank):
                self.open.discard(rank)
            case RankOpened(rank):
                self.open.add(rank)
            case _:
                pass
        super().feed(event)

    def look_at(self, action: Action) -> None:
        match action:
            case StartPrefill(number, prefiller, _):
                ranks = self.pairs.get(prefiller)
                # What a prefiller does alone needs no rank.
                alone = not self.scheduler.requests[number].ticket.decode
                assert alone or ranks is None or ranks & self.open
            case Admit(number, rank):
                prefilled_by = self.scheduler.requests[number].prefiller
                assert prefilled_by is not None
                ranks = self.pairs.get(prefilled_by)
                assert ranks is None or rank in ranks
            case _:
                pass

    def open_all(self) -> None:
        """Open everything, with one pair that fits."""
        super().open_all()
        for one in range(INSTANCES):
            self.feed(pair(one, *([one] if one == 0 else [])))


@pytest.mark.parametrize("name", usually(USUAL_POLICIES, sorted(POLICIES)))
@given(
    events=st.lists(EVENTS, max_size=40),
    batch_limit=st.integers(1, 3),
    pool_limit=st.none() | st.integers(1, 4),
)
def test_no_pair_that_does_not_fit_is_ever_made(
    name: str, events: list[object], batch_limit: int, pool_limit: int | None
) -> None:
    config = SchedulerConfig(
        ranks=INSTANCES,
        prefillers=INSTANCES,
        batch_limit=batch_limit,
        probe_limit=2,
        pool_limit=pool_limit,
    )
    inputs = PolicyInputs(
        INSTANCES, batch_limit, PolicySettings(window=2), random.Random(1), NoPrediction()
    )
    world = _World(Scheduler(config, make_policy(name, inputs)))
    for event in events:
        if isinstance(event, tuple) and event[0] == "arrive":
            world.arrive(None, 1 + event[1] % 60)
        elif isinstance(event, tuple):
            world.do(*event)
        else:
            world.feed(event)
    world.bring_to_an_end()

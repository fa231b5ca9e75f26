"""Prefillers whose KV caches not all ranks can use."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.driver import Driver
from tests.extended import USUAL_POLICIES, usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Eligible,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    PrefillerPaired,
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
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import POLICIES, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.prefill.budgets import Pairs
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig

A, B = RequestId(0), RequestId(1)
P0, P1 = PrefillerId(0), PrefillerId(1)
R0, R1 = RankId(0), RankId(1)
INSTANCES = 3


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


class _World:
    """Performs what is drawn if it is possible, and looks at what the scheduler wants done."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pairs: dict[int, frozenset[RankId] | None] = {}
        self.open = set(map(RankId, range(INSTANCES)))
        self.arrived = 0

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
        actions: list[Action] = self.scheduler.handle(event, now_ns=0)  # type: ignore[arg-type]
        for action in actions:
            match action:
                case StartPrefill(_, prefiller, _):
                    ranks = self.pairs.get(prefiller)
                    assert ranks is None or ranks & self.open
                case Admit(number, rank):
                    prefilled_by = self.scheduler.requests[number].prefiller
                    assert prefilled_by is not None
                    ranks = self.pairs.get(prefilled_by)
                    assert ranks is None or rank in ranks
                case _:
                    pass
        self.scheduler.check()

    def some(self, index: int, *states: LifecycleState) -> RequestId | None:
        requests = self.scheduler.requests.values()
        found = [one.request for one in requests if one.state in states and not one.started]
        return found[index % len(found)] if found else None

    def do(self, deed: str, index: int) -> None:
        at_prefill, at_rank = (
            self.some(index, LifecycleState.PREFILLING),
            self.some(index, LifecycleState.DECODING),
        )
        if deed == "arrive":
            self.arrived += 1
            self.feed(RequestArrived(RequestId(self.arrived), Ticket(1 + index % 60)))
        elif deed == "tick":
            self.feed(Tick())
        elif deed in ("prefill", "lose prefill") and at_prefill is not None:
            done = PrefillDone(at_prefill, 10)
            self.feed(done if deed == "prefill" else PrefillLost(at_prefill, elsewhere=True))
        elif deed in ("join", "bounce", "recompute", "finish") and at_rank is not None:
            event = {
                "join": DecodeStarted(at_rank),
                "bounce": DecodeLost(at_rank),
                "recompute": RequestRecomputed(at_rank, elsewhere=True),
                "finish": RequestFinished(at_rank),
            }[deed]
            self.feed(event)

    def bring_to_an_end(self) -> None:
        """Open everything, with one pair that fits: then no request waits for ever."""
        for one in range(INSTANCES):
            self.feed(PrefillerOpened(PrefillerId(one)))
            self.feed(RankOpened(RankId(one)))
            self.feed(pair(one, *([one] if one == 0 else [])))
        for _ in range(4 * self.arrived + 4):
            for request in list(self.scheduler.requests.values()):
                if request.state is LifecycleState.PREFILLING:
                    self.feed(PrefillDone(request.request, request.prompt_tokens))
                elif request.state is LifecycleState.DECODING:
                    self.feed(RequestFinished(request.request))
            self.feed(Tick())
        assert not self.scheduler.requests, "a request waits for ever"


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
        if isinstance(event, tuple):
            world.do(*event)
        else:
            world.feed(event)
    world.bring_to_an_end()

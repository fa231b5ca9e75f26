"""Ranks and prefillers that began, or came back, and the share that they get."""

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.driver import Driver
from tests.extended import USUAL_POLICIES, usually

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
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.core.warm_up import WarmUp, allowed, with_loss

if TYPE_CHECKING:
    from collections.abc import Callable


R0, R1 = RankId(0), RankId(1)
P0, P1 = PrefillerId(0), PrefillerId(1)
BATCH = 16


class Site:
    """Two ranks, of which the second comes back while many requests wait.

    Attributes:
        on: The requests on each rank that have no first token yet.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.sent = 0
        self.on: dict[RankId, list[RequestId]] = {R0: [], R1: []}

    def send(self, count: int) -> None:
        for _ in range(count):
            number = RequestId(self.sent)
            self.sent += 1
            self.driver(RequestArrived(number, Ticket(10)), PrefillDone(number, 10))

    def tick(self) -> Counter[RankId]:
        """Decide; return how many each rank gets."""
        admitted: Counter[RankId] = Counter()
        for action in self.driver(Tick()):
            assert isinstance(action, Admit)
            self.on[action.rank].append(action.request)
            admitted[action.rank] += 1
        return admitted

    def start(self, rank: RankId) -> None:
        """Let all that wait on a rank have their first token."""
        for request in self.on[rank]:
            self.driver(DecodeStarted(request))
        self.on[rank] = []


def proved(policy: str = "br-0") -> Site:
    """Return a fleet whose first rank serves, and whose second one is closed."""
    site = Site(Driver(policy, ranks=2, batch_limit=BATCH))
    site.driver(RankClosed(R1))
    site.send(1)
    assert site.tick() == {R0: 1}
    site.start(R0)
    return site


@pytest.mark.parametrize("policy", usually(USUAL_POLICIES, POLICIES))
def test_a_rank_that_came_back_gets_twice_as_many_with_each_round_of_first_tokens(
    policy: str,
) -> None:
    site = proved(policy)
    site.driver(RankOpened(R1, cold=True))
    got = []
    for _ in range(5):
        site.send(60)  # Policies that bind at once leave none for the next round.
        got.append(site.tick()[R1])
        site.start(R1)
    windows = [1, 2, 4, 8, 16]
    assert all(0 < count <= window for count, window in zip(got[:4], windows, strict=False)), got
    if site.driver.scheduler.policy.slots_beyond_batch == 0:
        assert got[:4] == windows[:4]
        assert sum(got) == BATCH
        assert not site.driver.scheduler.ranks.warm_up.active


def test_it_gets_nothing_more_before_its_first_token() -> None:
    site = proved()
    site.driver(RankOpened(R1, cold=True))
    site.send(100)
    assert site.tick()[R1] == 1
    for _ in range(10):
        site.driver(StepCompleted())
        assert site.tick()[R1] == 0


def test_a_start_that_is_only_expected_proves_nothing_and_an_answer_does() -> None:
    site = proved()
    site.driver(RankOpened(R1, cold=True))
    site.send(100)
    site.tick()
    (request,) = site.on[R1]
    site.driver(DecodeStarted(request, token_seen=False))
    assert site.tick()[R1] == 0
    site.driver(RequestFinished(request))
    site.on[R1] = []
    assert site.tick()[R1] == 2


@pytest.mark.parametrize("loss", [DecodeLost, PrefillLost, RequestCancelled])
def test_one_that_is_lost_makes_room_for_another_and_no_wider_window(
    loss: "Callable[[RequestId], Event]",
) -> None:
    site = proved()
    site.driver(RankOpened(R1, cold=True))
    site.send(100)
    site.tick()
    (request,) = site.on[R1]
    site.driver(loss(request))
    site.on[R1] = []
    assert site.tick()[R1] == 1


def test_a_fleet_that_begins_as_a_whole_serves_at_once() -> None:
    site = Site(Driver("br-0", ranks=2, batch_limit=BATCH))
    site.driver(RankClosed(R0), RankClosed(R1))
    site.driver(RankOpened(R0, cold=True), RankOpened(R1, cold=True))
    site.send(100)
    assert site.tick() == {R0: BATCH, R1: BATCH}


def test_a_window_holds_nothing_back_if_no_other_rank_is_open() -> None:
    site = proved()
    site.driver(RankOpened(R1, cold=True), RankClosed(R0))
    site.send(100)
    assert site.tick() == {R1: BATCH}


def test_a_trial_is_one_request_and_then_the_whole_share() -> None:
    site = proved()
    site.driver(RankOpened(R1, on_trial=True))
    assert not site.driver.scheduler.ranks.is_proved(R1)
    site.send(100)
    assert site.tick()[R1] == 1
    site.start(R1)
    assert site.driver.scheduler.ranks.is_proved(R1)
    assert site.tick()[R1] == BATCH - 1


def test_a_rank_that_closes_begins_anew() -> None:
    site = proved()
    site.driver(RankOpened(R1, cold=True))
    site.send(100)
    for _ in range(2):
        site.tick()
        site.start(R1)
    site.driver(RankClosed(R1), RankOpened(R1, cold=True))
    assert site.tick()[R1] == 1


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
def test_a_warm_fleet_decides_as_one_that_never_changed(policy: str) -> None:
    """The share counts as capacity only while it grows."""
    sites = [proved(policy) for _ in range(2)]
    sites[0].driver(RankOpened(R1))
    sites[1].driver(RankOpened(R1, cold=True))
    for site in sites:
        site.send(40)
        for _ in range(6):
            site.tick()
            site.start(R1)
        for request in range(41):
            if RequestId(request) in site.driver.scheduler.requests:
                site.driver(RequestCancelled(RequestId(request)))
        site.on = {R0: [], R1: []}
        site.sent = 100
    assert not sites[1].driver.scheduler.ranks.warm_up.active
    for count in (7, 30, 3):
        for site in sites:
            site.send(count)
        assert sites[0].tick() == sites[1].tick()
        assert sites[0].on == sites[1].on


def test_a_rank_with_a_small_share_does_not_get_the_largest_prompts() -> None:
    site = proved()
    site.send(8)
    site.tick()
    site.start(R0)
    site.driver(RankOpened(R1, cold=True))
    for number, tokens in enumerate([300, 10, 10, 10], start=500):
        site.driver(
            RequestArrived(RequestId(number), Ticket(tokens)),
            PrefillDone(RequestId(number), tokens),
        )
    assert site.tick() == {R0: 3, R1: 1}
    assert site.on[R1] != [RequestId(500)]


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
def test_a_rank_that_came_back_beside_few_requests_gets_some_of_the_next(policy: str) -> None:
    site = proved(policy)
    site.send(3)
    assert site.tick() == {R0: 3}
    site.start(R0)
    site.driver(RankOpened(R1, cold=True))
    got: Counter[RankId] = Counter()
    for _ in range(6):  # Far from full, one after the other.
        site.send(1)
        got += site.tick()
        site.start(R1)
        site.start(R0)
    assert got[R1] >= 3, got


# Prefillers.


def prefillers() -> Driver:
    """Return a scheduler whose first prefiller works, and whose second one came back."""
    driver = Driver(prefillers=2)
    driver(PrefillerClosed(P1))
    first = RequestId(1000)
    assert driver(RequestArrived(first, Ticket(10))) == [StartPrefill(first, P0, 10)]
    driver(PrefillDone(first, 10), RequestCancelled(first))
    driver(PrefillerOpened(P1, cold=True))
    return driver


def begun(driver: Driver, numbers: range) -> dict[PrefillerId, list[RequestId]]:
    on: dict[PrefillerId, list[RequestId]] = {P0: [], P1: []}
    for number in numbers:
        for action in driver(RequestArrived(RequestId(number), Ticket(10))):
            assert isinstance(action, StartPrefill)
            on[action.prefiller].append(action.request)
    return on


def test_a_prefiller_that_came_back_begins_with_one_prefill() -> None:
    driver = prefillers()
    at, got = 0, []
    for _ in range(4):
        on = begun(driver, range(at, at + 20))
        at += 20
        got.append(len(on[P1]))
        for request in [*on[P0], *on[P1]]:
            driver(PrefillDone(request, 10), RequestCancelled(request))
    assert got[:3] == [1, 2, 4]
    assert got[3] >= 8
    assert not driver.scheduler.prefillers.warm_up.active


def test_a_prefiller_that_loses_a_prompt_gets_another() -> None:
    driver = prefillers()
    (request,) = begun(driver, range(2))[P1]
    driver(PrefillLost(request, elsewhere=True))
    assert len(begun(driver, range(10, 20))[P1]) == 1


def test_the_only_open_prefiller_gets_all() -> None:
    driver = prefillers()
    driver(PrefillerClosed(P0))
    assert len(begun(driver, range(10))[P1]) == 10


@pytest.mark.parametrize("again", [0, 1, 2])
def test_one_that_the_event_of_its_loss_sends_on_counts_where_it_is_now(again: int) -> None:
    warm_up, request, other = WarmUp(), RequestId(7), RequestId(8)
    warm_up.begin(0, grows=True)
    warm_up.begin(1, grows=True)
    warm_up.sent(0, request)
    warm_up.saw(Tick(), [], [4] * 3)
    # The scheduler sends it on while it handles the loss, and tells the event afterwards.
    warm_up.sent(again, request)
    warm_up.saw(PrefillLost(request), [], [4] * 3)
    assert [warm_up.room(one) for one in range(3)] == [int(again != 0), int(again != 1), None]
    warm_up.saw(PrefillDone(request, 10), [], [4] * 3)
    assert [warm_up.width(one) for one in range(3)] == [1 + (again == 0), 1 + (again == 1), None]
    warm_up.sent(1, other)
    warm_up.end(0)
    warm_up.end(1)
    assert not warm_up.active
    warm_up.saw(PrefillDone(other, 10), [], [4] * 3)


# A request goes elsewhere than where it was lost, unless nothing else is open.


T, F = True, False


@pytest.mark.parametrize(
    ("is_open", "lost_on", "expected"),
    [
        ([T, T, F], (), [T, T, F]),
        ([T, T, T], (1,), [T, F, T]),
        ([T, T, F], (1,), [T, F, F]),
        ([F, T, F], (1,), [F, T, F]),
        ([T, T, T], (2, 0), [F, T, F]),
        ([T, T, T], (2, 0, 1), [F, F, T]),
        ([T, T, F], (2, 1, 0), [F, T, F]),
        ([F, F, F], (1,), [F, F, F]),
    ],
)
def test_losses_are_forgiven_from_the_earliest_until_one_is_open(
    is_open: list[bool], lost_on: tuple[int, ...], expected: list[bool]
) -> None:
    assert allowed(is_open, lost_on) == expected


@given(
    is_open=st.lists(st.booleans(), min_size=1, max_size=5),
    losses=st.lists(st.integers(0, 4), max_size=8),
)
def test_an_open_instance_is_allowed_and_the_last_loss_is_not_while_another_is_open(
    is_open: list[bool], losses: list[int]
) -> None:
    given_open = list(is_open)
    lost_on: tuple[int, ...] = ()
    for instance in losses:
        lost_on = with_loss(lost_on, instance % len(is_open))
    left = allowed(is_open, lost_on)
    assert is_open == given_open
    assert any(left) == any(is_open)
    assert all(is_open[one] for one, may_go in enumerate(left) if may_go)
    if lost_on and any(is_open[one] for one in range(len(is_open)) if one != lost_on[-1]):
        assert not left[lost_on[-1]]


def test_a_second_loss_on_the_same_instance_is_its_latest() -> None:
    assert with_loss((2, 0, 1), 0) == (2, 1, 0)
    assert with_loss((), 3) == (3,)

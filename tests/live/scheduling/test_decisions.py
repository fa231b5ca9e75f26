"""When decisions and sweeps come, and what the scheduler is told of its instances."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
from tests.core.driver import Driver

from balanceroute.proxy.core.events import (
    Admit,
    DecodeStarted,
    Eligible,
    Event,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    RankClosed,
    RankId,
    RankOpened,
    RequestArrived,
    RequestId,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import LifecycleState, Request
from balanceroute.proxy.core.scheduler import Intake
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.scheduling.decisions import (
    SWEEP_S,
    Decisions,
    DriverSettings,
    OpenInstances,
    Stranded,
    SweepTimer,
    TickTimer,
)

if TYPE_CHECKING:
    from balanceroute.proxy.core.scheduler import Scheduler


# The timer of decisions: one at a time, as soon as anybody wants it.


class TickHandle:
    """One call for a decision."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class TickLoop:
    """Notes the delays that it is asked for; a call at once has none."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, TickHandle]] = []

    def call_soon(self, _: Callable[[], None]) -> TickHandle:
        return self.call_later(0.0, _)

    def call_later(self, delay_s: float, _: Callable[[], None]) -> TickHandle:
        self.calls.append((delay_s, TickHandle()))
        return self.calls[-1][1]


@pytest.mark.parametrize(
    ("wanted", "called", "kept"),
    [
        ([0.0, 0.0], [0.0], [0.0]),
        ([0.002, 0.002], [0.002], [0.002]),
        ([0.0, 0.002], [0.0], [0.0]),
        ([0.002, 0.0], [0.002, 0.0], [0.0]),
    ],
)
def test_the_earliest_of_the_wanted_decisions_comes(
    wanted: list[float], called: list[float], kept: list[float]
) -> None:
    loop = TickLoop()
    timer = TickTimer(cast("asyncio.AbstractEventLoop", loop), lambda: None)
    for delay_s in wanted:
        timer.wake(delay_s)
    assert [delay_s for delay_s, _ in loop.calls] == called
    assert [delay_s for delay_s, handle in loop.calls if not handle.cancelled] == kept


def test_after_a_decision_another_one_may_be_called_for() -> None:
    loop = TickLoop()
    timer = TickTimer(cast("asyncio.AbstractEventLoop", loop), lambda: None)
    timer.wake(0.0)
    timer.cancel()
    timer.cancel()
    timer.wake(0.0)
    assert [handle.cancelled for _, handle in loop.calls] == [True, False]


@pytest.mark.parametrize("cold", [False, True])
def test_each_first_token_of_a_rank_that_warms_up_brings_a_decision(*, cold: bool) -> None:
    driver = Driver("br-0", ranks=2, batch_limit=3)
    driver(RankClosed(RankId(1)))
    for number in map(RequestId, range(9)):
        driver(RequestArrived(number, Ticket(10)), PrefillDone(number, 10))
    first, *later = driver(Tick())
    driver(DecodeStarted(first.request))
    # The window of one that is on trial, and not cold, ends with its first token.
    driver(RankOpened(RankId(1), on_trial=True, cold=cold))
    scheduler, decisions = driver.scheduler, MagicMock()
    got: list[int] = []
    decisions._scheduler, decisions._clock, decisions._settle_s = scheduler, lambda: 1.0, 0.002
    decisions._warms_up = partial(Decisions._warms_up, decisions)
    for action in later:
        Decisions._handle(decisions, DecodeStarted(action.request))
    decisions._ticks.wake.assert_not_called()  # That rank gets no more by it.
    while actions := driver(Tick()):
        got.append(len(actions))
        for action in actions:
            assert isinstance(action, Admit)
            assert action.rank == 1
            warms = scheduler.ranks.warm_up.active
            decisions._ticks.wake.reset_mock()
            Decisions._handle(decisions, DecodeStarted(action.request))
            assert decisions._ticks.wake.call_count == warms
    assert got == [1, 2]
    assert scheduler.pool.slots == 3
    assert not scheduler.ranks.warm_up.active


# The timer of sweeps: between two steps of the engines, if there is such a moment soon.


_STEP_S = 0.0041


class Handle:
    """One call."""

    def __init__(self, call: Callable[..., None], *arguments: Any) -> None:
        self._call: Callable[[], None] | None = lambda: call(*arguments)

    def cancel(self) -> None:
        self._call = None

    def run(self) -> None:
        if self._call is not None:
            self._call()


class Loop:
    """Looks at its timers, then at its calls, then at its sockets, in each turn: as uvloop does."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self._soon: list[Handle] = []
        self._timers: list[tuple[float, Handle]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> Handle:
        self._soon.append(Handle(call, *arguments))
        return self._soon[-1]

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> Handle:
        self._timers.append((self.now_s + delay_s, Handle(call, *arguments)))
        return self._timers[-1][1]

    def turn(self, sockets_s: float = 0.0) -> None:
        """Run what is due; the sockets take so long."""
        due = [handle for at_s, handle in self._timers if at_s <= self.now_s]
        self._timers = [one for one in self._timers if one[0] > self.now_s]
        for handle in due:
            handle.run()
        soon, self._soon = self._soon, []
        for handle in soon:
            handle.run()
        self.now_s += sockets_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.mark.parametrize(
    ("turns", "swept_after"),
    [
        ([0.0, 0.0, 0.0, 0.0], 2),  # One look at the sockets comes first in any case.
        ([_STEP_S, 0.0, 0.0, 0.0], 3),
        ([_STEP_S, _STEP_S, 0.0, 0.0], 4),
        ([_STEP_S] * 10, 6),  # There is always something to do: 20 ms later.
    ],
)
def test_a_sweep_waits_for_a_turn_with_nothing_to_do(
    loop: Loop, turns: list[float], swept_after: int
) -> None:
    swept: list[tuple[float, float]] = []
    timer = SweepTimer([1], lambda now_s, late_s: swept.append((now_s, late_s)))
    timer.begin()
    loop.turn(SWEEP_S + 0.001)
    taken = 0
    while not swept:
        assert timer.runs
        loop.turn(turns[taken])
        taken += 1
    assert taken == swept_after
    (now_s, late_s) = swept[0]
    assert now_s == pytest.approx(10.0 + SWEEP_S + 0.001 + sum(turns[: taken - 1]))
    # The loop was late by so much. What the sweep itself waited for is no lag.
    assert late_s == pytest.approx(0.001)


def test_sweeps_go_on_while_there_are_requests(loop: Loop) -> None:
    sessions, swept = [1], []
    timer = SweepTimer(sessions, lambda now_s, _: swept.append(now_s))
    timer.begin()
    for _ in range(100):
        loop.turn(SWEEP_S / 10)
    assert [later - earlier for earlier, later in pairwise(swept)] == [
        pytest.approx(SWEEP_S, abs=SWEEP_S / 5)
    ] * (len(swept) - 1)
    assert len(swept) >= 7
    sessions.clear()
    for _ in range(20):
        loop.turn(SWEEP_S / 10)
    ended = len(swept)
    assert not timer.runs
    for _ in range(20):
        loop.turn(SWEEP_S / 10)
    assert len(swept) == ended


def test_a_sweep_that_waits_can_be_called_off(loop: Loop) -> None:
    swept: list[float] = []
    timer = SweepTimer([1], lambda now_s, _: swept.append(now_s))
    timer.begin()
    loop.turn(SWEEP_S)
    loop.turn(_STEP_S)
    timer.stop()
    assert not timer.runs
    for _ in range(5):
        loop.turn()
    assert not swept


# Requests that wait for engines that are not there: who is refused, when, and in which order.


OTHERS = Eligible(frozenset(), frozenset())


SETTINGS = DriverSettings(
    expects_output=False,
    uses_blocks=False,
    progress_veto=True,
    warm_up=True,
    stranded_s=10.0,
    group_return_s=3.0,
)


class Site:
    """A scheduler's requests, and engines that may be missing."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.missing: set[Eligible | None] = set()
        self.intake = Intake()
        self.why_none = "no engine of each role is up"
        self.groups = SimpleNamespace(ended=lambda eligible: eligible in self.ended)
        self.ended: set[Eligible | None] = set()  # Whose data-parallel groups have ended.
        self.stranded = Stranded(cast("Scheduler", self), cast("Instances", self), SETTINGS)

    def missing_for(self, eligible: Eligible | None) -> set[Role]:
        return {Role.DECODE} if eligible in self.missing else set()

    def add(self, number: int, state: LifecycleState, eligible: Eligible | None = None) -> None:
        request = Request(RequestId(number), Ticket(5, eligible=eligible), 0)
        request.state = state
        self.requests[request.request] = request

    def due(self, now_s: float) -> list[int]:
        return [number for number, _ in self.stranded.due(now_s)]


@pytest.mark.parametrize("ended", [False, True])
def test_requests_wait_for_a_while_and_no_longer(ended: bool) -> None:
    """Those of a data-parallel group that has ended wait as long as its own setting says."""
    site = Site()
    site.add(1, LifecycleState.POOLED)
    site.missing.add(None)
    site.ended |= {None} if ended else set()
    wait_s, why = (3.0, "the decode group has ended") if ended else (10.0, site.why_none)
    assert site.due(100.0) == []
    assert site.due(100.0 + wait_s) == []
    assert list(site.stranded.due(100.1 + wait_s)) == [(1, why)]


def test_an_engine_that_comes_back_begins_the_wait_anew() -> None:
    site = Site()
    site.add(1, LifecycleState.QUEUED)
    site.missing.add(None)
    site.due(100.0)
    site.missing.clear()
    site.due(105.0)
    site.missing.add(None)
    assert site.due(111.0) == []
    assert site.due(121.1) == [1]


def test_a_time_in_which_nobody_looked_does_not_count() -> None:
    site = Site()
    site.add(1, LifecycleState.QUEUED)
    site.missing.add(None)
    site.due(100.0)
    site.stranded.begin()
    assert site.due(200.0) == []


def test_only_what_waits_is_refused_and_the_queue_before_the_pool() -> None:
    site = Site()
    for number, state in enumerate(
        (
            LifecycleState.POOLED,
            LifecycleState.PREFILLING,
            LifecycleState.QUEUED,
            LifecycleState.DECODING,
        )
    ):
        site.add(number, state)
    site.missing.add(None)
    site.due(100.0)
    assert site.due(111.0) == [2, 0]


def test_requests_of_other_engines_go_on() -> None:
    site = Site()
    site.add(1, LifecycleState.POOLED)
    site.add(2, LifecycleState.POOLED, OTHERS)
    site.missing.add(OTHERS)
    site.due(100.0)
    assert site.due(111.0) == [2]


def test_each_is_named_when_the_one_before_is_gone() -> None:
    """A refusal may move another one: to prefill, where it does not wait any more."""
    site = Site()
    site.add(1, LifecycleState.QUEUED)
    site.add(2, LifecycleState.POOLED)
    site.missing.add(None)
    site.due(100.0)
    due = site.stranded.due(111.0)
    assert next(due) == (1, "no engine of each role is up")
    site.requests[RequestId(2)].state = LifecycleState.DECODING
    assert list(due) == []


# Which instances the scheduler is told to use, and when.


P, R = PrefillerId(0), RankId(0)


def add_rank(instances: Instances) -> Rank:
    number = RankId(len(instances.ranks))
    rank = Rank(number, f"d{number}", Target(Role.DECODE, f"http://d{number}"), MagicMock())
    instances.ranks.append(rank)
    return rank


def site() -> tuple[Instances, list[Event], OpenInstances]:
    instances, fed = Instances(), list[Event]()
    target = Target(Role.PREFILL, "http://p0")
    instances.prefillers.append(Prefiller(P, "p0", target, MagicMock()))
    add_rank(instances)
    return instances, fed, OpenInstances(instances, fed.append)


def test_only_changes_are_told() -> None:
    instances, fed, open_instances = site()
    open_instances.update()
    assert fed == []
    instances.prefillers[0].crowded = True
    instances.ranks[0].status = Status.QUARANTINED
    for _ in range(2):
        open_instances.update()
    assert fed == [PrefillerClosed(P), RankClosed(R)]
    fed.clear()
    instances.prefillers[0].crowded = False
    instances.prefillers[0].kv_trial = True
    instances.ranks[0].status = Status.UP
    open_instances.update()
    # The prefiller was only crowded; the rank was away.
    assert fed == [PrefillerOpened(P, True), RankOpened(R, cold=True)]
    fed.clear()
    instances.prefillers[0].kv_trial = False
    open_instances.update()
    assert fed == [PrefillerOpened(P, False)]


def test_an_instance_that_is_added_is_taken_for_open() -> None:
    instances, fed, open_instances = site()
    add_rank(instances)
    add_rank(instances).status = Status.DRAINING
    open_instances.update()
    assert fed == [RankClosed(RankId(2))]


AWAY: dict[str, dict[str, object]] = {
    "drained": {"status": Status.DRAINING},
    "quarantined": {"status": Status.QUARANTINED},
    "asleep": {"asleep": True},
    "not probed yet": {"probed": False},
    "not asked yet": {"asked": False},
    "unfit": {"unfit": "another version"},
}
OUT: dict[str, dict[str, object]] = {
    "removed": {"status": Status.REMOVED},
    "still": {"still": True},
    "of a group that died": {"still": True, "doomed": True},
}


@pytest.mark.parametrize("why", [*AWAY, *OUT])
def test_a_rank_that_gets_nothing_is_at_the_barrier_while_it_steps_with_the_others(
    why: str,
) -> None:
    instances, _, open_instances = site()
    add_rank(instances)
    open_instances.update()
    left, other = instances.ranks
    nothing, busy = np.array([0, 0]), np.array([3, 0])
    assert open_instances.at_barrier(nothing) == [left.id, other.id]
    for name, value in (AWAY | OUT)[why].items():
        setattr(left, name, value)
    open_instances.update([left])
    assert open_instances.at_barrier(nothing) == [other.id]
    assert sorted(open_instances.at_barrier(busy)) == [left.id, other.id][why in OUT :]


def test_a_rank_that_stood_still_opens_on_trial() -> None:
    instances, fed, open_instances = site()
    rank = instances.ranks[0]
    rank.still = True
    open_instances.update([rank])
    rank.still, rank.on_trial = False, True
    open_instances.update([rank])
    assert fed == [RankClosed(R), RankOpened(R, on_trial=True, cold=True)]


def test_a_prefiller_that_was_away_opens_cold() -> None:
    instances, fed, open_instances = site()
    prefiller = instances.prefillers[0]
    prefiller.asleep = True
    open_instances.update([prefiller])
    prefiller.asleep, prefiller.crowded = False, True
    open_instances.update([prefiller])
    prefiller.crowded = False
    open_instances.update([prefiller])
    assert fed == [PrefillerClosed(P), PrefillerOpened(P, cold=True)]


def test_without_warm_up_nothing_opens_cold() -> None:
    instances, fed, _ = site()
    open_instances = OpenInstances(instances, fed.append, warm_up=False)
    rank = instances.ranks[0]
    for rank.status in (Status.QUARANTINED, Status.UP):
        open_instances.update([rank])
    assert fed == [RankClosed(R), RankOpened(R)]

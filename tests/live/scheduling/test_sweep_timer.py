"""The timer of sweeps: between two steps of the engines, if there is such a moment soon."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from balanceroute.proxy.live.scheduling.decisions import SWEEP_S, SweepTimer

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

"""The timer of decisions: one at a time, as soon as anybody wants it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from balanceroute.proxy.live.scheduling.decisions import TickTimer

if TYPE_CHECKING:
    import asyncio


class Handle:
    """One call for a decision."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Notes the delays that it is asked for; a call at once has none."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Handle]] = []

    def call_soon(self, _: Callable[[], None]) -> Handle:
        return self.call_later(0.0, _)

    def call_later(self, delay_s: float, _: Callable[[], None]) -> Handle:
        self.calls.append((delay_s, Handle()))
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
    loop = Loop()
    timer = TickTimer(cast("asyncio.AbstractEventLoop", loop), lambda: None)
    for delay_s in wanted:
        timer.wake(delay_s)
    assert [delay_s for delay_s, _ in loop.calls] == called
    assert [delay_s for delay_s, handle in loop.calls if not handle.cancelled] == kept


def test_after_a_decision_another_one_may_be_called_for() -> None:
    loop = Loop()
    timer = TickTimer(cast("asyncio.AbstractEventLoop", loop), lambda: None)
    timer.wake(0.0)
    timer.cancel()
    timer.cancel()
    timer.wake(0.0)
    assert [handle.cancelled for _, handle in loop.calls] == [True, False]

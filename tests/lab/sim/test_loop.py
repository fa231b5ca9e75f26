"""Virtual time: what runs when, and when an instant is settled."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.lab.sim.engines import EventLoop


class Script:
    """Callbacks that log their name, and a settle that logs `settle`, both with the time."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.log: list[tuple[int, str]] = []

    def say(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append((self.loop.now_ns, name))

    def settle(self) -> None:
        self.log.append((self.loop.now_ns, "settle"))


def test_callbacks_run_in_order_of_time_then_of_scheduling() -> None:
    script = Script()
    for time_ns, name in ((7, "c"), (3, "a"), (7, "d"), (3, "b"), (0, "first")):
        script.loop.call_at(time_ns, script.say(name))
    script.loop.run(lambda: None)
    assert script.log == [(0, "first"), (3, "a"), (3, "b"), (7, "c"), (7, "d")]


@given(times=st.lists(st.integers(0, 5), max_size=30))
def test_the_order_is_a_stable_sort_by_time(times: list[int]) -> None:
    script = Script()
    for number, time_ns in enumerate(times):
        script.loop.call_at(time_ns, script.say(str(number)))
    script.loop.run(lambda: None)
    assert script.log == sorted(
        ((time_ns, str(number)) for number, time_ns in enumerate(times)), key=lambda item: item[0]
    )


def test_an_instant_is_settled_once_everything_due_has_run() -> None:
    script = Script()

    def spawn() -> None:
        script.say("spawn")()
        script.loop.call_at(5, script.say("spawned"))

    script.loop.call_at(5, spawn)
    script.loop.call_at(5, script.say("sibling"))
    script.loop.call_at(6, script.say("later"))
    script.loop.run(script.settle)
    assert script.log == [
        (5, "spawn"),
        (5, "sibling"),
        (5, "spawned"),
        (5, "settle"),
        (6, "later"),
        (6, "settle"),
    ]


def test_an_instant_is_settled_again_while_settling_schedules_more_for_it() -> None:
    script = Script()
    left = 2

    def settle() -> None:
        nonlocal left
        script.settle()
        if left:
            left -= 1
            script.loop.call_at(script.loop.now_ns, script.say("again"))

    script.loop.call_at(4, script.say("begin"))
    script.loop.call_at(9, script.say("end"))
    script.loop.run(settle)
    assert script.log == [
        (4, "begin"),
        (4, "settle"),
        (4, "again"),
        (4, "settle"),
        (4, "again"),
        (4, "settle"),
        (9, "end"),
        (9, "settle"),
    ]


def test_due_tells_whether_this_instant_has_more_to_run() -> None:
    loop = EventLoop()
    seen: list[bool] = []
    assert not loop.due()
    loop.call_at(2, lambda: seen.append(loop.due()))
    loop.call_at(2, lambda: seen.append(loop.due()))
    loop.call_at(3, lambda: seen.append(loop.due()))
    loop.run(lambda: None)
    assert seen == [True, False, False]


def test_the_past_cannot_be_scheduled() -> None:
    loop = EventLoop()
    loop.call_at(10, lambda: loop.call_at(9, lambda: None))
    with pytest.raises(AssertionError, match="9 ns is before 10 ns"):
        loop.run(lambda: None)


def test_a_loop_without_callbacks_never_settles() -> None:
    script = Script()
    script.loop.run(script.settle)
    assert not script.log
    assert script.loop.now_ns == 0

"""Timers agree with a look at every time, whatever was set, cleared or set again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.waiting import Timers

A, B, C = (RequestId(number) for number in range(3))


def timers_of(**times: int) -> Timers:
    timers = Timers()
    for name, time_ns in times.items():
        timers.set({"a": A, "b": B, "c": C}[name], time_ns)
    return timers


def test_the_earliest_are_due_first_and_on_a_tie_the_lowest() -> None:
    timers = timers_of(c=10, a=20, b=10)
    assert timers.first_ns() == 10
    assert timers.take_due(9) == []
    assert timers.take_due(20) == [B, C, A]
    assert timers.first_ns() is None


def test_who_was_taken_is_not_due_again() -> None:
    timers = timers_of(a=10)
    assert timers.take_due(10) == [A]
    assert timers.take_due(10) == []


def test_who_was_only_asked_for_stays_due() -> None:
    timers = timers_of(a=20, b=10, c=30)
    assert timers.due(20) == [B, A]
    assert timers.due(20) == [B, A]
    assert timers.first_ns() == 10
    assert timers.take_due(30) == [B, A, C]


@pytest.mark.parametrize("time_ns", [5, 50])
def test_a_new_time_replaces_the_old_one(time_ns: int) -> None:
    timers = timers_of(a=10)
    timers.set(A, time_ns)
    assert timers.first_ns() == time_ns
    assert timers.take_due(49) == ([A] if time_ns == 5 else [])
    assert timers.take_due(50) == ([] if time_ns == 5 else [A])


def test_never_replaces_a_time() -> None:
    timers = timers_of(a=10)
    timers.set(A, None)
    assert timers.first_ns() is None
    assert timers.take_due(10) == []


def test_a_time_that_is_forgotten_and_set_again_is_due_once() -> None:
    timers = timers_of(a=10)
    timers.clear(A)
    timers.clear(A)
    timers.set(A, 10)
    assert timers.due(10) == [A]
    assert timers.take_due(10) == [A]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "set", "clear", "take", "due", "first"]),
            st.integers(0, 5),
            st.integers(0, 30),
        ),
        max_size=80,
    )
)
def test_they_agree_with_a_look_at_every_time(operations: list[tuple[str, int, int]]) -> None:
    timers = Timers()
    times: dict[RequestId, int] = {}
    for name, number, time_ns in operations:
        request = RequestId(number)
        due = sorted((due_ns, one) for one, due_ns in times.items() if due_ns <= time_ns)
        match name:
            case "set":
                timers.set(request, time_ns)
                times[request] = time_ns
            case "clear":
                timers.clear(request)
                times.pop(request, None)
            case "take":
                assert timers.take_due(time_ns) == [one for _, one in due]
                for _, one in due:
                    del times[one]
            case "due":
                assert timers.due(time_ns) == [one for _, one in due]
            case _:
                assert timers.first_ns() == min(times.values(), default=None)


def test_forgotten_times_take_no_room() -> None:
    timers = timers_of(a=1)
    for number in range(10_000):
        timers.set(B, 1_000 + number)
    timers.clear(B)
    assert len(timers._heap) < 100
    assert timers.take_due(10**9) == [A]

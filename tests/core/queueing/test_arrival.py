"""First come, first probed; and whoever came back goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.queue_order import FirstCome

A, B, C, D = (RequestId(number) for number in range(4))


def drain(queue: FirstCome) -> list[RequestId]:
    order: list[RequestId] = []
    while (request := queue.first()) is not None:
        order.append(request)
        queue.remove(request)
    return order


def test_the_order_is_that_of_arrival() -> None:
    queue = FirstCome()
    for request in (A, B, C):
        queue.add(request, 10, returned=False)
    assert (len(queue), queue.first()) == (3, A)
    queue.remove(B)
    assert B not in queue
    assert drain(queue) == [A, C]
    assert len(queue) == 0


def test_those_that_came_back_go_first_in_the_order_they_came_back() -> None:
    queue = FirstCome()
    for request, returned in ((B, False), (D, True), (C, False), (A, True)):
        queue.add(request, 10, returned=returned)
    assert drain(queue) == [D, A, B, C]


def test_being_asked_who_is_first_takes_no_one_out() -> None:
    queue = FirstCome()
    assert queue.first() is None
    queue.add(A, 10, returned=True)
    assert (queue.first(), queue.first(), len(queue)) == (A, A, 1)
    assert A in queue


@pytest.mark.parametrize("returned", [False, True])
def test_a_second_place_asserts(returned: bool) -> None:
    queue = FirstCome()
    queue.add(A, 10, returned=not returned)
    with pytest.raises(AssertionError, match="request 0 is queued twice"):
        queue.add(A, 10, returned=returned)
    assert len(queue) == 1


def test_taking_out_who_does_not_wait_fails() -> None:
    queue = FirstCome()
    queue.add(A, 10, returned=False)
    with pytest.raises(KeyError):
        queue.remove(B)
    assert len(queue) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "return", "remove"]), st.integers(0, 9)), max_size=60
    )
)
def test_it_agrees_with_two_lists(operations: list[tuple[str, int]]) -> None:
    queue = FirstCome()
    arrived: list[RequestId] = []
    returned: list[RequestId] = []
    for name, number in operations:
        request = RequestId(number)
        line = next((one for one in (arrived, returned) if request in one), None)
        if line is not None and name == "remove":
            line.remove(request)
            queue.remove(request)
        elif line is None and name != "remove":
            (returned if name == "return" else arrived).append(request)
            queue.add(request, 1, returned=name == "return")
        order = returned + arrived
        assert queue.first() == (order[0] if order else None)
        assert len(queue) == len(order)
        assert all((RequestId(one) in queue) == (one in order) for one in range(10))
    assert drain(queue) == returned + arrived

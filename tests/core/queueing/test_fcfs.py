"""First come, first served; a request that returns takes its old place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import QUEUE_ORDERS, Fcfs, QueueOrder

A, B, C, D = (RequestId(number) for number in range(4))
TICKET = Ticket(10)


def queue_of(*requests: RequestId) -> QueueOrder:
    queue = QUEUE_ORDERS["fcfs"]()
    for request in requests:
        queue.add(request, TICKET)
    return queue


def drain(queue: QueueOrder) -> list[RequestId]:
    order: list[RequestId] = []
    while first := queue.first(1):
        order.append(first[0])
        queue.remove(first[0])
    return order


def test_the_order_is_that_of_arrival() -> None:
    queue = queue_of(A, B, C)
    assert (len(queue), list(queue.first(2))) == (3, [A, B])
    queue.remove(B)
    assert B not in queue
    assert drain(queue) == [A, C]
    assert len(queue) == 0


def test_those_that_come_back_take_their_old_places() -> None:
    assert drain(queue_of(C, D, B, A)) == [A, B, C, D]


def test_being_asked_takes_no_one_out() -> None:
    queue = queue_of()
    assert list(queue.first(3)) == []
    queue = queue_of(A, B)
    assert (list(queue.first(3)), list(queue.ahead_of(B))) == ([A, B], [A])
    assert len(queue) == 2
    assert A in queue


def test_a_second_place_asserts() -> None:
    queue = queue_of(A, B)
    with pytest.raises(AssertionError, match="request 0 is queued twice"):
        queue.add(A, TICKET)
    assert len(queue) == 2


def test_taking_out_who_does_not_wait_asserts() -> None:
    queue = queue_of(A)
    with pytest.raises(AssertionError, match="request 1 does not wait here"):
        queue.remove(B)
    with pytest.raises(AssertionError, match="request 1 does not wait here"):
        queue.ahead_of(B)
    assert len(queue) == 1


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 9)), max_size=60),
    st.integers(0, 9),
)
def test_it_agrees_with_a_sorted_list(operations: list[tuple[str, int]], asked: int) -> None:
    queue = Fcfs()
    there: set[RequestId] = set()
    for name, number in operations:
        request = RequestId(number)
        if name == "remove" and request in there:
            there.remove(request)
            queue.remove(request)
        elif name == "add" and request not in there:
            there.add(request)
            queue.add(request, TICKET)
        order = sorted(there)
        assert list(queue.first(asked)) == order[:asked]
        assert len(queue) == len(order)
        assert all((RequestId(one) in queue) == (one in order) for one in range(10))
        if asked in there:
            assert list(queue.ahead_of(RequestId(asked))) == [one for one in order if one < asked]
    assert drain(queue) == sorted(there)

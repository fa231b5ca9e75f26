"""Deadlines, levels, both, and work: who goes first; and that the order is a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import QUEUE_ORDERS, QueueOrder

BY_TICKET = sorted(QUEUE_ORDERS.keys() - {"fcfs"})
# By id: a usual one, an urgent one due late, an urgent one due soon, a usual one due at once, a
# background one, and a usual one again.
TICKETS = [
    Ticket(50, predicted_tokens=50),
    Ticket(10, level=-2, deadline_ns=900, predicted_tokens=20, slots=3),
    Ticket(40, level=-1, deadline_ns=300),
    Ticket(90, deadline_ns=100, predicted_tokens=11),
    Ticket(20, level=5, predicted_tokens=10),
    Ticket(50, predicted_tokens=50),
]


def order_of(name: str, tickets: list[Ticket]) -> QueueOrder:
    order = QUEUE_ORDERS[name]()
    for number, ticket in enumerate(tickets):
        order.add(RequestId(number), ticket)
    return order


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fcfs", [0, 1, 2, 3, 4, 5]),
        ("edf", [3, 2, 1, 0, 4, 5]),
        ("abs", [1, 2, 0, 3, 5, 4]),
        ("ml", [2, 1, 0, 3, 4, 5]),
        ("srpt", [2, 4, 1, 3, 0, 5]),
    ],
)
def test_each_order_is_its_own(name: str, expected: list[int]) -> None:
    order = order_of(name, TICKETS)
    assert list(order.first(9)) == expected
    assert list(order.first(2)) == expected[:2]
    assert list(order.ahead_of(RequestId(4))) == expected[: expected.index(4)]
    assert sorted(range(6), key=lambda number: order.place(RequestId(number))) == expected


@pytest.mark.parametrize("name", BY_TICKET)
def test_a_second_place_asserts(name: str) -> None:
    order = order_of(name, TICKETS)
    with pytest.raises(AssertionError, match="request 3 is queued twice"):
        order.add(RequestId(3), TICKETS[0])
    assert len(order) == 6


@pytest.mark.parametrize("name", BY_TICKET)
def test_taking_out_who_does_not_wait_asserts(name: str) -> None:
    order = order_of(name, TICKETS)
    for method in (order.remove, order.ahead_of):
        with pytest.raises(AssertionError, match="request 6 does not wait here"):
            method(RequestId(6))
    assert len(order) == 6


@given(
    st.sampled_from(BY_TICKET),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
    st.lists(
        st.builds(
            Ticket,
            st.integers(1, 3),
            level=st.integers(-1, 1),
            deadline_ns=st.none() | st.integers(0, 2),
        ),
        min_size=10,
        max_size=10,
    ),
)
def test_it_agrees_with_a_sorted_list(
    name: str, operations: list[tuple[bool, int]], tickets: list[Ticket]
) -> None:
    order, there = QUEUE_ORDERS[name](), set[RequestId]()
    for is_removal, number in operations:
        request = RequestId(number)
        if is_removal and request in there:
            there.remove(request)
            order.remove(request)
        elif not is_removal and request not in there:
            there.add(request)
            order.add(request, tickets[number])
        expected = sorted(there, key=order.place)
        assert list(order.first(len(there))) == expected
        assert len(order) == len(expected)
        assert all((RequestId(one) in order) == (one in there) for one in range(10))
        for position, one in enumerate(expected):
            assert list(order.ahead_of(one)) == expected[:position]


def test_before_its_prediction_a_request_is_expected_to_answer_as_the_others() -> None:
    order = QUEUE_ORDERS["srpt"]()
    for number, prompt_tokens in enumerate((10, 20, 30, 40)):
        order.add(RequestId(number), Ticket(prompt_tokens, predicted_tokens=100))
    assert order.ahead(Ticket(25)) == 2

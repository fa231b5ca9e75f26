"""The pool behind fair queues, against a list in the order of the first coming."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import InTurn

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE = Ticket(1)


class Turns(RuleBasedStateMachine):
    """Requests come in any order of their ids, leave, and return."""

    def __init__(self) -> None:
        super().__init__()
        self.order = InTurn()
        self.came: list[RequestId] = []
        self.waiting: set[RequestId] = set()

    @property
    def expected(self) -> "Sequence[RequestId]":
        return [request for request in self.came if request in self.waiting]

    @rule(number=st.integers(0, 30))
    def come(self, number: int) -> None:
        request = RequestId(number)
        if request in self.waiting:
            with pytest.raises(AssertionError, match="queued twice"):
                self.order.add(request, ONE)
            return
        if request not in self.came:
            self.came.append(request)
        self.waiting.add(request)
        self.order.add(request, ONE)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), serves=st.booleans())
    def leave(self, data: st.DataObject, serves: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        (self.order.serve if serves else self.order.remove)(request)
        self.waiting.remove(request)

    @invariant()
    def it_is_the_list(self) -> None:
        expected = self.expected
        assert self.order.first(99) == expected
        assert self.order.first(2) == expected[:2]
        assert self.order.head() == (expected[0] if expected else None)
        assert len(self.order) == self.order.ahead(ONE) == len(expected)
        for place, request in enumerate(expected):
            assert request in self.order
            assert self.order.ahead_of(request) == expected[:place]
        assert sorted(expected, key=self.order.place) == expected
        assert RequestId(99) not in self.order


TestTurns = Turns.TestCase


def test_a_return_is_remembered_for_a_while_and_not_for_ever() -> None:
    order = InTurn()
    for number in range(20_000):
        order.add(RequestId(number), ONE)
        if number >= 3:
            order.remove(RequestId(number))
    assert order.first(9) == [0, 1, 2]
    assert len(order._turns) < 9_000
    order.add(RequestId(19_998), ONE)
    order.add(RequestId(19_997), ONE)
    order.add(RequestId(5), ONE)
    assert order.first(9) == [0, 1, 2, 19_997, 19_998, 5]


def test_what_does_not_wait_cannot_leave() -> None:
    with pytest.raises(AssertionError, match="request 3 does not wait here"):
        InTurn().remove(RequestId(3))
    with pytest.raises(AssertionError, match="request 3 does not wait here"):
        InTurn().ahead_of(RequestId(3))

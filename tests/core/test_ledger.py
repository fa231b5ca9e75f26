"""The ledger mirrors a naive count of every request's tokens, and notices when it does not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.ranks import BoundRequest, Ledger

RANKS = 3
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["bind", "start", "step", "emit", "unbind"]),
        st.integers(0, 7),
        st.integers(1, 100),
    ),
    max_size=80,
)


class Naive:
    """Touches every started request at every step."""

    def __init__(self) -> None:
        self.rank: dict[RequestId, RankId] = {}
        self.tokens: dict[RequestId, int] = {}
        self.slots: dict[RequestId, int] = {}
        self.running: set[RequestId] = set()

    def loads(self) -> list[int]:
        loads = [0] * RANKS
        for request, rank in self.rank.items():
            loads[rank] += self.tokens[request]
        return loads

    def bound(self) -> list[int]:
        return self._slots_on_ranks(list(self.rank))

    def started(self) -> list[int]:
        return self._slots_on_ranks(sorted(self.running))

    def _slots_on_ranks(self, requests: list[RequestId]) -> list[int]:
        slots = [0] * RANKS
        for request in requests:
            slots[self.rank[request]] += self.slots[request]
        return slots


@given(OPERATIONS)
def test_loads_and_counts_follow_a_request_by_request_count(
    operations: list[tuple[str, int, int]],
) -> None:
    ledger, naive = Ledger(RANKS), Naive()
    for name, number, amount in operations:
        request = RequestId(number)
        match name:
            case "bind" if request not in naive.rank:
                rank, slots = RankId(amount % RANKS), 1 + amount % 4
                ledger.bind(request, rank, amount, slots=slots)
                naive.rank[request], naive.tokens[request] = rank, amount
                naive.slots[request] = slots
            case "start" if request in naive.rank and request not in naive.running:
                ledger.start(request)
                naive.running.add(request)
            case "step":
                ledger.step()
                for started in naive.running:
                    naive.tokens[started] += naive.slots[started]
            case "emit" if request in naive.rank:
                change = amount - min(50, naive.tokens[request])
                ledger.emit(request, change)
                naive.tokens[request] += change
            case "unbind" if request in naive.rank:
                assert ledger.unbind(request) == naive.tokens.pop(request)
                del naive.rank[request]
                naive.running.discard(request)
        ledger.check()
        assert ledger.loads.tolist() == naive.loads()
        assert ledger.bound.tolist() == naive.bound()
        assert ledger.started.tolist() == naive.started()
        assert {request: ledger.kv_tokens(request) for request in naive.rank} == naive.tokens


def one_bound(*, started: bool) -> Ledger:
    ledger = Ledger(RANKS)
    ledger.bind(RequestId(5), RankId(1), 100)
    if started:
        ledger.start(RequestId(5))
    return ledger


def test_only_a_started_request_grows_with_the_steps() -> None:
    ledger = one_bound(started=False)
    ledger.step()
    assert ledger.loads.tolist() == ledger.arriving.tolist() == [0, 100, 0]
    ledger.start(RequestId(5))
    assert ledger.loads.tolist() == [0, 100, 0]
    assert ledger.arriving.tolist() == [0, 0, 0]
    ledger.step()
    ledger.step()
    assert ledger.loads.tolist() == [0, 102, 0]
    assert ledger.kv_tokens(RequestId(5)) == 102


def test_emitted_tokens_add_to_those_of_the_steps() -> None:
    ledger = one_bound(started=True)
    ledger.step()
    ledger.emit(RequestId(5), 7)
    ledger.step()
    assert ledger.unbind(RequestId(5)) == 109
    assert ledger.loads.tolist() == [0, 0, 0]


def test_tokens_that_the_steps_gave_in_vain_are_taken_back() -> None:
    ledger = one_bound(started=True)
    ledger.step()
    ledger.step()
    ledger.emit(RequestId(5), -2)
    assert ledger.loads.tolist() == [0, 100, 0]
    ledger.step()
    assert ledger.unbind(RequestId(5)) == 101
    ledger.check()


def test_what_leaves_before_it_started_arrives_no_more() -> None:
    ledger = one_bound(started=False)
    ledger.emit(RequestId(5), -3)
    assert ledger.arriving.tolist() == [0, 97, 0]
    ledger.unbind(RequestId(5))
    assert ledger.arriving.tolist() == [0, 0, 0]
    ledger.check()


def test_a_request_counts_once_per_slot() -> None:
    ledger = Ledger(RANKS)
    ledger.bind(RequestId(5), RankId(1), 300, slots=3)
    assert (ledger.bound.tolist(), ledger.started.tolist()) == ([0, 3, 0], [0, 0, 0])
    ledger.start(RequestId(5))
    ledger.step()
    ledger.step()
    assert ledger.started.tolist() == [0, 3, 0]
    assert ledger.kv_tokens(RequestId(5)) == 306
    assert ledger.unbind(RequestId(5)) == 306
    assert (ledger.bound.tolist(), ledger.started.tolist()) == ([0] * 3, [0] * 3)


def test_the_bound_requests_are_listed_with_their_ages_in_order_of_binding() -> None:
    ledger = Ledger(RANKS)
    ledger.bind(RequestId(5), RankId(1), 300, slots=3)
    ledger.bind(RequestId(4), RankId(0), 70, age=20)
    ledger.start(RequestId(5))
    ledger.step()
    ledger.step()
    ledger.emit(RequestId(4), 5)
    assert ledger.requests() == [
        BoundRequest(RequestId(5), RankId(1), 306, slots=3, age=2, started=True),
        BoundRequest(RequestId(4), RankId(0), 75, slots=1, age=25, started=False),
    ]
    ledger.unbind(RequestId(5))
    assert [bound.request for bound in ledger.requests()] == [4]


def test_a_request_may_be_bound_again_after_it_left() -> None:
    ledger = one_bound(started=True)
    ledger.unbind(RequestId(5))
    ledger.bind(RequestId(5), RankId(2), 30)
    ledger.step()
    assert ledger.loads.tolist() == [0, 0, 30]
    ledger.check()


def test_a_second_bind_asserts() -> None:
    ledger = one_bound(started=False)
    with pytest.raises(AssertionError, match="request 5 is bound twice"):
        ledger.bind(RequestId(5), RankId(0), 1)
    ledger.check()


def test_a_second_start_asserts() -> None:
    ledger = one_bound(started=True)
    with pytest.raises(AssertionError, match="request 5 started twice"):
        ledger.start(RequestId(5))
    ledger.check()


def test_a_second_unbind_fails_and_releases_nothing() -> None:
    ledger = one_bound(started=True)
    ledger.bind(RequestId(6), RankId(1), 10)
    ledger.unbind(RequestId(5))
    with pytest.raises(KeyError):
        ledger.unbind(RequestId(5))
    assert ledger.loads.tolist() == [0, 10, 0]
    ledger.check()


@pytest.mark.parametrize("counter", ["loads", "bound", "started"])
def test_check_notices_a_tampered_counter(counter: str) -> None:
    ledger = one_bound(started=True)
    ledger.check()
    getattr(ledger, counter)[1] += 1
    with pytest.raises(AssertionError, match=counter):
        ledger.check()


def test_loads_of_very_long_contexts_do_not_overflow() -> None:
    ledger = Ledger(1)
    for number in range(4):
        ledger.bind(RequestId(number), RankId(0), 2**40)
    assert ledger.loads.dtype == np.int64
    assert ledger.loads.tolist() == [2**42]
    ledger.check()

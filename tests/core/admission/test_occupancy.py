"""How soon a queue empties is measured while it is not empty."""

from math import inf

import pytest

from balanceroute.proxy.core.admission.tenants import TenantOccupancy

S = 1_000_000_000


def test_who_never_saw_anybody_leave_promises_nothing() -> None:
    queue = TenantOccupancy()
    queue.enter(0)
    assert queue.wait_ns(1, 100 * S) == inf


@pytest.mark.parametrize("leaves", [3, 30, 300])
def test_a_steady_rate_is_found_at_once(leaves: int) -> None:
    queue = TenantOccupancy()
    for _ in range(leaves + 10):
        queue.enter(7 * S)
    for i in range(leaves):
        queue.leave(7 * S + (i + 1) * 2 * S)
    # Two seconds each.
    now_ns = 7 * S + leaves * 2 * S
    assert queue.wait_ns(1, now_ns) == pytest.approx(2 * S, rel=0.05)
    assert queue.wait_ns(10, now_ns) == pytest.approx(20 * S, rel=0.05)
    assert queue.count == 10


def test_time_in_which_nobody_waits_does_not_count() -> None:
    queue = TenantOccupancy()
    for i in range(20):
        begin_ns = i * 1000 * S
        queue.enter(begin_ns)
        queue.leave(begin_ns + S)
    queue.enter(30_000 * S)
    assert queue.wait_ns(1, 30_000 * S) == pytest.approx(S, rel=0.05)


def test_a_queue_that_stands_still_promises_less_and_less() -> None:
    queue = TenantOccupancy()
    for _ in range(30):
        queue.enter(0)
    for i in range(20):
        queue.leave(i * S)
    before = queue.wait_ns(1, 20 * S)
    assert queue.wait_ns(1, 80 * S) > 4 * before


def test_nobody_leaves_who_was_not_there() -> None:
    with pytest.raises(AssertionError, match="no request"):
        TenantOccupancy().leave(0)

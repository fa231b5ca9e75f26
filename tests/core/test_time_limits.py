"""How much of their leases pooled requests have used."""

import pytest

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.resources import lease_used
from balanceroute.proxy.core.waiting import Pool, PoolEntry


def entry(number: int, lease_ends_ns: int | None) -> PoolEntry:
    return PoolEntry(RequestId(number), Ticket(10), 10, 0, None, None, lease_ends_ns)


@pytest.mark.parametrize(("now_ns", "used"), [(0, 0.0), (40, 0.5), (80, 1.0), (90, 1.0)])
def test_the_lease_that_ends_first_counts(now_ns: int, used: float) -> None:
    pool, config = Pool(Fcfs()), SchedulerConfig(1, 1, lease_ns=100, lease_margin_ns=20)
    assert lease_used(pool, config, now_ns) == 0.0
    pool.add(entry(1, 95))
    pool.add(entry(2, 80))
    pool.add(entry(3, None))
    assert lease_used(pool, config, now_ns) == used


def test_a_margin_takes_half_of_a_lease_at_most() -> None:
    pool, config = Pool(Fcfs()), SchedulerConfig(1, 1, lease_ns=100, lease_margin_ns=90)
    pool.add(entry(1, 50))
    assert lease_used(pool, config, 25) == 0.5


def test_without_leases_nothing_is_used() -> None:
    assert lease_used(Pool(Fcfs()), SchedulerConfig(1, 1), 0) is None

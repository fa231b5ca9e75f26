"""The view of the ranks that a policy gets, where ranks differ."""

from dataclasses import replace

import numpy as np

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.ranks import Ledger, Ranks, repeated


def test_the_loads_at_mean_speed_are_as_the_times_of_the_ranks() -> None:
    ledger = Ledger(2)
    ledger.bind(RequestId(0), RankId(0), 300)
    ledger.bind(RequestId(1), RankId(1), 200)
    unequal = SchedulerConfig(2, 1, rank_speeds=(3.0, 1.0))
    assert Ranks(unequal).loads_at_mean_speed(ledger, unequal).tolist() == [200, 400]
    equal = SchedulerConfig(2, 1)
    assert Ranks(equal).loads_at_mean_speed(ledger, equal).tolist() == [300, 200]


def test_a_policy_sees_speeds_only_if_ranks_differ() -> None:
    ledger, ranks = Ledger(3), Ranks(SchedulerConfig(3, 1))
    assert ranks.fleet(ledger, SchedulerConfig(3, 1), 0).speeds is None
    speeds = ranks.fleet(ledger, SchedulerConfig(3, 1, rank_speeds=(1.0, 2.0, 3.0)), 0).speeds
    assert speeds is not None
    assert np.array_equal(speeds, [0.5, 1.0, 1.5])


def test_each_rank_has_the_slots_of_its_own_batch() -> None:
    ledger = Ledger(3)
    ledger.bind(RequestId(0), RankId(1), 10, slots=3)
    config = SchedulerConfig(3, 9, rank_batch_limits=(4, 2, 1))
    ranks = Ranks(config)
    assert ranks.free_slots(ledger, 0).tolist() == [4, 0, 1]
    assert ranks.free_slots(ledger, 2).tolist() == [6, 1, 3]


def test_speeds_repeat_over_the_ranks() -> None:
    assert repeated((1.0, 1.5), 5) == (1.0, 1.5, 1.0, 1.5, 1.0)
    assert repeated((1.0, 1.5), 1) == (1.0,)
    assert repeated((), 3) == ()


def test_speeds_are_learned_if_asked_and_not_told() -> None:
    """Half of the tokens take the second rank as long."""
    ledger, config = Ledger(2), SchedulerConfig(2, 1, learn_speeds=True)
    told = replace(config, rank_speeds=(1.0, 1.0))
    learning, knowing = Ranks(config), Ranks(told)
    for rank in range(2):
        ledger.bind(RequestId(rank), RankId(rank), 0)
    rng = np.random.default_rng(0)
    for _ in range(500):
        ledger.loads[:] = rng.integers(100, 200, 2)
        time_ns = round(1_000 + 10 * max(int(ledger.loads[0]), 2 * int(ledger.loads[1])))
        learning.step(time_ns, ledger)
        knowing.step(time_ns, ledger)
    speeds = learning.speeds(config)
    assert speeds is not None
    assert speeds[0] > 1.2 * speeds[1]
    equal = knowing.speeds(told)
    assert equal is not None
    assert equal.tolist() == [1.0, 1.0]
    learning.reconfigure(replace(config, batch_limit=9))
    assert learning.speeds(config) is speeds
    learning.reconfigure(replace(config, ranks=3))
    assert learning.speeds(config) is None

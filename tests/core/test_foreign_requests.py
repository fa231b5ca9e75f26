"""How a rank's slots are shared with others."""

from collections.abc import Iterator

import numpy as np
import pytest

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import ForeignLoad, RankId, RequestId
from balanceroute.proxy.core.ranks import Ledger, Ranks, own_limit

BATCH = 64


def shares(own: int, foreign: int, *, readings: int = 40) -> Iterator[tuple[int, int]]:
    """Yield what two saturated proxies have, a quarter of whose requests end between two readings."""
    for _ in range(readings):
        limits = own_limit(BATCH, foreign, own), own_limit(BATCH, own, foreign)
        own = max(own - own // 4, min(own, limits[0])) if limits[0] < own else limits[0]
        foreign = (
            max(foreign - foreign // 4, min(foreign, limits[1]))
            if limits[1] < foreign
            else limits[1]
        )
        yield own, foreign


@pytest.mark.parametrize(("own", "foreign"), [(64, 1), (63, 1), (40, 8), (10, 10), (1, 63)])
def test_two_end_with_half_each_and_never_have_more_than_the_batch(own: int, foreign: int) -> None:
    seen = list(shares(own, foreign))
    assert max(map(sum, seen)) <= BATCH + 1
    assert seen[-1] == (BATCH // 2, BATCH // 2)


def test_two_that_both_filled_a_rank_give_half_of_it_back() -> None:
    seen = list(shares(BATCH, BATCH))
    assert [sum(one) for one in seen] == sorted([sum(one) for one in seen], reverse=True)
    assert seen[-1] == (BATCH // 2, BATCH // 2)


@pytest.mark.parametrize("batch", range(1, 20))
def test_one_slot_is_always_its_own(batch: int) -> None:
    for foreign in range(1, 3 * batch):
        for own in range(3 * batch):
            assert 1 <= own_limit(batch, foreign, own) <= batch


def test_what_others_have_counts_until_it_is_gone() -> None:
    config = SchedulerConfig(2, 8, rank_kv_tokens=1_000)
    ledger, ranks = Ledger(2), Ranks(config)
    ledger.bind(RequestId(0), RankId(1), 100)
    before = ranks.fleet(ledger, config, 0)
    assert before.foreign_kv_tokens is None
    ranks.shared(ForeignLoad(RankId(1), 4, 300), ledger, config)
    fleet = ranks.fleet(ledger, config, 0)
    assert fleet.loads.tolist() == [0, 400]
    assert fleet.bound.tolist() == [0, 5]
    assert fleet.free_slots.tolist() == [8, 2]  # Half of the four that are free, and its own.
    assert fleet.free_kv_tokens.tolist() == [1_000, 600]
    assert ledger.loads.tolist() == [0, 100]
    ranks.reconfigure(SchedulerConfig(3, 8, rank_kv_tokens=1_000))
    ledger = Ledger(3)
    assert ranks.fleet(ledger, config, 0).free_slots.tolist() == [8, 3, 8]
    ranks.shared(ForeignLoad(RankId(1), 0, 0), ledger, config)
    assert ranks.foreign is None
    assert np.array_equal(ranks.fleet(ledger, config, 0).free_slots, [8, 8, 8])


def test_each_rank_is_shared_by_its_own_batch() -> None:
    config = SchedulerConfig(2, 9, rank_batch_limits=(9, 4))
    ledger, ranks = Ledger(2), Ranks(config)
    ranks.shared(ForeignLoad(RankId(1), 4, 0), ledger, config)
    assert ranks.free_slots(ledger, 0).tolist() == [9, 1]


def test_an_unknown_rank_is_refused() -> None:
    config = SchedulerConfig(2, 1)
    with pytest.raises(LifecycleError, match="rank 2 is unknown"):
        Ranks(config).shared(ForeignLoad(RankId(2), 1, 0), Ledger(2), config)


def test_who_leads_takes_what_is_free_and_no_more() -> None:
    config = SchedulerConfig(2, 9, rank_batch_limits=(9, 4), leads=True)
    ledger, ranks = Ledger(2), Ranks(config)
    ledger.bind(RequestId(0), RankId(0), 100)
    for foreign, free in ((2, [6, 2]), (4, [4, 0]), (9, [0, 0]), (20, [0, 0]), (0, [8, 4])):
        for rank in (0, 1):
            ranks.shared(ForeignLoad(RankId(rank), foreign, 0), ledger, config)
        assert ranks.free_slots(ledger, 0).tolist() == free

"""Which instances the scheduler is told to use, and when."""

from unittest.mock import MagicMock

from balanceroute.proxy.core.events import (
    Event,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    RankClosed,
    RankId,
    RankOpened,
)
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.scheduling.decisions import OpenInstances

P, R = PrefillerId(0), RankId(0)


def add_rank(instances: Instances) -> Rank:
    number = RankId(len(instances.ranks))
    rank = Rank(number, f"d{number}", Target(Role.DECODE, f"http://d{number}"), MagicMock())
    instances.ranks.append(rank)
    return rank


def site() -> tuple[Instances, list[Event], OpenInstances]:
    instances, fed = Instances(), list[Event]()
    target = Target(Role.PREFILL, "http://p0")
    instances.prefillers.append(Prefiller(P, "p0", target, MagicMock()))
    add_rank(instances)
    return instances, fed, OpenInstances(instances, fed.append)


def test_only_changes_are_told() -> None:
    instances, fed, open_instances = site()
    open_instances.update()
    assert fed == []
    instances.prefillers[0].crowded = True
    instances.ranks[0].status = Status.QUARANTINED
    for _ in range(2):
        open_instances.update()
    assert fed == [PrefillerClosed(P), RankClosed(R)]
    fed.clear()
    instances.prefillers[0].crowded = False
    instances.prefillers[0].kv_trial = True
    instances.ranks[0].status = Status.UP
    open_instances.update()
    # The prefiller was only crowded; the rank was away.
    assert fed == [PrefillerOpened(P, True), RankOpened(R, cold=True)]
    fed.clear()
    instances.prefillers[0].kv_trial = False
    open_instances.update()
    assert fed == [PrefillerOpened(P, False)]


def test_an_instance_that_is_added_is_taken_for_open() -> None:
    instances, fed, open_instances = site()
    add_rank(instances)
    add_rank(instances).status = Status.DRAINING
    open_instances.update()
    assert fed == [RankClosed(RankId(2))]


def test_a_removed_rank_serves_no_more() -> None:
    instances, _, open_instances = site()
    add_rank(instances)
    instances.ranks[0].status = Status.REMOVED
    assert open_instances.serving == [R]
    open_instances.update()
    assert open_instances.serving == [RankId(1)]


def test_a_rank_that_stood_still_opens_on_trial() -> None:
    instances, fed, open_instances = site()
    rank = instances.ranks[0]
    rank.still = True
    open_instances.update([rank])
    rank.still, rank.on_trial = False, True
    open_instances.update([rank])
    assert fed == [RankClosed(R), RankOpened(R, on_trial=True, cold=True)]


def test_a_prefiller_that_was_away_opens_cold() -> None:
    instances, fed, open_instances = site()
    prefiller = instances.prefillers[0]
    prefiller.asleep = True
    open_instances.update([prefiller])
    prefiller.asleep, prefiller.crowded = False, True
    open_instances.update([prefiller])
    prefiller.crowded = False
    open_instances.update([prefiller])
    assert fed == [PrefillerClosed(P), PrefillerOpened(P, cold=True)]


def test_without_warm_up_nothing_opens_cold() -> None:
    instances, fed, _ = site()
    open_instances = OpenInstances(instances, fed.append, warm_up=False)
    rank = instances.ranks[0]
    for rank.status in (Status.QUARANTINED, Status.UP):
        open_instances.update([rank])
    assert fed == [RankClosed(R), RankOpened(R)]

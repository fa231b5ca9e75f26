"""What others have on the ranks, by what the engines say."""

import logging
from unittest.mock import MagicMock

import pytest

from balanceroute.proxy.core.events import EngineLoad, Event, ForeignLoad, RankId
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Instances, Rank, Role, Target
from balanceroute.proxy.live.scheduling.scraped_loads import ForeignLoadMeter

SERVER = Target(Role.DECODE, "http://d:8000")


class Subject:
    """Two ranks behind one server; `own` is what this proxy has on the first."""

    def __init__(self, *, headers: bool = True) -> None:
        self.own = 0
        self.told: list[Event] = []
        instances = Instances()
        for number in range(2 if headers else 1):
            header = b"%d" % number if headers else None
            name = f"{SERVER.url}@{number}"
            rank = Rank(RankId(number), name, SERVER, MagicMock(), header)
            instances.ranks.append(rank)
        own = lambda rank: self.own if rank == 0 else 0  # noqa: E731 - read at each call.
        self.others = ForeignLoadMeter(instances, own, self.told.append)

    def read(self, *running: float, waiting: float = 0.0, usage: float = 0.0) -> list[Event]:
        """Return what is told after a page with so many requests on each engine."""
        self.told.clear()
        loads = {str(n): EngineLoad(waiting, one, usage) for n, one in enumerate(running)}
        gauges = EngineGauges(usage, None, frozenset(loads), kv_tokens=1_000, loads=loads)
        self.others.scraped(SERVER, gauges)
        return list(self.told)


def on_rank(slots: int, kv_tokens: int = 0, rank: int = 0) -> list[Event]:
    return [ForeignLoad(RankId(rank), slots, kv_tokens)]


def test_where_it_has_nothing_all_are_others_at_once() -> None:
    subject = Subject()
    assert subject.read(0, 6, waiting=2, usage=0.5) == [
        ForeignLoad(RankId(0), 2, 500),
        ForeignLoad(RankId(1), 8, 500),
    ]


def test_beside_its_own_they_count_after_three_readings() -> None:
    subject = Subject()
    subject.own = 4
    assert subject.read(4, 0) == []
    assert [subject.read(6, 0, usage=0.3) for _ in range(3)] == [[], [], on_rank(2, 100)]
    assert subject.read(6, 0) == on_rank(2)  # At every reading: slots may have become free.
    assert subject.read(9, 0) == on_rank(2)
    assert subject.read(9, 0) == on_rank(5)
    assert subject.read(4, 0) == on_rank(5)
    assert subject.read(4, 0) == on_rank(0)
    assert subject.read(4, 0) == []


@pytest.mark.parametrize("running", [0, 1])
def test_a_rank_with_fewer_than_before_has_no_more_than_it_says(running: int) -> None:
    subject = Subject()
    subject.own = 4
    assert [subject.read(6, 0) for _ in range(4)][-1] == on_rank(2)
    assert subject.read(running, 0, usage=0.3) == on_rank(2, 300)


def test_requests_that_end_between_page_and_books_are_no_others() -> None:
    subject = Subject()
    for own, running in ((4, 4), (2, 4), (2, 3), (6, 6), (1, 6), (0, 1), (0, 0)):
        subject.own = own
        assert subject.read(running, 0) == []


def test_a_request_that_came_and_went_since_the_last_reading_is_no_other() -> None:
    subject = Subject()
    for running in (0, 1, 0, 1):
        assert subject.read(running, 0) == []
    assert subject.read(1, 0) == on_rank(1)


def test_a_page_from_before_its_first_requests_hides_no_others() -> None:
    subject = Subject()
    assert subject.read(4, 0) == on_rank(4)
    subject.own = 4  # Of more slots, while the page was on its way.
    assert subject.read(4, 0) == on_rank(4)
    assert subject.read(8, 0) == on_rank(4)
    assert subject.read(6, 0) == on_rank(4)
    assert subject.read(6, 0) == on_rank(2)


def test_who_takes_over_believes_the_next_page_alone() -> None:
    subject = Subject()
    assert subject.read(2, 0) == on_rank(2)
    assert subject.read(9, 0) == on_rank(2)  # One reading alone may be of a moment.
    subject.others.forget()
    assert subject.read(9, 0) == on_rank(9)


def test_what_is_known_holds_while_two_readings_fail() -> None:
    subject = Subject()
    assert subject.read(3, 0) == on_rank(3)
    for expected in ([], [], on_rank(0), []):
        subject.told.clear()
        subject.others.failed(SERVER)
        assert subject.told == expected


def test_a_rank_of_its_own_address_may_have_any_number() -> None:
    subject = Subject(headers=False)
    subject.others.scraped(
        SERVER,
        EngineGauges(0.0, None, frozenset("5"), loads={"5": EngineLoad(0.0, 3.0, 0.0)}),
    )
    assert subject.told == on_rank(3)
    assert subject.read(1, 1) == []  # Which of the two is it?


def test_that_a_fleet_is_shared_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject()
    with caplog.at_level(logging.WARNING):
        for running in ((1, 0), (1, 2), (3, 2), (0, 2), (0, 0), (0, 0)):
            subject.read(*running)
    assert [one.message for one in caplog.records] == [
        "others send to the decode ranks too: their slots are shared",
        "no others send to the decode ranks",
    ]


def test_prefillers_have_no_slots() -> None:
    subject = Subject()
    gauges = EngineGauges(0.0, None, frozenset("0"), loads={"0": EngineLoad(0.0, 3.0, 0.0)})
    subject.others.scraped(Target(Role.PREFILL, SERVER.url), gauges)
    subject.others.failed(Target(Role.PREFILL, SERVER.url))
    assert not subject.told

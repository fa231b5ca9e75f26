"""Requests that wait for engines that are not there: who is refused, when, and in which order."""

from typing import TYPE_CHECKING, cast

from balanceroute.proxy.core.events import Eligible, RequestId, Ticket
from balanceroute.proxy.core.lifecycle import LifecycleState, Request
from balanceroute.proxy.core.scheduler import Intake
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.scheduling.decisions import Stranded

if TYPE_CHECKING:
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.engines.instances import Instances

OTHERS = Eligible(frozenset(), frozenset())


class Site:
    """A scheduler's requests, and engines that may be missing."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.missing: set[Eligible | None] = set()
        self.intake = Intake()
        self.stranded = Stranded(cast("Scheduler", self), cast("Instances", self), after_s=10.0)

    def missing_for(self, eligible: Eligible | None) -> set[Role]:
        return {Role.DECODE} if eligible in self.missing else set()

    def add(self, number: int, state: LifecycleState, eligible: Eligible | None = None) -> None:
        request = Request(RequestId(number), Ticket(5, eligible=eligible), 0)
        request.state = state
        self.requests[request.request] = request

    def due(self, now_s: float) -> list[int]:
        return list(self.stranded.due(now_s))


def test_requests_wait_for_a_while_and_no_longer() -> None:
    site = Site()
    site.add(1, LifecycleState.POOLED)
    site.missing.add(None)
    assert site.due(100.0) == []
    assert site.due(110.0) == []
    assert site.due(110.1) == [1]


def test_an_engine_that_comes_back_begins_the_wait_anew() -> None:
    site = Site()
    site.add(1, LifecycleState.QUEUED)
    site.missing.add(None)
    site.due(100.0)
    site.missing.clear()
    site.due(105.0)
    site.missing.add(None)
    assert site.due(111.0) == []
    assert site.due(121.1) == [1]


def test_a_time_in_which_nobody_looked_does_not_count() -> None:
    site = Site()
    site.add(1, LifecycleState.QUEUED)
    site.missing.add(None)
    site.due(100.0)
    site.stranded.begin()
    assert site.due(200.0) == []


def test_only_what_waits_is_refused_and_the_queue_before_the_pool() -> None:
    site = Site()
    for number, state in enumerate(
        (
            LifecycleState.POOLED,
            LifecycleState.PREFILLING,
            LifecycleState.QUEUED,
            LifecycleState.DECODING,
        )
    ):
        site.add(number, state)
    site.missing.add(None)
    site.due(100.0)
    assert site.due(111.0) == [2, 0]


def test_requests_of_other_engines_go_on() -> None:
    site = Site()
    site.add(1, LifecycleState.POOLED)
    site.add(2, LifecycleState.POOLED, OTHERS)
    site.missing.add(OTHERS)
    site.due(100.0)
    assert site.due(111.0) == [2]


def test_each_is_named_when_the_one_before_is_gone() -> None:
    """A refusal may move another one: to prefill, where it does not wait any more."""
    site = Site()
    site.add(1, LifecycleState.QUEUED)
    site.add(2, LifecycleState.POOLED)
    site.missing.add(None)
    site.due(100.0)
    due = site.stranded.due(111.0)
    assert next(due) == 1
    site.requests[RequestId(2)].state = LifecycleState.DECODING
    assert list(due) == []

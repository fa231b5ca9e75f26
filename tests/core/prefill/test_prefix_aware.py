"""Prefix-aware choice: affinity as far as it pays, and an index that engines correct."""

import random
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import (
    Action,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    RequestArrived,
    RequestCancelled,
    RequestId,
    StartPrefill,
    Ticket,
)
from balanceroute.proxy.core.prefill import PREFILL_CHOICES, PrefillInputs
from balanceroute.proxy.core.prefill.choices import PrefixAware

if TYPE_CHECKING:
    from tests.core.conftest import Driver

BLOCK = 100
NS_PER_TOKEN = 1_000


class Site:
    """Two prefillers and what they are sent; each prefill takes its time by hand."""

    def __init__(self, new_driver: "type[Driver]", prefillers: int = 2) -> None:
        make = partial(PREFILL_CHOICES["prefix-aware"], PrefillInputs(random.Random(0), 4_000))
        self.driver = new_driver(prefillers=prefillers, prefill_choice=make)
        self.sent = 0

    @property
    def choice(self) -> PrefixAware:
        choice = self.driver.scheduler.prefillers._choice
        assert isinstance(choice, PrefixAware)
        return choice

    def arrive(self, *blocks: int) -> tuple[RequestId, PrefillerId]:
        """Return a request and where it goes."""
        request = RequestId(self.sent)
        self.sent += 1
        tokens = BLOCK * len(blocks) + 1
        ticket = Ticket(tokens, blocks=blocks, block_tokens=BLOCK)
        (action,) = self.driver(RequestArrived(request, ticket))
        assert isinstance(action, StartPrefill)
        return request, action.prefiller

    def done(self, request: RequestId, tokens: int, cached: int | None = None) -> list[Action]:
        self.driver.now_ns += NS_PER_TOKEN * (tokens - (cached or 0))
        return self.driver(
            PrefillDone(request, tokens, cached_tokens=cached), RequestCancelled(request)
        )

    def warm_up(self) -> None:
        """Let every prefiller be measured, with prompts that share nothing."""
        for number in range(40):
            request, _ = self.arrive(*range(1_000 + 50 * number, 1_010 + 50 * number))
            self.done(request, 1_001)


def test_a_conversation_returns_to_its_prefiller(new_driver: "type[Driver]") -> None:
    site = Site(new_driver)
    site.warm_up()
    request, home = site.arrive(*range(10))
    site.done(request, 1_001)
    for length in range(11, 20):
        request, prefiller = site.arrive(*range(length))
        assert prefiller == home
        site.done(request, 100 * length + 1, 100 * length - 100)


def test_a_prefiller_that_is_far_behind_loses_it(new_driver: "type[Driver]") -> None:
    site = Site(new_driver)
    site.warm_up()
    request, home = site.arrive(*range(10))
    site.done(request, 1_001)
    places = [site.arrive(*range(10), 5_000 + number) for number in range(60)]
    # Short prefills queue there, until their queue costs more than the prefix.
    assert places[0][1] == home
    assert {prefiller for _, prefiller in places} == {0, 1}


def test_without_prefixes_the_least_work_takes_it(new_driver: "type[Driver]") -> None:
    site = Site(new_driver, prefillers=3)
    site.warm_up()
    long_one, first = site.arrive(*range(100, 190))
    _, second = site.arrive(*range(200, 203))
    _, third = site.arrive(*range(300, 303))
    _, fourth = site.arrive(*range(400, 403))
    assert {first, second, third} == {0, 1, 2}
    assert fourth in {second, third}
    site.driver(PrefillLost(long_one))


def test_what_engines_dropped_is_forgotten(new_driver: "type[Driver]") -> None:
    site = Site(new_driver)
    site.warm_up()
    memory = site.choice._memory
    request, home = site.arrive(*range(10))
    site.done(request, 1_001, 0)
    index = memory._indices[home]
    # So many further prompts that the first is in an earlier table.
    while index.leading([])[1] == index.newest and index.newest < 3:
        request, _ = site.arrive(*range(10_000 + 50 * site.sent, 10_010 + 50 * site.sent))
        site.done(request, 1_001, 0)
        if index.newest >= 3:
            break
    request, prefiller = site.arrive(*range(10))
    assert prefiller == home
    site.done(request, 1_001, 0)
    tables = len(index._tables)
    assert tables < 3


def test_a_restarted_engine_is_noticed_at_the_second_miss(new_driver: "type[Driver]") -> None:
    site = Site(new_driver)
    site.warm_up()
    request, home = site.arrive(*range(10))
    site.done(request, 1_001, 0)
    index = site.choice._memory._indices[home]
    for number in (1, 2):
        assert index._tables
        request, prefiller = site.arrive(*range(10), 20 + number)
        assert prefiller == home
        site.done(request, 1_101, 0)
    assert not index._tables


def test_nothing_is_kept_of_requests_that_ended(new_driver: "type[Driver]") -> None:
    site = Site(new_driver)
    requests = [site.arrive(*range(number, number + 5))[0] for number in range(20)]
    for request in requests[:10]:
        site.done(request, 501)
    site.driver(*(RequestCancelled(request) for request in requests[10:]))
    assert not site.choice._memory._running
    assert not site.choice._work._places
    assert all(not queue.jobs for queue in site.choice._work._queues.values())

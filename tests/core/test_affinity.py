"""The price of tokens that a rank need not pull: where it sends a request, and what it may not do."""

import random
from dataclasses import replace as replace_data

import numpy as np
import pytest
from msgspec.structs import replace

from balanceroute.predictors import Survival
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    PrefillDone,
    RankClosed,
    RankId,
    RankOpened,
    RequestArrived,
    RequestFinished,
    RequestId,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import Fleet, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig
from balanceroute.proxy.core.waiting import Kept, Pool, PoolEntry

BLOCK = 100
RANKS, BATCH = 4, 8
BALANCED = ["br-0", "br-h", "br-0-bypass"]


class Site:
    """A policy before ranks of given loads, which have known tokens of the prompts.

    Args:
        policy: Its name.
        price: Of a token that need not be pulled.
        loads: KV tokens of the ranks.
        taken: Slots that are taken on each rank.
    """

    def __init__(
        self, policy: str, price: float, loads: list[int], taken: list[int], **settings: float
    ) -> None:
        inputs = PolicyInputs(
            ranks=len(loads),
            batch_limit=BATCH,
            settings=PolicySettings(prefix_affinity=price, **settings),  # type: ignore[arg-type]
            rng=random.Random(0),
            predictor=Survival([500, 500]),
        )
        self.policy = make_policy(policy, inputs)
        if self.policy.projection is not None:
            for rank, load in enumerate(loads):
                if load:
                    self.policy.projection.bind(RequestId(900 + rank), RankId(rank), load, 0)
        self.pool = Pool(Fcfs())
        self.fleet = Fleet(
            np.ones(len(loads), np.bool_),
            np.array(loads),
            np.array(taken),
            np.array([BATCH - slots for slots in taken]),
            np.full(len(loads), UNLIMITED),
            keeping=RankMemory().keeping(len(loads), len(loads)),
        )

    def wait(
        self,
        number: int,
        tokens: int,
        *kept: int,
        overtaken: int = 0,
        deadline_ns: int | None = None,
        overflow_limit: float = np.inf,
    ) -> None:
        times = (deadline_ns, None, None)
        self.pool.add(
            PoolEntry(
                RequestId(number),
                Ticket(tokens),
                tokens,
                0,
                *times,
                overtaken=overtaken,
                overflow_limit=overflow_limit,
                kept=Kept(list(kept), float(np.mean(kept)), 1) if kept else None,
            )
        )

    def decide(self, now_ns: int = 10**12) -> dict[int, int]:
        return {
            int(one): int(rank) for one, rank in self.policy.dispatch(self.fleet, self.pool, now_ns)
        }


@pytest.mark.parametrize("policy", BALANCED)
@pytest.mark.parametrize("price", [0.0, 1.0])
def test_a_turn_returns_to_its_rank_instead_of_the_emptiest_one(policy: str, price: float) -> None:
    site = Site(policy, price, [9_000, 0, 500, 9_000], [1, 0, 1, 1])
    site.wait(1, 1_000, 0, 0, 800, 0)
    assert site.decide() == {1: 2 if price else 1}


@pytest.mark.parametrize("policy", BALANCED)
def test_a_turn_leaves_a_rank_where_it_would_cost_more_than_it_saves(policy: str) -> None:
    # There the others wait for all of it, four times what it is worth: three times while slots abound.
    factor = 1 if policy == "br-0-bypass" else 3
    for kept, home in ((4_000 // factor - 300, False), (4_000 // factor + 300, True)):
        site = Site(policy, 1.0, [9_000, 0, 9_000, 9_000], [1, 0, 1, 1])
        site.wait(1, 1_000, kept, 0, 0, 0)
        assert (site.decide() == {1: 0}) == home


@pytest.mark.parametrize("policy", BALANCED)
def test_what_all_ranks_have_favours_none_of_them_and_no_request(policy: str) -> None:
    for price in (0.0, 1.0):
        site = Site(policy, price, [9_000, 0, 500, 9_000], [1, 0, 1, 1])
        site.wait(1, 1_000, 900, 900, 900, 900)
        assert site.decide() == {1: 1}
    if policy == "br-0-bypass":
        return  # It takes them in order.
    for price in (0.0, 1.0):
        site = Site(policy, price, [9_000, 8_000, 9_000, 9_000], [8, 7, 8, 8])
        site.wait(1, 1_000)
        site.wait(2, 990, 900, 900, 900, 900)
        assert site.decide() == {1: 1}


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
@pytest.mark.parametrize("price", [0.0, 1.0])
def test_where_slots_are_scarce_a_rank_takes_what_it_has(policy: str, price: float) -> None:
    site = Site(policy, price, [9_000, 8_000, 9_000, 9_000], [8, 7, 8, 8])
    site.wait(1, 1_000)
    # On average 140 tokens are on a rank.
    site.wait(2, 600, 0, 560, 0, 0)
    assert site.decide() == {2 if price else 1: 1}


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
def test_several_slots_go_to_what_the_rank_has_unless_more_is_filled_without(policy: str) -> None:
    def chosen(kept: int) -> dict[int, int]:
        site = Site(policy, 1.0, [9_000, 7_000, 9_000, 9_000], [8, 6, 8, 8], theta=4)
        site.wait(1, 1_000)
        site.wait(2, 1_000)
        site.wait(3, 1_000, 0, kept, 0, 0)
        return site.decide()

    assert chosen(0) == {1: 1, 2: 1}
    assert set(chosen(900)) == {1, 3}


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
def test_one_that_is_overtaken_often_goes_first_whatever_others_save(policy: str) -> None:
    site = Site(policy, 1.0, [9_000, 8_000, 9_000, 9_000], [8, 7, 8, 8])
    site.wait(1, 1_000, overtaken=400)
    site.wait(2, 1_000, 0, 900, 0, 0)
    assert site.decide() == {1: 1}


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
def test_at_its_deadline_a_request_goes_where_it_costs_least(policy: str) -> None:
    site = Site(policy, 1.0, [9_000, 0, 9_000, 9_000], [1, 0, 1, 1])
    # Its rank would be beyond the limit, and it would stay in the pool.
    site.wait(1, 1_000, 5_000, 0, 0, 0, deadline_ns=1, overflow_limit=10.0)
    assert site.decide() == {1: 1}


@pytest.mark.parametrize("policy", ["br-0", "br-h"])
@pytest.mark.parametrize("price", [0.0, 1.0])
def test_nobody_is_asked_without_a_price_or_in_the_papers_form(policy: str, price: float) -> None:
    site = Site(policy, price, [9_000, 0, 500, 9_000], [1, 0, 1, 1], paper=price > 0.0)

    site.wait(1, 1_000)
    entry = site.pool.entries[RequestId(1)]
    assert site.decide() == {1: 1}
    assert entry.kept is None


@pytest.mark.parametrize("price", [-1.0, float("inf"), float("nan")])
def test_a_price_is_a_finite_number(price: float) -> None:
    with pytest.raises(ConfigError, match="prefix_affinity"):
        PolicySettings(prefix_affinity=price)


def test_the_scheduler_tells_what_ranks_get_and_lose() -> None:
    memory = RankMemory()
    inputs = PolicyInputs(
        2, 2, PolicySettings(prefix_affinity=1.0), random.Random(0), Survival([5])
    )
    scheduler = Scheduler(
        SchedulerConfig(ranks=2, batch_limit=2),
        make_policy("br-0", inputs),
        intake=Intake(memory=memory),
    )
    ticket = Ticket(205, blocks=(1, 2), block_tokens=100, session=7)

    def feed(*events: Event) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            actions = scheduler.handle(event, now_ns=0)
            scheduler.check()
        return actions

    def serve(number: int) -> RankId:
        request = RequestId(number)
        events = RequestArrived(request, ticket), PrefillDone(request, 210), Tick()
        (admit,) = feed(*events)
        assert isinstance(admit, Admit)
        feed(DecodeStarted(request), StepCompleted(), StepCompleted())
        feed(RequestFinished(request))
        return admit.rank

    home = serve(0)
    # Its blocks, and as the session's next turn is longer, its answer of two tokens too.
    longer = replace(ticket, prompt_tokens=500)
    assert memory.kept(longer) == {home: 212}
    assert memory.kept(replace(longer, session=0)) == {home: 200}
    # One that is emptier would get it otherwise.
    feed(RequestArrived(RequestId(1), Ticket(50)), PrefillDone(RequestId(1), 50), Tick())
    assert scheduler.ledger.loads[home] > 0
    assert serve(2) == home
    feed(RankClosed(home))
    assert memory.kept(longer) == {}
    other = serve(3)
    assert other != home
    feed(RankOpened(home))
    assert serve(4) == other
    # What waits is looked up anew when ranks are added.
    for number in range(5, 10):
        feed(RequestArrived(RequestId(number), ticket), PrefillDone(RequestId(number), 210))
    assert [type(one) for one in feed(Tick())] == [Admit] * 3
    inputs = replace_data(inputs, ranks=3)
    grown = SchedulerConfig(ranks=3, batch_limit=2)
    scheduler.reconfigure(grown, make_policy("br-0", inputs))
    assert {one.rank for one in feed(Tick()) if isinstance(one, Admit)} == {2}


@pytest.mark.parametrize("policy", BALANCED)
def test_without_a_price_the_memory_changes_no_decision(policy: str) -> None:
    rng = random.Random(policy)
    loads, taken = [rng.randrange(9_000) for _ in range(RANKS)], [7, 5, 8, 7]
    decisions = []
    for remembered in (False, True):
        site = Site(policy, 0.0, loads, taken)
        for number in range(12):
            kept = [100 * number, 0, 50, 0] if remembered else []
            site.wait(number, 300 + 77 * number, *kept)
        if not remembered:
            site.fleet.keeping = None
        decisions.append(site.decide())
    assert decisions[0] == decisions[1] != {}

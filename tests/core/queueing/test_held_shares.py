"""Tenants that hold more than their share of the ranks wait in the pool, where it costs no balance."""

import random
from itertools import count

import numpy as np
import pytest
from tests.extended import usually
from tests.script import script

from balanceroute.predictors import Survival
from balanceroute.proxy.core.events import (
    DecodeLost,
    DecodeStarted,
    PrefillDone,
    RankId,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import (
    Assignment,
    Fleet,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.core.queueing import Fcfs, HeldShares, fair_queueing
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig
from balanceroute.proxy.core.waiting import Pool, PoolEntry

# Bound requests have numbers from here on.
BOUND = 1_000
# No entry is so young that BR-H keeps it for a better rank.
NOT_HELD_NS = 1_000_000_000_000


def ticket(tenant: str, tokens: int, weight: float = 1.0) -> Ticket:
    return Ticket(tokens, tenant=tenant, weight=weight)


def holding(**tokens: list[int]) -> HeldShares:
    """Return what tenants hold whose requests are bound with so many tokens."""
    held_shares, number = HeldShares(), BOUND
    for tenant, sizes in tokens.items():
        for size in sizes:
            held_shares.bind(RequestId(number), ticket(tenant, size), size)
            number += 1
    return held_shares


@pytest.mark.parametrize("seed", range(5))
def test_what_a_tenant_holds_is_what_its_requests_do(seed: int) -> None:
    rng, held_shares = random.Random(seed), HeldShares()
    held: dict[RequestId, tuple[str, int, int]] = {}
    for number in range(2_000):
        what = rng.random()
        if what < 0.4:
            one = Ticket(rng.randint(1, 900), tenant=rng.choice("abc"), slots=rng.choice((1, 4)))
            held_shares.bind(RequestId(number), one, one.prompt_tokens)
            held[RequestId(number)] = one.tenant, one.prompt_tokens, one.slots
        elif what < 0.7 and held:
            gone = rng.choice(list(held))
            held_shares.unbind(gone)
            del held[gone]
        else:
            held_shares.steps += 1
            held = {key: (who, size + slots, slots) for key, (who, size, slots) in held.items()}
        for tenant in "abc":
            assert held_shares.tokens(tenant) == sum(
                s for who, s, _ in held.values() if who == tenant
            )
        assert held_shares.bound == held.keys()
    for request in list(held):
        held_shares.unbind(request)
    assert not held_shares._held


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (3, 1), (10, 1), (5, 3, 1), (1,) * 40])
@pytest.mark.parametrize("seed", usually({0}, range(3)))
def test_who_takes_a_slot_holds_its_share_a_mean_request_and_its_new_one_at_most(
    weights: tuple[int, ...], seed: int
) -> None:
    """A choice at random among those not held back; tenants come and go, and stays differ."""
    rng, held_shares = random.Random(seed), HeldShares()
    running: dict[RequestId, Ticket] = {}
    for number in range(3_000):
        here = [one for one in range(len(weights)) if one == 0 or rng.random() < 0.8]
        pool = [ticket(f"{rng.choice(here)}", rng.randint(100, 900)) for _ in range(24)]
        pool = [ticket(one.tenant, one.prompt_tokens, weights[int(one.tenant)]) for one in pool]
        waits = held_shares.held_back(pool)
        free = [one for one in pool if one.tenant not in waits]
        assert free, "all are held back"
        chosen = rng.choice(free)
        tenants = {one.tenant: one.weight for one in pool}
        held = {tenant: held_shares.tokens(tenant) for tenant in tenants}
        due = sum(held.values()) * chosen.weight / sum(tenants.values())
        mean = sum(one.prompt_tokens for one in running.values()) / max(1, len(running))
        if len(tenants) > 1:
            assert held[chosen.tenant] <= due + mean + 1e-6
        held_shares.bind(RequestId(number), chosen, chosen.prompt_tokens)
        running[RequestId(number)] = chosen
        if len(running) == 32:
            gone = rng.choice(list(running))
            held_shares.unbind(gone)
            del running[gone]


def test_a_tenant_that_waits_alone_is_not_held_back() -> None:
    held_shares = holding(a=[500] * 20, b=[500])
    assert held_shares.held_back([ticket("a", 100), ticket("b", 100)]) == {"a"}
    assert not held_shares.held_back([ticket("a", 100)])
    assert not held_shares.held_back([ticket("a", 100, 40.0), ticket("b", 100, 1.0)])


def fleet(loads: list[int], free: list[int], room: int = 2**40) -> Fleet:
    slots = np.array(free)
    return Fleet(
        np.ones(len(loads), np.bool_), np.array(loads), 8 - slots, slots, np.full(len(loads), room)
    )


def dispatched(
    entries: list[tuple[str, int]], *, loads: list[int], free: list[int], long: bool, room: int
) -> list[Assignment]:
    """Let BR-H decide on (tenant, prompt tokens); `a` holds 8,000 tokens more than its half.

    With `long` answers are long beside prompts, so that candidates have trajectories.
    """
    inputs = PolicyInputs(len(loads), 8, PolicySettings(), random.Random(1), Survival([200] * 99))
    policy = make_policy("br-h", inputs)
    assert isinstance(policy, TwoStage)
    assert policy.own_trajectory is not None
    for _ in range(64):
        policy.own_trajectory.slots.leave(100, 400 if long else 50)
    pool = Pool(Fcfs(), holding(a=[500] * 20, b=[500] * 4).held_back)
    for number, (tenant, tokens) in enumerate(entries):
        one = ticket(tenant, tokens)
        pool.add(PoolEntry(RequestId(number), one, tokens, 0, None, None, None))
    return policy.dispatch(fleet(loads, free, room), pool, NOT_HELD_NS)


ENOUGH = 2**40


@pytest.mark.parametrize("long", [False, True])
def test_the_pool_lets_the_tenant_within_its_share_go_first(long: bool) -> None:
    entries = [("a", 300), ("a", 300), ("b", 300)]
    (one,) = dispatched(entries, loads=[3000, 3000], free=[1, 0], long=long, room=ENOUGH)
    assert one.request == 2


@pytest.mark.parametrize("long", [False, True])
def test_no_slot_stays_free_for_a_share(long: bool) -> None:
    entries = [("a", 300), ("a", 300), ("b", 3_000)]
    # The request of `b` has no room.
    (one,) = dispatched(entries, loads=[3000, 3000], free=[1, 0], long=long, room=1_000)
    assert one.request == 0
    entries = [("a", 300), ("b", 300), ("a", 300)]
    taken = dispatched(entries, loads=[3000, 3000], free=[2, 1], long=long, room=ENOUGH)
    assert len(taken) == 3


def test_balance_goes_before_shares() -> None:
    """What `b` has would overflow its rank by many mean prompts, which all other ranks would wait for."""
    entries = [("a", 300), ("a", 310), ("b", 3_000)]
    (one,) = dispatched(entries, loads=[3000, 3320], free=[1, 0], long=False, room=ENOUGH)
    assert one.request in (0, 1)


def test_what_leaves_its_rank_in_any_way_is_held_no_more() -> None:
    inputs = PolicyInputs(2, 4, PolicySettings(), random.Random(1), Survival([50]))
    fair = fair_queueing("kv-token-seconds", Fcfs)
    scheduler = Scheduler(
        SchedulerConfig(ranks=2, batch_limit=4, prefillers=1),
        make_policy("br-h", inputs),
        intake=Intake(fair=fair),
    )
    assert fair.meter is not None
    held_shares, one = fair.meter.held_shares, RequestId(0)

    times_ns = count(0, NOT_HELD_NS)

    def feed(*events: object) -> None:
        for event in (*events, Tick()):
            scheduler.handle(event, now_ns=next(times_ns))  # type: ignore[arg-type]

    feed(RequestArrived(one, ticket("a", 100)))
    assert held_shares.tokens("a") == 0
    feed(PrefillDone(one, 100))
    assert held_shares.tokens("a") == 100
    # Back to the pool, and from there to the other rank.
    feed(DecodeLost(one))
    assert held_shares.tokens("a") == 100
    feed(DecodeStarted(one), StepCompleted(10), StepCompleted(10))
    assert held_shares.tokens("a") == 102
    scheduler.handle(RequestRecomputed(one), now_ns=next(times_ns))
    assert held_shares.tokens("a") == 0
    feed(PrefillDone(one, 102))
    assert held_shares.tokens("a") == 102
    feed(RequestFinished(one))
    assert not held_shares.bound
    assert fair.meter.unsettled == 0
    assert scheduler.ledger.loads[RankId(0)] == 0


@pytest.mark.parametrize("pool", usually({24}, [8, 24]))
def test_shares_are_steady_however_long_requests_stay(pool: int) -> None:
    """Of weights 2 and 1, with stays of 20 s: it takes that long until a choice is made good."""
    module = script("reproduce.admission")
    held = module.steady_of("kv-token-seconds", pool, 0, module.steady_loads((200, 600)))
    second, ten = (100 * module.shares_in(held, window_s, 20) for window_s in (1, 10))
    assert second.std() <= 5.0
    assert 50.0 <= second.min() <= second.max() <= 82.0
    assert 55.0 <= ten.min() <= ten.max() <= 78.0

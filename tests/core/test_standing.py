"""What a driver notes of a request is what the scheduler knows of it."""

import random
from dataclasses import fields

import pytest
from tests.core.test_adoption import RestartingMachine, walk
from tests.core.test_scheduler_machine import (
    POLICIES_DRIVEN,
    random_config,
    random_policy_settings,
)

from balanceroute.proxy.core.adoption import adopted
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    InBatch,
    InPool,
    InQueue,
    KvOnPrefiller,
    OnPrefiller,
    OnRank,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    RankId,
    ReleasePrefill,
    RequestArrived,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import Request, State
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.core.standing import Standing

A = RequestId(0)
P0, RANK0 = PrefillerId(0), RankId(0)
# What only the scheduler sees, and what it takes when it adopts the request. When a request left the
# queue, or arrived before it was served, matters for the measure of times to the first token alone.
NOT_COMPARED = {"arrived_ns", "left_queue_ns", "overtaken", "prefilling", "pulled_from"}


class Followed:
    """A scheduler whose requests are followed from outside."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.standings: dict[RequestId, Standing] = {}

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        actions = self.scheduler.handle(event, now_ns=now_ns)
        requests = self.scheduler.requests
        number = getattr(event, "request", None)
        if isinstance(event, RequestArrived):
            self.standings[event.request] = Standing(event.request, event.ticket, now_ns)
        elif number in requests:
            emitted_before = requests[number].emitted_before
            self.standings[number].fed(event, now_ns, emitted_before=emitted_before)
        for action in actions:
            match action:
                case StartPrefill(request, prefiller):
                    self.standings[request].start_prefill(prefiller, now_ns)
                case Admit(request, rank):
                    self.standings[request].start_decode(rank)
                case ReleasePrefill(request) if request in requests:
                    self.standings[request].lease_ended(now_ns)
                case _:
                    pass
        self.standings = {one: self.standings[one] for one in requests}
        for one in requests.values():
            assert state(self.adopted(one)) == state(one)
        return actions

    def adopted(self, request: Request) -> Request:
        tokens = self.scheduler.emitted(request.request) if request.started else 0
        event = self.standings[request.request].adoption(tokens=tokens)
        if isinstance(event.phase, InBatch):
            assert (event.phase.tokens, event.phase.pulled_from) == (tokens, request.pulled_from)
        return adopted(event, self.scheduler.config)

    def __getattr__(self, name: str) -> object:
        return getattr(self.scheduler, name)


def state(request: Request) -> dict[str, object]:
    hidden = set(NOT_COMPARED)
    if request.prefiller is None or request.state is State.PREFILLING:
        hidden |= {"prefilled_ns", "lease_expires_ns"}  # Of a KV cache that is gone.
    return {one.name: getattr(request, one.name) for one in fields(request)} | dict.fromkeys(hidden)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES_DRIVEN[-4:])
def test_who_follows_a_request_knows_its_state(name: str, seed: int) -> None:
    rng = random.Random(f"standing {name} {seed}")
    machine = RestartingMachine(name)
    machine.build(random_config(rng), random_policy_settings(rng))
    machine.scheduler = Followed(machine.scheduler)  # type: ignore[assignment]
    for _ in range(150):
        walk(machine, rng)
    machine.teardown()


def test_a_loss_that_the_scheduler_takes_for_a_recompute_begins_a_new_wait() -> None:
    standing = Standing(A, Ticket(10, deadline_ns=9), now_ns=1)
    standing.start_prefill(P0, 2)
    standing.fed(PrefillDone(A, 12, 80), 3, emitted_before=0)
    standing.start_decode(RANK0)
    standing.prefill_again(7)
    adoption = standing.adoption(tokens=0)
    assert adoption.phase == InQueue()
    assert (adoption.served, adoption.waiting_since_ns, adoption.pooled_ns) == (True, 7, None)


def test_a_rank_that_drops_a_request_is_avoided_and_so_is_whom_it_pulled_from() -> None:
    standing = Standing(A, Ticket(10), now_ns=1)
    standing.start_prefill(P0, 2)
    standing.fed(PrefillDone(A, 12), 3, emitted_before=0)
    standing.start_decode(RANK0)
    standing.fed(DecodeStarted(A), 4, emitted_before=0)
    standing.fed(RequestRecomputed(A, elsewhere=True), 5, emitted_before=6)
    adoption = standing.adoption(tokens=0)
    assert (adoption.lost_on_prefillers, adoption.lost_on_ranks) == ((P0,), (RANK0,))
    assert (adoption.prompt_tokens, adoption.emitted_before) == (18, 6)


def test_without_a_prefill_a_request_waits_in_the_pool() -> None:
    standing = Standing(A, Ticket(10, prefill=False), now_ns=1)
    assert standing.adoption(tokens=0).phase == InPool(None)
    standing.start_decode(RANK0)
    standing.fed(RequestRecomputed(A), 5, emitted_before=0)
    adoption = standing.adoption(tokens=0)
    assert (adoption.phase, adoption.pooled_ns) == (InPool(None), 5)


def renumbered(standing: Standing, prefillers: dict[int, int], ranks: dict[int, int]) -> bool:
    return standing.renumber(
        {PrefillerId(old): PrefillerId(new) for old, new in prefillers.items()},
        {RankId(old): RankId(new) for old, new in ranks.items()},
    )


def test_another_scheduler_may_give_the_instances_other_ids() -> None:
    standing = Standing(A, Ticket(10), now_ns=1)
    assert renumbered(standing, {}, {})
    standing.start_prefill(P0, 2)
    standing.fed(PrefillLost(A, elsewhere=True), 3, emitted_before=0)
    standing.start_prefill(PrefillerId(1), 4)
    assert not renumbered(standing, {0: 1}, {})
    assert standing.adoption(tokens=0).phase == OnPrefiller(PrefillerId(1), 4)
    assert renumbered(standing, {0: 5, 1: 6}, {})
    assert standing.adoption(tokens=0).phase == OnPrefiller(PrefillerId(6), 4)
    assert standing.adoption(tokens=0).lost_on_prefillers == (5,)
    standing.fed(PrefillDone(A, 12, 80), 5, emitted_before=0)
    assert renumbered(standing, {6: 2}, {})
    kv = KvOnPrefiller(PrefillerId(2), 5, 80)
    assert standing.adoption(tokens=0).phase == InPool(kv)
    standing.start_decode(RANK0)
    standing.fed(DecodeLost(A), 6, emitted_before=0)
    standing.start_decode(RankId(1))
    assert not renumbered(standing, {2: 0}, {0: 3})
    assert not renumbered(standing, {}, {0: 3, 1: 4})
    assert standing.adoption(tokens=0).phase == OnRank(RankId(1), kv)
    assert renumbered(standing, {2: 0}, {1: 4})
    told = standing.adoption(tokens=0)
    assert told.phase == OnRank(RankId(4), KvOnPrefiller(P0, 5, 80))
    assert told.lost_on_ranks == ()  # It is not there any more.
    standing.fed(DecodeStarted(A), 7, emitted_before=0)
    assert not renumbered(standing, {0: 1}, {})
    assert renumbered(standing, {0: 1}, {4: 5})
    assert standing.adoption(tokens=9).phase == InBatch(RankId(5), 9, PrefillerId(1))
    assert renumbered(standing, {}, {5: 5})
    assert standing.adoption(tokens=9).phase == InBatch(RankId(5), 9, None)

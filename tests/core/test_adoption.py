"""A scheduler that starts anew takes over the requests of an earlier one."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from msgspec import structs
from tests.core.known_request import Known
from tests.core.test_scheduler_machine import (
    BEFALLS,
    LIVE,
    POLICIES_DRIVEN,
    STAGES,
    SWITCHES,
    SchedulerMachine,
    random_config,
    random_newcomers,
    random_policy_settings,
    some,
)

from balanceroute.predictors import Survival
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    InBatch,
    InPool,
    InQueue,
    KvOnPrefiller,
    OnPrefiller,
    OnRank,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    RankClosed,
    RankId,
    ReleasePrefill,
    RequestAdopted,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.core.conftest import Driver

P0, P1 = PrefillerId(0), PrefillerId(1)
RANK0, RANK1 = RankId(0), RankId(1)
A, B, C, D, E = (RequestId(number) for number in range(5))
KV = KvOnPrefiller(P0, prefilled_ns=10, lease_expires_ns=50)
# Decisions that follow from the present state alone.
WITHOUT_MEMORY = ["jsq", "fifo", "least-kv", "br-0 --paper"]


class RestartingMachine(SchedulerMachine):
    """Replaces its scheduler by one that adopts what the model knows, and goes on as before."""

    @rule(order=st.randoms(use_true_random=False))
    def restart(self, order: random.Random) -> None:
        known = list(self.live.values())
        order.shuffle(known)
        self.live = {one.number: one for one in known}
        self.policy = self.make_policy(self.config)
        self.scheduler = self.taken_over()
        self.turns = []  # The choice of a prefiller forgets whose turn it is.
        self.nothing_leaked()
        self.tick(0)

    def taken_over(self) -> Scheduler:
        """Return a scheduler that knows of every request what the model knows."""
        scheduler = Scheduler(self.config, self.policy)
        for event in [*self.switched(), *map(adoption, self.live.values())]:
            assert scheduler.handle(event, now_ns=self.now_ns) == []
            scheduler.check()
        return scheduler

    def switched(self) -> list[Event]:
        ranks = [RankId(rank) for rank, takes in enumerate(self.open_ranks) if not takes]
        prefillers = [one for one, takes in enumerate(self.open_prefillers) if not takes]
        closed: list[Event] = [RankClosed(rank) for rank in ranks]
        return closed + [PrefillerClosed(PrefillerId(one)) for one in prefillers]


def adoption(known: Known) -> RequestAdopted:
    kv = None
    if known.prefiller is not None:
        lease_ns = None if known.lease_ns is None else known.prefilled_ns + known.lease_ns
        kv = KvOnPrefiller(known.prefiller, known.prefilled_ns, lease_ns)
    phase: InQueue | OnPrefiller | InPool | OnRank | InBatch
    match known:
        case Known(phase="queued"):
            phase = InQueue()
        case Known(phase="prefilling", prefiller=int(prefiller)):
            phase = OnPrefiller(PrefillerId(prefiller), known.since_ns)
        case Known(phase="pooled"):
            phase = InPool(kv)
        case Known(rank=int(rank), started=True):
            phase = InBatch(RankId(rank), known.kv_tokens - known.floor_tokens)
        case Known(rank=int(rank)):
            phase = OnRank(RankId(rank), kv)
        case _:
            raise AssertionError(known)
    return RequestAdopted(
        known.number,
        # Only what the ticket says does not change: who serves a request may have, see `decode`.
        Ticket(known.prompt_tokens, known.slots, known.prefill),
        phase,
        prompt_tokens=known.prompt_tokens,
        waiting_since_ns=known.since_ns,
        decode=known.decode,
        emitted_before=known.emitted_before,
        pooled_ns=known.pooled_ns,
        lost_on_prefillers=tuple(PrefillerId(one) for one in known.lost_on_prefillers),
        lost_on_ranks=tuple(RankId(one) for one in known.lost_on_ranks),
        answered=known.answered,
    )


def walk(machine: SchedulerMachine, rng: random.Random) -> None:
    """Take one random step."""
    index = rng.randrange(1_000)
    match rng.randrange(9):
        case 0 | 1 | 2:
            machine.serve(random_newcomers(rng), rng.choice(STAGES))
        case 3 if machine.prefilling():
            machine.end_prefill(index, rng.randint(-2, 3), some(rng, -3, 60))
        case 4 if machine.joinable():
            machine.join(index)
        case 5:
            machine.tick(rng.randrange(16))
        case 6:
            machine.step(rng.randint(1, 4))
        case 7:
            machine.switch(rng.choice(SWITCHES), index)
        case _ if machine.live:
            machine.befall(rng.choice(BEFALLS), rng.choice(LIVE), index)
        case _:
            pass
    machine.nothing_leaked()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", POLICIES_DRIVEN)
def test_a_scheduler_that_took_over_agrees_with_the_naive_model(name: str, seed: int) -> None:
    rng = random.Random(f"adoption {name} {seed}")
    machine = RestartingMachine(name)
    machine.build(random_config(rng), random_policy_settings(rng))
    for _ in range(120):
        walk(machine, rng)
        if rng.randrange(6) == 0:
            machine.restart(rng)
    machine.teardown()


@pytest.mark.parametrize("name", ["jsq", "br-0", "br-h"])
def test_it_does_so_after_every_order_of_events(name: str) -> None:
    class Machine(RestartingMachine):
        def __init__(self) -> None:
            super().__init__(name)

    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=50))


class Twin:
    """A scheduler and the one that took over from it: both are told the same."""

    def __init__(self, before: Scheduler, after: Scheduler) -> None:
        self.before = before
        self.after = after
        assert described(after) == described(before)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        actions = self.before.handle(event, now_ns=now_ns)
        assert self.after.handle(event, now_ns=now_ns) == actions
        assert described(self.after) == described(self.before)
        return actions

    def __getattr__(self, name: str) -> object:
        return getattr(self.before, name)


def described(scheduler: Scheduler) -> object:
    """Return what a scheduler counts, and where its requests stand."""
    ledger, prefillers = scheduler.ledger, scheduler.prefillers
    entries = [
        (
            (entry.request, entry.prompt_tokens, entry.age, entry.slots, entry.lost_on),
            (entry.deadline_ns, entry.expires_ns, entry.lease_ends_ns, entry.since_ns),
        )
        for entry in scheduler.pool
    ]
    return (
        (ledger.loads.tolist(), ledger.bound.tolist(), ledger.started.tolist()),
        sorted(ledger.requests()),
        (prefillers.held_tokens, prefillers.prefills, prefillers.direct),
        entries,
        (scheduler.waiting, scheduler.next_deadline_ns()),
        sorted((one.request, one.state.name) for one in scheduler.requests.values()),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_a_scheduler_that_took_over_acts_as_if_there_had_never_been_another(
    name: str, seed: int
) -> None:
    rng = random.Random(f"twins {name} {seed}")
    machine = RestartingMachine(name)
    # With one prefiller, as whose turn it is was in the mind of the first scheduler alone.
    config = replace(random_config(rng), prefillers=1)
    # Both schedulers ask the same policy, so it may follow neither of them.
    parameters = random_policy_settings(rng) | {"kv_peak_quantile": None}
    machine.build(config, parameters)
    while len(machine.live) < 8 or not machine.running():
        walk(machine, rng)
    machine.scheduler = Twin(machine.scheduler, machine.taken_over())  # type: ignore[assignment]
    for _ in range(120):
        walk(machine, rng)
    machine.teardown()


def arrived(number: RequestId = A, ticket: Ticket = Ticket(10)) -> RequestAdopted:  # noqa: B008 - frozen.
    """Return a request that waits for a prefiller since 5 ns."""
    return RequestAdopted(number, ticket, InQueue(), ticket.prompt_tokens, waiting_since_ns=5)


def test_a_request_of_every_phase_goes_on_from_there(new_driver: "type[Driver]") -> None:
    driver = new_driver(ranks=2, batch_limit=2, prefillers=2, probe_limit=1)
    driver.at(
        20,
        structs.replace(arrived(E), prompt_tokens=60),
        structs.replace(arrived(D), phase=OnPrefiller(P0, 15), prompt_tokens=30),
        structs.replace(arrived(C), phase=InPool(KV), pooled_ns=10),
        structs.replace(arrived(B), phase=OnRank(RANK1, KV), pooled_ns=10),
        structs.replace(
            arrived(A), phase=InBatch(RANK1, 7, P0), prompt_tokens=40, emitted_before=30
        ),
    )
    assert driver.held() == {
        "tokens": [50, 0],
        "prefills": [1, 0],
        "loads": [0, 57],
        "bound": [0, 2],
    }
    assert driver.scheduler.emitted(A) == 7
    (youngest,) = [one for one in driver.scheduler.ledger.requests() if one.request == A]
    assert (youngest.age, youngest.started) == (37, True)
    assert driver(Tick()) == [Admit(C, RANK0), StartPrefill(E, P1, 60)]
    assert driver(PrefillDone(D, 31), Tick()) == [Admit(D, RANK0)]
    assert driver(DecodeStarted(B), RequestFinished(B), RequestFinished(A)) == []
    assert driver.held() == {
        "tokens": [41, 60],
        "prefills": [0, 1],
        "loads": [41, 0],
        "bound": [2, 0],
    }


def test_leases_and_time_limits_end_when_they_would_have(new_driver: "type[Driver]") -> None:
    driver = new_driver(batch_limit=1, ttl_ns=90, queue_ttl_ns=70, lease_margin_ns=0)
    driver.at(
        20,
        structs.replace(arrived(A), phase=InBatch(RANK0, 0)),
        structs.replace(arrived(B), phase=InPool(KV), pooled_ns=10, lapses=1),
        structs.replace(arrived(C), phase=InPool(KvOnPrefiller(P0, 10)), pooled_ns=15),
        structs.replace(arrived(D), waiting_since_ns=0),
        RankClosed(RANK0),
    )
    assert driver.at(49, Tick()) == [StartPrefill(D, P0, 10)]
    assert driver.at(50, Tick()) == [ReleasePrefill(B, P0), StartPrefill(B, P0, 10)]
    assert driver.scheduler.requests[B].lapses == 2
    assert driver.at(105, Tick()) == [ReleasePrefill(C, P0), Expire(C)]


def test_a_deadline_for_the_first_token_counts_until_there_was_one(
    new_driver: "type[Driver]",
) -> None:
    driver = new_driver(probe_limit=1)
    driver.at(
        20,
        structs.replace(arrived(A, Ticket(10, deadline_ns=30)), served=True),
        arrived(B, Ticket(10, deadline_ns=30)),
    )
    assert driver.at(30, Tick()) == [Expire(B), StartPrefill(A, P0, 10)]


def test_earlier_losses_are_avoided(new_driver: "type[Driver]") -> None:
    driver = new_driver(ranks=2, prefillers=2)
    lost = structs.replace(arrived(A), lost_on_prefillers=(P0,), lost_on_ranks=(RANK0,))
    pulled = structs.replace(arrived(B), phase=InBatch(RANK0, 3, P0))
    assert driver(lost, pulled, Tick()) == [StartPrefill(A, P1, 10)]
    assert driver(PrefillDone(A, 10), Tick()) == [Admit(A, RANK1)]
    # It pulled from the first prefiller, which may be at fault.
    assert driver(RequestRecomputed(B, elsewhere=True)) == [StartPrefill(B, P1, 13)]


def test_an_answer_that_begins_anew_is_prefilled_as_it_came(new_driver: "type[Driver]") -> None:
    driver = new_driver(ranks=2, prefillers=2)
    driver(structs.replace(arrived(B), phase=InBatch(RANK0, 3, P0)))
    anew = RequestRecomputed(B, elsewhere=True, anew=True)
    assert driver(anew) == [StartPrefill(B, P1, 10)]
    assert driver(PrefillDone(B, 10), Tick()) == [Admit(B, RANK1)]
    driver(DecodeStarted(B))
    assert driver.scheduler.emitted(B) == 0
    assert driver.scheduler.requests[B].emitted_before == 0


def test_a_prefill_that_runs_is_measured_from_its_start(new_driver: "type[Driver]") -> None:
    driver = new_driver(lease_ns=1_000)
    driver.at(50, structs.replace(arrived(A), phase=OnPrefiller(P0, 20)))
    pace = driver.scheduler.leases.pace
    assert pace is not None
    assert pace.prefilling_tokens == 10
    driver.at(60, PrefillDone(A, 10))
    assert pace.prefill_ns == 40
    driver.at(70, structs.replace(arrived(B), phase=OnPrefiller(P0, 20), decode=False))
    assert pace.prefilling_tokens == 0


def test_a_projection_knows_the_age_of_who_decodes() -> None:
    machine = SchedulerMachine("br-h")
    config = replace(random_config(random.Random(1)), ranks=1, batch_limit=4)
    machine.predictor = Survival()
    machine.build(config, {"horizon_steps": 4, "refresh_tokens": 2})
    event = structs.replace(arrived(A), phase=InBatch(RANK0, 8), prompt_tokens=14, emitted_before=4)
    machine.scheduler.handle(event, now_ns=9)
    projection = machine.policy.projection
    assert isinstance(projection, Projection)
    running = projection.running_on(machine.scheduler.ranks.is_open)
    assert (running.kv_tokens.tolist(), running.ages.tolist()) == ([22], [12])


WRONG = {
    "0 prompt tokens": structs.replace(arrived(), prompt_tokens=0),
    "-1 lapses": structs.replace(arrived(), lapses=-1),
    "-1 tokens emitted before": structs.replace(arrived(), emitted_before=-1),
    "-1 emitted tokens": structs.replace(arrived(), phase=InBatch(RANK0, -1)),
    "arrived with 0 slots": arrived(A, Ticket(10, slots=0)),
    "which its ticket excludes": arrived(A, Ticket(10, decode=False)),
    "before prefill": arrived(A, Ticket(10, prefill=False)),
    "before prefill, and": structs.replace(
        arrived(A, Ticket(10, prefill=False)), phase=OnPrefiller(P0, 3)
    ),
    "by a prefiller, not by a rank": structs.replace(arrived(), phase=InPool(KV), decode=False),
    "without the KV cache": structs.replace(arrived(), phase=InPool(None)),
    "with a KV cache": structs.replace(
        arrived(A, Ticket(10, prefill=False)), phase=OnRank(RANK0, KV)
    ),
    "on prefiller 1: there are 1": structs.replace(arrived(), phase=OnPrefiller(P1, 3)),
    "on prefiller -1": structs.replace(
        arrived(), phase=InPool(structs.replace(KV, prefiller=PrefillerId(-1)))
    ),
    "on prefiller 9": structs.replace(arrived(), lost_on_prefillers=(PrefillerId(9),)),
    "on prefiller 8": structs.replace(arrived(), phase=InBatch(RANK0, 3, PrefillerId(8))),
    "on rank 1: there are 1": structs.replace(arrived(), phase=OnRank(RANK1, KV)),
    "on rank 9": structs.replace(arrived(), lost_on_ranks=(RankId(9),)),
    "has arrived already": arrived(B),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_description_that_cannot_be_is_refused_and_changes_nothing(
    new_driver: "type[Driver]", reason: str
) -> None:
    driver = new_driver()
    driver(arrived(B))
    before = described(driver.scheduler)
    with pytest.raises(LifecycleError, match=reason):
        driver(WRONG[reason])
    assert described(driver.scheduler) == before
    assert driver(Tick()) == [StartPrefill(B, P0, 10)]

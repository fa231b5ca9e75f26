"""Whole runs: the scheduler mirrors the engines, nothing leaks, and every run can be repeated."""

import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files

import pytest
from tests.extended import USUAL_POLICIES, usually

from balanceroute.predictors import NoPrediction, Predictor, RequestFeatures, Survival
from balanceroute.predictors.past import features_of
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    FirstToken,
    PrefillDone,
    PrefillerId,
    RankId,
    ReleasePrefill,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import (
    POLICIES,
    Policy,
    PolicyInputs,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.prefill import PREFILL_CHOICES, PrefillInputs
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import FORECASTS, make_simulation
from balanceroute.proxy.lab.sim.recorder import Recorder, RunMetrics
from balanceroute.proxy.lab.sim.workload import Workload, playable, split
from balanceroute.traces import TraceRequest, read_trace

Log = list[tuple[int, Event | Action]]

SMALL = SimulatedDeployment(ranks=3, batch_limit=4, step_base_ns=1_000, step_ns_per_token=10.0)
PREFILL = PrefillModel(servers=2, base_ns=500, ns_per_token=20.0)
DEPLOYMENTS = {
    "unlimited": SMALL,
    "little memory": replace(SMALL, rank_kv_tokens=130),
    "little memory and prefill servers": replace(SMALL, rank_kv_tokens=130, prefill=PREFILL),
    "deadlines": replace(SMALL, deadline_ns=20_000),
    "leases": replace(SMALL, prefill=PREFILL, lease_ns=4_000, lease_margin_ns=1_000),
    "early first tokens": replace(
        SMALL, prefill=PREFILL, lease_ns=4_000, lease_margin_ns=1_000, early_tokens=True
    ),
    "transfers": replace(SMALL, transfer_base_ns=300, transfer_ns_per_token=50.0),
    "little memory and transfers": replace(SMALL, rank_kv_tokens=130, transfer_ns_per_token=50.0),
}


HISTORY = [TraceRequest(0, 1, tokens) for tokens in (5, 12, 30)]


def synthetic(size: int, *, backlog: int | None, gap_ns: int = 2_500) -> Workload:
    """Return requests of 1..60 prompt and 1..30 output tokens, the same every time."""
    rng = random.Random(f"{size} requests")
    arrivals = sorted(rng.randrange(size * gap_ns) for _ in range(size))
    requests = [TraceRequest(at, rng.randint(1, 60), rng.randint(1, 30)) for at in arrivals]
    return Workload(requests, HISTORY, backlog=backlog)


PACES = {"open loop": synthetic(60, backlog=None), "saturated": synthetic(60, backlog=7)}


def policy_of(
    name: str, deployment: SimulatedDeployment, predictor: Predictor, seed: str = "0"
) -> Policy:
    settings = PolicySettings(horizon_steps=8, refresh_tokens=3)
    return make_policy(
        name,
        PolicyInputs(
            deployment.ranks, deployment.batch_limit, settings, random.Random(seed), predictor
        ),
    )


def record(name: str, deployment: SimulatedDeployment, workload: Workload, seed: str = "0") -> Log:
    """Return the event log of a run."""
    log: Log = []
    predictor = Survival(request.output_tokens for request in workload.history)
    Simulation(
        deployment,
        workload,
        policy_of(name, deployment, predictor, seed),
        predictor,
        observer=lambda event, actions, now_ns: log.extend(
            (now_ns, item) for item in (event, *actions)
        ),
    ).run()
    return log


class Watch(Recorder):
    """A recorder that calls `at_step` with the true loads and number of running requests."""

    at_step: Callable[[list[int], int], None]

    def step(
        self,
        loads: Sequence[int],
        running: int,
        duration_ns: int,
        now_ns: int,
        emissions: Mapping[RequestId, int],
    ) -> None:
        self.at_step(list(loads), running)
        super().step(loads, running, duration_ns, now_ns, emissions)


def watched(
    name: str,
    deployment: SimulatedDeployment,
    workload: Workload,
    *,
    at_step: Callable[[Scheduler, list[int], int], None],
    on_event: Callable[[Scheduler, Event | Action], None] = lambda _scheduler, _item: None,
) -> Simulation:
    """Run with a look at the scheduler at the start of every step and after every event."""
    predictor = Survival(request.output_tokens for request in workload.history)

    def observe(event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        for item in (event, *actions):
            on_event(simulation.scheduler, item)

    simulation = Simulation(
        deployment, workload, policy_of(name, deployment, predictor), predictor, observer=observe
    )
    watch = Watch(len(workload.requests))
    watch.at_step = lambda loads, running: at_step(simulation.scheduler, loads, running)
    simulation.recorder = watch
    simulation.run()
    return simulation


every_policy = pytest.mark.parametrize("name", usually(USUAL_POLICIES, POLICIES))
every_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
every_pace = pytest.mark.parametrize("workload", PACES.values(), ids=PACES)


@every_policy
@every_deployment
@every_pace
def test_the_scheduler_knows_the_engines_and_every_request_ends_once(
    name: str, deployment: SimulatedDeployment, workload: Workload
) -> None:
    steps = 0
    seen: Counter[type] = Counter()
    tokens: Counter[RequestId] = Counter()
    batch: set[RequestId] = set()
    finished: list[RequestId] = []
    slots_beyond_batch = policy_of(name, deployment, NoPrediction()).slots_beyond_batch

    def compare(scheduler: Scheduler, loads: list[int], running: int) -> None:
        """Compare its loads with those of the engines, as a step begins."""
        nonlocal steps
        steps += 1
        mirrored = scheduler.ledger.loads.tolist()
        queued = 0
        for request in scheduler.requests.values():
            if request.state is LifecycleState.DECODING and not request.started:
                assert request.rank is not None
                mirrored[request.rank] -= request.prompt_tokens
                queued += 1
        assert mirrored == loads
        assert int(scheduler.ledger.started.sum()) == running
        if slots_beyond_batch == 0:  # What it binds joins at once: its whole ledger is the truth.
            delayed = deployment.rank_kv_tokens is not None or bool(
                deployment.transfer_base_ns or deployment.transfer_ns_per_token
            )
            assert queued == 0 or delayed
            assert int(scheduler.ledger.bound.max()) <= deployment.batch_limit

    def check(scheduler: Scheduler, item: Event | Action) -> None:
        """Account for every holding, and count what the item brings its request."""
        seen[type(item)] += 1
        scheduler.check()  # The state that the event before has left.
        for number, live in scheduler.requests.items():
            prompt_tokens = workload.requests[number].prompt_tokens
            assert live.prompt_tokens == prompt_tokens + live.emitted_before
        match item:
            case DecodeStarted(request):
                assert request not in batch
                batch.add(request)
            case StepCompleted():
                tokens.update(batch)
            case RequestFinished(request):
                batch.remove(request)
                finished.append(request)
            case RequestRecomputed(request):
                batch.remove(request)
            case _:
                pass

    scheduler = watched(name, deployment, workload, at_step=compare, on_event=check).scheduler
    assert steps > 50
    scheduler.check()
    assert scheduler.requests == {}
    assert len(scheduler.pool) == 0
    assert not scheduler.ledger.loads.any()
    assert not scheduler.ledger.bound.any()
    assert not scheduler.ledger.started.any()
    assert not any(scheduler.prefillers.held_tokens)
    assert not any(scheduler.prefillers.prefills)
    assert (seen[ReleasePrefill] > 5) == (None not in (slots_beyond_batch, deployment.lease_ns))
    if deployment.rank_kv_tokens is None:
        assert seen[RequestRecomputed] == 0
    else:
        assert seen[RequestRecomputed] > 5
        assert seen[StartPrefill] == len(workload.requests) + seen[RequestRecomputed]
    assert sorted(finished) == list(range(len(workload.requests)))
    for request in finished:
        assert tokens[request] == workload.requests[request].output_tokens


BACKLOG, CONCURRENCY = 9, 11


@every_policy
@every_deployment
@pytest.mark.parametrize(
    ("workload", "closed_loop"),
    [
        (synthetic(60, backlog=BACKLOG), False),
        (replace(synthetic(60, backlog=None), concurrency=CONCURRENCY), True),
    ],
    ids=["saturated", "closed loop"],
)
def test_a_run_keeps_its_requests_waiting_or_under_way_until_the_trace_ends(
    name: str, deployment: SimulatedDeployment, workload: Workload, closed_loop: bool
) -> None:
    arrived = steps = 0
    returned: set[RequestId] = set()

    def count(_: Scheduler, item: Event | Action) -> None:
        nonlocal arrived
        match item:
            case RequestArrived():
                arrived += 1
            case RequestRecomputed(request):
                returned.add(request)
            case DecodeStarted(request):
                returned.discard(request)
            case _:
                pass

    def compare(scheduler: Scheduler, _loads: list[int], _running: int) -> None:
        nonlocal steps
        if arrived < len(workload.requests):
            waiting = {r.request for r in scheduler.requests.values() if not r.started}
            assert closed_loop or len(waiting - returned) == BACKLOG
            assert not closed_loop or len(scheduler.requests) == CONCURRENCY
            steps += 1

    watched(name, deployment, workload, at_step=compare, on_event=count)
    assert steps > 25


@dataclass
class Wait:
    """What a request waited for: the barrier that was next when it arrived, and its start."""

    arrived_ns: int
    barrier_ns: int | None = None
    started_ns: int | None = None


@every_policy
def test_under_light_load_every_policy_starts_every_request_at_the_next_barrier(name: str) -> None:
    # At most five requests overlap, and every rank has five slots.
    requests = [TraceRequest(700 * i, 10 + i, 4) for i in range(5)]
    requests += [TraceRequest(100_000 + 50_000 * i, 10 + i, 4) for i in range(5)]
    deployment = replace(SMALL, batch_limit=5)
    waits: dict[RequestId, Wait] = {}
    running = 0
    for now_ns, item in record(name, deployment, Workload(requests, history=[])):
        match item:
            case RequestArrived(request):
                waits[request] = Wait(now_ns, None if running else now_ns)
            case StepCompleted():
                for wait in waits.values():
                    if wait.barrier_ns is None:
                        wait.barrier_ns = now_ns
            case DecodeStarted(request):
                running += 1
                waits[request].started_ns = now_ns
            case RequestFinished():
                running -= 1
            case _:
                pass
    longest_step_ns = 1_000 + 10 * (5 * (20 + 4))
    for wait in waits.values():
        assert wait.started_ns == wait.barrier_ns
        assert wait.started_ns is not None
        assert wait.started_ns - wait.arrived_ns < longest_step_ns
    # Some waited for a barrier, some did not.
    assert len({wait.started_ns == wait.arrived_ns for wait in waits.values()}) == 2


TWO_RANKS = SimulatedDeployment(ranks=2, batch_limit=1, step_base_ns=1_000, step_ns_per_token=10.0)
THREE_REQUESTS = Workload(
    [TraceRequest(0, 100, 2), TraceRequest(0, 50, 3), TraceRequest(500, 20, 1)], history=[]
)
R0, R1, R2 = RequestId(0), RequestId(1), RequestId(2)
G0, G1 = RankId(0), RankId(1)
P0 = PrefillerId(0)


def test_a_run_of_two_ranks_goes_as_worked_out_by_hand() -> None:
    assert record("fifo", TWO_RANKS, THREE_REQUESTS) == [
        (0, RequestArrived(R0, Ticket(100))),
        (0, StartPrefill(R0, P0, 100)),
        (0, RequestArrived(R1, Ticket(50))),
        (0, StartPrefill(R1, P0, 50)),
        (0, PrefillDone(R0, 100)),
        (0, PrefillDone(R1, 50)),
        (0, Tick()),
        (0, Admit(R0, G0)),
        (0, Admit(R1, G1)),
        (0, DecodeStarted(R0)),
        (0, DecodeStarted(R1)),  # Loads 100 and 50: the step takes 2,000 ns.
        (500, RequestArrived(R2, Ticket(20))),
        (500, StartPrefill(R2, P0, 20)),
        (500, PrefillDone(R2, 20)),
        (500, Tick()),  # Both ranks are full.
        (2_000, StepCompleted(2_000)),  # Loads 101 and 51: 2,010 ns.
        (4_010, StepCompleted(2_010)),
        (4_010, RequestFinished(R0)),
        (4_010, Tick()),
        (4_010, Admit(R2, G0)),
        (4_010, DecodeStarted(R2)),  # Loads 20 and 52: 1,520 ns.
        (5_530, StepCompleted(1_520)),
        (5_530, RequestFinished(R1)),
        (5_530, RequestFinished(R2)),
        (5_530, Tick()),
    ]


def test_early_binding_queues_at_the_rank_and_not_in_the_pool() -> None:
    late = record("fifo", TWO_RANKS, THREE_REQUESTS)
    early = record("jsq", TWO_RANKS, THREE_REQUESTS)
    assert (500, Admit(R2, G0)) in early
    assert [item for item in early if not isinstance(item[1], Tick | Admit)] == [
        item for item in late if not isinstance(item[1], Tick | Admit)
    ]


def test_a_prefill_server_takes_one_probe_at_a_time() -> None:
    # Probes take 100 ns + 2 ns a token.
    deployment = replace(TWO_RANKS, prefill=PrefillModel(1, 100, 2.0))
    assert record("fifo", deployment, THREE_REQUESTS) == [
        (0, RequestArrived(R0, Ticket(100))),
        (0, StartPrefill(R0, P0, 100)),
        (0, RequestArrived(R1, Ticket(50))),
        (300, PrefillDone(R0, 100)),
        (300, StartPrefill(R1, P0, 50)),
        (300, Tick()),
        (300, Admit(R0, G0)),
        (300, DecodeStarted(R0)),  # 2,000 ns.
        (500, RequestArrived(R2, Ticket(20))),
        (500, PrefillDone(R1, 50)),
        (500, StartPrefill(R2, P0, 20)),
        (500, Tick()),
        (500, Admit(R1, G1)),
        (640, PrefillDone(R2, 20)),
        (640, Tick()),
        (2_300, StepCompleted(2_000)),
        (2_300, DecodeStarted(R1)),  # Loads 101 and 50: 2,010 ns.
        (4_310, StepCompleted(2_010)),
        (4_310, RequestFinished(R0)),
        (4_310, Tick()),
        (4_310, Admit(R2, G0)),
        (4_310, DecodeStarted(R2)),  # Loads 20 and 51: 1,510 ns.
        (5_820, StepCompleted(1_510)),
        (5_820, RequestFinished(R2)),
        (5_820, Tick()),  # Load 52: 1,520 ns.
        (7_340, StepCompleted(1_520)),
        (7_340, RequestFinished(R1)),
        (7_340, Tick()),
    ]


def test_a_kv_cache_travels_before_its_request_joins() -> None:
    # Transfers take 100 ns + 2 ns a token.
    deployment = replace(TWO_RANKS, transfer_base_ns=100, transfer_ns_per_token=2.0)
    log = record("fifo", deployment, THREE_REQUESTS)
    assert [entry for entry in log if not isinstance(entry[1], RequestArrived | StartPrefill)] == [
        (0, PrefillDone(R0, 100)),
        (0, PrefillDone(R1, 50)),
        (0, Tick()),
        (0, Admit(R0, G0)),
        (0, Admit(R1, G1)),
        (200, DecodeStarted(R1)),  # 1,500 ns.
        (500, PrefillDone(R2, 20)),
        (500, Tick()),  # Both ranks are full, though one of them has nothing yet.
        (1_700, StepCompleted(1_500)),
        (1_700, DecodeStarted(R0)),  # Loads 100 and 51: 2,000 ns.
        (3_700, StepCompleted(2_000)),  # Loads 101 and 52: 2,010 ns.
        (5_710, StepCompleted(2_010)),
        (5_710, RequestFinished(R1)),
        (5_710, RequestFinished(R0)),
        (5_710, Tick()),
        (5_710, Admit(R2, G0)),
        (5_850, DecodeStarted(R2)),  # 1,200 ns.
        (7_050, StepCompleted(1_200)),
        (7_050, RequestFinished(R2)),
        (7_050, Tick()),
    ]


def test_a_dropped_request_is_prefilled_again_with_what_it_emitted() -> None:
    deployment = replace(TWO_RANKS, ranks=1, batch_limit=2, rank_kv_tokens=102)
    workload = Workload([TraceRequest(0, 60, 4), TraceRequest(0, 40, 3)], history=[])
    log = record("fifo", deployment, workload)
    begin = log.index((0, DecodeStarted(R1)))  # Load 100: the step takes 2,000 ns.
    assert log[begin + 1 :] == [
        (2_000, StepCompleted(2_000)),  # 102 tokens just fit: 2,020 ns.
        (4_020, StepCompleted(2_020)),
        (4_020, RequestRecomputed(R1)),
        (4_020, StartPrefill(R1, P0, 42)),
        (4_020, PrefillDone(R1, 42)),
        (4_020, Tick()),  # No room beside the 62 tokens of request 0: 1,620 ns.
        (5_640, StepCompleted(1_620)),  # 1,630 ns.
        (7_270, StepCompleted(1_630)),
        (7_270, RequestFinished(R0)),
        (7_270, Tick()),
        (7_270, Admit(R1, G0)),
        (7_270, DecodeStarted(R1)),  # Load 42: 1,420 ns.
        (8_690, StepCompleted(1_420)),
        (8_690, RequestFinished(R1)),
        (8_690, Tick()),
    ]


@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_requests_past_their_deadline_go_first(name: str) -> None:
    deadline_ns = 20_000
    pooled: dict[RequestId, int] = {}
    admitted_overdue = 0
    admissions: list[bool] = []  # Of one tick: whether each was overdue.
    for now_ns, item in record(name, DEPLOYMENTS["deadlines"], PACES["saturated"]):
        match item:
            case PrefillDone(request):
                pooled[request] = now_ns
            case Tick():
                admissions = []
            case Admit(request):
                admissions.append(now_ns - pooled.pop(request) >= deadline_ns)
                assert admissions == sorted(admissions, reverse=True)
                if not admissions[-1]:
                    assert all(now_ns - since < deadline_ns for since in pooled.values())
                admitted_overdue += admissions[-1]
            case _:
                pass
    assert 0 < admitted_overdue < len(PACES["saturated"].requests)


def test_time_without_work_counts_in_the_output_rate() -> None:
    # Each request is alone and takes 2,000 + 2,010 ns; the next one comes 100,000 ns later.
    requests = [TraceRequest(100_000 * i, 100, 2) for i in range(20)]
    deployment = replace(TWO_RANKS, ranks=1)
    predictor = NoPrediction()
    metrics = (
        Simulation(
            deployment,
            Workload(requests, history=[]),
            policy_of("fifo", deployment, predictor),
            predictor,
        )
        .run()
        .metrics()
    )
    # From the end of the second request to the arrival of the last, that is, 17 whole gaps.
    assert metrics.steps == 34
    assert metrics.output_tokens_per_s == pytest.approx(34 / (17 * 100_000e-9))
    assert metrics.tpot_ms_p50 == pytest.approx(2_010e-6)
    assert metrics.pool_wait_s_max == 0.0


class Listener(NoPrediction):
    """A predictor that records its observations."""

    def __init__(self) -> None:
        self.begun: dict[RequestId, RequestFeatures] = {}
        self.observed: list[tuple[RequestId, int]] = []

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        assert request not in self.begun
        self.begun[request] = features

    def observe(self, request: RequestId, output_tokens: int) -> None:
        assert request in self.begun
        self.observed.append((request, output_tokens))


@every_deployment
def test_the_predictor_learns_of_every_request_once_with_its_whole_output(
    deployment: SimulatedDeployment,
) -> None:
    workload = PACES["saturated"]
    listener = Listener()
    Simulation(deployment, workload, policy_of("br-h", deployment, listener), listener).run()
    assert sorted(listener.observed) == [
        (i, request.output_tokens) for i, request in enumerate(workload.requests)
    ]
    assert listener.begun == {
        i: features_of(request) for i, request in enumerate(workload.requests)
    }


HASH_THE_LOGS = """
import hashlib, random
from balanceroute.predictors import Survival
from balanceroute.proxy.core.policies import POLICIES, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

rng = random.Random(11)
requests = [TraceRequest(i * 2000, rng.randint(1, 60), rng.randint(1, 30)) for i in range(120)]
for backlog in (None, 7):
    for name in POLICIES:
        history = [TraceRequest(0, 1, tokens) for tokens in (5, 12, 30)]
        workload = Workload(requests, history, backlog=backlog)
        predictor = Survival(request.output_tokens for request in workload.history)
        parts = PolicyInputs(3, 4, PolicySettings(), random.Random("seed"), predictor)
        log = hashlib.sha256()
        Simulation(
            SimulatedDeployment(3, 4, 1_000, 10.0, rank_kv_tokens=150, prefill=PrefillModel(2, 500, 20.0)),
            workload,
            make_policy(name, parts),
            predictor,
            observer=lambda *seen: log.update(f"{seen!r}\\n".encode()),
        ).run()
        print(backlog, name, log.hexdigest())
"""


def test_the_same_seed_gives_the_same_log_in_every_process() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HASH_THE_LOGS],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2718")
    ]
    (first, first_error), (second, second_error) = [p.communicate() for p in processes]
    assert (first_error, second_error) == ("", "")
    assert first == second
    digests = [line.split()[-1] for line in first.splitlines()]
    # All requests here expect the same output, which makes llmd-token-load the same as jsq.
    assert len(digests) == 2 * len(POLICIES) == len(set(digests)) + 2


@pytest.mark.parametrize(
    ("name", "drawn"), [("random", True), ("power-of-two", True), ("jsq", False), ("br-h", False)]
)
def test_only_policies_that_draw_depend_on_the_seed(name: str, drawn: bool) -> None:
    workload = PACES["open loop"]
    first, same, other = (record(name, SMALL, workload, seed) for seed in ("a", "a", "b"))
    assert first == same
    assert (first != other) == drawn


def saturated_mooncake(name: str) -> RunMetrics:
    """Return the figures of the trace's head on four ranks that never run out of requests."""
    folder = files("balanceroute.traces") / "public"
    with as_file(folder / "mooncake_conversation.jsonl.gz") as path:
        requests = playable(read_trace(path))[:400]
    (workload,) = split(requests, segments=1, backlog=32)
    deployment = SimulatedDeployment(ranks=4, batch_limit=8)
    kind = FORECASTS["survival"]
    run = make_simulation(deployment, workload, name, PolicySettings(), kind, seed="0").run()
    return run.metrics()


def test_a_request_whose_lease_ends_in_the_pool_is_prefilled_again() -> None:
    # Prefills take 100 ns + 2 ns a token; a lease ends 1,000 ns after the start of its prefill.
    deployment = replace(
        TWO_RANKS, ranks=1, prefill=PrefillModel(2, 100, 2.0), lease_ns=1_000, lease_margin_ns=300
    )
    workload = Workload([TraceRequest(0, 100, 1), TraceRequest(50, 50, 1)], history=[])
    assert record("fifo", deployment, workload) == [
        (0, RequestArrived(R0, Ticket(100))),
        (0, StartPrefill(R0, P0, 100)),
        (50, RequestArrived(R1, Ticket(50))),
        (50, StartPrefill(R1, PrefillerId(1), 50)),
        (250, PrefillDone(R1, 50, 1_050)),
        (250, Tick()),
        (250, Admit(R1, G0)),
        (250, DecodeStarted(R1)),  # 1,500 ns.
        (300, PrefillDone(R0, 100, 1_000)),
        (300, Tick()),
        (700, Tick()),  # The lease counts as ended.
        (700, ReleasePrefill(R0, P0)),
        (700, StartPrefill(R0, P0, 100)),
        (1_000, PrefillDone(R0, 100, 1_700)),
        (1_000, Tick()),
        (1_400, Tick()),
        (1_400, ReleasePrefill(R0, P0)),
        (1_400, StartPrefill(R0, PrefillerId(1), 100)),
        (1_700, PrefillDone(R0, 100, 2_400)),
        (1_700, Tick()),
        (1_750, StepCompleted(1_500)),
        (1_750, RequestFinished(R1)),
        (1_750, Tick()),
        (1_750, Admit(R0, G0)),
        (1_750, DecodeStarted(R0)),  # 2,000 ns.
        (3_750, StepCompleted(2_000)),
        (3_750, RequestFinished(R0)),
        (3_750, Tick()),
    ]


def test_a_client_has_the_prefillers_token_once_and_no_deadline_ends_its_wait_for_a_rank() -> None:
    deployment = replace(
        TWO_RANKS, ranks=1, prefill=PrefillModel(2, 100, 2.0), lease_ns=1_000, lease_margin_ns=300
    )
    # The first one's prefill takes 300 ns, and it waits for its rank until 1,750 ns.
    requests = [TraceRequest(0, 100, 1, deadline_ns=400), TraceRequest(50, 50, 1)]
    workload = Workload(requests, history=[])
    ends = {
        early: [
            (at, item)
            for at, item in record("fifo", replace(deployment, early_tokens=early), workload)
            if isinstance(item, FirstToken | RequestFinished | Expire)
        ]
        for early in (False, True)
    }
    assert ends[False] == [(400, Expire(R0)), (1_750, RequestFinished(R1))]
    assert ends[True] == [
        *[(250, FirstToken(R1)), (300, FirstToken(R0))],
        *[(1_750, RequestFinished(R1)), (3_750, RequestFinished(R0))],
    ]


@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_long_prompts_leave_less_than_half_the_idle_time_of_jsq(name: str) -> None:
    ours, baseline = saturated_mooncake(name), saturated_mooncake("jsq")
    assert ours.idle_fraction < baseline.idle_fraction / 2
    assert ours.mean_imbalance_tokens < baseline.mean_imbalance_tokens / 2
    assert ours.output_tokens_per_s > baseline.output_tokens_per_s


def test_turns_that_a_trace_names_are_one_conversation_to_the_choice() -> None:
    """Their prompts have no blocks: the name alone keeps them together."""
    deployment = SimulatedDeployment(
        4, 16, step_base_ns=1_000_000, prefill=PrefillModel(8, 1_000_000, 1_000.0)
    )
    requests = [
        TraceRequest(number * 10_000_000, 100, 4, tenant=tenant, session=f"{number % 5}")
        for number in range(60)
        for tenant in ("a", "b")
    ]
    went: dict[tuple[str, int], set[PrefillerId]] = defaultdict(set)
    tickets: dict[RequestId, Ticket] = {}

    def observe(event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        if isinstance(event, RequestArrived):
            tickets[event.request] = event.ticket
        for action in actions:
            if isinstance(action, StartPrefill):
                ticket = tickets[action.request]
                went[ticket.tenant, ticket.session].add(action.prefiller)

    Simulation(
        deployment,
        Workload(requests, history=[]),
        policy_of("jsq", deployment, NoPrediction()),
        NoPrediction(),
        prefill_choice=lambda: PREFILL_CHOICES["sticky"](PrefillInputs(random.Random(0))),
        observer=observe,
    ).run()
    assert len(went) == 10
    assert all(len(prefillers) == 1 for prefillers in went.values())
    assert len(set.union(*went.values())) > 2


def test_several_simulations_can_share_a_clock() -> None:
    """One that is given its requests and played instant by instant measures what it would alone."""
    workload, deployment = PACES["open loop"], replace(SMALL, prefill=PREFILL)

    def made() -> Simulation:
        predictor = NoPrediction()
        return Simulation(deployment, workload, policy_of("br-0", deployment, predictor), predictor)

    alone, (one, other) = made(), (made(), made())
    alone.run()
    assert one.next_ns is None
    for number, time_ns in enumerate(workload.arrivals_ns()):
        one.offer(RequestId(number), time_ns)
        if number % 2:
            other.offer(RequestId(number), time_ns)
    while due := [each for each in (one, other) if each.next_ns is not None]:
        min(due, key=lambda each: each.next_ns or 0).advance()
    measured = replace(one.recorder.metrics(), dispatch_us_p50=0.0, dispatch_us_p99=0.0)
    same = replace(alone.recorder.metrics(), dispatch_us_p50=0.0, dispatch_us_p99=0.0)
    assert measured == same
    assert one.recorder.ended == len(workload.requests)
    assert other.recorder.ended == len(workload.requests) // 2

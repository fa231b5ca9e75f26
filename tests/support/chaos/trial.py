"""One run: the plan of a seed carried out, and everything looked at afterwards."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tests.support.chaos.administrator import Administrator
from tests.support.chaos.audit import (
    Census,
    audit_answers,
    audit_census,
    audit_decisions,
    audit_lapses,
    audit_leases,
    audit_metrics,
    audit_misreads,
    audit_pairs,
    audit_proxy,
    audit_rest,
    audit_retries,
    audit_vetoes,
    excused_names,
    take_census,
)
from tests.support.chaos.clients import Client, ClientPhase, Visit
from tests.support.chaos.expectation import TextOracle
from tests.support.chaos.judge import Judge, Judging
from tests.support.chaos.log_capture import LogCapture, violations_of
from tests.support.chaos.plan import ChaosPlan, draw_plan
from tests.support.chaos.poison import Poisoner
from tests.support.chaos.saboteur import Saboteur
from tests.support.chaos.traces import SpanCollector
from tests.support.chaos.world import Part, SchedulerStep, World
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import (
    Admit,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestId,
    StartPrefill,
    StepCompleted,
    Tick,
    TokensEmitted,
)

# What clients do in a plan that is out of the ordinary.

_BIG_BYTES = 20_000


def client_faults(plan: ChaosPlan) -> Counter[str]:
    """Count what clients do that is out of the ordinary, besides leaving."""
    counts: Counter[str] = Counter()
    for visit in plan.visits:
        counts["client: pipelines"] += visit.pipelined
        counts["client: speaks HTTP/1.0"] += visit.http_1_0
        counts["client: stops reading for a while"] += bool(visit.pauses)
        counts["client: has a bad wire"] += visit.link is not None and not visit.pauses
        counts["client: sends a big prompt"] += any(
            len(request.body) > _BIG_BYTES for request in visit.requests
        )
    names = Counter(request.request_id for request in plan.requests)
    counts["client: repeats a request id"] += sum(count - 1 for count in names.values())
    starts = Counter(visit.start_s for visit in plan.visits)
    counts["client: comes in a herd"] += sum(count for count in starts.values() if count > 1)
    return +counts


def is_shared(plan: ChaosPlan, name: str) -> bool:
    """Return whether several requests have a name."""
    return sum(request.request_id == name for request in plan.requests) > 1


# With all faults over, everything ends within this time. A request that fits on no rank takes longest:
# it is handed back 32 times, two seconds each.
LIVENESS_S = 120.0
# Then nothing may be held any more.
_QUIET_S = 2.0
# Connections are kept so long without use, on either side; then the last timers are gone.
_IDLE_S = 8.0
# The longest pause before spans are exported again.
_EXPORT_S = 16.0
_WARM_UP_S = 2.5
# An engine stops work for a client that left within this time.
_ABORT_S = 0.1
_STORM_SPAN_S = 0.5


@dataclass(slots=True)
class TrialReport:
    """What came of one run."""

    seed: int
    weather: str  # How much went wrong.
    requests: int
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # How the proxy's requests ended.
    endings: Counter[str] = field(default_factory=Counter)  # How the clients saw them end.
    # In which state requests were that clients left.
    cancelled: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)  # Retries and other sums.
    virtual_s: float = 0.0  # How long it took.
    violations: list[str] = field(default_factory=list)  # What must not be; empty if all is well.
    digest: str = ""
    lines: list[str] = field(default_factory=list)


def run_seed(seed: int, *, requests: int, near: bool = False) -> TrialReport:
    return run_plan(draw_plan(seed, requests=requests, near=near))


def run_plan(plan: ChaosPlan) -> TrialReport:
    return run_trial(plan, lambda loop, report, log: Trial(plan, loop, report, log))


def run_trial(
    plan: ChaosPlan, make: Callable[[VirtualLoop, TrialReport, LogCapture], "Trial"]
) -> TrialReport:
    """Carry out a run that `make` makes, in a loop of its own; return what came of it."""
    report = TrialReport(plan.seed, plan.weather.value, len(plan.requests))
    report.violations += violations_of(
        lambda log: run(lambda loop: make(loop, report, log).run(), seed=plan.seed)
    )
    return report


class Trial:
    """One run."""

    def __init__(
        self, plan: ChaosPlan, loop: VirtualLoop, report: TrialReport, log: LogCapture
    ) -> None:
        self._plan = plan
        self._loop = loop
        self._report = report
        self._rng = random.Random(f"trial {plan.seed}")
        self._world = self._make_world()
        log.journal = self._world.journal
        log.explains = self._world.explains
        self._saboteurs = [
            Saboteur(self._world, part, self._plan_of(part).injections)
            for part in self._world.parts
        ]
        parts = self._world.parts
        self._has_bad_wires = any(self._plan_of(part).has_bad_wires for part in parts)
        clean = not self._has_bad_wires
        self._poisoner = Poisoner(self._world, plan.poisons)
        self._administrator = Administrator(self._world, parts[0], plan.orders, clean=clean)
        self._clients: list[Client] = []
        self._by_id: dict[str, Client] = {}
        self._next_link: Link | None = None
        self._begin_s = 0.0

    def _make_world(self) -> World:
        plan = self._plan
        settings = replace(plan.world, engine_key=plan.spoils_keys, finds=plan.finds_engines)
        return World(settings, self._loop, self._rng, watch=self._saw)

    def _plan_of(self, part: Part) -> ChaosPlan:
        """Return what happens to the engines of a part, and what may come of it."""
        del part
        return self._plan

    def _make_judge(self, judges: Sequence[Judge]) -> Judging:
        """Return the judge of all answers, given the judges of the parts."""
        (judge,) = judges
        return judge

    def _begin_more(self) -> None:
        """Begin what is planned beside clients and faults."""
        return

    async def _end_more(self) -> None:
        """Wait until that is over."""
        return

    async def run(self) -> None:
        world, plan, report = self._world, self._plan, self._report
        await world.start_engines()
        known: dict[str, str] = {}
        for saboteur in self._saboteurs:
            await saboteur.start()
            known |= saboteur.front
        collector = SpanCollector(plan.collector) if plan.collector else None
        if collector is not None:
            await collector.start(refuses_s=plan.calm_s)
        await world.start(known)
        await asyncio.sleep(_WARM_UP_S)
        before = await take_census(world)
        self._begin_s = self._loop.time()
        for front in world.fronts:
            self._loop.network.rule("127.0.0.1", front.server.port, self._link)
        self._begin_faults()
        self._begin_more()
        self._report.faults += client_faults(plan)
        visits = [self._loop.create_task(self._visit(visit)) for visit in plan.visits]
        if plan.storm_s is not None:
            self._loop.call_at(self._begin_s + plan.storm_s, self._storm)
        if plan.tenants is not None:
            self._loop.call_at(self._begin_s + plan.tenants.reload_s, self._change_tenants)
        if plan.shutdown_s is not None:
            await self._shut_down(plan.shutdown_s)
        await self._until(plan.calm_s)
        for saboteur in self._saboteurs:
            await saboteur.stop()
        await self._administrator.stop()
        await self._poisoner.stop()
        await self._end_more()
        world.journal.write("calm")
        await self._await_end(visits)
        await asyncio.sleep(_QUIET_S)
        report.violations += audit_proxy(world)
        report.violations += audit_metrics(world.ended, world.plane.metrics.render())
        report.violations += audit_decisions(world)
        report.violations += audit_retries(plan, world)
        report.violations += audit_lapses(world.ended)
        report.violations += audit_pairs(plan, world)
        await self._look_at_the_rest(before)
        await self._judge_answers()
        await world.close()
        if collector is not None:
            await self._judge_traces(collector)
        for saboteur in self._saboteurs:
            saboteur.close()
        self._sum_up()

    def _begin_faults(self) -> None:
        for saboteur in self._saboteurs:
            saboteur.begin(self._begin_s)
        self._administrator.begin(self._begin_s)
        self._poisoner.begin()

    async def _shut_down(self, planned_s: float) -> None:
        await self._until(planned_s)
        self._world.journal.write("shutdown")
        await self._world.drain()
        self._administrator.closing = True
        await self._world.close_proxy()

    async def _judge_answers(self) -> None:
        """Compare what the clients got with what reference engines answer."""
        world, report = self._world, self._report
        oracles, judges = [], []
        for part in world.parts:
            plan = self._plan_of(part)
            oracle = TextOracle(plan.world.engines)
            await oracle.start()
            oracles.append(oracle)
            judges.append(Judge(plan, oracle, excused_names(plan, part, self._begin_s)))
        judge = self._make_judge(judges)
        report.violations += await audit_answers(judge, self._clients, world.ended, report.endings)
        for oracle in oracles:
            await oracle.close()

    async def _judge_traces(self, collector: SpanCollector) -> None:
        world, report = self._world, self._report
        await collector.close()
        report.faults["proxy: traces its requests"] += 1
        report.counters["spans"] += len(collector.spans)
        report.violations += collector.audit(world.ended, world.plane.metrics.render())

    async def _until(self, planned_s: float) -> None:
        await asyncio.sleep(max(0.0, self._begin_s + planned_s - self._loop.time()))

    async def _await_end(self, visits: list[asyncio.Task[None]]) -> None:
        """Wait until every client has what it is to get."""
        _, late = await asyncio.wait(visits, timeout=LIVENESS_S)
        if not late:
            return
        names = [
            r.request_id for c in self._clients if not c.over.is_set() for r in c.visit.requests
        ]
        self._report.violations.append(
            f"liveness: {len(late)} clients wait {LIVENESS_S:g} s after the last fault: {names}"
        )
        for task in late:
            task.cancel()
        await asyncio.wait(late)

    async def _look_at_the_rest(self, before: Census) -> None:
        """Check what takes time to go: leases, and unused connections."""
        world = self._world
        lease_s = max(self._plan_of(part).world.engines.lease_s for part in world.parts)
        await asyncio.sleep(lease_s + _IDLE_S + (_EXPORT_S if self._plan.collector else 0.0))
        self._report.violations += audit_rest(world)
        for part in world.parts:
            self._report.violations += audit_leases(self._plan_of(part), part)
            misreads = audit_misreads(self._plan_of(part), part, self._begin_s)
            self._report.violations += misreads
            self._report.violations += audit_vetoes(self._plan_of(part), part)
            if part.is_there:
                vetoes = part.deployment.driver.veto.vetoes.total()
                self._report.counters["ranks left out"] += vetoes
        if self._plan.shutdown_s is None:
            self._report.violations += await audit_census(world, before)

    # Clients.

    async def _visit(self, visit: Visit) -> None:
        await self._until(visit.start_s)
        client = Client(visit, on_left=self._left)
        self._clients.append(client)
        for request in visit.requests:
            self._by_id.setdefault(request.request_id, client)
        self._next_link = visit.link
        await client.run("127.0.0.1", self._world.port)

    def _link(self) -> Link:
        """Return the wire of the connection that is being made."""
        link, self._next_link = self._next_link, None
        return link or Link()

    def _storm(self) -> None:
        """Let half of the waiting clients give up."""
        here = [client for client in self._clients if not client.over.is_set()]
        self._report.faults["client: gives up in a storm"] += len(here) // 2
        for client in self._rng.sample(here, len(here) // 2):
            client.leave_soon(self._rng.uniform(0.0, _STORM_SPAN_S))

    def _left(self, client: Client) -> None:
        names = [request.request_id for request in client.visit.requests]
        self._world.journal.write("left", *names)
        departure = client.visit.departure
        if departure is not None:
            self._report.faults[f"client: leaves {departure.phase.value}"] += 1
        if not self._has_bad_wires and not is_shared(self._plan, names[0]):
            self._loop.call_later(_ABORT_S, self._check_aborted, names[0])

    def _check_aborted(self, name: str) -> None:
        """Look whether an engine still works for a client that left."""
        runs_s = self._loop.held_until_s + _ABORT_S
        if self._loop.time() < runs_s:  # The proxy could not notice yet that it left.
            self._loop.call_at(runs_s, self._check_aborted, name)
            return
        engines = [engine for part in self._world.parts for engine in part.fleet.engines]
        for engine in engines:
            for call in engine.exchanges.values():
                if call.request_id.endswith(f"cmpl-{name}"):
                    self._report.violations.append(
                        f"abort: {engine.name} works for {name}, whose client left "
                        f"{_ABORT_S:g} s ago"
                    )

    def _change_tenants(self) -> None:
        """Have the proxy read a bad file of tenants, and then another good one."""
        world, tenants = self._world, self._plan.tenants
        assert tenants is not None
        before = world.plane.deployment.tenancy.states()
        with suppress(ConfigError):
            world.change_tenants("[[tenant]]")
            self._report.violations.append("tenants: a bad file was taken")
        if before != world.plane.deployment.tenancy.states():
            self._report.violations.append("tenants: a bad file changed something")
        world.change_tenants(tenants.texts()[1])
        self._report.faults["proxy: the file of tenants changes"] += 1
        world.journal.write("tenants", *(one.name for one in tenants.files[1]))

    # The scheduler.

    def _saw(self, step: SchedulerStep) -> None:
        self._administrator.saw(step)
        event = step.event
        if isinstance(event, StepCompleted | TokensEmitted) or (
            isinstance(event, Tick) and not step.actions
        ):
            return
        self._world.journal.write(*(word for word in (step.group,) if word), event, *step.actions)
        if isinstance(event, RequestCancelled) and step.before is not None:
            state = step.before.name.lower()
            self._report.cancelled[f"{state}, started" if step.started else state] += 1
        if isinstance(event, RequestArrived):
            self._reached(step.group, event.request, ClientPhase.QUEUED)
        elif isinstance(event, PrefillDone):
            self._reached(step.group, event.request, ClientPhase.PREFILLED)
        for action in step.actions:
            if isinstance(action, StartPrefill):
                self._reached(step.group, action.request, ClientPhase.PREFILLING)
            elif isinstance(action, Admit):
                self._reached(step.group, action.request, ClientPhase.ADMITTED)
                self._look_for_doom(step.group, action)

    def _look_for_doom(self, group: str, admit: Admit) -> None:
        deployment = self._world.plane.deployments.get(group)
        if deployment is not None and (rank := deployment.instances.ranks[admit.rank]).doomed:
            self._report.violations.append(
                f"doomed: request {admit.request} was sent to {rank.name}, whose group has ended"
            )

    def _reached(self, group: str, number: RequestId, phase: ClientPhase) -> None:
        deployment = self._world.plane.deployments.get(group)
        session = None if deployment is None else deployment.driver.sessions.get(number)
        if session is not None:
            client = self._by_id.get(session.record.request_id)
            if client is not None:
                client.reached(phase)

    # The end.

    def _sum_up(self) -> None:
        world, report = self._world, self._report
        for saboteur in self._saboteurs:
            report.faults.update(saboteur.done)
        report.faults.update(self._poisoner.done)
        report.violations += self._poisoner.violations()
        report.faults.update(self._administrator.done)
        report.violations += self._administrator.promises.found
        counters = report.counters
        for record in world.ended:
            assert record.outcome is not None
            report.outcomes[record.outcome.value] += 1
            counters["retries"] += record.retries
            counters["recomputes"] += record.recomputes
            counters["local prefills"] += record.local_prefill
            counters["resumes"] += record.resumes
            counters["early first tokens"] += record.early_first_token
            counters["first token differences"] += record.first_token_differences
            counters["fall-backs"] += len(record.fall_backs)
            counters["lease lapses"] += record.lease_lapses
            counters["cheaper lapses"] += record.cheaper_lapses
            counters["output tokens"] += record.output_tokens
            world.journal.write("ended", record)
        for part in world.parts:
            stats = part.fleet.stats()
            for kind in ("leases", "misses"):
                for end, count in stats[kind].items():
                    counters[f"{kind} {end}"] += count
            counters["misreads"] += stats["misreads"]
            counters["mixed pairs"] += stats["mixed_pairs"]
        counters["decision faults"] += world.decision_faults.made.total()
        report.virtual_s = self._loop.time() - self._begin_s
        traffic = self._loop.network.traffic
        world.journal.write("network", traffic.bytes_sent, traffic.bytes_delivered)
        world.journal.write("callbacks", self._loop.callbacks_run)
        for violation in report.violations:
            world.journal.write("VIOLATION", violation)
        report.lines = world.journal.lines
        report.digest = world.journal.digest


# The sum of many runs, as a table.


@dataclass(slots=True)
class Summary:
    """The sum of many runs."""

    seeds: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    weathers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, report: TrialReport) -> None:
        self.seeds += 1
        self.requests += report.requests
        self.virtual_s += report.virtual_s
        self.weathers[report.weather] += 1
        self.faults += report.faults
        self.outcomes += report.outcomes
        self.endings += report.endings
        self.cancelled += report.cancelled
        self.counters += report.counters
        if report.violations:
            self.violations[report.seed] = report.violations

    def lines(self) -> Iterable[str]:
        yield f"seeds           {self.seeds}  ({_listed(self.weathers)})"
        yield f"requests        {self.requests}"
        yield f"virtual time    {self.virtual_s:.0f} s"
        yield f"faults          {sum(self.faults.values())}, of {len(self.faults)} kinds:"
        for kind, count in sorted(self.faults.items()):
            yield f"  {count:6}  {kind}"
        yield "outcomes, by the proxy's log:"
        for outcome, count in self.outcomes.most_common():
            yield f"  {count:6}  {outcome}"
        yield "endings, as the clients saw them:"
        for ending, count in self.endings.most_common():
            yield f"  {count:6}  {ending}"
        yield f"left by clients {_listed(self.cancelled)}"
        yield f"sums            {_listed(self.counters)}"
        yield f"violations      {sum(map(len, self.violations.values()))}"
        for seed, found in sorted(self.violations.items()):
            for violation in found:
                yield f"  seed {seed}: {violation}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))

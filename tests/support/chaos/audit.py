"""What must hold after a run: nothing is held, every request ended once, every client has a true end."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tests.support.chaos.clients import Client, ClientPhase
from tests.support.chaos.faults import Act, Injection
from tests.support.chaos.judge import COMPLETE, Judging, contradictions
from tests.support.chaos.plan import ChaosPlan, Weather, mixed_pairs_allowed
from tests.support.chaos.world import Part, World

from balanceroute.proxy.core.resources import MOST_LAPSES
from balanceroute.proxy.lab.emulate.leases import LeaseEnd, Misread
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.wire.http1.service import GAVE_WAY

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord


_CALL_BACK = "/v1/metaserver/"
# What the proxy's retry budget promises.
_RETRY_SHARE = 0.2
_RETRY_RESERVE = 10
_QUARANTINE_LINE = re.compile(r'balanceroute_quarantines_total\{role="([a-z]+)".*\} (\S+)')
_OUTCOME_LINE = re.compile(r'balanceroute_requests_total\{.*outcome="([a-z_]+)".*\} (\S+)')
_RETRY_LINE = re.compile(r'balanceroute_retries_total\{leg="([a-z_]+)".*\} (\S+)')
_PULL_FAILURE_LINE = re.compile(
    r'balanceroute_kv_transfer_failures_total\{.*reason="([a-z_]+)".*\} (\S+)'
)
_FAILURE_LINE = re.compile(r'balanceroute_decision_failures_total\{what="([a-z ]+)"\} (\S+)')
_WIRES = frozenset({Act.SILENCE, Act.LINK, Act.MEDDLE})
SLOWING = frozenset({"delay_s", "hang", "lease_s", "malformed_answer"})
"""Faults by which a KV cache may be gone when its engine asks for it."""


def audit_vetoes(plan: ChaosPlan, part: Part) -> list[str]:
    """Return the ranks that were left out for making no tokens though nothing was wrong with their engines.

    Where an administrator has engines wait, or requests kill them, that is not known.
    """
    if plan.orders or plan.poisons or not part.is_there:
        return []
    size = part.fleet.settings.dp_size  # What ends one rank of a group ends all.
    wrong = {one.engine // size for one in plan.injections if one.role is Role.DECODE}
    decoders = part.fleet.engines[part.fleet.settings.prefillers :]
    good = {engine.url for number, engine in enumerate(decoders) if number // size not in wrong}
    driver = part.deployment.driver
    return [
        f"{rank.name} was left out {driver.veto.vetoes[rank.id]} times, and its engine is well"
        for rank in driver.instances.ranks
        if driver.veto.vetoes[rank.id] and rank.target.url in good
    ]


def audit_deployment(part: Part) -> list[str]:
    """Return what a deployment still holds although no request is left."""
    deployment = part.deployment
    driver, scheduler = deployment.driver, deployment.driver.scheduler
    meter = scheduler.intake.meter
    found = []
    try:
        scheduler.check()
    except AssertionError as error:
        found.append(f"books: {error}")
    held: dict[str, object] = {
        "sessions": list(driver.sessions),
        "driver": not driver.idle,
        "requests of the scheduler": list(scheduler.requests),
        "unsettled": 0 if meter is None else meter.unsettled,
        "waiting": scheduler.waiting,
        "pool slots": scheduler.pool.slots,
        "loads": scheduler.ledger.loads.tolist(),
        "bound slots": scheduler.ledger.bound.tolist(),
        "held tokens of prefillers": scheduler.prefillers.held_tokens,
        "probes": scheduler.prefillers.prefills,
        "hand-offs": [prefiller.hand_offs for prefiller in deployment.instances.prefillers],
        "tenants": [
            one.name for one in deployment.tenancy.states() if one.in_flight or one.waiting
        ],
    }
    for name, value in held.items():
        if any(value) if isinstance(value, list) else value:
            found.append(f"held: {name}: {value}")
    return found


def audit_proxy(world: World) -> list[str]:
    """Return what the proxy still holds although no request is left, and what it did too late."""
    found = [wrong for part in world.parts if part.is_there for wrong in audit_deployment(part)]
    passed_on = [front.pass_through.in_flight for front in world.fronts]
    if any(passed_on):
        found.append(f"held: passed on: {passed_on}")
    return found + [
        f"lease: request {number} was sent to decode with a lease that had ended"
        for part in world.parts
        for number in part.observer.stale_admissions
    ]


def audit_leases(plan: ChaosPlan, part: Part) -> list[str]:
    """Return what decode ranks asked for although it was not there any more, through no fault."""
    misses = part.fleet.stats()["misses"]
    slow = _is_slow(plan)
    killed = bool(plan.poisons) or any(
        one.act is Act.KILL and one.role is Role.PREFILL for one in plan.injections
    )
    found = []
    if misses["expired"] and not slow:
        found.append(f"lease: {misses['expired']} pulls of what had expired")
    if misses["lost"] and not killed:
        found.append(f"lease: {misses['lost']} pulls of what had been lost")
    if (misses["pulled"] or misses["released"]) and plan.weather is Weather.CALM:
        found.append(f"lease: a KV cache was asked for twice: {misses}")
    return found


def _is_slow(plan: ChaosPlan) -> bool:
    """Return whether an engine may find a lease ended that held when its request was sent."""
    return any(map(_slows, plan.injections))


def _slows(fault: Injection) -> bool:
    return fault.act in _WIRES or not SLOWING.isdisjoint(fault.changes)


def is_excused(misread: Misread, faults: Sequence[Injection], begin_s: float) -> bool:
    """Return whether something that no proxy can see explains a misread.

    Its prefiller gave it a shorter lease than it says; or the engine that read had the request before the
    lease ended, and was slow to begin; or the wire to that engine or its prefiller was bad between the begin of
    the lease and the request's arrival. A proxy that was suspended is no excuse, however slow other engines were.

    Args:
        misread: The misread.
        faults: Those of the engines.
        begin_s: When the run began, on the event loop's clock.
    """
    if misread.again:  # The misread that left it in the prefix cache is judged itself.
        return True
    lease = misread.lease
    if lease is None or lease.end is not LeaseEnd.EXPIRED:
        return False
    if lease.short or misread.arrived_s <= lease.ended_s:
        return True
    return any(
        one.act in _WIRES
        and f"{one.role.value}/{one.engine}" in (misread.engine, misread.prefiller)
        and begin_s + one.start_s <= misread.arrived_s
        and lease.granted_s <= begin_s + one.end_s
        for one in faults
    )


def audit_misreads(plan: ChaosPlan, part: Part, begin_s: float) -> list[str]:
    """Return the requests answered from another prompt's KV cache, or that killed an engine by their length.

    There may be none, whatever goes wrong; `begin_s` as in `is_excused`.
    """
    killers = [f"overrun: {name} killed a decode engine" for name in part.fleet.overruns]
    return killers + [
        f"misread: {one.request_id} was answered with another prompt's KV cache: its own lease was "
        f"{'held' if one.end is None else one.end.value}"
        for one in part.fleet.misreads
        if not is_excused(one, plan.injections, begin_s)
    ]


def audit_metrics(ended: "Sequence[RequestRecord]", page: bytes) -> list[str]:
    """Return how the proxy's page of metrics differs from its log."""
    logged = Counter(record.outcome.value for record in ended if record.outcome is not None)
    counted = _counted(page, _OUTCOME_LINE)
    return [] if logged == counted else [f"metrics: {dict(counted)}, the log has {dict(logged)}"]


def audit_decisions(world: World) -> list[str]:
    """Return how the failed decisions that the proxy counted differ from those that were made."""
    made, counted = (
        world.decision_faults.made,
        _counted(world.plane.metrics.render(), _FAILURE_LINE),
    )
    return [] if made == counted else [f"decisions: {dict(counted)} failed, not {dict(made)}"]


def audit_pairs(plan: ChaosPlan, world: World) -> list[str]:
    """Return whether engines of two versions were paired although nothing hid their versions."""
    mixed = world.fleet.stats()["mixed_pairs"]
    if not mixed or mixed_pairs_allowed(plan.injections):
        return []
    return [f"pairs: {mixed} pulls from an engine of another version"]


def _counted(page: bytes, pattern: re.Pattern[str]) -> Counter[str]:
    """Return the samples of a metric by the label that `pattern` finds."""
    counted: Counter[str] = Counter()
    for line in page.decode().splitlines():
        found = pattern.fullmatch(line)
        if found is not None:
            counted[found[1]] += int(float(found[2]))
    return counted


def audit_retries(plan: ChaosPlan, world: World) -> list[str]:
    """Return whether legs were sent again more often than they may be."""
    if plan.weather is Weather.CALM:
        # Where no engine may do all of it, an answer that ends with its first token is tried again.
        retries = sum(record.retries for record in world.ended if record.reason != COMPLETE)
        return [f"retries: {retries} though all was well"] if retries else []
    # A retry without a failure does not count here: an order, or an engine that closed a connection, caused it.
    page = world.plane.metrics.render()
    retries = _counted(page, _RETRY_LINE).total()
    # Free of the budget is one only where a KV cache could not be pulled, and what an engine leaves that is
    # down: as many as a rank has slots, or so. Each group has a budget.
    free = _counted(page, _PULL_FAILURE_LINE).total()
    free += _counted(page, _QUARANTINE_LINE).total() * int(str(plan.world.flags["batch"]))
    reserve = _RETRY_RESERVE * world.deployments_made
    attempts = sum(1 + len(record.fall_backs) for record in world.ended)
    allowed = reserve + _RETRY_SHARE * attempts + free
    return [f"retries: {retries} of {len(world.ended)} requests"] if retries > allowed else []


def audit_lapses(ended: "Sequence[RequestRecord]") -> list[str]:
    """Return the requests whose leases were left to end too often: a wait has to have an end."""
    return [
        f"{record.request_id}: {record.cheaper_lapses} of its leases were left to end"
        for record in ended
        # After a rank took it, a request waits as if it had just arrived.
        if record.cheaper_lapses > MOST_LAPSES * (1 + record.recomputes + record.retries)
        or record.cheaper_lapses > record.lease_lapses
    ]


def audit_rest(world: World) -> list[str]:
    """Return what is left when leases have ended and unused connections have closed."""
    fleets = [part.fleet for part in world.parts]
    found = [f"engines: not idle: {one.stats()}" for one in fleets if not one.idle]
    found += world.machine.wrongs
    if world.parts[0].is_there and not world.parts[0].deployment.driver.draining:
        found += world.machine.disk.audit(world.parts[0].deployment.policy)
    for front in world.fronts:
        if front.server.connections:
            found.append(f"connections: {front.server.connections} of clients are open")
        for url, endpoint in front.endpoints.items():
            if endpoint.connections != endpoint.idle:
                busy = endpoint.connections - endpoint.idle
                found.append(f"connections: {busy} to {url} are in use")
    return found


def excused_names(plan: ChaosPlan, part: Part, begin_s: float) -> set[str]:
    """Return the requests that read another prompt's KV cache because their engine was slow."""
    faults = plan.injections
    misreads = [one for one in part.fleet.misreads if is_excused(one, faults, begin_s)]
    # What an engine puts before a name: `cmpl-`, `chatcmpl-`, `generate-tokens-`.
    return {
        one.request_id.removeprefix("generate-tokens-").removeprefix("chat").removeprefix("cmpl-")
        for one in misreads
    }


def may_be_killed(logged: "Sequence[RequestRecord]", *, sent: int) -> bool:
    """Return whether the process of a request that was `sent` so often by its id may have been killed.

    The log then lacks its events and its seed; and of several that repeat an id it does not show which one
    was killed.
    """
    return len(logged) < sent or any(one.outcome is Outcome.INTERNAL_ERROR for one in logged)


def _ends_before_its_body(record: "RequestRecord") -> bool:
    """Return whether the proxy left the body unread: a bad key, a tenant's limits, or a connection that gave way."""
    return record.status == 401 or bool(record.refused_for) or record.reason == GAVE_WAY.message


async def audit_answers(
    judge: Judging,
    clients: Sequence[Client],
    ended: "Sequence[RequestRecord]",
    endings: Counter[str],
) -> list[str]:
    """Return the faults of the clients' answers, and of the proxy's log of them."""
    records: dict[str, list[RequestRecord]] = {}
    for record in ended:
        if record.endpoint.startswith(_CALL_BACK):
            continue  # An engine's, for a transfer that is over.
        records.setdefault(record.request_id, []).append(record)
    sent = [request for client in clients for request in client.visit.requests[: client.sent]]
    names = Counter(request.request_id for request in sent)
    found = []
    for client in clients:
        answers = zip(client.visit.requests, client.answers, strict=True)
        for request, received in islice(answers, client.sent):
            logged = records.get(request.request_id, [])
            killed = may_be_killed(logged, sent=names[request.request_id])
            reworded = killed or any(
                one.recomputes
                or one.resumes
                or one.first_token_differences
                or (one.early_first_token and judge.merges)
                for one in logged
            )
            # A client that repeats an id may have the answer to either seed.
            verdicts = [
                await judge.judge(client, request, received, reworded=reworded, seed=seed)
                for seed in dict.fromkeys(one.seed for one in logged) or (None,)
            ]
            verdict = next((one for one in verdicts if not one.wrong), verdicts[0])
            if killed and judge.may_draw_seed(request):
                verdict.wrong.clear()
            endings[verdict.ending] += 1
            found += [f"{request.request_id}: {wrong}" for wrong in verdict.wrong]
            if names[request.request_id] == 1:
                departure = client.visit.departure
                sent_in_part = departure is not None and departure.phase is ClientPhase.SENDING
                if logged and sent_in_part and not any(map(_ends_before_its_body, logged)):
                    found.append(f"{request.request_id}: it was logged, and never sent whole")
                wrongs = contradictions(logged, received, verdict)
                if logged and judge.tenants is not None and received.status:
                    wrongs += judge.tenants.contradictions(request, logged[0], received)
                found += [f"{request.request_id}: {wrong}" for wrong in wrongs]
    strangers = records.keys() - names.keys()
    found += [f"log: {name} was never sent" for name in sorted(strangers)]
    found += [
        f"log: {len(logged)} requests {name} ended, {names[name]} were sent"
        for name, logged in records.items()
        if len(logged) > names[name]
    ]
    return found


# The tasks and timers that there are when little happens, and whose they are.

_SAMPLES = 20
_CENSUSES = 20
# No part of the intervals of the proxy: what wakes up in the moment of a sample has no timer.
_GAP_S = 0.0517


@dataclass(frozen=True, slots=True)
class Census:
    """How many there are of each kind."""

    tasks: Counter[str]
    timers: Counter[str]

    def beyond(self, before: "Census") -> list[str]:
        """Return what is more than before."""
        found = []
        for name in ("tasks", "timers"):
            was, there_are = getattr(before, name), getattr(self, name)
            if there_are.total() > was.total():
                more = ", ".join(f"{one} x {count}" for one, count in (there_are - was).items())
                found.append(
                    f"leak: {there_are.total()} {name}, there were {was.total()} before the first "
                    f"request; more of: {more}"
                )
        return found


async def take_census(world: "World") -> Census:
    """Count tasks and timers a few times; the least counts, for the proxy probes its engines."""
    tasks: list[Counter[str]] = []
    timers: list[Counter[str]] = []
    for _ in range(_SAMPLES):
        await asyncio.sleep(_GAP_S)
        pending = world.loop.pending_tasks()
        tasks.append(Counter(map(_of_task, pending)))
        futures = (getattr(task, "_fut_waiter", None) for task in pending)
        waiting = {
            id(one): task for one, task in zip(futures, pending, strict=True) if one is not None
        }
        timers.append(Counter(_of_timer(one, waiting) for one in world.loop.timers))
    return Census(min(tasks, key=Counter.total), min(timers, key=Counter.total))


async def audit_census(world: "World", before: Census) -> list[str]:
    """Return of what there is more than before.

    A probe that was under way before makes that count too low, so it is counted again until one is.
    """
    found: list[str] = []
    for _ in range(_CENSUSES):
        found = (await take_census(world)).beyond(before)
        if not found:
            break
    return found


def _of_task(task: "asyncio.Task[object]") -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def _of_timer(handle: asyncio.TimerHandle, waiting: Mapping[int, asyncio.Task[object]]) -> str:
    """Return what a timer calls; of one that wakes a task, the task's coroutine.

    Args:
        handle: The timer.
        waiting: The tasks that wait, by the address of their futures.
    """
    callback: object = getattr(handle, "_callback", None)
    # A sleep sets its future's result; a time-out belongs to its task.
    woken = (waiting.get(id(one)) for one in getattr(handle, "_args", None) or ())
    owner = getattr(getattr(callback, "__self__", None), "_task", None)
    task = next(filter(None, woken), owner)
    if isinstance(task, asyncio.Task):
        return _of_task(task)
    while isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback))

"""Taking a snapshot of the running proxy."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from balanceroute import __version__
from balanceroute.proxy.core.admission import Decision
from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.policies import skill_share
from balanceroute.proxy.core.resources import lease_used
from balanceroute.proxy.core.subset import imbalance_tokens
from balanceroute.proxy.live.control.roster import Roster
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.health import NO_QUARANTINE, Quarantine
from balanceroute.proxy.live.engines.instances import Rank, Status, Target
from balanceroute.proxy.live.scheduling.driver import Driver
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.live.telemetry.registry import Histogram
from balanceroute.proxy.live.telemetry.request_log import fields_of
from balanceroute.proxy.live.telemetry.request_metrics import Counts
from balanceroute.proxy.live.telemetry.snapshot import (
    BudgetState,
    EngineState,
    Held,
    LimitsState,
    PredictorScores,
    PrefillerState,
    RankState,
    RequestState,
    Snapshot,
    TenantState,
)
from balanceroute.proxy.wire.http1.pump import Pump
from balanceroute.proxy.wire.http1.server import Server

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.aliases import AliasConfig


def take_snapshot(
    driver: Driver,
    *,
    group: str,
    policy: str,
    predictor: str,
    predictors: list[PredictorScores],
    rows_judged: int,
    held: Held,
    quarantines: Mapping[Target, Quarantine],
    tenants: list[TenantState],
    gauges: Mapping[Target, EngineGauges],
    limits: LimitsState,
    requests: bool,
) -> Snapshot:
    """Return the state of a deployment; with each live request if asked."""
    scheduler = driver.scheduler
    states = [request.state for request in scheduler.requests.values()]
    loads = scheduler.ranks.loads_at_mean_speed(scheduler.ledger, scheduler.config)
    serving, now_s = driver.decisions.at_barrier, driver.context.clock()
    progress, memory = driver.decisions.progress, scheduler.intake.memory
    return Snapshot(
        group=group,
        policy=policy,
        predictor=predictor,
        ranks=_ranks(driver, quarantines, serving),
        prefillers=_prefillers(driver, quarantines),
        queued=states.count(LifecycleState.QUEUED),
        prefilling=states.count(LifecycleState.PREFILLING),
        pooled=len(scheduler.pool),
        decoding=states.count(LifecycleState.DECODING),
        pool_limit=scheduler.leases.pool_limit,
        budget=_budget(driver),
        oldest_pooled_s=_oldest_pooled_s(driver, now_s),
        lease_used=lease_used(scheduler.pool, scheduler.config, round(now_s * 1e9)),
        imbalance_tokens=imbalance_tokens(loads[serving]) if serving else 0,
        steps=progress.steps.steps,
        step_s=progress.steps.step_s,
        idle_tokens=progress.barrier.idle_tokens,
        capacity_tokens=progress.barrier.capacity_tokens,
        still_ranks=driver.veto.still_ranks,
        standstills=driver.veto.standstills,
        idle_ratio=progress.barrier.share(now_s),
        idle_ratios=progress.barrier.shares(now_s),
        draining=driver.draining,
        rows_judged=rows_judged,
        predictors=predictors,
        tenants=tenants,
        engines=_engines(gauges),
        limits=limits,
        kept_tokens=0 if memory is None else memory.kept_tokens,
        skill_share=skill_share(scheduler.policy),
        requests=_requests(driver, now_s) if requests else [],
        **{one.name: getattr(held, one.name) for one in fields(held)},
    )


def held_by(server: Server, engine_connections: int, pump: Pump | None) -> Held:
    """Return what a public listener holds, and what the native library has done for it."""
    return Held(
        client_connections=server.connections,
        engine_connections=engine_connections,
        rejected_connections=server.limit.rejected,
        evicted_connections=server.limit.evicted,
        body_bytes=server.bodies.used,
        rejected_bodies=server.bodies.rejected,
        pumped_streams=0 if pump is None else pump.streams,
        pumped_events=0 if pump is None else pump.events,
        pumped_bodies=0 if pump is None else pump.bodies,
        pumped_returns={} if pump is None else pump.returns.copy(),
    )


def instance_rows(
    roster: Roster, quarantines: Mapping[Target, Quarantine]
) -> list[dict[str, object]]:
    """Return one row per instance, with its last quarantine and the requests in flight on it.

    `still` names the ranks that make no tokens while other ranks do. `unfit` says why it is paired with no
    engine of the other role, where that is so, and `doubts` what speaks against its place.
    """
    rows: list[dict[str, object]] = []
    counts = roster.in_flight()
    for target in roster.targets():
        parts = roster.instances.of(target)
        live = [part for part in parts if part.status is not Status.REMOVED]
        in_flight = counts[target]
        status = live[0].status
        rows.append(
            {
                "role": target.role.value,
                "url": target.url,
                "status": status.value,
                **asdict(quarantines.get(target, NO_QUARANTINE)),
                "parts": [part.name for part in live],
                "still": [part.name for part in live if isinstance(part, Rank) and part.still],
                "in_flight": in_flight,
                "drained": status is Status.DRAINING and in_flight == 0,
                **roster.pairing.state_of(target),
            }
        )
    return rows


def ended_rows(ended: list[RequestRecord]) -> list[dict[str, object]]:
    """Return a row per request that ended, as the request log has it, and its state."""
    return [fields_of(record, record.ended_ns) | {"state": "ended"} for record in ended]


def request_rows(driver: Driver, request_id: str) -> list[dict[str, object]]:
    """Return a row per live request with an id, as the request log has it, and its state."""
    now_ns, scheduler = round(driver.context.clock() * 1e9), driver.scheduler
    rows = []
    for number, session in driver.sessions.items():
        names = session.record.request_id, session.record.client_request_id
        if request_id in names and number in scheduler.requests:
            state = scheduler.requests[number].state.name.lower()
            rows.append(fields_of(session.record, now_ns) | {"state": state})
    return rows


def _ranks(
    driver: Driver, quarantines: Mapping[Target, Quarantine], at_barrier: Sequence[RankId]
) -> list[RankState]:
    scheduler = driver.scheduler
    ledger, free_slots = scheduler.ledger, scheduler.free_slots()
    speeds, foreign = scheduler.ranks.speeds(scheduler.config), scheduler.ranks.foreign
    blocks, counted = driver.instances.rank_blocks, frozenset(at_barrier)
    return [
        RankState(
            rank=rank.id,
            name=rank.name,
            open=rank.open,
            status=rank.state,
            kv_tokens=int(ledger.loads[rank.id]),
            bound=int(ledger.bound[rank.id]),
            started=int(ledger.started[rank.id]),
            free_slots=int(free_slots[rank.id]),
            others=0 if foreign is None else int(foreign.slots[rank.id]),
            speed=1.0 if speeds is None else float(speeds[rank.id]),
            quarantine=quarantines.get(rank.target, NO_QUARANTINE),
            url=rank.target.url,
            doubts=rank.doubts,
            cached_blocks=None if blocks is None else blocks.blocks(rank.id),
            vetoes=driver.veto.vetoes[rank.id],
            at_barrier=rank.id in counted,
            dp_group=driver.instances.groups.of(rank),
        )
        for rank in driver.instances.ranks
    ]


def _prefillers(driver: Driver, quarantines: Mapping[Target, Quarantine]) -> list[PrefillerState]:
    budgets, blocks = driver.scheduler.prefillers, driver.instances.engine_blocks
    return [
        PrefillerState(
            prefiller=prefiller.id,
            name=prefiller.name,
            open=prefiller.open,
            status=prefiller.status.value,
            probes=budgets.prefills[prefiller.id],
            direct=budgets.direct[prefiller.id],
            held_tokens=budgets.held_tokens[prefiller.id],
            utilisation=prefiller.utilisation,
            quarantine=quarantines.get(prefiller.target, NO_QUARANTINE),
            doubts=prefiller.doubts,
            cached_blocks=None if blocks is None else blocks.blocks(prefiller.id),
        )
        for prefiller in driver.instances.prefillers
    ]


def _engines(gauges: Mapping[Target, EngineGauges]) -> list[EngineState]:
    return [
        EngineState(target.role.value, target.url, one.waiting, one.running, one.kv_cache_usage)
        for target, one in gauges.items()
    ]


def _requests(driver: Driver, now_s: float) -> list[RequestState]:
    rows = []
    for number, session in driver.sessions.items():
        if number not in driver.scheduler.requests:
            continue  # A relay is about to say that it has ended.
        record = session.record
        rows.append(
            RequestState(
                number=number,
                request_id=record.request_id,
                state=driver.scheduler.requests[number].state.name.lower(),
                prompt_tokens=driver.scheduler.requests[number].prompt_tokens,
                emitted_tokens=session.emitted_tokens,
                age_s=round(now_s - record.arrived_ns / 1e9, 3),
                prefiller=record.prefiller,
                rank=record.rank,
            )
        )
    return rows


def _budget(driver: Driver) -> BudgetState | None:
    scheduler = driver.scheduler
    budget = scheduler.intake.budget
    if budget is None:
        return None
    ttft_ns, step_ns = budget.ttft_ns, budget.tpot_ns
    return BudgetState(
        limit_per_rank=budget.cap,
        in_flight=scheduler.prefillers.prefilling + len(scheduler.pool) + len(scheduler.ledger),
        ttft_p99_s=None if ttft_ns is None else ttft_ns / 1e9,
        step_p95_s=None if step_ns is None else step_ns / 1e9,
        decisions={decision.value: budget.decisions[decision] for decision in Decision},
        ttft_target_s=budget.ttft_target_ns / 1e9,
    )


def _oldest_pooled_s(driver: Driver, now_s: float) -> float:
    oldest = driver.scheduler.pool.first(1)
    if not oldest:
        return 0.0
    pooled_ns = driver.scheduler.requests[oldest[0].request].pooled_ns
    assert pooled_ns is not None
    return max(0.0, now_s - pooled_ns / 1e9)


# What the admin page shows, made from a snapshot every 0.8 s while a page is open.


_SHOWN_OF_ALL = (
    *("policy", "predictor", "draining", "queued", "prefilling", "pooled", "decoding"),
    *("pool_limit", "oldest_pooled_s", "step_s", "still_ranks", "idle_ratio", "idle_ratios"),
    "engines",
)
_SHOWN_OF_RANKS = ("name", "url", "status", "kv_tokens", "bound", "free_slots", "at_barrier")
_SHOWN_OF_PREFILLERS = ("name", "status", "held_tokens")
MAX_SHOWN_TENANTS = 64
"""On the page: those that have most in flight."""


def view_of_all(
    states: Mapping[str, Snapshot],
    metrics: Metrics,
    drivers: Mapping[str, Driver],
    aliases: "Sequence[AliasConfig]",
    *,
    forbidden: str,
    scaling: Mapping[str, Mapping[str, object]],
) -> dict[str, object]:
    """Return the view of all groups, or of the only deployment, whose name is empty."""
    latencies = metrics.latencies()
    views = {
        name: view_of(
            state,
            latencies,
            metrics.counts(name),
            ready=drivers[name].ready,
            forbidden=forbidden,
            running_tokens=sum(one.emitted_tokens for one in drivers[name].sessions.values()),
            scaling=scaling.get(name),
        )
        for name, state in states.items()
    }
    tenants = next(iter(states.values())).tenants  # The same in each group.
    return {
        **view_of_tenants(tenants, metrics.tenants.counts()),
        "aliases": [
            {
                "name": alias.name,
                "chooser": alias.chooser,
                "groups": alias.groups,
                "answers": metrics.aliases.answers(alias.name),
            }
            for alias in aliases
        ],
        **views.get("", {"groups": views}),
    }


def view_of(
    state: Snapshot,
    latencies: Mapping[str, Histogram],
    counts: Counts,
    *,
    ready: bool,
    forbidden: str,
    running_tokens: int = 0,
    scaling: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the view of one deployment, which `msgspec` can write."""
    assert state.limits is not None
    budget = state.budget
    return {
        "version": __version__,
        **_row(state, _SHOWN_OF_ALL),
        "ready": ready,
        "forbidden": forbidden,
        "batch": state.limits.batch,
        "queue_limit": state.limits.queue,
        "inflight_limit": None if budget is None else budget.limit_per_rank,
        "outcomes": counts.outcomes,
        "output_tokens": counts.output_tokens + running_tokens,
        "scaling": scaling,
        "ranks": [
            _row(one, _SHOWN_OF_RANKS) | _why(one)
            for one in state.ranks
            if one.status != Status.REMOVED.value
        ],
        "prefillers": [
            _row(one, _SHOWN_OF_PREFILLERS) | _why(one) | {"requests": one.probes + one.direct}
            for one in state.prefillers
            if one.status != Status.REMOVED.value
        ],
        "latencies": {
            name: {"bounds": one.bounds, "counts": one.counted()[0]}
            for name, one in latencies.items()
        },
    }


def _row(one: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(one, name) for name in names}


def _why(one: RankState | PrefillerState) -> dict[str, object]:
    """Return what speaks against an engine, or else why it was left out the last time."""
    reason = "; ".join(one.doubts) or one.quarantine.reason
    return {"why": reason, "doubted": bool(one.doubts)}


def view_of_tenants(
    tenants: Sequence[TenantState], counts: Mapping[str, Counts]
) -> dict[str, object]:
    """Return the view of the tenants that have most in flight, in the order of their file, and how many there are."""
    places = heapq.nlargest(
        MAX_SHOWN_TENANTS, range(len(tenants)), key=lambda place: tenants[place].in_flight
    )
    shown = [tenants[place] for place in sorted(places)]
    nothing = Counts({}, 0)
    return {
        "tenant_count": len(tenants),
        "tenants": [
            {
                "name": one.name,
                "share": one.share,
                "in_flight": one.in_flight,
                "waiting": one.waiting,
                "concurrency": one.limits.concurrency,
                "queue_limit": one.limits.queue_limit,
                "per_minute": {
                    name: rate.per_minute
                    for name, rate in (
                        ("requests", one.limits.requests),
                        ("tokens", one.limits.tokens),
                    )
                    if rate is not None
                },
                "outcomes": counts.get(one.name, nothing).outcomes,
                "output_tokens": counts.get(one.name, nothing).output_tokens,
            }
            for one in shown
        ],
    }

"""What happens in one run, all of it drawn from the seed before the run begins."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tests.support.chaos.clients import ClientPhase, Departure, Leaving, Visit
from tests.support.chaos.faults import (
    Act,
    Injection,
    correlated,
    draw_clocks,
    draw_endings,
    draw_freezes,
    draw_holders,
    draw_injections,
    draw_lapses,
    draw_machine,
    draw_suspensions,
)
from tests.support.chaos.orders import ADMIN, Order, draw_orders, ordered_drains
from tests.support.chaos.poison import (
    Poison,
    draw_poisons,
    with_repetitions,
    without_hiding,
)
from tests.support.chaos.requests import (
    ClientRequest,
    RequestMix,
    draw_request,
    with_beginning,
)
from tests.support.chaos.tenants import TenantPlan, draw_tenants, with_keys
from tests.support.chaos.traces import FLAGS as TRACING
from tests.support.chaos.traces import draw_collector
from tests.support.chaos.world import WorldSettings
from tests.support.virtual.addresses import Link

from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.core.prefill import PREFILL_CHOICES
from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings, Preemption
from balanceroute.topologies import CONNECTORS

# Runs in which all that decides by where a KV cache is, or may go, is on.
#
# Prefillers are chosen by their prefix caches, ranks compute prompts, turns return to ranks,
# conversations have names and common beginnings, and the engines are of two versions, some of
# which change with a restart.

VERSIONS = ("0.32.0", "0.33.0")
_TALKS = 8
# Of the beginning that all turns of a conversation have, and of what each adds. The proxy knows beginnings
# by pieces of 2 KiB of text.
_WORDS, _FURTHER_WORDS, _WORD_BYTES = 20, 8, 150


def with_near_engines(engines: EmulationSettings) -> EmulationSettings:
    """Return a fleet of which every role has two engines, and whose ranks can compute prompts."""
    if not CONNECTORS[engines.connector].ranks_prefill:
        engines = replace(engines, connector="nixl", preemption=Preemption.INTERNAL)
    return replace(engines, prefillers=max(2, engines.prefillers), ranks=max(2, engines.ranks))


def with_locality(
    seed: int, engines: EmulationSettings, flags: dict[str, object]
) -> EmulationSettings:
    """Return the engines with prefix caches and versions; add the proxy's flags."""
    rng = random.Random(f"locality {seed}")
    flags |= {
        "prefill_choice": "prefix-aware",
        "local_prefill_tokens": rng.choice([40, 300, 100_000]),
        "prefix_affinity": random.Random(f"near affinity {seed}").choice([0.0, 1.0, 30.0]),
    }
    return replace(
        engines,
        prefix_cache_tokens=engines.prefix_cache_tokens or rng.choice([500, 10_000]),
        prompt_tokens_details=True,
        engine_versions=_versions(rng, engines),
    )


def _versions(rng: random.Random, engines: EmulationSettings) -> dict[str, str]:
    """Return the versions of all engines. The first of each role fit, and some engine is of the other."""
    decoders = engines.ranks if engines.dp_mode is DpMode.PORTS else 1
    names = [f"prefill/{number}" for number in range(1, engines.prefillers)]
    names += [f"decode/{number}" for number in range(1, decoders)]
    drawn = {name: rng.choice(VERSIONS) for name in names}
    return drawn | {rng.choice(names): VERSIONS[1]}


def with_updates(seed: int, injections: Sequence[Injection]) -> list[Injection]:
    """Return the faults, where engines come back from some restarts with another version.

    The first engine of each role keeps its own, so that some pair fits again in the end.
    """
    rng = random.Random(f"updates {seed}")
    return [
        replace(one, version=rng.choice(("", *VERSIONS)))
        if one.act is Act.KILL and one.engine > 0
        else one
        for one in injections
    ]


def with_talks(seed: int, visits: Sequence[Visit]) -> list[Visit]:
    """Return what clients do, each request as a turn of one of a few conversations."""

    def turn(request: ClientRequest) -> ClientRequest:
        # A client that sends the same twice sends the same here.
        rng = random.Random(b"%d %b" % (seed, request.body))
        talk = rng.randrange(_TALKS)
        words = _WORDS + _FURTHER_WORDS * rng.randrange(4)
        text = " ".join(f"talk{talk}-{word}-".ljust(_WORD_BYTES, "x") for word in range(words))
        return with_beginning(request, text, session=f"talk {talk}" if rng.random() < 0.7 else "")

    return [replace(visit, requests=tuple(map(turn, visit.requests))) for visit in visits]


def mixed_pairs_allowed(injections: Sequence[Injection]) -> bool:
    """Return whether a fault may keep the proxy from knowing an engine's version in time."""
    harmless = (Act.POLICY, Act.DECISION, Act.DRAIN)
    return any(one.act not in harmless for one in injections)


MODEL = "emulated"
_POLICIES = tuple(POLICIES)
_CONNECTOR_WEIGHTS = {
    "nixl": 50,
    "mooncake": 15,
    "mooncake-ascend": 14,
    "mooncake-hybrid": 6,
    "mooncake-layerwise": 15,
}
_BATCH_LIMITS = (1, 2, 4, 8)
# How many of the fleets whose ranks are servers of their own have groups, and the ranks of each.
_DP_SHARE, _DP_SIZE = 0.35, 2
_TIMEOUTS = (
    "prefill_timeout_s",
    "first_token_timeout_s",
    "idle_stream_timeout_s",
    "answer_timeout_s",
)
# Engines of a role, if requests kill them: else none is left that might die.
_MOST_TO_DIE = 4
# Of a request, on average.
_SEQUENCES = 1.4


class Weather(Enum):
    """How much goes wrong."""

    CALM = "calm"  # Nothing but clients that leave.
    FAULTS = "faults"
    STORM = "storm"  # Many at a time, an outage of half the engines, and clients that give up.
    SHUTDOWN = "shutdown"  # The proxy gets a signal to stop in the middle of it.


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """One run."""

    seed: int  # Decides everything.
    weather: Weather  # How much goes wrong.
    world: WorldSettings
    visits: tuple[Visit, ...]  # The clients' connections, in the order of their coming.
    injections: tuple[Injection, ...]  # The faults, in the order of their beginnings.
    storm_s: float | None  # When half of the clients that are there leave; None for never.
    calm_s: float  # When all faults are over.
    shutdown_s: float | None  # When the proxy has to stop; None for not before the end.
    tenants: TenantPlan | None = None  # None for none.
    # What the collector of traces answers, see `traces`; empty for no tracing.
    collector: tuple[int, ...] = ()
    # What an administrator orders, in the order of their beginnings.
    orders: tuple[Order, ...] = ()
    poisons: tuple[Poison, ...] = ()  # The requests that kill engines.

    @property
    def has_bad_wires(self) -> bool:
        """Whether what is sent to an engine may arrive late or not at all."""
        return any(one.link or one.meddling for one in self.injections)

    @property
    def spoils_keys(self) -> bool:
        """Whether the file of the engines' key is bad for a while."""
        return any(one.act is Act.KEYS for one in self.injections)

    @property
    def finds_engines(self) -> bool:
        """Whether the proxy finds engines by discovery."""
        return any(one.act is Act.CROWD for one in self.injections)

    @property
    def requests(self) -> list[ClientRequest]:
        """What all clients send."""
        return [request for visit in self.visits for request in visit.requests]


def draw_plan(seed: int, *, requests: int, near: bool = False) -> ChaosPlan:
    """Return the plan of a seed.

    Args:
        seed: Decides everything.
        requests: How many.
        near: Whether all that decides by where KV caches are is on, see `locality`.
    """
    plan = with_orders(_draw_plan(seed, requests, near=near))
    tenants = draw_tenants(seed, plan.visits[-1].start_s)
    plan = with_holders(with_machine(plan, keys=tenants is None))
    if collector := draw_collector(seed):
        world = replace(plan.world, flags={**plan.world.flags, **TRACING})
        plan = replace(plan, world=world, collector=collector)
    plan = with_poisons(plan)
    if tenants is None:
        return plan
    world = replace(
        plan.world, flags={**plan.world.flags, **tenants.flags}, tenants=tenants.texts()[0]
    )
    visits = tuple(with_keys(seed, tenants, plan.visits))
    return replace(plan, world=world, visits=visits, tenants=tenants)


def with_machine(plan: ChaosPlan, *, keys: bool) -> ChaosPlan:
    """Return a plan with the faults of the proxy's machine; `keys` as in `draw_machine`."""
    if plan.weather is Weather.CALM:
        return plan
    engines = plan.world.engines
    faults = draw_machine(
        random.Random(f"machine {plan.seed}"),
        prefillers=engines.prefillers,
        decoders=engines.ranks if engines.dp_mode is DpMode.PORTS else 1,
        policies=_POLICIES,
        span_s=plan.visits[-1].start_s,
        keys=keys,
    )
    if not faults:
        return plan
    return replace(
        plan,
        injections=tuple(
            sorted([*plan.injections, *faults], key=lambda one: (one.start_s, one.end_s))
        ),
        calm_s=max(plan.calm_s, *(one.end_s + 0.1 for one in faults)),
    )


def with_holders(plan: ChaosPlan) -> ChaosPlan:
    """Return a plan in which crowds hold as many connections as there may be, and clients have room."""
    if plan.weather is Weather.CALM:
        return plan
    rng = random.Random(f"holders {plan.seed}")
    faults = draw_holders(rng, span_s=plan.visits[-1].start_s)
    if not faults:
        return plan
    limit = {"connection_limit": 2 * len(plan.visits) + 8}
    return replace(
        plan,
        world=replace(plan.world, flags={**plan.world.flags, **limit}),
        injections=tuple(
            sorted([*plan.injections, *faults], key=lambda one: (one.start_s, one.end_s))
        ),
        calm_s=max(plan.calm_s, *(one.end_s + 0.1 for one in faults)),
    )


def with_poisons(plan: ChaosPlan) -> ChaosPlan:
    """Return a plan with the requests that kill engines, if there are any in its seed."""
    if plan.weather is Weather.CALM:
        return plan
    poisons = draw_poisons(plan.seed, plan.visits)
    if not poisons:
        return plan
    visits = with_repetitions(plan.visits, poisons)
    engines = plan.world.engines
    engines = replace(
        engines,
        prefillers=max(engines.prefillers, _MOST_TO_DIE),
        ranks=max(engines.ranks, _MOST_TO_DIE),
    )
    return replace(
        plan,
        world=replace(plan.world, engines=engines),
        visits=visits,
        poisons=poisons,
        injections=without_hiding(plan.injections),
        calm_s=max(plan.calm_s, visits[-1].start_s + 1.0),
    )


def with_orders(plan: ChaosPlan, *, of_all: bool = False) -> ChaosPlan:
    """Return a plan with the orders of its seed; `of_all` as in `draw_orders`."""
    if plan.weather is Weather.CALM:
        return plan
    engines, span_s = plan.world.engines, plan.visits[-1].start_s
    decoders = engines.ranks if engines.dp_mode is DpMode.PORTS else 1
    orders = draw_orders(
        plan.seed,
        engines=(engines.prefillers, decoders),
        faults=plan.injections,
        span_s=span_s,
        of_all=of_all,
    )
    if not orders:
        return plan
    # To hold the proxy to its answers, one part has to give all orders about engines.
    orders += ordered_drains(plan.injections)
    kept = tuple(one for one in plan.injections if one.act is not Act.DRAIN)
    return replace(
        plan,
        world=replace(plan.world, flags={**plan.world.flags, **ADMIN}),
        injections=kept,
        orders=tuple(sorted(orders, key=lambda one: (one.start_s, one.end_s))),
        calm_s=max(plan.calm_s, *(one.end_s + 0.1 for one in orders)),
    )


def draw_group(seed: int, whole: ChaosPlan, model: str) -> ChaosPlan:
    """Return what happens to one more group of engines in the course of a plan, with no clients.

    Args:
        seed: Decides about the group.
        whole: The plan.
        model: The name of its model.
    """
    span_s = whole.visits[-1].start_s
    plan = _draw_plan(seed, len(whole.requests), weather=whole.weather, span_s=span_s)
    engines, flags = plan.world.engines, plan.world.flags
    if whole.tenants is not None:
        flags = {**flags, **whole.tenants.flags}
    return replace(
        plan,
        world=WorldSettings(replace(engines, model=model), flags),
        shutdown_s=whole.shutdown_s,
        tenants=whole.tenants,
        orders=whole.orders,
    )


def _draw_plan(
    seed: int,
    requests: int,
    *,
    near: bool = False,
    weather: Weather | None = None,
    span_s: float | None = None,
) -> ChaosPlan:
    rng = random.Random(seed)
    drawn = rng.choices(list(Weather), weights=[12, 60, 20, 8])[0]
    weather = weather or drawn
    engines = _engines(rng)
    if near:
        engines = with_near_engines(engines)
    engines = _with_dp_groups(seed, engines)
    flags = _flags(rng, engines) | _direct(random.Random(f"direct {seed}"))
    flags |= _dp_flags(seed, engines)
    engines = _with_prefixes(seed, engines, flags)
    local = random.Random(f"local prefill {seed}")
    if CONNECTORS[engines.connector].ranks_prefill:
        flags["local_prefill_tokens"] = local.choice([None, None, 40, 100_000])
    flags |= _limits(random.Random(f"limits {seed}"))
    flags["prefix_affinity"] = random.Random(f"affinity {seed}").choice([0.0, 0.0, 1.0, 30.0])
    if not CONNECTORS[engines.connector].says_first:
        flags |= {"first_token": "decode"}
    if near:
        engines = with_locality(seed, engines, flags)
    if weather is Weather.CALM:
        # An engine that has too much to do is slow, which is no fault.
        flags |= dict.fromkeys(_TIMEOUTS, 300.0)
    work_s = requests * _SEQUENCES * engines.mean_output_tokens * engines.step_base_ns / 1e9
    work_s /= engines.ranks * engines.batch_limit
    due_s = max(
        requests * rng.choice([0.03, 0.06, 0.12, 0.2]), work_s * rng.choice([0.7, 1.0, 1.3])
    )
    span_s = span_s or due_s
    injections, storm_s = _injections(rng, seed, weather, engines, span_s, near=near)
    mix = RequestMix(MODEL, big=0.01 if rng.random() < 0.3 else 0.0, big_bytes=(20_000, 150_000))
    mix = replace(mix, max_tokens=rng.choice([10, 40, 100]))
    leaving = 0.3 if weather is Weather.CALM else rng.choice([0.0, 0.15, 0.5])
    visits = draw_visits(rng, range(requests), span_s, mix, leaving=leaving)
    if near:
        visits = with_talks(seed, visits)
    return ChaosPlan(
        seed,
        weather,
        WorldSettings(engines, flags),
        tuple(visits),
        tuple(injections),
        storm_s,
        max([span_s, *(one.end_s for one in injections)]) + 0.1,
        rng.uniform(0.3, 1.0) * span_s if weather is Weather.SHUTDOWN else None,
    )


def _injections(
    rng: random.Random,
    seed: int,
    weather: Weather,
    engines: EmulationSettings,
    span_s: float,
    *,
    near: bool,
) -> tuple[list[Injection], float | None]:
    """Return the faults in the order of their beginnings, and when clients give up in a storm."""
    decoders = engines.ranks if engines.dp_mode is DpMode.PORTS else 1
    counts = {
        Weather.CALM: 0,
        Weather.FAULTS: rng.randint(2, 12),
        Weather.STORM: rng.randint(12, 30),
        Weather.SHUTDOWN: rng.randint(0, 6),
    }
    injections = draw_injections(
        rng,
        count=counts[weather],
        prefillers=engines.prefillers,
        decoders=decoders,
        connector=engines.connector,
        policies=_POLICIES,
        span_s=span_s,
    )
    storm_s = None
    if weather is Weather.STORM:
        storm_s = rng.uniform(0.2, 0.9) * span_s
        injections += correlated(
            rng, prefillers=engines.prefillers, decoders=decoders, start_s=storm_s - 0.1
        )
    if weather is not Weather.CALM:
        injections += draw_endings(
            random.Random(f"endings {seed}"),
            prefillers=engines.prefillers,
            decoders=decoders,
            span_s=span_s,
        )
        injections += draw_freezes(
            random.Random(f"freezes {seed}"), decoders=decoders, span_s=span_s
        )
        injections += draw_lapses(random.Random(f"decisions {seed}"), span_s=span_s)
    injections += draw_clocks(random.Random(f"clocks {seed}"), span_s=span_s)
    injections += draw_suspensions(random.Random(f"suspensions {seed}"), span_s=span_s)
    if near:
        injections = with_updates(seed, injections)
    injections.sort(key=lambda one: (one.start_s, one.end_s))
    return injections, storm_s


def _engines(rng: random.Random) -> EmulationSettings:
    connector = rng.choices(list(CONNECTORS), [_CONNECTOR_WEIGHTS[one] for one in CONNECTORS])[0]
    recomputes = CONNECTORS[connector].recomputes
    return EmulationSettings(
        prefillers=rng.randint(1, 3),
        ranks=rng.randint(1, 4),
        batch_limit=rng.choice(_BATCH_LIMITS),
        step_base_ns=rng.choice([5_000_000, 15_000_000]),
        prefill_base_ns=5_000_000,
        prefill_ns_per_token=rng.choice([20_000.0, 200_000.0]),
        rank_kv_tokens=rng.choice([None, None, 400, 1_500]),
        prefiller_kv_tokens=rng.choice([None, None, 2_000]),
        lease_s=rng.choice([1.0, 3.0, 8.0]),
        connector=connector,
        dp_mode=rng.choice([DpMode.PORTS, DpMode.PORTS, DpMode.HEADER]),
        preemption=Preemption.STOP if recomputes and rng.random() < 0.7 else Preemption.INTERNAL,
        model=MODEL,
        mean_output_tokens=rng.choice([8.0, 20.0]),
        prompt_tokens_details=rng.random() < 0.5,
        reasoning_parser=rng.random() < 0.2,
        partial_utf8=rng.choice([0.0, 0.0, 0.2]),
        merged_outputs=rng.choice([0.0, 0.0, 0.3]),
    )


def _with_dp_groups(seed: int, engines: EmulationSettings) -> EmulationSettings:
    """Return the engines; for some seeds their ranks are one data-parallel group of two, or two such groups."""
    rng = random.Random(f"ranks that end together {seed}")
    if engines.dp_mode is DpMode.HEADER or rng.random() >= _DP_SHARE:
        return engines
    ranks, death_s = _DP_SIZE * rng.choice([1, 2, 2]), rng.choice([0.0, 0.05, 1.0])
    return replace(engines, ranks=ranks, dp_size=_DP_SIZE, dp_death_s=death_s)


def _dp_flags(seed: int, engines: EmulationSettings) -> dict[str, object]:
    """Return the flag with the size of groups, or none: the proxy then learns it from the ranks' pages."""
    if engines.dp_size == 1:
        return {}
    rng = random.Random(f"flags of data-parallel groups {seed}")
    flags: dict[str, object] = {"group_return_s": rng.choice([0.0, 1.0, 5.0])}
    return flags | ({"dp_size": engines.dp_size} if rng.random() < 0.5 else {})


def _with_prefixes(
    seed: int, engines: EmulationSettings, flags: dict[str, object]
) -> EmulationSettings:
    """Return the engines with prefix caches and, at times, their events; add the proxy's flags."""
    prefixes = random.Random(f"prefixes {seed}")
    # Short blocks, so that many prompts end where one does.
    block_tokens = random.Random(f"blocks {seed}").choice([2, 4, engines.block_tokens])
    engines = replace(
        engines,
        prefix_cache_tokens=prefixes.choice([None, 500, 10_000]),
        block_tokens=block_tokens,
    )
    flags["prefill_choice"] = prefixes.choice(["fewest-tokens", "prefix-aware", *PREFILL_CHOICES])
    rng = random.Random(f"KV events {seed}")
    if rng.random() >= 0.2:
        return engines
    engines = replace(
        engines,
        block_tokens=rng.choice([4, engines.block_tokens]),
        prefix_cache_tokens=rng.choice([500, 10_000]),
        kv_events=True,
        kv_event_faults=rng.choice([0.0, 0.3]),
    )
    flags |= {"prefill_choice": "prefix-aware", "kv_block_tokens": engines.block_tokens}
    if rng.random() < 0.3:
        flags["kv_replay"] = []
    return engines


def _direct(rng: random.Random) -> dict[str, object]:
    return {
        "direct": rng.choice(["auto", "auto", "prefill", "decode", "refuse"]),
        "direct_limit": rng.choice([1, 4]),
    }


def _limits(rng: random.Random) -> dict[str, object]:
    """Return a limit on requests in flight, shares and early refusal for some of the seeds."""
    flags: dict[str, object] = {"admission": rng.choice(["bounded"] * 5 + ["early"])}
    if rng.random() < 0.15:
        flags["aimd"] = rng.choice(["post5", "post4"])
        flags["aimd_ttft_s"] = rng.choice([0.1, 0.5, 5.0])
        flags["aimd_tpot_ms"] = rng.choice(["none", 20.0])
        flags["aimd_min"] = 1
        flags["aimd_max"] = rng.choice([1, 3, 12])
    if rng.random() < 0.3:
        flags["fair_queue"] = "kv-token-seconds"
    flags["resume"] = rng.choice(["off", "exact", "valid", "valid"])
    flags["first_token"] = rng.choice(["prefill", "prefill", "decode"])
    return flags


def _flags(rng: random.Random, engines: EmulationSettings) -> dict[str, object]:
    # A proxy that counts events goes on too long where one is several tokens.
    odd = engines.merged_outputs or engines.partial_utf8 or engines.reasoning_parser
    return {
        "policy": rng.choice(_POLICIES),
        "predictor": rng.choice(["none", "survival", "exact-match"]),
        "count_tokens": "usage" if odd else rng.choice(["usage", "events"]),
        # Where the proxy believes in more slots than there are, ranks hold what they have pulled.
        "batch": engines.batch_limit * rng.choice([1, 1, 1, 2]),
        "rank_kv_tokens": rng.choice([None, engines.rank_kv_tokens]),
        "prefiller_kv_tokens": rng.choice([None, engines.prefiller_kv_tokens]),
        "probe_limit": rng.choice([None, None, 2]),
        "pool_limit": rng.choice([None, None, 4]),
        "queue_limit": rng.choice([1_000, 1_000, 1_000, 6]),
        "queue_ttl_s": rng.choice([60.0, 60.0, 60.0, 1.0]),
        "pool_ttl_s": rng.choice([60.0, 60.0, 60.0, 0.3]),
        # The fleet's own, so that what lapses has to be noticed here.
        "lease_s": engines.lease_s,
        "lease_margin_s": rng.choice([1.5, 5.0]),
        "on_missing_kv": rng.choice(["recompute", "fail"]),
        "connect_timeout_s": 1.0,
        "prefill_timeout_s": 6.0,
        "first_token_timeout_s": 8.0,
        "idle_stream_timeout_s": 4.0,
        "answer_timeout_s": 12.0,
        "answer_limit_bytes": 2 << 20,
        "drain_timeout_s": 2.0,
        "retry_attempts": rng.choice([1, 3, 3]),
        "health_interval_s": 1.0,
        "health_timeout_s": 0.5,
        "scrape_interval_s": 0.5,
        "scrape_timeout_s": 0.4,
        "write_timeout_s": 5.0,
        "write_buffer_bytes": rng.choice([2_000, 65_536]),
    }


def draw_visits(
    rng: random.Random, numbers: range, span_s: float, mix: RequestMix, *, leaving: float
) -> list[Visit]:
    """Return what clients do, in the order of their coming.

    Args:
        rng: Draws it.
        numbers: Of the requests.
        span_s: All come within this time.
        mix: What the requests are like.
        leaving: How likely the client of a single request leaves.
    """
    visits: list[Visit] = []
    number = numbers.start
    herd_s = rng.uniform(0.0, span_s) if rng.random() < 0.15 else None
    while number < numbers.stop:
        count = 1 if rng.random() < 0.85 else rng.randint(2, 3)
        drawn = tuple(
            draw_request(rng, number + i, mix) for i in range(min(count, numbers.stop - number))
        )
        number += len(drawn)
        start_s = rng.uniform(0.0, span_s)
        if herd_s is not None and rng.random() < 0.5:
            start_s = herd_s
            if visits and rng.random() < 0.5:
                # The same prompt again, and sometimes the same name.
                drawn = (_repeated(rng, visits[-1].requests[0], drawn[0]), *drawn[1:])
        visits.append(_visit(rng, start_s, drawn, leaving))
    return sorted(visits, key=lambda visit: visit.start_s)


def _repeated(rng: random.Random, earlier: ClientRequest, request: ClientRequest) -> ClientRequest:
    name = earlier.request_id if rng.random() < 0.5 else request.request_id
    return replace(earlier, number=request.number, request_id=name)


def _visit(
    rng: random.Random, start_s: float, requests: tuple[ClientRequest, ...], leaving: float
) -> Visit:
    several = len(requests) > 1
    http_1_0 = rng.random() < 0.05
    pauses: tuple[tuple[int, float], ...] = ()
    link = None
    if rng.random() < 0.08:
        # Nothing fills a large window here.
        link = Link(window_bytes=rng.choice([500, 4_000]), latency_s=0.0005)
        pauses = ((rng.randint(0, 3_000), rng.choice([0.5, 2.0, 9.0])),)
    elif rng.random() < 0.1:
        link = Link(
            latency_s=0.005,
            jitter_s=rng.choice([0.0, 0.05]),
            split_bytes=rng.choice([None, 1, 50]),
        )
    departure = None
    pipelined = several and not http_1_0 and rng.random() < 0.5
    if not several and rng.random() < leaving:
        departure = Departure(
            rng.choice(list(ClientPhase)),
            rng.choice(list(Leaving)),
            delay_s=rng.choice([0.0, 0.0, 0.001, 0.02, rng.uniform(0.0, 2.0)]),
            num_bytes=rng.choice([1, 300, 1_000, 4_000]),
        )
    return Visit(
        start_s,
        requests,
        pipelined=pipelined,
        http_1_0=http_1_0,
        close=rng.random() < 0.2,
        departure=departure,
        pauses=pauses,
        link=link,
    )

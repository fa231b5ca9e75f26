"""The state of a deployment at one instant, as the admin page shows it and the metrics export it.

With it comes what the whole proxy holds, which several deployments have in common.
"""

from dataclasses import dataclass, field

from balanceroute.proxy.core.admission import TenantLimits
from balanceroute.proxy.live.engines.health import NO_QUARANTINE, Quarantine


@dataclass(frozen=True, slots=True)
class PredictorScores:
    """How good one predictor was on the latest rows. None where they leave a score undefined."""

    name: str
    active: bool  # Whether it is the one in use; else it is a shadow.
    failed: bool  # Whether it raised an exception, since when it is not asked any more.
    rows: int  # Rows that the scores are of.
    auc: float | None  # ROC-AUC of the chance to finish within the horizon.
    brier: float | None  # Its Brier score.
    ece: float | None  # Its expected calibration error.
    # Of the mean remaining length, in tokens, over the rows that finished within the horizon.
    mae: float | None
    predicted: tuple[float | None, ...]  # Mean chance in each tenth of the scale.
    observed: tuple[float | None, ...]  # How often those requests finished within the horizon.
    decile_rows: tuple[int, ...]  # Rows in each tenth.


@dataclass(frozen=True, slots=True)
class RankState:
    """One decode rank. Loads are those of the scheduler's ledger."""

    rank: int
    name: str
    open: bool
    status: str  # up, still, doomed, quarantined, draining, removed.
    kv_tokens: int
    bound: int
    started: int
    free_slots: int
    speed: float = 1.0  # Relative to the mean rank, as set or learned.
    quarantine: Quarantine = NO_QUARANTINE  # The last one of its server.
    url: str = ""  # Of its server.
    doubts: tuple[str, ...] = ()  # What speaks against the place of its server.
    others: int = 0  # Slots of requests that are not this proxy's, as the engine reports.
    cached_blocks: int | None = None  # As of a prefiller.
    vetoes: int = 0  # Times it was left out, as it made no tokens while other ranks did.
    at_barrier: bool = True  # Whether its load counts in the loss at the barrier.
    dp_group: int | None = None  # What names its data-parallel group; None if none is known.


@dataclass(frozen=True, slots=True)
class PrefillerState:
    """One prefiller."""

    prefiller: int
    name: str
    open: bool
    status: str
    probes: int  # Prefills that run.
    direct: int  # Sequences of the requests that it does whole.
    held_tokens: int
    utilisation: float  # KV-cache use it reports, 0 to 1; 1 if its report is missing or stale.
    quarantine: Quarantine = NO_QUARANTINE  # The last one.
    doubts: tuple[str, ...] = ()  # What speaks against its place.
    cached_blocks: int | None = (
        None  # Those that its KV cache events report; None if nothing follows them.
    )


@dataclass(frozen=True, slots=True)
class RequestState:
    """One live request."""

    number: int
    request_id: str
    state: str  # queued, prefilling, pooled, decoding.
    prompt_tokens: int
    emitted_tokens: int
    age_s: float
    prefiller: str
    rank: str


@dataclass(frozen=True, slots=True)
class TenantState:
    """One tenant."""

    name: str
    in_flight: int
    waiting: int  # Of these, those that no engine was given yet.
    remaining: dict[str, int]  # Requests and tokens that it may have now, where it has a rate.
    limits: TenantLimits
    share: float  # Its weight over those of all.


@dataclass(frozen=True, slots=True)
class BudgetState:
    """The limit on requests in flight."""

    limit_per_rank: int
    in_flight: int
    ttft_p99_s: float | None  # At the last decision; None if it was not known.
    step_p95_s: float | None  # Likewise; None without a target for it.
    decisions: dict[str, int]  # How often each was taken.
    ttft_target_s: float  # What the time to first token is to keep.


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Listeners and connections. Counters are since start."""

    client_connections: int
    engine_connections: int
    rejected_connections: dict[str, int] = field(default_factory=dict)  # By reason.
    evicted_connections: int = 0  # For a newcomer.
    body_bytes: int = 0  # Of requests that are being received or not answered yet.
    rejected_bodies: int = 0  # For want of room for them.
    pumped_streams: int = (
        0  # How often a stream was moved by the native library, as it may come back.
    )
    pumped_events: int = 0  # Events that it moved.
    pumped_bodies: int = 0  # Bodies of requests that it read.
    pumped_returns: dict[str, int] = field(default_factory=dict)  # Of streams, by reason.


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine reports of itself, whichever proxy sends to it."""

    role: str
    url: str
    waiting: float  # Mean over its ranks.
    running: float  # Likewise.
    kv_cache_usage: float  # Of its fullest rank, 0 to 1.


@dataclass(frozen=True, slots=True)
class LimitsState:
    """The settings that bound queues and loads. None for no bound."""

    batch: int  # Of a rank.
    queue: int
    connections: int | None
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Held):
    """Everything. Counters are since start."""

    policy: str
    predictor: str
    ranks: list[RankState]
    prefillers: list[PrefillerState]
    queued: int
    prefilling: int
    pooled: int
    decoding: int
    pool_limit: int | None  # Requests that may be in prefill or in the pool; None for no limit.
    oldest_pooled_s: float
    imbalance_tokens: int
    steps: int
    step_s: float  # Running mean of the inferred time of a step; 0 before the first.
    idle_tokens: int  # Sum over the inferred steps of sum_g (max L - L_g).
    capacity_tokens: int  # Sum over the inferred steps of G x max L.
    draining: bool
    rows_judged: int  # Predictions that came true or not.
    predictors: list[PredictorScores]  # The one in use first, then its shadows.
    budget: BudgetState | None = None  # None without one.
    requests: list[RequestState] = field(default_factory=list)  # Only if asked for.
    tenants: list[TenantState] = field(default_factory=list)
    still_ranks: int = 0  # Ranks that stand still, if none that has streams makes tokens; else 0.
    standstills: int = 0
    idle_ratio: float = 0.0  # Of the latest minutes.
    idle_ratios: list[float | None] = field(default_factory=list)  # By 5 s of them, oldest first.
    engines: list[EngineState] = field(default_factory=list)  # Those whose last scrape was good.
    limits: LimitsState | None = None
    lease_used: float | None = None  # Largest share, of a pooled request's; None without leases.
    kept_tokens: int = 0  # Of prompts, which ranks should have had when they got the requests.
    skill_share: float | None = None  # None where the policy does not weigh predictions by it.
    group: str = ""  # Which of several deployments.

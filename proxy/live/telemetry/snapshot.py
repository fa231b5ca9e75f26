"""The state of a deployment at one instant, as the admin page shows it and the metrics export it.

With it comes what the whole proxy holds, which several deployments have in common.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors import Predictor, evaluation
from balanceroute.predictors.base import check_survival
from balanceroute.proxy.core.admission import TenantLimits
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import two_stage_estimate
from balanceroute.proxy.live.engines.health import NO_QUARANTINE, Quarantine

# How good predictions turn out on live traffic: of the predictor in use, and of its shadows.
#
# A row is one active request at one age, and what every predictor answers of it: the chance to
# finish within the horizon, and the mean remaining length if so. It is judged when the request
# has ended, or has outlived the horizon; scores are those of the latest rows. A request has at
# most one row that is not judged yet, so that the rows of a request do not overlap.

DECILES = 10


@dataclass(frozen=True, slots=True)
class PredictorScores:
    """How good one predictor was on the latest rows. None where they leave a score undefined.

    Attributes:
        active: Whether it is the one in use; the others are shadows.
        failed: Whether it raised an exception, since when it is not asked any more.
        rows: Rows that the scores are of.
        auc: ROC-AUC of the chance to finish within the horizon.
        brier: Its Brier score.
        ece: Its expected calibration error.
        mae: Of the mean remaining length, in tokens, over the rows that finished within the horizon.
        predicted: Mean chance in each tenth of the scale.
        observed: How often those requests finished within the horizon.
        decile_rows: Rows in each tenth.
    """

    name: str
    active: bool
    failed: bool
    rows: int
    auc: float | None
    brier: float | None
    ece: float | None
    mae: float | None
    predicted: tuple[float | None, ...]
    observed: tuple[float | None, ...]
    decile_rows: tuple[int, ...]


class Scoreboard:
    """Notes what predictors say and what comes true.

    Args:
        predictors: P, how many there are.
        horizon_steps: H, at least 1.
        observe_error: Called for each judged row with how far the first predictor's expectation was
            off, in tokens within the horizon.
        window: Judged rows that count.

    Attributes:
        judged: Rows judged since the start.
    """

    def __init__(
        self,
        predictors: int,
        *,
        horizon_steps: int,
        observe_error: Callable[[float], None],
        window: int = 5_000,
    ) -> None:
        self.judged = 0
        self._horizon_steps = horizon_steps
        self._observe_error = observe_error
        self._window = window
        # The row of a request that is not judged yet: its age, and float64[2, P].
        self._open: dict[RequestId, tuple[int, NDArray[np.float64]]] = {}
        # The latest rows, in a ring. What remains is cut off at H + 1: more is not known of all.
        self._answers = np.zeros((2, predictors, window))
        self._remaining = np.zeros(window, np.int64)

    def __len__(self) -> int:
        """Return the number of rows that are not judged yet."""
        return len(self._open)

    def is_free(self, request: RequestId, age: int) -> bool:
        """Return whether an active request has no row, after judging one that it has outlived."""
        row = self._open.get(request)
        # A request of that very age may have emitted its last token.
        if row is not None and age > row[0] + self._horizon_steps:
            self.cut_off(request, age)
            return True
        return row is None

    def ask(
        self, predictor: Predictor, requests: Sequence[RequestId], ages: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return what a predictor says of n requests, float64[2, n].

        Raises:
            PredictorError: It is no answer.
        """
        survival = predictor.survival(requests, ages, self._horizon_steps)
        check_survival(survival, len(requests), self._horizon_steps)
        return np.array(two_stage_estimate(survival, self._horizon_steps))

    def note(
        self,
        requests: Sequence[RequestId],
        ages: NDArray[np.int64],
        answers: Sequence[NDArray[np.float64]],
    ) -> None:
        """Open a row for each of n free requests; `answers` has float64[2, n] of each predictor."""
        rows = np.stack(answers, axis=1)
        for place, (request, age) in enumerate(zip(requests, ages.tolist(), strict=True)):
            self._open[request] = (age, rows[:, :, place].copy())

    def ended(self, request: RequestId, output_tokens: int) -> None:
        """Judge the row of a request that ended by itself, if it has one."""
        row = self._open.pop(request, None)
        # An age that was only inferred may lie beyond the end.
        if row is not None and output_tokens > row[0]:
            self._judge(row[1], output_tokens - row[0])

    def cut_off(self, request: RequestId, emitted_tokens: int) -> None:
        """Judge the row of a request of which no more is known than that it got so far.

        A row whose horizon it has not outlived is dropped.
        """
        row = self._open.pop(request, None)
        if row is not None and emitted_tokens > row[0] + self._horizon_steps:
            self._judge(row[1], self._horizon_steps + 1)

    def scores(self, place: int, *, name: str, active: bool, failed: bool) -> PredictorScores:
        """Return the scores of one predictor. O(window log window)."""
        rows = 0 if failed else min(self.judged, self._window)
        finish, mean = self._answers[:, place, :rows]
        remaining = self._remaining[:rows]
        happened = remaining <= self._horizon_steps
        diagram = evaluation.reliability(finish, happened, bins=DECILES)
        return PredictorScores(
            name=name,
            active=active,
            failed=failed,
            rows=rows,
            auc=_defined(evaluation.roc_auc(finish, happened)),
            brier=_defined(evaluation.brier(finish, happened)),
            ece=_defined(evaluation.expected_calibration_error(diagram)),
            mae=_defined(evaluation.mean_where(np.abs(mean - remaining), happened)),
            predicted=tuple(map(_defined, diagram.predicted.tolist())),
            observed=tuple(map(_defined, diagram.observed.tolist())),
            decile_rows=tuple(diagram.rows.tolist()),
        )

    def _judge(self, answers: NDArray[np.float64], remaining: int) -> None:
        place = self.judged % self._window
        self.judged += 1
        self._answers[:, :, place] = answers
        self._remaining[place] = min(remaining, self._horizon_steps + 1)
        finish, mean = answers[:, 0].tolist()
        expected = finish * mean + (1.0 - finish) * self._horizon_steps
        self._observe_error(abs(expected - min(remaining, self._horizon_steps)))


def _defined(score: float) -> float | None:
    return None if isnan(score) else score


@dataclass(frozen=True, slots=True)
class RankState:
    """One decode rank. Loads are those of the scheduler's ledger."""

    rank: int
    name: str
    open: bool
    status: str  # up, still, quarantined, draining, removed.
    kv_tokens: int
    bound: int
    started: int
    free_slots: int
    speed: float = 1.0  # Relative to the mean rank, as told or learned.
    quarantine: Quarantine = NO_QUARANTINE  # The last one of its server.
    url: str = ""  # Of its server.
    doubts: tuple[str, ...] = ()  # What speaks against the place of its server.
    others: int = 0  # Slots of requests that are not this proxy's, as the engine tells.
    cached_blocks: int | None = None  # As of a prefiller.
    vetoes: int = 0  # Times it was left out, as it made no tokens while others did.


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
        None  # Those that its KV cache events tell of; None if nobody listens.
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


@dataclass(frozen=True, slots=True)
class BudgetState:
    """The limit on requests in flight."""

    limit_per_rank: int
    in_flight: int
    ttft_p99_s: float | None  # At the last decision; None if it was not known.
    step_p95_s: float | None  # Likewise; None without a target for it.
    decisions: dict[str, int]  # How often each was taken.


@dataclass(frozen=True, slots=True)
class Held:
    """What listeners and connections hold. Counters are since start."""

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
    """What an engine tells of itself, whoever sends to it."""

    role: str
    url: str
    waiting: float  # Mean over its ranks.
    running: float  # Likewise.
    kv_cache_usage: float  # Of its fullest rank, 0 to 1.


@dataclass(frozen=True, slots=True)
class LimitsState:
    """The settings that bound what is held. None for no bound."""

    batch: int  # Of a rank.
    queue: int
    connections: int | None
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
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
    client_connections: int
    engine_connections: int
    draining: bool
    rows_judged: int  # Predictions that came true or not.
    predictors: list[PredictorScores]  # The one in use first, then its shadows.
    budget: BudgetState | None = None  # None without one.
    rejected_connections: dict[str, int] = field(default_factory=dict)  # By reason.
    evicted_connections: int = 0  # For a newcomer.
    body_bytes: int = 0  # Of requests that are being received or not answered yet.
    rejected_bodies: int = 0  # For want of room for them.
    pumped_streams: int = 0  # As of `Held`.
    pumped_events: int = 0
    pumped_bodies: int = 0
    pumped_returns: dict[str, int] = field(default_factory=dict)
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

"""The two-stage rule that BR-0 and BR-H share.

**Stage 1, slots abound.** Every pooled request gets a slot now, so the question is only where: the
largest goes first, each to the rank where its F is best.

**Stage 2, slots are scarce.** Ranks with a free slot are served in order of their safe margin. Each
takes, out of the K oldest entries, the subset that maximises F; if none scores above 0 it takes the
best single entry all the same.

What differs from the paper's Algorithms 2 and 3, and why (`paper=True` gives the paper's form):

* Stage 1 takes the rank by F, not by its number of free slots (that is join-shortest-queue, and
  loses to it under light load), and requests by size: placing the largest first is the classic
  rule for even sums.
* Candidates are the K oldest, not the whole pool by size. A free choice starves what never fits.
* An entry earns **credit** each time a later arrival is admitted before it: `patience` overtakings
  forgive it an overflow of one mean prompt. So the very large and the very small, which F alone
  leaves aside, cost a little balance instead of an unbounded wait.
* An entry past its deadline goes first, to the rank where it hurts least.
* BR-H's discount falls where slots turn over quickly: nobody knows yet what comes then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.balance import Balance, Weights
from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.fscore import discounts, lasting_discount
from balanceroute.proxy.core.policies.base import Assignment, Fleet
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.projection import Projection
from balanceroute.proxy.core.subset import best_subset

_RESTRICTED = attrgetter("restricted")


def ignore_stage(stage: str) -> None:
    """Ignore that a stage ended."""
    del stage


@dataclass(frozen=True, slots=True)
class TwoStageSettings:
    """Everything the rule can be told.

    Attributes:
        weights: F's weights; with a `gamma`, those while no slot turns over.
        theta: Free slots that Stage 1 leaves to Stage 2 when the pool exceeds the free slots.
        window: K, how many entries Stage 2 looks at.
        patience: How often an entry is overtaken until an overflow of one mean prompt is forgiven;
            inf for no credit.
        gamma: The discount of `weights`, for turnover to lower; None keeps the weights.
        paper: Use the paper's stages, candidates and no credit.
    """

    weights: Weights
    theta: int
    window: int
    patience: float
    gamma: float | None = None
    paper: bool = False


class TwoStage:
    """BR-0 without a projection, BR-H with one.

    Args:
        settings: The rule's settings; `settings.weights.steps` has one weight per projected step.
        projection: Loads ahead; None looks at the present step only.
        on_stage: Called with the name of each stage as it ends, so that a driver can time them.
    """

    slots_beyond_batch = 0

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        on_stage: Callable[[str], None] = ignore_stage,
    ) -> None:
        self.projection = projection
        self._settings = settings
        self._gamma = settings.gamma  # As lowered.
        self._on_stage = on_stage

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Admit what fits. Paper: Algorithms 2 and 3."""
        if not (fleet.free_slots > 0).any():
            return []
        if self.projection is None:
            ahead = fleet.loads.astype(np.float64)[:, None]
        else:
            ahead = self.projection.loads_ahead(fleet.loads)
            self._discount(self.projection)
        stages = _Round(self._settings, self.projection, fleet, pool, ahead)
        self._on_stage("projection")
        if self._settings.paper:
            stages.fill_longest_queues()
        else:
            stages.place_overdue(now_ns)
            stages.place_all()
        self._on_stage("stage_1")
        stages.choose_subsets()
        self._on_stage("stage_2")
        return stages.assignments

    def _discount(self, projection: Projection) -> None:
        """Let the weights follow the turnover; most rounds find them as they should be."""
        base = self._settings.gamma
        if base is None:
            return
        gamma = lasting_discount(base, projection.turnover.per_rank_step)
        if gamma != self._gamma:
            self._gamma = gamma
            steps = discounts(projection.horizon_steps, gamma)
            weights = replace(self._settings.weights, steps=steps)
            self._settings = replace(self._settings, weights=weights)


class _Round:
    """One call of `TwoStage.dispatch`."""

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        fleet: Fleet,
        pool: Pool,
        ahead: NDArray[np.float64],
    ) -> None:
        self.assignments: list[Assignment] = []
        self._settings = settings
        self._projection = projection
        self._fleet = fleet
        self._pool = pool
        if projection is None:
            persistence = np.ones(1)
        else:
            candidates = pool.first(settings.window)
            persistence = projection.persistence(
                [entry.request for entry in candidates], [entry.age for entry in candidates]
            )
        self._balance = Balance(ahead, settings.weights, persistence)
        # In units of F, what one overtaking earns.
        forgiven = pool.mean_prompt_tokens / settings.patience
        self._credit_each = settings.weights.penalty * forgiven

    def place_overdue(self, now_ns: int) -> None:
        """Admit entries past their deadline, oldest first, each where it scores best."""
        self._place(self._pool.overdue(now_ns))

    def place_all(self) -> None:
        """Stage 1: admit the oldest entries, the largest of them first."""
        free = int(self._fleet.free_slots.sum())
        wanted = self._pool.slots
        entries = self._oldest(free if wanted <= free else max(0, free - self._settings.theta))
        entries.sort(key=lambda entry: (-entry.kv_tokens, entry.request))
        self._place(entries)

    def _oldest(self, slots: int) -> list[PoolEntry]:
        """Return the oldest entries that want no more than so many slots."""
        entries: list[PoolEntry] = []
        for entry in self._pool.first(slots):
            slots -= entry.slots
            if slots < 0:
                break
            entries.append(entry)
        return entries

    def fill_longest_queues(self) -> None:
        """Stage 1 of the paper: the rank with most free slots takes the request that fits best."""
        fleet = self._fleet
        while len(self._pool) and fleet.free_slots.sum() > self._settings.theta:
            rank = int(fleet.free_slots.argmax())
            room = fleet.room(rank)
            candidates = [e for e in self._allowed(rank) if e.kv_tokens <= room]
            if not candidates:
                return
            scores = self._balance.scores(rank, _sizes(candidates))
            self._admit(candidates[int(scores.argmax())], rank)

    def choose_subsets(self) -> None:
        """Stage 2: serve the ranks in order of safe margin until slots or entries run out."""
        fleet = self._fleet
        open_ranks = fleet.free_slots > 0
        while len(self._pool) and open_ranks.any():
            rank = self._roomiest(open_ranks)
            room = fleet.room(rank)
            candidates = [e for e in self._candidates(rank) if e.kv_tokens <= room]
            for entry in self._choose(rank, candidates):
                # Several entries with many slots each may want more than there are.
                if fleet.free_slots[rank] > 0:
                    self._admit(entry, rank)
            open_ranks[rank] = bool(candidates) and fleet.free_slots[rank] > 0

    def _roomiest(self, open_ranks: NDArray[np.bool_]) -> int:
        """Return the open rank with the largest safe margin, then most free slots, then lowest."""
        margins = np.where(open_ranks, self._balance.safe_margins, -1.0)
        ties = np.flatnonzero(margins == margins.max())
        if len(ties) == 1:
            return int(ties[0])
        return int(ties[int(self._fleet.free_slots[ties].argmax())])

    def _candidates(self, rank: int) -> list[PoolEntry]:
        window = self._settings.window
        if self._settings.paper:
            by_size = sorted(self._allowed(rank), key=lambda e: (-e.kv_tokens, e.request))
            return by_size[:window]
        entries = self._pool.first(window)
        if any(map(_RESTRICTED, entries)):
            return list(islice(self._allowed(rank), window))
        return entries

    def _allowed(self, rank: int) -> Iterator[PoolEntry]:
        """Iterate over the entries that may go to the open `rank`, oldest first."""
        fleet = self._fleet
        return (
            entry
            for entry in self._pool
            if (entry.ranks is None or rank in entry.ranks)
            and (not entry.lost_on or fleet.allowed(entry)[rank])
        )

    def _choose(self, rank: int, candidates: list[PoolEntry]) -> list[PoolEntry]:
        """Return what `rank` takes: the best subset, else the best single entry."""
        if not candidates:
            return []
        fleet = self._fleet
        slots = min(int(fleet.free_slots[rank]), len(candidates))
        room = int(fleet.free_kv_tokens[rank])
        if slots > 1 and room >= max(entry.kv_tokens for entry in candidates):
            chosen = self._best_subset(rank, candidates, slots, room)
            if chosen:
                return chosen
        scores = self._balance.scores(rank, _sizes(candidates))
        scores += [self._credit(entry) for entry in candidates]
        return [candidates[int(scores.argmax())]]

    def _best_subset(
        self, rank: int, candidates: list[PoolEntry], slots: int, room: int
    ) -> list[PoolEntry]:
        """Return the subset with the best F, or [] if none scores above 0.

        F depends on the sum alone, and a solver that knows only sums cannot weigh credits. But the
        oldest entry has been overtaken at least as often as any other, so it is enough to ask twice:
        for the best subset, and for the best one around the oldest entry and its credit.
        """
        sizes = [entry.kv_tokens for entry in candidates]
        peak = self._balance.peak(rank)

        def score(total: int) -> float:
            return self._balance.score(rank, total)

        free = best_subset(sizes, slots, peak, score, max_total=room)
        credit = self._credit(candidates[0])
        if credit > 0.0:
            first = sizes[0]
            alone = score(first)
            rest = best_subset(
                sizes[1:],
                slots - 1,
                max(peak - first, 0.0),
                lambda total: score(first + total) - alone,
                max_total=room - first,
            )
            value = score(first + rest.total) + credit
            if value > 0.0 and value > score(free.total):
                return [candidates[0], *(candidates[1 + index] for index in rest.indices)]
        return [candidates[index] for index in free.indices]

    def _credit(self, entry: PoolEntry) -> float:
        if self._settings.paper:
            return 0.0
        return entry.overtaken * self._credit_each

    def _place(self, entries: list[PoolEntry]) -> None:
        fleet = self._fleet
        for entry in entries:
            open_ranks = fleet.open_to(entry)
            if open_ranks.any():
                self._admit(entry, self._balance.best_rank(entry.kv_tokens, open_ranks))

    def _admit(self, entry: PoolEntry, rank: int) -> None:
        self._pool.admit(entry.request)
        self._fleet.bind(rank, entry)
        self.assignments.append(Assignment(entry.request, RankId(rank)))
        if len(self._pool) == 0:
            return  # Nobody is left to weigh against it.
        if self._projection is None:
            contribution = np.array([entry.kv_tokens], np.float64)
        else:
            contribution = self._projection.newcomer(
                entry.request, entry.kv_tokens, entry.age, entry.slots
            )
        self._balance.admit(rank, contribution)


def _sizes(entries: list[PoolEntry]) -> NDArray[np.float64]:
    return np.array([entry.kv_tokens for entry in entries], np.float64)

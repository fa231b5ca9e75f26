"""The two-stage rule that BR-0 and BR-H share.

**Stage 1, slots abound.** Every pooled request gets a slot now, so only its rank is open: the
largest request goes first, each to the rank where its F is best.

**Stage 2, slots are scarce.** Ranks with a free slot are served in order of their safe margin. Each
takes the subset of the K oldest entries that maximises F. If no subset scores above 0, it takes the
best single entry anyway.

Differences from the paper's Algorithms 2 and 3, with reasons (`paper=True` gives the paper's form):

* Stage 1 chooses the rank by F, not by its number of free slots. The latter is join-shortest-queue,
  which loses to least-KV-tokens under light load. It places the largest requests first, the classic
  rule for even sums.
* Candidates are the K oldest entries, not the whole pool by size. A free choice starves entries that
  never fit.
* An entry earns **credit** each time a later arrival is admitted before it: `patience` overtakings
  offset an overflow of one mean prompt. So very large and very small entries, which F alone would
  leave waiting without bound, cost a little balance instead.
* An entry past its deadline goes first, to the rank where its F is best.
* BR-H's discount falls with the turnover of slots: a freed slot gets a request that is not known yet.
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
    """Do nothing: the stages are not timed."""
    del stage


@dataclass(frozen=True, slots=True)
class TwoStageSettings:
    """The parameters of the rule.

    Attributes:
        weights: F's weights; with a `gamma`, those for a fleet without turnover.
        theta: Free slots that Stage 1 leaves to Stage 2 when the pool exceeds the free slots.
        window: K, the entries that Stage 2 considers.
        patience: Overtakings that offset an overflow of one mean prompt; inf for no credit.
        gamma: The discount of `weights`, lowered as slots turn over; None keeps the weights.
        paper: Use the paper's stages and candidates, without credit.
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
        settings: The parameters; `settings.weights.steps` has one weight per projected step.
        projection: The projected loads; None for the present step only.
        on_stage: Called with the name of each stage as it ends, so that a driver can time them.
    """

    slots_beyond_batch = 0
    next_decision_ns = None

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        on_stage: Callable[[str], None] = ignore_stage,
    ) -> None:
        self.projection = projection
        self._settings = settings
        self._gamma = settings.gamma  # As lowered last.
        self._on_stage = on_stage

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Admit what fits. Paper: Algorithms 2 and 3."""
        # The usual case in saturation; it costs no projection.
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
            # Overdue entries first, while every rank still has its slots.
            stages.place_overdue(now_ns)
            stages.place_all()
        self._on_stage("stage_1")
        stages.choose_subsets()
        self._on_stage("stage_2")
        return stages.assignments

    def _discount(self, projection: Projection) -> None:
        """Make the weights follow the turnover."""
        base = self._settings.gamma
        if base is None:
            return
        # Rounded to hundredths, so most rounds change nothing.
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
            # One persistence for the whole round, the mean of the candidates: with one for each
            # request F would not depend on the sum alone, and the solvers could not be used.
            candidates = pool.first(settings.window)
            persistence = projection.persistence(
                [entry.request for entry in candidates], [entry.age for entry in candidates]
            )
        self._balance = Balance(ahead, settings.weights, persistence)
        # The credit of one overtaking, in units of F: `patience` of them offset the penalty of one
        # mean prompt beyond the margin.
        offset_tokens = pool.mean_prompt_tokens / settings.patience
        self._credit_each = settings.weights.penalty * offset_tokens

    def place_overdue(self, now_ns: int) -> None:
        """Admit entries past their deadline, oldest first, each where it scores best."""
        # The deadline bounds the wait of entries that never fit, whatever it costs in balance; near
        # the end of a lease it does so only up to what a repeated prefill costs.
        self._place(self._pool.overdue(now_ns))

    def place_all(self) -> None:
        """Stage 1: admit the oldest entries, the largest of them first."""
        free = int(self._fleet.free_slots.sum())
        wanted = self._pool.slots
        # If all entries fit, there is nothing to choose. Otherwise the last theta slots are left to
        # Stage 2, which chooses the entries as well.
        entries = self._oldest(free if wanted <= free else max(0, free - self._settings.theta))
        # Ties by arrival.
        entries.sort(key=lambda entry: (-entry.kv_tokens, entry.request))
        self._place(entries)

    def _oldest(self, slots: int) -> list[PoolEntry]:
        """Return the oldest entries that together need at most `slots` slots."""
        entries: list[PoolEntry] = []
        for entry in self._pool.first(slots):
            slots -= entry.slots
            if slots < 0:
                break
            entries.append(entry)
        return entries

    def fill_longest_queues(self) -> None:
        """Stage 1 of the paper: the rank with most free slots takes the entry with the best F."""
        fleet = self._fleet
        while len(self._pool) and fleet.free_slots.sum() > self._settings.theta:
            rank = int(fleet.free_slots.argmax())  # On a tie the lowest.
            room = fleet.room(rank)
            candidates = [e for e in self._allowed(rank) if e.kv_tokens <= room]
            if not candidates:
                return
            scores = self._balance.scores(rank, _sizes(candidates))
            self._admit(candidates[int(scores.argmax())], rank)

    def choose_subsets(self) -> None:
        """Stage 2: serve the ranks in order of safe margin until slots or entries run out.

        Paper: Algorithms 2 and 3, whose priority queue of ranks is a search here: margins change
        with every admission.
        """
        fleet = self._fleet
        open_ranks = fleet.free_slots > 0
        while len(self._pool) and open_ranks.any():
            rank = self._roomiest(open_ranks)
            room = fleet.room(rank)
            candidates = [e for e in self._candidates(rank) if e.kv_tokens <= room]
            for entry in self._choose(rank, candidates):
                # Entries of several slots each may need more than are free.
                if fleet.free_slots[rank] > 0:
                    self._admit(entry, rank)
            # A rank without candidates is done: room only shrinks during a round.
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
        # Usually every entry may go to every rank, and the first K need no filter.
        if any(map(_RESTRICTED, entries)):
            return list(islice(self._allowed(rank), window))
        return entries

    def _allowed(self, rank: int) -> Iterator[PoolEntry]:
        """Iterate over the entries that may go to the open `rank`, oldest first."""
        fleet = self._fleet
        # Lazily, as the first K entries are usually enough.
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
        # A candidate larger than the free memory is possible only on an empty rank; then just one
        # entry is admitted.
        if slots > 1 and room >= max(entry.kv_tokens for entry in candidates):
            chosen = self._best_subset(rank, candidates, slots, room)
            if chosen:
                return chosen
        # Also if the best score is negative: a free slot left empty would starve the entries that
        # never fit. On a tie `argmax` returns the first candidate.
        scores = self._balance.scores(rank, _sizes(candidates))
        scores += [self._credit(entry) for entry in candidates]
        return [candidates[int(scores.argmax())]]

    def _best_subset(
        self, rank: int, candidates: list[PoolEntry], slots: int, room: int
    ) -> list[PoolEntry]:
        """Return the subset with the best F, or [] if none scores above 0.

        F depends on the sum alone, and a solver that knows only sums cannot weigh credits. But the
        oldest entry has been overtaken at least as often as any other. So two calls are enough: one
        for the best subset, one for the best subset with the oldest entry and its credit.
        """
        sizes = [entry.kv_tokens for entry in candidates]
        peak = self._balance.peak(rank)

        def score(total: int) -> float:
            return self._balance.score(rank, total)

        free = best_subset(sizes, slots, peak, score, max_total=room)
        credit = self._credit(candidates[0])
        if credit > 0.0:
            # F relative to the oldest entry alone: its size shifts the peak and reduces the room.
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
        # Linear, so that the credit of a waiting entry exceeds any overflow at last.
        return entry.overtaken * self._credit_each

    def _place(self, entries: list[PoolEntry]) -> None:
        fleet = self._fleet
        for entry in entries:
            open_ranks = fleet.open_to(entry)
            if not open_ranks.any():
                continue
            rank = self._balance.best_rank(entry.kv_tokens, open_ranks)
            overflow = fleet.loads[rank] + entry.kv_tokens - fleet.loads.max()
            if overflow <= entry.overflow_limit:
                self._admit(entry, rank)

    def _admit(self, entry: PoolEntry, rank: int) -> None:
        self._pool.admit(entry.request)
        self._fleet.bind(rank, entry)
        self.assignments.append(Assignment(entry.request, RankId(rank)))
        if len(self._pool) == 0:
            return  # No decision of this round is left to see it.
        if self._projection is None:
            contribution = np.array([entry.kv_tokens], np.float64)
        else:
            contribution = self._projection.newcomer(
                entry.request, entry.kv_tokens, entry.age, entry.slots
            )
        # Later decisions of this round see the admission.
        self._balance.admit(rank, contribution)


def _sizes(entries: list[PoolEntry]) -> NDArray[np.float64]:
    return np.array([entry.kv_tokens for entry in entries], np.float64)

"""What the stages of one round share: the ranks, the pool, the balance, and what was admitted."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.balance import Balance
from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.policies.base import Assignment, Fleet
from balanceroute.proxy.core.policies.two_stage.candidates import (
    Candidates,
    Oldest,
    candidates_of,
)
from balanceroute.proxy.core.policies.two_stage.settings import TwoStageSettings
from balanceroute.proxy.core.policies.two_stage.target import target_tokens
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.projection import Projection

# Usually as many as there are free slots; but free slots whose ranks have no memory admit nobody.
_MOST_MOVING_UP = 256


class Round:
    """One call of `TwoStage.dispatch`.

    Args:
        settings: The parameters of the rule.
        projection: The projected loads; None for the present step only.
        fleet: The ranks; every admission is charged to it.
        pool: What waits; an admitted entry leaves it.

    Attributes:
        assignments: The admissions so far.
        balance: Margins and scores after them.
        credit_each: What an overtaking adds to the score of the entry that was overtaken.
    """

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        fleet: Fleet,
        pool: Pool,
    ) -> None:
        self.assignments: list[Assignment] = []
        self.settings = settings
        self.fleet = fleet
        self.pool = pool
        self._projection = projection
        if projection is None:
            ahead = fleet.loads.astype(np.float64)[:, None]
            persistence = np.ones(1)
        else:
            ahead = _loads_ahead(projection, fleet)
            # One persistence for the whole round, the mean of the candidates: with one for each
            # request F would not depend on the sum alone, and the solvers could not be used.
            # In the same call those that may move up: one call for each admission costs more.
            moving_up = min(int(fleet.free_slots.sum()), _MOST_MOVING_UP)
            candidates = pool.first(settings.window + moving_up)
            self._survival = projection.survival(
                [entry.request for entry in candidates], [entry.age for entry in candidates]
            )
            self._rows = {entry.request: row for row, entry in enumerate(candidates)}
            persistence = projection.persistence(self._survival[: settings.window])
        target = speeds = None
        if not settings.paper:
            target, speeds = target_tokens(fleet, pool, ahead, persistence), fleet.speeds
        self.balance = Balance(ahead, settings.weights, persistence, target, speeds)
        # `patience` overtakings offset the penalty of one mean prompt beyond the margin. Linear, so
        # that the credit of a waiting entry exceeds any overflow at last.
        offset_tokens = 0.0 if settings.paper else pool.mean_prompt_tokens / settings.patience
        self.credit_each = settings.weights.penalty * offset_tokens
        self._oldest: Oldest | None = None

    def candidates(self, rank: int) -> Candidates:
        """Return the K oldest entries that may go to the open `rank`, whether they fit or not."""
        window = self.settings.window
        if self._oldest is None:
            # Each admission takes a slot, and one entry moves up.
            self._oldest = Oldest(self.pool.first(window + int(self.fleet.free_slots.sum())))
        # Usually every entry may go to every rank, and the first K need no filter.
        candidates = self._oldest.first(window)
        return candidates or candidates_of(list(islice(self.allowed(rank), window)))

    def allowed(self, rank: int) -> Iterator[PoolEntry]:
        """Iterate over the entries that may go to the open `rank`, oldest first."""
        fleet = self.fleet
        # Lazily, as the first K entries are usually enough.
        return (
            entry
            for entry in self.pool
            if (entry.ranks is None or rank in entry.ranks)
            and (not entry.lost_on or fleet.allowed(entry)[rank])
        )

    def place(self, entries: list[PoolEntry]) -> None:
        """Admit entries in turn, each to the rank where it scores best, if it may go there."""
        for entry in entries:
            open_ranks = self.fleet.open_to(entry)
            if not open_ranks.any():
                continue
            rank = self.balance.best_rank(entry.kv_tokens, open_ranks)
            overflow = self.fleet.loads[rank] + entry.kv_tokens - self.fleet.loads.max()
            if overflow <= entry.overflow_limit:
                self.admit(entry, rank)

    def admit(self, entry: PoolEntry, rank: int) -> None:
        """Admit an entry to a rank; later decisions of the round see it."""
        self.pool.admit(entry.request)
        if self._oldest is not None:
            self._oldest.admitted(entry)
        self.fleet.bind(rank, entry)
        self.assignments.append(Assignment(entry.request, RankId(rank)))
        if len(self.pool) == 0:
            return  # No decision of this round is left to see it.
        if self._projection is None:
            contribution = np.array([entry.kv_tokens], np.float64)
        else:
            contribution = self._projection.newcomer(
                entry.kv_tokens, self._survival_of(entry, self._projection), entry.slots
            )
        self.balance.admit(rank, contribution)

    def _survival_of(self, entry: PoolEntry, projection: Projection) -> NDArray[np.float64]:
        row = self._rows.get(entry.request)
        if row is None:
            return np.asarray(projection.survival([entry.request], [entry.age])[0])
        return np.asarray(self._survival[row])


def _loads_ahead(projection: Projection, fleet: Fleet) -> NDArray[np.float64]:
    """Return float64[G, H + 1], the projected loads; of what others have nothing is known ahead."""
    others = fleet.others_kv_tokens
    if others is None:
        return projection.loads_ahead(fleet.loads)
    return np.asarray(projection.loads_ahead(fleet.loads - others) + others[:, None])

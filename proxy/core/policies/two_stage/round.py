"""What the stages of one round share: the ranks, the pool, the balance, and what was admitted."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import count, islice, repeat
from math import inf

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.balance import Balance, Outlook
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.policies.base import Assignment, Fleet
from balanceroute.proxy.core.policies.two_stage.affinity import Affinity
from balanceroute.proxy.core.policies.two_stage.candidates import (
    Candidates,
    Oldest,
    candidates_of,
)
from balanceroute.proxy.core.policies.two_stage.roomiest import Roomiest
from balanceroute.proxy.core.policies.two_stage.settings import TwoStageSettings
from balanceroute.proxy.core.policies.two_stage.target import target_tokens
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.projection import Projection

# Entries about which the predictor is asked in one call, which costs a thirtieth of one for each.
# Usually there are as many free slots; but those of ranks without memory admit nobody.
_MOST_ASKED = 256
# Entries beyond the candidates for which outlooks are made at once.
_MOST_SPARE = 128
# Ranks whose outlooks are made in one call. When the envelope rises those still to choose are lost,
# which is once or twice in a hundred admissions.
_TOGETHER = 32


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
        affinity: The price of tokens that need not be pulled; None if they have none.
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
        # What was asked about entries together, and the place of each.
        self._asked: dict[RequestId, tuple[_Asked, int]] = {}
        if projection is None:
            ahead = fleet.loads.astype(np.float64)[:, None]
            persistence = np.ones(1)
        else:
            ahead = _loads_ahead(projection, fleet)
            # One persistence for the whole round, the mean of the candidates: with one for each
            # request F would not depend on the sum alone, and the solvers could not be used.
            # In the same call those that may move up.
            moving_up = min(fleet.free, _MOST_ASKED)
            survival = self._ask(projection, pool.first(settings.window + moving_up))
            persistence = projection.persistence(survival[: settings.window])
        target = speeds = None
        if not settings.paper:
            coming = min(fleet.free, pool.slots) * pool.mean_prompt_tokens
            target = partial(target_tokens, fleet.is_open, coming, ahead, persistence)
            speeds = fleet.speeds
        self.balance = Balance(ahead, settings.weights, persistence, target, speeds)
        self.affinity: Affinity | None = None
        if settings.prefix_affinity and fleet.keeping is not None:
            self.affinity = Affinity(fleet.keeping, settings.prefix_affinity * self.balance.reward)
        self._oldest: Oldest | None = None
        # Of ranks that choose next; no admission but their own changes them, unless the envelope rises.
        self._outlooks: dict[int, Outlook] = {}

    @cached_property
    def credit_each(self) -> float:
        """What an overtaking adds to the score of the entry that was overtaken."""
        # `patience` overtakings offset the penalty of one mean prompt beyond the margin. Linear, so
        # that the credit of a waiting entry exceeds any overflow at last.
        settings, pool = self.settings, self.pool
        offset_tokens = 0.0 if settings.paper else pool.mean_prompt_tokens / settings.patience
        return settings.weights.penalty * offset_tokens

    def outlook(
        self, rank: int, candidates: Candidates, upcoming: Callable[[int], list[int]]
    ) -> Outlook:
        """Return the outlook of `rank`: on the candidates, and others may follow them.

        Args:
            rank: Chooses now.
            candidates: What it chooses from.
            upcoming: Returns about the next so many ranks that choose.
        """
        if not candidates.are_oldest:
            (outlook,) = self.balance.outlooks([rank], candidates.sizes)
            return outlook
        known = self._outlooks
        if rank not in known:
            ranks = [rank, *(one for one in upcoming(_TOGETHER - 1) if one not in known)]
            outlooks = self.balance.outlooks(ranks, self._oldest_left().sizes)
            known.update(zip(ranks, outlooks, strict=True))
        return known[rank]

    def among(self, candidates: Candidates, requests: frozenset[RequestId]) -> NDArray[np.bool_]:
        """Return bool[n], which candidates are some of `requests`."""
        if candidates.are_oldest:
            return self._oldest_left().among(requests)[: len(candidates.entries)]
        return np.array([entry.request in requests for entry in candidates.entries], np.bool_)

    def candidates(self, rank: int) -> Candidates:
        """Return the K oldest entries that may go to the open `rank`, whether they fit or not."""
        window = self.settings.window
        # Usually every entry may go to every rank, and the first K need no filter.
        return self._oldest_left().first() or candidates_of(
            list(islice(self.allowed(rank), window))
        )

    def _oldest_left(self) -> Oldest:
        if self._oldest is None or self._oldest.spare <= 0:
            # Each admission takes a slot, and one entry moves up.
            spare = min(self.fleet.free, _MOST_SPARE)
            window = self.settings.window
            entries = self.pool.first(window + spare)
            # After a burst of admissions nobody has asked about these.
            self._ask_unknown(entries)
            self._oldest = Oldest(entries, window, spare)
            self._outlooks.clear()
        return self._oldest

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

    def place(
        self,
        entries: list[PoolEntry],
        is_held: Callable[[PoolEntry, int], bool] | None = None,
        affinity: Affinity | None = None,
    ) -> list[PoolEntry]:
        """Admit entries in turn, each to the rank where it scores best, if it may go there.

        Args:
            entries: In the order in which they choose; no rank has chosen yet.
            is_held: Whether an entry waits, given its best rank after the admissions before it. Not
                asked where it overflows nowhere.
            affinity: Also counts; None for the balance alone.

        Returns:
            Those that wait.
        """
        if not entries:
            return []
        fleet = self.fleet
        roomiest = None if len(entries) == 1 else Roomiest(fleet, self.balance)
        held: list[PoolEntry] = []
        placed: list[RequestId] = []
        for number, entry in enumerate(entries):
            worth = None if affinity is None else affinity.everywhere(entry)
            rank = roomiest.rank_for(entry) if roomiest is not None and worth is None else None
            if rank is None:
                open_ranks = fleet.open_to(entry)
                if not np.count_nonzero(open_ranks):
                    continue
                rank = self.balance.best_rank(entry.kv_tokens, open_ranks, worth)
                if is_held is not None and is_held(entry, rank):
                    held.append(entry)
                    continue
            if entry.overflow_limit < inf:
                overflow = fleet.loads[rank] + entry.kv_tokens - fleet.loads.max()
                if overflow > entry.overflow_limit:
                    continue
            if entry.request not in self._asked:
                self._ask_unknown(entries[number : number + _MOST_ASKED])
            placed.append(entry.request)
            self._charge(entry, rank, is_last=len(placed) == len(self.pool))
            if roomiest is not None:
                roomiest.charged(rank)
        # Together: one by one the large ones, which go first, would overtake thousands each.
        self.pool.admit_all(placed)
        return held

    def admit(self, entry: PoolEntry, rank: int) -> None:
        """Admit an entry to a rank; later decisions of the round see it."""
        self.pool.admit(entry.request)
        if self._oldest is not None:
            self._oldest.admitted(entry)
        self._charge(entry, rank, is_last=len(self.pool) == 0)

    def _charge(self, entry: PoolEntry, rank: int, *, is_last: bool) -> None:
        """Charge an admission to its rank; `is_last` if nothing waits after it."""
        self.assignments.append(Assignment(entry.request, RankId(rank)))
        if is_last and self.fleet.room_after is None:
            return  # No decision of this round is left to see it.
        self.fleet.bind(rank, entry)
        full = self.fleet.free_slots.item(rank) == 0
        if self.balance.admit(rank, self._contribution(entry), full=full):
            self._outlooks.clear()
        else:
            self._outlooks.pop(rank, None)

    def _contribution(self, entry: PoolEntry) -> NDArray[np.float64]:
        projection = self._projection
        if projection is None:
            return np.array([entry.kv_tokens], np.float64)
        if entry.request not in self._asked:
            self._ask(projection, [entry])
        asked, row = self._asked[entry.request]
        return np.asarray(asked.adds[row])

    def _ask_unknown(self, entries: list[PoolEntry]) -> None:
        """Ask about those of some entries about which nobody has asked."""
        if self._projection is not None:
            unknown = [entry for entry in entries if entry.request not in self._asked]
            if unknown:
                self._ask(self._projection, unknown)

    def _ask(self, projection: Projection, entries: list[PoolEntry]) -> NDArray[np.float64]:
        """Ask how long entries stay if they are admitted now, and return their survival."""
        requests = [entry.request for entry in entries]
        survival = projection.survival(requests, [entry.age for entry in entries])
        asked = _Asked(projection, entries, survival)
        self._asked.update(zip(requests, zip(repeat(asked), count()), strict=False))
        return survival


class _Asked:
    """Entries about which the predictor was asked in one call.

    Args:
        projection: Whose newcomers they may be.
        entries: n entries.
        survival: float64[n, H + 1], the answer.
    """

    def __init__(
        self, projection: Projection, entries: list[PoolEntry], survival: NDArray[np.float64]
    ) -> None:
        self._projection = projection
        self._entries = entries
        self._survival = survival

    @cached_property
    def adds(self) -> NDArray[np.float64]:
        """float64[n, H + 1], what each adds if it is admitted now.

        Nobody asks for it where nothing waits after the one that is admitted.
        """
        return self._projection.newcomers(
            [entry.kv_tokens for entry in self._entries],
            self._survival,
            [entry.slots for entry in self._entries],
        )


def _loads_ahead(projection: Projection, fleet: Fleet) -> NDArray[np.float64]:
    """Return float64[G, H + 1], the projected loads; of what others have nothing is known ahead."""
    others = fleet.others_kv_tokens
    if others is None:
        return projection.loads_ahead(fleet.loads)
    return np.asarray(projection.loads_ahead(fleet.loads - others) + others[:, None])

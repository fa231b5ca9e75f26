"""Stage 2 of the two-stage rule, while slots are scarce: each rank chooses its requests.

The ranks with a free slot choose in order of their safe margin. Each takes the subset of the K oldest
entries that maximises F. If no subset scores above 0, it takes the best single entry anyway. A rank
that is **reserved** makes room instead, for a large entry that is late.

A request that overflows a rank makes all other ranks wait until the rank has shed the overflow, or the
request has left. It costs less to make room on one rank first: a **reserved** rank takes only the
smallest entries until the overflow is tolerable. Meanwhile it alone is idle.

**When is an overflow tolerable?** Let a reserved rank shed v tokens per step (its slots are freed, and
replaced by small entries). To shed one token more of the overflow x takes 1 / v steps, in which the rank
is s - x below the other ranks. It spares each of these G - 1 ranks a token for as long as the overflow
would have lasted: x / v steps if the request stays, its residence R if that is shorter, and with
exponential residences R (1 - exp(-x / (v R))). So both together cost least where

    (G - 1) v R (1 - exp(-x / (v R))) = s - x.

The entry is admitted once the left side is no more than the right side and the entry's credit. With a
long residence and no credit that is x <= s / G: F without the target is not negative. With a short
one, as on traces whose large prompts have short outputs, the overflow is gone before room could be
made, and the entry is admitted at once. The credit grows with every overtaking, so that no entry
waits for ever, however large.

**Who may reserve?** An entry is **late** by the admissions beyond its turn, first come, first served,
in lengths of the pool. From a quarter of a pool on it may reserve the rank that has most room at the
moment, provided that this is enough of its size: all of it, less 40 % per pool of lateness. An empty
rank has all the room that it will ever have, so it takes a late entry at once.
"""

from collections.abc import Callable, Set
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice
from math import exp
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.policies.two_stage import Round
from balanceroute.proxy.core.subset import best_subset
from balanceroute.proxy.core.waiting import PoolEntry

if TYPE_CHECKING:
    from balanceroute.proxy.core.projection import Outlook


# The oldest entries of the pool, with the data for their scores as arrays.
#
# The ranks of one round choose from nearly the same entries: some leave, and as many move up. So
# the arrays are made once and follow each admission, which costs less than to make them for every
# rank. An entry that leaves keeps its place in them.

_KV_TOKENS = attrgetter("kv_tokens")
_OVERTAKEN = attrgetter("overtaken")


class Candidates(NamedTuple):
    """The entries that a rank chooses from, in order of the pool. Valid until the next admission."""

    entries: list[PoolEntry]  # n entries, also such as have left.
    is_left: NDArray[np.bool_]  # bool[n], whether each still waits.
    # float64[n], the load of each on the rank that admits it; inf once it has left.
    sizes: NDArray[np.float64]
    overtaken: NDArray[np.float64]  # float64[n], how often each was overtaken.
    # float64[n], the admissions beyond its turn: first come, first served, the entries ahead would
    # be admitted before it. -inf once it has left.
    beyond_turn: NDArray[np.float64]
    # bool[n], whether the policy holds its tenant back; None if it holds none back.
    held_back: NDArray[np.bool_] | None = None
    are_oldest: bool = False  # Whether they are the first of `Oldest`.

    def place_of(self, request: RequestId) -> int | None:
        """Return the place of a request; None if it is not among those left."""
        for place, entry in enumerate(self.entries):
            if entry.request == request:
                return place if self.is_left[place] else None
        return None


def sizes(entries: list[PoolEntry]) -> NDArray[np.float64]:
    """Return float64[n], the load of each entry on the rank that admits it."""
    return np.array([*map(_KV_TOKENS, entries)], np.float64)


def candidates_of(entries: list[PoolEntry], held_back: Set[str]) -> Candidates:
    """Return the candidates with their arrays; all still wait, and some tenants may be held back."""
    count = len(entries)
    overtaken = np.array([*map(_OVERTAKEN, entries)], np.float64)
    is_left = np.ones(count, np.bool_)
    waits = None
    if held_back:
        waits = np.array([entry.ticket.tenant in held_back for entry in entries], np.bool_)
    beyond_turn = overtaken - np.arange(count)
    return Candidates(entries, is_left, sizes(entries), overtaken, beyond_turn, waits)


class Oldest:
    """The oldest entries of a pool during a round.

    Args:
        entries: The first of the pool.
        window: How many of those left are candidates.
        spare: How many of them may be admitted before the candidates would be too few.
        held_back: The tenants that the policy holds back.
    """

    def __init__(
        self, entries: list[PoolEntry], window: int, spare: int, held_back: Set[str]
    ) -> None:
        self.spare = spare  # How many still may.
        of_all = candidates_of(entries, held_back)
        self._held_back = of_all.held_back
        # float64[n], the load of each, also of those that have left.
        self.sizes = of_all.sizes.copy()
        self._sizes_left = of_all.sizes
        self._entries = entries
        self._is_left = of_all.is_left
        self._overtaken = of_all.overtaken
        # With each admission an entry ahead is overtaken, and one behind has one less ahead.
        self._beyond_turn = of_all.beyond_turn
        self._place_of = {entry.request: place for place, entry in enumerate(entries)}
        # The candidates are those left before this place.
        self._end = min(window, len(entries))
        self._requests: frozenset[RequestId] = frozenset()
        self._is_among = np.zeros(len(entries), np.bool_)
        # Restricted entries are rare.
        self._restricted = [place for place, entry in enumerate(entries) if entry.restricted]

    def first(self) -> Candidates | None:
        """Return the candidates; None if one of them may not go to every rank."""
        end = self._end
        if self._restricted and any(
            place < end and self._is_left[place] for place in self._restricted
        ):
            return None
        return Candidates(
            self._entries[:end],
            self._is_left[:end],
            self._sizes_left[:end],
            self._overtaken[:end],
            self._beyond_turn[:end],
            None if self._held_back is None else self._held_back[:end],
            are_oldest=True,
        )

    def admitted(self, entry: PoolEntry) -> None:
        """Note that an entry has left the pool; those ahead of it were overtaken."""
        self.spare -= 1
        self._beyond_turn += 1.0
        place = self._place_of.get(entry.request)
        if place is None:
            # A rank that may not take some of them chose from behind them.
            self._overtaken += 1.0
            return
        self._overtaken[:place] += 1.0
        self._is_left[place] = False
        # Then what is late, and what fits, needs no look at who has left.
        self._sizes_left[place], self._beyond_turn[place] = np.inf, -np.inf
        if place < self._end < len(self._entries):
            self._end += 1
            while self._end < len(self._entries) and not self._is_left[self._end - 1]:
                self._end += 1

    def among(self, requests: frozenset[RequestId]) -> NDArray[np.bool_]:
        """Return bool[n], which entries are some of `requests`."""
        # They change much less often than ranks choose.
        if requests is not self._requests:
            self._requests = requests
            self._is_among = np.zeros(len(self._entries), np.bool_)
            for request in requests:
                place = self._place_of.get(request)
                if place is not None:
                    self._is_among[place] = True
        return self._is_among


# Stage 2's choice for one rank: the best subset of the candidates, else the best single one.


def best_choice(
    work: Round,
    rank: int,
    candidates: list[PoolEntry],
    scores: NDArray[np.float64],
    free: NDArray[np.bool_],
) -> list[PoolEntry]:
    """Return what `rank` takes of the candidates; [] if none may be taken.

    Args:
        rank: Has a free slot.
        candidates: In order of the pool.
        scores: float64[n], F of each alone, with its credit and affinity.
        free: bool[n], which of them fit and may be taken.
    """
    fleet = work.fleet
    slots = fleet.free_slots.item(rank)
    if slots > 1:
        places = free.nonzero()[0]
        taken = [candidates[place] for place in places.tolist()]
        room = int(fleet.free_kv_tokens[rank])
        # A candidate larger than the free memory is possible only on an empty rank; then just one
        # entry is admitted.
        if len(taken) > 1 and room >= max(entry.kv_tokens for entry in taken):
            choice = _Choice(work, rank, taken, min(slots, len(taken)), room)
            chosen = choice.best(scores[places])
            if chosen:
                return chosen
    # Also if the best score is negative: a free slot left empty would starve the entries that never
    # fit. On a tie `argmax` returns the first candidate.
    best = int(np.where(free, scores, -np.inf).argmax())
    return [candidates[best]] if free[best] else []


class _Choice:
    """Subsets of the candidates of one rank.

    F depends on the sum alone, and a solver that knows only sums cannot weigh what else an entry counts.
    But the oldest entry has been overtaken at least as often as any other, so its credit is the largest.
    So two calls are enough: one for the best subset, one for the best subset with the oldest entry and
    its credit. Where tokens that a rank need not pull have a price there is a third one, with the entry that
    scores most alone.
    """

    def __init__(
        self, work: Round, rank: int, candidates: list[PoolEntry], slots: int, room: int
    ) -> None:
        self._credit = work.credit_each * candidates[0].overtaken
        self._candidates = candidates
        self._totals = [entry.kv_tokens for entry in candidates]
        self._score = partial(work.balance.score, rank)
        self._peak = work.balance.peak(rank)
        self._slots, self._room = slots, room
        affinity = work.affinity
        self._worth = None if affinity is None else affinity.on(rank, candidates)

    def best(self, scores: NDArray[np.float64]) -> list[PoolEntry]:
        """Return the subset with the best F, or [] if none scores above 0.

        `scores` are float64[n], those of the entries alone.
        """
        free = best_subset(self._totals, self._slots, self._peak, self._score, max_total=self._room)
        best = self._score(free.total) + self._worth_of(free.indices)
        indices = free.indices
        for place, credit in self._forced(scores):
            value, added = self._with(place, credit)
            if value > 0.0 and value > best:
                best, indices = value, (place, *added)
        return [self._candidates[index] for index in indices]

    def _forced(self, scores: NDArray[np.float64]) -> list[tuple[int, float]]:
        """Return the entries that a subset is tried with, and their credit."""
        forced = [(0, self._credit)] if self._credit > 0.0 else []
        if self._worth is not None and self._worth.max() > 0.0:
            best = int(scores.argmax())
            credit = scores.item(best) - self._score(self._totals[best]) - self._worth.item(best)
            forced.append((best, credit))
        return forced

    def _with(self, place: int, credit: float) -> tuple[float, tuple[int, ...]]:
        """Return the value of the best subset with an entry, and the other entries of it."""
        # F relative to that entry alone: its size shifts the peak and reduces the room.
        totals, score = self._totals, self._score
        first = totals[place]
        alone = score(first)
        rest = best_subset(
            totals[:place] + totals[place + 1 :],
            self._slots - 1,
            max(self._peak - first, 0.0),
            lambda total: score(first + total) - alone,
            max_total=self._room - first,
        )
        indices = tuple(index + (index >= place) for index in rest.indices)
        worth = self._worth_of((place, *indices))
        return score(first + rest.total) + credit + worth, indices

    def _worth_of(self, indices: tuple[int, ...]) -> float:
        return 0.0 if self._worth is None else float(self._worth[list(indices)].sum())


# Entries beyond the candidates for which outlooks are made at once.
_MOST_SPARE = 128
# Ranks whose outlooks are made in one call. When the envelope rises those still to choose are lost,
# which is once or twice in a hundred admissions.
_TOGETHER = 32
# In mean prompts beyond the margin. At an eighth shares cost no idle time on the Mooncake trace, a whole one
# doubles it: what a tenant has left in the pool is what suits the ranks least.
_SHARE_PRICE = 1 / 8
# In lengths of the pool; any value from 0.15 to 0.35 gives the same results within their errors.
_LATE = 0.25
# Lateness at which an entry may reserve any rank. Flat in idle time from 2 to 3; the p99 wait rises by
# a tenth from one to the other.
_ANY_RANK = 2.5


class _Scarce:
    """Stage 2 of one round."""

    def __init__(self, work: Round, reserved: dict[int, RequestId]) -> None:
        self._work = work
        self._reserved = reserved
        # The same entries, another set after each change.
        self._has_rank = frozenset(reserved.values())
        self._order = _Order(work)
        self._held_back = work.pool.held_back(work.settings.window)
        self._oldest = self._first_left()
        # Of ranks that choose next; no admission but their own changes them, unless the envelope rises.
        self._outlooks: dict[int, Outlook] = {}

    def serve(self) -> None:
        _serve(self._work, self._order, self._choose, self._admit)

    def _admit(self, entry: PoolEntry, rank: int) -> None:
        self._oldest.admitted(entry)
        if self._work.admit(entry, rank):
            self._outlooks.clear()
        else:
            self._outlooks.pop(rank, None)

    def _first_left(self) -> Oldest:
        work = self._work
        # Each admission takes a slot, and one entry moves up.
        spare, window = min(work.fleet.free, _MOST_SPARE), work.settings.window
        entries = work.pool.first(window + spare)
        # After a burst of admissions the predictor was not asked about these.
        work.ask_unknown(entries)
        return Oldest(entries, window, spare, self._held_back)

    def _candidates(self, rank: int) -> Candidates:
        """Return the K oldest entries that may go to the open `rank`, whether they fit or not."""
        if self._oldest.spare <= 0:
            self._oldest = self._first_left()
            self._outlooks.clear()
        # Usually every entry may go to every rank, and the first K need no filter.
        work = self._work
        return self._oldest.first() or candidates_of(
            list(islice(work.allowed(rank), work.settings.window)), self._held_back
        )

    def _outlook(self, rank: int, candidates: Candidates) -> "Outlook":
        """Return the outlook of `rank`: of the candidates, and perhaps of entries behind them."""
        balance, known = self._work.balance, self._outlooks
        if not candidates.are_oldest:
            (outlook,) = balance.outlooks([rank], candidates.sizes)
            return outlook
        if rank not in known:
            upcoming = self._order.upcoming(_TOGETHER - 1)
            ranks = [rank, *(one for one in upcoming if one not in known)]
            known.update(zip(ranks, balance.outlooks(ranks, self._oldest.sizes), strict=True))
        return known[rank]

    def _choose(self, rank: int) -> list[PoolEntry]:
        """Return the candidates that `rank`, which has a free slot, takes; [] for none."""
        work = self._work
        candidates = self._candidates(rank)
        entries = candidates.entries
        if not entries:
            return []
        own = self._reserved.get(rank)
        # One that avoids the rank now, or is no candidate any more, has no use for it.
        if own is not None and candidates.place_of(own) is None:
            del self._reserved[rank]
            self._has_rank = frozenset(self._reserved.values())
        if candidates.are_oldest:
            has_rank = self._oldest.among(self._has_rank)[: len(entries)]
        else:
            has_rank = np.array([one.request in self._has_rank for one in entries], np.bool_)
        view = _View(work, rank, candidates, self._outlook(rank, candidates), has_rank)
        if rank not in self._reserved and not self._reserve(rank, view):
            return view.best(work, rank)
        place = candidates.place_of(self._reserved[rank])
        assert place is not None
        entry = entries[place]
        # An empty rank has nothing left to shed.
        if entry.kv_tokens <= view.room and (
            not work.fleet.bound[rank] or _tolerable(work, entry, view.overflow(place))
        ):
            return [entry]
        free = view.unreserved()
        # The smallest, so that the departures make room.
        smallest = int(np.where(free, candidates.sizes, np.inf).argmin())
        return [entries[smallest]] if free[smallest] else []

    def _reserve(self, rank: int, view: "_View") -> bool:
        """Reserve `rank` for the latest candidate that may; return whether there is one."""
        if not np.count_nonzero(view.is_late):
            return False
        # True above False: late, and neither.
        wanting = view.is_late > (view.reserved | view.fills())
        if not np.count_nonzero(wanting):
            return False
        late = view.candidates.beyond_turn / len(self._work.pool)
        enough = (1.0 - late / _ANY_RANK) * view.candidates.sizes
        wanting &= self._work.balance.safe_margins[rank] >= enough
        if not np.count_nonzero(wanting):
            return False
        latest = int(np.where(wanting, late, -np.inf).argmax())
        request = self._reserved[rank] = view.candidates.entries[latest].request
        self._has_rank |= {request}
        # A copy: what it was is used again for other ranks.
        view.reserved = view.reserved.copy()
        view.reserved[latest] = True
        return True


class _Order:
    """The ranks to serve: the largest safe margin first, then most free slots, then the lowest.

    An admission changes the margin of its rank alone, unless it raises the envelope.
    """

    def __init__(self, work: Round) -> None:
        self._work = work
        self._margins = work.balance.safe_margins
        self._heap = [self._place(rank) for rank in work.fleet.free_slots.nonzero()[0].tolist()]
        heapify(self._heap)

    def roomiest(self) -> int | None:
        """Take out the first rank; None if no rank is left."""
        if self._margins is not self._work.balance.safe_margins:
            self._margins = self._work.balance.safe_margins
            self._heap = [self._place(rank) for _, _, rank in self._heap]
            heapify(self._heap)
        return heappop(self._heap)[2] if self._heap else None

    def upcoming(self, count: int) -> list[int]:
        """Return about the next `count` ranks, in any order."""
        # The first places of a heap hold mostly these.
        return [rank for _, _, rank in self._heap[:count]]

    def serve_again(self, rank: int) -> None:
        """Put back a rank that took something."""
        heappush(self._heap, self._place(rank))

    def _place(self, rank: int) -> tuple[float, int, int]:
        return -self._margins.item(rank), -self._work.fleet.free_slots.item(rank), rank


class _View:
    """The n candidates of one rank, in order of the pool.

    Args:
        rank: Has a free slot.
        outlook: F of each, and of some behind them.
        reserved: bool[n], whether a rank is reserved for each.

    Attributes:
        is_late: bool[n], whether each still waits and is late enough to reserve a rank.
        scores: float64[n], F with the credit and the affinity.
        room: KV tokens up to which an entry fits.
    """

    def __init__(
        self,
        work: Round,
        rank: int,
        candidates: Candidates,
        outlook: "Outlook",
        reserved: "NDArray[np.bool_]",
    ) -> None:
        self.candidates = candidates
        self.reserved = reserved
        # Admissions beyond the turn, in lengths of the pool.
        self.is_late = candidates.beyond_turn >= _LATE * len(work.pool)
        self._outlook = outlook
        count = len(reserved)
        self._to_envelope = outlook.to_envelope[:count]
        self.scores = np.where(self.is_late, self._to_envelope, outlook.to_target[:count])
        self.scores += work.credit_each * candidates.overtaken
        if work.affinity is not None:
            self.scores += work.affinity.on(rank, candidates.entries)
        self.room = work.fleet.room(rank)

    def overflow(self, index: int) -> float:
        """Return the tokens of a candidate that are beyond the rank's margin."""
        return self._outlook.overflow.item(index)

    def fills(self) -> "NDArray[np.bool_]":
        """Return bool[n], whether F without the target is not negative."""
        return np.asarray(self._to_envelope >= 0.0)

    def fits(self) -> "NDArray[np.bool_]":
        """Return bool[n], which still wait and fit."""
        return np.asarray(self.candidates.sizes <= self.room)

    def unreserved(self) -> "NDArray[np.bool_]":
        """Return bool[n], which still wait, fit, and have no rank reserved."""
        return np.asarray(self.fits() > self.reserved)

    def _within_shares(self, work: Round, free: "NDArray[np.bool_]") -> "NDArray[np.bool_]":
        """Return bool[n], those of `free` with tenants not held back; all if none of these is nearly as good."""
        waits = self.candidates.held_back
        if waits is None:
            return free
        scores = np.where(free, self.scores, -np.inf)
        price = _SHARE_PRICE * work.settings.weights.penalty * work.pool.mean_prompt_tokens
        preferred = (scores >= scores.max() - price) & (free > waits)
        return preferred if np.count_nonzero(preferred) else free

    def best(self, work: Round, rank: int) -> "list[PoolEntry]":
        """Return the best choice of entries without a reserved rank, or that fill this one as well.

        An empty rank waits for no other: it may also take an entry with a reserved rank.
        """
        free = self.fits()
        if work.fleet.bound[rank] and np.count_nonzero(self.reserved):
            free = free > (self.reserved > self.fills())
        free = self._within_shares(work, free)
        return best_choice(work, rank, self.candidates.entries, self.scores, free)


def _tolerable(work: Round, entry: "PoolEntry", overflow: float) -> bool:
    """Return whether it costs no more to admit `entry` now than to make more room."""
    peers = len(work.fleet.loads) - 1
    credit = work.credit_each * entry.overtaken / float(work.settings.weights.steps.sum())
    return peers * _lasting_tokens(work, entry, overflow) <= entry.kv_tokens - overflow + credit


def _lasting_tokens(work: Round, entry: "PoolEntry", overflow: float) -> float:
    """Return the overflow without the share that ends with its request before it could be shed."""
    turnover = work.fleet.turnover
    stay_steps = turnover.stay_steps(entry.kv_tokens)
    if stay_steps is None:
        return overflow
    # Of one rank, during the stay.
    shed = turnover.per_step / len(work.fleet.loads) * work.pool.mean_prompt_tokens * stay_steps
    return shed * (1.0 - exp(-overflow / shed)) if shed > 0.0 else 0.0


def _serve(
    work: Round,
    order: _Order,
    choose: Callable[[int], list[PoolEntry]],
    admit: Callable[[PoolEntry, int], object],
) -> None:
    """Serve the ranks in order of safe margin until slots or entries run out."""
    fleet = work.fleet
    while len(work.pool) and (rank := order.roomiest()) is not None:
        chosen = choose(rank)
        for entry in chosen:
            # Entries of several slots each may need more than are free, and entries that grow more
            # memory than they hold now.
            if fleet.free_slots[rank] > 0 and entry.kv_tokens <= fleet.room(rank):
                admit(entry, rank)
        # A rank that takes nothing is done: room only shrinks during a round.
        if chosen and fleet.free_slots[rank] > 0:
            order.serve_again(rank)


def choose_subsets(work: Round, reserved: dict[int, RequestId]) -> None:
    """Have the ranks choose; `reserved` as in `TwoStage`. Paper: Algorithms 2 and 3."""
    if len(work.fleet.free_slots.nonzero()[0]):  # Else nothing has to be asked about.
        _Scarce(work, reserved).serve()


# The paper's Stage 2, where ours differs. Paper: Algorithms 2 and 3.


def choose_subsets_of_largest(work: Round, _: dict[int, RequestId]) -> None:
    """Have each rank choose from the K largest entries that may go there."""

    def choose(rank: int) -> list[PoolEntry]:
        room = work.fleet.room(rank)
        by_size = sorted(work.allowed(rank), key=lambda e: (-e.kv_tokens, e.request))
        largest = [e for e in by_size[: work.settings.window] if e.kv_tokens <= room]
        if not largest:
            return []
        free = np.ones(len(largest), np.bool_)
        return best_choice(work, rank, largest, work.balance.scores(rank, sizes(largest)), free)

    _serve(work, _Order(work), choose, work.admit)

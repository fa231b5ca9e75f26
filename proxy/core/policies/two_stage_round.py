"""What the stages of one round share: the ranks, the pool, the balance, and what was admitted."""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count, islice, repeat
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.projection import Balance, Outlook, Projection, Weights
from balanceroute.proxy.core.ranks import Assignment, Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.core.rank_memory import Keeping


# Prefix affinity: what it is worth that a request returns to a rank that has its prompt's
# beginning.
#
# The rank pulls only the rest. A token that need not be pulled has a price in tokens of F: with
# kept(g) for what rank g has of a prompt, and its mean over the open ranks, a request on g counts
#
#     price x (kept(g) - mean)
#
# more. F is minus the change of the idle tokens, so a price of 1 says that a pulled token is
# worth as much as a token that one rank idles in one step. There is no threshold: an overflow of
# x tokens is worth a detour of G x kept tokens, so a conversation leaves a rank that is full by
# itself. What all ranks have, as a common system prompt, favours nobody.

# While slots abound: the price then only chooses between ranks, and idle time costs no output. Of
# conversations at 0.6 of the capacity 1 pulls 0.64 of the tokens, 3 0.55 and 5 0.48, with 0.0, 0.9 and
# 2.5 points more idle time. Where slots are scarce 3 would cost 1.9 % of the output, and 1 costs 0.3 %.
WHILE_FREE = 3.0


class Affinity:
    """The price during a round.

    Args:
        keeping: What the ranks have of the entries' prompts.
        price: Of a token that need not be pulled, in tokens that fill: what F counts them.
    """

    def __init__(self, keeping: "Keeping", price: float) -> None:
        self._keeping = keeping
        self._price = price

    def everywhere(self, entry: "PoolEntry") -> "NDArray[np.float64] | None":
        """Return float64[G], the worth of each rank in Stage 1; None if it is the same everywhere."""
        tokens = self._keeping.of(entry).tokens
        if min(tokens) == max(tokens):
            return None
        return np.asarray(WHILE_FREE * self._price * np.array(tokens, np.float64))

    def on(self, rank: int, entries: "Sequence[PoolEntry]") -> "NDArray[np.float64]":
        """Return float64[n], what it is worth for each entry to go to `rank`."""
        keeping = self._keeping
        now, worth = keeping.admissions, []
        for entry in entries:
            kept = entry.kept
            if kept is None or kept.until <= now:
                kept = keeping.of(entry)
            worth.append(kept.tokens[rank] - kept.mean)
        return self._price * np.array(worth)


# The rank with most room, while Stage 1 places one entry after the other.
#
# Most entries of a burst overflow nowhere on the rank with most room over the horizon, and so go
# there (`Balance.best_rank`). A heap finds it without a look at the other ranks.


class Roomiest:
    """The ranks with a free slot, by the tokens that fill them over the horizon.

    Args:
        fleet: The ranks.
        balance: Of the same ranks.
    """

    def __init__(self, fleet: "Fleet", balance: "Balance") -> None:
        self._fleet = fleet
        self._balance = balance
        (ranks,) = fleet.free_slots.nonzero()
        if fleet.speeds is not None:
            # The tokens of ranks of other speeds do not compare.
            ranks = ranks[:0]
        filled = balance.filled[ranks]
        order = filled.argsort()
        # In order of their tokens, the ranks that are not in the heap yet: few get there at all.
        self._ranks: list[int] = ranks[order].tolist()
        self._filled: list[float] = [*filled[order].tolist(), inf]
        self._next = 0
        # (tokens, rank). A rank that was charged is there again, and its older places are stale.
        self._heap: list[tuple[float, int]] = []

    def rank_for(self, entry: "PoolEntry") -> int | None:
        """Return the rank with most room if `entry` overflows at no step there.

        None if it does, if it may not go there, or if another rank has as much room: then all ranks
        have to be compared.
        """
        self._bring_first()
        heap, balance = self._heap, self._balance
        if not heap:
            return None
        filled, rank = heap[0]
        # One of the two behind the first place is next, or the next rank that is not in the heap.
        as_much = filled + balance.rounding
        if self._filled[self._next] <= as_much or any(one <= as_much for one, _ in heap[1:3]):
            return None
        if entry.restricted or entry.kv_tokens > self._fleet.room(rank):
            return None
        return rank if balance.has_margin(rank, entry.kv_tokens) else None

    def charged(self, rank: int) -> None:
        """Note an admission to `rank`."""
        if self._ranks:
            heappush(self._heap, (self._balance.filled.item(rank), rank))

    def _bring_first(self) -> None:
        """Bring the rank with the fewest tokens to the top of the heap."""
        heap = self._heap
        while True:
            while heap and self._is_stale(*heap[0]):
                heappop(heap)
            place = self._next
            if place == len(self._ranks) or (heap and heap[0][0] <= self._filled[place]):
                return
            heappush(heap, (self._filled[place], self._ranks[place]))
            self._next += 1

    def _is_stale(self, filled: float, rank: int) -> bool:
        """Return whether a rank is fuller by now, or has no free slot."""
        free_slots = self._fleet.free_slots.item(rank)
        return not free_slots or filled != self._balance.filled.item(rank)


# The load at which the ranks would be evenly full after the round.

# Ranks rarely reach the target exactly: those that take what fits stay a little below. Without slack
# their mean would stay below the mean of all, and the target with it. From 0.3 to 1 % the results are
# the same within their errors, from 4 to 144 ranks.
_SLACK = 0.005


def target_tokens(
    is_open: NDArray[np.bool_],
    coming: float,
    ahead: NDArray[np.float64],
    persistence: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return float64[H + 1], the mean load of the open ranks once their free slots are taken.

    Args:
        is_open: bool[G]; at least one rank is.
        coming: Prompt tokens of what takes the free slots.
        ahead: float64[G, H + 1], projected KV tokens of each rank.
        persistence: float64[H + 1], the share of an admitted token that remains h steps ahead.
    """
    count = np.count_nonzero(is_open)
    of_open = ahead if count == len(ahead) else ahead[is_open]
    total = of_open.sum(axis=0) + coming * persistence
    return np.asarray((1.0 + _SLACK) / count * total)


# The oldest entries of the pool, and what scores them as arrays.
#
# The ranks of one round choose from nearly the same entries: some leave, and as many move up. So
# the arrays are made once and follow each admission, which costs less than to make them for every
# rank. An entry that leaves keeps its place in them.

_KV_TOKENS = attrgetter("kv_tokens")
_OVERTAKEN = attrgetter("overtaken")


class Candidates(NamedTuple):
    """What a rank chooses from, in order of the pool. Valid until the next admission.

    Attributes:
        entries: n entries, also such as have left.
        is_left: bool[n], whether each still waits.
        sizes: float64[n], the load of each on the rank that admits it; inf once it has left.
        overtaken: float64[n], how often each was overtaken.
        beyond_turn: float64[n], the admissions beyond its turn: first come, first served, the entries
            ahead would be admitted before it. -inf once it has left.
        held_back: bool[n], whether its tenant is to wait for others; None if none is.
        are_oldest: Whether they are the first of `Oldest`.
    """

    entries: list[PoolEntry]
    is_left: NDArray[np.bool_]
    sizes: NDArray[np.float64]
    overtaken: NDArray[np.float64]
    beyond_turn: NDArray[np.float64]
    held_back: NDArray[np.bool_] | None = None
    are_oldest: bool = False

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
    """Return the candidates with their arrays; all of them are left, some tenants' are to wait."""
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
        held_back: The tenants that are to wait for others.

    Attributes:
        spare: How many still may.
        sizes: float64[n], the load of each, also of those that have left.
    """

    def __init__(
        self, entries: list[PoolEntry], window: int, spare: int, held_back: Set[str]
    ) -> None:
        self.spare = spare
        of_all = candidates_of(entries, held_back)
        self._held_back = of_all.held_back
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


# The parameters of the two-stage rule.


@dataclass(frozen=True, slots=True)
class TwoStageSettings:
    """The parameters of the rule.

    Attributes:
        weights: F's weights; with a `gamma`, those for a fleet without turnover.
        theta: Free slots that Stage 1 leaves to Stage 2 when the pool exceeds the free slots.
        window: K, the entries that Stage 2 considers.
        patience: Overtakings that offset an overflow of one mean prompt; inf for no credit.
        hold_ns: Time in the pool for which a request may be held, see `hold`.
        prefix_affinity: Tokens of F for a token that a rank need not pull, see `affinity`; 0 for none.
        gamma: The discount of `weights`, lowered as slots turn over; None keeps the weights.
        paper: Use the paper's stages and candidates, without target, credit or reservations.
    """

    weights: Weights
    theta: int
    window: int
    patience: float
    hold_ns: int = 0
    prefix_affinity: float = 0.0
    gamma: float | None = None
    paper: bool = False


# Entries about which the predictor is asked in one call, which costs a thirtieth of one for each.
# Usually there are as many free slots; but those of ranks without memory admit nobody.
_MOST_ASKED = 256
# Entries beyond the candidates for which outlooks are made at once.
_MOST_SPARE = 128
# Ranks whose outlooks are made in one call. When the envelope rises those still to choose are lost,
# which is once or twice in a hundred admissions.
_TOGETHER = 32
# In mean prompts beyond the margin. At an eighth shares cost no idle time on the Mooncake trace, a whole one
# doubles it: what a tenant has left in the pool is what suits the ranks least.
_SHARE_PRICE = 1 / 8


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

    @property
    def share_price(self) -> float:
        """The score that a choice may cost for the tenant within its share."""
        return _SHARE_PRICE * self.settings.weights.penalty * self.pool.mean_prompt_tokens

    @cached_property
    def _held_back(self) -> Set[str]:
        """The tenants that are to wait for others."""
        return self.pool.held_back(self.settings.window)

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
            list(islice(self.allowed(rank), window)), self._held_back
        )

    def _oldest_left(self) -> Oldest:
        if self._oldest is None or self._oldest.spare <= 0:
            # Each admission takes a slot, and one entry moves up.
            spare = min(self.fleet.free, _MOST_SPARE)
            window = self.settings.window
            entries = self.pool.first(window + spare)
            # After a burst of admissions nobody has asked about these.
            self._ask_unknown(entries)
            self._oldest = Oldest(entries, window, spare, self._held_back)
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

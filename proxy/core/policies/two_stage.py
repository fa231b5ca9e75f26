"""The two-stage rule that BR-0 and BR-H share: its round, Stage 1, and the whole of it in `TwoStage`.

One call per round: Stage 1 while slots abound, where only the rank of each request is chosen;
Stage 2 (`stage_2`) once slots are scarce, where each rank chooses its requests.

docs/scheduling.md explains the rule, and gives the reason of each difference from the paper.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import compress, count, repeat
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.policies.own_trajectory import OwnTrajectory
from balanceroute.proxy.core.projection import Balance, Projection, Weights
from balanceroute.proxy.core.ranks import Assignment, Fleet
from balanceroute.proxy.core.subset import discounts, lasting_discount
from balanceroute.proxy.core.waiting import Pool, PoolEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.core.rank_memory import Keeping


# Prefix affinity: the worth of a rank that has the beginning of a request's prompt.
#
# The rank pulls only the rest. A token that it need not pull has a price in tokens of F. With kept(g) for
# the tokens of the prompt on rank g, and their mean over the open ranks, a request on g counts
#
#     price x (kept(g) - mean)
#
# more. F is minus the change of the idle tokens, so at a price of 1 a pulled token is worth as much as a
# token that one rank idles in one step. There is no threshold: an overflow of x tokens is worth a detour of
# G x kept tokens, so a conversation leaves a full rank by itself. Tokens that all ranks have, as those of
# a common system prompt, favour none.

# While slots abound: the price then only chooses between ranks, and idle time costs no output. Of
# conversations at 0.6 of the capacity 1 pulls 0.64 of the tokens, 3 0.55 and 5 0.48, with 0.0, 0.9 and
# 2.5 points more idle time. Where slots are scarce 3 would cost 1.9 % of the output, and 1 costs 0.3 %.
WHILE_FREE = 3.0


class Affinity:
    """The price during a round.

    Args:
        keeping: How much of the entries' prompts is on the ranks.
        price: Of a token that a rank need not pull, in tokens of F.
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
        """Return float64[n], the worth of `rank` for each entry."""
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
    """The ranks with a free slot, by the tokens that fill them over the horizon."""

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
        coming: Prompt tokens of the entries that take the free slots.
        ahead: float64[G, H + 1], projected KV tokens of each rank.
        persistence: float64[H + 1], the share of an admitted token that remains h steps ahead.
    """
    count = np.count_nonzero(is_open)
    of_open = ahead if count == len(ahead) else ahead[is_open]
    total = of_open.sum(axis=0) + coming * persistence
    return np.asarray((1.0 + _SLACK) / count * total)


@dataclass(frozen=True, slots=True)
class TwoStageSettings:
    weights: Weights  # F's weights; with a `gamma`, those for a fleet without turnover.
    theta: int  # Free slots that Stage 1 leaves to Stage 2 when the pool exceeds the free slots.
    window: int  # K, the entries that Stage 2 considers.
    patience: float  # Overtakings that offset an overflow of one mean prompt; inf for no credit.
    hold_ns: int = 0  # Time in the pool for which a request may be held, see `hold`.
    # Tokens of F for a token that a rank need not pull, see `affinity`; 0 for none.
    prefix_affinity: float = 0.0
    # The discount of `weights`, lowered as slots turn over; None keeps the weights.
    gamma: float | None = None
    # Use the paper's stages and candidates, without target, credit or reservations.
    paper: bool = False


# Entries in one call of the predictor, which costs a thirtieth of a call for each. Usually there are as
# many free slots; but those of ranks without memory admit no entry.
_MOST_ASKED = 256


class Round:
    """One call of `TwoStage.dispatch`.

    Args:
        projection: The projected loads; None for the present step only.
        fleet: The ranks; every admission is charged to it.
        pool: The waiting entries; an admitted one leaves it.
    """

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        fleet: Fleet,
        pool: Pool,
    ) -> None:
        self.assignments: list[Assignment] = []  # The admissions so far.
        self.settings = settings
        self.fleet = fleet
        self.pool = pool
        self._projection = projection
        # The calls of the predictor, by entry, and the entry's place in its call.
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
        # Margins and scores after them.
        self.balance = Balance(ahead, settings.weights, persistence, target, speeds)
        # The price of tokens that need not be pulled; None if they have none.
        self.affinity: Affinity | None = None
        if settings.prefix_affinity and fleet.keeping is not None:
            self.affinity = Affinity(fleet.keeping, settings.prefix_affinity * self.balance.reward)

    @cached_property
    def credit_each(self) -> float:
        """The credit that an overtaking adds to the score of the overtaken entry."""
        # `patience` overtakings offset the penalty of one mean prompt beyond the margin. Linear, so
        # that the credit of a waiting entry exceeds any overflow at last.
        settings, pool = self.settings, self.pool
        offset_tokens = 0.0 if settings.paper else pool.mean_prompt_tokens / settings.patience
        return settings.weights.penalty * offset_tokens

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
            is_held: Whether an entry waits, given its best rank after the admissions before it. Not called
                for an entry that overflows nowhere.
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
                self.ask_unknown(entries[number : number + _MOST_ASKED])
            placed.append(entry.request)
            self._charge(entry, rank, is_last=len(placed) == len(self.pool))
            if roomiest is not None:
                roomiest.charged(rank)
        # Together: one by one the large ones, which go first, would overtake thousands each.
        self.pool.admit_all(placed)
        return held

    def admit(self, entry: PoolEntry, rank: int) -> bool:
        """Admit an entry to a rank; later decisions see it. Return whether the envelope rose."""
        self.pool.admit(entry.request)
        return self._charge(entry, rank, is_last=len(self.pool) == 0)

    def _charge(self, entry: PoolEntry, rank: int, *, is_last: bool) -> bool:
        """Charge an admission to its rank; `is_last` if nothing waits after it."""
        self.assignments.append(Assignment(entry.request, RankId(rank)))
        if is_last and self.fleet.room_after is None:
            return False  # No decision of this round is left to see it.
        self.fleet.bind(rank, entry)
        full = self.fleet.free_slots.item(rank) == 0
        return self.balance.admit(rank, self._contribution(entry), full=full)

    def _contribution(self, entry: PoolEntry) -> NDArray[np.float64]:
        projection = self._projection
        if projection is None:
            return np.array([entry.kv_tokens], np.float64)
        if entry.request not in self._asked:
            self._ask(projection, [entry])
        asked, row = self._asked[entry.request]
        return np.asarray(asked.adds[row])

    def ask_unknown(self, entries: list[PoolEntry]) -> None:
        """Ask the predictor about those entries that no earlier call was about."""
        if self._projection is not None:
            unknown = [entry for entry in entries if entry.request not in self._asked]
            if unknown:
                self._ask(self._projection, unknown)

    def _ask(self, projection: Projection, entries: list[PoolEntry]) -> NDArray[np.float64]:
        """Ask the predictor how long entries stay if admitted now; return their survival."""
        requests = [entry.request for entry in entries]
        survival = projection.survival(requests, [entry.age for entry in entries])
        asked = _Asked(projection, entries, survival)
        self._asked.update(zip(requests, zip(repeat(asked), count()), strict=False))
        return survival


class _Asked:
    """The entries of one call of the predictor.

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
        """float64[n, H + 1], the tokens that each adds if it is admitted now.

        It is not needed where nothing waits after the one that is admitted.
        """
        return self._projection.newcomers(
            [entry.kv_tokens for entry in self._entries],
            self._survival,
            [entry.slots for entry in self._entries],
        )


def _loads_ahead(projection: Projection, fleet: Fleet) -> NDArray[np.float64]:
    """Return float64[G, H + 1], the projected loads; those of foreign requests stay as they are."""
    foreign = fleet.foreign_kv_tokens
    if foreign is None:
        return projection.loads_ahead(fleet.loads)
    return np.asarray(projection.loads_ahead(fleet.loads - foreign) + foreign[:, None])


# Below saturation: a large newcomer waits a moment if it would overflow every rank.
#
# While slots are free, no entry behind it has to wait for it, so the hold costs only its own delay. A rank
# often frees the room within some steps, and then the hold saves step time of all requests. Long steps
# let the slots fill up in the end, so that without the hold all requests would wait.
#
# So the hold pays where slots are about to run out; where they never do, it only lengthens TTFT. A burst
# fills most slots for a moment in either case, so how full the fleet was lately decides.

# Decisions that the mean covers: with 8 ranks x 16 slots two turnovers of the fleet.
_LATELY = 256
# Weight of the mean beside the moment. At 1.2 and 1.0 of the Mooncake trace's rate, two prefillers: the
# moment alone, from 3/4 on, leaves 20.1 % of idle time and a p99 wait of 0.12 s; from 2/3 on 18.8 % and
# 0.39 s. The mean alone comes too late for what it should prevent.
_MEAN_SHARE = 0.7
_BUSY = 2 / 3


class RankOccupancy:
    """The share of the open ranks' slots that is taken, now and over the latest decisions."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._decisions = 0

    def is_high(self, fleet: Fleet) -> bool:
        """Note a decision; return whether holds pay."""
        is_open: list[bool] = fleet.is_open.tolist()
        if sum(is_open) < 2:
            return False  # It makes no other rank wait.
        taken: int = sum(compress(fleet.bound.tolist(), is_open))
        slots = taken + fleet.free
        if not slots:
            return False
        self._decisions = min(self._decisions + 1, _LATELY)
        self._mean += (taken / slots - self._mean) / self._decisions
        return _MEAN_SHARE * self._mean + (1.0 - _MEAN_SHARE) * taken / slots > _BUSY


def is_held(work: Round, entry: PoolEntry, rank: int, now_ns: int) -> bool:
    """Return whether `entry` waits: on `rank`, its best one, it costs more than it fills."""
    if now_ns >= entry.since_ns + work.settings.hold_ns:
        return False
    (score,) = work.balance.scores_to_envelope(rank, np.array([entry.kv_tokens], np.float64))
    return bool(score < 0.0)


# Stage 1, slots abound: only the rank of each request is open.
#
# Every pooled request gets a slot now, or in a moment, see `hold`. The largest goes first, the
# classic rule for even sums, each to the rank where its F is best.


def place_overdue(work: Round, now_ns: int) -> None:
    """Admit entries past their deadline, oldest first, each where it scores best."""
    # The deadline bounds the wait of entries that never fit, whatever it costs in balance; near the
    # end of a lease it does so only up to what a repeated prefill costs. Affinity may not raise that.
    work.place(work.pool.overdue(now_ns))


def place_all(work: Round, now_ns: int, *, may_hold: bool) -> int | None:
    """Admit the oldest entries, the largest of them first.

    Returns:
        When the first hold ends; None if no entry is held.
    """
    free = work.fleet.free
    # If all entries fit, there is nothing to choose. Otherwise the last theta slots are left to
    # Stage 2, which chooses the entries as well.
    fits = work.pool.slots <= free
    entries = _oldest(work, free if fits else max(0, free - work.settings.theta))
    entries.sort(key=largest_first)
    if not (fits and may_hold):
        work.place(entries, affinity=work.affinity)
        return None
    held = work.place(
        entries, lambda entry, rank: is_held(work, entry, rank, now_ns), work.affinity
    )
    if not held:
        return None
    return min(entry.since_ns for entry in held) + work.settings.hold_ns


def largest_first(entry: PoolEntry) -> tuple[int, int]:
    """Return the key of the order of placement; ties go by arrival."""
    return -entry.kv_tokens, entry.request


def _oldest(work: Round, slots: int) -> list[PoolEntry]:
    """Return the oldest entries that together need at most `slots` slots."""
    entries: list[PoolEntry] = []
    for entry in work.pool.first(slots):
        slots -= entry.slots
        if slots < 0:
            break
        entries.append(entry)
    return entries


# The paper's Stage 1, where ours differs. Paper: Algorithm 2.


def fill_longest_queues(work: Round) -> None:
    """Stage 1: the rank with most free slots takes the entry with the best F."""
    fleet = work.fleet
    while len(work.pool) and fleet.free_slots.sum() > work.settings.theta:
        rank = int(fleet.free_slots.argmax())  # On a tie the lowest.
        room = fleet.room(rank)
        candidates = [e for e in work.allowed(rank) if e.kv_tokens <= room]
        if not candidates:
            return
        scores = work.balance.scores(
            rank, np.array([entry.kv_tokens for entry in candidates], np.float64)
        )
        work.admit(candidates[int(scores.argmax())], rank)


# No choice: one rank has free slots, and there is room on it for everything that waits.
#
# So it is in a fleet of one rank until its slots are taken. Stage 1 would come to the same, at
# the cost of projected loads that decide nothing.

_KV_TOKENS, _RESTRICTED = attrgetter("kv_tokens"), attrgetter("restricted")


def fill_only_rank(fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment] | None:
    """Admit everything that waits; None, with nothing admitted, if there is a choice.

    Not where requests may be held.

    Args:
        fleet: The ranks; at least one has a free slot.
        pool: The waiting entries.
        now_ns: For deadlines: an entry that is late may have to go first, or not at all.
    """
    (ranks,) = fleet.free_slots.nonzero()
    if len(ranks) > 1 or fleet.room_after is not None:
        return None
    rank = RankId(ranks.item(0))
    if pool.slots > fleet.free_slots.item(rank) or pool.overdue(now_ns):
        return None
    entries = pool.first(len(pool.entries))
    fits = sum(map(_KV_TOKENS, entries)) <= fleet.free_kv_tokens.item(rank)
    if not fits or any(map(_RESTRICTED, entries)):
        return None
    if len(entries) > 1:
        entries.sort(key=largest_first)
    requests = [entry.request for entry in entries]
    pool.admit_all(requests)
    return [Assignment(request, rank) for request in requests]


# One call per round: the stages in their order, and the discount that follows the turnover.

Stage2 = Callable[[Round, dict[int, RequestId]], None]
"""Has ranks choose their requests; `reserved` as in `TwoStage`."""
# With prompts of two thirds of the outputs a slot holds on average as much of one as of the other.
_LEAST_RATIO = 1.5


def ignore_stage(stage: str) -> None:
    """Do nothing: the stages are not timed."""
    del stage


class TwoStage:
    """BR-0 without a projection, BR-H with one.

    Args:
        settings: The parameters; `settings.weights.steps` has one weight per projected step.
        projection: The projected loads; None for the present step only.
        stage_2: The second stage, ours or the paper's.
        on_stage: Called with the name of each stage as it ends, so that a driver can time them.
        own_trajectory: Decides in its place while outputs are long beside prompts; None for never.
    """

    slots_beyond_batch = 0

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        stage_2: Stage2,
        on_stage: Callable[[str], None] = ignore_stage,
        own_trajectory: OwnTrajectory | None = None,
    ) -> None:
        self.projection = projection
        self.next_decision_ns: int | None = None
        self.own_trajectory = own_trajectory
        # The entry for which each reserved rank makes room; see `stage_2`. Reservations outlast a
        # round; each ends when its entry leaves the pool.
        self.reserved: dict[int, RequestId] = {}
        self._settings = settings
        self._gamma = settings.gamma  # As lowered last, at this turnover.
        self._per_step = -1.0
        self._stage_2 = stage_2
        self._on_stage = on_stage
        self._occupancy = RankOccupancy()
        self._outputs_are_long = False

    @property
    def skill_share(self) -> float | None:
        """How much of a prediction of one request counts; None while none does."""
        own = self.own_trajectory
        return own.skill.share if own is not None and self._outputs_are_long else None

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Admit entries that fit. Paper: Algorithms 2 and 3."""
        self.next_decision_ns = None
        own = self.own_trajectory
        self._outputs_are_long = own is not None and own.slots.output_ratio >= _LEAST_RATIO
        if own is not None and self._outputs_are_long:
            return self._by_trajectory(own, fleet, pool, now_ns)
        may_hold = self._settings.hold_ns > 0 and self._occupancy.is_high(fleet)
        # The usual case in saturation; it costs no projection.
        if not len(fleet.free_slots.nonzero()[0]):  # A third of what `count_nonzero` takes.
            return []
        if not (self._settings.paper or may_hold):
            forced = self._forced(fleet, pool, now_ns)
            if forced is not None:
                return forced
        self._discount(fleet)
        work = Round(self._settings, self.projection, fleet, pool)
        self._on_stage("projection")
        if self._settings.paper:
            fill_longest_queues(work)
        else:
            # Overdue entries first, while every rank still has its slots.
            place_overdue(work, now_ns)
            self.next_decision_ns = place_all(work, now_ns, may_hold=may_hold)
            if self.reserved:
                self._end_reservations(work)
        self._on_stage("stage_1")
        # The free slots would go to the entries that are held.
        if self.next_decision_ns is None and len(pool):
            self._stage_2(work, self.reserved)
        self._on_stage("stage_2")
        return work.assignments

    def _by_trajectory(
        self, own: OwnTrajectory, fleet: Fleet, pool: Pool, now_ns: int
    ) -> list[Assignment]:
        assert self.projection is not None
        self.projection.rest()
        free = fleet.free_slots > 0
        if not free.any():
            return []
        # Where ranks are chosen, each admission shows what its prediction was worth.
        forced = self._forced(fleet, pool, now_ns) if len(free) == 1 else None
        return own.dispatch(fleet, pool, now_ns) if forced is None else forced

    def _forced(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment] | None:
        forced = fill_only_rank(fleet, pool, now_ns)
        if forced is not None:
            self._on_stage("stage_1")
        return forced

    def _end_reservations(self, work: Round) -> None:
        """End those whose entry has left the pool, or whose rank is closed."""
        is_open = work.fleet.is_open
        for rank, request in list(self.reserved.items()):
            if request not in work.pool or rank >= len(is_open) or not is_open[rank]:
                del self.reserved[rank]

    def _discount(self, fleet: Fleet) -> None:
        """Make the weights follow the turnover."""
        base = self._settings.gamma
        if base is None:
            return
        assert self.projection is not None
        per_step = fleet.turnover.per_step
        if per_step == self._per_step:
            return
        self._per_step = per_step
        # Rounded to hundredths, so most rounds change nothing.
        gamma = lasting_discount(base, per_step / len(fleet.loads))
        if gamma != self._gamma:
            self._gamma = gamma
            steps = discounts(self.projection.horizon_steps, gamma)
            weights = replace(self._settings.weights, steps=steps)
            self._settings = replace(self._settings, weights=weights)

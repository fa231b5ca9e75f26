"""BR-H where outputs are long beside prompts: each candidate by its own predicted trajectory.

F knows a candidate by its size alone. Where outputs exceed prompts the size says little: a rank's
load is what its requests have emitted, and two requests of one size differ by when they end. Here a
free slot of rank g takes the entry e of the `_WINDOW` oldest that minimises

    sum over h of v(h) (P_g(h) + trajectory_e(h) - T(h))**2 / sum of v(h) mean(h)**2 - credit_e,

P_g the summed trajectories of its requests (`curves.py`), T the mean of all ranks with every
free slot taken by a mean candidate, more on a faster rank. The credit of an entry is its overtakings, in
lengths of the pool: how much later it is than it would be first come, first served.

Two measurements decide whether this rule applies. The two-stage rule decides until the mean output is 1.5
times the mean prompt. And a candidate's trajectory counts in proportion to how well predictions came true
so far: a predictor that cannot distinguish requests leaves only the credit, which is first come, first
served. The part of a prediction that follows from the prompt alone does not count as skill. Every
predictor knows it, and to choose by it does harm: a rank that lacks load would take the largest prompts,
whatever their outputs, and lack load again where these are short.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.curves import POINTS, WEIGHTS, Curves, Slots
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.projection import Projection, first_of_each
from balanceroute.proxy.core.ranks import Assignment, Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry

if TYPE_CHECKING:
    from balanceroute.proxy.core.prediction import OutputPredictor


# How far predictions of single requests come true, measured on requests that leave.
#
# A prediction is a request's deviation from the mean request, and so is its outcome. The best linear use of
# the prediction is its regression slope: 1 if it is calibrated, less if it exaggerates, 0 or below if it is
# worthless. A predictor with one answer for all requests has no slope; a little of the outcomes' variance,
# added to that of the predictions, makes it 0 then.

# Latest requests that the slope is of, and how many without any skill are taken to be before them.
_WEIGHT = 1 / 256
_DOUBTED = 16
# If a predictor explains this share of the variance, half of its deviation counts.
_MARGIN = 0.05


class Skill:
    """The slope of outcome on prediction."""

    def __init__(self) -> None:
        self.share = 0.0  # How much of a prediction to believe, 0 to 1.
        self._count = 0
        # Running means: prediction, outcome, and their second moments.
        self._means = [0.0] * 5

    def learn(self, predicted: float, outcome: float) -> None:
        """Compare one request's prediction with what it did."""
        self._count += 1
        weight = max(1 / self._count, _WEIGHT)
        latest = (predicted, outcome, predicted**2, outcome**2, predicted * outcome)
        self._means = [
            mean + weight * (value - mean) for mean, value in zip(self._means, latest, strict=True)
        ]
        x, y, xx, yy, xy = self._means
        spread = (xx - x * x) + _MARGIN * (yy - y * y)
        slope = (xy - x * y) / spread if spread > 0.0 else 0.0
        self.share = min(max(slope, 0.0), 1.0) * self._count / (self._count + _DOUBTED)


# The summed trajectories of the requests of each rank.
#
# A row is the survival of the requests times the KV tokens that they hold, and their survival
# times what a slot gains while its request runs (`Slots.gains`). The gains differ from one
# decision to the next, as another pool would refill the slots. So the survival is summed first,
# and the gains count once for each rank. The two sums are kept until the next step, or a change
# of the rank.


class RankTrajectories:
    """The expected load of each rank over a whole output."""

    def __init__(self, projection: "Projection", curves: "Curves", slots: "Slots") -> None:
        self._projection = projection
        self._curves = curves
        self._slots = slots
        # Of each rank, since when its row is kept, and since when its sums, -1 for neither.
        self._made_at = np.full(projection.ranks, -1)
        self._summed_at = np.full(projection.ranks, -1)
        self._rows = np.zeros((projection.ranks, POINTS))
        # The survival, times the KV tokens that the requests hold and times their sequences.
        self._sums = np.zeros((projection.ranks, 2, POINTS))

    def forget(self) -> None:
        """Make all rows anew, as the grid is another."""
        self._made_at[:] = self._summed_at[:] = -1

    def rows(self, free: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return float64[G, POINTS], the trajectories of the ranks. Read-only.

        Args:
            free: bool[G], ranks with a free slot.
        """
        # Between two free slots a rank's requests go on as expected, but a point's width later its row
        # has to move. The step clock may have restarted.
        now = self._projection.now
        age = now - self._made_at
        due = free | (self._made_at < 0) | (age < 0) | (age >= self._slots.width)
        # Within a step most ranks are as they were, but the candidates for their slots are not.
        stale = due & (self._projection.changed | (self._summed_at != now))
        if stale.any():
            self._sum(stale)
        sums = self._sums[due]
        self._rows[due] = sums[:, 0] + sums[:, 1] @ self._slots.gains
        self._made_at[due] = now
        return self._rows

    def _sum(self, stale: NDArray[np.bool_]) -> None:
        running = self._projection.running_on(stale)
        self._sums[stale] = 0.0
        self._summed_at[stale] = self._projection.now
        self._projection.changed[stale] = False
        if not len(running.places):
            return
        curves = self._curves.rows_of(running)
        weights = np.array([running.kv_tokens, running.sequences], np.float64)
        ranks = running.ranks[first_of_each(running.ranks)]
        self._sums[ranks] = self._curves.sums(
            curves, running.ages, self._slots.width, weights=weights, groups=running.ranks
        )
        # These have the mean of the latest candidates, which is another at each decision.
        self._summed_at[running.ranks[curves == 0]] = -1


_WINDOW = 64
# The squared deviation that one pool's length of overtakings offsets, in those of an empty slot.
_CREDIT = 3.0
# Likewise: the most that a choice may cost for a tenant within its share.
_SHARE_PRICE = 1 / 4
# Up to which two costs count as equal, or two levels of ranks; relative where they are large. A sum in a
# product of matrices is rounded in another way from row to row.
_ROUNDING = 1e-8


class OwnTrajectory:
    """Decides for `TwoStage` while outputs are long beside prompts.

    Args:
        predictor: Asked for each candidate once.
        on_stage: Called with the name of each stage as it ends.
    """

    def __init__(
        self,
        projection: Projection,
        predictor: "OutputPredictor",
        on_stage: Callable[[str], None],
    ) -> None:
        self._projection = projection
        self.skill = Skill()
        self.slots = Slots()
        self._curves = Curves(predictor)
        self._on_stage = on_stage
        self._ranks = RankTrajectories(projection, self._curves, self.slots)
        self._predicted: dict[RequestId, _Predicted] = {}
        projection.on_leave = self._leave

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Admit entries that fit; some rank has a free slot."""
        factor = self.slots.fit()
        if factor != 1.0:
            self._ranks.forget()
            self._curves.stretch(factor)
        # One entry of the window moves up with every admission.
        entries = pool.first(_WINDOW + fleet.free)
        candidates = self._candidates(entries, pool)
        rows = self._ranks.rows(fleet.free_slots > 0)
        self._on_stage("projection")
        chosen = _Round(fleet, pool, candidates, rows, self.skill.share)
        chosen.place_overdue(now_ns)
        self._on_stage("stage_1")
        chosen.fill()
        self._predicted.update(chosen.predicted)
        self._on_stage("stage_2")
        return chosen.assignments

    def _candidates(self, entries: list[PoolEntry], pool: Pool) -> "_Candidates":
        """Ask the predictor about the entries, and assume that they refill the empty slots."""
        self._curves.make_room(
            len(entries), lambda request: request in self._projection or request in pool
        )
        curves = self._curves.ask([entry.request for entry in entries], self.slots.width)
        self.slots.expect(self._curves.lasting_output(self.slots.width))
        ages = np.array([entry.age for entry in entries])
        tokens = np.array([entry.kv_tokens for entry in entries])
        sequences = np.array([entry.slots for entry in entries])
        survival = self._curves.survival(curves, ages, self.slots.width)
        # Empty slots are refilled from the pool, of which these are the next.
        prompts = tokens // sequences
        self.slots.refill_with(prompts, survival)
        # With one curve for all, the tokens that a request holds are linear in its prompt.
        alike = np.add.reduce(survival) / len(entries)
        expected = alike @ self.slots.gained + prompts * (alike @ WEIGHTS)
        loads = self.slots.loads(tokens, sequences, survival)
        return _Candidates(entries, sequences, loads, expected)

    def _leave(self, request: RequestId, prompt_tokens: int, age: int | None) -> None:
        """Learn from a request that left its rank, whatever the reason: its slot is free."""
        predicted = self._predicted.pop(request, None)
        if age is None:
            return  # It was lost or cancelled on the way.
        self.slots.leave(prompt_tokens, age)
        if predicted is not None:
            outcome = self.slots.level(prompt_tokens, age) - predicted.expected
            self.skill.learn(predicted.deviation, outcome / predicted.level)


class _Predicted(NamedTuple):
    deviation: float  # From `expected`, relative to `level`.
    expected: float  # What its slot would hold if only its prompt were known.
    level: float  # What the slot of a mean request would.


class _Candidates(NamedTuple):
    """The oldest entries of the pool."""

    entries: list[PoolEntry]  # In order, at least one.
    sequences: NDArray[np.int64]  # int64[n], of each.
    loads: NDArray[np.float64]  # float64[n, POINTS], their trajectories if they were admitted now.
    # float64[n], what a sequence of each would hold if only its prompt were known.
    expected: NDArray[np.float64]


class _Round:
    """One call of `OwnTrajectory.dispatch`.

    Args:
        ranks: float64[G, POINTS], the summed trajectories of each rank's requests.
        share: How much of a trajectory's deviation from the mean counts.
    """

    def __init__(
        self,
        fleet: Fleet,
        pool: Pool,
        candidates: _Candidates,
        ranks: NDArray[np.float64],
        share: float,
    ) -> None:
        self.assignments: list[Assignment] = []  # The admissions.
        self.predicted: dict[RequestId, _Predicted] = {}  # Of each of one sequence.
        self._fleet = fleet
        self._pool = pool
        self._speeds = np.ones(len(ranks)) if fleet.speeds is None else fleet.speeds
        self._entries, slots, loads, self._expected = candidates
        self._mean: NDArray[np.float64] = (1.0 / slots) @ loads / len(slots)
        self._level = float(self._mean @ WEIGHTS)
        self._scale = float(self._mean**2 @ WEIGHTS)
        self._levels = loads @ WEIGHTS
        self._believed = share * loads + (1.0 - share) * slots[:, None] * self._mean
        self._full = ranks + fleet.free_slots[:, None] * self._mean
        if fleet.foreign_kv_tokens is not None:
            self._full += fleet.foreign_kv_tokens[:, None]
        self._full_levels = self._full @ WEIGHTS
        is_open = fleet.is_open
        self._all_speeds = float(self._speeds[is_open].sum())
        # The target of a rank of speed 1.
        self._target = self._full[is_open].sum(axis=0) / self._all_speeds
        self._places = {entry.request: place for place, entry in enumerate(self._entries)}
        self._held_back = pool.held_back(_WINDOW)

    def place_overdue(self, now_ns: int) -> None:
        """Admit entries past their deadline, oldest first, where most is missing."""
        for entry in self._pool.overdue(now_ns):
            open_ranks = self._fleet.open_to(entry)
            if entry.request in self._places and open_ranks.any():
                self._admit(entry, self._emptiest(open_ranks))

    def fill(self) -> None:
        """Serve the ranks, the emptiest first, until slots or entries run out."""
        open_ranks = self._fleet.free_slots > 0
        while len(self._pool) and open_ranks.any():
            rank = self._emptiest(open_ranks)
            places = self._candidates(rank)
            if not places:
                # Done: room only shrinks during a round.
                open_ranks[rank] = False
                continue
            self._admit(self._best(places, rank), rank)
            open_ranks[rank] = self._fleet.free_slots.item(rank) > 0

    def _best(self, places: list[int], rank: int) -> PoolEntry:
        entries = self._entries
        if len(places) == 1:
            return entries[places[0]]
        # The target of one slot of the rank.
        missing = self._target * self._speeds[rank] - self._full[rank] + self._mean
        deviation = self._believed[places] - missing
        late = np.array([entries[place].overtaken for place in places]) / len(self._pool)
        cost = deviation**2 @ WEIGHTS / self._scale - _CREDIT * late
        if self._held_back:
            waits = [entries[place].ticket.tenant in self._held_back for place in places]
            preferred = np.where(waits, np.inf, cost)
            if preferred.min() <= cost.min() + _SHARE_PRICE:
                cost = preferred
        # On a tie the oldest.
        return entries[places[_first_of_least(cost)]]

    def _emptiest(self, among: NDArray[np.bool_]) -> int:
        """Return the rank of which a slot misses most."""
        spare = self._full_levels - self._speeds * (self._target @ WEIGHTS)
        return _first_of_least(np.where(among, spare, np.inf))

    def _candidates(self, rank: int) -> list[int]:
        room, places = self._fleet.room(rank), self._places
        return [
            places[entry.request]
            for entry in self._pool.first(_WINDOW)
            if entry.kv_tokens <= room
            and entry.request in places
            and (not entry.restricted or self._fleet.open_to(entry)[rank])
        ]

    def _admit(self, entry: PoolEntry, rank: int) -> None:
        place = self._places[entry.request]
        if entry.slots == 1:
            expected = self._expected.item(place)
            deviation = (self._levels.item(place) - expected) / self._level
            self.predicted[entry.request] = _Predicted(deviation, expected, self._level)
        free = self._fleet.free_slots.item(rank)
        self._pool.admit(entry.request)
        self._fleet.bind(rank, entry)
        self.assignments.append(Assignment(entry.request, RankId(rank)))
        if not len(self._pool):
            return  # No decision of this round is left to see it.
        taken = free - self._fleet.free_slots.item(rank)
        change = self._believed[place] - taken * self._mean
        self._full[rank] += change
        self._full_levels[rank] += change @ WEIGHTS
        self._target += change / self._all_speeds


def _first_of_least(values: NDArray[np.float64]) -> int:
    """Return the place of the first of the least values; values that differ by rounding are equal."""
    least = values.item(values.argmin())
    return int((values <= least + _ROUNDING * (1.0 + abs(least))).argmax())

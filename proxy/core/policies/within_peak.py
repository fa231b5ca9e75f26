"""Any late-binding policy, on ranks that take a request only if their KV peak is expected to fit.

It shows the policy less free memory than there is; all else is the policy's. An empty rank takes any
request, so nothing waits for ever.
"""

from math import log1p
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.curves import HORIZON_OUTPUTS, LONGEST, POINTS, Curves
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.core.projection import Deposits, first_of_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.core.prediction import OutputPredictor
    from balanceroute.proxy.core.ranks import Assignment, Fleet, Follower, Policy
    from balanceroute.proxy.core.waiting import Pool, PoolEntry


# How many more KV tokens fit on a rank, given how its requests will grow and when they will end.
#
# The requests of a rank hold L(h) = sum of x_i = w_i + n_i h over those that still run in h
# steps. A request runs with the probability S_i(h) that the predictor gives. So for every t > 0
# (Chernoff)
#
#     log Pr[L(h) > C] <= K_t(h) - t C,    K_t = sum of log(1 - S + S exp(t x)),
#
# and surely L(h) <= T = sum of x. Few large requests that mostly still run, and many small ones
# of which few do, are both bounded well, where a normal distribution with a correction for skew
# is not.
#
# A newcomer **fits** if with it T <= C, or for one t of a grid the bound is at most log(1 - q),
# at every h. The largest one follows in closed form at each point, for a newcomer that runs as
# long as the mean candidate. Once one is admitted, its own curve counts.
#
# That the expected peak of a batch decides, and not its present size, is from Past-Future (Gong
# et al., arXiv 2507.10150); there the lengths are drawn from the past ones, and the peak is that
# of one draw.

_POINTS = np.arange(POINTS)
_FIRST_WIDTH = 32
# A predictor that expects no end must not cost memory and time without one.
_MOST_STEPS = 1 << 15
# A rank's row is as good as new for so many parts of a point's width.
_FRESH_PARTS = 4
# t x C. From many small requests to one that fills the rank; the bound is flat between two of them.
_TILTS = np.array([2.0, 3.5, 6.0, 10.0, 17.0, 28.0, 48.0, 80.0, 130.0])
# exp() of more is no number.
_LARGEST_EXPONENT = 500.0


class Residents:
    """The bound requests in arrays; passes every change on to another follower of the ledger.

    Args:
        other: The policy's own follower; None if it has none.

    Attributes:
        now: The step clock.
        changed: bool[G], ranks that requests joined or left since the caller cleared it.
    """

    def __init__(self, ranks: int, other: "Follower | None") -> None:
        self.ranks = ranks
        self._other = other
        self._reset()

    def _reset(self) -> None:
        self.now = 0
        self.changed = np.ones(self.ranks, np.bool_)
        self.requests = Deposits(0, 0)

    def clear(self) -> None:
        self._reset()
        if self._other is not None:
            self._other.clear()

    def bind(
        self, request: RequestId, rank: RankId, kv_tokens: int, age: int, sequences: int = 1
    ) -> None:
        self.requests.add(
            request, rank, kv_tokens=kv_tokens, age=age, sequences=sequences, now=self.now
        )
        self.changed[rank] = True
        if self._other is not None:
            self._other.bind(request, rank, kv_tokens, age, sequences)

    def start(self, request: RequestId) -> None:
        place = self.requests.place_of[request]
        self.requests.since[place] = self.now
        self.requests.started[place] = True
        if self._other is not None:
            self._other.start(request)

    def emit(self, request: RequestId, tokens: int) -> None:
        self.requests.tokens[self.requests.place_of[request]] += tokens
        if self._other is not None:
            self._other.emit(request, tokens)

    def unbind(self, request: RequestId) -> None:
        place = self.requests.remove(request)
        self.changed[self.requests.rank[place]] = True
        self.requests.rank[place] = -1
        if self._other is not None:
            self._other.unbind(request)

    def step(self) -> None:
        self.now += 1
        if self._other is not None:
            self._other.step()

    def check(self) -> None:
        if self._other is not None:
            self._other.check()


class PeakRoom:
    """The room of every rank.

    Args:
        predictor: Asked for each candidate once.
        capacity: KV tokens that fit on a rank.
        quantile: q; from 0.5 to below 1.
    """

    def __init__(
        self, residents: Residents, predictor: "OutputPredictor", *, capacity: int, quantile: float
    ) -> None:
        self._residents = residents
        self._curves = Curves(predictor)
        self._capacity = capacity
        self._tilts = _TILTS / capacity
        self._log_risk = log1p(-quantile)
        self._width = _FIRST_WIDTH
        # K_t for each t, and T, of each rank at each point.
        self._sums = np.zeros((residents.ranks, len(_TILTS) + 1, POINTS))
        self._made_at = np.full(residents.ranks, -1)
        self._newcomer = np.ones(POINTS)

    def of_ranks(
        self, ranks: NDArray[np.bool_], entries: "Sequence[PoolEntry]", pool: "Pool"
    ) -> NDArray[np.int64]:
        """Return int64[G], the KV tokens of the largest request that fits; 0 for ranks not asked for.

        Args:
            ranks: bool[G], the ranks in question.
            entries: The candidates, at least one.
        """
        requests = [entry.request for entry in entries]
        known = self._residents.requests.place_of
        self._curves.make_room(len(entries), lambda one: one in known or one in pool)
        rows = self._fit_grid(requests)
        ages = np.array([entry.age for entry in entries], np.int64)
        survival = self._curves.survival(rows, ages, self._width)
        self._newcomer = survival.mean(axis=0)
        self._project(ranks)
        room = np.zeros(len(ranks), np.int64)
        room[ranks] = self._largest(self._sums[ranks])
        return room

    def admit(self, rank: int, entry: "PoolEntry") -> int:
        """Add a request to a rank, and return the KV tokens that then still fit there."""
        row = self._curves.row_of(entry.request)
        survival = self._curves.survival(np.array([row]), np.array([entry.age]), self._width)
        grown = entry.kv_tokens + entry.slots * self._width * _POINTS
        self._sums[rank] += self._sums_of(grown[None], survival)[0]
        self._made_at[rank] = -1  # The round may be undone.
        return int(self._largest(self._sums[rank : rank + 1])[0])

    def _fit_grid(self, requests: "Sequence[RequestId]") -> NDArray[np.int64]:
        """Ask about the candidates, on a grid that reaches as far as their outputs do.

        Returns:
            int64[n], the rows of their curves.
        """
        rows = self._curves.ask(requests, self._width)
        lasting = self._curves.lasting_output(self._width)
        fitting = max(1, round(HORIZON_OUTPUTS * lasting / (POINTS - 1)))
        width = min(round(1.25 * fitting), _MOST_STEPS // LONGEST)
        if not fitting <= self._width <= 2 * fitting and width != self._width:
            self._curves.stretch(width / self._width)
            self._width = width
            self._made_at[:] = -1
        return rows

    def _project(self, ranks: NDArray[np.bool_]) -> None:
        """Make the rows of the ranks that changed, or were not made anew for long."""
        residents = self._residents
        age = residents.now - self._made_at
        old = (self._made_at < 0) | (age < 0) | (_FRESH_PARTS * age >= self._width)
        stale = ranks & (residents.changed | old)
        if not stale.any():
            return
        running = residents.requests.running_on(stale, residents.now)
        rows = self._curves.rows_of(running)
        survival = self._curves.survival(rows, running.ages, self._width)
        grown = running.kv_tokens[:, None] + np.multiply.outer(
            running.sequences, self._width * _POINTS
        )
        sums = self._sums_of(grown, survival)
        self._sums[stale] = 0.0
        starts = first_of_each(running.ranks)
        if len(starts):
            self._sums[running.ranks[starts]] = np.add.reduceat(sums, starts, axis=0)
        self._made_at[stale] = residents.now
        residents.changed[stale] = False

    def _sums_of(
        self, grown: NDArray[np.int64], survival: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return float64[n, tilts + 1, POINTS], what each request adds to K_t and T."""
        held = np.asarray(grown, np.float64)[:, None, :]
        exponents = np.minimum(self._tilts[:, None] * held, _LARGEST_EXPONENT)
        runs = np.clip(survival, 0.0, 1.0)[:, None, :]
        return np.concatenate([np.log1p(runs * np.expm1(exponents)), held], axis=1)

    def _largest(self, sums: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return int64[n], the largest mean newcomer that fits beside float64[n, tilts + 1, POINTS].

        With e = t C + log(1 - q) - K_t and S the newcomer's survival, x = w + h solves

            log(1 - S + S exp(t x)) = e.
        """
        spare = self._tilts[:, None] * self._capacity + self._log_risk - sums[:, :-1]
        runs = np.maximum(self._newcomer, np.finfo(np.float64).tiny)
        exponents = np.clip(spare, 0.0, _LARGEST_EXPONENT)
        # As log1p(expm1(e) / S), which for a small S is no number.
        with np.errstate(divide="ignore"):
            largest = np.logaddexp(0.0, np.log(np.expm1(exponents)) - np.log(runs))
        largest = (largest / self._tilts[:, None]).max(axis=1)
        # What fits even if all of them stay.
        largest = np.maximum(largest, self._capacity - sums[:, -1])
        room = (largest - self._width * _POINTS).min(axis=1)
        return np.asarray(np.maximum(room, 0.0), np.int64)


# The candidates whose mean stands for the next request.
_WINDOW = 64


class WithinPeak:
    """Decides as `rule` does.

    Args:
        rule: Binds late, or at most some slots beyond the batch.
        capacity: KV tokens that fit on a rank.
        quantile: See `PeakRoom`.
    """

    def __init__(
        self,
        rule: "Policy",
        predictor: "OutputPredictor",
        *,
        ranks: int,
        capacity: int,
        quantile: float,
    ) -> None:
        self._rule = rule
        self.slots_beyond_batch = rule.slots_beyond_batch
        self.projection = Residents(ranks, rule.projection)
        self._room = PeakRoom(self.projection, predictor, capacity=capacity, quantile=quantile)

    @property
    def skill_share(self) -> float | None:
        """See `TwoStage`; None for other rules."""
        return self._rule.skill_share if isinstance(self._rule, TwoStage) else None

    @property
    def next_decision_ns(self) -> int | None:
        return self._rule.next_decision_ns

    def dispatch(self, fleet: "Fleet", pool: "Pool", now_ns: int) -> "list[Assignment]":
        free = fleet.free_slots > 0
        if free.any():
            entries = pool.first(_WINDOW + fleet.free)
            room = self._room.of_ranks(free, entries, pool)
            if fleet.foreign_kv_tokens is not None:
                room = room - fleet.foreign_kv_tokens
            fleet.free_kv_tokens = np.minimum(fleet.free_kv_tokens, room)
            fleet.room_after = self._room.admit
        return self._rule.dispatch(fleet, pool, now_ns)

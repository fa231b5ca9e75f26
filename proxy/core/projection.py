"""Projected KV load of every rank over the next H steps, and the balance of a round of decisions on it.

Each active request adds a **deposit** to its rank's row: the tokens that it is expected to hold at
each of the next H + M steps. A step moves the window on by one column. A departure subtracts the rest
of the deposit. Every M emitted tokens (or sooner, see below) a fresh prediction replaces the deposit.
So a step costs O(refreshed requests x (H + M)), not O(requests x H). Deposits are whole tokens, so
that adding and subtracting are exact and `check()` can demand equality with a recount.

Two forms of a deposit, w the request's KV tokens and h steps ahead:

* **expected**: (w + h) x Pr[still running after h steps].
* **point** (the paper's): w + h up to a predicted departure, then 0. An estimate of H means that
  the request stays. Paper: §C.1, Eq. 7.

A request gains one token per sequence and step. Its survival is predicted as that of one sequence.

Between refreshes a request turns out to be still running, which its older deposit only expected with
some probability. The expected form corrects for that per rank: the row is scaled so that its first
column is the rank's present load. A refresh is due early when the deposit has become implausible: at
the predicted departure (point; the paper's floor rule, §C.2.3), or once the request had only an even
chance to be running still (expected).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.prediction import composite_steps
from balanceroute.proxy.core.subset import FCurve, excess, f_score

if TYPE_CHECKING:
    from balanceroute.proxy.core.prediction import OutputPredictor


# The data of each bound request in a projection: arrays with one place per request.


class Running(NamedTuple):
    """Bound requests in the order of their ranks; int64[n] each."""

    requests: NDArray[np.int64]
    places: NDArray[np.int64]  # In `curves`.
    ranks: NDArray[np.int64]  # Ascending.
    kv_tokens: NDArray[np.int64]  # That each holds.
    ages: NDArray[np.int64]  # Tokens that each sequence has emitted.
    sequences: NDArray[np.int64]  # Tokens that each gains per step.
    curves: NDArray[np.int64]  # See `Deposits`; for all places, to be written to.


# The values of a place without a request in the arrays of `Deposits`.
_EMPTY = {
    **dict.fromkeys(("request", "rank", "due", "curves"), -1),
    **dict.fromkeys(("since", "tokens", "base", "started", "_padded"), 0),
    "sequences": 1,
}


class Deposits:
    """The deposits of all bound requests: they cover `width` steps, W, and are made anew after M, `longest`."""

    def __init__(self, width: int, longest: int) -> None:
        places = 64
        self._width = width
        # The place of each request in the arrays.
        self.place_of: dict[RequestId, int] = {}
        self.request = np.full(places, -1, np.int64)
        self.rank = np.full(places, -1, np.int64)  # -1 without a request.
        self.since = np.zeros(places, np.int64)  # The step at which the deposit starts.
        self.tokens = np.zeros(places, np.int64)  # KV tokens at that step.
        self.sequences = np.ones(places, np.int64)  # Tokens that it gains with each step.
        # KV tokens at age 0: age = (tokens - base) / sequences.
        self.base = np.zeros(places, np.int64)
        # The step at which it is predicted again; -1 for none.
        self.due = np.full(places, -1, np.int64)
        self.started = np.zeros(places, np.bool_)  # Whether it decodes yet.
        # The row of its survival curve in `Curves`; -1 until it is looked up.
        self.curves = np.full(places, -1, np.int64)
        # M zeros follow each row, so that the rest of a deposit is a window of W columns.
        self._padded: NDArray[np.int32] = np.zeros((places, width + longest), np.int32)
        self._free = list(range(places))
        self._make_views()

    def _make_views(self) -> None:
        # int32[places, W], the tokens that each is expected to hold at each step.
        self.expected = self._padded[:, : self._width]
        # The W columns that begin at each place of the padded rows.
        windows = sliding_window_view(self._padded.ravel(), self._width)
        self.windows: NDArray[np.int32] = windows
        # The memory that `add` writes: one number so takes a fifth of the time of an array.
        names = ("request", "rank", "since", "tokens", "sequences", "base", "curves", "started")
        self._memory: list[memoryview] = [getattr(self, name).data for name in names]

    def add(
        self,
        request: RequestId,
        rank: RankId,
        *,
        kv_tokens: int,
        age: int,
        sequences: int,
        now: int,
    ) -> int:
        """Take in a request that has not started, and return its place; nothing is expected yet."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self.place_of[request] = place
        numbers, ranks, since, tokens, each, base, curves, started = self._memory
        numbers[place] = request
        ranks[place] = rank
        since[place] = now
        tokens[place] = kv_tokens
        each[place] = sequences
        base[place] = kv_tokens - age * sequences
        curves[place] = -1
        started[place] = False
        return place

    def remove(self, request: RequestId) -> int:
        """Forget a request, and return the place that it had."""
        place = self.place_of.pop(request)
        self._free.append(place)
        return place

    def running_on(self, ranks: NDArray[np.bool_], now: int) -> Running:
        """Return the requests bound to some ranks, bool[G], as they are at the step `now`."""
        # A place without a request reads the last one.
        (places,) = np.append(ranks, False)[self.rank].nonzero()
        # Numbers of one or two bytes are sorted in a tenth of the time.
        by_rank = self.rank[places].astype(np.min_scalar_type(len(ranks))).argsort(kind="stable")
        places = places[by_rank]
        tokens, sequences = self.tokens[places], self.sequences[places]
        grown = (now - self.since[places]) * self.started[places]
        return Running(
            self.request[places],
            places,
            self.rank[places],
            tokens + grown * sequences,
            (tokens - self.base[places]) // sequences + grown,
            sequences,
            self.curves,
        )

    def rest(self, place: int, now: int) -> NDArray[np.int32]:
        """Return the rest of a deposit, from the step `now` on."""
        return self.expected[place, now - self.since.item(place) :]

    def advance(self, places: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        """Let deposits start at `now`, and return where their rests begin.

        None of them is older than M steps.
        """
        passed = now - self.since[places]
        self.tokens[places] += np.where(self.started[places], passed, 0) * self.sequences[places]
        self.since[places] = now
        return np.asarray(places * self._padded.shape[1] + passed)

    def _grow(self) -> None:
        """Double the number of places, so that binding is amortised O(1)."""
        places = len(self.request)
        self._free.extend(range(places, 2 * places))
        for name, empty in _EMPTY.items():
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.full_like(array, empty)]))
        self._make_views()


def first_of_each(values: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the place of the first of each run of equal values."""
    # `np.diff` is Python code, which takes longer than this.
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first.nonzero()[0]


# Upper bound of the tokens in a deposit, so that with the steps ahead it still fits in 32 bits.
_MOST_TOKENS = 1 << 30
# Deposits that are computed together: 200 KiB for the default H and M.
_BLOCK = 256
# Columns that the window moves before the rows are copied back to the front: a copy per step would
# cost more than the step.
_TRAVEL = 256


class Form(Enum):
    """How a prediction becomes a projected load."""

    POINT = "point"
    EXPECTED = "expected"


class Projection:
    """Projected loads of G ranks.

    Args:
        ranks: G.
        horizon_steps: H, at least 1.
        refresh_tokens: M, at least 1: tokens between two predictions of a request.
        predictor: Called in batches, with each request once per refresh.
        form: See the module.

    Attributes:
        on_leave: Called with each request that leaves, its prompt tokens and the tokens that it
            emitted, both of one sequence, the latter None if it never decoded; or None.
        now: The step clock; it restarts when all requests are removed.
        changed: bool[G], ranks that more than steps changed since the caller cleared it.
    """

    def __init__(
        self,
        *,
        ranks: int,
        horizon_steps: int,
        refresh_tokens: int,
        predictor: "OutputPredictor",
        form: Form,
    ) -> None:
        self.ranks = ranks
        self.horizon_steps = horizon_steps
        self.on_leave: Callable[[RequestId, int, int | None], None] | None = None
        self._refresh = refresh_tokens
        self._predictor = predictor
        self._form = form
        self._width = horizon_steps + refresh_tokens + 1
        self._ahead = np.arange(self._width)
        self._ahead_tokens = self._ahead.astype(np.float64)
        self.clear()

    def clear(self) -> None:
        """Remove all requests, also after a failure in mid-change."""
        # The step clock, and the rows, of which column `_head` is the present step.
        self.now = 0
        self._head = 0
        self.changed: NDArray[np.bool_] = np.ones(self.ranks, np.bool_)
        # The same memory, which takes less time for one rank.
        self._changed = self.changed.data
        self._rows: NDArray[np.int64] = np.zeros((self.ranks, self._width + _TRAVEL), np.int64)
        self._deposits = Deposits(self._width, self._refresh)
        self._resting = True
        # Places without a deposit yet: one call of the predictor serves all of them. A dictionary,
        # because the order of a set differs from run to run.
        self._new: dict[int, None] = {}

    def bind(
        self, request: RequestId, rank: RankId, kv_tokens: int, age: int, sequences: int = 1
    ) -> None:
        """Add a request that holds `kv_tokens`, each sequence having emitted `age` tokens."""
        place = self._deposits.add(
            request, rank, kv_tokens=kv_tokens, age=age, sequences=sequences, now=self.now
        )
        # The next step or decision makes its deposit, in one batch with those of other requests.
        self._new[place] = None
        self._changed[rank] = True

    def start(self, request: RequestId) -> None:
        """Note that the request decodes from now on; until now it did not grow with the steps."""
        deposits = self._deposits
        place = deposits.place_of[request]
        # Its deposit grew by a token per step since the admission, which it did not.
        if deposits.since.item(place) != self.now:
            self._restart(place)
        deposits.started[place] = True

    def emit(self, request: RequestId, tokens: int) -> None:
        """Correct one request's tokens by `tokens`, which may be negative."""
        self._restart(self._deposits.place_of[request], tokens)

    def unbind(self, request: RequestId) -> None:
        deposits = self._deposits
        place = deposits.remove(request)
        if self.on_leave is not None:
            sequences, base = deposits.sequences.item(place), deposits.base.item(place)
            age = None
            if deposits.started.item(place):
                passed = self.now - deposits.since.item(place)
                age = (deposits.tokens.item(place) - base) // sequences + passed
            self.on_leave(request, base // sequences, age)
        self._withdraw(place)
        self._changed[deposits.rank.item(place)] = True
        deposits.rank[place] = -1

    def step(self) -> None:
        """Advance by one step: every sequence grows by a token, and due predictions refresh."""
        if self._resting:
            self.now += 1
            return
        # Before the window moves: a deposit starts at the present step.
        self._flush()
        self.now += 1
        self._head += 1
        if self._head > _TRAVEL - 1:
            self._rows[:, : self._width] = self._rows[:, self._head : self._head + self._width]
            self._rows[:, self._width :] = 0
            self._head = 0
        # A look at all places costs less than to keep a calendar of them.
        (due,) = (self._deposits.due == self.now).nonzero()
        if len(due) == 1:
            self._make_deposit(due.item(), again=True)
        elif len(due):
            self._make_deposits(due, again=True)

    def rest(self) -> None:
        """Make no deposits until a caller asks for the loads ahead, as at the beginning."""
        if not self._resting:
            self._restart_all()
            self._resting = True

    def _restart_all(self) -> None:
        for place in self._deposits.place_of.values():
            self._restart(place)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._deposits.place_of

    def running_on(self, ranks: NDArray[np.bool_]) -> Running:
        """Return the requests that are bound to some ranks, bool[G]."""
        return self._deposits.running_on(ranks, self.now)

    def loads_ahead(self, loads: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[G, H + 1], each rank's projected KV tokens 0..H steps ahead.

        `loads` are int64[G], the loads now; column 0 of the result equals them.
        """
        if self._resting:
            self._restart_all()
            self._resting = False
        self._flush()
        window = self._rows[:, self._head : self._head + self.horizon_steps + 1]
        # A request that still runs counts in full now, but in its deposit only with the probability
        # predicted at the refresh. The scale restores that, per rank.
        present = window[:, 0]
        if present[present.argmin()] > 0:
            scale = loads / present
        else:
            scale = np.ones(len(loads))
            np.divide(loads, present, out=scale, where=present > 0)
        ahead = window * scale[:, None]
        ahead[:, 0] = loads
        return ahead

    def survival(self, requests: Sequence[RequestId], ages: Sequence[int]) -> NDArray[np.float64]:
        """Return float64[n, H + 1], the probability that each still runs after 0..H steps.

        For requests that may be admitted now; `newcomers` and `persistence` use it.
        """
        return self._predictor.survival(requests, np.array(ages, np.int64), self.horizon_steps)

    def newcomers(
        self, kv_tokens: Sequence[int], survival: NDArray[np.float64], sequences: Sequence[int]
    ) -> NDArray[np.float64]:
        """Return float64[n, H + 1], the KV tokens that each of n requests adds if admitted now.

        Each holds `kv_tokens`, has a row of `survival` and gains `sequences` tokens per step.
        """
        ahead = self._ahead[: self.horizon_steps + 1]
        if len(kv_tokens) == 1:  # As in nearly every round.
            grown = (sequences[0] * ahead + kv_tokens[0])[None]
        else:
            grown = np.multiply.outer(np.array(sequences), ahead)
            grown += np.array(kv_tokens)[:, None]
        if self._form is Form.EXPECTED:
            return np.asarray(grown * survival)
        return np.asarray(grown * (ahead < self._departures(survival)[:, None]))

    def persistence(self, survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64[H + 1], the mean probability to run still; in the point form 1. Paper: §4.1."""
        if self._form is Form.POINT:
            return np.ones(self.horizon_steps + 1)
        return survival[0] if len(survival) == 1 else np.asarray(survival.mean(axis=0))

    def check(self) -> None:
        if not self._resting:
            self._flush()
        rows = np.zeros_like(self._rows)
        for place in self._deposits.place_of.values():
            if place in self._new:
                continue
            rest = self._deposits.rest(place, self.now)
            rows[self._deposits.rank[place], self._head : self._head + len(rest)] += rest
        now = slice(self._head, None)
        assert np.array_equal(rows[:, now], self._rows[:, now]), "projection differs from a recount"

    def _departures(self, survival: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the steps until each predicted departure; the row's width if a request stays."""
        steps = composite_steps(survival, self.horizon_steps)
        # The width is beyond every column, so such a deposit never ends.
        return np.where(steps < self.horizon_steps, steps, self._width)

    def _predict(
        self, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
        """Return the survival of requests, float64[n, W], and in the point form their departures.

        It also notes when each of them is due for a refresh.
        """
        deposits = self._deposits
        requests = deposits.request[places]
        ages = (deposits.tokens[places] - deposits.base[places]) // deposits.sequences[places]
        survival = self._predictor.survival(
            cast("list[RequestId]", requests.tolist()), ages, self._width - 1
        )
        # Requests admitted together would always refresh together, in one long step: their ids
        # spread the refreshes.
        wait = self._refresh - (ages + requests) % self._refresh
        departures = None
        if self._form is Form.EXPECTED:
            # Due for a refresh when the survival falls below one half.
            (doubtful,) = (survival[:, self._refresh] < 0.5).nonzero()
            if doubtful.size:
                first = (survival[doubtful] < 0.5).argmax(axis=1)
                wait[doubtful] = np.minimum(wait[doubtful], first)
        else:
            departures = self._departures(survival)
            # A predicted departure that does not happen is predicted again at once. Paper: §C.2.3.
            wait = np.minimum(departures, wait)
        deposits.due[places] = self.now + wait
        return survival, departures

    def _flush(self) -> None:
        new = self._new
        if len(new) == 1:  # As of nearly every decision.
            self._make_deposit(*new)
        elif new:
            self._make_deposits(np.array(list(new)))
        new.clear()

    def _make_deposit(self, place: int, *, again: bool = False) -> None:
        """Make one deposit, as nearly every call does; see `_make_deposits`."""
        deposits = self._deposits
        request, rank = deposits.request.item(place), deposits.rank.item(place)
        tokens, sequences = deposits.tokens.item(place), deposits.sequences.item(place)
        rest = None
        if again:
            rest = deposits.rest(place, self.now)
            if deposits.started.item(place):
                tokens += (self.now - deposits.since.item(place)) * sequences
            deposits.tokens[place], deposits.since[place] = tokens, self.now
        age = (tokens - deposits.base.item(place)) // sequences
        wait = self._refresh - (age + request) % self._refresh
        of_one = self._predictor.survival(
            [cast("RequestId", request)], np.array([age], np.int64), self._width - 1
        )
        survival = of_one[0]
        values = self._ahead_tokens if sequences == 1 else self._ahead_tokens * sequences
        values = values + float(min(tokens, _MOST_TOKENS))
        if self._form is Form.EXPECTED:
            if survival.item(self._refresh) < 0.5:
                wait = min(wait, int((survival < 0.5).argmax()))
            values *= survival
            np.rint(values, out=values)
        else:
            departure = self._departures(of_one).item()
            wait = min(wait, departure)
            values[departure:] = 0.0
        deposits.due[place] = self.now + wait
        change = values.astype(np.int64)
        row = self._rows[rank, self._head : self._head + self._width]
        row += change
        if rest is not None:
            row[: len(rest)] -= rest
        deposits.expected[place] = change

    def _make_deposits(self, places: NDArray[np.int64], *, again: bool = False) -> None:
        """Predict requests; with `again` these deposits replace earlier ones."""
        deposits = self._deposits
        places = places[deposits.rank[places].argsort(kind="stable")]
        instead_of = deposits.advance(places, self.now) if again else None
        survival, departures = self._predict(places)
        tokens = np.minimum(deposits.tokens[places], _MOST_TOKENS).astype(np.float64)
        sequences = deposits.sequences[places].astype(np.float64)
        ranks = deposits.rank[places]
        window = self._rows[:, self._head : self._head + self._width]
        # In blocks that stay in a core's own cache, from one operation to the next.
        for begin in range(0, len(places), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            values = np.multiply.outer(sequences[block], self._ahead_tokens)
            values += tokens[block, None]
            if departures is None:
                # Whole tokens, so that the recount is exact.
                values *= survival[block]
                np.rint(values, out=values)
            else:
                values[self._ahead >= departures[block, None]] = 0.0
            change = values.astype(np.int64)
            # Each row is copied as a whole, which costs a fortieth of an index for every column.
            rests = None if instead_of is None else deposits.windows[instead_of[block]]
            deposits.expected[places[block]] = change
            if rests is not None:
                change -= rests
            of_rank = ranks[block]
            if len(of_rank) == 1:
                window[of_rank.item(0)] += change[0]
                continue
            # One sum per rank, so that the rows are written once each.
            starts = first_of_each(of_rank)
            window[of_rank[starts]] += np.add.reduceat(change, starts, axis=0)

    def _restart(self, place: int, tokens: int = 0) -> None:
        """Replace the deposit by one that starts now, with `tokens` more than the steps gave."""
        deposits = self._deposits
        self._withdraw(place)
        self._changed[deposits.rank.item(place)] = True
        if deposits.started.item(place):
            tokens += (self.now - deposits.since.item(place)) * deposits.sequences.item(place)
        deposits.tokens[place] += tokens
        deposits.since[place] = self.now
        self._new[place] = None

    def _withdraw(self, place: int) -> None:
        """Subtract the rest of a deposit, or cancel it before it is made."""
        self._deposits.due[place] = -1
        if place in self._new:
            del self._new[place]
            return
        rest = self._deposits.rest(place, self.now)
        rank = self._deposits.rank.item(place)
        self._rows[rank, self._head : self._head + len(rest)] -= rest


# The state of one dispatch round: projected loads, envelope, margins and scores. It follows every
# admission. With a horizon of 0 it reduces to the loads and margins of the present step.
#
# With a **target**, the load at which the ranks would be evenly full, F has a second kink. Its
# first part is how far an admission brings the rank towards the target, |T - L| - |T - L - s|:
# slope 1 up to the target and -1 beyond it. Past the envelope every other rank waits, as without
# a target. F stays concave and piecewise linear. Filling every rank to the envelope, as the
# paper's F does, leaves holes that no request is left to fill: arrivals bring only so many tokens.

# Avoids a division by 0 at steps that no admitted request reaches. Their weight is 0 as well.
_LEAST_PERSISTENCE = 1e-6
# The slope of a distance falls from 1 to -1.
_BEYOND_TARGET = 2.0
# Of sums over some hundred steps, relative. Ranks whose sums differ by less are compared step by step.
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class Weights:
    """How F weighs the tokens that an admission fills and overflows. Paper: §4.1, Eq. 2."""

    steps: NDArray[np.float64]  # float64[H + 1], the discount of each step ahead.
    alpha: float  # Reward per token.
    beta: float  # Penalty per token beyond the margin.

    @property
    def penalty(self) -> float:
        """The cost of one token that is beyond the margin at every step."""
        return self.beta * float(self.steps.sum())


class Outlook(NamedTuple):
    """The effect of admitting each of n totals to one rank; float64[n] each."""

    to_target: NDArray[np.float64]  # F.
    to_envelope: NDArray[np.float64]  # F without the target: it may be exceeded.
    overflow: NDArray[np.float64]  # Tokens beyond the margin, mean over the steps.


class Balance:
    """Margins of G ranks over the horizon.

    Args:
        ahead: float64[G, H + 1], projected KV tokens of each rank; updated in place.
        persistence: float64[H + 1], the share of an admitted token that remains h steps ahead.
        target: Returns float64[H + 1], the load at which all ranks are evenly full, by the loads before
            any admission; None for the paper's F. Not called for the best rank of a single request.
        speeds: float64[G], see `Fleet`. Tokens are those of each rank; the envelope and the target
            are those of a rank of speed 1.
    """

    def __init__(
        self,
        ahead: NDArray[np.float64],
        weights: Weights,
        persistence: NDArray[np.float64],
        target: Callable[[], NDArray[np.float64]] | None = None,
        speeds: NDArray[np.float64] | None = None,
    ) -> None:
        self._ahead = ahead
        self._weights = weights
        # s tokens admitted now are s p(h) in h steps, and w (a s p - b (s p - m)+) is the same as
        # w p (a s - b (s - m / p)+): F keeps its form with margins and weights rescaled.
        self._steps = weights.steps * persistence
        self._stretch = 1.0 / np.maximum(persistence, _LEAST_PERSISTENCE)
        self._beta = weights.beta
        self._target_penalty = min(_BEYOND_TARGET * weights.alpha, weights.beta)
        # float64[G, 1]; None if all ranks are equally fast.
        self._speeds = None if speeds is None else speeds[:, None]
        levels = ahead if self._speeds is None else ahead / self._speeds
        self._envelope: NDArray[np.float64] = np.maximum.reduce(levels)
        self._make_target = target
        self._target: NDArray[np.float64] | None = None
        # float64[G, H + 1]; None until a caller asks for those of all ranks.
        self._margins: NDArray[np.float64] | None = None
        self._safe_margins: NDArray[np.float64] | None = None
        # None until a caller asks for them.
        self._filled: NDArray[np.float64] | None = None
        self._rounding: float | None = None
        self._room_weights = weights.steps
        # The latest rank's F, which callers need several times before an admission.
        self._curve_of: tuple[int, FCurve] | None = None

    @cached_property
    def reward(self) -> float:
        """The value in F of a token that fills."""
        return self._weights.alpha * float(np.add.reduce(self._steps))

    @property
    def safe_margins(self) -> NDArray[np.float64]:
        """float64[G], the least margin of each rank over the horizon: it orders the ranks of Stage 2.

        Another array once the envelope has risen. Paper: §4.2, (ii).
        """
        if self._safe_margins is None:
            self._safe_margins = self._margins_of_all().min(axis=1)
        return self._safe_margins

    def scores(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F of admitting each of float64[n] `totals` tokens to `rank`."""
        return f_score(totals, self._kinks(rank), self._penalties, reward=self.reward)

    def scores_to_envelope(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F without the target: it may be exceeded."""
        return f_score(totals, self._margins_of(rank), self._past_envelope, reward=self.reward)

    def score(self, rank: int, total: int) -> float:
        """Return F of admitting `total` tokens to `rank`."""
        return self._curve(rank).score(total)

    def peak(self, rank: int) -> float:
        """Return the number of tokens at which F of `rank` is largest."""
        return self._curve(rank).peak

    def outlooks(self, ranks: list[int], totals: NDArray[np.float64]) -> list[Outlook]:
        """Return F and the overflow of each of float64[n] `totals` KV tokens on each of some ranks.

        There is a target. One call for all ranks is much faster than one for each.
        """
        order = totals.argsort()
        totals = totals[order]
        margins = self._margins_of(ranks)
        kinks = np.concatenate([self._rooms(ranks, margins), margins])
        beyond = excess(totals, kinks, self._steps)
        past_target, past_envelope = beyond[: len(ranks)], beyond[len(ranks) :]
        to_envelope = self.reward * totals - self._beta * past_envelope
        to_target = to_envelope + self._target_penalty * (past_envelope - past_target)
        overflow = past_envelope / self._steps.sum()
        # Back in the order of the totals.
        places = order.argsort()
        each = (one.take(places, axis=1) for one in (to_target, to_envelope, overflow))
        return [*map(Outlook, *each)]

    @property
    def filled(self) -> NDArray[np.float64]:
        """float64[G], the tokens of each rank, summed over the steps: the fewest leave most room. Read-only.

        As if all ranks were equally fast. Kept up to date for ranks that are not full.
        """
        if self._filled is None:
            self._room_weights = self._steps * self._stretch
            self._filled = self._ahead.dot(self._room_weights)
        return self._filled

    @property
    def rounding(self) -> float:
        """The difference of two of `filled` up to which they count as equal."""
        # Room is the envelope less the rank's load: both have the rounding of the larger.
        if self._rounding is None:
            self._rounding = _ROUNDING * float(self._envelope.dot(self._room_weights))
        return self._rounding

    def has_margin(self, rank: int, total: int) -> bool:
        """Return whether `total` tokens on `rank` overflow at no step."""
        return not np.count_nonzero(self._margins_of(rank) < total)

    def best_rank(
        self,
        total: int,
        open_ranks: NDArray[np.bool_],
        worth: NDArray[np.float64] | None = None,
    ) -> int:
        """Return the open rank where `total` tokens cost least time; on a tie the one with most room.

        If nothing overflows, all ranks tie, and the result is the least-loaded rank over the horizon.
        At least one of `open_ranks`, bool[G], is True. `worth` is float64[G], added to F of each rank.
        O(G x H).
        """
        # The reward is the same on every rank, so the least overflow is the best score.
        margins, steps = self._margins_of_all(), self._steps
        overflow = float(total) - margins
        overflow = np.maximum(overflow, 0.0, out=overflow).dot(steps)
        if self._speeds is not None:
            overflow /= self._speeds[:, 0]
        if worth is not None:
            overflow = self._beta * overflow - worth
        if not open_ranks[open_ranks.argmin()]:
            overflow[~open_ranks] = np.inf
        # A list: of a few ranks it takes a fifth of the time, and of hundreds hardly more.
        costs: list[float] = overflow.tolist()
        least = min(costs)
        ties = [rank for rank, cost in enumerate(costs) if cost == least]
        if len(ties) == 1:
            return ties[0]
        room = (margins if len(ties) == len(margins) else margins[ties]).dot(steps)
        if self._speeds is not None:
            room /= self._speeds[ties, 0]
        return ties[int(room.argmax())]

    def admit(self, rank: int, contribution: NDArray[np.float64], *, full: bool = False) -> bool:
        """Add float64[H + 1] tokens to `rank`; return whether it exceeds the envelope, which then rises.

        If not, only this rank's margin changed. With `full` no caller asks for this rank again, so its
        cached sums are not updated.
        """
        self._curve_of = None
        if self._make_target is not None and self._target is None:
            self._target = self._make_target()  # Of the loads before any admission.
        ahead = self._ahead[rank]
        ahead += contribution
        if self._filled is not None and not full:
            self._filled[rank] = ahead.dot(self._room_weights)
        level = ahead if self._speeds is None else ahead / self._speeds[rank]
        if np.count_nonzero(level > self._envelope):
            np.maximum(self._envelope, level, out=self._envelope)
            # A higher envelope widens every rank's margins.
            self._margins = self._safe_margins = self._rounding = None
            return True
        if not full and self._margins is not None:
            margins = self._margins[rank] = self._margin(rank, ahead)
            if self._safe_margins is not None:
                self._safe_margins[rank] = margins[margins.argmin()]
        return False

    # Most rounds place one request, for which none of these is needed.

    @cached_property
    def _past_envelope(self) -> NDArray[np.float64]:
        return self._beta * self._steps

    @cached_property
    def _penalties(self) -> NDArray[np.float64]:
        if self._make_target is None:
            return self._past_envelope
        past_target = self._target_penalty * self._steps
        return np.concatenate([past_target, self._past_envelope - past_target])

    def _margins_of(self, ranks: "int | list[int]") -> NDArray[np.float64]:
        """Return the margins of some ranks, float64[n, H + 1], or of one."""
        if self._margins is None:
            return self._margin(ranks, self._ahead[ranks])
        margins: NDArray[np.float64] = self._margins[ranks]
        return margins

    def _margins_of_all(self) -> NDArray[np.float64]:
        if self._margins is None:
            self._margins = self._margin(slice(None), self._ahead)
        return self._margins

    def _margin(
        self, ranks: "int | list[int] | slice", ahead: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        envelope = self._envelope
        below = (envelope if self._speeds is None else envelope * self._speeds[ranks]) - ahead
        below *= self._stretch
        return np.asarray(below)

    def _curve(self, rank: int) -> FCurve:
        if self._curve_of is None or self._curve_of[0] != rank:
            curve = FCurve(self._kinks(rank), self._penalties, reward=self.reward)
            self._curve_of = rank, curve
        return self._curve_of[1]

    def _kinks(self, rank: int) -> NDArray[np.float64]:
        margins = self._margins_of(rank)
        if self._make_target is None:
            return margins
        return np.concatenate([self._rooms(rank, margins), margins])

    def _rooms(self, ranks: "int | list[int]", margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far ranks are below the target; a target above the envelope is none."""
        assert self._make_target is not None
        if self._target is None:
            self._target = self._make_target()
        target = self._target if self._speeds is None else self._target * self._speeds[ranks]
        room = target - self._ahead[ranks]
        np.maximum(room, 0.0, out=room)
        room *= self._stretch
        return np.minimum(room, margins, out=room)

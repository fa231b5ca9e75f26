"""Projected KV load of every rank over the next H steps, kept incrementally.

Each active request adds a **deposit** to its rank's row: the tokens that it is expected to hold at
each of the next H + M steps. A step moves the window on by one column. A departure subtracts the rest
of the deposit. Every M emitted tokens (or sooner, see below) a fresh prediction replaces the deposit.
So a step costs O(refreshed requests x (H + M)), not O(requests x H). Deposits are whole tokens, so
that adding and subtracting are exact and `check()` can demand equality with a recount.

Two forms of a deposit, w the request's KV tokens and h steps ahead:

* **expected**: (w + h) x Pr[still running after h steps].
* **point** (the paper's): w + h up to a predicted departure, then 0. An estimate of H means that
  the request stays. Paper: §C.1, Eq. 7.

A request with several sequences gains one token per sequence and step. Its survival is predicted as
that of one sequence.

Between refreshes a request turns out to be still running, which its older deposit only expected with
some probability. The expected form corrects for that per rank: the row is scaled so that its first
column is the rank's present load. A refresh is due early when the deposit has become implausible: at
the predicted departure (point; the paper's floor rule, §C.2.3), or once the request had only an even
chance to be running still (expected).
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.prediction import composite_steps

if TYPE_CHECKING:
    from balanceroute.proxy.core.prediction import OutputPredictor


# What a projection keeps of each bound request: arrays with one place per request.


class Running(NamedTuple):
    """Bound requests in the order of their ranks.

    Attributes:
        requests: int64[n], as the following.
        places: In `curves`.
        ranks: Ascending.
        kv_tokens: KV tokens that each holds.
        ages: Tokens that each sequence has emitted.
        sequences: Tokens that each gains per step.
        curves: See `Deposits`; for all places, to be written to.
    """

    requests: NDArray[np.int64]
    places: NDArray[np.int64]
    ranks: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    ages: NDArray[np.int64]
    sequences: NDArray[np.int64]
    curves: NDArray[np.int64]


class Deposits:
    """The deposits of all bound requests, which grow together.

    Args:
        width: W, the steps that a deposit covers.
        longest: M, the most steps after which a deposit is made anew.

    Attributes:
        place_of: The place of each request in the arrays.
        request: Its request, by place.
        rank: Its rank; -1 without a request.
        since: The step at which the deposit starts.
        tokens: KV tokens at that step.
        sequences: Tokens that it gains with each step.
        base: KV tokens at age 0: age = (tokens - base) / sequences.
        due: The step at which it is predicted again; -1 for none.
        started: Whether it decodes yet.
        expected: int32[places, W], the tokens that it is expected to hold at each step.
        curves: The row of its survival curve in `Curves`; -1 until it is looked up.
    """

    def __init__(self, width: int, longest: int) -> None:
        places = 64
        self._width = width
        self.place_of: dict[RequestId, int] = {}
        self.request = np.full(places, -1, np.int64)
        self.rank = np.full(places, -1, np.int64)
        self.since = np.zeros(places, np.int64)
        self.tokens = np.zeros(places, np.int64)
        self.sequences = np.ones(places, np.int64)
        self.base = np.zeros(places, np.int64)
        self.due = np.full(places, -1, np.int64)
        self.started = np.zeros(places, np.bool_)
        self.curves = np.full(places, -1, np.int64)
        # M zeros follow each row, so that what is left of a deposit is a window of W columns.
        self._padded: NDArray[np.int32] = np.zeros((places, width + longest), np.int32)
        self.expected = self._padded[:, :width]
        self._windows = self._all_windows()
        self._memory = self._all_memory()
        self._free = list(range(places))

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

    def ages(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens that each sequence of these requests has emitted."""
        return (self.tokens[places] - self.base[places]) // self.sequences[places]

    def rest(self, place: int, now: int) -> NDArray[np.int32]:
        """Return what is left of a deposit, from the step `now` on."""
        return self.expected[place, now - self.since.item(place) :]

    def advance(self, places: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        """Let deposits start at `now`, and return where what was left of them begins.

        None of them is older than M steps.
        """
        passed = now - self.since[places]
        self.tokens[places] += np.where(self.started[places], passed, 0) * self.sequences[places]
        self.since[places] = now
        return np.asarray(places * self._padded.shape[1] + passed)

    def rests(self, begins: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return what was left of deposits, int32[n, W], from where `advance` says that it begins."""
        # Each row is copied as a whole, which costs a fortieth of an index for every column.
        return np.asarray(self._windows[begins])

    def _grow(self) -> None:
        """Double the number of places, so that binding is amortised O(1)."""
        places = len(self.request)
        self._free.extend(range(places, 2 * places))
        self.request = np.concatenate([self.request, np.full_like(self.request, -1)])
        self.rank = np.concatenate([self.rank, np.full_like(self.rank, -1)])
        self.since = np.concatenate([self.since, np.zeros_like(self.since)])
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.sequences = np.concatenate([self.sequences, np.ones_like(self.sequences)])
        self.base = np.concatenate([self.base, np.zeros_like(self.base)])
        self.started = np.concatenate([self.started, np.zeros_like(self.started)])
        self.curves = np.concatenate([self.curves, np.full_like(self.curves, -1)])
        self.due = np.concatenate([self.due, np.full_like(self.due, -1)])
        self._padded = np.concatenate([self._padded, np.zeros_like(self._padded)])
        self.expected = self._padded[:, : self._width]
        self._windows = self._all_windows()
        self._memory = self._all_memory()

    def _all_memory(self) -> tuple[memoryview, ...]:
        """Return the memory of what `add` sets: one number so takes a fifth of what an array takes."""
        arrays = (
            *(self.request, self.rank, self.since, self.tokens, self.sequences, self.base),
            *(self.curves, self.started),
        )
        return tuple(array.data for array in arrays)

    def _all_windows(self) -> NDArray[np.int32]:
        """Return a view of the W columns that begin at each place of the padded rows."""
        return np.asarray(sliding_window_view(self._padded.ravel(), self._width))


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
            emitted, both of one sequence, the latter None if it never decoded; None for nobody.
        changed: bool[G], ranks of which not only the steps changed something since the caller cleared
            it.
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
        # Global state: the step clock and the rows. Column `_head` is the present step.
        self._now = 0
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
            request, rank, kv_tokens=kv_tokens, age=age, sequences=sequences, now=self._now
        )
        # Its deposit is made before the next step or decision, in one batch with others.
        self._new[place] = None
        self._changed[rank] = True

    def start(self, request: RequestId) -> None:
        """Note that the request decodes from now on; until now it did not grow with the steps."""
        deposits = self._deposits
        place = deposits.place_of[request]
        # Its deposit grew by a token per step since the admission, which it did not.
        if deposits.since.item(place) != self._now:
            self._restart(place, grown=0)
        deposits.started[place] = True

    def emit(self, request: RequestId, tokens: int) -> None:
        """Correct one request's tokens by `tokens`, which may be negative."""
        deposits = self._deposits
        place = deposits.place_of[request]
        # The tokens of the steps since the deposit first, as the new deposit starts now.
        passed = self._now - deposits.since.item(place) if deposits.started.item(place) else 0
        self._restart(place, grown=passed * deposits.sequences.item(place) + tokens)

    def unbind(self, request: RequestId) -> None:
        """Remove a request."""
        deposits = self._deposits
        place = deposits.remove(request)
        if self.on_leave is not None:
            sequences, base = deposits.sequences.item(place), deposits.base.item(place)
            age = None
            if deposits.started.item(place):
                passed = self._now - deposits.since.item(place)
                age = (deposits.tokens.item(place) - base) // sequences + passed
            self.on_leave(request, base // sequences, age)
        self._withdraw(place)
        self._changed[deposits.rank.item(place)] = True
        deposits.rank[place] = -1

    def step(self) -> None:
        """Advance by one step: every sequence grows by a token, and due predictions refresh."""
        if self._resting:
            self._now += 1
            return
        # Before the window moves: a deposit starts at the present step.
        self._flush()
        self._now += 1
        self._head += 1
        if self._head > _TRAVEL - 1:
            self._rows[:, : self._width] = self._rows[:, self._head : self._head + self._width]
            self._rows[:, self._width :] = 0
            self._head = 0
        # A look at all places costs less than to keep a calendar of them.
        (due,) = (self._deposits.due == self._now).nonzero()
        if len(due) == 1:
            self._make_deposit(due.item(), again=True)
        elif len(due):
            due = self._by_rank(due)
            self._make_deposits(due, instead_of=self._deposits.advance(due, self._now))

    def rest(self) -> None:
        """Make no deposits until somebody asks for the loads ahead, as at the beginning."""
        if not self._resting:
            self._restart_all()
            self._resting = True

    def _wake(self) -> None:
        self._restart_all()
        self._resting = False

    def _restart_all(self) -> None:
        deposits = self._deposits
        for place in deposits.place_of.values():
            passed = int(self._now - deposits.since[place]) if deposits.started[place] else 0
            self._restart(place, grown=passed * int(deposits.sequences[place]))

    @property
    def now(self) -> int:
        """The step clock; it restarts when all requests are removed."""
        return self._now

    def __contains__(self, request: RequestId) -> bool:
        """Return whether a request is bound."""
        return request in self._deposits.place_of

    def running_on(self, ranks: NDArray[np.bool_]) -> Running:
        """Return the requests that are bound to some ranks, bool[G]."""
        return self._deposits.running_on(ranks, self._now)

    def loads_ahead(self, loads: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[G, H + 1], each rank's projected KV tokens 0..H steps ahead.

        Args:
            loads: int64[G], the loads now; column 0 of the result equals it.
        """
        if self._resting:
            self._wake()
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

        For requests that may be admitted now: what `newcomers` and `persistence` are computed from.
        """
        return self._predictor.survival(requests, np.array(ages, np.int64), self.horizon_steps)

    def newcomers(
        self, kv_tokens: Sequence[int], survival: NDArray[np.float64], sequences: Sequence[int]
    ) -> NDArray[np.float64]:
        """Return float64[n, H + 1], the KV tokens that each of n requests adds if admitted now.

        Args:
            kv_tokens: What each holds.
            survival: float64[n, H + 1], of the requests.
            sequences: Tokens that each gains per step.
        """
        ahead = self._ahead[: self.horizon_steps + 1]
        if len(kv_tokens) == 1:  # Nearly every round asks for one.
            grown = (sequences[0] * ahead + kv_tokens[0])[None]
        else:
            grown = np.multiply.outer(np.array(sequences), ahead)
            grown += np.array(kv_tokens)[:, None]
        if self._form is Form.EXPECTED:
            return np.asarray(grown * survival)
        return np.asarray(grown * (ahead < self._departures(survival)[:, None]))

    def persistence(self, survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64[H + 1], the mean probability that some requests still run after h steps.

        In the point form an admitted request is assumed to stay, as in the paper (§4.1).

        Args:
            survival: float64[n, H + 1], of the requests.
        """
        if self._form is Form.POINT:
            return np.ones(self.horizon_steps + 1)
        return survival[0] if len(survival) == 1 else np.asarray(survival.mean(axis=0))

    def check(self) -> None:
        """Recount the rows from the deposits and assert equality. O(requests x (H + M))."""
        if not self._resting:
            self._flush()
        rows = np.zeros_like(self._rows)
        for place in self._deposits.place_of.values():
            if place in self._new:
                continue
            rest = self._deposits.rest(place, self._now)
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

        Notes when each of them is due for a refresh.
        """
        deposits = self._deposits
        requests, ages = deposits.request[places], deposits.ages(places)
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
        deposits.due[places] = self._now + wait
        return survival, departures

    def _flush(self) -> None:
        new = self._new
        if len(new) == 1:  # As of nearly every decision.
            self._make_deposit(*new)
        elif new:
            self._make_deposits(self._by_rank(np.array(list(new))))
        new.clear()

    def _by_rank(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places[self._deposits.rank[places].argsort(kind="stable")]

    def _make_deposit(self, place: int, *, again: bool = False) -> None:
        """Do what `_make_deposits` does for one request; nearly every call is for one.

        Args:
            place: Where the request is.
            again: Whether this is instead of an earlier deposit, which `Deposits.advance` has not seen.
        """
        deposits = self._deposits
        request, rank = deposits.request.item(place), deposits.rank.item(place)
        tokens, sequences = deposits.tokens.item(place), deposits.sequences.item(place)
        rest = None
        if again:
            rest = deposits.rest(place, self._now)
            if deposits.started.item(place):
                tokens += (self._now - deposits.since.item(place)) * sequences
            deposits.tokens[place], deposits.since[place] = tokens, self._now
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
        deposits.due[place] = self._now + wait
        change = values.astype(np.int64)
        row = self._rows[rank, self._head : self._head + self._width]
        row += change
        if rest is not None:
            row[: len(rest)] -= rest
        deposits.expected[place] = change

    def _make_deposits(
        self, places: NDArray[np.int64], instead_of: NDArray[np.int64] | None = None
    ) -> None:
        """Predict some requests.

        Args:
            places: In the order of their ranks.
            instead_of: int64[n], where what is left of their earlier deposits begins; None if there
                are none.
        """
        deposits = self._deposits
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
            rests = None if instead_of is None else deposits.rests(instead_of[block])
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

    def _restart(self, place: int, *, grown: int) -> None:
        """Replace the deposit by one that starts now, from `grown` more tokens."""
        self._withdraw(place)
        self._changed[self._deposits.rank.item(place)] = True
        self._deposits.tokens[place] += grown
        self._deposits.since[place] = self._now
        self._new[place] = None

    def _withdraw(self, place: int) -> None:
        """Subtract the rest of a deposit, or cancel one that was not made yet."""
        self._deposits.due[place] = -1
        if place in self._new:
            del self._new[place]
            return
        rest = self._deposits.rest(place, self._now)
        rank = self._deposits.rank.item(place)
        self._rows[rank, self._head : self._head + len(rest)] -= rest

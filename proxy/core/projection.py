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

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.prediction import composite_steps
from balanceroute.proxy.core.turnover import Turnover

if TYPE_CHECKING:
    from balanceroute.proxy.core.prediction import Predictor

# Upper bound of the tokens in a deposit, so that with the steps ahead it still fits in 32 bits.
_MOST_TOKENS = 1 << 30
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
        turnover: How fast requests leave their ranks.
    """

    def __init__(
        self,
        *,
        ranks: int,
        horizon_steps: int,
        refresh_tokens: int,
        predictor: "Predictor",
        form: Form,
    ) -> None:
        self.ranks = ranks
        self.horizon_steps = horizon_steps
        self.turnover = Turnover(ranks)
        self._refresh = refresh_tokens
        self._predictor = predictor
        self._form = form
        self._width = horizon_steps + refresh_tokens + 1
        self._ahead = np.arange(self._width)
        self.clear()

    def clear(self) -> None:
        """Remove all requests, also after a failure in mid-change. The turnover stays."""
        # Global state: the step clock and the rows. Column `_head` is the present step.
        self._now = 0
        self._head = 0
        self._rows: NDArray[np.int64] = np.zeros((self.ranks, self._width + _TRAVEL), np.int64)
        # Per-slot state; a slot is one bound request. Deposits start at step `_since`.
        slots = 64
        self._slot_of: dict[RequestId, int] = {}
        self._free: list[int] = list(range(slots))
        self._request: list[RequestId] = [RequestId(-1)] * slots
        self._rank = np.zeros(slots, np.int64)
        self._since = np.zeros(slots, np.int64)
        self._tokens = np.zeros(slots, np.int64)
        self._sequences = np.ones(slots, np.int64)
        # KV tokens at age 0: age = (tokens - base) / sequences.
        self._base = np.zeros(slots, np.int64)
        self._due = np.full(slots, -1, np.int64)
        self._started = np.zeros(slots, np.bool_)
        self._deposit: NDArray[np.int32] = np.zeros((slots, self._width), np.int32)
        # Slots to refresh by step modulo M + 1, since none is due later than in M steps. A slot whose
        # `_due` has changed is skipped.
        self._calendar: list[list[int]] = [[] for _ in range(self._refresh + 1)]
        # Slots without a deposit yet: one call of the predictor serves all of them. A dictionary,
        # because the order of a set differs from run to run.
        self._new: dict[int, None] = {}

    def bind(
        self, request: RequestId, rank: RankId, kv_tokens: int, age: int, sequences: int = 1
    ) -> None:
        """Add a request that holds `kv_tokens`, each sequence having emitted `age` tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot_of[request] = slot
        self._request[slot] = request
        self._rank[slot] = rank
        self._since[slot] = self._now
        self._tokens[slot] = kv_tokens
        self._sequences[slot] = sequences
        self._base[slot] = kv_tokens - age * sequences
        self._started[slot] = False
        # Its deposit is made before the next step or decision, in one batch with others.
        self._new[slot] = None

    def start(self, request: RequestId) -> None:
        """Note that the request decodes from now on; until now it did not grow with the steps."""
        slot = self._slot_of[request]
        # Its deposit grew by a token per step since the admission, which it did not.
        if self._since[slot] != self._now:
            self._restart(slot, grown=0)
        self._started[slot] = True

    def emit(self, request: RequestId, tokens: int) -> None:
        """Correct one request's tokens by `tokens`, which may be negative."""
        slot = self._slot_of[request]
        # The tokens of the steps since the deposit first, as the new deposit starts now.
        passed = int(self._now - self._since[slot]) if self._started[slot] else 0
        self._restart(slot, grown=passed * int(self._sequences[slot]) + tokens)

    def unbind(self, request: RequestId) -> None:
        """Remove a request."""
        self.turnover.leave()
        slot = self._slot_of.pop(request)
        self._withdraw(slot)
        self._free.append(slot)

    def step(self) -> None:
        """Advance by one step: every sequence grows by a token, and due predictions refresh."""
        # Before the window moves: a deposit starts at the present step.
        self._flush()
        self.turnover.step()
        self._now += 1
        self._head += 1
        if self._head > _TRAVEL - 1:
            self._rows[:, : self._width] = self._rows[:, self._head : self._head + self._width]
            self._rows[:, self._width :] = 0
            self._head = 0
        bucket = self._calendar[self._now % (self._refresh + 1)]
        if bucket:
            due = np.array(bucket)
            bucket.clear()
            # Slots that were withdrawn or refreshed since have another due step.
            due = due[self._due[due] == self._now]
            if due.size:
                # Once each: a slot that was withdrawn and is due again is in the bucket twice.
                self._refresh_slots(np.unique(due))

    def loads_ahead(self, loads: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[G, H + 1], each rank's projected KV tokens 0..H steps ahead.

        Args:
            loads: int64[G], the loads now; column 0 of the result equals it.
        """
        self._flush()
        window = self._rows[:, self._head : self._head + self.horizon_steps + 1]
        # A request that still runs counts in full now, but in its deposit only with the probability
        # predicted at the refresh. The scale restores that, per rank.
        present = window[:, 0]
        scale = np.ones(len(loads))
        np.divide(loads, present, out=scale, where=present > 0)
        ahead = window * scale[:, None]
        ahead[:, 0] = loads
        return ahead

    def newcomer(
        self, request: RequestId, kv_tokens: int, age: int, sequences: int = 1
    ) -> NDArray[np.float64]:
        """Return float64[H + 1], the KV tokens that a request adds if it is admitted now."""
        steps = self.horizon_steps
        survival = self._predictor.survival([request], np.array([age]), steps)
        grown = kv_tokens + sequences * self._ahead[: steps + 1]
        if self._form is Form.EXPECTED:
            return np.asarray(grown * survival[0])
        return np.asarray(grown * (self._ahead[: steps + 1] < self._departures(survival)[0]))

    def persistence(
        self, requests: Sequence[RequestId], ages: Sequence[int]
    ) -> NDArray[np.float64]:
        """Return float64[H + 1], the mean probability that these requests still run after h steps.

        In the point form an admitted request is assumed to stay, as in the paper (§4.1).
        """
        steps = self.horizon_steps
        if self._form is Form.POINT:
            return np.ones(steps + 1)
        survival = self._predictor.survival(requests, np.array(ages, np.int64), steps)
        return np.asarray(survival.mean(axis=0))

    def check(self) -> None:
        """Recount the rows from the deposits and assert equality. O(requests x (H + M))."""
        self._flush()
        rows = np.zeros_like(self._rows)
        for slot in self._slot_of.values():
            passed = int(self._now - self._since[slot])
            rest = self._deposit[slot, passed:]
            rows[self._rank[slot], self._head : self._head + len(rest)] += rest
        now = slice(self._head, None)
        assert np.array_equal(rows[:, now], self._rows[:, now]), "projection differs from a recount"

    def _departures(self, survival: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the steps until each predicted departure; the row's width if a request stays."""
        steps = composite_steps(survival, self.horizon_steps)
        # The width is beyond every column, so such a deposit never ends.
        return np.where(steps < self.horizon_steps, steps, self._width)

    def _predict(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the deposits, int32[n, W], and the steps until each is due for a refresh."""
        requests = [self._request[slot] for slot in slots.tolist()]
        tokens, sequences = self._tokens[slots], self._sequences[slots]
        ages = (tokens - self._base[slots]) // sequences
        survival = self._predictor.survival(requests, ages, self._width - 1)
        values = np.multiply.outer(sequences, self._ahead, dtype=np.float64)
        values += np.minimum(tokens, _MOST_TOKENS)[:, None]
        # Requests admitted together would always refresh together, in one long step: their ids
        # spread the refreshes.
        wait = self._refresh - (ages + np.array(requests)) % self._refresh
        if self._form is Form.EXPECTED:
            # Whole tokens, so that the recount is exact.
            np.rint(np.multiply(values, survival, out=values), out=values)
            # Due for a refresh when the survival falls below one half.
            doubtful = np.flatnonzero(survival[:, self._refresh] < 0.5)
            if doubtful.size:
                first = (survival[doubtful] < 0.5).argmax(axis=1)
                wait[doubtful] = np.minimum(wait[doubtful], first)
        else:
            departures = self._departures(survival)
            values[self._ahead >= departures[:, None]] = 0.0
            # A predicted departure that does not happen is predicted again at once. Paper: §C.2.3.
            wait = np.minimum(departures, wait)
        return values.astype(np.int32), wait

    def _flush(self) -> None:
        if self._new:
            slots = np.array(list(self._new))
            self._new.clear()
            self._make_deposits(slots)

    def _refresh_slots(self, slots: NDArray[np.int64]) -> None:
        # The rest of each old deposit, shifted to the present step; column `_width` of the padding
        # stands for all steps past its end.
        passed = self._now - self._since[slots]
        columns = np.minimum(passed[:, None] + self._ahead, self._width)
        padded = np.pad(self._deposit[slots], ((0, 0), (0, 1)))
        rest = np.take_along_axis(padded, columns, axis=1)
        self._tokens[slots] += np.where(self._started[slots], passed, 0) * self._sequences[slots]
        self._since[slots] = self._now
        self._make_deposits(slots, instead_of=rest)

    def _make_deposits(
        self, slots: NDArray[np.int64], instead_of: NDArray[np.int32] | None = None
    ) -> None:
        values, wait = self._predict(slots)
        self._deposit[slots] = values
        self._due[slots] = self._now + wait
        for slot, step in zip(slots.tolist(), self._due[slots].tolist(), strict=True):
            self._calendar[step % (self._refresh + 1)].append(slot)
        change = values if instead_of is None else values - instead_of
        # One sum per rank, so that the rows are written once each.
        ranks = self._rank[slots]
        order = np.argsort(ranks, kind="stable")
        ranks = ranks[order]
        starts = np.flatnonzero(np.diff(ranks, prepend=-1))
        window = self._rows[:, self._head : self._head + self._width]
        window[ranks[starts]] += np.add.reduceat(change[order], starts, axis=0, dtype=np.int64)

    def _restart(self, slot: int, *, grown: int) -> None:
        """Replace the deposit by one that starts now, from `grown` more tokens."""
        self._withdraw(slot)
        self._tokens[slot] += grown
        self._since[slot] = self._now
        self._new[slot] = None

    def _withdraw(self, slot: int) -> None:
        """Subtract the rest of a deposit, or cancel one that was not made yet."""
        # Its entries in the calendar are then skipped.
        self._due[slot] = -1
        if slot in self._new:
            del self._new[slot]
            return
        passed = int(self._now - self._since[slot])
        rest = self._deposit[slot, passed:]
        self._rows[self._rank[slot], self._head : self._head + len(rest)] -= rest

    def _grow(self) -> None:
        """Double the number of slots, so that binding is amortised O(1)."""
        slots = len(self._request)
        self._free.extend(range(slots, 2 * slots))
        self._request.extend([RequestId(-1)] * slots)
        self._rank = np.concatenate([self._rank, np.zeros_like(self._rank)])
        self._since = np.concatenate([self._since, np.zeros_like(self._since)])
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._sequences = np.concatenate([self._sequences, np.ones_like(self._sequences)])
        self._base = np.concatenate([self._base, np.zeros_like(self._base)])
        self._started = np.concatenate([self._started, np.zeros_like(self._started)])
        self._due = np.concatenate([self._due, np.full_like(self._due, -1)])
        self._deposit = np.concatenate([self._deposit, np.zeros_like(self._deposit)])

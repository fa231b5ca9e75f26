"""The state of one dispatch round: projected loads, envelope, margins and scores.

It is built once per round and updated after every admission, so that later decisions of a round see
the earlier ones. With a horizon of 0 it reduces to the loads and margins of the present step.

With a **target**, the load at which the ranks would be evenly full, F has a second kink. Its first
part is how far an admission brings the rank towards the target, |T - L| - |T - L - s|: slope 1 up to
the target and -1 beyond it. Past the envelope every other rank waits, as without a target. F stays
concave and piecewise linear. Filling every rank to the envelope, as the paper's F does, leaves holes
elsewhere that no request is left to fill, because the arrivals bring only so many tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.fscore import FCurve, excess, f_score

# Avoids a division by 0 at steps that no admitted request reaches. Their weight is 0 as well.
_LEAST_PERSISTENCE = 1e-6
# The slope of a distance falls from 1 to -1.
_BEYOND_TARGET = 2.0
# Of sums over some hundred steps, relative. Ranks whose sums differ by less are compared step by step.
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class Weights:
    """How F weighs the tokens that an admission fills and overflows. Paper: §4.1, Eq. 2.

    Attributes:
        steps: float64[H + 1], the discount of each step ahead.
        alpha: Reward per token.
        beta: Penalty per token beyond the margin.
    """

    steps: NDArray[np.float64]
    alpha: float
    beta: float

    @property
    def penalty(self) -> float:
        """The cost of one token that is beyond the margin at every step."""
        return self.beta * float(self.steps.sum())


class Outlook(NamedTuple):
    """What the admission of each of n totals to one rank would do.

    Attributes:
        to_target: float64[n], F.
        to_envelope: float64[n], F without the target: it may be exceeded.
        overflow: float64[n], tokens beyond the margin, mean over the steps.
    """

    to_target: NDArray[np.float64]
    to_envelope: NDArray[np.float64]
    overflow: NDArray[np.float64]


class Balance:
    """Margins of G ranks over the horizon.

    Args:
        ahead: float64[G, H + 1], projected KV tokens of each rank; updated in place.
        weights: The weights of F.
        persistence: float64[H + 1], the share of an admitted token that remains h steps ahead.
        target: Returns float64[H + 1], KV tokens of a rank that is as full as the others, while
            nothing is admitted yet; None for the paper's F. Not asked where only the best rank of the
            one request that waits is.
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
        # float64[G, H + 1]; None until somebody asks for those of all ranks.
        self._margins: NDArray[np.float64] | None = None
        self._safe_margins: NDArray[np.float64] | None = None
        # None until somebody asks for them.
        self._filled: NDArray[np.float64] | None = None
        self._rounding: float | None = None
        self._room_weights = weights.steps
        # The latest rank's F, which it asks for several times before it admits anything.
        self._curve_of: tuple[int, FCurve] | None = None

    @cached_property
    def reward(self) -> float:
        """What a token that fills counts in F."""
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
        """Return F and the overflow of each of float64[n] `totals` on each of some ranks.

        There is a target. One call for all ranks is much faster than one for each.

        Args:
            ranks: Which.
            totals: KV tokens.
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
        if self._rounding is None:
            # Room is what the envelope has more than a rank: both have the rounding of the larger.
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
        At least one rank must be open. O(G x H).

        Args:
            total: KV tokens.
            open_ranks: bool[G].
            worth: float64[G], what each rank is worth beside, in F; None for nothing.
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
        """Add float64[H + 1] tokens to `rank`; the envelope rises where the rank exceeds it.

        Args:
            rank: Which.
            contribution: What it adds.
            full: Whether nobody asks for this rank again: what is kept of it is then not updated.

        Returns:
            Whether the envelope rose. If not, only this rank's margin changed.
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
        """The penalties of `_kinks`."""
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

"""The state of one dispatch round: projected loads, envelope, margins and scores.

It is built once per round and updated after every admission, so that later decisions of a round see
the earlier ones. With a horizon of 0 it reduces to the loads and margins of the present step.

With a **target**, the load at which the ranks would be evenly full, F has a second kink. Its first
part is how far an admission brings the rank towards the target, |T - L| - |T - L - s|: slope 1 up to
the target and -1 beyond it. Past the envelope every other rank waits, as without a target. F stays
concave and piecewise linear. Filling every rank to the envelope, as the paper's F does, leaves holes
elsewhere that no request is left to fill, because the arrivals bring only so many tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.fscore import FCurve, excess, f_score

# Avoids a division by 0 at steps that no admitted request reaches. Their weight is 0 as well.
_LEAST_PERSISTENCE = 1e-6
# The slope of a distance falls from 1 to -1.
_BEYOND_TARGET = 2.0


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
        target: float64[H + 1], KV tokens of a rank that is as full as the others; None for the
            paper's F.
        speeds: float64[G], see `Fleet`. Tokens are those of each rank; the envelope and the target
            are those of a rank of speed 1.

    Attributes:
        safe_margins: float64[G], the least margin of each rank over the horizon; another array once
            the envelope has risen.
    """

    def __init__(
        self,
        ahead: NDArray[np.float64],
        weights: Weights,
        persistence: NDArray[np.float64],
        target: NDArray[np.float64] | None = None,
        speeds: NDArray[np.float64] | None = None,
    ) -> None:
        self._ahead = ahead
        # s tokens admitted now are s p(h) in h steps, and w (a s p - b (s p - m)+) is the same as
        # w p (a s - b (s - m / p)+): F keeps its form with margins and weights rescaled.
        self._steps = weights.steps * persistence
        self._reward = weights.alpha * float(self._steps.sum())
        self._stretch = 1.0 / np.maximum(persistence, _LEAST_PERSISTENCE)
        self._beta = weights.beta
        self._past_envelope = weights.beta * self._steps
        self._target_penalty = min(_BEYOND_TARGET * weights.alpha, weights.beta)
        # float64[G, 1]; None if all ranks are equally fast.
        self._speeds = None if speeds is None else speeds[:, None]
        levels = ahead if self._speeds is None else ahead / self._speeds
        self._envelope: NDArray[np.float64] = levels.max(axis=0)
        self._target = target
        # The latest rank's F, which it asks for several times before it admits anything.
        self._curve_of: tuple[int, FCurve] | None = None
        if target is None:
            self._penalties = self._past_envelope
        else:
            past_target = self._target_penalty * self._steps
            self._penalties = np.concatenate([past_target, self._past_envelope - past_target])
        self._widen()

    def scores(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F of admitting each of float64[n] `totals` tokens to `rank`."""
        return f_score(totals, self._kinks(rank), self._penalties, reward=self._reward)

    def scores_to_envelope(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F without the target: it may be exceeded."""
        return f_score(totals, self._margins[rank], self._past_envelope, reward=self._reward)

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
            totals: KV tokens, ascending.
        """
        margins = self._margins[ranks]
        kinks = np.concatenate([self._rooms(ranks, margins), margins])
        beyond = excess(totals, kinks, self._steps)
        past_target, past_envelope = beyond[: len(ranks)], beyond[len(ranks) :]
        to_envelope = self._reward * totals - self._beta * past_envelope
        to_target = to_envelope + self._target_penalty * (past_envelope - past_target)
        overflow = past_envelope / self._steps.sum()
        return [*map(Outlook, to_target, to_envelope, overflow)]

    def best_rank(self, total: int, open_ranks: NDArray[np.bool_]) -> int:
        """Return the open rank where `total` tokens cost least time; on a tie the one with most room.

        If nothing overflows, all ranks tie, and the result is the least-loaded rank over the horizon.
        At least one rank must be open. O(G x H).
        """
        # The reward is the same on every rank, so the least overflow is the best score.
        overflow = np.maximum(total - self._margins, 0.0) @ self._steps
        if self._speeds is not None:
            overflow /= self._speeds[:, 0]
        overflow[~open_ranks] = np.inf
        # NumPy's `min` and `flatnonzero` wrap these in Python code, and this runs per admission.
        (ties,) = (overflow == overflow[overflow.argmin()]).nonzero()
        if ties.size == 1:
            return int(ties[0])
        room = self._margins[ties] @ self._steps
        if self._speeds is not None:
            room /= self._speeds[ties, 0]
        return int(ties[int(room.argmax())])

    def admit(self, rank: int, contribution: NDArray[np.float64], *, full: bool = False) -> bool:
        """Add float64[H + 1] tokens to `rank`; the envelope rises where the rank exceeds it.

        Args:
            rank: Which.
            contribution: What it adds.
            full: Whether nobody asks for this rank again: its margin is then not kept.

        Returns:
            Whether the envelope rose. If not, only this rank's margin changed.
        """
        self._curve_of = None
        ahead = self._ahead[rank]
        ahead += contribution
        level = ahead if self._speeds is None else ahead / self._speeds[rank]
        if (level > self._envelope).any():
            np.maximum(self._envelope, level, out=self._envelope)
            self._widen()
            return True
        if not full:
            self._margins[rank] = self._margin(rank, ahead)
            self.safe_margins[rank] = self._margins[rank].min()
        return False

    def _widen(self) -> None:
        """Make all margins anew: a higher envelope widens every rank's."""
        self._margins = self._margin(slice(None), self._ahead)
        # The margin that lasts over the whole horizon; it orders the ranks of Stage 2.
        # Paper: §4.2, (ii).
        self.safe_margins: NDArray[np.float64] = self._margins.min(axis=1)

    def _margin(self, ranks: "int | slice", ahead: NDArray[np.float64]) -> NDArray[np.float64]:
        envelope = self._envelope
        below = (envelope if self._speeds is None else envelope * self._speeds[ranks]) - ahead
        below *= self._stretch
        return np.asarray(below)

    def _curve(self, rank: int) -> FCurve:
        if self._curve_of is None or self._curve_of[0] != rank:
            curve = FCurve(self._kinks(rank), self._penalties, reward=self._reward)
            self._curve_of = rank, curve
        return self._curve_of[1]

    def _kinks(self, rank: int) -> NDArray[np.float64]:
        margins: NDArray[np.float64] = self._margins[rank]
        if self._target is None:
            return margins
        return np.concatenate([self._rooms(rank, margins), margins])

    def _rooms(self, ranks: "int | list[int]", margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far ranks are below the target; a target above the envelope is none."""
        assert self._target is not None
        target = self._target if self._speeds is None else self._target * self._speeds[ranks]
        room = target - self._ahead[ranks]
        np.maximum(room, 0.0, out=room)
        room *= self._stretch
        return np.minimum(room, margins, out=room)

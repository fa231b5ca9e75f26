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

from balanceroute.proxy.core.fscore import f_peak, f_score

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
        self._speeds = (np.ones(len(ahead)) if speeds is None else speeds)[:, None]
        self._envelope: NDArray[np.float64] = (ahead / self._speeds).max(axis=0)
        self._margins = (self._envelope * self._speeds - ahead) * self._stretch
        self._target = target
        # The latest rank's kinks, which it asks for several times before it admits anything.
        self._kinks_of: tuple[int, NDArray[np.float64]] | None = None
        if target is None:
            self._penalties = self._past_envelope
        else:
            past_target = self._target_penalty * self._steps
            self._penalties = np.concatenate([past_target, self._past_envelope - past_target])
        # The margin that lasts over the whole horizon; it orders the ranks of Stage 2.
        # Paper: §4.2, (ii).
        self.safe_margins: NDArray[np.float64] = self._margins.min(axis=1)

    def scores(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F of admitting each of float64[n] `totals` tokens to `rank`."""
        return f_score(totals, self._kinks(rank), self._penalties, reward=self._reward)

    def scores_to_envelope(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F without the target: it may be exceeded."""
        return f_score(totals, self._margins[rank], self._past_envelope, reward=self._reward)

    def score(self, rank: int, total: int) -> float:
        """Return F of admitting `total` tokens to `rank`."""
        return float(self.scores(rank, np.array([total], np.float64))[0])

    def peak(self, rank: int) -> float:
        """Return the number of tokens at which F of `rank` is largest."""
        return f_peak(self._kinks(rank), self._penalties, reward=self._reward)

    def outlook(self, rank: int, totals: NDArray[np.float64]) -> Outlook:
        """Return F and the overflow of each of float64[n] `totals` on `rank`; there is a target."""
        beyond = np.subtract.outer(totals, self._kinks(rank))
        np.maximum(beyond, 0.0, out=beyond)
        # One product of all rows is much faster than one for each total.
        beyond = (beyond.reshape(-1, len(self._steps)) @ self._steps).reshape(-1, 2)
        to_envelope = self._reward * totals - self._beta * beyond[:, 1]
        to_target = to_envelope + self._target_penalty * (beyond[:, 1] - beyond[:, 0])
        return Outlook(to_target, to_envelope, beyond[:, 1] / self._steps.sum())

    def best_rank(self, total: int, open_ranks: NDArray[np.bool_]) -> int:
        """Return the open rank where `total` tokens cost least time; on a tie the one with most room.

        If nothing overflows, all ranks tie, and the result is the least-loaded rank over the horizon.
        At least one rank must be open. O(G x H).
        """
        # The reward is the same on every rank, so the least overflow is the best score.
        overflow = np.maximum(total - self._margins, 0.0) @ self._steps / self._speeds[:, 0]
        overflow[~open_ranks] = np.inf
        # NumPy's `min` and `flatnonzero` wrap these in Python code, and this runs per admission.
        (ties,) = (overflow == overflow[overflow.argmin()]).nonzero()
        if ties.size == 1:
            return int(ties[0])
        room = self._margins[ties] @ self._steps / self._speeds[ties, 0]
        return int(ties[int(room.argmax())])

    def admit(self, rank: int, contribution: NDArray[np.float64]) -> None:
        """Add float64[H + 1] tokens to `rank`; the envelope rises where the rank exceeds it."""
        self._kinks_of = None
        self._ahead[rank] += contribution
        level = self._ahead[rank] / self._speeds[rank]
        # A higher envelope widens every rank's margin; below it only this rank's margin changes.
        if (level > self._envelope).any():
            np.maximum(self._envelope, level, out=self._envelope)
            self._margins = (self._envelope * self._speeds - self._ahead) * self._stretch
            self.safe_margins = self._margins.min(axis=1)
        else:
            below = self._envelope * self._speeds[rank] - self._ahead[rank]
            self._margins[rank] = below * self._stretch
            self.safe_margins[rank] = self._margins[rank].min()

    def _kinks(self, rank: int) -> NDArray[np.float64]:
        margins: NDArray[np.float64] = self._margins[rank]
        if self._target is None:
            return margins
        if self._kinks_of is None or self._kinks_of[0] != rank:
            target = self._target * self._speeds[rank]
            room = np.maximum(target - self._ahead[rank], 0.0) * self._stretch
            # A target above the envelope is none.
            kinks = np.concatenate([np.minimum(room, margins), margins])
            self._kinks_of = rank, kinks
        return self._kinks_of[1]

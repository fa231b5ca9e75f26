"""The state of one dispatch round: projected loads, envelope, margins and scores.

It is built once per round and updated after every admission, so that later decisions of a round see
the earlier ones. With a horizon of 0 it reduces to the loads and margins of the present step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.fscore import f_peak, f_score

# Avoids a division by 0 at steps that no admitted request reaches. Their weight is 0 as well.
_LEAST_PERSISTENCE = 1e-6


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


class Balance:
    """Margins of G ranks over the horizon.

    Args:
        ahead: float64[G, H + 1], projected KV tokens of each rank; updated in place.
        weights: The weights of F.
        persistence: float64[H + 1], the share of an admitted token that remains h steps ahead.
    """

    def __init__(
        self,
        ahead: NDArray[np.float64],
        weights: Weights,
        persistence: NDArray[np.float64],
    ) -> None:
        self._ahead = ahead
        # s tokens admitted now are s p(h) in h steps, and w (a s p - b (s p - m)+) is the same as
        # w p (a s - b (s - m / p)+): F keeps its form with margins and weights rescaled.
        self._weights = Weights(weights.steps * persistence, weights.alpha, weights.beta)
        self._stretch = 1.0 / np.maximum(persistence, _LEAST_PERSISTENCE)
        self._envelope: NDArray[np.float64] = ahead.max(axis=0)
        self._margins = (self._envelope - ahead) * self._stretch
        # The margin that lasts over the whole horizon; it orders the ranks of Stage 2.
        # Paper: §4.2, (ii).
        self.safe_margins: NDArray[np.float64] = self._margins.min(axis=1)

    def scores(self, rank: int, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F of admitting each of float64[n] `totals` tokens to `rank`."""
        weights = self._weights
        return f_score(
            totals, self._margins[rank], weights.steps, alpha=weights.alpha, beta=weights.beta
        )

    def score(self, rank: int, total: int) -> float:
        """Return F of admitting `total` tokens to `rank`."""
        return float(self.scores(rank, np.array([total], np.float64))[0])

    def peak(self, rank: int) -> float:
        """Return the number of tokens at which F of `rank` is largest."""
        weights = self._weights
        return f_peak(self._margins[rank], weights.steps, alpha=weights.alpha, beta=weights.beta)

    def best_rank(self, total: int, open_ranks: NDArray[np.bool_]) -> int:
        """Return the open rank where `total` tokens score best; on a tie the one with most room.

        If nothing overflows, all ranks tie, and the result is the least-loaded rank over the horizon.
        At least one rank must be open. O(G x H).
        """
        weights = self._weights
        # The reward is the same on every rank, so the least overflow is the best score.
        overflow = np.maximum(total - self._margins, 0.0) @ weights.steps
        overflow[~open_ranks] = np.inf
        # NumPy's `min` and `flatnonzero` wrap these in Python code, and this runs per admission.
        (ties,) = (overflow == overflow[overflow.argmin()]).nonzero()
        if ties.size == 1:
            return int(ties[0])
        room = self._margins[ties] @ weights.steps
        return int(ties[int(room.argmax())])

    def admit(self, rank: int, contribution: NDArray[np.float64]) -> None:
        """Add float64[H + 1] tokens to `rank`; the envelope rises where the rank exceeds it."""
        self._ahead[rank] += contribution
        # A higher envelope widens every rank's margin; below it only this rank's margin changes.
        if (self._ahead[rank] > self._envelope).any():
            np.maximum(self._envelope, self._ahead[rank], out=self._envelope)
            self._margins = (self._envelope - self._ahead) * self._stretch
            self.safe_margins = self._margins.min(axis=1)
        else:
            self._margins[rank] = (self._envelope - self._ahead[rank]) * self._stretch
            self.safe_margins[rank] = self._margins[rank].min()

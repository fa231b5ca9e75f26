"""The working picture of one dispatch round: projected loads, envelope, margins, scores.

Built once per round and updated after every admission, so that later decisions of the round see the
earlier ones. With a horizon of 0 all of it reduces to loads and margins of the present step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.fscore import f_peak, f_score

# Keeps a step that nobody newly admitted lives to see from dividing by 0; its weight is then 0 too.
_LEAST_PERSISTENCE = 1e-6


@dataclass(frozen=True, slots=True)
class Weights:
    """How F weighs what an admission fills and what it overflows. Paper: §4.1, Eq. 2.

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
        """What one token beyond the margin costs, if it is beyond at every step."""
        return self.beta * float(self.steps.sum())


class Balance:
    """Margins of G ranks over the horizon.

    Args:
        ahead: float64[G, H + 1], projected KV tokens of each rank; taken over and updated.
        weights: How to score.
        persistence: float64[H + 1], how much of an admitted token is still there h steps ahead.
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
        # The margin that lasts over the whole horizon. Paper: §4.2, (ii).
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

        Where nothing overflows all ranks tie, so that this is then the least-loaded rank over the
        horizon. At least one rank must be open. O(G x H).
        """
        weights = self._weights
        overflow = np.maximum(total - self._margins, 0.0) @ weights.steps
        overflow[~open_ranks] = np.inf
        # `min` and `flatnonzero` are Python code around these, and every admission comes here.
        (ties,) = (overflow == overflow[overflow.argmin()]).nonzero()
        if ties.size == 1:
            return int(ties[0])
        room = self._margins[ties] @ weights.steps
        return int(ties[int(room.argmax())])

    def admit(self, rank: int, contribution: NDArray[np.float64]) -> None:
        """Add float64[H + 1] tokens to `rank`, raising the envelope where they pass it."""
        self._ahead[rank] += contribution
        if (self._ahead[rank] > self._envelope).any():
            np.maximum(self._envelope, self._ahead[rank], out=self._envelope)
            self._margins = (self._envelope - self._ahead) * self._stretch
            self.safe_margins = self._margins.min(axis=1)
        else:
            self._margins[rank] = (self._envelope - self._ahead[rank]) * self._stretch
            self.safe_margins[rank] = self._margins[rank].min()

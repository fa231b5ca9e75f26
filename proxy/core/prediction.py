"""The core's interface to a predictor, and the paper's composite estimate.

The core asks in batches, and only for survival probabilities. The paper's two stages follow from
them: the probability to finish within the horizon, and the mean remaining length in that case.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RequestId

# Outputs are expected to be at most this long: a request without a limit must not cost much time.
_MOST_EXPECTED = 4096


class OutputPredictor(Protocol):
    """Predicts how long active requests continue."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the probability that each request still runs after 0, 1, .. `steps` more steps.

        Args:
            requests: n request ids, for predictors that keep features by request.
            ages: int64[n], tokens emitted so far.
            steps: The last step ahead, at least 0.

        Returns:
            float64[n, steps + 1]: Pr[output > age + h | output > age]; non-increasing along a row,
            column 0 is 1. A new array, which the caller keeps and may write to.
        """
        ...


def mean_output_tokens(
    predictor: OutputPredictor, request: RequestId, max_tokens: int | None
) -> int:
    """Return the expected output of a request that has not decoded yet, at most 4,096 tokens."""
    steps = min(max_tokens or _MOST_EXPECTED, _MOST_EXPECTED)
    survival = predictor.survival([request], np.zeros(1, np.int64), steps)
    # E[min(output, steps)] is the sum of Pr[output > h] over h < steps.
    return round(float(survival[0, :steps].sum()))


def two_stage_estimate(
    survival: NDArray[np.float64], horizon_steps: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the paper's p and mu, computed from survival curves.

    Args:
        survival: float64[n, at least H + 1].
        horizon_steps: H, at least 1.

    Returns:
        float64[n] Pr[finish within H steps], and float64[n] E[remaining | finish within H] in
        steps (H where the probability is 0). Paper: §C.1, Eq. 5.
    """
    stays = survival[:, horizon_steps]
    finish = 1.0 - stays
    # E[R; R <= H] = sum over h < H of Pr[h < R <= H].
    mass = (survival[:, :horizon_steps] - stays[:, None]).sum(axis=1)
    mean = np.full(len(survival), float(horizon_steps))
    np.divide(mass, finish, out=mean, where=finish > 0)
    return finish, mean


def composite_steps(survival: NDArray[np.float64], horizon_steps: int) -> NDArray[np.int64]:
    """Return the gated composite estimate of the remaining steps, int64[n] in [1, H].

    H means that the request stays. The estimate is accepted only if the request is more likely than
    not to finish within the horizon. Paper: §C.1, Eq. 6, and the gate of §C.2.3.
    """
    finish, mean = two_stage_estimate(survival, horizon_steps)
    composite = finish * mean + (1.0 - finish) * horizon_steps
    # The gate: a departure is predicted only if it is more likely than not.
    composite[finish < 0.5] = horizon_steps
    return np.clip(np.rint(composite), 1, horizon_steps).astype(np.int64)

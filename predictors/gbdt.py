"""Learned predictor: two stages of gradient-boosted trees on causal features. Paper: §C.2.1.

Stage 1 is the chance to finish within the horizon, stage 2 the mean of what remains if so. The trees
of both correct what the marginal distribution of past outputs tells from the age alone, so that
features without signal leave an empirical-survival predictor. The marginal and the features go on
learning from every request that ends; the trees stay as `balanceroute.predictors.gbdt_training` made
them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import RequestFeatures
from balanceroute.predictors.gbdt_features import (
    LOG_ODDS,
    NAMES,
    REMAINING,
    SNAPSHOT_WIDTH,
    Features,
)
from balanceroute.predictors.gbdt_trees import raw_scores, read_trees, write_trees
from balanceroute.predictors.state import State, StateError
from balanceroute.proxy.core.events import RequestId

if TYPE_CHECKING:
    from lightgbm import Booster

__all__ = ["KIND", "Gbdt"]

KIND = "gbdt"

# One output, spread evenly over the horizon, is added to those that shape the way to it.
_PRIOR_OUTPUTS = 1.0
# The curve to the horizon is the marginal's to a power within these bounds.
_LEAST_POWER, _MOST_POWER = 1.0 / 64.0, 64.0
_NEWTON_STEPS = 2
# Beyond the horizon a request keeps its odds against the marginal, up to this factor.
_MOST_TILT = 4.0


class Gbdt:
    """Predicts with trees; see `balanceroute.predictors.gbdt_training.train`, which makes one.

    What the trees say of a request at an age is said once: a repeated question costs no tree.

    Args:
        features: What had ended when the trees were trained; goes on learning.
        finish: Trees of the log odds of finishing within the horizon, less the marginal's.
        remaining: Trees of the mean steps left of those that do, less the marginal's.
    """

    uses_keys: ClassVar[bool] = True

    def __init__(self, features: Features, finish: "Booster", remaining: "Booster") -> None:
        self._features = features
        self._finish = finish
        self._remaining = remaining
        # Per-slot state; a slot is one announced request.
        slots = 64
        self._slot_of: dict[RequestId, int] = {}
        self._known: dict[RequestId, RequestFeatures] = {}
        self._free: list[int] = list(range(slots))
        self._snapshots = np.empty((slots, SNAPSHOT_WIDTH))
        # The last question about it, and both stages' answers.
        self._age = np.full(slots, -1, np.int64)
        self._log_odds = np.empty(slots)
        self._mean = np.empty(slots)

    @property
    def horizon_steps(self) -> int:
        """H, which the trees were trained for."""
        return self._features.marginal.horizon_steps

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Settle a request's features, its age apart; if called again, anew."""
        slot = self._slot_of.get(request)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slot_of[request] = self._free.pop()
        self._known[request] = features
        self._snapshots[slot] = self._features.snapshot(features)
        self._age[slot] = -1

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the curves of both stages; of requests never announced, the marginal's."""
        slots = np.array([self._slot_of.get(request, -1) for request in requests], np.int64)
        known = slots >= 0
        if known.all():
            return self._curves(slots, ages, steps)
        survival = self._features.marginal.survival(ages, steps)
        if known.any():
            survival[known] = self._curves(slots[known], ages[known], steps)
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn from an output; without features, if the request was never announced."""
        features = self._known.get(request)
        if features is None:
            self._features.marginal.observe(output_tokens)
            return
        self._features.observe(features, output_tokens)
        self.forget(request)

    def forget(self, request: RequestId) -> None:
        """Drop what was noted."""
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._free.append(slot)
            del self._known[request]

    def state(self) -> State:
        """Return what has ended, and the trees in LightGBM's own format."""
        fields = self._features.fields() | {"feature_names": list(NAMES)}
        texts = {"finish": write_trees(self._finish), "remaining": write_trees(self._remaining)}
        return State(KIND, fields, texts)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return a predictor that has learned the same.

        Raises:
            StateError: The state cannot be of this predictor.
            ConfigError: LightGBM is not installed.
        """
        if state.value("feature_names") != list(NAMES):
            raise StateError("its features are not those of this program: train it again")
        features = Features.from_state(state)
        return cls(features, _booster(state, "finish"), _booster(state, "remaining"))

    def _curves(
        self, slots: NDArray[np.int64], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        log_odds, mean = self._log_odds[slots], self._mean[slots]
        new = self._age[slots] != ages
        if new.any():
            log_odds[new], mean[new] = self._ask_trees(slots[new], ages[new])
        marginal = self._features.marginal
        return _survival(
            marginal.running(ages, max(steps, self.horizon_steps)),
            horizon_steps=self.horizon_steps,
            log_odds=log_odds,
            mean=mean,
            marginal_log_odds=marginal.log_odds(ages),
        )[:, : steps + 1]

    def _ask_trees(
        self, slots: NDArray[np.int64], ages: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return both stages' answers, and note them."""
        matrix = self._features.matrix(self._snapshots[slots], ages)
        log_odds = matrix[:, LOG_ODDS] + raw_scores(self._finish, matrix)
        mean = matrix[:, REMAINING] + raw_scores(self._remaining, matrix)
        mean = np.clip(mean, 1.0, self.horizon_steps)
        self._age[slots], self._log_odds[slots], self._mean[slots] = ages, log_odds, mean
        return log_odds, mean

    def _grow(self) -> None:
        slots = len(self._age)
        self._free.extend(range(slots, 2 * slots))
        self._snapshots = np.concatenate([self._snapshots, np.empty_like(self._snapshots)])
        self._age = np.concatenate([self._age, np.full(slots, -1, np.int64)])
        self._log_odds = np.concatenate([self._log_odds, np.empty(slots)])
        self._mean = np.concatenate([self._mean, np.empty(slots)])


def _survival(
    running: NDArray[np.float64],
    *,
    horizon_steps: int,
    log_odds: NDArray[np.float64],
    mean: NDArray[np.float64],
    marginal_log_odds: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return survival curves that have both stages' chance and, as nearly as may be, mean.

    Up to the horizon the marginal's curve is raised to the power that gives it the mean. Beyond it
    go on the marginal's hazards, in proportion to how likely the request was to finish before.

    Args:
        running: float64[n, steps + 1], of the marginal; steps is H or more.
        horizon_steps: H.
        log_odds: float64[n], of finishing within H steps.
        mean: float64[n], steps left of those that do, in 1..H.
        marginal_log_odds: float64[n], what the marginal says instead.
    """
    horizon = horizon_steps
    ended = running[:, :1] - running[:, 1 : horizon + 1]
    even = np.arange(1, horizon + 1) * (_PRIOR_OUTPUTS / horizon)
    logs = np.log((ended + even) / (ended[:, -1:] + _PRIOR_OUTPUTS))
    # Pr[R <= h | R <= H] is exp(power x logs); its sum over 1 <= h < H is H less the mean.
    power = np.ones(len(mean))
    for _ in range(_NEWTON_STEPS):
        shares = np.exp(power[:, None] * logs[:, :-1])
        excess = shares.sum(axis=1) - (horizon - mean)
        slope = power * np.einsum("ij,ij->i", shares, logs[:, :-1])
        power *= np.exp(np.clip(-excess / np.minimum(slope, -1e-9), -2.0, 2.0))
        np.clip(power, _LEAST_POWER, _MOST_POWER, out=power)
    # log(1 - p) of log odds x is -log(1 + e^x).
    stays = -np.logaddexp(0.0, log_odds)
    survival = np.empty_like(running)
    survival[:, 0] = 1.0
    finish = -np.expm1(stays)
    survival[:, 1 : horizon + 1] = 1.0 - finish[:, None] * np.exp(power[:, None] * logs)
    if running.shape[1] > horizon + 1:
        tilt = np.clip(stays / -np.logaddexp(0.0, marginal_log_odds), 1.0 / _MOST_TILT, _MOST_TILT)
        later = running[:, horizon : horizon + 1]
        beyond = np.ones_like(running[:, horizon + 1 :])
        np.divide(running[:, horizon + 1 :], later, out=beyond, where=later > 0)
        np.power(beyond, tilt[:, None], out=beyond)
        survival[:, horizon + 1 :] = survival[:, horizon : horizon + 1] * beyond
    # Rounding must not make a curve rise.
    return np.minimum.accumulate(survival, axis=1, out=survival)


def _booster(state: State, name: str) -> "Booster":
    """Return the trees of a stage.

    Raises:
        StateError: The state's text cannot be trees of this predictor.
        ConfigError: LightGBM is not installed.
    """
    text = state.text(name)
    try:
        return read_trees(text, NAMES)
    except StateError as error:
        raise StateError(f"text {name!r}: {error}") from error

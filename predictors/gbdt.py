"""Learned predictor: two stages of gradient-boosted trees on causal features. Paper: §C.2.1.

Stage 1 is the chance to finish within the horizon, stage 2 the mean of what remains if so. The trees
of both correct the prediction of the marginal distribution of past outputs by age, so that
features without signal leave an empirical-survival predictor. The marginal and the features go on
learning from every request that ends; the trees stay as `balanceroute.predictors.gbdt_training` made
them.
"""

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
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
from balanceroute.predictors.state import State, StateError
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

if TYPE_CHECKING:
    from lightgbm import Booster


# Trees in LightGBM's own text, checked strictly before LightGBM reads them.
#
# LightGBM ends the whole process on some malformed models, and follows whatever child a node
# names; a damaged file must do neither to a proxy. So only what `Booster.model_to_string` writes
# for trees of one output over numerical features is let through, up to the end of the trees: the
# parameters of their training, which follow, are not read.

MAX_TREES = 1_000
MAX_LEAVES = 1_024

# Beyond all log odds and steps; sums stay finite.
_MOST_LEAF_VALUE = 1e6
_END = "end of trees\n"
_INTEGER = r"-?\d{1,9}"
_NUMBER = r"-?\d{1,32}(?:\.\d{1,32})?(?:e[-+]?\d{1,3})?"
_INTEGERS = re.compile(rf"(?:{_INTEGER}(?: {_INTEGER})*)?")
_NUMBERS = re.compile(rf"(?:{_NUMBER}(?: {_NUMBER})*)?")
# A split between the missing values and all other values is at infinity.
_THRESHOLD = rf"(?:-?inf|{_NUMBER})"
_THRESHOLDS = re.compile(rf"(?:{_THRESHOLD}(?: {_THRESHOLD})*)?")
_RANGES = re.compile(rf"(?:none|\[{_NUMBER}:{_NUMBER}\])(?: (?:none|\[{_NUMBER}:{_NUMBER}\]))*")
_HEADER = (
    "version",
    "num_class",
    "num_tree_per_iteration",
    "label_index",
    "max_feature_idx",
    "objective",
    "feature_names",
    "feature_infos",
    "tree_sizes",
)
_TREE = (
    "Tree",
    "num_leaves",
    "num_cat",
    "split_feature",
    "split_gain",
    "threshold",
    "decision_type",
    "left_child",
    "right_child",
    "leaf_value",
    "leaf_weight",
    "leaf_count",
    "internal_value",
    "internal_weight",
    "internal_count",
    "is_linear",
    "shrinkage",
)
_OF_NODES = ("split_gain", "threshold", "internal_value", "internal_weight", "internal_count")
_OF_LEAVES = ("leaf_value", "leaf_weight", "leaf_count")
# Bit 0 would be a split by category; the other bits say where missing values go.
_DECISION_TYPES = {0, 2, 4, 6, 8, 10}


def require_lightgbm() -> ModuleType:
    """Return the library of the trees.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import lightgbm  # noqa: PLC0415  # An extra, and half a second to import.
    except ImportError as error:
        raise ConfigError(
            "the gbdt predictor needs the extra gbdt: pip install '.[gbdt]'"
        ) from error
    return lightgbm


def raw_scores(trees: "Booster", matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64[n], the sums of the trees' leaves, for float64[n, features]."""
    return np.asarray(trees.predict(matrix, raw_score=True, num_threads=1))


def write_trees(trees: "Booster") -> str:
    """Return LightGBM's text of trees, up to their end; the same for trees that were read from it."""
    text: str = trees.model_to_string()
    return text[: text.index(_END) + len(_END)]


def read_trees(text: str, feature_names: Sequence[str]) -> "Booster":
    """Return the trees that a text describes.

    Args:
        text: From `write_trees` or `Booster.model_to_string`.
        feature_names: Of the columns that the trees must be made for.

    Raises:
        StateError: It cannot be such a text. The message gives the reason.
        ConfigError: LightGBM is not installed.
    """
    lightgbm = require_lightgbm()
    end = text.find(_END)
    if end < 0 or not text.isascii():
        raise StateError("no LightGBM model, or cut off")
    text = text[: end + len(_END)]
    head, *trees = re.split(r"(?=^Tree=)", text[:end], flags=re.MULTILINE)
    if not 1 <= len(trees) <= MAX_TREES:
        raise StateError(f"must hold 1..{MAX_TREES} trees, not {len(trees)}")
    _check_header(head, feature_names, list(map(len, trees)))
    for number, tree in enumerate(trees):
        _check_tree(tree, number, len(feature_names))
    booster: Booster = lightgbm.Booster(model_str=text)
    return booster


def _check_header(head: str, feature_names: Sequence[str], tree_sizes: Sequence[int]) -> None:
    first, _, rest = head.partition("\n")
    if first != "tree":
        raise StateError("no LightGBM model")
    values = _values(rest, _HEADER, "the header")
    if values["feature_names"] != " ".join(feature_names):
        raise StateError("the trees have other features than this program: train it again")
    expected = {
        "version": "v4",
        "num_class": "1",
        "num_tree_per_iteration": "1",
        "label_index": "0",
        "max_feature_idx": str(len(feature_names) - 1),
        "tree_sizes": " ".join(map(str, tree_sizes)),
    }
    for key, value in expected.items():
        if values[key] != value:
            raise StateError(f"{key} must be {value[:40]!r}, not {values[key][:40]!r}")
    if values["objective"] not in {"binary sigmoid:1", "regression"}:
        raise StateError(f"unknown objective {values['objective'][:40]!r}")
    infos = values["feature_infos"]
    if not _RANGES.fullmatch(infos) or len(infos.split(" ")) != len(feature_names):
        raise StateError("feature_infos must be one range a feature")


def _check_tree(text: str, number: int, features: int) -> None:
    where = f"tree {number}"
    values = _values(text, _TREE, where)
    expected = {"Tree": str(number), "num_cat": "0", "is_linear": "0"}
    for key, value in expected.items():
        if values[key] != value:
            raise StateError(f"{where}: {key} must be {value}, not {values[key][:40]!r}")
    (leaves,) = _integers(values, "num_leaves", 1, where)
    if not 1 <= leaves <= MAX_LEAVES:
        raise StateError(f"{where}: num_leaves must be in 1..{MAX_LEAVES}, not {leaves}")
    nodes = leaves - 1
    for key, length in (
        ("shrinkage", 1),
        *((key, nodes) for key in _OF_NODES),
        *((key, leaves) for key in _OF_LEAVES),
    ):
        pattern = _THRESHOLDS if key == "threshold" else _NUMBERS
        # A tree of one leaf has no weight.
        if leaves == 1 and key == "leaf_weight" and not values[key]:
            continue
        if not _is_list(pattern, values[key], length):
            raise StateError(f"{where}: {key} must be {length} numbers")
    if max(abs(float(value)) for value in values["leaf_value"].split(" ")) > _MOST_LEAF_VALUE:
        raise StateError(f"{where}: leaf_value must be in ±{_MOST_LEAF_VALUE:g}")
    if not all(0 <= split < features for split in _integers(values, "split_feature", nodes, where)):
        raise StateError(f"{where}: split_feature must be in 0..{features - 1}")
    if not _DECISION_TYPES.issuperset(_integers(values, "decision_type", nodes, where)):
        raise StateError(f"{where}: an unknown decision_type")
    left = _integers(values, "left_child", nodes, where)
    right = _integers(values, "right_child", nodes, where)
    # Leaves are -1, -2, ..; each node but the root, and each leaf, has one parent, and
    # every node one that comes before it: so every way from the root ends in a leaf.
    if nodes and sorted(left + right) != [*range(-leaves, 0), *range(1, nodes)]:
        raise StateError(f"{where}: its children are not each of the nodes and leaves once")
    if any(0 <= child <= node for side in (left, right) for node, child in enumerate(side)):
        raise StateError(f"{where}: a child comes before its parent")


def _values(text: str, keys: Sequence[str], where: str) -> dict[str, str]:
    """Return the values of lines `key=value`, which must have these keys, in this order."""
    lines = text.rstrip("\n").split("\n")
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    if tuple(values) != tuple(keys) or len(lines) != len(keys):
        raise StateError(f"{where} is not made of {', '.join(keys[:3])}, ..")
    return values


def _is_list(pattern: re.Pattern[str], value: str, length: int) -> bool:
    found = value.split(" ") if value else []
    return len(found) == length and pattern.fullmatch(value) is not None


def _integers(values: Mapping[str, str], key: str, length: int, where: str) -> list[int]:
    if not _is_list(_INTEGERS, values[key], length):
        raise StateError(f"{where}: {key} must be {length} integers")
    return [int(value) for value in values[key].split(" ")] if length else []


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

    It keeps the trees' answer for a request at an age: a repeated question costs no tree.

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
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._free.append(slot)
            del self._known[request]

    def state(self) -> State:
        """Return the features' state, and the trees in LightGBM's own format."""
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
        marginal_log_odds: float64[n], the marginal's answer instead.
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

"""Trees in LightGBM's own text, checked strictly before LightGBM reads them.

LightGBM ends the whole process on some malformed models, and follows whatever child a node names; a
damaged file must do neither to a proxy. So only what `Booster.model_to_string` writes for trees of
one output over numerical features is let through, up to the end of the trees: what follows them
tells how they were trained, and is not read.
"""

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.state import StateError
from balanceroute.proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from lightgbm import Booster

MAX_TREES = 1_000
MAX_LEAVES = 1_024

# Beyond all log odds and steps; sums stay finite.
_MOST_LEAF_VALUE = 1e6
_END = "end of trees\n"
_INTEGER = r"-?\d{1,9}"
_NUMBER = r"-?\d{1,32}(?:\.\d{1,32})?(?:e[-+]?\d{1,3})?"
_INTEGERS = re.compile(rf"(?:{_INTEGER}(?: {_INTEGER})*)?")
_NUMBERS = re.compile(rf"(?:{_NUMBER}(?: {_NUMBER})*)?")
# A split between the missing values and all others is at infinity.
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
# Bit 0 would be a split by category; the others say what becomes of missing values.
_DECISION_TYPES = {0, 2, 4, 6, 8, 10}


def require_lightgbm() -> ModuleType:
    """Return the library of the trees.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import lightgbm  # noqa: PLC0415  # An extra, and half a second to import.
    except ImportError as error:
        raise ConfigError("the gbdt predictor needs LightGBM: pip install lightgbm") from error
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
        text: What `write_trees` or `Booster.model_to_string` returned.
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
    # Leaves are told as -1, -2, ..; each node but the root, and each leaf, has one parent, and
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

"""Trees in LightGBM's text: what LightGBM wrote is read, anything else is refused before it is."""

import random
import re
import subprocess
import sys

import lightgbm
import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.predictors.gbdt import raw_scores, read_trees, write_trees
from balanceroute.predictors.state import StateError

NAMES = ("one", "two", "three")
PARAMETERS = {
    "objective": "regression",
    "num_leaves": 6,
    "min_data_in_leaf": 5,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "verbose": -1,
}


def rows() -> NDArray[np.float64]:
    matrix = np.random.default_rng(0).normal(size=(300, len(NAMES)))
    matrix[::3, 1] = np.nan
    return matrix


def text_of(**parameters: object) -> str:
    matrix = rows()
    truth = np.where(np.isnan(matrix[:, 1]), matrix[:, 0] * matrix[:, 2], 1.0)
    train = lightgbm.Dataset(matrix, truth, feature_name=list(NAMES))
    text: str = lightgbm.train(PARAMETERS | parameters, train, 4).model_to_string()
    return text


TEXT = text_of()


def test_the_trees_read_are_the_trees_written() -> None:
    matrix = rows()
    written = lightgbm.Booster(model_str=TEXT)
    assert np.array_equal(raw_scores(read_trees(TEXT, NAMES), matrix), raw_scores(written, matrix))


def test_what_is_read_is_written_as_it_was() -> None:
    text = write_trees(lightgbm.Booster(model_str=TEXT))
    assert TEXT.startswith(text)
    assert write_trees(read_trees(text, NAMES)) == text
    # LightGBM's users can read it too.
    assert np.array_equal(
        lightgbm.Booster(model_str=text).predict(rows()),
        raw_scores(read_trees(TEXT, NAMES), rows()),
    )


def test_a_tree_of_one_leaf_is_read() -> None:
    text = text_of(min_data_in_leaf=1_000)
    assert "num_leaves=1\n" in text
    assert np.ptp(raw_scores(read_trees(text, NAMES), rows())) == 0.0


def replaced(pattern: str, value: str) -> str:
    text, count = re.subn(pattern, value, TEXT, count=1, flags=re.MULTILINE)
    assert count == 1
    return re.sub(
        r"^tree_sizes=.*$",
        f"tree_sizes={' '.join(map(str, sizes(text)))}",
        text,
        flags=re.MULTILINE,
    )


def sizes(text: str) -> list[int]:
    trees = text[: text.index("end of trees")]
    starts = [match.start() for match in re.finditer(r"^Tree=", trees, re.MULTILINE)]
    return list(np.diff([*starts, len(trees)]).tolist())


@pytest.mark.parametrize(
    ("pattern", "value", "reason"),
    [
        ("^tree$", "forest", "no LightGBM model"),
        ("^version=v4$", "version=v5", "version must be 'v4'"),
        ("^num_class=1$", "num_class=2", "num_class"),
        ("^feature_names=one", "feature_names=uno", "other features"),
        ("^objective=.*$", "objective=multiclass", "unknown objective"),
        (r"^feature_infos=\[", "feature_infos=[x", "feature_infos"),
        ("^label_index=0\n", "", "the header is not made of"),
        ("^Tree=2$", "Tree=1", "tree 2: Tree must be 2"),
        ("^Tree=1$", "Bush=1", "tree 0 is not made of"),
        ("^num_leaves=6$", "num_leaves=5", "tree 0: split_gain must be 4 numbers"),
        ("^num_leaves=6$", "num_leaves=1000000000", "tree 0: num_leaves must be 1 integers"),
        ("^num_leaves=6$", "num_leaves=0", "num_leaves must be in 1..1024, not 0"),
        ("^num_cat=0$", "num_cat=1", "num_cat must be 0"),
        ("^split_feature=.", "split_feature=3", r"split_feature must be in 0\.\.2"),
        ("^threshold=", "threshold=nan ", "threshold must be 5 numbers"),
        ("^decision_type=.", "decision_type=1", "unknown decision_type"),
        (r"^left_child=\S+", "left_child=5", "not each of the nodes and leaves once"),
        (r"^left_child=\S+", "left_child=0", "not each of the nodes and leaves once"),
        ("^leaf_value=", "leaf_value=inf ", "leaf_value must be 6 numbers"),
        (r"^leaf_value=\S+", "leaf_value=1e9", "leaf_value must be in"),
        ("^shrinkage=.*$", "shrinkage=", "shrinkage must be 1 numbers"),
        ("^is_linear=0$", "is_linear=1", "is_linear must be 0"),
    ],
)
def test_what_lightgbm_did_not_write_is_refused(pattern: str, value: str, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        read_trees(replaced(pattern, value), NAMES)


def test_children_in_a_circle_are_refused() -> None:
    # Of nodes 1 and 2 each is the other's child, and the root's children are leaves.
    tree = {
        "num_leaves": "4",
        "split_feature": "0 0 0",
        "split_gain": "1 1 1",
        "threshold": "0 0 0",
        "decision_type": "2 2 2",
        "left_child": "-1 2 1",
        "right_child": "-2 -3 -4",
        "leaf_value": "0 0 0 0",
        "leaf_weight": "1 1 1 1",
        "leaf_count": "1 1 1 1",
        "internal_value": "0 0 0",
        "internal_weight": "1 1 1",
        "internal_count": "2 2 2",
    }
    text = TEXT
    for key, value in tree.items():
        text = re.sub(rf"^{key}=.*$", f"{key}={value}", text, count=1, flags=re.MULTILINE)
    text = re.sub(
        r"^tree_sizes=.*$",
        f"tree_sizes={' '.join(map(str, sizes(text)))}",
        text,
        flags=re.MULTILINE,
    )
    with pytest.raises(StateError, match="a child comes before its parent"):
        read_trees(text, NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tree",
        TEXT.replace("end of", "all"),
        "tree\nend of trees\n",
        TEXT[:900],
        "\0" + TEXT,
        "é" + TEXT,
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(StateError):
        read_trees(text, NAMES)


def test_no_change_of_a_character_ends_the_process() -> None:
    # LightGBM would end it for many of these, so they are read in another process.
    rng = random.Random(0)
    end = TEXT.index("end of trees")
    texts = []
    for _ in range(300):
        place = rng.randrange(end)
        texts.append(TEXT[:place] + rng.choice("019-. =e\n") + TEXT[place + rng.randrange(2) :])
    program = f"""
import numpy as np
from balanceroute.predictors.gbdt import raw_scores, read_trees
from balanceroute.predictors.state import StateError
read = 0
for text in {texts!r}:
    try:
        scores = raw_scores(read_trees(text, {NAMES!r}), np.zeros((2, 3)))
    except StateError:
        continue
    assert np.isfinite(scores).all()
    read += 1
print(read)
"""
    result = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    # Some changes only make another number.
    assert 0 < int(result.stdout) < 200

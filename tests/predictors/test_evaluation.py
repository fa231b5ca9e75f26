"""Predictors side by side: scores by their definitions, gains by row, and errors that mean something."""

import random
from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import NoPrediction, PastRequest, Predictor, RequestFeatures, Survival
from balanceroute.predictors.evaluation import (
    GAINS,
    Answers,
    PredictorJudgement,
    Replay,
    Rows,
    judge,
    scores_of,
)

HORIZON = 10


def rows_and_answers(table: list[tuple[int, float, float, int]]) -> tuple[Rows, Answers]:
    remaining = np.array([row[0] for row in table])
    rows = Rows(
        horizon_steps=HORIZON,
        request=np.arange(len(table)),
        age=np.zeros(len(table), np.int64),
        remaining=remaining,
        finishes=remaining <= HORIZON,
    )
    answers = Answers(
        p_finish=np.array([row[1] for row in table]),
        mean_remaining=np.array([row[2] for row in table]),
        composite=np.array([row[3] for row in table]),
    )
    return rows, answers


@given(
    st.lists(
        st.tuples(
            st.integers(1, 20), st.floats(0, 1), st.floats(1, HORIZON), st.integers(1, HORIZON)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_scores_are_means_over_the_rows(table: list[tuple[int, float, float, int]]) -> None:
    found = scores_of(*rows_and_answers(table))
    ended = [row for row in table if row[0] <= HORIZON]
    assert found.rows == len(table)
    assert found.base_rate == pytest.approx(len(ended) / len(table))
    squares = [(p - (remaining <= HORIZON)) ** 2 for remaining, p, _, _ in table]
    assert found.brier == pytest.approx(sum(squares) / len(table))
    if ended:
        off = [abs(mean - remaining) for remaining, _, mean, _ in ended]
        assert found.mae == pytest.approx(sum(off) / len(ended))
    else:
        assert isnan(found.mae)
    composite_off = [abs(steps - min(remaining, HORIZON)) for remaining, _, _, steps in table]
    assert found.composite_mae == pytest.approx(sum(composite_off) / len(table))
    if 0 < len(ended) < len(table):
        pairs = [
            float(mine[1] > other[1]) + float(mine[1] == other[1]) / 2
            for mine in ended
            for other in table
            if other[0] > HORIZON
        ]
        assert found.auc == pytest.approx(sum(pairs) / len(pairs))
    else:
        assert isnan(found.auc)


def drawn(seed: int, count: int = 300) -> list[PastRequest]:
    """Return requests of two kinds, told apart by their prompts: short answers and long ones."""
    rng = random.Random(seed)
    past = []
    for number in range(count):
        short = rng.random() < 0.5
        output = rng.randint(5, 30) if short else rng.randint(60, 120)
        features = RequestFeatures(10 if short else 1_000)
        past.append(PastRequest(number * 0.2, number * 0.2 + output * 0.05, features, output))
    return past


def judged(past: list[PastRequest], *, learn: bool = True) -> dict[str, PredictorJudgement]:
    predictors: dict[str, Predictor] = {
        "none": NoPrediction(),
        "survival": Survival(request.output_tokens for request in drawn(0)),
        "misled": Survival([500] * 50),
    }
    replay = Replay(past, horizon_steps=40)
    return judge(replay, predictors, baseline="survival", learn=learn)


def test_a_better_predictor_has_gains_far_above_their_error() -> None:
    found = judged(drawn(1), learn=False)
    assert list(found) == ["none", "survival", "misled"]
    for name in ("none", "misled"):
        for gain in found[name].gains.values():
            assert gain.value < -4 * gain.error < 0
    for gain in found["survival"].gains.values():
        assert (gain.value, gain.error) == (0.0, 0.0)


def test_a_gain_is_the_difference_of_the_scores() -> None:
    found = judged(drawn(1))
    baseline = found["survival"].scores
    for judgement in found.values():
        mine = judgement.scores
        assert tuple(judgement.gains) == GAINS
        assert judgement.gains["auc"].value == pytest.approx(mine.auc - baseline.auc)
        assert judgement.gains["brier"].value == pytest.approx(baseline.brier - mine.brier)
        assert judgement.gains["mae"].value == pytest.approx(baseline.mae - mine.mae)


def test_learning_on_the_way_mends_what_was_wrong() -> None:
    frozen, learning = judged(drawn(1), learn=False), judged(drawn(1))
    assert learning["misled"].scores.brier < frozen["misled"].scores.brier - 0.05


def test_the_error_is_that_of_other_draws() -> None:
    values, errors = [], []
    for seed in range(2, 26):
        gain = judged(drawn(seed), learn=False)["none"].gains["brier"]
        values.append(gain.value)
        errors.append(gain.error)
    assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.4)


def test_of_a_single_request_no_error_is_known() -> None:
    (gain, *_) = judged(drawn(1, count=1))["none"].gains.values()
    assert isnan(gain.error)


def test_progress_names_the_predictor() -> None:
    told: list[tuple[str, float]] = []
    predictors = {"one": NoPrediction(), "other": NoPrediction()}
    judge(
        Replay(drawn(1, count=5)),
        predictors,
        baseline="one",
        progress=lambda name, share: told.append((name, share)),
    )
    assert [name for name, share in told if share == 1.0] == ["one", "other"]

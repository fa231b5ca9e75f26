"""Predictors judged on requests of the past, side by side on the same questions.

Paper: §C.2.2, Table 3. A difference between two predictors is given with its standard error: rows of
one request depend on each other, and so do requests of one hour, so the error is that of blocks of
requests that follow each other in time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors import scores
from balanceroute.predictors.base import Predictor
from balanceroute.predictors.capped import Capped
from balanceroute.predictors.hinted import Hinted
from balanceroute.predictors.questions import Answers, Replay, Rows


@dataclass(frozen=True, slots=True)
class Scores:
    """How good a predictor's answers were. Paper: §C.2.2.

    Attributes:
        base_rate: Share of them whose request ended within the horizon.
        auc: ROC-AUC of `p_finish`.
        brier: Brier score of `p_finish`.
        ece: Expected calibration error of `p_finish`.
        mae: Of `mean_remaining`, in tokens, over the rows whose request ended within the horizon.
        composite_mae: Of the composite estimate against min(remaining, H), in tokens.
    """

    rows: int
    base_rate: float
    auc: float
    brier: float
    ece: float
    mae: float
    composite_mae: float


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better a score is than another predictor's on the same rows.

    Attributes:
        value: The difference; positive is better.
        error: Its standard error.
    """

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """One predictor beside another.

    Attributes:
        answers: What it said.
        scores: How good that was.
        gains: By how much it is better than the baseline, of the names in `GAINS`.
    """

    answers: Answers
    scores: Scores
    gains: dict[str, Gain]


def scores_of(rows: Rows, answers: Answers) -> Scores:
    """Return the scores of a predictor's answers."""
    return Scores(
        rows=len(rows.request),
        base_rate=scores.mean_where(rows.finishes.astype(np.float64)),
        auc=scores.roc_auc(answers.p_finish, rows.finishes),
        brier=scores.brier(answers.p_finish, rows.finishes),
        ece=scores.expected_calibration_error(scores.reliability(answers.p_finish, rows.finishes)),
        mae=scores.mean_where(stage_two_errors(rows, answers), rows.finishes),
        composite_mae=scores.mean_where(composite_errors(rows, answers)),
    )


def stage_two_errors(rows: Rows, answers: Answers) -> NDArray[np.float64]:
    """Return float64[n], how far each `mean_remaining` was off."""
    return np.abs(answers.mean_remaining - rows.remaining)


def composite_errors(rows: Rows, answers: Answers) -> NDArray[np.float64]:
    """Return float64[n], how far each composite estimate was off within the horizon."""
    truth = np.minimum(rows.remaining, rows.horizon_steps)
    return np.abs(answers.composite - truth).astype(np.float64)


_Better = Callable[[Rows, Answers, Answers, NDArray[np.bool_]], float]


def _better_auc(rows: Rows, one: Answers, other: Answers, mask: NDArray[np.bool_]) -> float:
    finishes = rows.finishes[mask]
    auc, others = (scores.roc_auc(it.p_finish[mask], finishes) for it in (one, other))
    return auc - others


def _better_brier(rows: Rows, one: Answers, other: Answers, mask: NDArray[np.bool_]) -> float:
    squares = ((it.p_finish - rows.finishes) ** 2 for it in (other, one))
    return scores.mean_where(next(squares) - next(squares), mask)


def _better_mae(rows: Rows, one: Answers, other: Answers, mask: NDArray[np.bool_]) -> float:
    saved = stage_two_errors(rows, other) - stage_two_errors(rows, one)
    return scores.mean_where(saved, mask & rows.finishes)


_GAINS: dict[str, _Better] = {"auc": _better_auc, "brier": _better_brier, "mae": _better_mae}

GAINS = tuple(_GAINS)
"""The scores whose differences between predictors are given with an error."""


def gains(rows: Rows, one: Answers, other: Answers, block: NDArray[np.int64]) -> dict[str, Gain]:
    """Return by how much one predictor is better than another, for each of `GAINS`.

    Args:
        rows: What both were asked.
        one: The answers of the one.
        other: The answers of the other.
        block: int64[n], see `Replay.blocks`; the error is that of blocks that come by chance.
    """
    everything = np.ones(len(rows.request), np.bool_)
    found: dict[str, Gain] = {}
    for name, better in _GAINS.items():
        statistic = partial(better, rows, one, other)
        found[name] = Gain(statistic(everything), scores.jackknife_error(statistic, block))
    return found


def judge(
    replay: Replay,
    predictors: Mapping[str, Predictor],
    *,
    baseline: str,
    learn: bool = True,
    progress: Callable[[str, float], None] = lambda _name, _share: None,
) -> dict[str, Judgement]:
    """Ask several predictors the same and compare them, each corrected as in a proxy.

    Args:
        replay: The questions.
        predictors: By name.
        baseline: The name of the one that the others are compared with.
        learn: See `Replay.ask`.
        progress: Called with the predictor and the share of its rows that is done.

    Returns:
        A judgement for each, in their order; the baseline's gains are 0.
    """
    answers: dict[str, Answers] = {}
    for name, predictor in predictors.items():
        corrected = Capped(Hinted(predictor))
        answers[name] = replay.ask(corrected, learn=learn, progress=partial(progress, name))
    block = replay.blocks()
    return {
        name: Judgement(
            answer,
            scores_of(replay.rows, answer),
            gains(replay.rows, answer, answers[baseline], block),
        )
        for name, answer in answers.items()
    }

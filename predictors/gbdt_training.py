"""Training of the learned predictor. Paper: §C.2.2.

Training replays the past in order of time. It asks about each request at age 0 and then every Δ tokens of
its output, as a proxy would, with the features of that moment; each question is one row. Stage 1 learns
from all rows, stage 2 from those whose request ended within the horizon.

The latest part of the past decides how many trees there are; then the trees are grown anew from all
of it. The first part only feeds the features, which know too little by then. The chances are not
calibrated afterwards: on the public traces isotonic regression on the later part leaves the Brier
score as it is at best, and where that part is small raises it by 3 %.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import PastRequest
from balanceroute.predictors.gbdt import Gbdt, raw_scores, require_lightgbm
from balanceroute.predictors.gbdt_features import (
    LOG_ODDS,
    MAX_HORIZON_STEPS,
    NAMES,
    REMAINING,
    Features,
)
from balanceroute.proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from lightgbm import Booster, Dataset
    from lightgbm.callback import CallbackEnv

LEAST_REQUESTS = 200
"""Fewer requests are refused."""

MAX_ROWS = 200_000
"""Training uses about as many rows; of more, a random share of the requests has questions."""

_WARM_SHARE, _LATER_SHARE = 0.1, 0.2
_MAX_TREES = 100
# Trees without a gain on the later part before it is called enough.
_PATIENCE = 20
_LEAST_ROWS_IN_LEAF, _LEAF_PARTS = 100, 20
_PARAMETERS = {
    "learning_rate": 0.08,
    "num_leaves": 31,
    "max_depth": 6,
    "lambda_l2": 20.0,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "verbose": -1,
}
# Questions that are turned into rows at a time; bounds the memory.
_BATCH = 4_096
# The order of events at the same time: an end is not known before its time.
_BEGIN, _ASK, _END = range(3)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """How the trees of a stage did on the later part, before they were grown anew from all of it."""

    rows: int  # Rows that they are grown from.
    trees: int  # Their number; 0 if none did better than the marginal alone.
    loss: float  # Mean loss on the later part: cross-entropy in stage 1, squared error in stage 2.
    marginal_loss: float  # That of the marginal alone.


@dataclass(frozen=True, slots=True)
class Training:
    predictor: Gbdt  # Has seen all of the past end.
    requests: int  # Requests of the past.
    requests_asked: int  # Of these, those that rows were made of.
    finish: Stage  # Stage 1.
    remaining: Stage  # Stage 2.


@dataclass(frozen=True, slots=True)
class Questions:
    """int64[n] each: the request of each question, by arrival, and its age."""

    request: NDArray[np.int64]
    age: NDArray[np.int64]


def train(
    past: Sequence[PastRequest],
    *,
    horizon_steps: int = 40,
    age_step: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Gbdt:
    """Return a predictor trained on the past; see `train_measured`."""
    return train_measured(
        past, horizon_steps=horizon_steps, age_step=age_step, seed=seed, progress=progress
    ).predictor


def train_measured(
    past: Sequence[PastRequest],
    *,
    horizon_steps: int = 40,
    age_step: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Training:
    """Return a predictor trained on the past, and how that went. The same past gives the same.

    Args:
        past: Requests that ended by themselves, in any order.
        horizon_steps: H, at least 1.
        age_step: Δ, tokens between two questions about a request, at least 1.

    Raises:
        ConfigError: A setting is out of range, there is too little to learn from, or LightGBM is
            not installed.
    """
    require_lightgbm()
    if not 1 <= horizon_steps <= MAX_HORIZON_STEPS:
        raise ConfigError(f"horizon_steps must be in 1..{MAX_HORIZON_STEPS}, not {horizon_steps}")
    if age_step < 1:
        raise ConfigError(f"age_step must be at least 1, not {age_step}")
    if len(past) < LEAST_REQUESTS:
        raise ConfigError(
            f"{len(past)} requests are too few to train on, {LEAST_REQUESTS} the least"
        )
    past = sorted(past, key=attrgetter("arrival_s"))
    progress = progress or (lambda _what, _share: None)
    outputs = np.fromiter((request.output_tokens for request in past), np.int64, len(past))
    assert (outputs >= 1).all(), "a request without output"
    questions = questions_about(outputs, age_step, np.random.default_rng(seed))
    remaining = outputs[questions.request] - questions.age
    finishes = remaining <= horizon_steps
    later = questions.request >= round((1.0 - _LATER_SHARE) * len(past))
    _check_parts(finishes, later, horizon_steps)
    features, rows = walk(past, questions, horizon_steps, progress)
    finish, finish_stage = _fit(
        rows,
        finishes.astype(np.float64),
        later,
        start=LOG_ODDS,
        objective="binary",
        seed=seed,
        progress=partial(progress, "stage 1"),
    )
    mean, mean_stage = _fit(
        rows[finishes],
        remaining[finishes].astype(np.float64),
        later[finishes],
        start=REMAINING,
        objective="regression",
        seed=seed,
        progress=partial(progress, "stage 2"),
    )
    asked = len(np.unique(questions.request))
    return Training(Gbdt(features, finish, mean), len(past), asked, finish_stage, mean_stage)


def _check_parts(finishes: NDArray[np.bool_], later: NDArray[np.bool_], horizon_steps: int) -> None:
    """Raise a ConfigError unless both parts have rows of both kinds."""
    for name, part in (("earlier", finishes[~later]), ("later", finishes[later])):
        if not part.any():
            raise ConfigError(
                f"nothing to learn from: in the {name} part of the past nothing ended within "
                f"{horizon_steps} tokens of a question"
            )
        if part.all():
            raise ConfigError(
                f"nothing to learn from: in the {name} part of the past every output ended within "
                f"{horizon_steps} tokens of every question"
            )


def questions_about(
    outputs: NDArray[np.int64], age_step: int, rng: np.random.Generator
) -> Questions:
    """Return the questions about requests of these lengths, the warm-up's left out.

    After age 0 each request's ages start at an offset of its own: a proxy does not ask at multiples
    of Δ alone.
    """
    first = rng.integers(1, age_step, size=len(outputs), endpoint=True)
    counts = 1 + np.maximum(-(-(outputs - first) // age_step), 0)
    asked = np.arange(round(_WARM_SHARE * len(outputs)), len(outputs))
    share = MAX_ROWS / counts[asked].sum()
    if share < 1.0:
        asked = asked[rng.random(len(asked)) < share]
    counts = counts[asked]
    request = np.repeat(asked, counts)
    nth = np.arange(len(request)) - np.repeat(counts.cumsum() - counts, counts)
    age = np.where(nth == 0, 0, first[request] + (nth - 1) * age_step)
    return Questions(request, age)


def walk(
    past: Sequence[PastRequest], questions: Questions, horizon_steps: int, progress: Progress
) -> tuple[Features, NDArray[np.float64]]:
    """Return the features after all of the past, and those of each question at its time.

    A request is taken to emit its tokens evenly from its arrival to its end.
    """
    count, asked = len(past), len(questions.age)
    arrival = np.fromiter((request.arrival_s for request in past), np.float64, count)
    finished = np.fromiter((request.finished_s for request in past), np.float64, count)
    outputs = np.fromiter((request.output_tokens for request in past), np.int64, count)
    assert (finished >= arrival).all(), "a request ended before it came"
    pace = ((finished - arrival) / outputs)[questions.request]
    time = np.minimum(
        arrival[questions.request] + questions.age * pace, finished[questions.request]
    )
    kinds = np.repeat([_BEGIN, _ASK, _END], [count, asked, count])
    order = np.lexsort((kinds, np.concatenate([arrival, time, finished])))
    places = np.concatenate([np.arange(count), np.arange(asked), np.arange(count)])

    features = Features(horizon_steps)
    has_questions = np.zeros(count, np.bool_)
    has_questions[questions.request] = True
    # Of the requests that are asked about and run; of the questions that wait for an answer.
    running: dict[int, NDArray[np.float64]] = {}
    waiting: list[int] = []
    snapshots: list[NDArray[np.float64]] = []
    rows = np.empty((asked, len(NAMES)))

    def answer() -> None:
        if waiting:
            rows[waiting] = features.matrix(np.stack(snapshots), questions.age[waiting])
            waiting.clear()
            snapshots.clear()

    steps = zip(kinds[order].tolist(), places[order].tolist(), strict=True)
    for step, (kind, place) in enumerate(steps):
        if step % _BATCH == 0:
            progress("features", step / len(order))
        if kind == _ASK:
            waiting.append(place)
            snapshots.append(running[int(questions.request[place])])
            if len(waiting) == _BATCH:
                answer()
            continue
        request = past[place]
        if kind == _BEGIN:
            if has_questions[place]:
                running[place] = np.array(features.snapshot(request.features))
            continue
        # Between changes of the marginal it does not matter when questions are answered.
        if features.marginal.about_to_change:
            answer()
        running.pop(place, None)
        features.observe(request.features, request.output_tokens)
    answer()
    progress("features", 1.0)
    return features, rows


def _fit(
    rows: NDArray[np.float64],
    truth: NDArray[np.float64],
    later: NDArray[np.bool_],
    *,
    start: int,
    objective: str,
    seed: int,
    progress: Callable[[float], None],
) -> tuple["Booster", Stage]:
    """Return trees that correct a column towards the truth, and how they did.

    Args:
        rows: float64[n, features].
        later: bool[n], the rows that decide on the number of trees: some, and not all.
        start: The column that is corrected.
        objective: "binary" for cross-entropy, "regression" for squared error.
    """
    lightgbm = require_lightgbm()
    earlier = ~later
    leaf_rows = max(1, min(_LEAST_ROWS_IN_LEAF, len(rows) // _LEAF_PARTS))
    varying = {"objective": objective, "seed": seed, "min_data_in_leaf": leaf_rows}
    parameters: dict[str, object] = _PARAMETERS | varying

    def dataset(part: NDArray[np.bool_], reference: "Dataset | None" = None) -> "Dataset":
        made: Dataset = lightgbm.Dataset(
            rows[part],
            truth[part],
            reference=reference,
            init_score=rows[part, start],
            feature_name=list(NAMES),
            params=parameters,
        )
        return made

    def report(env: "CallbackEnv") -> None:
        # Twice as many trees at most: first to find their number, then to grow them.
        grown = env.iteration + 1 + (0 if env.evaluation_result_list else _MAX_TREES)
        progress(grown / (2 * _MAX_TREES))

    fitted = dataset(earlier)
    trial: Booster = lightgbm.train(
        parameters,
        fitted,
        _MAX_TREES,
        valid_sets=[dataset(later, fitted)],
        callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False), report],
    )
    stage = _judged(trial, objective, rows[later], truth[later], start=start, trained_on=len(rows))
    if stage.loss >= stage.marginal_loss:
        # One leaf for all rows, which is worth nothing: the marginal stays as it is.
        stage = replace(stage, trees=0, loss=stage.marginal_loss)
        parameters["min_data_in_leaf"] = len(rows)
    everything = dataset(np.ones(len(rows), np.bool_))
    grown: Booster = lightgbm.train(parameters, everything, max(1, stage.trees), callbacks=[report])
    progress(1.0)
    return grown, stage


def _judged(
    trial: "Booster",
    objective: str,
    rows: NDArray[np.float64],
    truth: NDArray[np.float64],
    *,
    start: int,
    trained_on: int,
) -> Stage:
    """Return how trees did on rows that they had not seen."""
    scores = rows[:, start]
    raw = raw_scores(trial, rows)  # Of as many trees as did best.
    return Stage(
        rows=trained_on,
        trees=trial.best_iteration,
        loss=_loss(objective, scores + raw, truth),
        marginal_loss=_loss(objective, scores, truth),
    )


def _loss(objective: str, scores: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    if objective == "binary":
        return float(np.mean(np.logaddexp(0.0, scores) - truth * scores))
    return float(np.mean((scores - truth) ** 2))

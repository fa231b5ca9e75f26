"""Predictors judged on requests of the past, side by side on the same questions.

Paper: §C.2.2, Table 3. A difference between two predictors is given with its standard error: rows of
one request depend on each other, and so do requests of one hour, so the error is that of blocks of
requests that follow each other in time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import Capped, PastRequest, Predictor, check_survival
from balanceroute.predictors.measures import (
    brier,
    expected_calibration_error,
    mean_where,
    reliability,
    roc_auc,
)
from balanceroute.predictors.survival import Hinted
from balanceroute.proxy.core.errors import ConfigError, PredictorError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.prediction import composite_steps, two_stage_estimate


def jackknife_error(
    statistic: Callable[[NDArray[np.bool_]], float], block: NDArray[np.int64]
) -> float:
    """Return the standard error of a statistic of all rows, by leaving out one block at a time.

    Rows of one block may depend on each other, as those of one request do and of requests of one
    hour. It is the error of the mean over blocks if the statistic is a mean and the blocks are
    equal, and holds for other statistics that are smooth in the shares of the rows, as the AUC.

    Args:
        statistic: Of the rows that a mask selects.
        block: int64[n], the block of each row.

    Returns:
        The error; NaN with fewer than two blocks, or where the statistic is undefined without one.
    """
    blocks = np.unique(block)
    if len(blocks) < 2:
        return nan
    without = np.array([statistic(block != one) for one in blocks])
    spread = ((without - without.mean()) ** 2).sum()
    return float(np.sqrt(spread * (len(blocks) - 1) / len(blocks)))


# The past as questions: those to a predictor, and their times.
#
# The evaluation reports to the predictor when a request begins and ends, and asks about it each time it
# has emitted `age_step` more tokens, as a proxy would do. Each question is one row: did the request end
# within the horizon, and after how many steps? The rows do not depend on the predictor, so two predictors
# can be compared row by row.
#
# Time is cut into slices, with one batch of questions each, as a proxy asks once for a decode step. In a
# slice first come the requests that begin, then the questions, then the ends: the predictor learns of no
# end before a question of an earlier time.

# Above the numbers of any requests that a predictor may have met before.
_FIRST_REQUEST = 1 << 48
# The contents of a slice, in this order.
_BEGIN, _ASK, _END = range(3)


@dataclass(frozen=True, slots=True)
class Cut:
    """Requests before and after a moment."""

    at_s: float  # The moment.
    before: list[PastRequest]  # Ended by then; a predictor may know them.
    after: list[PastRequest]  # The rest, by arrival; some already ran.


def cut_in_time(past: Sequence[PastRequest], share: float) -> Cut:
    """Cut requests at the moment by which a share of them has arrived.

    Raises:
        ConfigError: Nothing is left on one side.
    """
    ordered = sorted(past, key=attrgetter("arrival_s"))
    place = round(share * len(ordered))
    if not 0 < place < len(ordered):
        raise ConfigError(f"{len(ordered)} requests cannot be cut at {share:.4g} of them")
    at_s = ordered[place].arrival_s
    before = [request for request in ordered if request.finished_s <= at_s]
    if not before:
        raise ConfigError(f"none of {len(ordered)} requests had ended when {place} had arrived")
    return Cut(at_s, before, [request for request in ordered if request.finished_s > at_s])


@dataclass(frozen=True, slots=True)
class Rows:
    """The questions, in the order in which they are asked, and their truth."""

    horizon_steps: int  # H.
    request: NDArray[np.int64]  # int64[n], which of the requests it is about, by arrival.
    age: NDArray[np.int64]  # int64[n], tokens that it has emitted.
    remaining: NDArray[np.int64]  # int64[n], tokens that it will still emit, at least 1.
    finishes: NDArray[np.bool_]  # bool[n], whether that is within H.


@dataclass(frozen=True, slots=True)
class Answers:
    """A predictor's answers to each row; see `two_stage_estimate` and `composite_steps`."""

    # float64[n], the chance that the request ends within the horizon.
    p_finish: NDArray[np.float64]
    # float64[n], the mean remaining steps if it does.
    mean_remaining: NDArray[np.float64]
    composite: NDArray[np.int64]  # int64[n], the gated composite estimate; H means that it stays.


class Replay:
    """Requests of the past, made into questions once for all the predictors that are to answer.

    Args:
        horizon_steps: H, at least 1.
        age_step: Tokens between two questions about a request, at least 1; the first is at age 0.
        slice_s: Length of a slice of time, in seconds; above 0.
        from_s: Questions before this time are not asked.

    Raises:
        ConfigError: There is nothing to ask.
    """

    def __init__(
        self,
        past: Sequence[PastRequest],
        *,
        horizon_steps: int = 40,
        age_step: int = 20,
        slice_s: float = 0.05,
        from_s: float = -inf,
    ) -> None:
        assert horizon_steps >= 1
        assert age_step >= 1
        assert slice_s > 0
        self.past = sorted(past, key=attrgetter("arrival_s"))
        count = len(self.past)
        arrival: NDArray[np.float64] = np.fromiter(
            (request.arrival_s for request in self.past), np.float64, count
        )
        finished = np.fromiter((request.finished_s for request in self.past), np.float64, count)
        outputs = np.fromiter((request.output_tokens for request in self.past), np.int64, count)
        assert (finished >= arrival).all(), "a request ended before it came"
        assert (outputs >= 1).all(), "a request without output"
        questions = -(-outputs // age_step)
        request = np.repeat(np.arange(count), questions)
        age = age_step * (
            np.arange(len(request)) - np.repeat(questions.cumsum() - questions, questions)
        )
        time = arrival[request] + age * ((finished - arrival) / outputs)[request]
        # Rounding must not put a question behind the end of its request.
        time = np.minimum(time, finished[request])
        asked = time >= from_s
        if not asked.any():
            raise ConfigError("there are no requests to judge a predictor on")
        request, age, time = request[asked], age[asked], time[asked]
        first = np.floor(time.min() / slice_s)

        def slice_of(times: NDArray[np.float64]) -> NDArray[np.int64]:
            slices: NDArray[np.int64] = (np.floor(times / slice_s) - first).astype(np.int64)
            return slices

        order = np.lexsort((request, time))
        request, age = request[order], age[order]
        remaining = outputs[request] - age
        self.rows = Rows(horizon_steps, request, age, remaining, remaining <= horizon_steps)
        numbers = np.arange(count)
        self._order = _Order(
            slices=np.concatenate([slice_of(arrival), slice_of(time[order]), slice_of(finished)]),
            kinds=np.repeat([_BEGIN, _ASK, _END], [count, len(request), count]),
            times=np.concatenate([arrival, time[order], finished]),
            places=np.concatenate([numbers, np.arange(len(request)), numbers]),
        )

    def ask(
        self,
        predictor: Predictor,
        *,
        learn: bool = True,
        progress: Callable[[float], None] = lambda _share: None,
    ) -> Answers:
        """Replay the requests to a predictor, as trained as it is, and return its answers.

        Args:
            predictor: Changed by it.
            learn: Whether it learns the lengths of requests that have ended.
            progress: Called with the share of the rows that is done, now and then.
        """
        rows = self.rows
        total, done = len(rows.request), 0
        answers = Answers(np.empty(total), np.empty(total), np.empty(total, np.int64))
        for kind, places in self._order.groups():
            if kind == _ASK:
                done += len(places)
                self._ask_batch(predictor, slice(done - len(places), done), answers)
                progress(done / total)
                continue
            for place in places.tolist():
                request, known = RequestId(_FIRST_REQUEST + place), self.past[place]
                if kind == _BEGIN:
                    predictor.begin(request, known.features)
                elif learn:
                    predictor.observe(request, known.output_tokens)
                else:
                    predictor.forget(request)
        return answers

    def _ask_batch(self, predictor: Predictor, batch: slice, answers: Answers) -> None:
        """Ask some rows that follow each other, and fill in the answers."""
        rows, steps = self.rows, self.rows.horizon_steps
        requests = [RequestId(_FIRST_REQUEST + one) for one in rows.request[batch].tolist()]
        survival = predictor.survival(requests, rows.age[batch].copy(), steps)
        check_survival(survival, len(requests), steps)
        if (survival[:, 0] != 1.0).any() or (np.diff(survival, axis=1) > 0.0).any():
            raise PredictorError("survival does not begin at 1, or it rises")
        answers.p_finish[batch], answers.mean_remaining[batch] = two_stage_estimate(survival, steps)
        answers.composite[batch] = composite_steps(survival, steps)

    def blocks(self, count: int = 20) -> NDArray[np.int64]:
        """Return int64[n], each row's block: requests that follow each other, about equally many.

        Fewer than `count` if there are not two requests for each.
        """
        first, last = int(self.rows.request.min()), int(self.rows.request.max())
        requests = last - first + 1
        count = max(1, min(count, requests // 2))
        block: NDArray[np.int64] = (self.rows.request - first) * count // requests
        return block


@dataclass(frozen=True, slots=True)
class _Order:
    """The slice and the time of each event: int64[events], float64[events]."""

    slices: NDArray[np.int64]
    kinds: NDArray[np.int64]
    times: NDArray[np.float64]
    places: NDArray[np.int64]

    def groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the events of one kind in one slice, in order of time."""
        order = np.lexsort((self.places, self.times, self.kinds, self.slices))
        kinds, slices = self.kinds[order], self.slices[order]
        starts = np.flatnonzero(np.diff(3 * slices + kinds, prepend=-1))
        for places, kind in zip(
            np.split(self.places[order], starts[1:]), kinds[starts].tolist(), strict=True
        ):
            yield kind, places


@dataclass(frozen=True, slots=True)
class Scores:
    """How good a predictor's answers were. Paper: §C.2.2."""

    rows: int
    base_rate: float  # Share of them whose request ended within the horizon.
    auc: float  # ROC-AUC of `p_finish`.
    brier: float  # Brier score of `p_finish`.
    ece: float  # Expected calibration error of `p_finish`.
    # Of `mean_remaining`, in tokens, over the rows whose request ended within the horizon.
    mae: float
    composite_mae: float  # Of the composite estimate against min(remaining, H), in tokens.


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better a score is than another predictor's on the same rows."""

    value: float  # The difference; positive is better.
    error: float  # Its standard error.


@dataclass(frozen=True, slots=True)
class PredictorJudgement:
    answers: Answers
    scores: Scores  # How good that was.
    gains: dict[str, Gain]  # By how much it is better than the baseline, of the names in `GAINS`.


def scores_of(rows: Rows, answers: Answers) -> Scores:
    return Scores(
        rows=len(rows.request),
        base_rate=mean_where(rows.finishes.astype(np.float64)),
        auc=roc_auc(answers.p_finish, rows.finishes),
        brier=brier(answers.p_finish, rows.finishes),
        ece=expected_calibration_error(reliability(answers.p_finish, rows.finishes)),
        mae=mean_where(stage_two_errors(rows, answers), rows.finishes),
        composite_mae=mean_where(composite_errors(rows, answers)),
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
    auc, other_auc = (roc_auc(it.p_finish[mask], finishes) for it in (one, other))
    return auc - other_auc


def _better_brier(rows: Rows, one: Answers, other: Answers, mask: NDArray[np.bool_]) -> float:
    squares = ((it.p_finish - rows.finishes) ** 2 for it in (other, one))
    return mean_where(next(squares) - next(squares), mask)


def _better_mae(rows: Rows, one: Answers, other: Answers, mask: NDArray[np.bool_]) -> float:
    saved = stage_two_errors(rows, other) - stage_two_errors(rows, one)
    return mean_where(saved, mask & rows.finishes)


_GAINS: dict[str, _Better] = {"auc": _better_auc, "brier": _better_brier, "mae": _better_mae}

GAINS = tuple(_GAINS)
"""The scores whose differences between predictors are given with an error."""


def gains(rows: Rows, one: Answers, other: Answers, block: NDArray[np.int64]) -> dict[str, Gain]:
    """Return by how much one predictor is better than another, for each of `GAINS`.

    Args:
        block: int64[n], see `Replay.blocks`; the error is that of blocks that come by chance.
    """
    everything = np.ones(len(rows.request), np.bool_)
    found: dict[str, Gain] = {}
    for name, better in _GAINS.items():
        statistic = partial(better, rows, one, other)
        found[name] = Gain(statistic(everything), jackknife_error(statistic, block))
    return found


def judge(
    replay: Replay,
    predictors: Mapping[str, Predictor],
    *,
    baseline: str,
    learn: bool = True,
    progress: Callable[[str, float], None] = lambda _name, _share: None,
) -> dict[str, PredictorJudgement]:
    """Ask several predictors the same and compare them, each corrected as in a proxy.

    Args:
        baseline: The name of the predictor that the rest is compared with.

    Returns:
        A judgement for each, in their order; the baseline's gains are 0.
    """
    answers: dict[str, Answers] = {}
    for name, predictor in predictors.items():
        corrected = Capped(Hinted(predictor))
        answers[name] = replay.ask(corrected, learn=learn, progress=partial(progress, name))
    block = replay.blocks()
    return {
        name: PredictorJudgement(
            answer,
            scores_of(replay.rows, answer),
            gains(replay.rows, answer, answers[baseline], block),
        )
        for name, answer in answers.items()
    }

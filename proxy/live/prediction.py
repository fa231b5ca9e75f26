"""The predictors in use."""

import logging
import os
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors import NoPrediction, Predictor, RequestFeatures, measures
from balanceroute.predictors.base import Capped, check_survival, outside_predictor
from balanceroute.predictors.kinds import KINDS
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, Savable
from balanceroute.predictors.survival import Hint, Hinted
from balanceroute.proxy.core.config import outside_name
from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.prediction import two_stage_estimate
from balanceroute.proxy.live.telemetry.snapshot import PredictorScores
from balanceroute.topologies import did_you_mean

if TYPE_CHECKING:  # The command line completes its words without prometheus_client.
    from balanceroute.proxy.live.telemetry.component_metrics import PredictorMetrics

# The predictor in use and its shadows: one is asked, all learn, all are judged.
#
# A shadow is another predictor that sees the same traffic and decides nothing. The judge asks all
# of them about a few active requests now and then, never on behalf of a decision or a chunk. A
# shadow that raises an exception, or answers no probability, is not asked any more: it must not
# hurt a request. Nor must the one in use: where it fails, the answer is that no request ends
# soon, and it is asked again the next time.

_log = logging.getLogger(__name__)
# Most requests that one call of `score` asks about, and most that it looks at.
_ROWS = 25
_VISITS = 100


def ticket_features(ticket: Ticket, prompt_tokens: int) -> RequestFeatures:
    """Return what predictors get of a request whose prompt is so long."""
    return RequestFeatures(prompt_tokens, ticket.max_tokens, ticket.keys, ticket.expected_tokens)


@dataclass(slots=True)
class NamedPredictor:
    """One predictor."""

    name: str
    predictor: Predictor
    uses_keys: bool  # Whether it learns by the keys of requests.
    failed: bool = False  # Whether it raised an exception; of the one in use, at its last question.
    # Returns what corrects it for a request; see `Hinted`.
    hint_of: Callable[[RequestId], Hint | None] = lambda _: None


class PredictorSet:
    """One predictor for the core to ask, see `Predictor`, and its shadows."""

    def __init__(
        self,
        active: NamedPredictor,
        shadows: Sequence[NamedPredictor] = (),
        *,
        horizon_steps: int,
        metrics: "PredictorMetrics",
        on_failure: Callable[[str, Exception], None],
        stopwatch: Callable[[], float],
    ) -> None:
        # Whether any of them learns by the keys of requests.
        self.uses_keys = any(one.uses_keys for one in (active, *shadows))
        self.observed = 0  # Outputs learned from since the start.
        self.active = active
        self._shadows = tuple(shadows)
        self._metrics = metrics
        self._on_failure = on_failure
        self._stopwatch = stopwatch
        # Predictions and seconds of the questions since `report_refreshes`.
        self._refreshes: list[tuple[int, float]] = []
        self._board = Scoreboard(
            1 + len(shadows), horizon_steps=horizon_steps, observe_error=metrics.error
        )
        self._last_asked = -1
        self._scores: list[PredictorScores] = []
        self._scores_of = (-1, 0)  # Rows judged and shadows failed when `_scores` was made.

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        self._for_each(lambda predictor: predictor.begin(request, features))

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        begin_s = self._stopwatch()
        try:
            answer = self.active.predictor.survival(requests, ages, steps)
            check_survival(answer, len(requests), steps)
            self.active.failed = False
        except Exception as error:
            self._active_failed(error)
            answer = np.ones((len(requests), steps + 1))
        self._refreshes.append((len(requests), self._stopwatch() - begin_s))
        return answer

    def report_refreshes(self) -> None:
        """Report to the metrics what `survival` was asked since the last time, outside of the decision."""
        refreshes, self._refreshes = self._refreshes, []
        for count, seconds in refreshes:
            self._metrics.refreshed(count, seconds)

    def ended(self, request: RequestId, output_tokens: int, *, by_itself: bool) -> None:
        """Judge a request that is over, and let all predictors learn from it."""
        # An engine that reports more is not followed: it would cost memory.
        if by_itself and 0 < output_tokens <= MAX_OUTPUT_TOKENS:
            self._board.ended(request, output_tokens)
            self.observed += 1
            self._for_each(lambda predictor: predictor.observe(request, output_tokens))
        else:
            self._board.cut_off(request, output_tokens)
            self._for_each(lambda predictor: predictor.forget(request))

    def score(self, requests: Iterable[RequestId], age_of: Callable[[RequestId], int]) -> None:
        """Judge what has come true, and ask all predictors about some of the active requests."""
        self.report_refreshes()
        begin_s = self._stopwatch()
        # Another part of them each time, in turn.
        waiting = sorted(requests)
        first = bisect_right(waiting, self._last_asked)
        waiting = (waiting[first:] + waiting[:first])[:_VISITS]
        chosen: list[RequestId] = []
        ages: list[int] = []
        for request in waiting:
            self._last_asked = request
            age = age_of(request)
            if self._board.is_free(request, age):
                chosen.append(request)
                ages.append(age)
                if len(chosen) == _ROWS:
                    break
        if chosen:
            self._ask(chosen, np.array(ages, np.int64))
            self._metrics.scored(self._stopwatch() - begin_s)

    def _ask(self, requests: list[RequestId], ages: NDArray[np.int64]) -> None:
        said = []
        try:
            said.append(self._board.ask(self.active.predictor, requests, ages))
        except Exception as error:
            self._active_failed(error)
            said.append(np.full((2, len(requests)), np.nan))
        for shadow in self._shadows:
            answer = np.full((2, len(requests)), np.nan)
            if not shadow.failed:
                try:
                    answer = self._board.ask(shadow.predictor, requests, ages)
                except Exception:
                    self._give_up(shadow)
            said.append(answer)
        self._board.note(requests, ages, said)

    @property
    def judged(self) -> int:
        """Rows judged since the start."""
        return self._board.judged

    def scores(self) -> list[PredictorScores]:
        """Return how good each predictor was lately, the active one first."""
        now = (self._board.judged, sum(one.failed for one in (self.active, *self._shadows)))
        if now != self._scores_of:
            self._scores_of = now
            self._scores = [
                self._board.scores(
                    place, name=one.name, active=one is self.active, failed=one.failed
                )
                for place, one in enumerate((self.active, *self._shadows))
            ]
        return self._scores

    def _active_failed(self, error: Exception) -> None:
        self.active.failed = True
        self._on_failure("predictor", error)

    def _for_each(self, call: Callable[[Predictor], None]) -> None:
        try:
            call(self.active.predictor)
        except Exception as error:
            self._active_failed(error)
        for shadow in self._shadows:
            if not shadow.failed:
                try:
                    call(shadow.predictor)
                except Exception:
                    self._give_up(shadow)

    def _give_up(self, shadow: NamedPredictor) -> None:
        shadow.failed = True
        _log.exception("a shadow predictor failed", extra={"fields": {"predictor": shadow.name}})


# Predictors by name or from a file.

InThread = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function where it may wait for a disk, and waits for it."""

PREDICTORS: dict[str, Callable[[], Savable | NoPrediction]] = {
    "none": NoPrediction,
    **{name: kind.untrained for name, kind in KINDS.items() if kind.untrained is not None},
}
"""Those that need no file, by name."""


def make_predictor(word: str) -> Savable | NoPrediction | Predictor:
    """Return a new predictor.

    Args:
        word: A name in `PREDICTORS`, a file that `balanceroute train` made, or that of one from outside.

    Raises:
        ConfigError: The file cannot be used; the message reads on from a flag.
    """
    made = PREDICTORS.get(word)
    if made is not None:
        return made()
    if not os.path.lexists(word):
        # What stands in a file has got that file's folder before it.
        outside = outside_name("predictors", Path(word).name)
        if outside is not None:
            return _from_outside(outside)
        hint = did_you_mean(Path(word).name, PREDICTORS)
        raise ConfigError(f"is {shown(word)}, which is neither a predictor nor a file{hint}")
    from balanceroute.predictors import files  # noqa: PLC0415

    try:
        return files.load(word)
    except files.PredictorFileError as error:
        raise ConfigError(f"is {error}") from error
    except ConfigError as error:  # A library is not installed.
        raise ConfigError(f"is {word}: {error}") from error


def _from_outside(name: str) -> Predictor:
    try:
        return outside_predictor(name)
    except ConfigError as error:
        raise ConfigError(f"is not usable: {error}") from error


def predictor_name(word: str) -> str:
    """Return what metrics call the predictor that `make_predictor` makes of a word."""
    return word if word in PREDICTORS else Path(word).name


def named(word: str, predictor: Predictor) -> NamedPredictor:
    """Return a predictor under its name, corrected by clients' hints and limits."""
    hinted = Hinted(predictor)
    return NamedPredictor(
        predictor_name(word),
        Capped(hinted),
        uses_keys=getattr(predictor, "uses_keys", False),
        hint_of=hinted.hint_of,
    )


# How good predictions turn out on live traffic: of the predictor in use, and of its shadows.
#
# A row is one active request at one age, and what every predictor answers of it: the chance to
# finish within the horizon, and the mean remaining length if so. It is judged when the request
# has ended, or has outlived the horizon; scores are those of the latest rows. A request has at
# most one row that is not judged yet, so that the rows of a request do not overlap.

DECILES = 10


class Scoreboard:
    """Notes what predictors say and what comes true.

    Args:
        predictors: P, how many there are.
        horizon_steps: H, at least 1.
        observe_error: Called for each judged row with how far the first predictor's expectation was
            off, in tokens within the horizon.
    """

    def __init__(
        self,
        predictors: int,
        *,
        horizon_steps: int,
        observe_error: Callable[[float], None],
        window: int = 5_000,
    ) -> None:
        self.judged = 0  # Rows judged since the start.
        self._horizon_steps = horizon_steps
        self._observe_error = observe_error
        self._window = window
        # The row of a request that is not judged yet: its age, and float64[2, P].
        self._open: dict[RequestId, tuple[int, NDArray[np.float64]]] = {}
        # The latest rows, in a ring. What remains is cut off at H + 1: more is not known of all.
        self._answers = np.zeros((2, predictors, window))
        self._remaining = np.zeros(window, np.int64)

    def __len__(self) -> int:
        """Return the number of rows that are not judged yet."""
        return len(self._open)

    def is_free(self, request: RequestId, age: int) -> bool:
        """Return whether an active request has no row, after judging one that it has outlived."""
        row = self._open.get(request)
        # A request of that very age may have emitted its last token.
        if row is not None and age > row[0] + self._horizon_steps:
            self.cut_off(request, age)
            return True
        return row is None

    def ask(
        self, predictor: Predictor, requests: Sequence[RequestId], ages: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return what a predictor says of n requests, float64[2, n].

        Raises:
            PredictorError: It is no answer.
        """
        survival = predictor.survival(requests, ages, self._horizon_steps)
        check_survival(survival, len(requests), self._horizon_steps)
        return np.array(two_stage_estimate(survival, self._horizon_steps))

    def note(
        self,
        requests: Sequence[RequestId],
        ages: NDArray[np.int64],
        answers: Sequence[NDArray[np.float64]],
    ) -> None:
        """Open a row for each of n free requests; `answers` has float64[2, n] of each predictor."""
        rows = np.stack(answers, axis=1)
        for place, (request, age) in enumerate(zip(requests, ages.tolist(), strict=True)):
            self._open[request] = (age, rows[:, :, place].copy())

    def ended(self, request: RequestId, output_tokens: int) -> None:
        """Judge the row of a request that ended by itself, if it has one."""
        row = self._open.pop(request, None)
        # An age that was only inferred may lie beyond the end.
        if row is not None and output_tokens > row[0]:
            self._judge(row[1], output_tokens - row[0])

    def cut_off(self, request: RequestId, emitted_tokens: int) -> None:
        """Judge the row of a request of which no more is known than that it got so far.

        A row whose horizon it has not outlived is dropped.
        """
        row = self._open.pop(request, None)
        if row is not None and emitted_tokens > row[0] + self._horizon_steps:
            self._judge(row[1], self._horizon_steps + 1)

    def scores(self, place: int, *, name: str, active: bool, failed: bool) -> PredictorScores:
        """Return the scores of one predictor. O(window log window)."""
        rows = 0 if failed else min(self.judged, self._window)
        finish, mean = self._answers[:, place, :rows]
        remaining = self._remaining[:rows]
        happened = remaining <= self._horizon_steps
        diagram = measures.reliability(finish, happened, bins=DECILES)
        return PredictorScores(
            name=name,
            active=active,
            failed=failed,
            rows=rows,
            auc=_defined(measures.roc_auc(finish, happened)),
            brier=_defined(measures.brier(finish, happened)),
            ece=_defined(measures.expected_calibration_error(diagram)),
            mae=_defined(measures.mean_where(np.abs(mean - remaining), happened)),
            predicted=tuple(map(_defined, diagram.predicted.tolist())),
            observed=tuple(map(_defined, diagram.observed.tolist())),
            decile_rows=tuple(diagram.rows.tolist()),
        )

    def _judge(self, answers: NDArray[np.float64], remaining: int) -> None:
        place = self.judged % self._window
        self.judged += 1
        self._answers[:, :, place] = answers
        self._remaining[place] = min(remaining, self._horizon_steps + 1)
        finish, mean = answers[:, 0].tolist()
        expected = finish * mean + (1.0 - finish) * self._horizon_steps
        self._observe_error(abs(expected - min(remaining, self._horizon_steps)))


def _defined(score: float) -> float | None:
    return None if isnan(score) else score

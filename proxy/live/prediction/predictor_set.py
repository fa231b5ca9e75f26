"""The predictor in use and its shadows: one is asked, all learn, all are judged.

A shadow is another predictor that sees the same traffic and decides nothing. The judge asks all of
them about a few active requests now and then, never on behalf of a decision or a chunk. A shadow
that raises an exception, or answers what is no probability, is left alone from then on: it must not
hurt a request. Nor must the one in use: where it fails, the answer is
that no request ends soon, and it is asked again the next time.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.predictors import RequestFeatures
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS
from balanceroute.proxy.core.prediction import check_survival
from balanceroute.proxy.live.telemetry.snapshot import PredictorScores, Scoreboard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from balanceroute.predictors import Predictor
    from balanceroute.predictors.hinted import Hint
    from balanceroute.proxy.core.events import RequestId, Ticket
    from balanceroute.proxy.live.telemetry.component_metrics import PredictorMetrics

_log = logging.getLogger(__name__)
# Most requests that one call of `score` asks about, and most that it looks at.
_ROWS = 25
_VISITS = 100


def ticket_features(ticket: "Ticket", prompt_tokens: int) -> RequestFeatures:
    """Return what predictors are told of a request whose prompt is so long."""
    return RequestFeatures(prompt_tokens, ticket.max_tokens, ticket.keys, ticket.expected_tokens)


@dataclass(slots=True)
class NamedPredictor:
    """One predictor.

    Attributes:
        uses_keys: Whether it learns by the keys of requests.
        failed: Whether it raised an exception; of the one in use, at its last question.
        hint_of: Returns what corrects it for a request; see `Hinted`.
    """

    name: str
    predictor: "Predictor"
    uses_keys: bool
    failed: bool = False
    hint_of: "Callable[[RequestId], Hint | None]" = lambda _: None


class PredictorSet:
    """One predictor for the core to ask, see `Predictor`, and its shadows.

    Attributes:
        uses_keys: Whether any of them learns by the keys of requests.
        observed: Outputs learned from since the start.
    """

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
        self.uses_keys = any(one.uses_keys for one in (active, *shadows))
        self.observed = 0
        self.active = active
        self._shadows = tuple(shadows)
        self._metrics = metrics
        self._on_failure = on_failure
        self._stopwatch = stopwatch
        self._board = Scoreboard(
            1 + len(shadows), horizon_steps=horizon_steps, observe_error=metrics.error
        )
        self._last_asked = -1
        self._scores: list[PredictorScores] = []
        self._scores_of = (-1, 0)  # Rows judged and shadows failed when `_scores` was made.

    def begin(self, request: "RequestId", features: "RequestFeatures") -> None:
        """Tell all predictors what is known of a request."""
        self._tell(lambda predictor: predictor.begin(request, features))

    def hint_of(self, request: "RequestId") -> "Hint | None":
        """Return what corrects the active predictor for a request that has begun."""
        return self.active.hint_of(request)

    def survival(
        self, requests: "Sequence[RequestId]", ages: "NDArray[np.int64]", steps: int
    ) -> "NDArray[np.float64]":
        """Return the active predictor's answer."""
        begin_s = self._stopwatch()
        try:
            answer = self.active.predictor.survival(requests, ages, steps)
            check_survival(answer, len(requests), steps)
            self.active.failed = False
        except Exception as error:
            self._active_failed(error)
            answer = np.ones((len(requests), steps + 1))
        self._metrics.refreshed(len(requests), self._stopwatch() - begin_s)
        return answer

    def ended(self, request: "RequestId", output_tokens: int, *, by_itself: bool) -> None:
        """Judge a request that is over, and let all predictors learn from it.

        Args:
            request: The request's number.
            output_tokens: What each of its sequences emitted.
            by_itself: Whether it was not cut short.
        """
        # An engine that reports more is not followed: it would cost memory.
        if by_itself and 0 < output_tokens <= MAX_OUTPUT_TOKENS:
            self._board.ended(request, output_tokens)
            self.observed += 1
            self._tell(lambda predictor: predictor.observe(request, output_tokens))
        else:
            self._board.cut_off(request, output_tokens)
            self._tell(lambda predictor: predictor.forget(request))

    def score(self, requests: "Iterable[RequestId]", age_of: "Callable[[RequestId], int]") -> None:
        """Judge what has come true, and ask all predictors about some of the active requests.

        Args:
            requests: All that decode.
            age_of: Returns the tokens that each sequence of one has emitted.
        """
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

    def _ask(self, requests: "list[RequestId]", ages: "NDArray[np.int64]") -> None:
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

    def _tell(self, tell: "Callable[[Predictor], None]") -> None:
        try:
            tell(self.active.predictor)
        except Exception as error:
            self._active_failed(error)
        for shadow in self._shadows:
            if not shadow.failed:
                try:
                    tell(shadow.predictor)
                except Exception:
                    self._give_up(shadow)

    def _give_up(self, shadow: NamedPredictor) -> None:
        shadow.failed = True
        _log.exception("a shadow predictor failed", extra={"fields": {"predictor": shadow.name}})

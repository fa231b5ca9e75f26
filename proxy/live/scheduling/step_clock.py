"""The decode fleet's steps, inferred from the token counts of the streams.

An engine does not say when a step ends. But every started request emits one token a step, so the
median progress of the streams tells how many steps passed, and one `StepCompleted` brings all of the
scheduler's ledger forward. A request that deviates (its engine paused it, its text comes in larger
pieces) is corrected singly once it is off by more than a few tokens: on loads of thousands of tokens
less does not matter, and single corrections are expensive. With speculative decoding a step of this
clock is a token of the median request, of which the engine's step has several.

While no stream runs, answers that are not streamed progress by the running mean of the step time.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from balanceroute.proxy.live.scheduling.pulled_counts import PulledCounts, Started

# Tokens that a request may be off before it is corrected.
_TOLERANCE = 4
# Weight of one more measurement in the running mean of the step time.
_WEIGHT = 0.1
# A step counts as at most this many mean steps: a pause of the fleet is not one slow step. It counts
# all the same, so that a first measurement which was too short is outgrown.
_LONGEST_STEP = 4.0
# No engine is faster. Without a least step, an answer with a wrong length would make the clock
# race.
_SHORTEST_STEP_S = 1e-4
# Steps taken at a time without a stream to tell them: time spent suspended is no progress.
_MOST_SILENT_STEPS = 1_000


_Request = TypeVar("_Request", bound="Started")


@dataclass(slots=True)
class Advance(Generic[_Request]):
    """What changed since the last look.

    Attributes:
        steps: Steps that passed.
        step_s: Time of each, in seconds; None if it was not measured, or if the fleet paused.
        corrections: Who is off the clock, and by how many tokens of each sequence.
    """

    steps: int
    step_s: float | None
    corrections: list[tuple[_Request, int]]


class StepClock:
    """Counts inferred steps.

    Attributes:
        steps: Steps so far.
        step_s: Running mean of a step's time; 0.0 before the first measurement.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self._since_s: float | None = None  # When the last step was seen; None while nothing runs.
        self._heard = False  # Whether streams told the progress the last time.

    def advance(self, counts: "PulledCounts[_Request]", now_s: float) -> Advance[_Request]:
        """Compare every started request with the clock and move the clock on."""
        steps = counts.passed(self.steps)
        self._heard = steps is not None
        if steps is None:
            steps = self._advance_silently(now_s) if counts.silent else self._rest()
            return Advance(steps, None, [])
        step_s = None
        if steps:
            self.steps += steps
            step_s = self._measure(steps, now_s)
        return Advance(steps, step_s, counts.corrected(self.steps, _TOLERANCE))

    def observe_answer(self, step_s: float) -> None:
        """Learn the time of a step, in seconds, from a whole answer, unless streams tell it."""
        if step_s > 0.0 and (self._since_s is None or not self._heard):
            self._learn(step_s)

    def _learn(self, step_s: float) -> None:
        step_s = max(step_s, _SHORTEST_STEP_S)
        if self.step_s:
            step_s = min(step_s, _LONGEST_STEP * self.step_s)
            self.step_s += _WEIGHT * (step_s - self.step_s)
        else:
            self.step_s = step_s

    def _measure(self, steps: int, now_s: float) -> float | None:
        since_s, self._since_s = self._since_s, now_s
        if since_s is None:
            return None
        step_s, mean_s = (now_s - since_s) / steps, self.step_s
        self._learn(step_s)
        return step_s if mean_s and step_s <= _LONGEST_STEP * mean_s else None

    def _rest(self) -> int:
        self._since_s = None
        return 0

    def _advance_silently(self, now_s: float) -> int:
        if self._since_s is None or not self.step_s:
            self._since_s = now_s
            return 0
        steps = int((now_s - self._since_s) / self.step_s)
        if steps > _MOST_SILENT_STEPS:
            self._since_s = now_s
            return 0
        self._since_s += steps * self.step_s
        self.steps += steps
        return steps

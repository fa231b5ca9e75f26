"""What the last answers lost against the best model's: how much the next one may lose.

A user who judges by windows, the mean worth of so many answers in a row, is served by another choice than
one who judges by the mean of all: a window that is lost anyhow may lose more, and one that is nearly kept
is worth a slot of the large model.
"""

from collections import deque
from dataclasses import dataclass

WINDOW = 20
"""Answers in a row that are judged together."""
RECENT_INPUTS = 7
# The losses of the answers that leave the window next tell how soon there is room again.
_OLDEST = (1, 3, 6, 10)
_MOST_LOSS = 3.0
# Sums of tenths and hundredths are rounded.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class WindowAim:
    """What windows are to keep.

    Attributes:
        mean: At least this share of the worth that the best model's answers would have, in the mean of a
            window.
        scores: The worth of an answer in time, by task and by group: of shape (tasks, groups).
    """

    mean: float
    scores: tuple[tuple[float, ...], ...]

    def loss(self, task: int, group: int, *, kept: bool) -> float:
        """Return what an answer loses against the best model's; all of it unless it keeps the targets."""
        scores = self.scores[task]
        return max(scores) - (scores[group] if kept else 0.0)


class Recent:
    """The losses of the last answers, by what was predicted as each was sent.

    Args:
        aim: What windows are to keep.
    """

    def __init__(self, aim: WindowAim) -> None:
        self._most = max(WINDOW * (1 - aim.mean), _ROUNDING)
        self._losses: deque[float] = deque([0.0] * (WINDOW - 1), WINDOW - 1)

    def seen(self) -> list[float]:
        """Return what a network sees of them: `RECENT_INPUTS` figures."""
        losses, most = list(self._losses), self._most
        lost = sum(losses)
        leaving = [min(1.0, sum(losses[:count]) / most) for count in _OLDEST]
        left = max(-1.0, 1 - lost / most)
        return [left, *leaving, float(self._keeps(lost)), min(lost, _MOST_LOSS) / _MOST_LOSS]

    def add(self, loss: float) -> bool:
        """Note an answer; return whether the window that ends with it is kept."""
        kept = self._keeps(sum(self._losses) + loss)
        self._losses.append(loss)
        return kept

    def _keeps(self, lost: float) -> bool:
        return lost <= self._most + _ROUNDING

"""What choices of a model are worth, on the same requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from balanceroute.proxy.model_choice.base import ModelChoice
from balanceroute.proxy.model_choice.environment import Arrival, Environment
from balanceroute.proxy.model_choice.recent import WINDOW
from balanceroute.proxy.model_choice.scenario import Scenario

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
THRESHOLDS = (1.0, 0.99, 0.98, 0.96, 0.94)


@dataclass(frozen=True, slots=True)
class Judgement:
    """How one choice did.

    Attributes:
        scores: The worth of each answer, in order of arrival.
        groups: Which group each went to.
        tasks: Which task each was.
    """

    scores: tuple[float, ...]
    groups: tuple[int, ...]
    tasks: tuple[int, ...]

    @property
    def mean(self) -> float:
        """The mean worth of an answer."""
        return float(np.mean(self.scores))

    def windows(self) -> tuple[int, ...]:
        """Return how many means of 20 answers in a row reach each of the thresholds."""
        sums = np.convolve(self.scores, np.ones(WINDOW), "valid") / WINDOW
        # A sum of tenths and hundredths is rounded.
        return tuple(int(np.sum(sums >= one - 1e-9)) for one in THRESHOLDS)

    def shares(self, groups: int, task: int | None = None) -> tuple[float, ...]:
        """Return how many of the requests, or those of a task, went to each group."""
        sent = np.array(self.groups)
        chosen = sent if task is None else sent[np.array(self.tasks) == task]
        counts = np.bincount(chosen, minlength=groups)
        return tuple(float(one) for one in counts / max(1, counts.sum()))


def judge(
    scenario: Scenario,
    lengths: Sequence[tuple[int, int]],
    choice: ModelChoice,
    gaps_ms: Iterator[float],
    seed: int,
) -> Judgement:
    """Let a choice route requests; the same seed draws the same requests for each choice."""
    environment = Environment(scenario, lengths, np.random.default_rng(seed))
    arrival: Arrival | None = environment.reset(gaps_ms)
    scores: dict[int, float] = {}
    groups: list[int] = []
    tasks: list[int] = []
    while arrival is not None:
        groups.append(choice.choose(arrival.task, arrival.rate_per_s, arrival.outlooks))
        tasks.append(arrival.task)
        arrival, settled = environment.step(groups[-1])
        scores.update((end.number, end.score) for end in settled)
    ordered = tuple(scores[number] for number in range(len(groups)))
    return Judgement(ordered, tuple(groups), tuple(tasks))

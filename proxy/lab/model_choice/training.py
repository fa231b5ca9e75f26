"""Double deep Q-learning of which model answers.

Source: van Hasselt, Guez and Silver, "Deep Reinforcement Learning with Double Q-learning"; network and
parameters as in Jha and Chuppala, section 4.2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.lab.model_choice.environment import (
    Scenario,
    SimulatedArrival,
    TrainingEnvironment,
    bursty,
)
from balanceroute.proxy.lab.pictures import SOFT, empty_figure, write_pictures
from balanceroute.proxy.model_choice import (
    WINDOW,
    DoubleDqn,
    Floats,
    GroupOutlook,
    ModelChoice,
    QNetwork,
    Recent,
    WindowAim,
    inputs_of,
    sensible,
    state,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_HIDDEN = 256
_GAMMA = 0.99
_WINDOW_GAMMA = 0.98  # A window is over after 20 answers.
_LEARNING_RATE = 1e-4
_MEMORY = 100_000
_BATCH = 64
_STEPS_PER_UPDATE = 4
_UPDATES_PER_COPY = 500
_FIRST_STEPS = 1_000  # Before so many transitions nothing is learned.
_EPISODE = 4_000  # Requests; then the groups are emptied.
_LAST_EPSILON = 0.02
_WINDOW_WORTH = 0.03  # Of a window that is kept, beside the worth of its answers.


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    step: int  # Requests until its end.
    reward: float  # Mean worth of an answer.
    shares: tuple[float, ...]  # How many of the requests each group got.


class _Memory:
    """The last transitions; the oldest is overwritten."""

    def __init__(self, inputs: int) -> None:
        self.count = 0
        self._states = np.zeros((_MEMORY, inputs), np.float32)
        self._next = np.zeros((_MEMORY, inputs), np.float32)
        self._actions = np.zeros(_MEMORY, np.intp)
        self._rewards = np.zeros(_MEMORY, np.float32)

    def add(self, before: Floats, action: int, reward: float, after: Floats) -> None:
        place = self.count % _MEMORY
        self._states[place], self._next[place] = before, after
        self._actions[place], self._rewards[place] = action, reward
        self.count += 1

    def draw(self, random: np.random.Generator) -> tuple[Floats, NDArray[np.intp], Floats, Floats]:
        rows = random.integers(min(self.count, _MEMORY), size=_BATCH)
        return self._states[rows], self._actions[rows], self._rewards[rows], self._next[rows]


class Trainer:
    def __init__(
        self,
        scenario: Scenario,
        lengths: Sequence[tuple[int, int]],
        *,
        steps: int,
        seed: int,
        window_mean: float | None = None,
    ) -> None:
        """Set up a training on a number of requests.

        With `window_mean` windows are to keep this mean, beside the mean of all; see `WindowAim`.
        """
        self._scenario = scenario
        self._steps = steps
        self._random = np.random.default_rng(seed)
        self._environment = TrainingEnvironment(scenario, lengths, self._random)
        groups, tasks = len(scenario.groups), len(scenario.tasks)
        self._aim = None if window_mean is None else WindowAim(window_mean, scenario.scores)
        self._recent: Recent | None = None
        inputs = inputs_of(groups, tasks, windows=self._aim is not None)
        self._network = QNetwork.drawn(inputs, _HIDDEN, groups, self._random)
        self._target = QNetwork(self._network.parameters)
        self._target.copy_of(self._network)
        self._memory = _Memory(inputs)
        self._done = 0
        self._updates = 0

    def train(
        self, progress: Callable[[TrainingWindow], None] = lambda window: None, windows: int = 40
    ) -> DoubleDqn:
        """Train, and report after each of some parts of the whole."""
        size = max(1, self._steps // windows)
        rewards: list[float] = []
        counts = np.zeros(len(self._scenario.groups))
        while self._done < self._steps:
            requests = min(_EPISODE, self._steps - self._done)
            for group, reward in self._episode(requests):
                counts[group] += 1
                rewards.append(reward)
                if self._done % size == 0:
                    shares = tuple(float(one) for one in counts / counts.sum())
                    progress(TrainingWindow(self._done, float(np.mean(rewards)), shares))
                    rewards, counts = [], np.zeros_like(counts)
        groups, tasks = len(self._scenario.groups), len(self._scenario.tasks)
        return DoubleDqn(self._network, groups=groups, tasks=tasks, aim=self._aim)

    def _episode(self, requests: int) -> Iterator[tuple[int, float]]:
        """Yield for each request the group that it was sent to, and its worth."""
        arrival: SimulatedArrival | None = self._environment.reset(bursty(requests, self._random))
        assert arrival is not None
        self._recent = None if self._aim is None else Recent(self._aim)
        seen = self._seen(arrival)
        while arrival is not None:
            before, action = seen, self._explore(seen, arrival.outlooks)
            # What was predicted, not what came true: that depends on requests that come later.
            kept = arrival.outlooks[action].target_share <= 1
            scores = self._scenario.scores[arrival.task]
            worth = scores[action] if kept else 0.0
            # Less what the best model would be worth: it changes no choice, and small
            # differences are seen better in values near 0.
            reward = worth - max(scores)
            if self._recent is not None and not self._recent.add(-reward):
                reward -= _WINDOW_WORTH
            arrival, _ = self._environment.step(action)
            if arrival is not None:  # The last request has nothing after it.
                seen = self._seen(arrival)
                self._memory.add(before, action, reward, seen)
            self._done += 1
            if self._done % _STEPS_PER_UPDATE == 0 and self._memory.count >= _FIRST_STEPS:
                self._update()
            yield action, worth

    def _seen(self, arrival: SimulatedArrival) -> Floats:
        tasks = len(self._scenario.tasks)
        return state(arrival.task, tasks, arrival.rate_per_s, arrival.outlooks, self._recent)

    def _explore(self, seen: Floats, outlooks: Sequence[GroupOutlook]) -> int:
        """Return a random group at first, and ever more often the best one."""
        epsilon = max(_LAST_EPSILON, 1 - 2 * self._done / self._steps)
        if self._random.random() < epsilon:
            return int(self._random.integers(len(outlooks)))
        values = self._network.values(seen)
        return max(sensible(outlooks), key=lambda place: float(values[place]))

    def _update(self) -> None:
        states, actions, rewards, after = self._memory.draw(self._random)
        # Double: the network chooses the next action, the older one says its value.
        missed = after[:, : len(self._scenario.groups)] > 1
        missed &= ~missed.all(axis=1, keepdims=True)  # As in `sensible`.
        best = np.argmax(np.where(missed, -np.inf, self._network.values(after)), axis=1)
        value = self._target.values(after)[np.arange(len(best)), best]
        gamma = _GAMMA if self._aim is None else _WINDOW_GAMMA
        targets = (rewards + gamma * value).astype(np.float32)
        # Smaller steps at the end: what one request more costs is a small part of a value.
        left = 1 - self._done / self._steps
        self._network.learn(states, actions, targets, _LEARNING_RATE * min(1.0, 2 * left + 0.02))
        self._updates += 1
        if self._updates % _UPDATES_PER_COPY == 0:
            self._target.copy_of(self._network)


# The worth of choices of a model, on the same requests.

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
THRESHOLDS = (1.0, 0.99, 0.98, 0.96, 0.94)


@dataclass(frozen=True, slots=True)
class ChoiceJudgement:
    scores: tuple[float, ...]  # The worth of each answer, in order of arrival.
    groups: tuple[int, ...]  # Which group each went to.
    tasks: tuple[int, ...]  # Which task each was.

    @property
    def mean(self) -> float:
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
) -> ChoiceJudgement:
    """Let a choice route requests; the same seed draws the same requests for each choice."""
    environment = TrainingEnvironment(scenario, lengths, np.random.default_rng(seed))
    arrival: SimulatedArrival | None = environment.reset(gaps_ms)
    scores: dict[int, float] = {}
    groups: list[int] = []
    tasks: list[int] = []
    while arrival is not None:
        groups.append(choice.choose(arrival.task, arrival.rate_per_s, arrival.outlooks))
        tasks.append(arrival.task)
        arrival, settled = environment.step(groups[-1])
        scores.update((end.number, end.score) for end in settled)
    ordered = tuple(scores[number] for number in range(len(groups)))
    return ChoiceJudgement(ordered, tuple(groups), tuple(tasks))


# Pictures of a training, and of the requests that a choice sends to each group.

_TICKS = (0.25, 1.0, 4.0, 16.0, 48.0)
# Distinct with every common colour blindness (Okabe and Ito); further groups repeat them.
_COLOURS = ("#0067a5", "#e69f00", "#d55e00", "#009e73", "#cc79a7")


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def write_training(
    scenario: Scenario, windows: Sequence[TrainingWindow], directory: Path
) -> list[Path]:
    """Write `training.png`: the reward and the groups' shares over the requests.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """

    def draw() -> "Figure":
        lines = ["Rates change all the time; at first groups are tried at random."]
        figure = empty_figure(7.0, 4.6, "Training of a model router", lines)
        reward, shares = figure.subplots(2, 1, sharex=True)
        steps = [window.step for window in windows]
        reward.plot(steps, [window.reward for window in windows], color=SOFT, marker=".")
        reward.set(ylabel="worth of an answer", ylim=(0, 1.02))
        _stack(shares, steps, [window.shares for window in windows], scenario)
        shares.set(xlabel="requests", ylabel="share of requests")
        figure.legend(frameon=False, loc="outside lower center", ncols=len(scenario.groups))
        return figure

    return write_pictures({"training": draw}, directory)


def write_mix(
    scenario: Scenario, judgements: Mapping[float, ChoiceJudgement], title: str, directory: Path
) -> list[Path]:
    """Write `mix.png`: which group answers, by rate, for all tasks and for each.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """

    def draw() -> "Figure":
        names: list[str | None] = [None, *scenario.tasks]
        figure = empty_figure(2.4 * len(names), 3.0, "Which model answers, by rate", [title])
        charts = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for place, (chart, name) in enumerate(zip(charts, names, strict=True)):
            task = None if name is None else place - 1
            rows = [one.shares(len(scenario.groups), task) for one in judgements.values()]
            # The legend once: the colours are the same.
            _stack(chart, list(judgements), rows, scenario, labels=place == 0)
            chart.set(title=name or "all tasks", xlabel="requests/s", xscale="log")
            # The usual labels of such a scale are formulas, which pictures here do not draw.
            chart.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], minor=False)
            chart.set_xticks([], minor=True)
        charts[0].set(ylabel="share of requests")
        figure.legend(frameon=False, loc="outside lower center", ncols=len(scenario.groups))
        return figure

    return write_pictures({"mix": draw}, directory)


def _stack(
    chart: "Axes",
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    scenario: Scenario,
    *,
    labels: bool = True,
) -> None:
    columns = list(zip(*rows, strict=True))
    names = [group.name for group in scenario.groups]
    colours = [_colour(place) for place in range(len(names))]
    chart.stackplot(x, columns, labels=names if labels else [], colors=colours)
    chart.set(ylim=(0, 1), xlim=(min(x), max(x)))

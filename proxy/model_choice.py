"""Which of several models answers a request that leaves the choice to the proxy.

A sans-IO package: it decides at a request's arrival, given how each group of engines would serve it.
Training and judgement call it in virtual time.

Source: Jha and Chuppala, "Quality-of-Service Aware LLM Serving", sections 4.2 and 5.1.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.errors import ConfigError

# The inputs of a choice of a model, and its interface.


@dataclass(frozen=True, slots=True)
class Targets:
    """The latency that an answer must keep; an answer that does not is worth nothing.

    Raises:
        ConfigError: There is no target, or one is not positive.
    """

    tpot_ms: float | None = None  # Time per output token; None if it does not matter.
    ttft_ms: float | None = None  # Time to the first token; None if it does not matter.

    def __post_init__(self) -> None:
        given = [one for one in (self.tpot_ms, self.ttft_ms) if one is not None]
        if not given or min(given) <= 0:
            raise ConfigError("a time per output token or to the first one must be above 0 ms")

    def share_used(self, tpot_ms: float, ttft_ms: float) -> float:
        """Return which share of the tighter target a latency takes; at most 1 if both are kept."""
        used = 0.0 if self.tpot_ms is None else tpot_ms / self.tpot_ms
        return used if self.ttft_ms is None else max(used, ttft_ms / self.ttft_ms)


@dataclass(frozen=True, slots=True)
class GroupOutlook:
    """A request's expected service by a group of engines, if it were sent there now."""

    # Its predicted latency as a share of the targets; at most 1 if they are kept.
    target_share: float
    healthy: bool = True  # Whether the group has engines that take requests.


class ModelChoice(Protocol):
    """Chooses among the groups of an alias."""

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[GroupOutlook]) -> int:
        """Return the group that is to answer.

        Args:
            task: Which of the alias's tasks the request is, from 0.
            rate_per_s: Requests that name the alias, a second, of late.
            outlooks: One for each group, from the smallest model to the largest; at least one of
                them is healthy.

        Returns:
            A healthy group's place in `outlooks`.
        """
        ...


# How many requests a second come, of late.

# About so many arrivals are remembered.
_MEMORY = 20


class ArrivalRate:
    """A mean of the last gaps between arrivals; older ones fade out."""

    def __init__(self) -> None:
        self._last_ms: float | None = None
        self._gaps = self._gap_ms = 0.0

    def observe(self, now_ms: float) -> float:
        """Take an arrival; return the requests a second with it, 0 while there is no gap."""
        if self._last_ms is not None:
            keep = 1 - 1 / _MEMORY
            self._gaps = keep * self._gaps + 1
            self._gap_ms += (max(0.0, now_ms - self._last_ms) - self._gap_ms) / self._gaps
        self._last_ms = now_ms
        return 1e3 / self._gap_ms if self._gap_ms > 0 else 0.0


# Always the same model, while it is healthy.


class Static:
    """Takes one group; if it has no engine left, the next smaller that has, else the next larger."""

    def __init__(self, group: int) -> None:
        self._group = group

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[GroupOutlook]) -> int:
        """Return the group; see `ModelChoice.choose`."""
        healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
        return min(healthy, key=lambda place: (place > self._group, abs(place - self._group)))


# The largest model that is predicted to keep the targets now.


class Greedy:
    """Looks at no task and no future; where no group keeps the targets, it takes the nearest to it."""

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[GroupOutlook]) -> int:
        """Return the group; see `ModelChoice.choose`."""
        healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
        kept = [place for place in healthy if outlooks[place].target_share <= 1]
        return max(kept) if kept else min(healthy, key=lambda one: outlooks[one].target_share)


# The losses of the last answers against the best model's, and the loss that the next one may have.
#
# A user who judges by windows, the mean worth of so many answers in a row, needs another choice than one
# who judges by the mean of all: a window that is lost anyhow may lose more, and one that is nearly kept
# is worth a slot of the large model.

WINDOW = 20
"""Answers in a row that are judged together."""
RECENT_INPUTS = 7
# The losses of the answers that leave the window next show how soon there is room again.
_OLDEST = (1, 3, 6, 10)
_MOST_LOSS = 3.0
# Sums of tenths and hundredths are rounded.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class WindowAim:
    """The aim for windows of answers.

    Attributes:
        mean: At least this share of the worth that the best model's answers would have, in the mean of a
            window.
        scores: The worth of an answer in time, by task and by group: of shape (tasks, groups).
    """

    mean: float
    scores: tuple[tuple[float, ...], ...]

    def loss(self, task: int, group: int, *, kept: bool) -> float:
        """Return an answer's loss against the best model's; all of it unless it keeps the targets."""
        scores = self.scores[task]
        return max(scores) - (scores[group] if kept else 0.0)


class Recent:
    """The losses of the last answers, by the predictions as each was sent.

    Args:
        aim: For windows of answers.
    """

    def __init__(self, aim: WindowAim) -> None:
        self._most = max(WINDOW * (1 - aim.mean), _ROUNDING)
        self._losses: deque[float] = deque([0.0] * (WINDOW - 1), WINDOW - 1)

    def seen(self) -> list[float]:
        """Return a network's inputs from them: `RECENT_INPUTS` figures."""
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


# A perceptron with two hidden layers that is trained by Adam; numpy alone.

Floats: TypeAlias = NDArray[np.float32]
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class QNetwork:
    """Maps a state to the value of each action."""

    def __init__(self, parameters: Mapping[str, Floats]) -> None:
        """Make a network of its parameters: w0 (inputs, hidden), b0 .. w2 (hidden, outputs), b2."""
        self.parameters = dict(parameters)
        self._means = {name: np.zeros_like(one) for name, one in self.parameters.items()}
        self._squares = {name: np.zeros_like(one) for name, one in self.parameters.items()}
        self._updates = 0

    @classmethod
    def drawn(
        cls, inputs: int, hidden: int, outputs: int, random: np.random.Generator
    ) -> "QNetwork":
        """Return an untrained network (He's initialisation)."""
        sizes = [inputs, hidden, hidden, outputs]
        parameters: dict[str, Floats] = {}
        for layer, (before, after) in enumerate(pairwise(sizes)):
            drawn = random.normal(0.0, np.sqrt(2 / before), (before, after))
            parameters[f"w{layer}"] = drawn.astype(np.float32)
            parameters[f"b{layer}"] = np.zeros(after, np.float32)
        return cls(parameters)

    def values(self, states: Floats) -> Floats:
        """Return the values of the actions: (states, outputs) for (states, inputs), or of one state."""
        return self._layers(states)[-1]

    def copy_of(self, other: "QNetwork") -> None:
        """Take another network's weights."""
        self.parameters = {name: one.copy() for name, one in other.parameters.items()}

    def learn(
        self, states: Floats, actions: NDArray[np.intp], targets: Floats, learning_rate: float
    ) -> None:
        """Move the values of the actions taken towards the targets by one step of Adam (Huber loss)."""
        first, second, values = self._layers(states)
        rows = np.arange(len(actions))
        error = np.zeros_like(values)
        error[rows, actions] = np.clip(values[rows, actions] - targets, -1, 1) / len(actions)
        gradients: dict[str, Floats] = {}
        for layer, inputs in ((2, second), (1, first), (0, states)):
            gradients[f"w{layer}"], gradients[f"b{layer}"] = inputs.T @ error, error.sum(0)
            error = (error @ self.parameters[f"w{layer}"].T) * (inputs > 0)
        self._adam(gradients, learning_rate)

    def _layers(self, states: Floats) -> tuple[Floats, Floats, Floats]:
        weights = self.parameters
        first = np.maximum(states @ weights["w0"] + weights["b0"], 0)
        second = np.maximum(first @ weights["w1"] + weights["b1"], 0)
        return first, second, second @ weights["w2"] + weights["b2"]

    def _adam(self, gradients: Mapping[str, Floats], learning_rate: float) -> None:
        self._updates += 1
        rate = learning_rate * np.sqrt(1 - _BETA_2**self._updates) / (1 - _BETA_1**self._updates)
        for name, gradient in gradients.items():
            mean, square = self._means[name], self._squares[name]
            mean *= _BETA_1
            mean += np.float32(1 - _BETA_1) * gradient
            square *= _BETA_2
            square += np.float32(1 - _BETA_2) * gradient * gradient
            step = np.sqrt(square)
            step += _EPSILON
            np.divide(mean, step, out=step)
            step *= np.float32(rate)
            self.parameters[name] -= step


# The choice that was learned: the model of the highest Q value.

# Beyond this a group's state does not matter any more.
_LARGEST_SHARE = 3.0
# One request more is a hundredth of a target or less, and it decides whether the next one fits.
_FINER = 10.0
_LAYERS = ("w0", "b0", "w1", "b1", "w2", "b2")
_MEAN, _SCORES = "window_mean", "scores"


def inputs_of(groups: int, tasks: int, *, windows: bool = False) -> int:
    """Return how many figures a state has; `windows` if it has those of the last answers."""
    return 2 * groups + 1 + tasks + (RECENT_INPUTS if windows else 0)


def state(
    task: int,
    tasks: int,
    rate_per_s: float,
    outlooks: Sequence[GroupOutlook],
    recent: Recent | None = None,
) -> Floats:
    """Return the network's inputs.

    The groups' shares of the targets, again those near 1 in finer steps, the rate, the task (one-hot), and
    the losses of the last answers if these matter.
    """
    shares = [
        min(one.target_share, _LARGEST_SHARE) if one.healthy else _LARGEST_SHARE for one in outlooks
    ]
    kinds = [0.0] * tasks
    kinds[task] = 1.0
    near = [max(-1.0, min(1.0, _FINER * (1 - share))) for share in shares]
    lost = [] if recent is None else recent.seen()
    return np.array([*shares, *near, math.log2(1 + rate_per_s) / 6, *kinds, *lost], np.float32)


def sensible(outlooks: Sequence[GroupOutlook]) -> list[int]:
    """Return the healthy groups that keep the targets now, or all healthy ones if none does."""
    healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
    return [place for place in healthy if outlooks[place].target_share <= 1] or healthy


class DoubleDqn:
    """Asks a trained network.

    One that was trained for windows remembers the losses of its last choices.
    """

    def __init__(
        self, network: QNetwork, *, groups: int, tasks: int, aim: WindowAim | None = None
    ) -> None:
        """Take a network for so many groups and tasks, and the windows that it was trained for.

        Raises:
            ConfigError: The network is for other groups or tasks.
        """
        inputs, outputs = len(network.parameters["w0"]), network.parameters["w2"].shape[1]
        windows = aim is not None
        if (inputs, outputs) != (inputs_of(groups, tasks, windows=windows), groups):
            known = inputs - inputs_of(outputs, 0, windows=windows)
            raise ConfigError(
                f"the weights are for {outputs} groups and {known} tasks, "
                f"the alias has {groups} and {tasks}"
            )
        if aim is not None and [len(row) for row in aim.scores] != [groups] * tasks:
            raise ConfigError("the weights have scores of other groups or tasks")
        self._network = network
        self._tasks = tasks
        self._aim = aim
        self._recent = None if aim is None else Recent(aim)

    @classmethod
    def read(cls, path: Path, *, groups: int, tasks: int) -> "DoubleDqn":
        """Read the weights that `train model-router` wrote.

        Raises:
            ConfigError: The file cannot be read, holds no weights, or those of another alias.
        """
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                weights = {name: file[name].astype(np.float32) for name in _LAYERS}
                aim = _aim_of(file)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, EOFError, TypeError, BadZipFile) as error:
            # numpy's own message advises to unpickle the file, which runs code in it.
            raise ConfigError(f"{path} holds no weights of a model router") from error
        shapes = [weights[name].shape for name in _LAYERS]
        if not _fit(shapes) or not all(np.isfinite(one).all() for one in weights.values()):
            raise ConfigError(f"{path} holds no weights of a model router: shapes {shapes}")
        return cls(QNetwork(weights), groups=groups, tasks=tasks, aim=aim)

    def write(self, path: Path) -> None:
        """Write the weights.

        Raises:
            OSError: The file cannot be written.
        """
        arrays = dict(self._network.parameters)
        if self._aim is not None:
            arrays[_MEAN] = np.array(self._aim.mean, np.float32)
            arrays[_SCORES] = np.array(self._aim.scores, np.float32)
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[GroupOutlook]) -> int:
        """Return the group; see `ModelChoice.choose`."""
        recent, aim = self._recent, self._aim
        values = self._network.values(state(task, self._tasks, rate_per_s, outlooks, recent))
        chosen = max(sensible(outlooks), key=lambda place: float(values[place]))
        if recent is not None and aim is not None:
            recent.add(aim.loss(task, chosen, kept=outlooks[chosen].target_share <= 1))
        return chosen


def _aim_of(file: Mapping[str, Any]) -> WindowAim | None:
    """Return the windows that weights were trained for; None if they were for the mean of all."""
    if _MEAN not in file:
        return None
    mean, scores = float(file[_MEAN]), file[_SCORES].astype(np.float64)
    if scores.ndim != 2 or not np.isfinite(scores).all() or not 0 <= mean <= 1:
        raise ValueError("no scores by task and group")
    return WindowAim(mean, tuple(tuple(map(float, row)) for row in scores))


def _fit(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the layers fit each other."""
    width = None
    for weights, biases in zip(shapes[::2], shapes[1::2], strict=True):
        if len(weights) != 2 or biases != weights[1:] or width not in (None, weights[0]):
            return False
        width = weights[1]
    return True

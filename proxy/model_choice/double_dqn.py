"""The choice that was learned: the model of the highest Q value."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice.base import Outlook
from balanceroute.proxy.model_choice.q_network import Floats, QNetwork
from balanceroute.proxy.model_choice.recent import RECENT_INPUTS, Recent, WindowAim

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
    outlooks: Sequence[Outlook],
    recent: Recent | None = None,
) -> Floats:
    """Return what the network sees.

    The groups' shares of the targets, again those near 1 in finer steps, the rate, the task (one-hot), and
    what the last answers lost if that matters.
    """
    shares = [
        min(one.target_share, _LARGEST_SHARE) if one.healthy else _LARGEST_SHARE for one in outlooks
    ]
    kinds = [0.0] * tasks
    kinds[task] = 1.0
    near = [max(-1.0, min(1.0, _FINER * (1 - share))) for share in shares]
    lost = [] if recent is None else recent.seen()
    return np.array([*shares, *near, math.log2(1 + rate_per_s) / 6, *kinds, *lost], np.float32)


def sensible(outlooks: Sequence[Outlook]) -> list[int]:
    """Return the healthy groups that keep the targets now, or all healthy ones if none does."""
    healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
    return [place for place in healthy if outlooks[place].target_share <= 1] or healthy


class DoubleDqn:
    """Asks a trained network.

    One that was trained for windows remembers what its last choices lost.
    """

    def __init__(
        self, network: QNetwork, *, groups: int, tasks: int, aim: WindowAim | None = None
    ) -> None:
        """Take a network for so many groups and tasks, and the windows that it was trained for.

        Raises:
            ConfigError: The network is for others.
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
            # numpy's own words advise to unpickle the file, which runs what is in it.
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
        told = dict(self._network.parameters)
        if self._aim is not None:
            told[_MEAN] = np.array(self._aim.mean, np.float32)
            told[_SCORES] = np.array(self._aim.scores, np.float32)
        with path.open("wb") as file:
            np.savez(file, **told)  # type: ignore[arg-type]

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[Outlook]) -> int:
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

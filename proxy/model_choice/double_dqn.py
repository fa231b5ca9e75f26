"""The choice that was learned: the model of the highest Q value."""

import math
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice.base import Outlook
from balanceroute.proxy.model_choice.q_network import Floats, QNetwork

# Beyond this a group's state does not matter any more.
_LARGEST_SHARE = 3.0
# One request more is a hundredth of a target or less, and it decides whether the next one fits.
_FINER = 10.0
_LAYERS = ("w0", "b0", "w1", "b1", "w2", "b2")


def inputs_of(groups: int, tasks: int) -> int:
    """Return how many figures a state has."""
    return 2 * groups + 1 + tasks


def state(task: int, tasks: int, rate_per_s: float, outlooks: Sequence[Outlook]) -> Floats:
    """Return what the network sees.

    The groups' shares of the targets, again those near 1 in finer steps, the rate, the task (one-hot).
    """
    shares = [
        min(one.target_share, _LARGEST_SHARE) if one.healthy else _LARGEST_SHARE for one in outlooks
    ]
    kinds = [0.0] * tasks
    kinds[task] = 1.0
    near = [max(-1.0, min(1.0, _FINER * (1 - share))) for share in shares]
    return np.array([*shares, *near, math.log2(1 + rate_per_s) / 6, *kinds], np.float32)


def sensible(outlooks: Sequence[Outlook]) -> list[int]:
    """Return the healthy groups that keep the targets now, or all healthy ones if none does."""
    healthy = [place for place, outlook in enumerate(outlooks) if outlook.healthy]
    return [place for place in healthy if outlooks[place].target_share <= 1] or healthy


class DoubleDqn:
    """Asks a trained network."""

    def __init__(self, network: QNetwork, *, groups: int, tasks: int) -> None:
        """Take a network for so many groups and tasks.

        Raises:
            ConfigError: The network is for others.
        """
        inputs, outputs = len(network.parameters["w0"]), network.parameters["w2"].shape[1]
        if (inputs, outputs) != (inputs_of(groups, tasks), groups):
            raise ConfigError(
                f"the weights are for {outputs} groups and {inputs - inputs_of(outputs, 0)} tasks, "
                f"the alias has {groups} and {tasks}"
            )
        self._network = network
        self._tasks = tasks

    @classmethod
    def read(cls, path: Path, *, groups: int, tasks: int) -> "DoubleDqn":
        """Read the weights that `train model-router` wrote.

        Raises:
            ConfigError: The file cannot be read, holds no weights, or those of another alias.
        """
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                weights = {name: file[name].astype(np.float32) for name in _LAYERS}
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except (ValueError, KeyError, EOFError, TypeError, BadZipFile) as error:
            # numpy's own words advise to unpickle the file, which runs what is in it.
            raise ConfigError(f"{path} holds no weights of a model router") from error
        shapes = [weights[name].shape for name in _LAYERS]
        if not _fit(shapes) or not all(np.isfinite(one).all() for one in weights.values()):
            raise ConfigError(f"{path} holds no weights of a model router: shapes {shapes}")
        return cls(QNetwork(weights), groups=groups, tasks=tasks)

    def write(self, path: Path) -> None:
        """Write the weights.

        Raises:
            OSError: The file cannot be written.
        """
        with path.open("wb") as file:
            np.savez(file, **self._network.parameters)  # type: ignore[arg-type]

    def choose(self, task: int, rate_per_s: float, outlooks: Sequence[Outlook]) -> int:
        """Return the group; see `ModelChoice.choose`."""
        values = self._network.values(state(task, self._tasks, rate_per_s, outlooks))
        return max(sensible(outlooks), key=lambda place: float(values[place]))


def _fit(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the layers fit each other."""
    width = None
    for weights, biases in zip(shapes[::2], shapes[1::2], strict=True):
        if len(weights) != 2 or biases != weights[1:] or width not in (None, weights[0]):
            return False
        width = weights[1]
    return True

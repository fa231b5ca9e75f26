"""A perceptron with two hidden layers that is trained by Adam; numpy alone."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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

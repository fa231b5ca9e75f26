"""Double deep Q-learning of which model answers.

Source: van Hasselt, Guez and Silver, "Deep Reinforcement Learning with Double Q-learning"; network and
parameters as in Jha and Chuppala, section 4.2.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.model_choice.base import Outlook
from balanceroute.proxy.model_choice.double_dqn import DoubleDqn, inputs_of, sensible, state
from balanceroute.proxy.model_choice.environment import Arrival, Environment
from balanceroute.proxy.model_choice.q_network import Floats, QNetwork
from balanceroute.proxy.model_choice.recent import Recent, WindowAim
from balanceroute.proxy.model_choice.scenario import Scenario
from balanceroute.proxy.model_choice.workload import bursty

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
class Window:
    """What the training got in a part of it.

    Attributes:
        step: Requests until its end.
        reward: Mean worth of an answer.
        shares: How many of the requests each group got.
    """

    step: int
    reward: float
    shares: tuple[float, ...]


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
    """Trains one network."""

    def __init__(
        self,
        scenario: Scenario,
        lengths: Sequence[tuple[int, int]],
        *,
        steps: int,
        seed: int,
        window_mean: float | None = None,
    ) -> None:
        """Take what is to be learned, on how many requests.

        With `window_mean` windows are to keep this mean, beside the mean of all; see `WindowAim`.
        """
        self._scenario = scenario
        self._steps = steps
        self._random = np.random.default_rng(seed)
        self._environment = Environment(scenario, lengths, self._random)
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
        self, progress: Callable[[Window], None] = lambda window: None, windows: int = 40
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
                    progress(Window(self._done, float(np.mean(rewards)), shares))
                    rewards, counts = [], np.zeros_like(counts)
        groups, tasks = len(self._scenario.groups), len(self._scenario.tasks)
        return DoubleDqn(self._network, groups=groups, tasks=tasks, aim=self._aim)

    def _episode(self, requests: int) -> Iterator[tuple[int, float]]:
        """Yield for each request the group that it was sent to, and its worth."""
        arrival: Arrival | None = self._environment.reset(bursty(requests, self._random))
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

    def _seen(self, arrival: Arrival) -> Floats:
        tasks = len(self._scenario.tasks)
        return state(arrival.task, tasks, arrival.rate_per_s, arrival.outlooks, self._recent)

    def _explore(self, seen: Floats, outlooks: Sequence[Outlook]) -> int:
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

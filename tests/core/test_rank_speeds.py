"""How fast ranks are, learned from the times of steps that a fleet takes together."""

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.proxy.core.steps import LearnedSpeeds

BASE_NS, TOKEN_NS = 30e6, 200.0
SLOTS, MEAN_TOKENS = 16, 13_000.0


class Fleet:
    """Ranks with full batches, which give a free slot to the size that brings them next to even."""

    def __init__(self, slowness: list[float], learned: LearnedSpeeds, seed: int = 0) -> None:
        self.slowness = np.array(slowness)
        self.learned = learned
        self.rng = np.random.default_rng(seed)
        self.held = self.rng.exponential(MEAN_TOKENS, (len(slowness), SLOTS))
        self.error = 0.0  # Of a step's time, relative; it drifts.

    @property
    def loads(self) -> NDArray[np.int64]:
        return np.asarray(self.held.sum(axis=1), np.int64)

    def run(self, steps: int, *, noise: float = 0.0, drift: float = 0.0) -> None:
        for _ in range(steps):
            self.held += 1.0
            for rank, slot in np.argwhere(self.rng.random(self.held.shape) < 1 / 300):
                speeds = self.learned.speeds
                self.held[rank, slot] = 0.0
                levels = self.loads if speeds is None else self.loads / speeds
                missing = (
                    levels.max() * (1.0 if speeds is None else speeds[rank]) - self.loads[rank]
                )
                sizes = self.rng.exponential(MEAN_TOKENS, 32)
                self.held[rank, slot] = sizes[np.abs(sizes - missing).argmin()]
            self.error = 0.98 * self.error + 0.2 * drift * self.rng.normal()
            step_ns = BASE_NS + TOKEN_NS * (self.slowness * self.loads).max()
            factor = np.exp(noise * self.rng.normal() + self.error)
            self.learned.observe(self.loads, float(step_ns * factor))


@pytest.mark.parametrize(
    "slowness", [[1.0, 1.5] * 4, [1.0] * 7 + [1.4], [0.6] + [1.0] * 7, [1.0, 1.5]]
)
def test_ranks_that_differ_get_what_they_can_read(slowness: list[float]) -> None:
    learned = LearnedSpeeds(len(slowness))
    Fleet(slowness, learned).run(4_000)
    assert learned.speeds is not None
    expected = 1.0 / np.array(slowness)
    assert learned.speeds == pytest.approx(expected / expected.mean(), rel=0.16)
    assert learned.speeds.mean() == pytest.approx(1.0)


@pytest.mark.parametrize(("noise", "drift"), [(0.0, 0.0), (0.01, 0.0), (0.05, 0.0), (0.01, 0.03)])
@pytest.mark.parametrize("seed", range(3))
def test_equal_ranks_stay_equal_whatever_the_errors(noise: float, drift: float, seed: int) -> None:
    learned = LearnedSpeeds(8)
    Fleet([1.0] * 8, learned, seed).run(4_000, noise=noise, drift=drift)
    assert learned.speeds is None


def test_noise_delays_what_is_learned_and_does_not_turn_it_around() -> None:
    learned = LearnedSpeeds(8)
    Fleet([1.0, 1.5] * 4, learned).run(8_000, noise=0.01)
    assert learned.speeds is not None
    assert learned.speeds[::2].min() > learned.speeds[1::2].max()


def test_steps_that_a_request_fell_behind_are_passed_over() -> None:
    """A rank of three that pauses half of its requests at times, as its engine may."""
    speeds: list[bool] = []
    for told in (True, False):
        rng, learned = np.random.default_rng(1), LearnedSpeeds(3)
        for step in range(4_000):
            loads = rng.integers(90_000, 110_000, 3)
            read, pauses = loads.copy(), step % 40 < 12
            if pauses:
                read[1] //= 2
            learned.observe(loads, BASE_NS + TOKEN_NS * float(read.max()))
            if pauses and told and step % 5 == 4:
                learned.fell_behind()
        speeds.append(learned.speeds is None)
    assert speeds == [True, False]


def test_an_idle_fleet_teaches_nothing() -> None:
    learned = LearnedSpeeds(3)
    for _ in range(1_000):
        learned.observe(np.zeros(3, np.int64), BASE_NS)
    assert learned.speeds is None

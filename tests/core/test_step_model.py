"""The fitted cost of a token is exact for a line, and unknown where the steps do not tell."""

import random

import pytest

from balanceroute.proxy.core.steps import StepModel


def test_a_line_is_found_exactly() -> None:
    model, rng = StepModel(), random.Random(0)
    for _ in range(200):
        envelope = rng.randrange(150_000, 250_000)
        model.observe(envelope, 30e6 + 200.0 * envelope)
    assert model.ns_per_token == pytest.approx(200.0)


def test_noise_averages_out_and_old_steps_fade() -> None:
    model, rng = StepModel(), random.Random(1)
    for slope in (500.0, 200.0):
        for _ in range(8_000):
            envelope = rng.randrange(150_000, 250_000)
            # As far off as a driver that sees each step one tenth early or late.
            model.observe(envelope, (30e6 + slope * envelope) * rng.uniform(0.9, 1.1))
        assert model.ns_per_token == pytest.approx(slope, rel=0.25)


@pytest.mark.parametrize("steps", [0, 1, 16, 63])
def test_a_few_steps_tell_nothing(steps: int) -> None:
    model = StepModel()
    for step in range(steps):
        model.observe(1_000 * step, 1e6 + 200_000.0 * step)
    assert model.ns_per_token is None


def test_equal_envelopes_tell_nothing() -> None:
    model = StepModel()
    for step in range(500):
        model.observe(1_000, 1e6 + step)
    assert model.ns_per_token is None


def test_steps_that_do_not_depend_on_the_load_tell_nothing() -> None:
    known, rng = 0, random.Random(2)
    for _ in range(50):
        model = StepModel()
        for _ in range(600):
            model.observe(rng.randrange(100_000), rng.uniform(1e6, 9e6))
        known += model.ns_per_token is not None
    # By chance one in 40 exceeds two standard errors.
    assert known <= 5


def test_a_step_that_is_faster_with_more_tokens_is_not_believed() -> None:
    model = StepModel()
    for step in range(500):
        model.observe(1_000 * step, 1e9 - 200_000.0 * step)
    assert model.ns_per_token is None

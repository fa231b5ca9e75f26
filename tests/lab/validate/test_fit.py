"""A known line is found."""

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.proxy.lab.validate.validation import fit_step_time


def line(loads: NDArray[np.int64], base_ms: float, us_per_token: float) -> NDArray[np.float64]:
    return base_ms * 1e6 + us_per_token * 1e3 * loads.astype(np.float64)


def test_an_exact_line() -> None:
    loads = np.arange(1_000, 100_000, 990)
    fit = fit_step_time(loads, line(loads, 21.5, 0.35))
    assert fit is not None
    assert (fit.base_ms, fit.us_per_token, fit.r2) == pytest.approx((21.5, 0.35, 1.0))
    assert (fit.steps, fit.pauses) == (100, 0)


def test_noise_lowers_r2_and_not_the_slope() -> None:
    rng = np.random.default_rng(0)
    loads = rng.integers(0, 100_000, 20_000)
    spread_ms = 0.2e-3 * 100_000 / 12**0.5  # As the line itself spreads: half of the variance.
    times = line(loads, 30, 0.2) + rng.normal(0, spread_ms * 1e6, len(loads))
    fit = fit_step_time(loads, times)
    assert fit is not None
    assert fit.base_ms == pytest.approx(30, abs=0.3)
    assert fit.us_per_token == pytest.approx(0.2, abs=0.005)
    assert fit.r2 == pytest.approx(0.5, abs=0.02)


def test_pauses_are_left_out_and_counted() -> None:
    loads = np.arange(1_000, 11_000, 100)
    times = line(loads, 10, 0.1)
    times[[3, 50]] *= 40
    fit = fit_step_time(loads, times)
    assert fit is not None
    assert (fit.base_ms, fit.us_per_token) == pytest.approx((10, 0.1))
    assert (fit.steps, fit.pauses) == (98, 2)


def test_times_that_never_change_are_explained_by_nothing() -> None:
    fit = fit_step_time(np.arange(50), np.full(50, 7e6))
    assert fit is not None
    assert (fit.base_ms, fit.us_per_token, fit.r2) == pytest.approx((7, 0, 0))


@pytest.mark.parametrize("loads", [np.arange(0), np.arange(19), np.full(100, 5_000)])
def test_no_line_through_too_little(loads: NDArray[np.int64]) -> None:
    assert fit_step_time(loads, line(loads, 10, 0.1)) is None

"""The line of the step time from looks that see two or three steps each."""

import numpy as np
import pytest

from balanceroute.proxy.lab.audit.observation import fit_looks

BASE_MS, US_PER_TOKEN, RUNNING = 30.0, 5.0, 32.0
SECONDS, INTERVAL_S = 180.0, 0.25


def steps(rng: np.random.Generator) -> tuple[list[float], list[float]]:
    """Return when each step of a fleet ends, and the load of its fullest rank, which wanders."""
    ends, peaks, now_s, away = [], [], 0.0, 0.0
    while now_s < SECONDS:
        away = 0.99 * away + 0.141 * float(rng.normal())
        peaks.append(16_000 + 3_500 * away)
        now_s += BASE_MS / 1e3 + US_PER_TOKEN / 1e6 * peaks[-1]
        ends.append(now_s)
    return ends, peaks


@pytest.mark.parametrize("seed", range(5))
def test_looks_that_see_few_steps_do_not_bias_the_line(seed: int) -> None:
    """A quotient for each look made b 5 to 20 % too large, and so every gain that was predicted."""
    ends, peaks = steps(np.random.default_rng(seed))
    looks = np.arange(0.3, SECONDS - 1.0, INTERVAL_S)
    done = np.searchsorted(ends, looks)
    generated = (RUNNING * done).astype(np.float64)
    generated[200] = np.nan  # An engine did not tell it, and later one counts anew.
    generated[400:] -= generated[400]
    fit = fit_looks(looks, np.array(peaks)[done], np.full(len(looks), RUNNING), generated)
    assert fit is not None
    assert fit.us_per_token == pytest.approx(US_PER_TOKEN, rel=0.02)
    assert fit.base_ms == pytest.approx(BASE_MS, rel=0.05)
    assert fit.r2 > 0.95


def test_a_fleet_without_work_has_no_line() -> None:
    times = np.arange(100.0)
    nothing = np.zeros(100)
    assert fit_looks(times, nothing, nothing, nothing) is None
    assert fit_looks(times, np.full(100, 9.0), np.full(100, 4.0), 4.0 * times) is None


def test_engines_that_do_not_tell_their_tokens_have_no_line() -> None:
    times, loads = np.arange(100.0), np.full(100, 9.0)
    assert fit_looks(times, loads, loads, np.full(100, np.nan)) is None

"""Errors and lags that are known beforehand."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

from balanceroute.engine_patch.reader import read_steps
from balanceroute.proxy.lab.validate.traces import Timeline, timeline_of
from balanceroute.proxy.lab.validate.validation import errors, lag

if TYPE_CHECKING:
    from tests.lab.validate.conftest import WriteSteps

MS = 1_000_000
START_NS = 1_795_000_000_000_000_000


def test_the_distribution_of_a_known_error() -> None:
    truth = np.full(101, 10_000.0)
    proxy_loads = (10_000 + np.arange(101) * 10).astype(np.int64)
    found = errors(proxy_loads, truth, min_tokens=1)
    assert found is not None
    assert found.samples == 101
    assert (found.p50, found.p90, found.p99) == pytest.approx((0.05, 0.09, 0.099))
    assert (found.tokens_p50, found.tokens_p99) == pytest.approx((500, 990))
    assert found.bias == pytest.approx(0.05)


def test_the_bias_has_a_sign_and_the_error_has_none() -> None:
    found = errors(np.array([900] * 3), np.full(3, 1000.0), min_tokens=1)
    assert found is not None
    assert found.bias == pytest.approx(-0.1)
    assert found.p50 == pytest.approx(0.1)


def test_small_and_unknown_loads_do_not_count() -> None:
    truth = np.array([np.nan, 0.0, 99.0, 100.0])
    found = errors(np.array([5, 5, 5, 150]), truth, min_tokens=100)
    assert found is not None
    assert found.samples == 1
    assert found.p50 == pytest.approx(0.5)
    assert errors(np.array([5]), np.array([99.0]), min_tokens=100) is None
    assert errors(np.array([5]), np.array([np.nan]), min_tokens=1) is None


@pytest.fixture
def engine(write_steps: "WriteSteps") -> Timeline:
    """Ten seconds of a load that wanders, 10 ms a step."""
    rng = np.random.default_rng(3)
    loads = 50_000 + np.cumsum(rng.integers(-2_000, 2_000, 1000))
    return timeline_of(read_steps(write_steps("a", loads.tolist(), [10.0] * 1000)))


TIMES_NS = START_NS + np.arange(20, 9_980, 37) * MS


@pytest.mark.parametrize("lag_ms", [-730, -20, 0, 30, 110, 480, 1000])
def test_a_known_lag_is_found(engine: Timeline, lag_ms: int) -> None:
    # In the middle of a step, so that a shift is only good within half of one.
    times_ns = TIMES_NS // (10 * MS) * (10 * MS) + 5 * MS
    known = np.nan_to_num(engine.loads_at(times_ns - lag_ms * MS)).astype(np.int64)
    found = lag(times_ns, known, engine)
    assert found is not None
    assert abs(found.lag_ms - lag_ms) <= 5
    assert found.tokens_p50 == 0
    assert (found.unshifted_tokens_p50 > 0) == (lag_ms != 0)


def test_without_a_lag_none_is_made_up(engine: Timeline) -> None:
    found = lag(TIMES_NS, engine.loads_at(TIMES_NS).astype(np.int64), engine)
    assert found is not None
    assert found.lag_ms == 0


def test_no_lag_is_told_of_loads_that_never_change(write_steps: "WriteSteps") -> None:
    engine = timeline_of(read_steps(write_steps("a", [700] * 1000, [10.0] * 1000)))
    assert lag(TIMES_NS, np.full(len(TIMES_NS), 700), engine) is None


def test_no_lag_is_told_of_too_short_a_run(write_steps: "WriteSteps") -> None:
    engine = timeline_of(read_steps(write_steps("a", list(range(200)), [10.0] * 200)))
    times_ns = TIMES_NS[TIMES_NS < START_NS + 2000 * MS]
    assert lag(times_ns, engine.loads_at(times_ns).astype(np.int64), engine) is None


def test_samples_without_a_load_on_either_side_tell_nothing(write_steps: "WriteSteps") -> None:
    # Mostly idle: with the idle samples the median error would be zero at every shift.
    loads = [0] * 600 + list(range(1000, 101_000, 500)) + [0] * 600
    engine = timeline_of(read_steps(write_steps("a", loads, [10.0] * len(loads))))
    times_ns = START_NS + np.arange(5, 13_995, 30) * MS
    proxy_loads = np.nan_to_num(engine.loads_at(times_ns - 200 * MS)).astype(np.int64)
    found = lag(times_ns, proxy_loads, engine)
    assert found is not None
    assert abs(found.lag_ms - 200) <= 10

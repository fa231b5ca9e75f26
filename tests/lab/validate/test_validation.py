"""A barrier whose idle share is known."""

from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.engine_patch.reader import read_steps
from balanceroute.proxy.lab.validate.traces import Timeline, timeline_of
from balanceroute.proxy.lab.validate.validation import Fit, align, errors, fit_step_time, idle, lag

if TYPE_CHECKING:
    from tests.lab.validate.conftest import WriteSteps

FIT = Fit(base_ms=10.0, us_per_token=1.0, r2=1.0, steps=100, pauses=0)


def barrier(
    write_steps: "WriteSteps", *loads: list[int], prefill: list[int] | None = None
) -> list[Timeline]:
    """Return ranks whose steps take 10 ms and 1 µs per token of the heaviest."""
    step_ms = [10.0 + max(step) / 1e3 for step in zip(*loads, strict=True)]
    return [
        timeline_of(
            read_steps(write_steps(f"{rank}", row, step_ms, in_barrier=True, prefill=prefill or []))
        )
        for rank, row in enumerate(loads)
    ]


def test_the_idle_fraction_of_two_ranks(write_steps: "WriteSteps") -> None:
    aligned = align(barrier(write_steps, [10_000, 20_000], [30_000, 20_000]))
    assert aligned.loads.tolist() == [[10_000, 30_000], [20_000, 20_000]]
    assert aligned.step_ns.tolist() == [40e6, 30e6]
    found = idle(aligned, FIT)
    assert found is not None
    assert (found.ranks, found.steps) == (2, 2)
    # 20,000 tokens missing of 2 x (30,000 + 20,000); 20 ms lost of 2 x 70 ms.
    assert found.tokens == pytest.approx(0.2)
    assert found.time == pytest.approx(20 / 140)
    assert found.dummy == 0
    assert found.spread_ms_p50 == 0


def test_a_rank_without_requests_idles_in_dummy_batches(write_steps: "WriteSteps") -> None:
    found = idle(align(barrier(write_steps, [10_000, 10_000], [10_000, 0])), None)
    assert found is not None
    assert found.tokens == pytest.approx(0.25)
    assert found.dummy == pytest.approx(0.25)
    assert found.time is None


def test_steps_with_prefill_and_steps_of_nobody_do_not_count(write_steps: "WriteSteps") -> None:
    ranks = barrier(write_steps, [5, 10, 0], [5, 0, 0], prefill=[0, 100, 0])
    found = idle(align(ranks), FIT)
    assert found is not None
    assert (found.steps, found.tokens) == (1, 0)
    assert idle(align(barrier(write_steps, [0], [0])), FIT) is None


def test_only_steps_that_all_ranks_recorded_are_aligned(write_steps: "WriteSteps") -> None:
    first, second = barrier(write_steps, [1, 2, 3, 4], [5, 6, 7, 8])
    aligned = align([first.cut(np.array([True, True, True, False])), second.cut(second.place > 0)])
    assert aligned.loads.tolist() == [[2, 6], [3, 7]]


def test_ranks_without_a_step_in_common_align_to_nothing(write_steps: "WriteSteps") -> None:
    first, second = barrier(write_steps, [1, 2], [5, 6])
    aligned = align([first.cut(first.place == 0), second.cut(second.place == 1)])
    assert aligned.loads.shape == (0, 2)


def test_the_spread_of_the_ends(write_steps: "WriteSteps") -> None:
    paths = [
        write_steps("0", [9, 9, 9], [10.0] * 3, in_barrier=True),
        write_steps("1", [9, 9, 9], [10.0] * 3, gaps_ms={0: 4.0}, in_barrier=True),
    ]
    found = idle(align([timeline_of(read_steps(path)) for path in paths]), None)
    assert found is not None
    assert found.spread_ms_p50 == pytest.approx(4.0)


# A known line is found.


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


# Errors and lags that are known beforehand.


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

"""What a run measures: figures worked out by hand, and the bounds of the window."""

import dataclasses

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.lab.sim.recorder import PICTURE_STEPS, Recorder

SECOND = 1_000_000_000


def serve(
    recorder: Recorder,
    request: int,
    *,
    arrived_s: float = 0.0,
    prefilled_s: float = 0.0,
    joined_s: float = 0.0,
    first_s: float = 0.0,
    end_s: float = 0.0,
    tokens: int = 1,
) -> None:
    """Tell the recorder of the whole life of one request."""
    number = RequestId(request)
    recorder.arrived(number, round(arrived_s * SECOND))
    recorder.prefilled(number, round(prefilled_s * SECOND))
    recorder.joined(number, 1, round(joined_s * SECOND))
    recorder.first_token(number, round(first_s * SECOND))
    recorder.finish(number, tokens, round(end_s * SECOND))


def opened(num_requests: int = 10) -> Recorder:
    """Return a recorder whose window has just opened: a tenth of its requests have finished."""
    recorder = Recorder(num_requests)
    for request in range(-(-num_requests // 10)):
        serve(recorder, request, joined_s=9_999.0, tokens=2)
    recorder.dispatched(1_000)
    return recorder


def test_loads_give_imbalance_and_idle_fraction() -> None:
    recorder = opened()
    recorder.step([100, 60, 80], 3, SECOND, 0, {})  # Heaviest - lightest 40; idle 60 of 300.
    recorder.step([50, 50, 20], 2, SECOND, 0, {})  # 30; idle 30 of 150.
    recorder.step([0, 0, 50], 1, SECOND, 0, {})  # 50; idle 100 of 150.
    serve(recorder, 1, tokens=2)
    metrics = recorder.metrics()
    assert metrics.mean_imbalance_tokens == pytest.approx(40.0)
    assert metrics.idle_fraction == pytest.approx(190 / 600)
    assert metrics.steps == 3
    assert recorder.picture == [[100, 60, 80], [50, 50, 20], [0, 0, 50]]


def test_output_rate_is_tokens_over_step_time_and_time_without_work() -> None:
    recorder = opened()
    recorder.step([10, 10], 3, SECOND, 0, {})
    recorder.idle_time(SECOND // 2)
    recorder.step([10, 10], 7, SECOND, 0, {})
    serve(recorder, 1, tokens=2)
    assert recorder.metrics().output_tokens_per_s == pytest.approx(10 / 2.5)


def test_tpot_is_the_mean_gap_after_the_first_token() -> None:
    recorder = opened()
    recorder.step([1], 1, SECOND, 0, {})
    serve(recorder, 1, first_s=1.0, end_s=1.3, tokens=4)  # 0.1 s a token.
    serve(recorder, 2, first_s=0.0, end_s=0.2, tokens=2)  # 0.2 s.
    serve(recorder, 3, first_s=5.0, end_s=5.6, tokens=3)  # 0.3 s.
    metrics = recorder.metrics()
    assert metrics.tpot_ms_p50 == pytest.approx(200.0)
    assert metrics.tpot_ms_p95 == pytest.approx(290.0)
    assert metrics.requests == 3


def test_a_request_of_one_token_counts_but_has_no_tpot() -> None:
    recorder = opened()
    recorder.step([1], 1, SECOND, 0, {})
    serve(recorder, 1, first_s=0.0, end_s=0.2, tokens=2)
    serve(recorder, 2, first_s=3.0, end_s=3.0, tokens=1)
    metrics = recorder.metrics()
    assert metrics.requests == 2
    assert metrics.tpot_ms_p95 == pytest.approx(200.0)


def test_waits_run_from_the_end_of_prefill_to_the_batch() -> None:
    recorder = opened()
    recorder.step([1], 1, SECOND, 0, {})
    for request, wait_s in enumerate((3.0, 1.0, 2.0, 0.0), start=1):
        serve(recorder, request, prefilled_s=7.0, joined_s=7.0 + wait_s, tokens=2)
    metrics = recorder.metrics()
    assert metrics.pool_wait_s_p50 == pytest.approx(1.5)
    assert metrics.pool_wait_s_p99 == pytest.approx(2.97)
    assert metrics.pool_wait_s_max == pytest.approx(3.0)


def test_the_time_to_the_first_token_counts_from_the_arrival() -> None:
    recorder = opened()
    recorder.step([1], 1, SECOND, 0, {})
    for request, first_s in enumerate((4.0, 2.0, 3.0), start=1):
        serve(recorder, request, arrived_s=1.0, first_s=first_s, end_s=9.0, tokens=2)
    metrics = recorder.metrics()
    assert metrics.ttft_s_p50 == pytest.approx(2.0)
    assert metrics.ttft_s_p99 == pytest.approx(2.98)
    assert metrics.ttft_s_max == pytest.approx(3.0)


def test_after_a_lapse_a_request_waits_on() -> None:
    recorder = opened()
    recorder.step([1], 1, SECOND, 0, {})
    recorder.arrived(RequestId(1), 0)
    recorder.prefilled(RequestId(1), SECOND)
    recorder.lapsed()
    serve(recorder, 1, prefilled_s=4.0, joined_s=6.0, tokens=2)
    metrics = recorder.metrics()
    assert metrics.prefilled_s_p50 == metrics.prefilled_s_p99 == 1.0
    assert metrics.lease_lapses == 1
    assert metrics.pool_wait_s_max == pytest.approx(5.0)


def test_dispatch_cost_is_in_microseconds() -> None:
    recorder = opened()  # Which noted 1 us.
    recorder.step([1], 1, SECOND, 0, {})
    recorder.dispatched(3_000)
    serve(recorder, 1, tokens=2)
    metrics = recorder.metrics()
    assert metrics.dispatch_us_p50 == pytest.approx(2.0)
    assert metrics.dispatch_us_p99 == pytest.approx(2.98)


def test_a_recomputed_request_waits_twice_and_keeps_its_first_token() -> None:
    recorder = opened()
    recorder.step([1], 1, SECOND, 0, {})
    number = RequestId(1)
    recorder.arrived(number, 0)
    for prefilled_s, joined_s, first_s in ((0, 1, 2), (10, 13, 14)):
        recorder.prefilled(number, prefilled_s * SECOND)
        recorder.joined(number, 1, joined_s * SECOND)
        recorder.first_token(number, first_s * SECOND)
        if first_s == 2:
            recorder.recomputed(number, 1)
    recorder.finish(number, 9, 18 * SECOND)
    metrics = recorder.metrics()
    assert metrics.recomputes == 1
    assert metrics.pool_wait_s_max == pytest.approx(3.0)
    assert metrics.pool_wait_s_p50 == pytest.approx(2.0)
    assert metrics.tpot_ms_p50 == pytest.approx(2_000.0)  # 16 s for 8 tokens.


@pytest.mark.parametrize(("num_requests", "opening"), [(10, 1), (30, 3), (25, 3), (20, 2)])
def test_the_window_opens_once_a_tenth_has_finished(num_requests: int, opening: int) -> None:
    recorder = Recorder(num_requests, prefillers=3)
    recorder.dispatched(1)
    for request in range(opening):
        recorder.step([9, 1], 1, SECOND, 0, {})
        recorder.computed(PrefillerId(0), 900, 1_000)
        recorder.pulled(900, 1_000)
        recorder.held(900)
        recorder.recomputed(RequestId(request), 1)
        recorder.lapsed()
        recorder.idle_time(SECOND)
        # Waits and gaps of 100 s must not be seen, those of 1 s must.
        serve(recorder, request, joined_s=100.0, first_s=100.0, end_s=200.0, tokens=2)
    recorder.step([5, 3], 4, SECOND, 0, {})
    recorder.held(25)
    recorder.computed(PrefillerId(0), 10, 40)
    recorder.computed(PrefillerId(1), 20, 80)
    recorder.pulled(10, 40)
    recorder.pulled(50, 80)
    serve(recorder, opening, joined_s=1.0, first_s=1.0, end_s=2.0, tokens=2)
    metrics = recorder.metrics()
    assert dataclasses.asdict(metrics) == {
        "mean_imbalance_tokens": 2.0,
        "idle_fraction": 0.2,
        "mean_running": 4.0,
        "output_tokens_per_s": 4.0,
        "tpot_ms_p50": 1_000.0,
        "tpot_ms_p95": 1_000.0,
        "pool_wait_s_p50": 1.0,
        "pool_wait_s_p99": 1.0,
        "pool_wait_s_max": 1.0,
        "ttft_s_p50": 1.0,
        "ttft_s_p95": 1.0,
        "ttft_s_p99": 1.0,
        "ttft_s_max": 1.0,
        "latency_s_mean": 2.0,
        "steps": 1,
        "requests": 1,
        "recomputes": 0,
        "lease_lapses": 0,
        "dispatch_us_p50": 0.001,
        "dispatch_us_p99": 0.001,
        "refused": 0,
        "expired": 0,
        "prefill_tokens": 30,
        "prefix_hit_fraction": 0.75,
        "prefiller_peak": 2.0,
        "local_prefills": 0,
        "pulled_fraction": 0.5,
        "hottest_rank": 1.25,
        "prefilled_s_p50": 0.0,
        "prefilled_s_p99": 0.0,
        "held_tokens": 25.0,
    }


def test_the_window_closes_with_the_last_arrival() -> None:
    recorder = opened()
    recorder.step([4, 3], 2, SECOND, 0, {})
    serve(recorder, 1, joined_s=1.0, end_s=1.0, tokens=2)
    before = recorder.metrics()
    recorder.close(0)
    recorder.step([90, 1], 1, SECOND, 0, {})
    recorder.idle_time(SECOND)
    recorder.recomputed(RequestId(1), 1)
    recorder.lapsed()
    serve(recorder, 2, joined_s=50.0, end_s=50.0, tokens=2)
    assert recorder.metrics() == before
    assert recorder.ended == 3


def test_the_picture_has_a_bound_and_copies_the_loads() -> None:
    recorder = opened()
    loads = [0, 1]
    for step in range(PICTURE_STEPS + 5):
        loads[0] = step
        recorder.step(loads, 1, SECOND, 0, {})
    assert recorder.picture == [[step, 1] for step in range(PICTURE_STEPS)]


def test_an_empty_window_is_an_error_with_advice() -> None:
    number = RequestId(99)
    never_open = Recorder(40)
    no_step, no_finish = opened(40), opened(40)
    serve(no_step, 5, tokens=2)
    no_finish.step([1], 1, SECOND, 0, {})
    no_finish.arrived(number, 0)
    no_finish.prefilled(number, 0)
    no_finish.joined(number, 1, 0)
    no_join = Recorder(40)
    no_join.arrived(number, 0)
    no_join.prefilled(number, 0)
    no_join.joined(number, 1, 0)
    no_join.first_token(number, 0)
    for request in range(4):
        serve(no_join, request, tokens=2)
    no_join.step([1], 1, SECOND, 0, {})
    no_join.finish(number, 5, SECOND)
    for recorder in (never_open, no_step, no_finish, no_join):
        with pytest.raises(ConfigError, match=r"40 requests never reached a steady state: .*more"):
            recorder.metrics()

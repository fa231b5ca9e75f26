"""The figures, from times that are given."""

import dataclasses
import math

import numpy as np
import pytest

from balanceroute.proxy.lab.replay.figures import (
    STEADY_STATE,
    WHOLE_RUN,
    ReplayFault,
    ReplayFigures,
    ReplayRecorder,
    RequestSample,
)
from balanceroute.proxy.lab.replay.requests import PlannedRequest

MS = 1_000_000
S = 1_000_000_000
FAULT = ReplayFault("reset", "gone")


def request(number: int = 0, *, prompt: int = 100, output: int = 3) -> PlannedRequest:
    return PlannedRequest(number, 0, prompt, output)


def answered(
    recorder: ReplayRecorder,
    start_ns: int,
    *token_times_ns: int,
    asked: int | None = None,
    completion_tokens: int | None = None,
) -> RequestSample:
    """Play one request from its sending to its end, a token at each time."""
    asked = len(token_times_ns) if asked is None else asked
    sample = recorder.sent(request(output=asked), start_ns, start_ns)
    for time_ns in token_times_ns:
        recorder.tokens(sample, 1, time_ns)
    recorder.finish(
        sample, token_times_ns[-1], prompt_tokens=100, completion_tokens=completion_tokens
    )
    return sample


def figures(recorder: ReplayRecorder, *, time_scale: float = 1.0) -> ReplayFigures:
    return recorder.figures(time_scale=time_scale)


def test_a_request_is_measured_by_its_tokens_times() -> None:
    recorder = ReplayRecorder(1)
    sample = answered(recorder, 5 * MS, 25 * MS, 35 * MS, 75 * MS)
    assert (sample.ttft_ns, sample.ttst_ns) == (20 * MS, 30 * MS)
    assert sample.tpot_ns == 25 * MS
    assert sample.e2e_ns == 70 * MS
    got = figures(recorder)
    assert (got.ttft_ms_p50, got.tpot_ms_p50, got.itl_ms_p50) == (20.0, 25.0, 25.0)
    assert got.ttst_ms_p50 == 30.0
    assert got.e2e_s_p50 == pytest.approx(0.07)
    assert got.itl_ms_p99 == pytest.approx(10 + 0.99 * 30)


def test_tokens_that_come_together_have_gaps_of_nothing_between_them() -> None:
    recorder = ReplayRecorder(1)
    sample = recorder.sent(request(output=5), 0, 0)
    recorder.tokens(sample, 2, 10 * MS)
    recorder.tokens(sample, 3, 40 * MS)
    recorder.finish(sample, 40 * MS)
    got = figures(recorder)
    # 0, 30, 0, 0.
    assert got.itl_ms_p50 == 0.0
    assert got.itl_ms_p99 == pytest.approx(0.97 * 30)
    assert got.tpot_ms_p50 == pytest.approx(30 / 4)
    assert got.output_tokens == 5


def steady_run() -> ReplayRecorder:
    """Twenty requests, one every second, each with tokens 1, 2 and 3 s after it was sent.

    The second one to end does so at 4 s; the last one is sent at 19 s.
    """
    recorder = ReplayRecorder(20)
    samples: dict[int, RequestSample] = {}
    for second in range(23):
        # Those that came earlier end before the next one is sent.
        for number in range(max(0, second - 3), min(20, second)):
            recorder.tokens(samples[number], 1, second * S)
            if number == second - 3:
                recorder.finish(samples[number], second * S, completion_tokens=3)
        if second < 20:
            samples[second] = recorder.sent(request(second), second * S, second * S + second * MS)
    return recorder


def test_the_window_opens_at_a_tenth_and_closes_with_the_last_request_sent() -> None:
    recorder = steady_run()
    assert recorder.opened is not None
    assert recorder.closed is not None
    assert recorder.opened.time_ns == 4 * S
    assert recorder.closed.time_ns == 19 * S + 19 * MS
    got = figures(recorder)
    assert got.window == STEADY_STATE
    assert got.duration_s == pytest.approx(15.019)


def test_the_windows_figures_are_of_what_was_complete_inside_it() -> None:
    got = figures(steady_run())
    # At 4 s one request ends and opens the window. Two tokens come at that time afterwards: those of
    # requests 2 and 3. Then three a second, from 5 s to 19 s.
    assert got.output_tokens_per_s == pytest.approx((2 + 15 * 3) / 15.019)
    assert got.requests == 15
    assert got.requests_per_s == pytest.approx(15 / 15.019)
    assert got.request_rate == pytest.approx(16 / 15.019)
    assert got.finished == 20
    assert got.run_s == pytest.approx(22.0)
    # Of requests 3 to 18, each sent its number of milliseconds late.
    assert got.ttft_ms_p50 == pytest.approx(1000 - np.percentile(range(3, 19), 50))


def test_late_sending_is_told_for_the_whole_run() -> None:
    assert figures(steady_run()).send_late_ms_p99 == pytest.approx(np.percentile(range(20), 99))


def test_a_short_run_is_measured_as_a_whole_and_says_so() -> None:
    recorder = ReplayRecorder(2)
    first = recorder.sent(request(0), 0, 0)
    second = recorder.sent(request(1), 0, 1 * S)  # Sent before anything ended.
    for sample, second_ns in ((first, 2 * S), (second, 4 * S)):
        recorder.tokens(sample, 1, second_ns)
        recorder.finish(sample, second_ns)
    got = figures(recorder)
    assert got.window == WHOLE_RUN
    assert recorder.opened is None
    assert got.duration_s == got.run_s == 4.0
    assert got.requests == 2
    assert got.output_tokens_per_s == 0.5
    assert got.tpot_ms_p50 is None


def test_a_window_in_which_nothing_finished_is_no_steady_state() -> None:
    recorder = ReplayRecorder(2)
    answered(recorder, 0, 1 * S)
    answered(recorder, 2 * S, 4 * S)
    assert recorder.opened is not None
    assert figures(recorder).window == WHOLE_RUN


def test_a_window_of_no_length_is_no_steady_state() -> None:
    recorder = ReplayRecorder(3)
    samples = [recorder.sent(request(number), 0, 0) for number in range(2)]
    for sample in samples:
        recorder.tokens(sample, 1, S)
        recorder.finish(sample, S)
    answered(recorder, S, 2 * S)
    assert recorder.opened is not None
    assert figures(recorder).window == WHOLE_RUN


def test_gaps_and_first_tokens_before_the_window_do_not_count() -> None:
    recorder = ReplayRecorder(10)
    answered(recorder, 0, 50 * S, 90 * S)
    for second in range(100, 109):
        answered(recorder, second * S, second * S + 10 * MS, second * S + 30 * MS)
    got = figures(recorder)
    assert got.window == STEADY_STATE
    assert (got.itl_ms_p99, got.ttft_ms_p99, got.tpot_ms_p95) == (20.0, 10.0, 20.0)
    assert got.requests == 8


def test_an_event_of_the_window_stands_for_as_many_tokens_as_any_other() -> None:
    recorder = ReplayRecorder(3)
    answered(recorder, 0, 1 * S)
    sample = answered(recorder, 1 * S, 2 * S, 3 * S, completion_tokens=8)
    assert sample.window_events == 2
    answered(recorder, 5 * S, 6 * S)
    assert figures(recorder).output_tokens_per_s == 8 / 4


def test_nothing_sent_gives_no_figures() -> None:
    recorder = ReplayRecorder(5)
    recorder.close(3 * S)
    got = figures(recorder)
    assert got.output_tokens_per_s is None
    assert got.ttft_ms_p50 is None
    assert got.send_late_ms_p99 is None
    assert got.run_s == 0.0
    assert got.prompt_tokens == 0


def test_time_scale_turns_every_time_and_rate_into_the_targets() -> None:
    real, scaled = figures(steady_run()), figures(steady_run(), time_scale=10.0)
    for field in dataclasses.fields(ReplayFigures):
        before, after = getattr(real, field.name), getattr(scaled, field.name)
        if "_per_s" in field.name or field.name == "request_rate":
            assert after == pytest.approx(before / 10), field.name
        elif "_ms_" in field.name or field.name.endswith("_s") or "_s_" in field.name:
            assert after == pytest.approx(10 * before), field.name
        else:
            assert after == before, field.name


def test_an_event_stands_for_the_tokens_that_the_engine_counted() -> None:
    recorder = ReplayRecorder(1)
    answered(recorder, 0, 1 * S, 2 * S, asked=6, completion_tokens=6)
    got = figures(recorder)
    assert got.output_tokens == 6
    assert got.output_tokens_per_s == 3.0
    assert got.tpot_ms_p50 == 200.0
    assert got.itl_ms_p50 == 1000.0
    assert got.uneven_events == 1
    assert got.wrong_lengths == 0


def test_answers_of_another_length_than_asked_are_counted() -> None:
    recorder = ReplayRecorder(3)
    answered(recorder, 0, 1 * S, 2 * S, asked=2)
    answered(recorder, 3 * S, 4 * S, 5 * S, asked=7)
    answered(recorder, 6 * S, 7 * S, 8 * S, asked=1)
    got = figures(recorder)
    assert (got.wrong_lengths, got.uneven_events) == (2, 0)
    assert (got.output_tokens_asked, got.output_tokens) == (10, 6)


def test_the_engines_prompt_count_stands_beside_the_asked_one() -> None:
    recorder = ReplayRecorder(2)
    for counted in (104, 96):
        sample = recorder.sent(request(prompt=100), 0, 0)
        recorder.tokens(sample, 1, S)
        recorder.finish(sample, S, prompt_tokens=counted)
    assert (figures(recorder).prompt_tokens_asked, figures(recorder).prompt_tokens) == (200, 200)


def test_an_untold_prompt_count_is_unknown() -> None:
    recorder = ReplayRecorder(1)
    sample = recorder.sent(request(), 0, 0)
    recorder.tokens(sample, 1, S)
    recorder.finish(sample, S)
    assert figures(recorder).prompt_tokens is None


def test_failed_requests_keep_their_tokens_and_nothing_else() -> None:
    recorder = ReplayRecorder(2)
    answered(recorder, 0, 1 * S, 2 * S)
    sample = recorder.sent(request(1), 3 * S, 3 * S)
    recorder.tokens(sample, 1, 4 * S)
    recorder.fail(sample, 10 * S, FAULT)
    got = figures(recorder)
    assert (got.finished, got.errors, got.cancelled) == (1, 1, 0)
    assert got.output_tokens_per_s == pytest.approx(3 / 10)
    assert got.output_tokens == 2
    assert got.e2e_s_p50 == 2.0
    assert got.ttft_ms_p50 == 1000.0
    assert sample.fault == FAULT
    assert (sample.tpot_ns, sample.e2e_ns) == (None, None)


def test_a_cancelled_request_is_no_error() -> None:
    recorder = ReplayRecorder(3)
    answered(recorder, 0, 1 * S)
    sample = recorder.sent(request(1), S, S)
    recorder.close(2 * S)
    recorder.cancel(sample, 2 * S)
    got = figures(recorder)
    assert (got.finished, got.errors, got.cancelled) == (1, 0, 1)
    assert (recorder.ended, recorder.running, recorder.errors) == (2, 0, 0)


def test_failures_open_the_window_too() -> None:
    recorder = ReplayRecorder(10)
    sample = recorder.sent(request(), 0, 0)
    recorder.fail(sample, 7, FAULT)
    assert recorder.opened is not None
    assert recorder.opened.time_ns == 7


def test_a_window_that_was_closed_never_opens() -> None:
    recorder = ReplayRecorder(10)
    sample = recorder.sent(request(), 0, 0)
    recorder.close(5)
    recorder.close(6)
    recorder.fail(sample, 7, FAULT)
    assert recorder.opened is None
    assert recorder.closed is not None
    assert recorder.closed.time_ns == 5


def test_a_request_ends_only_once() -> None:
    recorder = ReplayRecorder(1)
    sample = answered(recorder, 0, S)
    with pytest.raises(AssertionError, match="ended twice"):
        recorder.fail(sample, 2 * S, FAULT)


def test_percentiles_are_those_of_all_gaps() -> None:
    recorder = ReplayRecorder(1)
    generator = np.random.default_rng(3)
    gaps = generator.integers(1, 10**9, size=2_000)
    answered(recorder, 0, *(int(time_ns) for time_ns in np.cumsum([S, *gaps])))
    got = figures(recorder)
    for name, percent in (("itl_ms_p50", 50), ("itl_ms_p95", 95), ("itl_ms_p99", 99)):
        assert math.isclose(getattr(got, name), np.percentile(gaps, percent) / 1e6), name

"""Segments of a trace: how it is cut, what comes before, and how fast it is played."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.sim.workload import MIN_SEGMENT_REQUESTS, playable, scaled, split
from balanceroute.traces import TraceRequest


def trace(size: int, *, gap_ns: int = 1_000) -> list[TraceRequest]:
    """Return requests whose prompts and outputs tell their place."""
    return [TraceRequest(gap_ns * i, 100 + i, 1 + i) for i in range(size)]


@given(size=st.integers(20, 200), segments=st.integers(1, 10))
def test_segments_are_consecutive_and_equal_and_know_all_that_came_before(
    size: int, segments: int
) -> None:
    requests = trace(size)
    if size // segments < MIN_SEGMENT_REQUESTS:
        with pytest.raises(ConfigError):
            split(requests, segments=segments, rate=1.0)
        return
    workloads = split(requests, segments=segments, rate=1.0)
    assert len(workloads) == segments
    assert {len(workload.requests) for workload in workloads} == {size // segments}
    played = [request for workload in workloads for request in workload.requests]
    assert played == requests[: len(played)]
    assert len(requests) - len(played) < segments
    begin = 0
    for workload in workloads:
        assert list(workload.history) == requests[:begin]
        begin += len(workload.requests)


@pytest.mark.parametrize(
    ("rate", "second_ns", "last_ns"),
    [(1.0, 1_000, 19_000), (2.0, 500, 9_500), (0.25, 4_000, 76_000), (3.0, 333, 6_333)],
)
def test_arrivals_begin_at_zero_and_are_divided_by_the_rate(
    rate: float, second_ns: int, last_ns: int
) -> None:
    for workload in split(trace(40), segments=2, rate=rate):
        arrivals = workload.arrivals_ns()
        assert len(arrivals) == 20
        assert (arrivals[0], arrivals[1], arrivals[-1]) == (0, second_ns, last_ns)
        assert arrivals == sorted(arrivals)


def test_a_segment_is_open_loop_or_saturated() -> None:
    (open_loop,) = split(trace(20), segments=1, rate=2.5)
    (saturated,) = split(trace(20), segments=1, backlog=7)
    assert (open_loop.rate, open_loop.backlog) == (2.5, None)
    assert saturated.backlog == 7


def test_requests_without_output_are_not_playable_and_empty_prompts_count_as_one_token() -> None:
    recorded = [
        TraceRequest(0, 5, 6),
        TraceRequest(1, 5, 0),
        TraceRequest(2, 0, 6, (9,)),
        TraceRequest(3, 0, 0),
    ]
    assert playable(recorded) == [TraceRequest(0, 5, 6), TraceRequest(2, 1, 6, (9,))]


@pytest.mark.parametrize(
    ("segments", "rate", "backlog", "message"),
    [
        (1, None, None, "give one of a rate, a backlog and a concurrency"),
        (1, 1.0, 8, "give one of a rate, a backlog and a concurrency"),
        (1, 0.0, None, "rate is 0.0, must be"),
        (1, -1.0, None, "rate is -1.0, must be"),
        (1, math.nan, None, "rate is nan, must be"),
        (1, math.inf, None, "rate is inf, must be"),
        (1, 1e-300, None, "rate is 1e-300, must be from 1e-06 to 1e"),
        (1, None, 0, "backlog is 0, must be at least 1"),
        (1, None, -3, "backlog is -3, must be at least 1"),
        (0, 1.0, None, "segments is 0, must be at least 1"),
        (-1, 1.0, None, "segments is -1, must be at least 1"),
        (3, 1.0, None, "40 requests with output make segments of 13, .* needs at least 20"),
        (50, 1.0, None, "make segments of 0"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(
    segments: int, rate: float | None, backlog: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split(trace(40), segments=segments, rate=rate, backlog=backlog)


def test_an_empty_trace_is_too_short() -> None:
    with pytest.raises(ConfigError, match="0 requests with output make segments of 0"):
        split([], segments=1, rate=1.0)


def test_what_is_only_known_is_not_replayed_but_remembered() -> None:
    requests = trace(100)
    first, second = split(requests, segments=2, rate=1.0, known=40)
    assert list(first.history) == requests[:40]
    assert list(first.requests) == requests[40:70]
    assert list(second.history) == requests[:70]
    assert list(second.requests) == requests[70:]


def test_what_is_known_counts_for_no_segment() -> None:
    with pytest.raises(ConfigError, match="10 requests with output make segments of 10"):
        split(trace(50), segments=1, rate=1.0, known=40)


def test_outputs_are_scaled_with_their_limits() -> None:
    recorded = [TraceRequest(0, 5, 6, max_tokens=8), TraceRequest(1, 5, 1)]
    assert scaled(recorded, 2.5) == [TraceRequest(0, 5, 15, max_tokens=20), TraceRequest(1, 5, 2)]
    assert [one.output_tokens for one in scaled(recorded, 0.01)] == [1, 1]

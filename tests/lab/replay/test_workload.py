"""Which requests are sent, and when."""

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay.requests import PlannedRequest, due_s, plan
from balanceroute.traces import TraceRequest

TRACE = [
    TraceRequest(0, 100, 10, (1, 2)),
    TraceRequest(1_000_000_000, 0, 20),
    TraceRequest(2_000_000_000, 300, 0),  # It failed when it was recorded.
    TraceRequest(4_000_000_000, 400, 40),
]


def test_the_whole_trace_is_taken_with_numbers_of_the_trace() -> None:
    assert plan(TRACE) == [
        PlannedRequest(0, 0, 100, 10, (1, 2)),
        PlannedRequest(1, 1_000_000_000, 1, 20),
        PlannedRequest(3, 4_000_000_000, 400, 40),
    ]


def test_skipped_requests_do_not_renumber_the_others() -> None:
    assert [request.number for request in plan(TRACE, skip=1, count=2)] == [1]
    assert [request.number for request in plan(TRACE, skip=1, count=3)] == [1, 3]


def test_long_prompts_and_answers_are_cut() -> None:
    chosen = plan(TRACE, max_prompt_tokens=100, max_output_tokens=20)
    assert [request.prompt_tokens for request in chosen] == [100, 1, 100]
    assert [request.output_tokens for request in chosen] == [10, 20, 20]


@pytest.mark.parametrize(("skip", "count"), [(4, None), (9, None), (2, 1)])
def test_nothing_to_send_is_an_error(skip: int, count: int | None) -> None:
    with pytest.raises(ConfigError, match="no request to send: the trace has 4"):
        plan(TRACE, skip=skip, count=count)


def test_times_start_at_the_first_request_sent() -> None:
    assert due_s(plan(TRACE, skip=1), speed=1.0) == [0.0, 3.0]


def test_speed_divides_the_times() -> None:
    assert due_s(plan(TRACE), speed=4.0) == [0.0, 0.25, 1.0]

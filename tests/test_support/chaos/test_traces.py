"""The judge of traces finds what is lost, doubled, or out of place."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.chaos.plan import draw_plan
from tests.support.chaos.traces import SpanCollector, draw_collector
from tests.support.chaos.trial import run_plan

from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord, Trace
from balanceroute.proxy.live.tracing.exporter import spans_of

SPAN_ID = "00000000000000a0"
PAGE = b'balanceroute_traces_dropped_total{reason="refused"} 1\n'


def record() -> RequestRecord:
    one = RequestRecord("r", "/v1/completions", 5, 0.0, outcome=Outcome.OK, status=200)
    one.prefill_started_ns, one.prefilled_ns, one.admitted_ns, one.ended_ns = 6, 7, 8, 9
    one.trace = Trace("0" * 31 + "1", SPAN_ID)
    return one


def found(change: Any = None, *, page: bytes = b"") -> list[str]:
    ended = [record()]
    spans = json.loads(f"[{spans_of(ended[0])}]")
    if change is not None:
        change(spans)

    async def judge() -> list[str]:
        collector = SpanCollector((200,))
        collector.spans = spans
        return collector.audit(ended, page)

    return asyncio.run(judge())


def test_a_whole_trace_is_right() -> None:
    assert found() == []


def test_a_dropped_trace_is_right_if_it_was_counted() -> None:
    assert found(list.clear, page=PAGE) == []
    assert found(list.clear) == ["traces: 1 ended, 0 came and 0 were dropped"]
    assert found(page=PAGE) == ["traces: 1 ended, 1 came and 1 were dropped"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spans: spans.append(spans[0]), "was sent 2 times"),
        (lambda spans: spans[0].update(spanId="b"), "no request has span b"),
        (lambda spans: spans[1].update(parentSpanId="b"), "has no parent"),
        (lambda spans: spans[1].update(traceId="b"), "of another trace than its parent"),
        (lambda spans: spans[1].update(startTimeUnixNano=4), "is not within its parent"),
    ],
)
def test_what_is_wrong_is_found(change: Any, said: str) -> None:
    assert any(said in line for line in found(change))


def test_a_run_with_traces() -> None:
    seed = next(seed for seed in range(100) if set(draw_collector(seed)) > {200})
    report = run_plan(draw_plan(seed, requests=15))
    assert not report.violations
    assert report.counters["spans"]

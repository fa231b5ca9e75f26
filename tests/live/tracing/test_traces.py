"""Traces of whole requests, as a collector gets them; one process and several."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from tests.live.opcodes import counted, share
from tests.live.tracing.otlp import URL, Collector, plain
from tests.support.played import played_by
from tests.support.site import Site, answering, play

from balanceroute.proxy.live.tracing import exporter
from balanceroute.proxy.live.tracing.exporter import DELAY_S
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 20, "ignore_eos": True}
STREAM = BODY | {"stream": True}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
PARENT = [(b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01".encode())]
SERVER, CLIENT = 2, 3
ERROR = 2

Traced = Callable[[Site, Collector], Awaitable[None]]


def play_traced(scenario: Traced, **flags: Any) -> None:
    """Play a scenario with a collector there."""

    async def whole(site: Site) -> None:
        collector = Collector()
        await collector.start()
        await scenario(site, collector)
        await collector.close()

    play(whole, flags={"otlp_traces_endpoint": URL, **flags})


traced = played_by(play_traced, places=2)


async def took(site: Site, collector: Collector, count: int = 1) -> list[Any]:
    """Wait until the collector has the spans of so many requests; return those, one each."""

    def own() -> list[Any]:
        return [span for span in collector.spans if span.kind == SERVER]

    await site.until(lambda: len(own()) >= count)
    return own()


def children(collector: Collector, span: Any) -> list[Any]:
    return [one for one in collector.spans if one.parent_span_id == span.span_id]


@traced()
async def test_a_request_has_a_span_with_a_child_for_each_stage(
    site: Site, collector: Collector
) -> None:
    headers = [*PARENT, (b"x-request-id", b"r1"), (b"tracestate", b"v=1")]
    await site.post(COMPLETIONS, STREAM, headers)
    (span,) = await took(site, collector)
    (record,) = site.world.ended
    assert span.name == COMPLETIONS
    assert span.trace_id.hex() == TRACE_ID == record.trace_id
    assert span.parent_span_id.hex() == PARENT_ID
    assert span.trace_state == "v=1"
    told = plain(span.attributes)
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.usage.input_tokens"] == 3
    assert told["gen_ai.usage.output_tokens"] == 20
    assert told["balanceroute.request_id"] == "r1"
    assert told["balanceroute.outcome"] == "ok"
    assert told["balanceroute.stream"] is True
    assert (told["balanceroute.prefiller"], told["balanceroute.rank"]) == (
        record.prefiller,
        record.rank,
    )
    stages = children(collector, span)
    assert [one.name for one in stages] == ["queue", "prefill", "pool", "transfer", "decode"]
    engines = [plain(one.attributes).get("balanceroute.engine") for one in stages]
    assert engines == [None, record.prefiller, None, record.rank, record.rank]
    assert [one.kind == CLIENT for one in stages] == [False, True, False, True, True]
    # They follow each other without a gap, and are the times of the log.
    assert stages[0].start_time_unix_nano == span.start_time_unix_nano
    assert stages[-1].end_time_unix_nano == span.end_time_unix_nano
    for before, after in pairwise(stages):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    epoch_ns = round(record.arrived_unix_s * 1e9) - record.arrived_ns
    assert stages[1].end_time_unix_nano == epoch_ns + (record.prefilled_ns or 0)
    assert stages[3].end_time_unix_nano == epoch_ns + (record.first_token_ns or 0)
    (first,) = span.events
    assert (first.name, first.time_unix_nano) == ("first token", stages[4].start_time_unix_nano)
    assert collector.resources[0]["service.name"] == "balanceroute"


@traced()
async def test_engines_get_the_span_as_their_parent(site: Site, collector: Collector) -> None:
    await site.post(COMPLETIONS, BODY, PARENT)
    await site.post("/v1/embeddings", {"model": "tiny", "input": "t1"})
    first, second = await took(site, collector, 2)
    given = [
        seen.header(b"traceparent")
        for role in ("prefill", "decode")
        for seen in site.received(role)
    ]
    whole = f"00-{TRACE_ID}-{first.span_id.hex()}-01".encode()
    alone = f"00-{second.trace_id.hex()}-{second.span_id.hex()}-01".encode()
    assert given == [whole, alone, whole]
    assert [one.name for one in children(collector, first)][-1] == "decode"
    assert [one.name for one in children(collector, second)] == ["queue", "engine"]
    assert not second.parent_span_id


@traced(trace_share=0.0)
async def test_of_a_request_that_is_not_traced_engines_hear_so(
    site: Site, collector: Collector
) -> None:
    await site.post(COMPLETIONS, BODY)
    await site.post(COMPLETIONS, BODY, PARENT)
    (span,) = await took(site, collector)
    assert span.trace_id.hex() == TRACE_ID
    flags = [(seen.header(b"traceparent") or b"")[-2:] for seen in site.received("decode")]
    assert flags == [b"00", b"01"]
    assert all(record.trace_id for record in site.world.ended)


@traced()
async def test_what_fails_on_the_way_is_an_event_and_a_stage_of_its_own(
    site: Site, collector: Collector
) -> None:
    def fail(engine: str, request: HttpRequest, reply: Reply) -> None:
        del request
        site.handlers.clear()
        assert engine.startswith("prefill")
        reply.send(500, [], b'{"error": {"message": "no"}}')

    site.handlers[COMPLETIONS.encode()] = fail
    await site.post(COMPLETIONS, STREAM)
    (span,) = await took(site, collector)
    stages = children(collector, span)
    names = ["queue", "prefill", "backoff", "queue", "prefill", "pool", "transfer", "decode"]
    assert [one.name for one in stages] == names
    assert [one.status.code == ERROR for one in stages] == [False, True, *[False] * 6]
    assert stages[1].status.message == "status 500: no"
    failed, again, first = sorted(span.events, key=lambda event: event.time_unix_nano)
    names = ["prefill failed", "queue again", "first token"]
    assert [one.name for one in (failed, again, first)] == names
    assert plain(failed.attributes) == {"balanceroute.reason": "status 500: no"}
    assert plain(span.attributes)["balanceroute.retries"] == 1
    assert not span.status.code


@traced()
async def test_a_refused_request_has_a_span_alone(site: Site, collector: Collector) -> None:
    await site.post("/nothing/of/ours", BODY, PARENT)
    await site.post(COMPLETIONS, BODY | {"max_tokens": -1})
    unknown, invalid = await took(site, collector, 2)
    assert (unknown.name, invalid.name) == ("HTTP", COMPLETIONS)
    told = [plain(one.attributes) for one in (unknown, invalid)]
    assert [one["http.response.status_code"] for one in told] == [404, 400]
    assert [one["error.type"] for one in told] == ["client_error"] * 2
    assert unknown.trace_id.hex() == TRACE_ID
    # What a client does wrong is no error of the server.
    assert not unknown.status.code


@traced()
async def test_a_request_that_the_engines_fail_is_an_error(
    site: Site, collector: Collector
) -> None:
    site.handlers[COMPLETIONS.encode()] = answering(500, b'{"error": {"message": "no"}}', kind=None)
    await site.post(COMPLETIONS, BODY)
    (span,) = await took(site, collector)
    assert span.status.code == ERROR
    assert plain(span.attributes)["error.type"] == "upstream_error"
    assert [one.name for one in span.events][::2] == ["prefill failed"] * 3


# What becomes of them on the way.


def metric(site: Site, name: str) -> float:
    page = site.world.plane.metrics.render().decode()
    lines = [line.split() for line in page.splitlines() if line.startswith(f"balanceroute_{name}")]
    return sum(float(value) for _, value in lines)


@traced()
async def test_spans_wait_for_others(site: Site, collector: Collector) -> None:
    began_s = site.loop.time()
    exchanges = [site.send(COMPLETIONS, BODY) for _ in range(10)]
    for exchange in exchanges:
        await exchange.end()
    await took(site, collector, 10)
    assert len(collector.requests) == 1
    assert site.loop.time() - began_s < DELAY_S + 2.0
    assert metric(site, "traces_exported_total") == 10


@traced()
async def test_a_busy_collector_gets_them_again_when_it_asks_for_them(
    site: Site, collector: Collector
) -> None:
    collector.answers = [(503, [(b"retry-after", b"20")]), (429, [])]
    await site.post(COMPLETIONS, BODY)
    began_s = site.loop.time()
    await took(site, collector)
    assert 20.0 < site.loop.time() - began_s < 30.0
    assert len({request.body for request in collector.requests}) == 1
    assert len(collector.requests) == 3
    assert metric(site, "traces_dropped_total") == 0


def test_what_a_collector_refuses_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site, collector: Collector) -> None:
        collector.answers = [(400, [])]
        await site.post(COMPLETIONS, BODY)
        await asyncio.sleep(2 * DELAY_S)
        assert metric(site, 'traces_dropped_total{reason="refused"}') == 1
        await site.post(COMPLETIONS, BODY)
        await took(site, collector)
        assert len(collector.requests) == 2
        assert metric(site, "traces_exported_total") == 1

    play_traced(scenario)
    assert [one.message for one in caplog.records] == ["traces are not exported"]


def test_a_collector_that_is_gone_costs_nothing_but_the_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "MOST_WAITING", 5)

    async def scenario(site: Site) -> None:
        for exchange in [site.send(COMPLETIONS, BODY) for _ in range(8)]:
            await exchange.end()
            assert exchange.status == 200
        await asyncio.sleep(300.0)
        assert metric(site, 'traces_dropped_total{reason="queue_full"}') == 3
        assert metric(site, 'traces_dropped_total{reason="unreachable"}') == 5
        assert metric(site, "traces_exported_total") == 0

    play(scenario, flags={"otlp_traces_endpoint": URL})


def test_a_full_batch_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "BATCH", 4)

    async def scenario(site: Site, collector: Collector) -> None:
        for exchange in [site.send(COMPLETIONS, BODY) for _ in range(9)]:
            await exchange.end()
        began_s = site.loop.time()
        await took(site, collector, 8)
        assert site.loop.time() - began_s < DELAY_S / 2
        await took(site, collector, 9)
        assert len(collector.requests) == 3

    play_traced(scenario)


def test_what_waits_at_the_end_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "DELAY_S", 1_000.0)
    collector = Collector()

    async def scenario(site: Site) -> None:
        await collector.start()
        await site.post(COMPLETIONS, BODY)
        assert not collector.requests
        close = site.world.close_proxy

        async def close_all() -> None:
            await close()
            await collector.close()

        monkeypatch.setattr(site.world, "close_proxy", close_all)

    play(scenario, flags={"otlp_traces_endpoint": URL})
    assert next(span.name for span in collector.spans) == COMPLETIONS


def test_the_end_does_not_wait_for_a_collector_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "DELAY_S", 1_000.0)

    async def scenario(site: Site) -> None:
        await site.post(COMPLETIONS, BODY)
        close = site.world.close_proxy

        async def close_and_look() -> None:
            began_s = site.loop.time()
            await close()
            assert site.loop.time() - began_s < 0.5
            assert metric(site, 'traces_dropped_total{reason="closed"}') == 1

        monkeypatch.setattr(site.world, "close_proxy", close_and_look)

    play(scenario, flags={"otlp_traces_endpoint": URL})


# What traces cost: opcodes that the proxy executes for a request, which a busy machine does not change.


# What there is for traces alone.
OF_TRACES = ("live/tracing/", "live/request/session_trace.py", "live/telemetry/stages.py")
COUNTED: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 1,
    "ignore_eos": True,
}
REQUESTS = 32


def opcodes_of(*, traced: bool, stream: bool) -> "Counter[str]":
    """Return the opcodes of some requests, by file."""
    opcodes = Counter[str]()

    async def scenario(site: Site) -> None:
        collector = Collector()
        await collector.start()
        await site.post("/v1/completions", COUNTED | {"stream": stream})  # What is made once.
        with counted(opcodes):
            for _ in range(REQUESTS):
                await site.post("/v1/completions", COUNTED | {"stream": stream})
        await collector.close()

    play(scenario, flags={"otlp_traces_endpoint": URL} if traced else {})
    return opcodes


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_is_a_small_part_of_the_shortest_request(stream: bool) -> None:
    off = opcodes_of(traced=False, stream=stream)
    on = opcodes_of(traced=True, stream=stream)
    assert (on - off).total() < 0.06 * share(off)  # It is 4.7 % (Python 3.11) to 5.1 % (3.13).
    # Off, nothing of it is executed.
    assert not [name for name in off if name.startswith(OF_TRACES)]


def test_without_traces_nothing_that_exports_them_is_imported() -> None:
    program = "import sys; from balanceroute.proxy.live import serve; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert b"balanceroute.proxy.live.serve" in found.stdout
    assert b"balanceroute.proxy.live.tracing.exporter" not in found.stdout
    assert b"balanceroute.proxy.live.tracing.exporter" not in found.stdout

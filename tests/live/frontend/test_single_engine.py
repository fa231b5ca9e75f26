"""Requests that one engine answers alone: bounds, retries, long answers, and what is noted of them."""

import asyncio
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.site import Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"
BATCH = "/v1/chat/completions/batch"
BODY = {"model": "tiny", "input": "t1 t2"}
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Held:
    """An engine's route that answers when it is told to."""

    def __init__(self) -> None:
        self.replies: list[tuple[str, Reply]] = []
        self.left = 0

    def __call__(self, engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        self.replies.append((engine, reply))
        reply.on_closed = self._leave

    def _leave(self) -> None:
        self.left += 1

    def answer(self) -> None:
        """Answer the oldest."""
        self.replies.pop(0)[1].send(200, JSON, b"{}")


async def samples(site: Site, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric, by the values of their labels."""
    page = (await site.get("/metrics")).body.decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"balanceroute_{name}"
    }


@served()
async def test_each_is_logged_and_counted(site: Site) -> None:
    """Neither a line nor a count, and no duration."""
    headers = [(b"x-request-id", b"mine"), (b"user-agent", b"curl/8")]
    answer = await site.post(EMBEDDINGS, BODY, headers)
    assert answer.status == 200
    assert answer.header(b"x-request-id") == b"mine"
    (record,) = site.world.ended
    assert (record.endpoint, record.outcome, record.status) == (EMBEDDINGS, Outcome.OK, 200)
    assert (record.request_id, record.user_agent) == ("mine", "curl/8")
    assert record.prefiller in site.fleet.prefill_urls
    assert record.rank == ""
    assert record.prompt_tokens == 2
    assert record.ended_ns > record.arrived_ns
    assert await samples(site, "requests_total") == {(EMBEDDINGS, "other", "ok", "200"): 1}
    assert await samples(site, "single_engine_request_duration_seconds_count") == {(): 1}
    assert await samples(site, "e2e_request_latency_seconds_count") == {}


@served(flags={"single_engine_limit": 2, "queue_limit": 3})
async def test_a_prefiller_works_on_so_many_and_the_others_wait(site: Site) -> None:
    """Each request opened a connection of its own, without a bound."""
    held = Held()
    site.handlers[EMBEDDINGS.encode()] = held
    exchanges = [site.send(EMBEDDINGS, BODY) for _ in range(7)]
    await site.until(lambda: len(held.replies) == 4)
    await asyncio.sleep(1.0)
    assert sorted(engine for engine, _ in held.replies) == ["prefill/0"] * 2 + ["prefill/1"] * 2
    assert (await site.get("/load")).json == {"server_load": 7}
    # Two more may not wait, beside the three that do.
    refused = await site.post(EMBEDDINGS, BODY)
    assert refused.status == 429
    assert refused.header(b"retry-after") == b"1"
    assert site.world.ended[-1].outcome is Outcome.REJECTED
    for _ in exchanges:
        await site.until(lambda: bool(held.replies))
        held.answer()
    for exchange in exchanges:
        assert (await exchange.end()).status == 200


@served(flags={"single_engine_limit": 1})
async def test_who_leaves_while_it_waits_is_forgotten(site: Site) -> None:
    held = Held()
    site.handlers[EMBEDDINGS.encode()] = held
    first = [site.send(EMBEDDINGS, BODY) for _ in range(2)]
    await site.until(lambda: len(held.replies) == 2)
    second = site.send(EMBEDDINGS, BODY)
    await site.until(lambda: site.world.proxy.deployment.pass_through.in_flight == 3)
    second.call.abort()
    await site.until(lambda: len(site.world.ended) == 1)
    assert site.world.ended[0].outcome is Outcome.CANCELLED
    held.answer()
    held.answer()
    for exchange in first:
        assert (await exchange.end()).status == 200
    assert len(site.seen) == 2


@served(flags={"single_engine_limit": 1, "prefill_timeout_s": 5.0})
async def test_who_waits_too_long_is_refused(site: Site) -> None:
    replies: list[Reply] = []

    def begin(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, EVENTS)
        replies.append(reply)

    site.handlers[BATCH.encode()] = begin
    running = [site.send(BATCH, {"messages": []}) for _ in range(2)]
    await site.until(lambda: len(replies) == 2)
    waiting = site.send(BATCH, {"messages": []})
    for _ in range(6):
        for reply in replies:
            reply.write(b"data: 1\n\n")
        await asyncio.sleep(1.0)
    refused = await waiting.end()
    assert refused.status == 503
    assert "no prefiller was free" in refused.json["error"]["message"]
    assert site.world.ended[0].outcome is Outcome.EXPIRED
    for reply in replies:
        reply.end()
    for exchange in running:
        assert (await exchange.end()).error is None


@pytest.mark.parametrize("status", [429, 500, 503])
@served()
async def test_another_prefiller_is_asked_if_one_is_busy_or_fails(site: Site, status: int) -> None:
    """A 429 or 5xx of one prefiller was the answer."""

    def moody(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        good = len(site.seen) > 1
        reply.send(200 if good else status, JSON, engine.encode())

    site.handlers[TOKENIZE.encode()] = moody
    answer = await site.post(TOKENIZE, BODY)
    assert (answer.status, answer.body) == (200, site.seen[1].engine.encode())
    assert site.seen[0].engine != site.seen[1].engine
    assert site.world.ended[0].retries == 1
    retried = await samples(site, "retries_total")
    assert retried["single_engine", "server_error"] == 1


@pytest.mark.parametrize(("status", "asked"), [(501, 1), (500, 2), (429, 2), (400, 1)])
@served()
async def test_what_no_other_prefiller_mends_is_passed_on(
    site: Site, status: int, asked: int
) -> None:
    body = b'{"error":{"message":"not today","code":%d}}' % status
    site.handlers[TOKENIZE.encode()] = lambda _engine, _request, reply: reply.send(
        status, JSON, body
    )
    answer = await site.post(TOKENIZE, BODY)
    assert (answer.status, answer.body) == (status, body)
    assert len(site.seen) == asked
    (record,) = site.world.ended
    assert record.reason == f"the engine answered {status}: not today"
    failed = status == 500
    assert record.outcome is (Outcome.UPSTREAM_ERROR if failed else Outcome.CLIENT_ERROR)


@served(flags={"health_interval_s": 1000.0})
async def test_a_broken_connection_is_told_to_the_health_checks(site: Site) -> None:
    """Failures of these requests were told to nobody."""
    site.fleet.kill("prefill/0")
    for _ in range(2):
        assert (await site.post(TOKENIZE, {"model": "tiny", "prompt": "t1"})).status == 200
    statuses = [p["status"] for p in (await site.state())["prefillers"]]
    assert statuses == ["quarantined", "up"]


@served()
async def test_a_silent_engine_that_is_quarantined_loses_its_requests(site: Site) -> None:
    held = Held()
    site.handlers[EMBEDDINGS.encode()] = held
    exchange = site.send(EMBEDDINGS, BODY)
    await site.until(lambda: len(held.replies) == 1)
    engine, _ = held.replies.pop()
    number = int(engine[-1])
    prefiller = site.world.proxy.deployment.instances.prefillers[number]
    site.world.proxy.deployment._health_changed(prefiller.target, False, "gone")
    await site.until(lambda: bool(held.replies))
    assert held.replies[0][0] == f"prefill/{1 - number}"
    held.answer()
    assert (await exchange.end()).status == 200
    site.world.proxy.deployment._health_changed(prefiller.target, True, "back")


@served()
async def test_a_long_answer_is_relayed_as_it_comes(site: Site) -> None:
    piece = b"x" * 40_000
    replies: list[Reply] = []

    def begin(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, JSON)
        reply.write(piece)
        reply.write(piece)
        replies.append(reply)

    site.handlers[EMBEDDINGS.encode()] = begin
    exchange = site.send(EMBEDDINGS, BODY)
    await site.until(lambda: exchange.status == 200)
    await site.until(lambda: len(exchange.body) == 80_000)
    replies[0].write(b"end")
    replies[0].end()
    assert (await exchange.end()).body == piece + piece + b"end"
    assert exchange.error is None
    assert site.world.ended[0].outcome is Outcome.OK


@pytest.mark.parametrize("breaks", [False, True])
@served()
async def test_a_stream_is_relayed_event_by_event_and_its_breaking_off_is_shown(
    site: Site, breaks: bool
) -> None:
    replies: list[Reply] = []

    def begin(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, EVENTS)
        reply.write(b"data: 1\n\n")
        replies.append(reply)

    site.handlers[BATCH.encode()] = begin
    exchange = site.send(BATCH, {"messages": [], "stream": True})
    await exchange.until_events(1)
    replies[0].write(b"data: 2\n\n")
    await exchange.until_events(2)
    if breaks:
        replies[0].abort()
    else:
        replies[0].end()
    await exchange.end()
    (record,) = site.world.ended
    assert len(site.seen) == 1
    assert exchange.status == 200
    if breaks:
        assert exchange.error is not None
        assert b'"error"' in exchange.events[-1]
        assert record.outcome is Outcome.UPSTREAM_ERROR
    else:
        assert exchange.error is None
        assert len(exchange.events) == 2
        assert record.outcome is Outcome.OK
    assert record.stream


@served(flags={"idle_stream_timeout_s": 9.0})
async def test_a_relayed_answer_that_stands_still_is_cut(site: Site) -> None:
    def begin(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, EVENTS)
        reply.write(b"data: 1\n\n")

    site.handlers[BATCH.encode()] = begin
    begin_s = site.loop.time()
    answer = await site.post(BATCH, {"messages": []})
    assert site.loop.time() - begin_s == pytest.approx(9.0, abs=0.1)
    assert b"no answer within 9 s" in answer.events[-1]
    assert site.world.ended[0].outcome is Outcome.UPSTREAM_ERROR


@served()
async def test_a_slow_reader_pauses_the_engine(site: Site) -> None:
    written: list[Reply] = []

    def pour(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, JSON)
        written.append(reply)

    site.handlers[EMBEDDINGS.encode()] = pour
    exchange = site.send(EMBEDDINGS, BODY)
    await site.until(lambda: bool(written))
    reply = written[0]
    reply.write(b"x" * 70_000)
    await site.until(lambda: exchange.status == 200)
    exchange.call.pause()
    sent = 70_000
    while not reply.paused:
        reply.write(b"x" * 50_000)
        sent += 50_000
        await asyncio.sleep(0.01)
        assert sent < 10_000_000, "nothing slows the engine down"
    await asyncio.sleep(1.0)
    assert reply.paused
    exchange.call.resume()
    await site.until(lambda: not reply.paused)
    reply.end()
    assert len((await exchange.end()).body) == sent


@served()
async def test_a_proxy_that_shuts_down_takes_no_more(site: Site) -> None:
    site.world.proxy.deployment.driver.draining = True
    refused = await site.post(TOKENIZE, BODY)
    assert refused.status == 503
    assert "shutting down" in refused.json["error"]["message"]
    assert site.seen == []
    site.world.proxy.deployment.driver.draining = False

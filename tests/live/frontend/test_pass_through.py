"""Requests that one engine answers by itself: passed on as they are, and the APIs few engines have."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.agents import ID, MESSAGES, PATHS, RESPONSES, alone, same
from tests.live.agents import body as body_for
from tests.support.site import Exchanged, Handler, Site, answering, served

from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.topologies import CONNECTORS, KvFlow

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

CHAT = "/v1/chat/completions"
ASKED: dict[str, tuple[str, object]] = {
    "/v1/models": ("GET", b""),
    "/tokenize": ("POST", {"model": "tiny", "prompt": "t1 t2 ä"}),
    "/detokenize": ("POST", {"model": "tiny", "tokens": [5, 6, 7]}),
    "/v1/embeddings": ("POST", {"model": "tiny", "input": ["t1 t2", "t3"]}),
}
# New with every answer, or the time of day.
PASSING = {"id", "created"}


def lasting(value: Any) -> Any:
    """Return an answer without what differs between two answers of one engine."""
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if name not in PASSING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def error_of(exchanged: Exchanged, status: int) -> str:
    assert exchanged.status == status, exchanged.body
    error = exchanged.json["error"]
    assert error["code"] == status
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("path", ASKED)
@served()
async def test_the_answer_is_an_engines(site: Site, path: str) -> None:
    method, values = ASKED[path]
    alone = await site.ask("prefill/0", path, values, method)
    answer = await site.send(path, values, method=method).end()
    assert answer.status == alone.status == 200
    assert lasting(answer.json) == lasting(alone.json)
    assert answer.header(b"content-type") == alone.header(b"content-type")
    seen = site.received("prefill")[-1]
    sent = values if isinstance(values, bytes) else json.dumps(values).encode()
    assert seen.request.body == sent
    assert seen.request.method == method.encode()


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/tokenize", b"{"),
        ("/tokenize", {"model": "another", "prompt": "t1"}),
        ("/detokenize", {"tokens": "x"}),
        ("/v1/embeddings", {}),
    ],
)
@served()
async def test_a_refusal_is_an_engines(site: Site, path: str, values: object) -> None:
    alone = await site.ask("prefill/0", path, values)
    answer = await site.post(path, values)
    assert 400 <= alone.status < 500
    assert (answer.status, answer.body) == (alone.status, alone.body)


@served()
async def test_prefillers_take_turns_and_decode_ranks_are_left_alone(site: Site) -> None:
    for _ in range(6):
        await site.get("/v1/models")
    engines = [seen.engine for seen in site.seen]
    assert sorted(engines) == ["prefill/0"] * 3 + ["prefill/1"] * 3


@served()
async def test_another_prefiller_answers_for_a_dead_one(site: Site) -> None:
    site.fleet.kill("prefill/0")
    # All at once, before any health probe: each meets the dead one once at most.
    exchanges = [site.send("/v1/models", method="GET") for _ in range(7)]
    for exchange in exchanges:
        assert (await exchange.end()).status == 200


@served()
async def test_a_prefiller_that_is_quarantined_or_drained_is_not_asked(site: Site) -> None:
    order = {"role": "prefill", "url": site.fleet.prefill_urls[1]}
    assert (await site.admin("/admin/instances/drain", order)).status == 200
    for _ in range(4):
        await site.get("/v1/models")
    assert {seen.engine for seen in site.seen} == {"prefill/0"}
    site.fleet.kill("prefill/0")
    await asyncio.sleep(5.0)
    refused = await site.get("/v1/models")
    assert "no prefiller" in error_of(refused, 503)
    assert refused.header(b"retry-after") == b"1"


@served()
async def test_two_engines_that_break_off_make_a_502(site: Site) -> None:
    def break_off(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.abort()

    site.handlers[b"/tokenize"] = break_off
    assert "two engines died" in error_of(await site.post("/tokenize", {"prompt": "t1"}), 502)
    assert sorted(seen.engine for seen in site.seen) == ["prefill/0", "prefill/1"]


@served()
async def test_a_client_that_leaves_takes_its_request_along(site: Site) -> None:
    left: list[float] = []

    def hold(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.on_closed = lambda: left.append(site.loop.time())

    site.handlers[b"/v1/embeddings"] = hold
    exchange = site.send("/v1/embeddings", {"model": "tiny", "input": "t1"})
    await site.until(lambda: len(site.seen) == 1)
    assert site.world.proxy.deployment.pass_through.in_flight == 1
    exchange.call.abort()
    begin_s = site.loop.time()
    await site.until(lambda: bool(left))
    assert left[0] - begin_s < 0.1
    assert site.world.proxy.deployment.pass_through.in_flight == 0
    assert len(site.seen) == 1


@served(flags={"prefill_timeout_s": 7.0})
async def test_an_engine_that_is_silent_makes_a_504(site: Site) -> None:
    site.handlers[b"/tokenize"] = lambda *_: None
    begin_s = site.loop.time()
    message = error_of(await site.post("/tokenize", {"prompt": "t1"}), 504)
    assert "7 s" in message
    assert site.loop.time() - begin_s == pytest.approx(7.0, abs=0.01)
    assert len(site.seen) == 1


@served(flags={"answer_limit_bytes": 4_096})
async def test_an_answer_past_the_limit_is_not_kept(site: Site) -> None:
    site.handlers[b"/tokenize"] = answering(200, b"x" * 5_000)
    assert "too long" in error_of(await site.post("/tokenize", {"prompt": "t1"}), 502)


ENGINES = [
    (b"cache-control", b"no-store"),
    (b"content-encoding", b"gzip"),
    (b"metadata", b'{"data":[{"index":0,"start":0,"end":8}]}'),
    (b"retry-after", b"9"),
]
WITHHELD = [
    (b"access-control-allow-origin", b"*"),
    (b"alt-svc", b'h3=":1"'),
    (b"set-cookie", b"a=b"),
    (b"x-request-id", b"another"),
]


def answers_with(status: int, kind: bytes, body: bytes) -> Handler:
    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        headers = [(b"content-type", kind), *WITHHELD, *ENGINES]
        if b"event-stream" in kind:
            reply.start(status, headers)
            reply.write(body)
            reply.end()
        else:
            reply.send(status, headers, body)

    return answer


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (200, b"application/octet-stream", bytes(8)),
        (200, b"application/octet-stream", bytes(1 << 20)),  # Relayed.
        (200, b"text/event-stream", b"data: 1\n\n"),
        (429, b"text/plain", b"slow down"),
        (500, b"text/plain", b"no"),
    ],
)
@served()
async def test_what_an_engine_says_of_its_answer_reaches_the_client(
    site: Site, status: int, kind: bytes, body: bytes
) -> None:
    site.handlers[b"/v1/embeddings"] = answers_with(status, kind, body)
    mine = [(b"x-request-id", b"mine"), (b"accept-encoding", b"gzip")]
    answer = await site.post("/v1/embeddings", {"input": "t1"}, mine)
    assert (answer.status, answer.body) == (status, body)
    framing = (b"content-length", b"transfer-encoding")
    streamed = [(b"x-accel-buffering", b"no")] if b"event-stream" in kind else []
    assert [field for field in answer.headers if field[0] not in framing] == [
        (b"content-type", kind),
        *ENGINES,
        *streamed,
        (b"x-request-id", b"mine"),
    ]
    # The counts of an answer are read here.
    assert {one.header(b"accept-encoding") for one in site.seen} == {b"identity"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@served()
async def test_what_an_engine_says_of_an_error_reaches_the_client(site: Site, path: str) -> None:
    asked = {"model": "tiny", "prompt": "t1", "messages": [], "max_tokens": 2}
    refuses = answers_with(400, b"application/json", b"\x1f\x8b")
    site.handlers[path.encode()] = refuses
    answer = await site.post(path, asked, [(b"x-request-id", b"mine")])
    assert (answer.status, answer.body) == (400, b"\x1f\x8b")
    assert [field for field in answer.headers if field[0] != b"content-length"] == [
        (b"content-type", b"application/json"),
        *ENGINES,
        (b"x-request-id", b"mine"),
    ]


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_compressed_answer_that_was_not_asked_for_is_another_engines(
    site: Site, stream: bool
) -> None:
    kind = b"text/event-stream" if stream else b"application/json"
    compresses = answers_with(200, kind, b"\x1f\x8b\n\n")
    spoilt = []

    def once(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        spoilt.append(engine)
        del site.rank_handlers[b"/v1/completions"]
        compresses(engine, request, reply)

    site.rank_handlers[b"/v1/completions"] = once
    body = {"model": "tiny", "prompt": "t1", "max_tokens": 2, "stream": stream}
    answer = await site.post("/v1/completions", body)
    assert (answer.status, len(spoilt)) == (200, 1)
    assert answer.done if stream else answer.json["choices"]
    assert answer.header(b"content-encoding") is None
    (record,) = site.world.ended
    assert record.retries == 1


@served()
async def test_a_place_below_the_engine_is_told_as_one_below_the_proxy(site: Site) -> None:
    told: list[bytes] = []

    def moved(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine
        place = told[-1].replace(b"HERE", request.header(b"host") or b"")
        reply.send(307, [(b"location", place)], b"")

    site.handlers[b"/tokenize"] = moved
    for place, here in {
        b"http://HERE/tokenize/?a=b": b"/tokenize/?a=b",
        b"https://HERE": b"/",
        b"http://HERE?a": b"/?a",
        b"http://HERE0/tokenize": None,
        b"http://other/tokenize": b"http://other/tokenize",
        b"/tokenize/": b"/tokenize/",
        b"": b"",
    }.items():
        told.append(place)
        answer = await site.post("/tokenize", {"prompt": "t1"})
        assert answer.status == 307
        location = answer.header(b"location")
        if here is None:  # Another port.
            assert location is not None
            assert location.startswith(b"http://127.0.0.1:")
        else:
            assert location == here


# The APIs that few engines have.


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["", "prefill", "decode"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@served("connector")
async def test_an_api_that_no_engine_has_is_501(
    site: Site, path: str, stream: bool, role: str, connector: str
) -> None:
    """Each engine is asked once, and is not at fault; the answer names the role that lacks it."""
    ascend = CONNECTORS[connector].recomputes
    first = CONNECTORS[connector].flow is KvFlow.DECODE_FIRST and path == MESSAGES
    everybody = "engine" if not ascend else "decode rank" if first else "prefiller"
    lacking = {"": everybody, "prefill": "prefiller", "decode": "decode rank"}[role]
    site.lacking[path.encode()] = (role,)
    answer = await site.post(path, body_for(path, stream=stream))
    if path == RESPONSES and role == "decode" and ascend:
        assert answer.status == 200  # No rank is asked that might hand it back.
        return
    if (role == "prefill" and not ascend) or (role == "decode" and ascend and not first):
        assert answer.status == 200  # Whoever may do all of it has it.
        return
    assert answer.status == 501, answer.body
    error = answer.json["error"]
    assert error["message"] == f"no {lacking} serves {path}"
    assert error["type"] == ("api_error" if path == MESSAGES else "NotImplementedError")
    assert answer.header(b"x-request-id")
    asked = [seen.engine for seen in site.seen if role in seen.engine]
    assert len(set(asked)) == 2 if first and role == "prefill" else len(asked)
    (record,) = site.world.ended
    assert (record.status, record.outcome) == (501, Outcome.CLIENT_ERROR)
    state = await site.state()
    assert {one["status"] for one in state["ranks"] + state["prefillers"]} == {"up"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@served(prefillers=4, ranks=4)
async def test_an_api_that_some_engines_have_is_served_by_these(
    site: Site, path: str, stream: bool
) -> None:
    """As while engines are replaced by those of a later version."""
    values = body_for(path, stream=stream)
    right = await alone(site, path, values, "decode/2")
    lacking = ("prefill/0", "prefill/1", "decode/0", "decode/1")
    site.lacking[path.encode()] = lacking
    for _ in range(12):
        same(await site.post(path, values, ID), right)
    records = await site.ended(12)
    assert {record.outcome for record in records} == {Outcome.OK}
    assert not any(record.local_prefill for record in records)
    # Each engine is asked once, and what it says is remembered.
    told = [seen.engine for seen in site.seen if seen.engine in lacking]
    assert len(told) <= len(lacking)
    site.lacking.clear()
    await asyncio.sleep(61.0)
    site.seen.clear()
    for _ in range(12):
        same(await site.post(path, values, ID), right)
    assert any(seen.engine in lacking for seen in site.seen)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({}, False),
        ({"direct_decode_tokens": 1}, True),
        ({"direct": "prefill"}, True),
        ({"direct": "refuse"}, True),
    ],
)
@served("flags")
async def test_an_api_that_only_ranks_have_is_served_by_one_of_them_if_it_may(
    site: Site, path: str, stream: bool, flags: dict[str, object], refused: bool
) -> None:
    values = body_for(path, stream=stream)
    right = await alone(site, path, values)
    site.lacking[path.encode()] = ("prefill",)
    for _ in range(6):
        answer = await site.post(path, values, ID)
        if refused:
            assert answer.status == 501
            assert answer.json["error"]["message"] == f"no prefiller serves {path}"
        else:
            same(answer, right)
    records = await site.ended(6)
    assert {record.local_prefill for record in records} == {not refused}
    assert len(site.received("decode")) == (0 if refused else 6)
    site.lacking.clear()
    same(await site.post(path, values, ID), right)
    assert (await site.ended(7))[-1].local_prefill is False


@served()
async def test_a_chat_goes_on_where_a_gateway_knows_no_path(site: Site) -> None:
    site.lacking[CHAT.encode()] = ("prefill/0", "decode/1")
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "t1"}]}
    for _ in range(4):
        assert (await site.post(CHAT, body)).status == 200
    site.lacking[CHAT.encode()] = ("",)
    answer = await site.post(CHAT, body)
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
    counted = {"model": "tiny", "messages": [{"role": "user", "content": "t1"}]}
    site.lacking[b"/v1/messages/count_tokens"] = ("prefill/0",)
    for _ in range(2):
        assert (await site.post("/v1/messages/count_tokens", counted)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}',
        b'{"type":"error","error":{"type":"not_found_error","message":"model: x"}}',
    ],
)
@served()
async def test_a_404_of_the_api_itself_is_passed_on(site: Site, body: bytes) -> None:
    site.handlers[MESSAGES.encode()] = answering(404, body)
    answer = await site.post(MESSAGES, {"model": "x", "messages": [], "max_tokens": 5})
    assert (answer.status, answer.body) == (404, body)


@served()
async def test_a_chat_route_that_is_missing_is_the_engines_404(site: Site) -> None:
    site.handlers[CHAT.encode()] = answering(404, b'{"detail":"Not Found"}')
    answer = await site.post(CHAT, {"model": "tiny", "messages": []})
    assert (answer.status, answer.body) == (404, b'{"detail":"Not Found"}')


EVENTS = {
    RESPONSES: [
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"b"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"error":null}}\n\n',
    ],
    MESSAGES: [
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n',
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
}
WHOLE = {
    RESPONSES: b'{"object":"response","output":[],"usage":{"input_tokens":3,"output_tokens":7}}',
    MESSAGES: b'{"type":"message","content":[],"stop_reason":"end_turn","usage":{"input_tokens":3,"output_tokens":7}}',
}


def serve(engine: str, request: "HttpRequest", reply: "Reply") -> None:
    """Answer as an engine that has these APIs."""
    del engine
    path = request.path.decode()
    if not json.loads(request.body).get("stream"):
        reply.send(200, [(b"content-type", b"application/json")], WHOLE[path])
        return
    reply.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
    for event in EVENTS[path]:
        reply.write(event)
    reply.end()


# What one engine has to do whole.
WHOLLY: dict[str, dict[str, Any]] = {
    RESPONSES: {"truncation": "auto"},
    MESSAGES: {
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
}


@pytest.mark.parametrize("direct", ["decode", "prefill"])
@pytest.mark.parametrize("path", PATHS)
@served(flags=lambda direct: {"direct": direct})
async def test_what_one_engine_does_whole_passes_as_it_is(
    site: Site, path: str, direct: str
) -> None:
    site.handlers[path.encode()] = serve
    asked = json.dumps(body_for(path, **WHOLLY[path])).encode()
    body = asked[:-1] + b' , "stream":%b}'
    whole = await site.post(path, body % b"false")
    assert (whole.status, whole.body) == (200, WHOLE[path])
    stream = await site.post(path, body % b"true", [(b"x-request-id", b"mine")])
    assert stream.status == 200
    assert stream.body == b"".join(EVENTS[path])
    assert stream.error is None
    assert stream.header(b"content-type") == b"text/event-stream; charset=utf-8"
    assert stream.header(b"x-request-id") == b"mine"
    assert [seen.engine.partition("/")[0] for seen in site.seen] == [direct] * 2
    for seen, flag in zip(site.seen, (b"false", b"true"), strict=True):
        assert json.loads(seen.request.body) == json.loads(body % flag)
    first, second = site.world.ended
    assert (first.endpoint, first.outcome) == (path, Outcome.OK)
    assert (first.prompt_tokens, first.output_tokens) == (3, 7)
    assert (second.outcome, second.stream) == (Outcome.OK, True)
    assert bool(second.prefiller) is (direct == "prefill")


@pytest.mark.parametrize("path", PATHS)
@served(flags={"batch": 2})
async def test_such_requests_are_bound_to_ranks_like_any_other(site: Site, path: str) -> None:
    replies: list[Reply] = []

    def hold(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        replies.append(reply)
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(first)

    first, last = b"".join(EVENTS[path][:-1]), EVENTS[path][-1]
    site.rank_handlers[path.encode()] = hold
    values = body_for(path, "t1 " * 100, stream=True)
    exchanges = [site.send(path, values) for _ in range(5)]
    await site.until(lambda: len(replies) == 4)
    await asyncio.sleep(1.0)
    # Two ranks of two slots each: the fifth waits in the pool, with its KV cache.
    engines = [seen.engine for seen in site.received("decode")]
    assert sorted(engines) == ["decode/0"] * 2 + ["decode/1"] * 2
    assert len(site.received("prefill")) == 5
    assert len(site.world.scheduler.pool) == 1
    for reply in replies[:]:
        reply.write(last)
        reply.end()
    await site.until(lambda: len(replies) == 5)
    replies[4].write(last)
    replies[4].end()
    for exchange in exchanges:
        assert (await exchange.end()).body == first + last

"""What the client of a stream gets while there is no token: comments of engines, and the proxy's own."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Exchanged, Site, answering, play, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-engine", b"7")]
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 4,
    "stream": True,
    "ignore_eos": True,
}
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: BODY,
    CHAT: BODY | {"messages": [{"role": "user", "content": "t1 t2"}]},
    MESSAGES: BODY | {"messages": [{"role": "user", "content": "t1 t2"}]},
    RESPONSES: {"model": "tiny", "input": "t1", "stream": True},
}
# What engines answer at once, behind their comments.
TOKENS = {
    COMPLETIONS: b'data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n",
    CHAT: b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"}]}'
    b"\n\ndata: [DONE]\n\n",
    MESSAGES: b'event: message_start\ndata: {"type":"message_start"}\n\n'
    b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    RESPONSES: b'event: response.created\ndata: {"response":{}}\n\n'
    b'event: response.completed\ndata: {"response":{"status":"completed"}}\n\n',
}


def silent(site: Site, path: str, signs: list[bytes], then: "Callable[[Reply], None]") -> None:
    """Have the next rank that is asked send signs of life, one a second, before it does something."""

    def begin(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        site.rank_handlers.pop(path.encode(), None)
        reply.start(200, EVENTS)
        for second, sign in enumerate(signs):
            site.loop.call_later(second, reply.write, sign)
        site.loop.call_later(len(signs), then, reply)

    site.rank_handlers[path.encode()] = begin


def answers(data: bytes) -> "Callable[[Reply], None]":
    def answer(reply: "Reply") -> None:
        reply.write(data)
        reply.end()

    return answer


def breaks(reply: "Reply") -> None:
    reply.abort()


def is_error(path: str, event: bytes) -> int:
    """Check that an event is an error in the API's form; return its code, if it has one."""
    name, _, data = event.rpartition(b"data: ")
    assert name == (b"" if path in (COMPLETIONS, CHAT) else b"event: error\n")
    message = json.loads(data)
    if path == MESSAGES:
        assert message.keys() == {"type", "error"}
        assert message["error"].keys() == {"type", "message"}
        return 0
    assert message["error"].keys() == {"message", "type", "param", "code"}
    return int(message["error"]["code"])


# Comments of engines.


@pytest.mark.parametrize("path", ASKED)
@served()
async def test_an_engines_comments_reach_the_client_at_once(site: Site, path: str) -> None:
    signs = [COMMENT, b": a\r\n: b\r\n\r\n", PING if path == MESSAGES else COMMENT]
    silent(site, path, signs, answers(TOKENS[path]))
    answer = site.send(path, ASKED[path], headers=[(b"x-request-id", b"mine")])
    begin_s = site.loop.time()
    for count in (1, 2, 3):
        await answer.until_events(count)
        assert site.loop.time() - begin_s < count
    assert (answer.status, answer.header(b"x-engine")) == (200, b"7")
    assert answer.header(b"x-request-id") == b"mine"
    assert answer.header(b"x-accel-buffering") == b"no"
    await answer.end()
    assert (answer.error, answer.body) == (None, b"".join(signs) + TOKENS[path])
    (record,) = await site.ended()
    assert (record.outcome, record.status, record.retries) == (Outcome.OK, 200, 0)
    assert record.first_token_ns is not None
    assert record.first_token_ns / 1e9 >= begin_s + 3  # A comment is no token.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@served()
async def test_behind_a_comment_a_failure_is_still_mended_elsewhere(site: Site, path: str) -> None:
    alone = await site.post(path, ASKED[path] | {"seed": 1})
    for error in (b"", b'data: {"error":{"message":"no KV","code":500}}\n\n'):
        silent(site, path, [COMMENT], answers(error) if error else breaks)
        answer = await site.post(path, ASKED[path] | {"seed": 1})
        assert (answer.status, answer.done) == (200, True)
        assert answer.events[0] == COMMENT
        assert answer.text == alone.text
    assert [record.retries for record in await site.ended(3)] == [0, 1, 1]


@pytest.mark.parametrize("path", ASKED)
@served(flags={"retry_attempts": 1})
async def test_behind_a_comment_what_nothing_mends_is_an_error_event(site: Site, path: str) -> None:
    silent(site, path, [COMMENT], breaks)
    answer = await asyncio.wait_for(site.send(path, ASKED[path]).end(), 100)
    assert (answer.status, answer.events[0]) == (200, COMMENT)
    assert answer.error is not None, "it must not look complete"
    assert len(answer.events) == 2
    assert is_error(path, answer.events[1]) in (0, 502)
    (record,) = await site.ended()
    assert (record.outcome, record.status) == (Outcome.UPSTREAM_ERROR, 200)
    assert record.output_tokens == 0
    assert record.first_token_ns is None


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
def test_behind_a_comment_an_engines_refusal_is_told_in_its_words(path: str) -> None:
    error: dict[str, Any] = {
        "error": {"message": "too\nlong", "type": "x", "param": "p", "code": 400}
    }
    if path == MESSAGES:
        error = {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "too\nlong"},
        }

    async def scenario(site: Site) -> None:
        def refuses(engine: str, request: "HttpRequest", reply: "Reply") -> None:
            del engine, request
            body = json.dumps(error, indent=2).encode()
            reply.send(400, [(b"content-type", b"application/json")], body)

        def breaks_off(reply: "Reply") -> None:
            site.rank_handlers[path.encode()] = refuses
            reply.abort()

        silent(site, path, [COMMENT], breaks_off)
        answer = await site.post(path, ASKED[path])
        assert (answer.status, len(answer.events)) == (200, 2)
        assert answer.error is not None
        is_error(path, answer.events[1])
        assert json.loads(answer.events[1].rpartition(b"data: ")[2]) == error
        (record,) = await site.ended()
        assert (record.outcome, record.status) == (Outcome.CLIENT_ERROR, 200)
        assert "too" in record.reason

    play(scenario)


@served()
async def test_a_whole_answer_behind_a_comment_is_no_answer(site: Site) -> None:
    def goes_on(reply: "Reply") -> None:
        site.rank_handlers[COMPLETIONS.encode()] = answering(200, b'{"usage":{},"choices":[]}')
        reply.abort()

    silent(site, COMPLETIONS, [COMMENT], goes_on)
    answer = await site.post(COMPLETIONS, BODY)
    assert answer.error is not None
    assert is_error(COMPLETIONS, answer.events[1]) == 502


@served(flags={"first_token_timeout_s": 5.0})
async def test_comments_do_not_hide_that_no_token_comes(site: Site) -> None:
    silent(site, COMPLETIONS, [COMMENT] * 60, breaks)
    answer = await site.post(COMPLETIONS, BODY)
    assert answer.done
    (record,) = await site.ended()
    assert record.retries == 1
    assert 5 <= answer.body.count(COMMENT) <= 6


@served()
async def test_only_comments_overtake_the_answer(site: Site) -> None:
    signs = [b"id: 7\n\n", b": a\nretry: 1\n\n", b"data: what\n\n", b"\n"]
    silent(site, COMPLETIONS, signs, answers(TOKENS[COMPLETIONS]))
    answer = site.send(COMPLETIONS, BODY)
    await asyncio.sleep(4.0)
    assert answer.status == 0
    await answer.end()
    assert answer.body == b"".join(signs) + TOKENS[COMPLETIONS]


# The proxy's own.


def own_signs(answer: Exchanged) -> int:
    return answer.body.count(COMMENT) + answer.body.count(PING)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
@served(flags={"sse_keep_alive_s": 1.5, "batch": 1}, ranks=1)
async def test_who_waits_for_a_rank_gets_signs_of_life(site: Site, path: str) -> None:
    # Nobody has a free slot for six seconds.
    silent(site, COMPLETIONS, [b""] * 6, answers(TOKENS[COMPLETIONS]))
    blocked = site.send(COMPLETIONS, BODY)
    await asyncio.sleep(0.5)
    silent(site, RESPONSES, [], answers(TOKENS[RESPONSES]))
    whole = site.send(COMPLETIONS, BODY | {"stream": False})
    answer = site.send(path, ASKED[path], headers=[(b"x-request-id", b"mine")])
    await answer.until_events(2)
    assert (answer.status, answer.header(b"x-request-id")) == (200, b"mine")
    assert whole.status == 0
    assert set(answer.events) == {PING if path == MESSAGES else COMMENT}
    await blocked.end()
    await answer.end()
    assert answer.error is None
    assert 2 <= own_signs(answer) <= 4
    assert 3 <= own_signs(blocked) <= 4  # While its rank is silent, too.
    await whole.end()
    assert (whole.status, own_signs(whole)) == (200, 0)
    records = await site.ended(3)
    assert {(record.outcome, record.status) for record in records} == {(Outcome.OK, 200)}
    for record in records:
        if record.stream:
            assert record.first_token_ns is not None
            assert record.first_token_ns - record.arrived_ns > 5e9


@served(flags={"first_token_timeout_s": 200.0})
async def test_nothing_is_sent_unless_it_is_asked_for(site: Site) -> None:
    silent(site, COMPLETIONS, [b""] * 100, answers(TOKENS[COMPLETIONS]))
    answer = await site.post(COMPLETIONS, BODY)
    assert answer.body == TOKENS[COMPLETIONS]


def test_who_expires_behind_a_sign_of_life_gets_an_error_event() -> None:
    async def scenario(site: Site) -> None:
        silent(site, COMPLETIONS, [b""] * 20, answers(TOKENS[COMPLETIONS]))
        blocked = site.send(COMPLETIONS, BODY)
        await asyncio.sleep(0.5)
        answer = await site.post(CHAT, ASKED[CHAT])
        assert (answer.status, answer.events[:2]) == (200, [COMMENT] * 2)
        assert answer.error is not None
        assert is_error(CHAT, answer.events[-1]) == 503
        (record,) = await site.ended()
        assert (record.outcome, record.status) == (Outcome.EXPIRED, 200)
        await blocked.end()

    flags = {"sse_keep_alive_s": 1.0, "batch": 1, "queue_ttl_s": 5.0, "pool_ttl_s": 5.0}
    play(scenario, flags=flags, ranks=1)


@served(flags={"sse_keep_alive_s": 1.0, "batch": 1}, ranks=1)
async def test_who_leaves_behind_a_sign_of_life_holds_nothing(site: Site) -> None:
    silent(site, COMPLETIONS, [b""] * 6, answers(TOKENS[COMPLETIONS]))
    blocked = site.send(COMPLETIONS, BODY)
    await asyncio.sleep(0.5)
    leaves = site.send(COMPLETIONS, BODY)
    await leaves.until_events(1)
    leaves.call.abort()
    (record,) = await site.ended()
    assert (record.outcome, record.status) == (Outcome.CANCELLED, 200)
    await blocked.end()


@served(flags={"sse_keep_alive_s": 1.0})
async def test_who_waits_for_a_prefill_gets_signs_of_life_and_a_retry(site: Site) -> None:
    def slow(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        del site.handlers[COMPLETIONS.encode()]
        site.loop.call_later(3.0, reply.send, 500, [], b"")

    site.handlers[COMPLETIONS.encode()] = slow
    answer = await site.post(COMPLETIONS, BODY)
    assert (answer.status, answer.done, own_signs(answer)) == (200, True, 2)
    (record,) = await site.ended()
    assert record.retries == 1


@served(flags={"sse_keep_alive_s": 2.0})
async def test_a_silence_in_the_midst_of_a_stream_counts_too(site: Site) -> None:
    token = b'data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    signs = [token, b"", b"", token]
    silent(site, COMPLETIONS, signs, answers(TOKENS[COMPLETIONS]))
    answer = await site.post(COMPLETIONS, BODY)
    assert answer.body == token + COMMENT + token + TOKENS[COMPLETIONS]


@served(flags={"sse_keep_alive_s": 1.0, "first_token": "prefill"})
async def test_the_first_token_of_a_prefiller_comes_behind_signs_of_life(site: Site) -> None:
    plain = await site.post(COMPLETIONS, BODY | {"temperature": 0})

    def slow(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        del site.handlers[COMPLETIONS.encode()]
        site.loop.call_later(1.5, reply.send, 500, [], b"")

    site.handlers[COMPLETIONS.encode()] = slow
    answer = await site.post(COMPLETIONS, BODY | {"temperature": 0})
    assert (answer.done, own_signs(answer)) == (True, 1)
    assert answer.text == plain.text
    records = await site.ended(2)
    assert [record.early_first_token for record in records] == [True, True]

"""Reading a streamed answer: which events are tokens, and when an answer is whole."""

import asyncio
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay import exchange
from balanceroute.proxy.lab.replay.exchange import (
    AnswerReader,
    ReplayTarget,
    first_model,
    parse_target,
)
from balanceroute.proxy.lab.replay.figures import (
    ERROR_EVENT,
    MALFORMED_EVENT,
    SHORT_STREAM,
    FaultCount,
    ReplayFault,
    count_faults,
    from_status,
    from_wire,
)
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, WireError, WireFault

DONE = b"data: [DONE]\n\n"
# As a vLLM 0.32 engine writes them.
HEAD = b'"id":"cmpl-1","created":1795228026,"model":"tiny"'
ROLE = (
    b"data: {" + HEAD + b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}\n\n'
)
USAGE = (
    b"data: {" + HEAD + b',"choices":[],'
    b'"usage":{"prompt_tokens":52,"total_tokens":60,"completion_tokens":8}}\n\n'
)


def chat(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    return event({"choices": [choice]})


def completion(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def read(data: bytes) -> tuple[int, ReplayFault | None]:
    reader = AnswerReader()
    return reader.feed(data), reader.end()


def test_a_whole_chat_answer_has_a_token_per_content_event() -> None:
    reader = AnswerReader()
    data = ROLE + chat("a") + chat("") + chat("b", "length") + USAGE + DONE
    assert reader.feed(data) == 3
    assert reader.end() is None
    assert reader.finish_reason == "length"
    assert (reader.prompt_tokens, reader.completion_tokens) == (52, 8)


def test_a_whole_completion_has_a_token_per_text_event() -> None:
    assert read(completion("a") + completion("") + completion("b", "length") + DONE) == (3, None)


def test_the_cut_of_the_stream_changes_nothing() -> None:
    data = ROLE + chat("é") + chat("b", "length") + USAGE + DONE
    reader = AnswerReader()
    assert sum(reader.feed(data[i : i + 1]) for i in range(len(data))) == 2
    assert reader.end() is None


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        ({"content": "a"}, 1),
        ({"content": ""}, 1),
        ({"content": None}, 0),
        ({}, 0),
        ({"role": "assistant"}, 0),
        ({"role": "assistant", "content": ""}, 0),
        ({"role": "assistant", "content": "a"}, 1),
        ({"reasoning": "why"}, 1),
        ({"reasoning_content": "why", "content": None}, 1),
        ({"tool_calls": [{"index": 0}]}, 1),
    ],
)
def test_what_a_delta_counts(delta: Mapping[str, object], tokens: int) -> None:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    assert AnswerReader().feed(event(chunk)) == tokens


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": []},
        {"choices": None},
        {"object": "ping"},
        {"choices": [{"index": 0, "delta": "?", "finish_reason": None}]},
        {"choices": [{"index": 0, "finish_reason": "stop"}]},
    ],
)
def test_events_without_output_count_nothing(chunk: object) -> None:
    assert AnswerReader().feed(event(chunk)) == 0


def test_comments_and_other_fields_are_passed_over() -> None:
    reader = AnswerReader()
    assert reader.feed(b": ping\n\n" + b"id: 7\nretry: 5\n\n" + chat("a")) == 1
    assert reader.fault is None


def test_usage_in_every_event_leaves_the_last_one() -> None:
    reader = AnswerReader()
    for tokens in (1, 2):
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        assert reader.feed(event({"choices": [choice], "usage": usage})) == 1
    assert (reader.prompt_tokens, reader.completion_tokens) == (9, 2)


@pytest.mark.parametrize(
    ("data", "missing"),
    [
        (b"", "a finish_reason and [DONE]"),
        (chat("a"), "a finish_reason and [DONE]"),
        (chat("a", "length"), "[DONE]"),
        (chat("a") + DONE, "a finish_reason"),
        (b'{"choices": [{"message"', '[DONE], with \'{"choices": [{"message"\' left over'),
    ],
)
def test_a_short_answer_is_a_fault_that_says_what_is_missing(data: bytes, missing: str) -> None:
    _, fault = read(data)
    assert fault is not None
    assert fault.kind == SHORT_STREAM
    assert fault.message.endswith(missing)


def test_an_error_event_is_the_fault_even_before_done() -> None:
    error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
    tokens, fault = read(ROLE + chat("a") + event({"error": error}) + DONE)
    assert tokens == 1
    assert fault == ReplayFault(ERROR_EVENT, "Internal server error")


@pytest.mark.parametrize(
    ("error", "message"), [("out of memory", '"out of memory"'), ({"code": 500}, '{"code": 500}')]
)
def test_an_error_of_any_form_is_told(error: object, message: str) -> None:
    assert read(event({"error": error}))[1] == ReplayFault(ERROR_EVENT, message)


def test_an_error_beside_a_token_is_the_fault() -> None:
    choice = {"index": 0, "text": "a", "finish_reason": None}
    _, fault = read(event({"choices": [choice], "error": {"message": "no room"}}) + DONE)
    assert fault == ReplayFault(ERROR_EVENT, "no room")


def test_a_null_error_is_none() -> None:
    assert read(event({"error": None}) + chat("a", "length") + DONE) == (1, None)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gave_up_is_a_fault(reason: str) -> None:
    assert read(chat("a", reason) + DONE)[1] == ReplayFault(
        ERROR_EVENT, f"finish_reason is {reason}"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"data: {oops\n\n",
        b"data: 7\n\n",
        b"data: \xff\n\n",
        b"data: " + 10_000 * b"[" + b"\n\n",
        b'data: {"choices": [7]}\n\n',
    ],
)
def test_an_event_that_is_no_chunk_is_a_fault(data: bytes) -> None:
    _, fault = read(data + DONE)
    assert fault is not None
    assert fault.kind == MALFORMED_EVENT
    assert len(fault.message) <= 200


def test_the_first_fault_stays() -> None:
    data = event({"error": {"message": "first"}}) + event({"error": {"message": "second"}})
    assert read(data)[1] == ReplayFault(ERROR_EVENT, "first")


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(WireError):
        AnswerReader().feed(bytes(17 << 20))


TEXTS = st.text(max_size=12) | st.sampled_from(
    ['"finish_reason":null', '"content":"', '"role"', '"usage":{', '"error"', "\\", '"', "\n\n"]
)


@given(
    text=TEXTS,
    key=st.sampled_from(["content", "text", "role", "reasoning", "refusal"]),
    reason=st.sampled_from([None, "length"]),
    usage=st.sampled_from([None, {}, {"completion_tokens": 1}]),
    tight=st.booleans(),
)
def test_the_short_cut_agrees_with_the_whole_reading(
    text: str, key: str, reason: str | None, usage: object, *, tight: bool
) -> None:
    body = {"text": text} if key == "text" else {"delta": {key: text}}
    chunk = {"choices": [{"index": 0, **body, "finish_reason": reason}], "usage": usage}
    data = json.dumps(chunk, separators=(",", ":") if tight else None, ensure_ascii=False)
    whole = f"data: {data}\n\n".encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_plainly_a_token", lambda _event: False)
        slow = AnswerReader()
        expected = slow.feed(whole)
    quick = AnswerReader()
    assert quick.feed(whole) == expected
    assert quick.finish_reason == slow.finish_reason
    assert quick.completion_tokens == slow.completion_tokens


def test_the_common_event_takes_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_text: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("json.loads", refuse)
    reader = AnswerReader()
    assert reader.feed(chat("a")) == 1
    assert reader.feed(completion("a")) == 1


MESSAGE = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}},
    {"type": "content_block_start", "content_block": {"type": "thinking"}, "index": 0},
    {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}},
    {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "b"}},
    {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"input_tokens": 9, "cache_read_input_tokens": 3, "output_tokens": 2},
    },
    {"type": "message_stop"},
]
RESPONSE = [
    {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.function_call_arguments.delta", "delta": "b"},
    {"type": "response.output_text.done", "text": "a"},
    {
        "type": "response.completed",
        "response": {"status": "completed", "usage": {"input_tokens": 12, "output_tokens": 2}},
    },
]


@pytest.mark.parametrize(
    ("told", "reason"),
    [(MESSAGE, "tool_use"), (RESPONSE, "completed")],
    ids=["messages", "responses"],
)
def test_an_agents_answer_has_a_token_per_piece(told: list[object], reason: str) -> None:
    reader = AnswerReader()
    assert reader.feed(b"".join(map(event, told))) == 2
    assert reader.end() is None
    assert reader.finish_reason == reason
    assert (reader.prompt_tokens, reader.completion_tokens) == (12, 2)
    cut = AnswerReader()
    cut.feed(b"".join(map(event, told[:-1])))
    fault = cut.end()
    assert fault is not None
    assert fault.kind == SHORT_STREAM


def test_a_message_that_was_given_up_has_failed() -> None:
    given_up = {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None}}
    _, fault = read(event(given_up) + event({"type": "message_stop"}))
    assert fault == ReplayFault(ERROR_EVENT, "message_stop says abort")


# Target URLs.


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("http://engine", "engine", 80, False, ""),
        ("https://engine", "engine", 443, True, ""),
        ("https://engine:8443/", "engine", 8443, True, ""),
        ("http://[::1]:8000", "::1", 8000, False, ""),
        ("http://engine:8000/v1", "engine", 8000, False, ""),
        ("http://engine:8000/v1/", "engine", 8000, False, ""),
        ("http://gateway/models/a/v1", "gateway", 80, False, "/models/a"),
        ("http://gateway/models/a", "gateway", 80, False, "/models/a"),
    ],
)
def test_a_url_is_read(url: str, host: str, port: int, tls: bool, prefix: str) -> None:
    target = parse_target("--target", url)
    assert target == ReplayTarget(url, host, port, tls, prefix)
    assert target.path("/v1/models") == f"{prefix}/v1/models".encode()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engine:8000",
        "ftp://engine",
        "http://",
        "http://engine:port",
        "http://engine:99999",
        "http://[::1",
        "http://engine/?a=b",
        "http://engine/#a",
        "http://me:secret@engine/",
        "http://engine/a b",
        "http://engine/\r\nx: y",
        "http://engine/é",
    ],
)
def test_another_url_is_refused_with_the_flag(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--target: ") as error:
        parse_target("--target", url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "port", "host"),
    [
        ("http://127.0.0.1", 80, b"127.0.0.1"),
        ("http://127.0.0.1:80", 80, b"127.0.0.1"),
        ("http://127.0.0.1:8000/gateway", 8000, b"127.0.0.1:8000"),
        ("http://[::1]:8000", 8000, b"[::1]:8000"),
    ],
)
def test_a_server_is_asked_by_the_name_of_the_url(url: str, port: int, host: bytes) -> None:
    seen: list[HttpRequest] = []

    def answer(request: HttpRequest, reply: Reply) -> None:
        seen.append(request)
        reply.send(200, [], b'{"data": [{"id": "tiny"}]}')

    async def main(_: asyncio.AbstractEventLoop) -> str:
        target = parse_target("--target", url)
        server = Server(answer)
        await server.start(target.host, port)
        endpoint = target.connect()
        try:
            return await first_model(endpoint, target, [])
        finally:
            endpoint.close()
            server.close()
            await server.drain()

    assert run(main, seed=0) == "tiny"
    (request,) = seen
    assert request.header(b"host") == host
    assert request.path == parse_target("--target", url).path("/v1/models")


def test_https_is_spoken_to_an_https_url() -> None:
    async def main() -> str:
        endpoint = parse_target("--target", "https://engine").connect()
        endpoint.close()
        return endpoint.name

    assert asyncio.run(main()) == "https://engine:443"


# Failures: their kinds, and messages that stay readable.


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no room", "code": 503}}', "no room"),
        (b'{"error": "no room"}', '"no room"'),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"Bad\r\n  Gateway", "Bad Gateway"),
        (b"", ""),
        (b"\xff", "\ufffd"),
        (10_000 * b"[", 199 * "[" + "\u2026"),
        (500 * b"a", 199 * "a" + "\u2026"),
    ],
)
def test_an_answer_other_than_200_is_told_by_its_body(body: bytes, message: str) -> None:
    assert from_status(503, body) == ReplayFault("http 503", message)


@pytest.mark.parametrize("kind", list(WireFault))
def test_every_fault_of_the_wire_has_a_kind(kind: WireFault) -> None:
    fault = from_wire(WireError(kind, "what and where", sent=True, answered=False))
    assert fault.message == "what and where"
    # A reused connection that the server had closed is reset, like any other.
    name = WireFault.RESET.name if kind is WireFault.STALE else kind.name
    assert fault.kind == name.lower().replace("_", " ")


def test_kinds_are_counted_the_most_frequent_first() -> None:
    faults = [ReplayFault("a", "1"), ReplayFault("b", "2"), ReplayFault("b", "3")]
    assert count_faults(faults) == [FaultCount("b", 2, "2"), FaultCount("a", 1, "1")]

"""What an engine gave up, in the words of each API; and answers that only hold such words.

A body holds words of its client (`metadata`) and of the model (a tool's input) unescaped.
"""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import HttpRequest, Reply


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TALK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 60,
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "t1 t2 t3"}
WORDS = {"finish_reason": "abort", "stop_reason": "recomputed", "status": "cancelled"}
CALL = {"type": "tool_use", "id": "1", "name": "note", "input": WORDS}
SAID = "the engine aborted the request"


def response(status: str) -> dict[str, Any]:
    """Return an answer of the Responses API, which repeats what its client calls metadata."""
    return {
        "id": "resp_1",
        "metadata": WORDS,
        "object": "response",
        "output": [],
        "status": status,
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
    }


def message(content: list[dict[str, Any]], stop_reason: str) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": "tiny",
        "stop_reason": stop_reason,
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }


def events(*values: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (value["type"].encode(), json.dumps(value).encode())
        for value in values
    )


def sends(body: bytes, kind: bytes) -> Any:
    """Return what has an engine answer always the same."""

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.send(200, [(b"content-type", kind)], body)

    return answer


COMPLETED = {"type": "response.completed", "response": response("completed")}


@pytest.mark.parametrize(
    ("path", "values", "answer"),
    [
        (RESPONSES, ASKED | {"metadata": WORDS}, json.dumps(response("completed")).encode()),
        (MESSAGES, TALK, json.dumps(message([CALL], "tool_use")).encode()),
        (RESPONSES, ASKED | {"metadata": WORDS, "stream": True}, events(COMPLETED)),
    ],
    ids=["metadata", "tool input", "streamed metadata"],
)
@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@served("connector", flags={"direct": "decode"})
async def test_words_of_a_client_or_a_model_are_no_sign_of_an_abort(
    site: Site, path: str, values: dict[str, Any], answer: bytes, connector: str
) -> None:
    """They would have an answer repeated, and engines called faulty that are not."""
    kind = b"text/event-stream" if values.get("stream") else b"application/json"
    # Of a stream the prefill leg is a whole answer, which repeats the metadata too.
    handlers = site.rank_handlers if values.get("stream") else site.handlers
    handlers[path.encode()] = sends(answer, kind)
    for number in range(1, 5):
        exchange = await site.post(path, values)
        assert (exchange.status, exchange.body) == (200, answer)
        record = (await site.ended(number))[-1]
        assert (record.outcome, record.retries, record.recomputes) == (Outcome.OK, 0, 0)
    state = await site.state()
    assert {one["status"] for one in state["ranks"] + state["prefillers"]} == {"up"}


@pytest.mark.parametrize("keeps_kv", [1, 0], ids=["prefill leg", "all of it"])
@pytest.mark.parametrize("stream", [False, True])
@served(flags={"direct": "prefill"})
async def test_a_message_that_was_given_up_is_done_by_another_engine(
    site: Site, keeps_kv: int, *, stream: bool
) -> None:
    """Engines write it without a reason for its end: the client took it for a whole answer."""
    values = TALK | {"stream": stream}
    right = await site.ask("prefill/1", MESSAGES, values)
    site.fleet.faults.set("prefill", drop_kv_params=1.0 - keeps_kv)
    site.fleet.faults.set("prefill/0", stopping=True)
    for number in range(1, 4):
        exchange = await site.post(MESSAGES, values)
        assert exchange.status == 200
        if stream:
            said = [one.get("delta") for one in exchange.chunks]
            assert said == [one.get("delta") for one in right.chunks]
        else:
            assert exchange.json["content"] == right.json["content"]
            assert exchange.json["stop_reason"] == "max_tokens"
        assert (await site.ended(number))[-1].outcome is Outcome.OK
    assert sum(record.retries for record in site.world.ended) >= 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@served(flags={"direct": "prefill"})
async def test_a_message_that_has_begun_says_that_it_was_given_up(site: Site, role: str) -> None:
    """Of a prefiller that does all of it, and of a decode rank."""
    site.fleet.faults.set("prefill", drop_kv_params=float(role == "prefill"))
    exchange = await site.send(MESSAGES, TALK | {"stream": True}).until_events(9)
    busy = next(i for i in (0, 1) if site.fleet.engine(f"{role}/{i}").exchanges)
    site.fleet.faults.set(f"{role}/{busy}", stopping=True)
    await exchange.end()
    assert exchange.chunks[-1]["type"] == "error"
    assert SAID in exchange.chunks[-1]["error"]["message"]
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@served(flags={"direct": "prefill"})
async def test_a_response_that_was_given_up_is_asked_of_another_engine(
    site: Site, role: str, *, stream: bool
) -> None:
    """Engines tell it of models in harmony format alone, by the status."""
    last = {"type": "response.completed", "response": response("cancelled")}
    given_up = events(last) if stream else json.dumps(response("cancelled")).encode()
    whole = events(COMPLETED) if stream else json.dumps(response("completed")).encode()
    kind = b"text/event-stream" if stream else b"application/json"
    asked: list[str] = []

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        asked.append(engine)
        sends(given_up if len(asked) == 1 else whole, kind)(engine, request, reply)

    wholly = {"truncation": "auto"} if role == "prefill" else {}
    handlers = site.handlers if role == "prefill" else site.rank_handlers
    handlers[RESPONSES.encode()] = answer
    exchange = await site.post(RESPONSES, ASKED | wholly | {"stream": stream})
    assert (exchange.status, exchange.body) == (200, whole)
    assert [one.partition("/")[0] for one in asked] == [role] * 2
    assert len(set(asked)) == 2


@pytest.mark.parametrize("keeps_kv", [1, 0], ids=["by a rank", "by a prefiller"])
@served(flags={"direct": "prefill"})
async def test_a_message_that_is_aborted_by_order_ends_with_what_it_had(
    site: Site, keeps_kv: int
) -> None:
    site.fleet.faults.set("prefill", drop_kv_params=1.0 - keeps_kv)
    stream = await site.send(MESSAGES, TALK | {"stream": True}).until_events(9)
    whole = site.send(MESSAGES, TALK)
    await site.until(lambda: len(site.seen) == 4)
    assert (await site.admin("/abort_requests", b"{}")).status == 200
    await stream.end()
    await whole.end()
    assert stream.chunks[-1]["type"] == "message_stop"
    assert (whole.status, whole.json.get("stop_reason")) == (200, None)
    assert {record.outcome for record in await site.ended(2)} == {Outcome.OK}

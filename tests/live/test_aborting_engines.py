"""Engines that abort what they have, as vLLM does when it is told to stop, and when it is told to sleep."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.agents import ID, MESSAGES, PATHS, alone, body, failed_within, plain, same
from tests.live.control.test_pausing import reason
from tests.support.site import Site, answering, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import HttpRequest, Reply

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
}
IDS: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 60, "ignore_eos": True, "temperature": 0},
}
SAID = "the engine aborted the request"


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_prompt_whose_prefiller_is_told_to_stop_is_prefilled_elsewhere(
    site: Site, *, stream: bool
) -> None:
    """Its answer says 200 and has no text: the client had that for a whole answer."""
    values = TALK | {"stream": stream}
    right = await site.ask("decode/0", CHAT, values)
    site.fleet.faults.set("prefill/0", stopping=True)
    for number in range(1, 4):
        exchange = await site.post(CHAT, values)
        assert (exchange.status, exchange.text) == (200, right.text)
        assert (await site.ended(number))[-1].outcome is Outcome.OK
    assert sum(record.retries for record in site.world.ended) >= 1


@pytest.mark.parametrize(("path", "values"), [(CHAT, TALK), (GENERATE, IDS)])
@served()
async def test_a_whole_answer_is_decoded_elsewhere(
    site: Site, path: str, values: dict[str, Any]
) -> None:
    right = await site.ask("decode/1", path, values)
    exchange = site.send(path, values)
    await site.until(lambda: len(site.received("decode", path)) == 2)
    await site.until(lambda: bool(site.fleet.engine("decode/0").exchanges))
    site.fleet.faults.set("decode/0", stopping=True)
    await exchange.end()
    said, wanted = exchange.json["choices"], right.json["choices"]
    assert (exchange.status, said) == (200, wanted)
    (record,) = await site.ended()
    assert (record.outcome, record.retries, record.output_tokens) == (Outcome.OK, 1, 60)


@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: {"resume": resume})
async def test_a_stream_that_has_begun_goes_on_elsewhere_or_says_that_it_does_not(
    site: Site, resume: str
) -> None:
    values = TALK | {"stream": True}
    right = await site.ask("decode/1", CHAT, values)
    exchange = await site.send(CHAT, values).until_events(9)
    site.fleet.faults.set("decode/0", stopping=True)
    await exchange.end()
    (record,) = await site.ended()
    if resume == "exact":
        assert (exchange.done, exchange.text, reason(exchange)) == (True, right.text, "length")
        assert (record.outcome, record.resumes) == (Outcome.OK, 1)
    else:
        assert right.text.startswith(exchange.text)
        assert SAID in exchange.chunks[-1]["error"]["message"]
        assert exchange.error is not None
        assert (record.outcome, record.status) == (Outcome.UPSTREAM_ERROR, 200)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: {"resume": resume})
async def test_what_an_engine_closes_as_it_aborts_is_not_closed_for_the_client(
    site: Site, resume: str, path: str
) -> None:
    values = body(path, tokens=60, stream=True, temperature=0)
    right = await alone(site, path, values, "decode/1")
    exchange = await site.send(path, values, headers=ID).until_events(9)
    site.fleet.faults.set("decode/0", stopping=True)
    await exchange.end()
    (record,) = await site.ended()
    if path == MESSAGES and resume == "exact":
        same(exchange, right)
        assert (record.outcome, record.resumes) == (Outcome.OK, 1)
    elif path == MESSAGES:
        assert SAID in failed_within(exchange, path)
        assert plain(right.body).startswith(plain(b"".join(exchange.events[:-1])))
    else:  # It says that it has completed.
        assert record.outcome is Outcome.OK


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@served(flags=lambda first_token: {"first_token": first_token})
async def test_a_stream_of_which_nothing_new_has_come_is_repeated(
    site: Site, first_token: str
) -> None:
    values = TALK | {"stream": True}
    right = await site.ask("decode/1", CHAT, values)
    site.fleet.faults.set("decode/0", stopping=True)
    exchange = await site.post(CHAT, values)
    assert (exchange.done, exchange.text) == (True, right.text)
    (record,) = await site.ended()
    assert (record.outcome, record.retries) == (Outcome.OK, 1)


@served(flags={"direct": "prefill"})
async def test_an_engine_that_did_all_of_a_request_is_followed_by_another(site: Site) -> None:
    values = TALK | {"n": 2, "seed": 3, "temperature": 1}
    right = await site.ask("prefill/1", CHAT, values)
    exchange = site.send(CHAT, values)
    await site.until(lambda: any(site.fleet.engine(f"prefill/{i}").exchanges for i in (0, 1)))
    busy = next(i for i in (0, 1) if site.fleet.engine(f"prefill/{i}").exchanges)
    site.fleet.faults.set(f"prefill/{busy}", stopping=True)
    await exchange.end()
    assert (exchange.status, exchange.json["choices"]) == (200, right.json["choices"])


@served()
async def test_where_all_engines_abort_the_client_is_told(site: Site) -> None:
    site.fleet.faults.set("decode", stopping=True)
    exchange = await site.post(CHAT, TALK)
    assert (exchange.status, exchange.json["error"]["message"]) == (502, SAID)
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: {"resume": resume})
async def test_what_is_aborted_by_order_ends_with_what_it_had(site: Site, resume: str) -> None:
    streams = [site.send(CHAT, TALK | {"stream": True, "max_tokens": 400}) for _ in range(3)]
    for stream in streams:
        await stream.until_events(9)
    whole = site.send(CHAT, TALK | {"max_tokens": 400})
    await site.until(lambda: len(site.received("decode", CHAT)) == 4)
    assert (await site.admin("/abort_requests", b"{}")).status == 200
    for answer in (*streams, whole):
        await answer.end()
        assert (answer.status, reason(answer), answer.error) == (200, "abort", None)
    assert {record.outcome for record in await site.ended(4)} == {Outcome.OK}


# What an engine gave up, in the words of each API; and answers that only hold such words.
#
# A body holds words of its client (`metadata`) and of the model (a tool's input) unescaped.


LOOKALIKES, RESPONSES = "/v1/messages", "/v1/responses"
LOOKALIKE_TALK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 60,
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "t1 t2 t3"}
WORDS = {"finish_reason": "abort", "stop_reason": "recomputed", "status": "cancelled"}
CALL = {"type": "tool_use", "id": "1", "name": "note", "input": WORDS}


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


COMPLETED = {"type": "response.completed", "response": response("completed")}


@pytest.mark.parametrize(
    ("path", "values", "answer"),
    [
        (RESPONSES, ASKED | {"metadata": WORDS}, json.dumps(response("completed")).encode()),
        (LOOKALIKES, LOOKALIKE_TALK, json.dumps(message([CALL], "tool_use")).encode()),
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
    handlers[path.encode()] = answering(200, answer, kind=kind)
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
    values = LOOKALIKE_TALK | {"stream": stream}
    right = await site.ask("prefill/1", LOOKALIKES, values)
    site.fleet.faults.set("prefill", drop_kv_params=1.0 - keeps_kv)
    site.fleet.faults.set("prefill/0", stopping=True)
    for number in range(1, 4):
        exchange = await site.post(LOOKALIKES, values)
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
    exchange = await site.send(LOOKALIKES, LOOKALIKE_TALK | {"stream": True}).until_events(9)
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

    def answer(engine: str, _: "HttpRequest", reply: "Reply") -> None:
        asked.append(engine)
        said = given_up if len(asked) == 1 else whole
        reply.send(200, [(b"content-type", kind)], said)

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
    stream = await site.send(LOOKALIKES, LOOKALIKE_TALK | {"stream": True}).until_events(9)
    whole = site.send(LOOKALIKES, LOOKALIKE_TALK)
    await site.until(lambda: len(site.seen) == 4)
    assert (await site.admin("/abort_requests", b"{}")).status == 200
    await stream.end()
    await whole.end()
    assert stream.chunks[-1]["type"] == "message_stop"
    assert (whole.status, whole.json.get("stop_reason")) == (200, None)
    assert {record.outcome for record in await site.ended(2)} == {Outcome.OK}

"""Streams of /v1/messages and /v1/responses: how they end, well or not, and what is noted of it."""

import json
from typing import TYPE_CHECKING

import pytest
from tests.live.stream_client import GONE, Client
from tests.support.site import Site, served

from balanceroute.proxy.live.openai.named_events import Turn, name_of, read_turn
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
BODY: dict[str, object] = {"model": "tiny", "input": "t1", "max_tokens": 5, "stream": True}
BODY["messages"] = [{"role": "user", "content": "t1"}]


def event(name: str, **members: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **members})}\n\n".encode()


BEGIN = {
    MESSAGES: event("message_start", message={}) + event("content_block_delta", delta={}),
    RESPONSES: event("response.created") + event("response.output_text.delta", delta="a"),
}
FINAL = {
    MESSAGES: event("message_delta", usage={"output_tokens": 7}) + event("message_stop"),
    RESPONSES: event("response.completed", response={"usage": {"output_tokens": 7}}),
}


@pytest.mark.parametrize(
    ("sent", "turn"),
    [
        (event("message_start"), None),
        (event("content_block_delta", error={"message": "x"}), None),
        (b"data: {}\n\n", None),
        (b": ping\n\n", None),
        (event("message_stop"), Turn(True, "", False, None)),
        (event("message_delta", usage={"output_tokens": 3}), Turn(False, "", False, 3)),
        (event("message_delta", usage={"output_tokens": -3}), Turn(False, "", False, None)),
        (event("message_delta", usage={"output_tokens": True}), Turn(False, "", False, None)),
        (event("message_delta", usage=[]), Turn(False, "", False, None)),
        (event("message_delta", delta={"stop_reason": "end_turn"}), Turn(False, "", False, None)),
        (event("message_delta", delta={"stop_reason": None}), Turn(False, "", False, None, True)),
        (
            event("response.completed", response={"status": "cancelled"}),
            Turn(True, "", False, None, True),
        ),
        (event("error", error={"message": "no"}), Turn(False, "no", True, None)),
        (event("error", message="no"), Turn(False, "no", True, None)),
        (b"event: error\ndata: oops\n\n", Turn(False, "error", True, None)),
        (b"event: error\r\ndata: {}\r\n\r\n", Turn(False, "error", True, None)),
        (b'data: {"error":{"message":"no","code":400}}\n\n', Turn(False, "no", True, None)),
        (b'data: {"object":"error","message":"no"}\n\n', Turn(False, "no", True, None)),
        (b'data: {"type":"error","error":{"message":"no"}}\n\n', Turn(False, "no", True, None)),
        (b'data: {"type":"message_stop"}\nevent: message_stop\n\n', Turn(True, "", False, None)),
        (b'data: {"type":"content_block_delta","delta":{}}\n\n', None),
        (
            event("response.failed", response={"error": {"message": "no"}}),
            Turn(True, "no", False, None),
        ),
        (
            event("response.incomplete", response={"usage": {"output_tokens": 9}}),
            Turn(True, "", False, 9),
        ),
        # Nobody can read it.
        (
            b"event:response.completed\ndata: [" + b"[" * 5000 + b"\n\n",
            Turn(False, "", False, None),
        ),
        (b'event: message_stop\ndata: {"type":"mess\n\n', Turn(False, "", False, None)),
        (b"event: message_stop\n\n", None),
        # The last name counts.
        (
            b'event: message\nid: 7\nretry: 1\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
            Turn(True, "", False, None),
        ),
        (b'event: message_stop\rdata: {"type":"message_stop"}\r\r', Turn(True, "", False, None)),
    ],
)
def test_only_the_events_that_tell_are_read(sent: bytes, turn: Turn | None) -> None:
    assert read_turn(sent, name_of(sent)) == turn


def test_the_events_of_other_apis_are_counted_and_pass_as_they_are() -> None:
    events = [
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: content_block_delta\ndata: {"delta":{"text":"data:"}}\n\n',
        b": ping\n\n",
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b"event: message_stop\ndata: {}\n\n",
    ]
    client = Client(openai=False, cached_tokens=1, resumed_tokens=0).answer(*events).end()
    assert client.received == b"".join(events)
    assert client.tokens == 1  # Nothing but a delta is a token.
    assert client.turns[-1] == "ended"


def test_the_count_of_a_named_stream_is_the_engines_if_it_tells_one() -> None:
    client = Client(openai=False).answer(BEGIN[MESSAGES], FINAL[MESSAGES]).end()
    assert (client.tokens, client.leg.count_tokens()) == (1, 7)


def test_a_named_error_is_the_first_event_or_the_clients() -> None:
    failure = event("error", error={"message": "x" * 300})
    first = Client(openai=False).answer(b": ping\n\n", failure)
    assert (first.turns, first.first_errors) == (["remarked", "error first"], [failure])
    later = Client(openai=False).answer(BEGIN[MESSAGES], failure).end()
    assert later.received == BEGIN[MESSAGES] + failure
    assert later.turns[-1] == "error: " + "x" * 200
    resumed = Client(openai=False, resumed_tokens=1).answer(failure).end()
    assert resumed.received == failure


# What a prefiller answers, as far as it is read.
KV = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}
KV |= {"remote_host": "h", "remote_port": 1}
PREFILLED: dict[str, dict[str, object]] = {
    MESSAGES: {"content": [], "stop_reason": "max_tokens", "usage": {"input_tokens": 3}},
    RESPONSES: {"output": [], "status": "incomplete", "usage": {"input_tokens": 3}},
}


AHEAD = event("response.created", response={"id": "r"}) + event("response.in_progress")


def test_what_comes_ahead_of_a_response_waits_for_something_of_it() -> None:
    client = Client(openai=False).answer(AHEAD)
    assert (client.pieces, client.turns, client.tokens) == ([], [], 0)
    token = event("response.output_text.delta", delta="a")
    client.leg.on_data(token)
    assert client.received == AHEAD + token
    assert client.turns[0] == "started"


@pytest.mark.parametrize("ahead", [AHEAD, event("message_start", message={})])
def test_an_error_behind_it_is_the_first_event(ahead: bytes) -> None:
    failure = event("error", error={"message": "x"})
    client = Client(openai=False).answer(ahead, failure)
    assert (client.first_errors, client.pieces) == ([failure], [])


def test_a_beginning_that_is_too_long_does_not_wait() -> None:
    long = event("response.created", response={"instructions": "x" * (5 << 20)})
    client = Client(openai=False).answer(AHEAD, long)
    assert client.received == AHEAD + long


def test_whoever_resumes_has_the_beginning() -> None:
    for ahead in (AHEAD, event("message_start", message={})):
        client = Client(openai=False, resumed_tokens=1).answer(ahead, BEGIN[RESPONSES])
        assert client.received == event("response.output_text.delta", delta="a")


def test_tokens_are_taken_without_being_read() -> None:
    tokens = [event("content_block_delta", index=i, delta={"text": "a"}) for i in range(4)]
    client = Client(openai=False).answer(BEGIN[MESSAGES], tokens[0])
    plain = [client.reader.plain]
    client.leg.on_data(b"".join(tokens[1:]))
    stop = event("content_block_stop", index=0)
    client.leg.on_data(tokens[0] + stop)
    plain.append(client.reader.plain)
    assert plain == [True, False]  # Nothing overtakes what waits.
    client.leg.release(client.now_s + 0.3)
    assert (client.tokens, client.received) == (
        6,
        BEGIN[MESSAGES] + b"".join(tokens) + tokens[0] + stop,
    )


SIGNATURE = {"type": "signature_delta", "signature": "a"}
CLOSING = {
    MESSAGES: event("content_block_delta", delta=SIGNATURE, index=0)
    + event("content_block_stop", index=0),
    RESPONSES: event("response.output_text.done", text="a")
    + event("response.output_item.done", item={}),
}


@pytest.mark.parametrize("path", CLOSING)
def test_what_closes_a_part_waits_for_what_follows(path: str) -> None:
    closing, token = CLOSING[path], event("response.output_text.delta", delta="a")
    begun = Client(openai=False).answer(BEGIN[path], token, closing)
    assert begun.received == BEGIN[path] + token
    follows = [token, b": a\n\n" + token, event("error", error={"message": "a"})]
    for one in follows:
        client = Client(openai=False).answer(BEGIN[path], token, closing, one, token)
        passed = client.received.replace(b": a\n\n", b"")
        assert passed == BEGIN[path] + token + closing + one.replace(b": a\n\n", b"") + token
    begun.leg.release(begun.now_s + 0.1)
    assert begun.received == BEGIN[path] + token
    begun.leg.release(begun.now_s + 0.3)
    begun.leg.release(begun.now_s + 0.6)
    assert begun.received == BEGIN[path] + token + closing
    broken = Client(openai=False).answer(BEGIN[path], token, closing)
    broken.leg.on_error(GONE)
    assert (broken.received, broken.turns[-1]) == (BEGIN[path] + token, "broken")


@pytest.mark.parametrize("kind", ["text", "thinking", "input_json", "signature"])
def test_what_brings_tokens_is_taken_without_being_read_as_vllm_writes_it(kind: str) -> None:
    delta = {"type": "content_block_delta", "delta": {"type": f"{kind}_delta"}, "index": 0}
    data = json.dumps(delta, separators=(",", ":"))
    token = f"event: content_block_delta\ndata: {data}\n\n".encode()
    client = Client(openai=False).answer(BEGIN[MESSAGES])
    taken = client.reader.take_token(token[:-2])
    assert taken == (b"" if kind == "signature" else token)


def test_what_is_closed_in_many_words_does_not_wait() -> None:
    large = event("response.output_text.done", text="a" * (5 << 20))
    client = Client(openai=False).answer(BEGIN[RESPONSES], large)
    assert client.received == BEGIN[RESPONSES] + large


def test_a_rank_hands_a_message_back_by_a_stop_sequence() -> None:
    back = {"stop_reason": "stop_sequence", "stop_sequence": "recomputed"}
    start, end = event("message_start", message={}), event("message_delta", delta=back)
    client = Client(openai=False, keep_text=True).answer(start, end)
    assert (client.turns[-1], client.received) == ("recomputed", b"")
    assert not client.reader.past_opening
    client = Client(openai=False, keep_text=True).answer(BEGIN[MESSAGES], end)
    assert (client.turns[-1], client.reader.past_opening) == ("recomputed", True)
    client = Client(openai=False).answer(BEGIN[MESSAGES], end)  # Its client's own.
    assert client.received == BEGIN[MESSAGES] + end


class Engine:
    """An engine that sends these pieces, and then ends, or breaks off, or goes on holding.

    A prefiller says that it has prefilled.
    """

    def __init__(self, *pieces: bytes, then: str = "end") -> None:
        self.left = False
        self._pieces = pieces
        self._then = then

    def __call__(self, engine: str, request: "HttpRequest", reply: "Reply") -> None:
        if engine.startswith("prefill"):
            answer = PREFILLED[request.path.decode()] | {"kv_transfer_params": KV}
            reply.send(200, [], json.dumps(answer).encode())
            return
        reply.on_closed = self._leave
        reply.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        for piece in self._pieces:
            reply.write(piece)
        if self._then != "hold":
            getattr(reply, self._then)()

    def _leave(self) -> None:
        self.left = True


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@served()
async def test_a_stream_with_its_final_event_is_well(site: Site, path: str) -> None:
    site.handlers[path.encode()] = Engine(BEGIN[path], FINAL[path])
    answer = await site.post(path, BODY)
    assert answer.body == BEGIN[path] + FINAL[path]
    assert answer.error is None
    (record,) = site.world.ended
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 7)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@served()
async def test_a_stream_without_its_final_event_is_cut_short(site: Site, path: str) -> None:
    """Such a stream ended cleanly, as if it were whole, and counted as ok."""
    site.handlers[path.encode()] = Engine(BEGIN[path])
    answer = await site.post(path, BODY)
    assert answer.body.startswith(BEGIN[path])
    assert answer.error is not None
    assert answer.events[-1].startswith(b"event: error\ndata: ")
    error = json.loads(answer.events[-1].partition(b"data: ")[2])["error"]
    assert "cut short" in error["message"]
    if path == MESSAGES:
        assert error["type"] == "api_error"
    (record,) = site.world.ended
    assert record.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        (MESSAGES, event("error", error={"type": "internal_error", "message": "no memory"})),
        (RESPONSES, event("response.failed", response={"error": {"message": "no memory"}})),
        (RESPONSES, event("error", message="no memory")),
    ],
)
@served()
async def test_an_error_event_is_seen_and_passed_on(site: Site, path: str, failure: bytes) -> None:
    """A stream that ended with an error event counted as ok."""
    site.handlers[path.encode()] = Engine(BEGIN[path], failure)
    answer = await site.post(path, BODY)
    assert answer.body == BEGIN[path] + failure
    (record,) = site.world.ended
    assert record.outcome is Outcome.UPSTREAM_ERROR
    assert "no memory" in record.reason


@served()
async def test_an_error_that_comes_first_is_mended_by_another_engine(site: Site) -> None:
    failure = event("error", error={"type": "internal_error", "message": "no memory"})
    engines = [Engine(failure), Engine(BEGIN[MESSAGES], FINAL[MESSAGES])]

    def in_turn(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        turn = engines[0] if engine.startswith("prefill") else engines.pop(0)
        turn(engine, request, reply)

    site.handlers[MESSAGES.encode()] = in_turn
    answer = await site.post(MESSAGES, BODY)
    assert answer.body == BEGIN[MESSAGES] + FINAL[MESSAGES]
    (record,) = site.world.ended
    assert (record.outcome, record.retries) == (Outcome.OK, 1)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("whole", [True, False])
@served()
async def test_who_leaves_after_the_final_event_had_the_answer(
    site: Site, path: str, whole: bool
) -> None:
    """A client that closes after the last event was logged as cancelled."""
    engine = Engine(BEGIN[path], FINAL[path] if whole else b"", then="hold")
    site.handlers[path.encode()] = engine
    exchange = site.send(path, BODY)
    count = (BEGIN[path] + (FINAL[path] if whole else b"")).count(b"\n\n")
    await exchange.until_events(count)
    exchange.call.abort()
    await site.until(lambda: len(site.world.ended) == 1 and engine.left)
    assert site.world.ended[0].outcome is (Outcome.OK if whole else Outcome.CANCELLED)

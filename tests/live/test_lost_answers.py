"""Answers that are lost late: after the request was taken for decoding, or after its last token."""

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from tests.support.site import Site, play, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "faults",
    [{"reset_after_tokens": 50}, {"stall_after_tokens": 50}],
    ids=lambda one: next(iter(one)),
)
@served(flags={"answer_timeout_s": 4.0})
async def test_a_whole_answer_that_its_rank_loses_is_prefilled_and_decoded_elsewhere(
    site: Site, faults: dict[str, int]
) -> None:
    values = {"messages": [], "max_tokens": 100, "ignore_eos": True}
    right = await site.ask("prefill/0", CHAT, values)
    site.fleet.faults.set("decode/0", **faults)
    exchange = await site.post(CHAT, values)
    assert exchange.status == 200
    assert exchange.text == right.text
    # By then the rank was thought to have the KV cache, so that the prefiller's is not trusted.
    assert len(site.received("prefill", CHAT)) == 3
    assert [one.engine for one in site.received("decode", CHAT)] == ["decode/0", "decode/1"]
    (record,) = await site.ended()
    assert (record.retries, record.output_tokens) == (1, 100)


@served()
async def test_the_tokens_of_an_answer_count_if_the_client_leaves_before_its_very_end(
    site: Site,
) -> None:
    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n')
        reply.write(b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n')

    site.handlers[b"/v1/completions"] = answer
    # Decoded without a prefill, and with a last event that waits for nothing.
    values = {"prompt": "a", "echo": True, "stream": True}
    values |= {"stream_options": {"include_usage": True}}
    exchange = site.send("/v1/completions", values)
    await exchange.until_events(2)
    exchange.call.abort()
    (record,) = await site.ended()
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 2)


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_a_stream_whose_rank_dies_behind_the_last_token_is_complete(options: object) -> None:
    values = {"messages": [], "max_tokens": 9, "stream": True, "temperature": 0}
    values |= {"stream_options": options, "ignore_eos": True}

    def die(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for event in said:
            reply.write(event)
        reply.abort()
        assert json.loads(request.body)["stream_options"]["continuous_usage_stats"]

    async def scenario(site: Site) -> None:
        asked = values | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        said[:] = (await site.ask("decode/0", CHAT, asked)).events[:-2]
        right = await site.post(CHAT, values)
        site.rank_handlers[CHAT.encode()] = die
        exchange = await site.post(CHAT, values)
        assert exchange.done
        got, wanted = exchange.chunks, right.chunks
        for one in (*got, *wanted):
            for name in ("id", "created", "system_fingerprint"):
                one.pop(name, None)
        assert got == wanted
        first, second = await site.ended(2)
        assert (second.outcome, second.output_tokens) == (Outcome.OK, 9)
        assert second.output_tokens == first.output_tokens

    said: list[bytes] = []
    play(scenario, prompt_tokens_details=True)


class Endless:
    """Engines whose answers go on for ever, a piece every so many seconds."""

    def __init__(self, kind: bytes, piece: bytes, gap_s: float) -> None:
        self.replies: list[Reply] = []
        self._kind = kind
        self._piece = piece
        self._gap_s = gap_s

    def answer(self, reply: "Reply", first: bytes = b"") -> None:
        self.replies.append(reply)
        reply.start(200, [(b"content-type", self._kind)])
        reply.write(first)
        self._go_on(reply)

    def _go_on(self, reply: "Reply") -> None:
        if not reply.closed:
            reply.write(self._piece)
            asyncio.get_running_loop().call_later(self._gap_s, self._go_on, reply)


@served(flags={"answer_limit_bytes": 20_000})
async def test_a_whole_answer_without_end_is_left_at_the_limit(site: Site) -> None:
    endless = Endless(b"application/json", b" " * 4_000, 0.01)
    site.rank_handlers[CHAT.encode()] = lambda _, __, reply: endless.answer(reply, b'{"choices":[')
    since_s = site.loop.time()
    exchange = await site.post(CHAT, {"messages": [], "max_tokens": 100})
    assert site.loop.time() < since_s + 5.0
    assert exchange.status == 502
    assert "the answer is longer than 20000 bytes" in exchange.json["error"]["message"]
    # It is tried on one more rank, as that one may not have gone astray.
    assert len(endless.replies) == 2
    await asyncio.sleep(0.1)
    assert all(reply.closed for reply in endless.replies)
    (record,) = await site.ended()
    assert (record.outcome, record.retries) == (Outcome.UPSTREAM_ERROR, 1)


@pytest.mark.parametrize("begun", [False, True])
@served(flags={"idle_stream_timeout_s": 20.0, "first_token_timeout_s": 10.0})
async def test_comments_do_not_keep_a_stream_alive_in_which_nothing_is_said(
    site: Site, *, begun: bool
) -> None:
    """VLLM's `--sse-keep-alive-interval` sends them for as long as its engine says nothing."""
    token = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    endless = Endless(b"text/event-stream", b": keep-alive\n\n", 1.0)
    site.rank_handlers[CHAT.encode()] = lambda _, __, reply: endless.answer(
        reply, token if begun else b""
    )
    since_s = site.loop.time()
    exchange = await site.post(CHAT, {"messages": [], "max_tokens": 100, "stream": True})
    took_s = site.loop.time() - since_s
    if begun:
        assert 20.0 < took_s < 22.0
        assert exchange.events[:2] == [token, b": keep-alive\n\n"]
        assert "stood still for 20 s" in json.loads(exchange.events[-1][6:])["error"]["message"]
    else:
        assert 29.0 < took_s < 33.0
        # The status went with the first comment; each engine was tried nevertheless.
        assert (exchange.status, exchange.events[0]) == (200, b": keep-alive\n\n")
        assert json.loads(exchange.events[-1][6:])["error"]["code"] == 504
        assert exchange.error is not None
        assert len(endless.replies) == 3
    assert len(await site.ended()) == 1


@served(flags={"idle_stream_timeout_s": 20.0, "first_token_timeout_s": 55.0})
async def test_comments_before_the_first_token_reach_a_client_before_it(site: Site) -> None:
    token = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":%s}]}\n\n'
    events = [*[b": keep-alive\n\n"] * 49, token % b"null", token % b'"stop"', b"data: [DONE]\n\n"]

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for second, event in enumerate(events, start=1):
            asyncio.get_running_loop().call_later(float(second), reply.write, event)
        asyncio.get_running_loop().call_later(60.0, reply.end)

    site.rank_handlers[CHAT.encode()] = answer
    exchange = await site.post(CHAT, {"messages": [], "max_tokens": 5, "stream": True})
    assert (exchange.status, exchange.error, exchange.events) == (200, None, events)
    (record,) = await site.ended()
    assert (record.outcome, record.retries) == (Outcome.OK, 0)

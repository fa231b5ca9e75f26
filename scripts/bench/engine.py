"""The cheapest engine that speaks the PD protocol, for benchmarks of proxies.

One process is the prefiller and all decode ranks, each on a port of its own: it prints the prefiller's,
then theirs. All streams emit one event per step, at the same time, as the ranks of a data-parallel fleet
do; each event carries its number and the time it was sent (CLOCK_MONOTONIC, which all processes of a
machine share), so that a client can check the order and measure the transit. A stream that finds no free
slot on its rank waits for one.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from functools import partial
from typing import NamedTuple, cast

import httptools
import uvloop

_PREFILLED = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1,
        "model": "bench",
        "choices": [{"index": 0, "text": "t", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 16, "total_tokens": 17, "completion_tokens": 1},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "5081806d-8b9b-4cd2-affb-b936f63ba3bd",
            "remote_request_id": "cmpl-0",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
    }
).encode()
_ANSWER = (
    b'{"id":"cmpl-0","object":"text_completion","created":1,"model":"bench","choices":[{"index":0,'
    b'"text":"t","logprobs":null,"finish_reason":"length","stop_reason":null}],'
    b'"usage":{"prompt_tokens":16,"total_tokens":17,"completion_tokens":1}}'
)
_METRICS = b'vllm:kv_cache_usage_perc{engine="0",model_name="bench"} 0.1\n'
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm"}]}'
_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-59ed5066805f466aa4f49fa3abb7118c","object":"chat.completion.chunk",'
    b'"created":1795228142,"model":"bench","choices":[{"index":0,"delta":{"content":"%d.%d"},'
    b'"logprobs":null,"finish_reason":%b,"token_ids":null}]%b}\n\n'
)
_USAGE = (
    b',"usage":{"prompt_tokens":16,"total_tokens":%d,"completion_tokens":%d,'
    b'"completion_tokens_details":null}'
)
_TOTAL = (
    b'data: {"id":"chatcmpl-59ed5066805f466aa4f49fa3abb7118c","object":"chat.completion.chunk",'
    b'"created":1795228142,"model":"bench","choices":[],'
    b'"usage":{"prompt_tokens":16,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Stream(NamedTuple):
    """What a client wants."""

    connection: "Connection"  # The client's.
    tokens: int  # As many events are sent.
    usage: bool  # Whether each event has it.


class Rank:
    """The streams of one rank."""

    def __init__(self, slots: int | None) -> None:
        self._slots = slots
        self._waiting: deque[Stream] = deque()
        self._running: dict[Connection, tuple[Stream, int]] = {}

    @property
    def idle(self) -> bool:
        return not self._running

    def add(self, stream: Stream) -> None:
        """Send the first event of a stream, the rest step by step, once a slot is free."""
        if len(self._running) == self._slots:
            self._waiting.append(stream)
            return
        self._send(stream, 0)
        if stream.tokens > 1:
            self._running[stream.connection] = stream, 1

    def remove(self, connection: "Connection") -> None:
        """Stop streaming to a connection that is gone."""
        if self._running.pop(connection, None) is not None:
            self._fill()
        elif self._waiting:
            self._waiting = deque(one for one in self._waiting if one.connection != connection)

    def step(self) -> None:
        """Send one event of each stream."""
        for connection, (stream, sent) in list(self._running.items()):
            self._send(stream, sent)
            if sent + 1 == stream.tokens:
                del self._running[connection]
            else:
                self._running[connection] = stream, sent + 1
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) != self._slots:
            self.add(self._waiting.popleft())

    def _send(self, stream: Stream, number: int) -> None:
        last = number + 1 == stream.tokens
        usage = _USAGE % (17 + number, 1 + number) if stream.usage else b""
        finish = b'"length"' if last else b"null"
        event = _EVENT % (number, time.monotonic_ns(), finish, usage)
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        if last and stream.usage:
            total = _TOTAL % (17 + number, 1 + number)
            chunk += b"%x\r\n%b\r\n" % (len(total), total)
        stream.connection.send(chunk + _DONE if last else chunk)


class Engine:
    """All ranks, and the step that they share."""

    def __init__(self, step_s: float, ranks: int, slots: int | None) -> None:
        self.step_s = step_s
        self.ranks = [Rank(slots) for _ in range(ranks)]
        self._stepping = False

    def add(self, rank: Rank, stream: Stream) -> None:
        rank.add(stream)
        if not self._stepping and not rank.idle:
            self._stepping = True
            loop = asyncio.get_running_loop()
            loop.call_later(self.step_s, self._step, loop.time() + self.step_s)

    def _step(self, due_s: float) -> None:
        for rank in self.ranks:
            rank.step()
        self._stepping = not all(rank.idle for rank in self.ranks)
        if self._stepping:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time(), due_s + self.step_s)
            loop.call_at(due_s, self._step, due_s)


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, engine: Engine, rank: Rank) -> None:
        self._engine = engine
        self._rank = rank
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio transports by duck typing alone.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._rank.remove(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._path == b"/metrics":
            self._answer(_METRICS)
        elif self._path == b"/v1/models":
            self._answer(_MODELS)
        elif not self._body:
            self._answer(b"")
        else:
            self._generate(b"".join(self._body))

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _generate(self, body: bytes) -> None:
        # The flags stand near the end or the beginning of a body; a large prompt is not parsed.
        edges = body if len(body) < 4096 else body[:2048] + body[-2048:]
        squeezed = edges.replace(b" ", b"")
        if b'"do_remote_decode":true' in squeezed:
            self._answer(_PREFILLED)
        elif b'"stream":true' in squeezed:
            begin = squeezed.index(b'"max_tokens":') + 13
            digits = squeezed[begin : begin + 8]
            tokens = int(digits[: next(i for i, c in enumerate(digits) if c not in b"0123456789")])
            self.send(_HEAD)
            usage = b'"continuous_usage_stats":true' in squeezed
            self._engine.add(self._rank, Stream(self, tokens, usage))
        else:
            self._answer(_ANSWER)

    def _answer(self, body: bytes) -> None:
        self.send(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(arguments.step_ms / 1e3, arguments.ranks, arguments.slots)
    # The prefiller answers at once, so it needs none of its own.
    servers = [
        await loop.create_server(partial(Connection, engine, rank), "127.0.0.1", 0, backlog=4096)
        for rank in (engine.ranks[0], *engine.ranks)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="decode ranks")
    parser.add_argument(
        "--slots", type=int, metavar="N", help="streams at a time on each (default: no limit)"
    )
    uvloop.run(_serve(parser.parse_args()))

"""The cheapest engine that speaks the PD protocol, for benchmarks of proxies.

One process is prefiller and decode engine. All streams emit one event per step, at the same time, as
the ranks of a data-parallel fleet do; each event carries its number and the time it was sent
(CLOCK_MONOTONIC, which all processes of a machine share), so that a client can check the order and
measure the transit.
"""

import argparse
import asyncio
import json
import time
from typing import cast

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


class Engine:
    """The streams, and the step that all of them share."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._streams: dict[Connection, tuple[int, int, bool]] = {}
        self._stepping = False

    def add(self, connection: "Connection", tokens: int, *, usage: bool) -> None:
        """Stream `tokens` events to a connection, from the next step on, with usage in each or not."""
        last = tokens == 1
        self._send(connection, 0, last=last, usage=usage)
        if last:
            return
        self._streams[connection] = (1, tokens, usage)
        if not self._stepping:
            self._stepping = True
            loop = asyncio.get_running_loop()
            loop.call_later(self.step_s, self._step, loop.time() + self.step_s)

    def remove(self, connection: "Connection") -> None:
        """Stop streaming to a connection that is gone."""
        self._streams.pop(connection, None)

    def _send(self, connection: "Connection", number: int, *, last: bool, usage: bool) -> None:
        told = _USAGE % (17 + number, 1 + number) if usage else b""
        finish = b'"length"' if last else b"null"
        event = _EVENT % (number, time.monotonic_ns(), finish, told)
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        if last and usage:
            total = _TOTAL % (17 + number, 1 + number)
            chunk += b"%x\r\n%b\r\n" % (len(total), total)
        connection.send(chunk + _DONE if last else chunk)

    def _step(self, due_s: float) -> None:
        for connection, (sent, tokens, usage) in list(self._streams.items()):
            last = sent + 1 == tokens
            self._send(connection, sent, last=last, usage=usage)
            if last:
                del self._streams[connection]
            else:
                self._streams[connection] = (sent + 1, tokens, usage)
        self._stepping = bool(self._streams)
        if self._stepping:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time(), due_s + self.step_s)
            loop.call_at(due_s, self._step, due_s)


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio transports by duck typing alone.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._engine.remove(self)

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
        """Write to the socket."""
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
            self._engine.add(self, tokens, usage=b'"continuous_usage_stats":true' in squeezed)
        else:
            self._answer(_ANSWER)

    def _answer(self, body: bytes) -> None:
        self.send(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(arguments.step_ms / 1e3)
    servers = [
        await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=4096)
        for _ in range(2)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    uvloop.run(_serve(parser.parse_args()))

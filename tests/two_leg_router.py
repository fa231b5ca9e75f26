"""A router as vllm-router is: round robin, nothing held back, and request ids of its own."""

import asyncio
import json
from collections.abc import Sequence
from itertools import count
from urllib.parse import urlsplit

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, Response

_TIMEOUT_S = 1_000.0
_MAX_BYTES = 1 << 24
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class TwoLegRouter:
    """Sends each completion to the next prefiller at once, and from there to the next rank."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill, self._decode = (
            [_endpoint(url) for url in urls] for urls in (prefill, decode)
        )
        self._server = Server(self._take)
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen on a port of 127.0.0.1; return it."""
        await self._server.start("127.0.0.1", 0)
        return self._server.port

    def close(self) -> None:
        """Give up what runs."""
        for task in self._tasks:
            task.cancel()
        self._server.close()
        for endpoint in (*self._prefill, *self._decode):
            endpoint.close()

    def _take(self, request: HttpRequest, reply: Reply) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: HttpRequest, reply: Reply) -> None:
        number = next(self._numbers)
        asked = json.loads(request.body)
        first = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": _REMOTE_DECODE}
        first.pop("stream_options", None)
        prefiller = self._prefill[number % len(self._prefill)]
        told = json.loads((await _post(prefiller, number, first)).body)["kv_transfer_params"]
        rank = self._decode[number % len(self._decode)]
        answer = await _post(rank, number, asked | {"kv_transfer_params": told})
        reply.send(answer.status, [(b"content-type", b"text/event-stream")], answer.body)


def _endpoint(url: str) -> Endpoint:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Endpoint(parts.hostname, parts.port)


async def _post(endpoint: Endpoint, number: int, values: object) -> Response:
    headers = [
        (b"content-type", b"application/json"),
        (b"x-request-id", f"___prefill_addr_a___decode_addr_b_{number}".encode()),
    ]
    body = json.dumps(values).encode()
    return await fetch(
        endpoint,
        b"POST",
        b"/v1/completions",
        headers,
        body,
        timeout_s=_TIMEOUT_S,
        max_bytes=_MAX_BYTES,
    )

"""An emulated fleet in virtual time, and a client that speaks to its engines."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.support.played import played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate import EmulatedFleet, EmulationSettings
from balanceroute.proxy.wire.http1.client import Call, Endpoint
from balanceroute.proxy.wire.messages import Headers, WireError
from balanceroute.proxy.wire.sse import EventScanner, event_data

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG_S = 600.0  # Long enough for whatever ends by itself.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Exchanged:
    """One exchange with an engine, as far as it has come."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the head came.
        self.headers: Headers = []
        self._body = bytearray()
        # Of a stream: its events, each with the time at which it came.
        self.events: list[tuple[float, bytes]] = []
        self.done = asyncio.Event()  # Set at the end, good or bad.
        self.error: WireError | None = None  # How it failed, or None.
        self.call: Call
        self.more = asyncio.Event()
        self._scanner = EventScanner(max_event_bytes=64 << 20)

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.more.set()

    def on_data(self, data: bytes) -> None:
        self._body += data
        now_s = asyncio.get_running_loop().time()
        self.events += [(now_s, event) for event in self._scanner.feed(data)]
        self.more.set()

    def on_end(self) -> None:
        self.done.set()
        self.more.set()

    def on_error(self, error: WireError) -> None:
        self.error = error
        self.on_end()

    @property
    def body(self) -> bytes:
        """What came of the body."""
        return bytes(self._body)

    async def end(self) -> None:
        """Wait for the end; if the wait is cancelled, leave."""
        try:
            await self.done.wait()
        finally:
            self.call.abort()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so, or until nothing more can come."""
        while not ready() and not self.done.is_set():
            self.more.clear()
            await self.more.wait()
        assert ready(), (self.status, self.body, self.error)

    async def tokens(self, count: int) -> None:
        """Wait for so many events with text."""
        await self.until(lambda: len(self.texts()) >= count)

    @property
    def json(self) -> Any:
        """The body of an answer that is not streamed."""
        return json.loads(self.body)

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream as JSON, without `[DONE]`."""
        data = [event_data(event) for _, event in self.events]
        return [json.loads(one) for one in data if one and one != b"[DONE]"]

    @property
    def finished(self) -> bool:
        """Whether a stream ended with `[DONE]`."""
        return bool(self.events) and event_data(self.events[-1][1]) == b"[DONE]"

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    def texts(self, index: int = 0) -> list[str]:
        """The text of each token of a choice."""
        found = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta", choice)
                if choice["index"] == index and "role" not in delta:
                    found.append(delta.get("content", delta.get("text")) or "")
        return found

    def text(self, index: int = 0) -> str:
        """The whole text of a choice."""
        if self.events:
            return "".join(self.texts(index))
        choice = self.json["choices"][index]
        said = choice["message"]["content"] if "message" in choice else choice["text"]
        assert isinstance(said, str)
        return said

    def reasons(self, index: int = 0) -> tuple[str, object]:
        """Finish reason and stop reason of a choice."""
        choices = [
            choice
            for chunk in (self.chunks if self.events else [self.json])
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        return choices[-1]["finish_reason"], choices[-1]["stop_reason"]


class Lab:
    """A fleet and its client."""

    def __init__(self, fleet: EmulatedFleet, loop: VirtualLoop) -> None:
        self.fleet = fleet  # It serves a model named "tiny".
        self.loop = loop  # Its clock is virtual.
        self._endpoints: dict[int, Endpoint] = {}

    def send(
        self,
        engine: str,
        path: str,
        values: object,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Exchanged:
        """Begin an exchange with an engine; `values` may be JSON or bytes."""
        port = self.fleet.engine(engine).port
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        return self._send(port, method, path, body, headers or {})

    def _send(
        self, port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Exchanged:
        if port not in self._endpoints:
            self._endpoints[port] = Endpoint("127.0.0.1", port)
        exchanged = Exchanged()
        fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        exchanged.call = self._endpoints[port].request(
            method.encode(), path.encode(), fields, body, exchanged
        )
        return exchanged

    async def post(
        self, engine: str, path: str, values: object, headers: Mapping[str, str] | None = None
    ) -> Exchanged:
        """Make an exchange with an engine and wait for its end."""
        exchanged = self.send(engine, path, values, headers=headers)
        await exchanged.end()
        return exchanged

    async def get(self, engine: str, path: str) -> Exchanged:
        """Get something from an engine."""
        exchanged = self.send(engine, path, b"", method="GET")
        await exchanged.end()
        return exchanged

    async def get_url(self, url: str) -> Exchanged:
        """Get something by its URL."""
        address, _, path = url.removeprefix("http://").partition("/")
        exchanged = self._send(int(address.rpartition(":")[2]), "GET", f"/{path}", b"", {})
        await exchanged.end()
        return exchanged

    async def prefill(
        self,
        path: str,
        values: Mapping[str, Any],
        engine: str = "prefill/0",
        params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Exchanged:
        """Send the prefill leg of a request, as a proxy forms it."""
        body = {key: value for key, value in values.items() if key not in ("stream_options", "n")}
        body |= {"stream": False, "max_tokens": 1, "min_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body |= {"kv_transfer_params": params or REMOTE_DECODE}
        name = None if request_id is None else {"X-Request-Id": request_id}
        return await self.post(engine, path, body, name)

    async def prefilled(
        self,
        path: str,
        values: Mapping[str, Any],
        engine: str = "prefill/0",
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Return a request's decode leg, once its prefill is done."""
        answer = await self.prefill(path, values, engine, request_id=request_id)
        assert answer.status == 200, answer.body
        return {**values, "kv_transfer_params": answer.json["kv_transfer_params"]}

    def leases(self) -> dict[str, int]:
        """Return how many leases ended how, without those that never did."""
        counts: dict[str, int] = self.fleet.stats()["leases"]
        return {end: count for end, count in counts.items() if count}

    def close(self) -> None:
        """Close the client's connections."""
        for endpoint in self._endpoints.values():
            endpoint.close()


def play(scenario: Callable[[Lab], Awaitable[None]], **changes: Any) -> None:
    """Play a scenario in virtual time, with a small fleet whose settings may be given."""
    settings: dict[str, Any] = {"model": "tiny", "prefillers": 1, "ranks": 2, "max_model_len": 1024}

    async def main(loop: VirtualLoop) -> None:
        fleet = EmulatedFleet(EmulationSettings(**(settings | changes)), rng=random.Random(7))
        await fleet.start("127.0.0.1", 8000)
        lab = Lab(fleet, loop)
        try:
            await scenario(lab)
        finally:
            lab.close()
            await fleet.close()

    run(main, seed=1, limit_s=100_000.0)


emulated = played_by(play)

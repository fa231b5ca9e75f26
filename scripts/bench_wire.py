"""What the wire costs: CPU of the relaying process alone, by kind of work.

    python scripts/bench_wire.py [--quick] [--streams N] [--json OUT]

The engine and the clients are another process, so `time.process_time` here counts the relay only: its
Python, uvloop and the kernel on its behalf. Variants of one kind of work take turns, and each figure
is the median of the rounds with the smallest and the largest one. The `bare` rows move the same bytes
through an asyncio.Protocol that looks at nothing: what is above them is ours.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import Headers, HttpRequest, WireError
from balanceroute.proxy.wire.sse import EventScanner

HOST = "127.0.0.1"
# A chunk of a real vLLM stream, without log-probabilities.
EVENT = (
    b'data: {"id":"chatcmpl-a9f421953f01eda3","object":"chat.completion.chunk","created":1795230203,'
    b'"model":"tiny","choices":[{"index":0,"delta":{"content":" the"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)
ANSWER = b'{"id":"cmpl-1","object":"text_completion","usage":{"prompt_tokens":9}}'
PROMPT = b'{"model":"tiny","prompt":"Say hello.","max_tokens":1}'
# What a usual client sends.
HEADERS: Headers = [
    (b"accept", b"application/json"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"user-agent", b"OpenAI/Python 2.9.0"),
    (b"authorization", b"Bearer token"),
    (b"content-type", b"application/json"),
]
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much work one round is."""

    rounds: int
    streams: int
    events: int
    requests: int
    bodies: int
    step_s: float


class StreamingEngine:
    """Answers /stream with one event per step to every stream at once, as a decode step does."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._replies: list[Reply] = []

    def answer(self, request: HttpRequest, reply: Reply) -> None:
        if request.path != b"/stream":
            reply.send(200, [(b"content-type", b"application/json")], ANSWER)
            return
        reply.start(200, [(b"content-type", b"text/event-stream")])
        self._replies.append(reply)

    def begin(self) -> None:
        """Begin to step, with the streams that are open."""
        replies, self._replies = self._replies, []
        self._step(replies, self._sizes.events)

    def _step(self, replies: list[Reply], left: int) -> None:
        for reply in replies:
            reply.write(EVENT)
        if left > 1:
            asyncio.get_running_loop().call_later(self._sizes.step_s, self._step, replies, left - 1)
        else:
            for reply in replies:
                reply.end()


class Ignored:
    """Waits for the end of a response."""

    def __init__(self, began: Callable[[], None], ended: Callable[[], None]) -> None:
        self._began = began
        self._ended = ended

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200
        self._began()

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        self._ended()

    def on_error(self, error: WireError) -> None:
        raise error


async def load(
    port: int,
    path: bytes,
    body_bytes: int,
    total: int,
    concurrency: int,
    *,
    all_began: Callable[[], None] = lambda: None,
) -> None:
    """Make `total` requests, `concurrency` at a time; a body of 0 bytes stands for a prompt."""
    body = bytes(body_bytes) or PROMPT
    endpoint = Endpoint(HOST, port)
    done = asyncio.get_running_loop().create_future()
    sent = began = ended = 0

    def begin() -> None:
        nonlocal sent
        sent += 1
        endpoint.request(b"POST", path, HEADERS, body, Ignored(count_head, end))

    def count_head() -> None:
        nonlocal began
        began += 1
        if began == total:
            all_began()

    def end() -> None:
        nonlocal ended
        ended += 1
        if sent < total:
            begin()
        elif ended == total:
            done.set_result(None)

    for _ in range(min(concurrency, total)):
        begin()
    await done
    endpoint.close()


async def peer(pipe: Connection, sizes: Sizes) -> None:
    """Be the engine, and the clients when told."""
    streaming = StreamingEngine(sizes)
    engine = Server(streaming.answer)
    await engine.start(HOST, 0)
    pipe.send(engine.port)
    loop = asyncio.get_running_loop()
    while order := await loop.run_in_executor(None, pipe.recv):
        all_began = asyncio.Event()
        loading = asyncio.create_task(load(*order, all_began=all_began.set))
        if order[1] == b"/stream":
            await all_began.wait()
            pipe.send(None)
            await loop.run_in_executor(None, pipe.recv)
            streaming.begin()
        await loading
        pipe.send(None)
    engine.close()
    await engine.drain()


def run_peer(pipe: Connection, sizes: Sizes) -> None:
    """Be the other process."""
    uvloop.run(peer(pipe, sizes))


class Leg:
    """Relays one response to one reply."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def on_head(self, status: int, headers: Headers) -> None:
        self._reply.start(status, [(b"content-type", b"text/event-stream")])

    def on_data(self, data: bytes) -> None:
        self._reply.write(data)

    def on_end(self) -> None:
        self._reply.end()

    def on_error(self, error: WireError) -> None:
        raise error


class ScanningLeg(Leg):
    """Looks for events on the way."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._scanner = EventScanner()
        self._events = 0

    def on_data(self, data: bytes) -> None:
        self._events += len(self._scanner.feed(data))
        self._reply.write(data)


class BareRelay(asyncio.Protocol):
    """Connects to the engine for each client and moves bytes both ways."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port
        self._engine: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast("asyncio.Transport", transport)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self._engine is None:
            self._early.append(data)
        else:
            self._engine.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._engine is not None:
            self._engine.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        engine, _ = await loop.create_connection(
            lambda: BareReturn(self._client), HOST, self._engine_port
        )
        self._engine = engine
        for data in self._early:
            engine.write(data)


class BareReturn(asyncio.Protocol):
    """Moves the engine's bytes to the client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._write = client.write

    def data_received(self, data: bytes) -> None:
        self._write(data)


class BareAnswer(asyncio.Protocol):
    """Answers every segment with the same bytes."""

    _ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._ANSWER)


class Bench:
    """The relay's side of every experiment."""

    def __init__(self, sizes: Sizes, pipe: Connection) -> None:
        self._sizes = sizes
        self._pipe = pipe
        self._engine_port: int = pipe.recv()
        self._engine = Endpoint(HOST, self._engine_port)

    async def run(self) -> dict[str, dict[str, list[float]]]:
        """Return the samples of each variant of each experiment, in microseconds of CPU."""
        experiments: dict[str, dict[str, Callable[[], Awaitable[float]]]] = {
            "relayed chunk": {
                "bare": self._bare_stream,
                "wire": lambda: self._stream(Leg),
                "wire, events scanned": lambda: self._stream(ScanningLeg),
            },
            "keep-alive request": {
                "bare answer": self._bare_request,
                "wire: server": lambda: self._requests(self._answer),
                "wire: server + engine call": lambda: self._requests(self._forward),
            },
            "1 MiB request": {
                "wire: server": lambda: self._bodies(self._answer),
                "wire: server + engine call": lambda: self._bodies(self._forward),
            },
            "probe (small POST)": {
                "Endpoint.request": self._probes_by_endpoint,
                "fetch": self._probes_by_fetch,
                "httpx.AsyncClient": self._probes_by_httpx,
            },
        }
        samples: dict[str, dict[str, list[float]]] = {}
        for name, variants in experiments.items():
            samples[name] = {variant: [] for variant in variants}
            for _ in range(self._sizes.rounds):
                for variant, measure in variants.items():
                    gc.collect()
                    samples[name][variant].append(await measure())
        self._engine.close()
        self._pipe.send(None)
        return samples

    async def _order(self, *order: object) -> None:
        self._pipe.send(order)
        # Not in a thread: its CPU would count.
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._pipe.fileno(), ready.set)
        await ready.wait()
        loop.remove_reader(self._pipe.fileno())
        self._pipe.recv()

    # Applications.

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        reply.send(200, [(b"content-type", b"application/json")], ANSWER)

    def _forward(self, request: HttpRequest, reply: Reply) -> None:
        self._engine.request(b"POST", request.path, HEADERS, request.body, Forwarded(reply))

    # Experiments. Each returns microseconds of CPU per unit of work.

    async def _stream(self, leg: type[Leg]) -> float:
        def relay(request: HttpRequest, reply: Reply) -> None:
            self._engine.request(b"POST", request.path, HEADERS, request.body, leg(reply))

        server = Server(relay)
        await server.start(HOST, 0)
        cpu_us = await self._streams_through(server.port)
        await server.drain()
        server.close()
        return cpu_us

    async def _bare_stream(self) -> float:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: BareRelay(self._engine_port), HOST, 0)
        cpu_us = await self._streams_through(listener.sockets[0].getsockname()[1])
        listener.close()
        return cpu_us

    async def _streams_through(self, port: int) -> float:
        """Open all streams, then time their events and ends alone."""
        sizes = self._sizes
        await self._order(port, b"/stream", 0, sizes.streams, sizes.streams)  # Until all began.
        begin = time.process_time()
        await self._order("begin")
        cpu_s = time.process_time() - begin
        return cpu_s / (sizes.streams * sizes.events) * 1e6

    async def _requests(self, application: Callable[[HttpRequest, Reply], None]) -> float:
        return await self._serve(application, 0, self._sizes.requests)

    async def _bodies(self, application: Callable[[HttpRequest, Reply], None]) -> float:
        return await self._serve(application, MIB, self._sizes.bodies)

    async def _serve(
        self, application: Callable[[HttpRequest, Reply], None], body_bytes: int, total: int
    ) -> float:
        server = Server(application)
        await server.start(HOST, 0)
        begin = time.process_time()
        await self._order(server.port, b"/answer", body_bytes, total, 16)
        cpu_s = time.process_time() - begin
        server.close()
        await server.drain()
        return cpu_s / total * 1e6

    async def _bare_request(self) -> float:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(BareAnswer, HOST, 0)
        port = listener.sockets[0].getsockname()[1]
        begin = time.process_time()
        await self._order(port, b"/answer", 0, self._sizes.requests, 16)
        cpu_s = time.process_time() - begin
        listener.close()
        return cpu_s / self._sizes.requests * 1e6

    async def _probes_by_endpoint(self) -> float:
        await load(self._engine_port, b"/answer", 0, 16, 16)
        begin = time.process_time()
        await load(self._engine_port, b"/answer", 0, self._sizes.requests, 16)
        return (time.process_time() - begin) / self._sizes.requests * 1e6

    async def _probes_by_fetch(self) -> float:
        endpoint = Endpoint(HOST, self._engine_port)

        async def probe() -> None:
            response = await fetch(
                endpoint, b"POST", b"/answer", HEADERS, PROMPT, timeout_s=30, max_bytes=MIB
            )
            assert response.body == ANSWER

        cpu_us = await self._probes(probe, self._sizes.requests)
        endpoint.close()
        return cpu_us

    async def _probes_by_httpx(self) -> float:
        headers = [(name.decode(), value.decode()) for name, value in HEADERS]
        async with httpx.AsyncClient(trust_env=False) as client:

            async def probe() -> None:
                url = f"http://{HOST}:{self._engine_port}/answer"
                response = await client.post(url, headers=headers, content=PROMPT)
                assert response.content == ANSWER

            return await self._probes(probe, self._sizes.requests // 10)

    async def _probes(self, probe: Callable[[], Awaitable[None]], total: int) -> float:
        async def some() -> None:
            for _ in range(total // 16):
                await probe()

        await asyncio.gather(*(probe() for _ in range(16)))  # Imports and connects.
        begin = time.process_time()
        await asyncio.gather(*(some() for _ in range(16)))
        return (time.process_time() - begin) / (total // 16 * 16) * 1e6


class Forwarded:
    """Sends a whole response on when it is complete."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._body: list[bytes] = []

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self) -> None:
        body = b"".join(self._body)
        self._reply.send(self._status, [(b"content-type", b"application/json")], body)

    def on_error(self, error: WireError) -> None:
        raise error


def measure(sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """Run every experiment against a peer process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_peer, args=(theirs, sizes), daemon=True)
    process.start()

    async def bench() -> dict[str, dict[str, list[float]]]:
        return await Bench(sizes, ours).run()

    samples = uvloop.run(bench())
    process.join()
    return samples


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--streams", type=positive, default=256, help="concurrent streams")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    sizes = (
        Sizes(rounds=1, streams=8, events=10, requests=160, bodies=4, step_s=0.002)
        if arguments.quick
        else Sizes(
            rounds=5,
            streams=arguments.streams,
            events=25,
            requests=2400,
            bodies=60,
            step_s=0.02,
        )
    )
    samples = measure(sizes)
    table = Table(title=f"µs of CPU, {sizes.streams} streams, median of {sizes.rounds} (range)")
    for heading in ("work", "variant", "µs", "range"):
        table.add_column(heading, justify="right" if heading == "µs" else "left", no_wrap=True)
    for name, variants in samples.items():
        for variant, figures in variants.items():
            spread = f"{min(figures):.1f}-{max(figures):.1f}"
            table.add_row(name, variant, f"{statistics.median(figures):.1f}", spread)
        table.add_section()
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(samples, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What an event of a stream costs the server: over HTTP/1.1, https and HTTP/3.

    python scripts/bench_http3.py [--streams N] [--events N] [--rounds N]

The server is a process of its own that writes one event to each stream per step, as a decode step does,
and only its CPU time counts: its Python, uvloop and the kernel on its behalf. The variants take turns, so
that they share what the machine does meanwhile. Prints the median of the rounds with the smallest and the
largest one, and the ratio to https.
"""

import argparse
import asyncio
import multiprocessing
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from balanceroute.proxy.live.listeners import Http3Listener
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.certificate import make_certificate
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Caller, Headers, HttpRequest, WireError
from balanceroute.proxy.wire.reply import Reply

HOST = "127.0.0.1"
STEP_S = 0.01
VARIANTS = ("HTTP/1.1", "https", "HTTP/3")
# A chunk of a real vLLM stream, without log-probabilities.
EVENT = (
    b'data: {"id":"chatcmpl-a9f421953f01eda3","object":"chat.completion.chunk","created":1795230203,'
    b'"model":"tiny","choices":[{"index":0,"delta":{"content":" the"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)


class Stepping:
    """Writes an event to every stream per step, once there are so many."""

    def __init__(self, streams: int, events: int) -> None:
        self._streams, self._events = streams, events
        self._replies: list[Reply] = []
        self.begun_s = self.took_s = 0.0

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        reply.start(200, [(b"content-type", b"text/event-stream")])
        self._replies.append(reply)
        if len(self._replies) == self._streams:
            replies, self._replies = self._replies, []
            self.begun_s = time.process_time()
            self._step(replies, self._events)

    def _step(self, replies: list[Reply], left: int) -> None:
        call_later = asyncio.get_running_loop().call_later
        if not left:
            self.took_s = time.process_time() - self.begun_s
            for reply in replies:
                reply.end()
            return
        for reply in replies:
            reply.write(EVENT)
        call_later(STEP_S, self._step, replies, left - 1)


def serve(pipe: Connection, folder: Path, streams: int, events: int) -> None:
    """Serve each variant; tell after each round what it took."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        application = Stepping(streams, events)
        plain, secure = Server(application), Server(application)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        await plain.start(HOST, 0)
        await secure.start(HOST, 0, ssl=context)
        settings = Http3Settings(http3_streams=streams)
        listener = Http3Listener(settings, folder / "cert.pem", folder / "key.pem")
        await listener.start(secure.service, secure.addresses)
        pipe.send((plain.port, secure.port))
        asked = asyncio.Event()
        loop.add_reader(pipe.fileno(), asked.set)
        while True:
            await asked.wait()
            if pipe.recv() is None:
                break
            asked.clear()
            pipe.send(application.took_s)
        loop.remove_reader(pipe.fileno())

    uvloop.run(main())


class Ended:
    """Waits for the end of an answer."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        self.over.set_result(None)

    def on_error(self, error: WireError) -> None:
        self.over.set_exception(error)


async def one_round(make: Callable[[], Caller], streams: int) -> None:
    """Read so many streams to their end."""
    caller = make()
    ended = []
    for _ in range(streams):
        ended.append(Ended())
        caller.request(b"POST", b"/", [], b"{}", ended[-1])
    for one in ended:
        await one.over
    caller.close()
    await asyncio.sleep(0.05)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=positive, default=64, metavar="N")
    parser.add_argument("--events", type=positive, default=200, metavar="N")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cert, _ = make_certificate(folder)
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, folder, chosen.streams, chosen.events)
        )
        server.start()
        plain, secure = ours.recv()
        context = ssl.create_default_context(cafile=cert)
        makers: dict[str, Callable[[], Caller]] = {
            "HTTP/1.1": lambda: Endpoint(HOST, plain),
            "https": lambda: Endpoint(HOST, secure, ssl=context),
            "HTTP/3": lambda: Http3Endpoint(HOST, secure, trust=Trust(str(cert))),
        }
        events = chosen.streams * chosen.events
        costs: dict[str, list[float]] = {one: [] for one in VARIANTS}
        for _ in range(chosen.rounds + 1):  # The first one warms up.
            for variant, make in makers.items():
                uvloop.run(one_round(make, chosen.streams))
                ours.send(True)
                costs[variant].append(1e6 * ours.recv() / events)
        ours.send(None)
        server.join()
    usual = statistics.median(costs["https"][1:])
    print(f"{chosen.streams} streams of {chosen.events} events")
    for variant, found in costs.items():
        middle = statistics.median(found[1:])
        span = f"{min(found[1:]):.1f} to {max(found[1:]):.1f}"
        print(f"{variant:9} {middle:6.1f} us an event ({span}), {middle / usual:.2f} x https")
    return 0


if __name__ == "__main__":
    sys.exit(main())

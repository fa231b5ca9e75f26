"""Compares the answers over HTTP/3, to clients that others wrote, with those over HTTP/1.1.

    python scripts/check_http3.py [--requests N] [--client NAME ..] [--chromium PATH] [--loss SHARE --delay-ms MS]

Runs `balanceroute serve --http3` before one emulated prefiller and rank, whose name is in the answers, and
sends the same requests by each way: streams, whole answers and bad requests. With --loss and --delay-ms
what goes over HTTP/3 passes a relay that loses and delays packets, each way. Status, headers and body have to be the same, byte for byte, but
for the time at which an answer was made, and the headers that frame a message. The clients:

* `aioquic`: its `H3Connection` and asyncio client;
* `quic-go`: Go's http.Client over github.com/quic-go/quic-go (needs go; downloads it once);
* `own`: the product's client, which is also that of `replay --http3`;
* `chromium`: the `fetch` of a page in a headless browser, whose program --chromium names. What the browser
  says of each answer's protocol has to be h3.

Exits with 1 if an answer differs.
"""

import argparse
import asyncio
import base64
import json
import os
import random
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent

from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.certificate import make_certificate
from balanceroute.proxy.testing.virtual.datagrams import ThinLinkSettings, UdpRelay
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Caller

sys.path.insert(0, str(Path(__file__).parent / "http3_checks"))

from chromium import ChromiumError, over_chromium
from exchange import HOST, PATH, Asked, Got, got, headers_of

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

GO = Path(__file__).parent / "http3_checks"
AT_ONCE = 32
LIMIT_S, MOST_BYTES = 120.0, 1 << 24
RELAY_BITS_PER_S, RELAY_SEED = 50e6, 1

Client = Callable[[int, Path, Sequence[Asked]], list[Got]]
"""Asks a port of UDP, whose server has a certificate, and returns the answers."""


def draw(count: int, rng: random.Random) -> list[Asked]:
    """Return requests of every kind."""
    drawn = []
    for number in range(count):
        values: dict[str, object] = {
            "model": "tiny",
            "prompt": " ".join(f"t{rng.randrange(999)}" for _ in range(rng.randrange(1, 60))),
            "max_tokens": rng.randrange(1, 40),
            "seed": number,
            "ignore_eos": True,
            "stream": rng.random() < 0.6,
        }
        if rng.random() < 0.1:
            values[rng.choice(["model", "max_tokens", "n"])] = rng.choice([-1, "other"])
        drawn.append(Asked(json.dumps(values).encode(), b"check-%d" % number))
    return drawn


async def over(caller: Caller, asked: Sequence[Asked]) -> list[Got]:
    """Ask with a client of the product."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(one: Asked) -> Got:
        async with gate:
            answer = await fetch(
                caller,
                b"POST",
                PATH,
                headers_of(one),
                one.body,
                timeout_s=LIMIT_S,
                max_bytes=MOST_BYTES,
            )
            return got(answer.status, answer.headers, answer.body)

    answers = await asyncio.gather(*(ask(one) for one in asked))
    caller.close()
    return answers


class AioquicClient(QuicConnectionProtocol):
    """One connection of aioquic's client."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._h3 = H3Connection(self._quic)
        self._answers: dict[int, tuple[Headers, bytearray, asyncio.Future[Got]]] = {}

    def quic_event_received(self, event: QuicEvent) -> None:
        for message in self._h3.handle_event(event):
            if not isinstance(message, HeadersReceived | DataReceived):
                continue
            headers, body, over = self._answers[message.stream_id]
            if isinstance(message, HeadersReceived):
                headers += message.headers
            else:
                body += message.data
            if message.stream_ended:
                status = int(dict(headers)[b":status"])
                plain = [field for field in headers if field[0] != b":status"]
                over.set_result(got(status, plain, bytes(body)))

    async def ask(self, one: Asked) -> Got:
        number = self._quic.get_next_available_stream_id()
        over: asyncio.Future[Got] = asyncio.get_running_loop().create_future()
        self._answers[number] = ([], bytearray(), over)
        pseudo: Headers = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", PATH)]
        authority: Headers = [(b":authority", HOST.encode())]
        self._h3.send_headers(number, [*pseudo, *authority, *headers_of(one)])
        self._h3.send_data(number, one.body, end_stream=True)
        self.transmit()
        return await over


def over_own(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with the product's client."""

    async def run() -> list[Got]:
        return await over(Http3Endpoint(HOST, port, trust=Trust(str(cert))), asked)

    return asyncio.run(run())


def over_http1(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask over HTTP/1.1, with the product's client."""
    context = ssl.create_default_context(cafile=cert)

    async def run() -> list[Got]:
        return await over(Endpoint(HOST, port, ssl=context), asked)

    return asyncio.run(run())


def over_aioquic(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with aioquic's client."""
    return asyncio.run(_over_aioquic(port, cert, asked))


async def _over_aioquic(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    configuration = QuicConfiguration(alpn_protocols=["h3"], server_name=HOST)
    configuration.load_verify_locations(cafile=str(cert))
    gate = asyncio.Semaphore(AT_ONCE)
    async with connect(
        HOST, port, configuration=configuration, create_protocol=AioquicClient
    ) as client:
        assert isinstance(client, AioquicClient)

        async def ask(one: Asked) -> Got:
            async with gate:
                return await client.ask(one)

        return await asyncio.gather(*(ask(one) for one in asked))


def over_quic_go(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with quic-go."""
    requests = [{"body": one.body.decode(), "id": one.request_id.decode()} for one in asked]
    done = subprocess.run(
        ["go", "run", ".", f"https://{HOST}:{port}{PATH.decode()}", str(cert)],  # noqa: S607
        cwd=GO,
        input=json.dumps(requests).encode(),
        capture_output=True,
        check=True,
    )
    answers = []
    for one in json.loads(done.stdout):
        if one["error"]:
            raise RuntimeError(one["error"])
        headers = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, values in one["headers"].items()
            for value in values
        ]
        answers.append(got(one["status"], headers, base64.b64decode(one["body"] or "")))
    return answers


@contextmanager
def relayed(port: int, loss: float, delay_ms: float) -> Iterator[int]:
    """Relay UDP to a port in a thread, with losses and delays; yield the relay's port."""
    link = ThinLinkSettings(RELAY_BITS_PER_S, delay_ms / 1_000, loss)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)

    async def begin() -> tuple[UdpRelay, int]:
        relay = UdpRelay(port, seed=RELAY_SEED, up=link, down=link)
        return relay, await relay.start()

    thread.start()
    relay, own = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield own
    finally:
        loop.call_soon_threadsafe(relay.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        for name, way in (("up", relay.up), ("down", relay.down)):
            print(f"relay, {name}: {way.carried} packets arrived, {way.lost} were lost")


def _clients(
    parser: argparse.ArgumentParser, names: Sequence[str] | None, chromium: Path | None
) -> dict[str, Client]:
    """Return the chosen clients, else all that are here; end with an error if one is missing."""
    known: dict[str, Client] = {"aioquic": over_aioquic, "own": over_own}
    if shutil.which("go"):
        known["quic-go"] = over_quic_go
    if chromium is not None:
        if chromium.is_dir() or not os.access(chromium, os.X_OK):
            parser.error(f"--chromium is {chromium}, which is no program")
        known["chromium"] = partial(over_chromium, chromium)
    why = {"quic-go": "needs go, which is not here", "chromium": "needs --chromium PATH"}
    for name, reason in why.items():
        if name in known:
            continue
        if names and name in names:
            parser.error(f"--client {name} {reason}")
        if not names:
            print(f"{name}: skipped, {reason}")
    return {name: known[name] for name in names or known}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=positive, default=1_000, metavar="N")
    parser.add_argument(
        "--client", nargs="+", choices=("aioquic", "quic-go", "own", "chromium"), metavar="NAME"
    )
    parser.add_argument(
        "--chromium", type=Path, metavar="PATH", help="a Chromium or Chrome, as a client too"
    )
    parser.add_argument("--loss", type=float, default=0.0, metavar="SHARE", help="of packets")
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="MS", help="each way")
    chosen = parser.parse_args()
    clients = _clients(parser, chosen.client, chosen.chromium)
    asked = draw(chosen.requests, random.Random(1))
    program = [sys.executable, "-m", "balanceroute.proxy"]
    engines = [
        "emulate",
        "--model",
        "tiny",
        "--prefillers",
        "1",
        "--ranks",
        "1",
        "--time-scale",
        "50",
        # However busy the machine is: what is compared is not the engines.
        "--lease-s",
        "36000",
        "--json-ready",
    ]
    with (
        tempfile.TemporaryDirectory() as name,
        emulated_engines([*program, *engines]) as urls,
    ):
        cert, key = make_certificate(Path(name))
        flags = ["--http3", "--tls-cert", str(cert), "--tls-key", str(key), "--log", "none"]
        flags += ["--port", "0", "--no-admin", "--queue-limit", "10000"]
        for role in ("prefill", "decode"):
            flags += [f"--{role}", *map(str, urls[role])]  # type: ignore[call-overload]
        with subprocess.Popen(
            [*program, "serve", *flags], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"https://\S+:(\d+)", process.stdout.readline())
                assert found is not None, "the proxy did not start"
                port = int(found[1])
                if not chosen.loss and not chosen.delay_ms:
                    return compare(port, port, cert, asked, clients)
                with relayed(port, chosen.loss, chosen.delay_ms) as relay:
                    return compare(port, relay, cert, asked, clients)
            finally:
                process.terminate()


def difference(one: Got, other: Got) -> str:
    """Return what is different first."""
    if (one.status, one.headers) != (other.status, other.headers):
        return f"{one.status}, not {other.status}; {set(one.headers ^ other.headers)}"
    pairs = zip(one.body, other.body, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
    return f"from byte {same} on: {one.body[same:][:80]!r}, not {other.body[same:][:80]!r}"


def compare(
    port: int, udp_port: int, cert: Path, asked: Sequence[Asked], clients: Mapping[str, Client]
) -> int:
    """Print a line for each client; return 1 if an answer differs."""
    expected = over_http1(port, cert, asked)
    counts = dict.fromkeys(sorted({one.status for one in expected}), 0)
    for one in expected:
        counts[one.status] += 1
    print(f"{len(expected)} answers over HTTP/1.1: {counts}")
    differ = 0
    for name, client in clients.items():
        answers = client(udp_port, cert, asked)
        wrong = [
            n for n, pair in enumerate(zip(expected, answers, strict=True)) if pair[0] != pair[1]
        ]
        differ += len(wrong)
        print(f"{name}: {len(answers) - len(wrong)} of {len(answers)} the same")
        for number in wrong[:3]:
            print(
                f"  {asked[number].request_id.decode()}: {difference(expected[number], answers[number])}"
            )
    return 1 if differ else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ChromiumError as error:
        sys.exit(f"chromium: {error}")

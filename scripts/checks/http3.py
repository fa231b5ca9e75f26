"""Answers over HTTP/3, to third-party clients, beside those over HTTP/1.1."""

import argparse
import asyncio
import base64
import hashlib
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.support.arguments import positive
from tests.support.certificate import make_certificate
from tests.support.virtual.datagrams import ThinLinkSettings, UdpRelay

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Caller, Headers
from experiment import emulated

HOST, PATH = "127.0.0.1", b"/v1/completions"
# Of one protocol alone, or of the moment.
_NOT_COMPARED = {b"transfer-encoding", b"connection", b"date"}
_MADE = re.compile(rb'"created": ?[0-9]+')


@dataclass(frozen=True)
class Asked:
    """A request: its body, and its id, from which engines make that of the answer."""

    body: bytes
    request_id: bytes


@dataclass(frozen=True)
class Got:
    """An answer, as far as it is compared."""

    status: int
    headers: frozenset[tuple[bytes, bytes]]
    body: bytes


def got(status: int, headers: Headers, body: bytes) -> Got:
    """Return what is compared."""
    compared = frozenset(field for field in headers if field[0] not in _NOT_COMPARED)
    # A streamed answer has no length over HTTP/1.1, and needs none.
    return Got(status, compared, _MADE.sub(b'"created":0', body))


def headers_of(one: Asked) -> Headers:
    """Return the headers of a request."""
    return [(b"content-type", b"application/json"), (b"x-request-id", one.request_id)]


GO = Path(__file__).parent / "quic_go"
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


def over(make: Callable[[], Caller], asked: Sequence[Asked]) -> list[Got]:
    """Ask with a client of the product, which is made where it runs."""

    async def run() -> list[Got]:
        caller, gate = make(), asyncio.Semaphore(AT_ONCE)

        async def ask(one: Asked) -> Got:
            rest = headers_of(one), one.body
            async with gate:
                answer = await fetch(
                    caller, b"POST", PATH, *rest, timeout_s=LIMIT_S, max_bytes=MOST_BYTES
                )
            return got(answer.status, answer.headers, answer.body)

        answers = await asyncio.gather(*map(ask, asked))
        caller.close()
        return answers

    return asyncio.run(run())


def over_own(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with the product's client."""
    return over(lambda: Http3Endpoint(HOST, port, trust=Trust(str(cert))), asked)


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


def over_aioquic(port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with aioquic's client."""
    configuration = QuicConfiguration(alpn_protocols=["h3"], server_name=HOST)
    configuration.load_verify_locations(cafile=str(cert))
    options: dict[str, Any] = {"configuration": configuration, "create_protocol": AioquicClient}

    async def run() -> list[Got]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with connect(HOST, port, **options) as client:
            assert isinstance(client, AioquicClient)

            async def ask(one: Asked) -> Got:
                async with gate:
                    return await client.ask(one)

            return await asyncio.gather(*map(ask, asked))

    return asyncio.run(run())


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


# The answers as base64: text would be decoded.
_PAGE = """
<script>
(async () => {
  const answers = [];
  const asked = %s;
  while (asked.length) answers.push(...await Promise.all(asked.splice(0, 50).map(async one => {
    const answer = await fetch(%s, {method: "POST", headers: one.headers, body: one.body});
    const bytes = new Uint8Array(await answer.arrayBuffer());
    const text = Array.from(bytes, byte => String.fromCharCode(byte)).join("");
    return {status: answer.status, headers: [...answer.headers], body: btoa(text)};
  })));
  document.documentElement.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(answers))));
})()
</script>
"""
# Of the page's clock, which stands still while it waits for answers.
_BUDGET_MS = 60_000


def over_chromium(program: Path, port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with `fetch` of a page in a headless browser.

    Args:
        program: The browser: chromium, chrome or chromium-headless-shell.
        port: Where the proxy speaks HTTP/3; nothing listens for TCP there.
        cert: Its certificate, which must be of a kind that browsers take: not Ed25519.
        asked: What to send.
    """
    key = x509.load_pem_x509_certificate(cert.read_bytes()).public_key()
    encoded = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    trusted = base64.b64encode(hashlib.sha256(encoded).digest()).decode()
    requests = [
        {
            "headers": {name.decode(): value.decode() for name, value in headers_of(one)},
            "body": one.body.decode(),
        }
        for one in asked
    ]
    url = f"https://{HOST}:{port}{PATH.decode()}"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(_PAGE % (json.dumps(requests), json.dumps(url)))
        words = [str(program), "--headless", "--disable-gpu", f"--user-data-dir={folder}"]
        words += [
            "--no-sandbox"
        ]  # It needs rights that containers lack; only our own page is shown.
        words += ["--enable-quic", f"--origin-to-force-quic-on={HOST}:{port}"]
        words += [f"--ignore-certificate-errors-spki-list={trusted}", "--disable-web-security"]
        words += [f"--virtual-time-budget={_BUDGET_MS}", "--dump-dom", page.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.fullmatch(r"<html>([\w+/=]+)</html>\s*", done.stdout)
    if found is None:
        raise SystemExit(f"Chromium did not answer: {done.stdout[-300:]} {done.stderr[-1000:]}")
    return [
        got(
            one["status"],
            [(name.encode(), text.encode("latin-1")) for name, text in one["headers"]],
            base64.b64decode(one["body"]),
        )
        for one in json.loads(base64.b64decode(found[1]))
    ]


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


def http3(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Compares the answers over HTTP/3, to clients that others wrote, with those over HTTP/1.1.

    Runs `balanceroute serve --http3` before one emulated prefiller and rank, whose name is in the answers, and
    sends the same requests by each way: streams, whole answers and bad requests. What goes over HTTP/3 passes a
    relay of UDP alone that may lose and delay packets, each way. Status, headers and body have to be the same, byte
    for byte, but for the time at which an answer was made, and the headers that frame a message. The clients:

    * `aioquic`: its `H3Connection` and asyncio client;
    * `own`: the product's client, which is also that of `replay --http3`;
    * `quic-go`: Go's http.Client over github.com/quic-go/quic-go, where go is (downloads it once);
    * `chromium`: the `fetch` of a page in the headless browser that --chromium names.

    Exits with 1 if an answer differs.
    """
    parser.add_argument("--requests", type=positive, default=1_000, metavar="N")
    parser.add_argument("--chromium", type=Path, metavar="PATH", help="a Chromium or Chrome")
    parser.add_argument("--loss", type=float, default=0.0, metavar="SHARE", help="of packets")
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="MS", help="each way")
    given = parser.parse_args(words)
    clients: dict[str, Client] = {"aioquic": over_aioquic, "own": over_own}
    if shutil.which("go"):
        clients["quic-go"] = over_quic_go
    if given.chromium is not None:
        if given.chromium.is_dir() or not os.access(given.chromium, os.X_OK):
            parser.error(f"--chromium is {given.chromium}, which is no program")
        clients["chromium"] = partial(over_chromium, given.chromium)
    asked = draw(given.requests, random.Random(1))
    # However busy the machine is, no lease runs out: what is compared is not the engines.
    engines = "--model tiny --prefillers 1 --ranks 1 --time-scale 50 --lease-s 36000"
    with tempfile.TemporaryDirectory() as name, emulated(engines.split()) as urls:
        cert, key = make_certificate(Path(name))
        flags = ["--http3", "--tls-cert", str(cert), "--tls-key", str(key), "--log", "none"]
        flags += ["--port", "0", "--no-admin", "--queue-limit", "10000"]
        for role in ("prefill", "decode"):
            flags += [f"--{role}", *urls[role]]
        command = [sys.executable, "-m", "balanceroute.proxy", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"https://\S+:(\d+)", process.stdout.readline())
                assert found is not None, "the proxy did not start"
                trusted = ssl.create_default_context(cafile=cert)
                direct = partial(Endpoint, HOST, int(found[1]), ssl=trusted)
                expected = over(direct, asked)
                with relayed(int(found[1]), given.loss, given.delay_ms) as port:
                    answers = {name: ask(port, cert, asked) for name, ask in clients.items()}
            finally:
                process.terminate()
    return compare(asked, expected, answers)


def difference(one: Got, other: Got) -> str:
    """Return what is different first."""
    if (one.status, one.headers) != (other.status, other.headers):
        return f"{one.status}, not {other.status}; {set(one.headers ^ other.headers)}"
    pairs = zip(one.body, other.body, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
    return f"from byte {same} on: {one.body[same:][:80]!r}, not {other.body[same:][:80]!r}"


def compare(
    asked: Sequence[Asked], expected: Sequence[Got], answers: Mapping[str, Sequence[Got]]
) -> int:
    """Print a line for each client; return 1 if an answer differs."""
    counts = Counter(one.status for one in expected)
    print(f"{len(expected)} answers over HTTP/1.1: {dict(sorted(counts.items()))}")
    differ = 0
    for name, found in answers.items():
        rows = zip(asked, expected, found, strict=True)
        wrong = [(one.request_id, its, ours) for one, its, ours in rows if its != ours]
        differ += len(wrong)
        print(f"{name}: {len(found) - len(wrong)} of {len(found)} the same")
        for request_id, its, ours in wrong[:3]:
            print(f"  {request_id.decode()}: {difference(its, ours)}")
    return 1 if differ else 0

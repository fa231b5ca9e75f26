"""Streams of several urgencies over one thin link, by HTTP/3 and by TCP."""

import argparse
import asyncio
import ctypes
import fcntl
import itertools
import json
import os
import random
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from tests.support.arguments import positive
from tests.support.certificate import make_certificate
from tests.support.virtual.datagrams import DatagramNetwork, ThinLink, ThinLinkSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.http3_listener import Http3Listener, standing_of
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply, WireError
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS
from experiment import table_head, table_row

REQUESTS = 90
LINK = ThinLinkSettings(bits_per_s=5e6, delay_s=0.025, loss=0.005)


@dataclass(frozen=True)
class Kind:
    """A class of requests."""

    name: str
    size: int
    due_s: float
    urgency: int


KINDS = (
    Kind("real-time", 8_000, 1.0, 2),
    Kind("free", 8_000, 2.0, 3),
    Kind("long", 102_400, 7.0, 3),
)


@dataclass(frozen=True)
class Planned:
    """A request, and when it is sent."""

    kind: Kind
    at_s: float


def plan(seed: int, spread_s: float, count: int = REQUESTS) -> list[Planned]:
    """Return the requests of a seed, by time."""
    rng = random.Random(seed)
    drawn = [Planned(rng.choice(KINDS), rng.uniform(0.0, spread_s)) for _ in range(count)]
    return sorted(drawn, key=lambda one: one.at_s)


def shares(took: Sequence[tuple[Kind, float]]) -> dict[str, float]:
    """Return the share of each class that was in time, in percent."""
    found = {}
    for kind in KINDS:
        times = [time_s for one, time_s in took if one is kind]
        found[kind.name] = 100 * fmean(time_s <= kind.due_s for time_s in times)
    return found


# The kernel's TCP over a thin link: two network namespaces, and the link between their TUN
# devices.

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
# As large as the packets of QUIC.
_PACKET_BYTES = 1_228
_NEAR, _FAR, _PORT = "10.213.7.1", "10.213.7.2", 7_000
_LENGTH = struct.Struct("!I")
_LIMIT_S = 90.0


class LinkError(Exception):
    """There can be no such link on this machine."""


def tcp_run(planned: Sequence[Planned], *, seed: int, shared: bool) -> list[tuple[Kind, float]]:
    """Send the requests over TCP, in real time; return the class and the time of each.

    Args:
        planned: The requests, by time.
        seed: Decides what is lost.
        shared: Whether all go over one connection.

    Raises:
        LinkError: No link can be made.
    """
    with _namespaces() as (near, far):
        return asyncio.run(_run(planned, seed, near, far, shared=shared))


@contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    names = [f"thin{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        yield names[0], names[1]
    finally:
        for name in names:
            with suppress(LinkError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError as error:
        raise LinkError(str(error)) from None
    if done.returncode:
        raise LinkError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def _within(name: str) -> Iterator[None]:
    """What is opened here belongs to a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(Path("/run/netns") / name, os.O_RDONLY)
    try:
        if libc.setns(other, _CLONE_NEWNET):
            raise LinkError(os.strerror(ctypes.get_errno()))
        yield
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(other)


def _device(name: str, own: str, peer: str) -> int:
    """Return a TUN device of a namespace that leads to the other address."""
    with _within(name):
        try:
            number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            wanted = struct.pack("16sH", b"thin0", _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(number, _TUNSETIFF, wanted)
        except OSError as error:
            raise LinkError(f"/dev/net/tun: {error.strerror}") from None
    within = ("netns", "exec", name, "ip")
    _ip(*within, "addr", "add", own, "peer", peer, "dev", "thin0")
    _ip(*within, "link", "set", "thin0", "mtu", str(_PACKET_BYTES), "up")
    return number


async def _run(
    planned: Sequence[Planned], seed: int, near: str, far: str, *, shared: bool
) -> list[tuple[Kind, float]]:
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    devices = [_device(near, _NEAR, _FAR), _device(far, _FAR, _NEAR)]
    # A packet has its heads already.
    links = [ThinLink(replace(LINK, overhead_bytes=0), rng) for _ in devices]

    def carry(side: int) -> None:
        with suppress(BlockingIOError):
            while True:
                packet = os.read(devices[side], 65_536)
                at_s = links[side].offer(len(packet), loop.time())
                if at_s is not None:
                    loop.call_at(at_s, os.write, devices[1 - side], packet)

    for side, device in enumerate(devices):
        loop.add_reader(device, carry, side)
    with _within(far):
        listening = _socket()
        listening.bind((_FAR, _PORT))
    echoing: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoing.add(loop.create_task(_echo(reader, writer)))

    server = await asyncio.start_server(accept, sock=listening)
    try:
        async with asyncio.timeout(_LIMIT_S):
            await _exchange(Planned(Kind("", 1, 0.0, 3), 0.0), *await _connect(near))
            times = await (_over_one if shared else _over_many)(planned, near)
            await asyncio.gather(*echoing)
    finally:
        server.close()
        for device in devices:
            loop.remove_reader(device)
        await asyncio.sleep(0.2)  # What is on its way still finds the devices.
        for device in devices:
            os.close(device)
    return [(one.kind, time_s) for one, time_s in zip(planned, times, strict=True)]


def _socket() -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setblocking(False)
    return one


async def _connect(near: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with _within(near):
        one = _socket()
    await asyncio.get_running_loop().sock_connect(one, (_FAR, _PORT))
    return await asyncio.open_connection(sock=one)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(_LENGTH.size)
            writer.write(head + await reader.readexactly(_LENGTH.unpack(head)[0]))
    writer.close()


async def _exchange(
    one: Planned, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(_LENGTH.pack(one.kind.size) + bytes(one.kind.size))
    await reader.readexactly(_LENGTH.size + one.kind.size)
    writer.close()


async def _over_many(planned: Sequence[Planned], near: str) -> list[float]:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def alone(one: Planned) -> float:
        await asyncio.sleep(max(0.0, begin_s + one.at_s - loop.time()))
        await _exchange(one, *await _connect(near))
        return loop.time() - begin_s - one.at_s

    return await asyncio.gather(*(alone(one) for one in planned))


async def _over_one(planned: Sequence[Planned], near: str) -> list[float]:
    loop = asyncio.get_running_loop()
    reader, writer = await _connect(near)
    begin_s = loop.time()

    async def send() -> None:
        for one in planned:
            await asyncio.sleep(max(0.0, begin_s + one.at_s - loop.time()))
            writer.write(_LENGTH.pack(one.kind.size) + bytes(one.kind.size))

    sending = asyncio.create_task(send())
    times = []
    for one in planned:
        await reader.readexactly(_LENGTH.size + one.kind.size)
        times.append(loop.time() - begin_s - one.at_s)
    await sending
    writer.close()
    return times


HOST = "127.0.0.1"
LIMIT_S = 120.0


class Echoed:
    """Waits for one answer.

    Attributes:
        over: Its time, in seconds from the request; inf if it broke off.
    """

    def __init__(self, planned: Planned, loop: asyncio.AbstractEventLoop) -> None:
        self.planned = planned
        self.over: asyncio.Future[float] = loop.create_future()
        self._loop = loop
        self._begun_s = loop.time()
        self._bytes = 0

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        self._bytes += len(data)

    def on_end(self) -> None:
        assert self._bytes == self.planned.kind.size
        self.over.set_result(self._loop.time() - self._begun_s)

    def on_error(self, error: WireError) -> None:
        self.over.set_result(float("inf"))


def echo(request: HttpRequest, reply: Reply) -> None:
    """Answer with the body."""
    reply.send(200, [], request.body)


async def play(
    loop: VirtualLoop, *, order: str, seed: int, planned: Sequence[Planned], folder: Path
) -> list[tuple[Kind, float]]:
    """Send the requests over the link; return the class and the time of each."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    loop.datagrams = DatagramNetwork(loop, random.Random(seed), up=LINK, down=LINK)
    server = Server(echo)
    await server.start(HOST, 0)
    listener = Http3Listener(Http3Settings(http3_order=order), cert, key)
    await listener.start(server.service, server.addresses)
    endpoint = Http3Endpoint(
        "localhost", server.port, trust=Trust(str(cert)), order=order, standing=standing_of
    )
    first = Echoed(Planned(Kind("", 0, 0.0, 3), 0.0), loop)
    endpoint.request(b"POST", b"/", [], b"", first)  # Opens the connection.
    await first.over
    begin_s, sent = loop.time(), []
    for one in planned:
        await asyncio.sleep(max(0.0, begin_s + one.at_s - loop.time()))
        sent.append(Echoed(one, loop))
        headers = [
            (b"priority", b"u=%d" % one.kind.urgency),
            (b"x-answer-deadline-ms", b"%d" % round(1_000 * one.kind.due_s)),
        ]
        endpoint.request(b"POST", b"/", headers, bytes(one.kind.size), sent[-1])
    took = [(one.planned.kind, await one.over) for one in sent]
    endpoint.close()
    server.stop_accepting()
    await server.drain()
    listener.close()
    return took


def over_http3(
    orders: Sequence[str], seeds: Sequence[int], spread_s: float
) -> dict[str, list[dict[str, float]]]:
    """Return the shares of each seed by order."""
    results: dict[str, list[dict[str, float]]] = {order: [] for order in orders}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_certificate(folder, kind="ed25519")
        for order, seed in itertools.product(orders, seeds):
            planned = plan(seed, spread_s)
            told = partial(play, order=order, seed=seed, planned=planned, folder=folder)
            results[order].append(shares(run(told, seed=seed, limit_s=LIMIT_S)))
    return results


def stream_orders(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Which requests of three classes are answered in time over one thin link, by the order of streams.

    90 requests are drawn evenly from three classes, and spread evenly at random over some seconds:

    * real-time: 8 KB, due after 1 s, urgency 2;
    * free: 8 KB, due after 2 s, the usual urgency;
    * long: 102.4 KB, due after 7 s, the usual urgency.

    Each is echoed. It is in time if its last byte is back within its deadline. All of them share one HTTP/3
    connection of the product's own client and server, which both send in the same order, over a link of
    5 Mbit/s, 25 ms and 0.5 % loss in each direction. Time is virtual, so a seed repeats a run exactly. The
    load and the orders are those of UCB/EECS-2024-64.

    With --tcp the same requests also go over the kernel's TCP (cubic, no TLS), through the same model of a link
    between two network namespaces, in real time: over one connection, in which each answer waits for those
    before it, and over one connection for each request. That needs root, /dev/net/tun and ip(8).

    Prints Markdown: of each class the share in time in percent, the mean over the seeds and their range.
    """
    parser.add_argument("--order", nargs="+", choices=[*STREAM_ORDERS], default=[*STREAM_ORDERS])
    parser.add_argument("--seeds", type=positive, default=3, metavar="N")
    parser.add_argument("--spread-s", type=float, default=6.0, metavar="S")
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT")
    chosen = parser.parse_args(words)
    results = over_http3(chosen.order, range(1, chosen.seeds + 1), chosen.spread_s)
    for shared in (True, False) if chosen.tcp else ():
        row = results.setdefault("TCP, one connection" if shared else "TCP, one each", [])
        for seed in range(1, chosen.seeds + 1):
            try:
                took = tcp_run(plan(seed, chosen.spread_s), seed=seed, shared=shared)
            except LinkError as error:
                parser.error(f"--tcp: {error}")
            row.append(shares(took))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    return 0


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return the shares as Markdown."""
    lines = [table_head("order", *(kind.name for kind in KINDS))]
    for order, runs in results.items():
        cells = []
        for kind in KINDS:
            values = [one[kind.name] for one in runs]
            cells.append(f"{fmean(values):.0f} ({min(values):.0f}-{max(values):.0f})")
        lines.append(table_row(order, *cells))
    return "\n".join(lines)

"""Streams of several urgencies over one thin link, by HTTP/3."""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from tests.support.arguments import positive
from tests.support.certificate import make_certificate
from tests.support.virtual.datagrams import DatagramNetwork, ThinLinkSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.http3_listener import Http3Listener, standing_of
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply, ServerLimits, WireError
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS
from experiment import table_head, table_row

REQUESTS = 90
LINK = ThinLinkSettings(bits_per_s=5e6, delay_s=0.025, loss=0.005)
LIMIT_S = 3_600.0
# Of requests that wait for others on the link.
_PATIENT = ServerLimits(
    body_timeout_s=LIMIT_S, keep_alive_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S
)


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
Planned = tuple[float, Kind]
"""When a request is sent, in seconds, and its class."""


class Exchange:
    """Waits for one answer.

    Attributes:
        over: Its time, in seconds from the request; inf if it broke off.
    """

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self.over: asyncio.Future[float] = loop.create_future()
        self._loop = loop
        self._left = size
        self._begun_s = loop.time()

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        self._left -= len(data)

    def on_end(self) -> None:
        assert not self._left
        self.over.set_result(self._loop.time() - self._begun_s)

    def on_error(self, error: WireError) -> None:
        self.over.set_result(float("inf"))


async def _played(
    loop: VirtualLoop, order: str, planned: Sequence[Planned], seed: int, folder: Path
) -> list[float]:
    loop.datagrams = DatagramNetwork(loop, random.Random(seed), up=LINK, down=LINK)

    def application(request: HttpRequest, reply: Reply) -> None:
        # The one that opens the connection is no number.
        body = bytes(planned[int(request.path[1:])][1].size) if request.path != b"/" else b""
        loop.call_soon(reply.send, 200, [], body)

    server = Server(application, limits=_PATIENT)
    await server.start("127.0.0.1", 0)
    cert = folder / "cert.pem"
    listener = Http3Listener(Http3Settings(http3_order=order), cert, folder / "key.pem")
    await listener.start(server.service, server.addresses)
    endpoint = Http3Endpoint(
        "localhost", server.port, trust=Trust(str(cert)), order=order, standing=standing_of
    )
    first, sent = Exchange(0, loop), list[Exchange]()
    endpoint.request(b"POST", b"/", [], b"", first)  # Opens the connection.
    await first.over
    begin_s = loop.time()
    for number, (at_s, kind) in enumerate(planned):
        await asyncio.sleep(max(0.0, begin_s + at_s - loop.time()))
        sent.append(Exchange(kind.size, loop))
        headers = [
            (b"priority", b"u=%d" % kind.urgency),
            (b"x-answer-deadline-ms", b"%d" % round(1_000 * kind.due_s)),
        ]
        endpoint.request(b"POST", b"/%d" % number, headers, bytes(kind.size), sent[-1])
    times = [await one.over for one in sent]
    endpoint.close()
    server.stop_accepting()
    await server.drain()
    listener.close()
    return times


def plan(seed: int, spread_s: float, count: int = REQUESTS) -> list[Planned]:
    """Return the requests of a seed, by time."""
    rng = random.Random(seed)
    drawn = [(rng.choice(KINDS), rng.uniform(0.0, spread_s)) for _ in range(count)]
    return sorted(((at_s, kind) for kind, at_s in drawn), key=lambda one: one[0])


def shares(planned: Sequence[Planned], order: str, seed: int, folder: Path) -> dict[str, float]:
    """Send all over one connection; return the share of each class that was in time, in percent.

    The folder has the server's certificate.
    """
    work = partial(_played, order=order, planned=planned, seed=seed, folder=folder)
    times = run(work, seed=seed, limit_s=LIMIT_S)
    kept = [(kind, took <= kind.due_s) for (_, kind), took in zip(planned, times, strict=True)]
    return {kind.name: 100 * fmean(one for of, one in kept if of is kind) for kind in KINDS}


def stream_orders(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Which requests of three classes are answered in time over one thin link, by the order of streams.

    90 requests are drawn evenly from three classes, and spread evenly at random over some seconds:

    * real-time: 8 KB, due after 1 s, urgency 2;
    * free: 8 KB, due after 2 s, the usual urgency;
    * long: 102.4 KB, due after 7 s, the usual urgency.

    Each is echoed. It is in time if its last byte is back within its deadline. All of them share one HTTP/3
    connection of the product's own client and server, which both send in the same order, over a link of
    5 Mbit/s, 25 ms and 0.5 % loss in each direction. Time is virtual, so a seed repeats a run exactly. The
    load and the orders are those of UCB/EECS-2024-64.

    Prints Markdown: of each class the share in time in percent, the mean over the seeds and their range.
    """
    parser.add_argument("--order", nargs="+", choices=STREAM_ORDERS, default=[*STREAM_ORDERS])
    parser.add_argument("--seeds", type=positive, default=3, metavar="N")
    parser.add_argument("--spread-s", type=float, default=6.0, metavar="S")
    chosen = parser.parse_args(words)
    print(table_head("order", *(kind.name for kind in KINDS)))
    with tempfile.TemporaryDirectory() as name:
        make_certificate(Path(name), kind="ed25519")
        for order in chosen.order:
            rows = [
                shares(plan(seed, chosen.spread_s), order, seed, Path(name))
                for seed in range(1, chosen.seeds + 1)
            ]
            values = [[row[kind.name] for row in rows] for kind in KINDS]
            cells = (f"{fmean(one):.0f} ({min(one):.0f}-{max(one):.0f})" for one in values)
            print(table_row(f"`{order}`", *cells), flush=True)

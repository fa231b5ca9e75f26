"""Which requests of three classes are answered in time over one thin link, by the order of streams.

    python scripts/stream_orders.py [--order NAME ..] [--seeds N] [--spread-s S] [--tcp] [--json OUT]

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

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from balanceroute.proxy.live.listeners import Http3Listener, standing_of
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.certificate import make_certificate
from balanceroute.proxy.testing.virtual.datagrams import DatagramNetwork
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Headers, HttpRequest, WireError
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS
from balanceroute.proxy.wire.reply import Reply

sys.path.insert(0, str(Path(__file__).parent / "stream_runs"))

from spread_load import KINDS, LINK, Kind, Planned, plan, shares
from tcp_link import LinkError, tcp_run

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


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--order", nargs="+", choices=[*STREAM_ORDERS], default=[*STREAM_ORDERS])
    parser.add_argument("--seeds", type=positive, default=3, metavar="N")
    parser.add_argument("--spread-s", type=float, default=6.0, metavar="S")
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT")
    chosen = parser.parse_args()
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
    lines = [
        "| order | " + " | ".join(kind.name for kind in KINDS) + " |",
        "| --- |" + " --- |" * len(KINDS),
    ]
    for order, runs in results.items():
        cells = []
        for kind in KINDS:
            values = [one[kind.name] for one in runs]
            cells.append(f"{fmean(values):.0f} ({min(values):.0f}-{max(values):.0f})")
        lines.append(f"| {order} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

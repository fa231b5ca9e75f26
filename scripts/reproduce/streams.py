"""Streams of several urgencies over one thin link, by HTTP/3 and by streams of bytes, and models behind it."""

import argparse
import asyncio
import random
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from tests.support.arguments import positive
from tests.support.certificate import make_certificate
from tests.support.virtual.datagrams import DatagramNetwork, ThinLinkSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.model_choice.environment import (
    GroupSim,
    SimulatedRequest,
    paper_scenario,
)
from balanceroute.proxy.lab.model_choice.training import Trainer
from balanceroute.proxy.live.http3_listener import Http3Listener, priority_of
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.model_choice import ArrivalRate, GroupOutlook, ModelChoice, Static
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.client import Http3Call, Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply, ServerLimits, WireError
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS
from experiment import AZURE_CONV, UNLIMITED, requests_of, right, table_head, table_row

REQUESTS = 90
LINK = ThinLinkSettings(bits_per_s=5e6, delay_s=0.025, loss=0.005)
HOST, LIMIT_S = "127.0.0.1", 3_600.0
ONE_EACH, ONE = "TLS/TCP, one each", "TLS/TCP, one connection"
TRANSPORTS = (*STREAM_ORDERS, ONE_EACH, ONE)
TOKEN_BYTES, TPOT_S = 4, 0.04
# Of requests that wait for each other on the link.
_PATIENT = ServerLimits(
    body_timeout_s=LIMIT_S, keep_alive_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S
)
_PORT = 7_000
_FRAME = struct.Struct("!II")  # Of a stream of bytes: the request's number, and its length.


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
    task: int = 0  # Of `SERVED.tasks`.
    output_tokens: int = 0  # Of its answer; 0 if it is echoed.

    @property
    def answer_bytes(self) -> int:
        return TOKEN_BYTES * self.output_tokens or self.kind.size

    @property
    def due_s(self) -> float:
        """When its last byte is due, from its sending on."""
        return self.kind.due_s + TPOT_S * self.output_tokens


Answer = Callable[[int], Awaitable[bytes]]
"""Returns the answer to a request, by its number."""


@dataclass(frozen=True)
class Play:
    """What is sent over the link, and the server that answers.

    Attributes:
        folder: Has the server's certificate.
        hard: Whether both sides give up what is late.
    """

    planned: Sequence[Planned]
    answer: Answer
    seed: int
    folder: Path
    hard: bool = False

    def link(self, loop: VirtualLoop) -> None:
        """Put the link between clients and servers of a loop."""
        loop.datagrams = DatagramNetwork(loop, random.Random(self.seed), up=LINK, down=LINK)

    async def pace(self, loop: VirtualLoop, send: Callable[[int], None]) -> None:
        """Send each request in its time."""
        begin_s = loop.time()
        for number, one in enumerate(self.planned):
            await asyncio.sleep(max(0.0, begin_s + one.at_s - loop.time()))
            send(number)


class Tasks:
    """What runs beside, to its end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


class Exchange:
    """Waits for one answer over HTTP/3.

    Attributes:
        over: Its time, in seconds from the request; inf if it broke off.
        call: The request, once it is sent.
    """

    def __init__(self, answer_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.over: asyncio.Future[float] = loop.create_future()
        self.call: Http3Call
        self._loop = loop
        self._left = answer_bytes
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

    def give_up(self) -> None:
        """End a request that is late."""
        if not self.over.done():
            self.call.abort()
            self.over.set_result(float("inf"))


async def over_http3(loop: VirtualLoop, order: str, play: Play) -> list[float]:
    """Send the requests over one connection of HTTP/3; return the time of each, inf if it broke off."""
    play.link(loop)
    tasks, cert = Tasks(), play.folder / "cert.pem"

    async def send(number: int, reply: Reply) -> None:
        reply.send(200, [], await play.answer(number))

    def application(request: HttpRequest, reply: Reply) -> None:
        if request.path == b"/":
            reply.send(200, [], b"")
        else:
            tasks.begin(send(int(request.path[1:]), reply))

    server = Server(application, limits=_PATIENT)
    await server.start(HOST, 0)
    settings = Http3Settings(http3_order=order, http3_hard_deadlines=play.hard)
    listener = Http3Listener(settings, cert, play.folder / "key.pem")
    await listener.start(server.service, server.addresses)
    endpoint = Http3Endpoint(
        "localhost", server.port, trust=Trust(str(cert)), order=order, priority=priority_of
    )
    first, sent = Exchange(0, loop), list[Exchange]()
    endpoint.request(b"POST", b"/", [], b"", first)  # Opens the connection.
    await first.over

    def ask(number: int) -> None:
        one = play.planned[number]
        sent.append(Exchange(one.answer_bytes, loop))
        headers = [
            (b"priority", b"u=%d" % one.kind.urgency),
            (b"x-answer-deadline-ms", b"%d" % round(1_000 * one.due_s)),
        ]
        body = bytes(one.kind.size)
        sent[-1].call = endpoint.request(b"POST", b"/%d" % number, headers, body, sent[-1])
        if play.hard:
            loop.call_later(one.due_s, sent[-1].give_up)

    await play.pace(loop, ask)
    times = [await one.over for one in sent]
    endpoint.close()
    server.stop_accepting()
    await server.drain()
    listener.close()
    return times


# Added to the time of a timer, as in `wire.quic.connection`: a packet that is due at this very
# instant may, by rounding, not be late yet, and where time stands still its timer is then set for ever.
_LATE_S = 1e-6


class Late(QuicConnectionProtocol):
    """One end of a connection of QUIC, whose timers are a little late."""

    _timer_at: float

    def _handle_timer(self) -> None:
        self._timer_at += _LATE_S
        super()._handle_timer()


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the numbers and the content of what comes."""
    with suppress(asyncio.IncompleteReadError):
        while True:
            number, size = _FRAME.unpack(await reader.readexactly(_FRAME.size))
            yield number, await reader.readexactly(size)


def both_ends(folder: Path) -> tuple[QuicConfiguration, QuicConfiguration]:
    """Return the configurations of a client and a server of one stream of bytes a connection."""
    near, far = (
        QuicConfiguration(
            alpn_protocols=["bytes"],
            congestion_control_algorithm="cubic",
            idle_timeout=LIMIT_S,
            is_client=client,
            server_name="localhost",
        )
        for client in (True, False)
    )
    cert = folder / "cert.pem"
    near.load_verify_locations(cafile=str(cert))
    far.load_cert_chain(cert, folder / "key.pem")
    return near, far


async def over_bytes(loop: VirtualLoop, transport: str, play: Play) -> list[float]:
    """Send the requests over streams of bytes, which stand for TLS over TCP; return the time of each.

    Each is the only stream of a connection of QUIC, so whatever follows a lost packet waits for it. Answers
    go back as they are there.
    """
    play.link(loop)
    tasks, (near, far) = Tasks(), both_ends(play.folder)
    writers, opened = list[asyncio.StreamWriter](), list[QuicConnectionProtocol]()

    async def reply(number: int, writer: asyncio.StreamWriter) -> None:
        answer = await play.answer(number)
        writer.write(_FRAME.pack(number, len(answer)) + answer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        async for number, _ in frames(reader):
            tasks.begin(reply(number, writer))

    server = QuicServer(
        configuration=far,
        create_protocol=Late,
        stream_handler=lambda *stream: tasks.begin(serve(*stream)),
    )
    await loop.create_datagram_endpoint(lambda: server, local_addr=(HOST, _PORT))
    begin_s = 0.0
    over = [loop.create_future() for _ in play.planned]

    async def connect() -> asyncio.StreamWriter:
        _, connection = await loop.create_datagram_endpoint(
            lambda: Late(QuicConnection(configuration=near)),
            remote_addr=(HOST, _PORT),
        )
        await asyncio.sleep(2 * LINK.delay_s)  # TCP shakes hands before TLS does.
        connection.connect((HOST, _PORT))
        await connection.wait_connected()
        opened.append(connection)
        reader, writer = await connection.create_stream()
        writers.append(writer)
        tasks.begin(receive(reader))
        return writer

    async def receive(reader: asyncio.StreamReader) -> None:
        async for number, answer in frames(reader):
            assert len(answer) == play.planned[number].answer_bytes
            over[number].set_result(loop.time() - begin_s - play.planned[number].at_s)

    async def ask(number: int, shared: asyncio.StreamWriter | None) -> None:
        size = play.planned[number].kind.size
        (shared or await connect()).write(_FRAME.pack(number, size) + bytes(size))

    shared = await connect() if transport == ONE else None
    begin_s = loop.time()
    await play.pace(loop, lambda number: tasks.begin(ask(number, shared)))
    times = [await done for done in over]
    for writer in writers:
        writer.close()
    for connection in opened:
        connection.close()
    await asyncio.sleep(1.0)
    server.close()
    return times


def times_of(transport: str, seed: int, make: Callable[[], Play]) -> list[float]:
    """Run in virtual time; return the time of each request. `make` is called in the loop."""

    async def played(loop: VirtualLoop) -> list[float]:
        play = make()
        over = over_http3 if transport in STREAM_ORDERS else over_bytes
        return await over(loop, transport, play)

    return run(played, seed=seed, limit_s=LIMIT_S)


# Requests of three classes, which are echoed.


def plan(seed: int, spread_s: float, count: int = REQUESTS) -> list[Planned]:
    """Return the requests of a seed, by time."""
    rng = random.Random(seed)
    drawn = [Planned(rng.choice(KINDS), rng.uniform(0.0, spread_s)) for _ in range(count)]
    return sorted(drawn, key=lambda one: one.at_s)


def shares(planned: Sequence[Planned], transport: str, seed: int, folder: Path) -> dict[str, float]:
    """Echo all; return the share of each class that was in time, in percent."""

    async def echo(number: int) -> bytes:
        return bytes(planned[number].answer_bytes)

    times = times_of(transport, seed, lambda: Play(planned, echo, seed, folder))
    kept = [(one.kind, took <= one.due_s) for one, took in zip(planned, times, strict=True)]
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

    TLS over TCP is stood for by connections of QUIC with one stream each (cubic), and a round trip for TCP's
    own handshake: one connection for all requests, or one for each.

    Prints Markdown: of each class the share in time in percent, the mean over the seeds and their range.
    """
    parser.add_argument("--order", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--seeds", type=positive, default=3, metavar="N")
    parser.add_argument("--spread-s", type=float, default=6.0, metavar="S")
    chosen = parser.parse_args(words)
    print(table_head("order", *(kind.name for kind in KINDS)))
    with tempfile.TemporaryDirectory() as name:
        make_certificate(Path(name), kind="ed25519")
        for order in chosen.order:
            plans = {seed: plan(seed, chosen.spread_s) for seed in range(1, chosen.seeds + 1)}
            rows = [shares(one, order, seed, Path(name)) for seed, one in plans.items()]
            values = [[row[kind.name] for row in rows] for kind in KINDS]
            cells = (f"{fmean(one):.0f} ({min(one):.0f}-{max(one):.0f})" for one in values)
            print(table_row(f"`{order}`", *cells), flush=True)


# Served by models: orders of streams and a choice of models together.

SERVED = replace(
    paper_scenario(),
    groups=paper_scenario().groups[1:],
    scores=tuple(row[1:] for row in paper_scenario().scores),
)
PREFERRED = SERVED.tasks.index("OpenBookQA")
# What the scores of the other tasks count in training.
OTHER_WEIGHT = 0.7
RATES = (2.0, 8.0, 16.0, 24.0)
LEAST, SPAN_S = 20, 5.0  # Requests of each rate, and how long they come at least.
PHASE, PHASES = (20, 60), 5  # Requests at one rate of the bursty load.
MOST_TOKENS = 400
TICK_S = 0.005


class Serving:
    """The groups of an alias, in the loop's time: which one answers a request, and when.

    Attributes:
        chosen: By request, the place of its group.
    """

    def __init__(self, planned: Sequence[Planned], choice: ModelChoice) -> None:
        self.chosen: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        self._planned, self._choice = planned, choice
        self._groups = [GroupSim(model) for model in SERVED.groups]
        self._rate = ArrivalRate()
        self._under_way: dict[int, asyncio.Future[None]] = {}

    async def answer(self, number: int) -> bytes:
        """Return the answer to a request once it is there."""
        one, now_ms = self._planned[number], self._advance()
        prompt = one.kind.size // TOKEN_BYTES
        outlooks = [
            GroupOutlook(SERVED.targets.share_used(*group.outlook(prompt)))
            for group in self._groups
        ]
        chosen = self._choice.choose(one.task, self._rate.observe(now_ms), outlooks)
        self.chosen[number] = chosen
        self._groups[chosen].add(SimulatedRequest(number, now_ms, prompt, one.output_tokens))
        if not self._under_way:
            self._loop.call_later(TICK_S, self._tick)
        self._under_way[number] = self._loop.create_future()
        await self._under_way[number]
        return bytes(one.answer_bytes)

    def _tick(self) -> None:
        self._advance()
        if self._under_way:
            self._loop.call_later(TICK_S, self._tick)

    def _advance(self) -> float:
        now_ms = 1e3 * self._loop.time()
        for group in self._groups:
            for one in group.advance(now_ms):
                ended = self._under_way.pop(one.number)
                if not ended.done():  # At the end of a run no task waits for abandoned requests.
                    ended.set_result(None)
        return now_ms


def worth(
    transport: str, choice: ModelChoice, planned: Sequence[Planned], seed: int, folder: Path
) -> float:
    """Return the mean worth of the answers: the score of the model if it was in time, else 0."""
    made: list[Serving] = []

    def make() -> Play:
        made.append(Serving(planned, choice))
        return Play(planned, made[0].answer, seed, folder, hard=transport == "edf")

    times = times_of(transport, seed, make)
    return fmean(
        SERVED.scores[one.task][made[0].chosen[number]] if time_s <= one.due_s else 0.0
        for number, (one, time_s) in enumerate(zip(planned, times, strict=True))
    )


def asked(rates: Sequence[tuple[float, int]], draw: random.Random) -> list[Planned]:
    """Return so many requests at each rate in turn, as Poisson processes; lengths are of Azure's trace."""
    answers = [min(one.output_tokens, MOST_TOKENS) for one in requests_of(AZURE_CONV)]
    at_s, found = 0.0, []
    for rate, requests in rates:
        for _ in range(requests):
            at_s += draw.expovariate(rate)
            task = draw.randrange(len(SERVED.tasks))
            kind = KINDS[0] if task == PREFERRED else draw.choice(KINDS[1:])
            found.append(Planned(kind, at_s, task, draw.choice(answers)))
    return found


def loads(seed: int) -> dict[str, list[list[Planned]]]:
    """Return the stable load, a run for each rate, and the bursty one."""
    draw = random.Random(seed)
    stable = [asked([(rate, max(LEAST, round(SPAN_S * rate)))], draw) for rate in RATES]
    phases = [(draw.uniform(RATES[0], RATES[-1]), draw.randint(*PHASE)) for _ in range(PHASES)]
    return {"stable": stable, "bursty": [asked(phases, draw)]}


def taught(requests: int) -> ModelChoice:
    """Return what double deep Q-learning learned of these groups and requests."""
    scores = tuple(
        tuple(one if task == PREFERRED else OTHER_WEIGHT * one for one in row)
        for task, row in enumerate(SERVED.scores)
    )
    drawn = asked([(1.0, 2_000)], random.Random(0))
    lengths = [(one.kind.size // TOKEN_BYTES, one.output_tokens) for one in drawn]
    return Trainer(replace(SERVED, scores=scores), lengths, steps=requests, seed=0).train()


def served_streams(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What orders of streams and a choice of models are worth together, over one thin link.

    After tables 3 and 4 of Jha and Chuppala, "Quality-of-Service Aware LLM Serving". A request is a task:
    OpenBookQA, which is preferred, is `real-time`, the others are `free` or `long`, as in `stream-orders`.
    Over the same link and transports it reaches two models in virtual time, which answer with 4 bytes a
    token. An answer in time, by that of its class and 40 ms a token, is worth the score of its model,
    another one nothing. The client, the server and their orders are the product's own, and so is the
    network that chooses, which is trained here first with the other tasks at 0.7 of their worth. With
    `edf` both sides give up what is late, but the model still computes it.

    `stable` has a run for each of four rates from 2 to 24 a second, whose mean is shown; `bursty` goes on at
    another rate, drawn evenly between these, after 20 to 60 requests. A seed repeats a run exactly. Prints
    Markdown.
    """
    parser.add_argument(
        "--load", nargs="+", choices=("stable", "bursty"), default=["stable", "bursty"]
    )
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--training", type=positive, default=8_000, help="requests")
    parser.add_argument("--requests", type=positive, default=UNLIMITED, help="of each run, at most")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(words)
    small, large = (group.name for group in SERVED.groups)
    choices = {large: Static(1), small: Static(0), "policy": taught(chosen.training)}
    with tempfile.TemporaryDirectory() as name:
        make_certificate(Path(name), kind="ed25519")
        for load in chosen.load:
            runs = [one[: chosen.requests] for one in loads(chosen.seed)[load]]
            print(table_head(load, *right([*choices])))
            for transport in chosen.transport:
                cells = [
                    fmean(worth(transport, choice, one, chosen.seed, Path(name)) for one in runs)
                    for choice in choices.values()
                ]
                print(table_row(f"`{transport}`", *(f"{one:.2f}" for one in cells)), flush=True)

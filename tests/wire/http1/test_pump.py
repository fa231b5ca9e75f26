"""The native pump between a real engine and a real client: nothing is lost, doubled or out of order.

The library has tests of its own. Here is what this side makes of it: who has a stream when.
"""

import asyncio
import ctypes
import errno
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from glob import glob
from pathlib import Path
from typing import cast

import pytest
import uvloop
from tests.native import needs_native
from tests.support.played import played_by

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.client_connection import Call
from balanceroute.proxy.wire.http1.pump import (
    COMPLETIONS,
    EventForm,
    Lent,
    Passed,
    Pump,
    load_library,
)
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply, ServerLimits, WireError

pytestmark = needs_native

HOST = "127.0.0.1"
PATIENCE_S = 30.0  # Only ever waited for by a test that fails.
BOUNDS_S = (0.001, 0.1)


def event(number: int, text: str = "a") -> bytes:
    return b'data: {"n":%d,"text":"%b","finish_reason":null}\n\n' % (number, text.encode())


LAST = b'data: {"finish_reason":"stop"}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Through:
    """One exchange that is passed through: a `LineHandler`, and who goes on with its stream."""

    call: Call

    def __init__(self, site: "Site", reply: Reply) -> None:
        self.takes_lines = True
        self.last_s = self.gap_max_s = self.resumed_s = 0.0
        self.lent: Lent | None = None
        self.passed: list[Passed] = []
        self.reply = reply
        self.data: list[bytes] = []
        self.errors: list[WireError] = []
        self._site = site
        reply.on_closed = self._left
        reply.on_pause = self._pause
        reply.on_resume = self._resume

    def _left(self) -> None:
        self._site.turns.append("left")
        self.call.abort()

    def _pause(self) -> None:
        self.call.pause()

    def _resume(self) -> None:
        self.call.resume()

    def on_head(self, status: int, headers: Headers) -> None:
        self.reply.start(status, [])

    def on_line(self, line: bytes) -> None:
        self.reply.write(line + b"\n\n")
        if self._site.lends:
            self.last_s = asyncio.get_running_loop().time()
            form = EventForm(COMPLETIONS, 0, 1)
            self.lent = self._site.pump.lend(self.call, self.reply, self, form)
            self._site.turns.append("lent" if self.lent else "kept")

    def on_lines(self, lines: list[bytes]) -> None:
        self.reply.write(b"".join(line + b"\n\n" for line in lines))

    def on_data(self, data: bytes) -> None:
        self.data.append(data)
        self.reply.write(data)

    def came_back(self, passed: Passed) -> None:
        self.lent = None
        self.passed.append(passed)
        self._site.turns.append("back")

    def on_end(self) -> None:
        self._site.turns.append("end")
        self.reply.end()

    def on_error(self, error: WireError) -> None:
        self._site.turns.append("error")
        self.errors.append(error)
        self.reply.abort()


class Engine(asyncio.Protocol):
    """Answers each request with a stream, which the test writes."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.asked, self.gone = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.asked.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    def say(self, *events: bytes) -> None:
        self.transport.write(b"".join(map(chunk, events)))


class Site:
    """An engine, a proxy that passes through what it says, and a client."""

    through: Through
    engine: Engine

    def __init__(self, pump: Pump, client: socket.socket) -> None:
        self.pump = pump
        self.client = client
        self.turns: list[str] = []  # What became of the stream, in order.
        self.lends = True  # Whether a stream is lent with its next event.
        self._raw = b""

    async def until(self, held: Callable[[], bool]) -> None:
        while not held():  # noqa: ASYNC110 - no event tells it.
            await asyncio.sleep(0.001)

    async def lent(self, first: bytes = event(0)) -> None:
        """Have the stream lent with its first event."""
        self.engine.say(first)
        await self.until(lambda: bool(self.turns))
        assert self.turns == ["lent"]

    async def _more(self) -> None:
        got = await asyncio.get_running_loop().sock_recv(self.client, 65_536)
        assert got, "the connection was closed"
        self._raw += got

    async def line(self) -> bytes:
        while b"\r\n" not in self._raw:
            await self._more()
        line, _, self._raw = self._raw.partition(b"\r\n")
        return line

    async def receive(self, data: bytes) -> None:
        """Read what must come next, in whole chunks, whatever these are."""
        body = b""
        while len(body) < len(data):
            size = int(await self.line(), 16)
            while len(self._raw) < size + 2:
                await self._more()
            body += self._raw[:size]
            assert self._raw[size : size + 2] == b"\r\n"
            self._raw = self._raw[size + 2 :]
        assert body == data

    async def end(self) -> None:
        """Read the end of the answer, behind which nothing comes."""
        assert (await self.line(), await self.line(), self._raw) == (b"0", b"", b"")


@asynccontextmanager
async def site(limits: ServerLimits | None = None) -> AsyncIterator[Site]:
    loop = asyncio.get_running_loop()
    pump = Pump(load_library(), threads=1, slots=4, high=65_536, bounds_s=BOUNDS_S)
    engine = Engine()
    listener = await loop.create_server(lambda: engine, HOST, 0)
    endpoint = Endpoint(HOST, listener.sockets[0].getsockname()[1])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    made = Site(pump, client)
    made.engine = engine

    def pass_through(request: HttpRequest, reply: Reply) -> None:
        one = made.through = Through(made, reply)
        one.call = endpoint.request(b"POST", b"/", [], b"", one, lines=one)

    server = Server(pass_through, limits=limits)
    await server.start(HOST, 0)
    await loop.sock_connect(client, (HOST, server.port))
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        while await made.line():
            pass
        yield made
    finally:
        client.close()
        server.close()
        await server.drain()
        endpoint.close()
        assert pump.away == 0
        pump.close()
        listener.close()


def sockets() -> int:
    """Return how many sockets the process has."""
    return sum(
        stat.S_ISSOCK(Path(one).stat().st_mode)
        for one in glob("/proc/self/fd/*")
        if Path(one).exists()
    )


def play(main: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        before = sockets()
        async with asyncio.timeout(PATIENCE_S):
            await main()
            while sockets() > before:  # noqa: ASYNC110 - no event tells it.
                await asyncio.sleep(0.001)

    uvloop.run(guarded())


played = played_by(play, places=0)


def counted(through: Through) -> list[tuple[int, int]]:
    return [(one.events, one.tokens) for one in through.passed]


# The other ends of a stream: each event is written when the client has the last one.
OTHER_ENDS = """
import os, socket, sys
engine, client, told = map(int, sys.argv[1:])
engine, client = socket.socket(fileno=engine), socket.socket(fileno=client)
engine.settimeout(10.0), client.settimeout(10.0)
for number in range(1, 40):
    event = b'data: {"n":%d,"text":"a","finish_reason":null}\\n\\n' % number
    engine.sendall(b"%x\\r\\n%b\\r\\n" % (len(event), event))
    got = b""
    while not got.endswith(event + b"\\r\\n"):
        got += client.recv(4096)
os.write(told, b"!")
"""


@played()
async def test_a_stream_that_cannot_go_on_stops_no_other_one() -> None:
    def fail(passed: Passed) -> None:
        raise RuntimeError(f"cannot go on behind {passed.events} events")

    async with site() as one:
        await one.lent()
        lent = one.through.lent
        assert lent is not None
        one.through.came_back = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="behind 0 events"):
            lent.stop()
        assert one.pump.away == 0
        # Its slot is free, and may be another stream's.
        one.through.reply.write(LAST)
        await one.receive(event(0) + LAST)


def wait_with_the_interpreter(ends: list[int]) -> None:
    """Let no Python run in this process until another one has written and read all events."""
    here, there = os.pipe()
    words = [sys.executable, "-c", OTHER_ENDS, *map(str, [*ends, there])]
    with subprocess.Popen(words, pass_fds=[*ends, there]) as process:
        os.close(there)
        # Of a PyDLL, a call keeps the interpreter.
        assert ctypes.PyDLL(None).read(here, ctypes.create_string_buffer(1), 1) == 1
        assert process.wait() == 0
    os.close(here)


@played()
async def test_streams_go_on_while_something_holds_the_interpreter() -> None:
    async with site() as one:
        await one.lent()
        await one.receive(event(0))
        engine = one.engine.transport.get_extra_info("socket")
        wait_with_the_interpreter([engine.fileno(), one.client.fileno()])
        assert (one.pump.events, one.pump.away) == (39, 1)
        one.engine.say(LAST)
        await one.receive(LAST)
        assert counted(one.through) == [(39, 40)]


@played()
async def test_ordinary_events_go_on_without_python() -> None:
    async with site() as one:
        await one.lent()
        events = [event(number) for number in range(1, 40)]
        for data in events:
            one.engine.say(data)
        await one.receive(event(0) + b"".join(events))
        lent = one.through.lent
        assert lent is not None
        assert (lent.tokens, one.pump.tokens[lent.slot]) == (40, 40)
        assert (one.pump.streams, one.pump.events, one.pump.away) == (1, 39, 1)
        one.through.last_s = 0.0
        lent.catch_up()
        assert 0.0 < one.through.last_s <= asyncio.get_running_loop().time() + 1.0
        assert one.through.reply.written > len(b"".join(events))
        one.engine.transport.write(chunk(LAST) + b"0\r\n\r\n")
        await one.receive(LAST)
        await one.end()
        assert one.turns == ["lent", "back", "end"]
        assert counted(one.through) == [(39, 40)]
        assert one.through.data == [LAST]
        counts, total_s = one.pump.new_gaps()
        assert len(counts) == len(BOUNDS_S) + 1
        assert 1 <= sum(counts) <= 39
        assert total_s > 0.0
        assert one.pump.new_gaps() == ([0, 0, 0], 0.0)


@pytest.mark.parametrize("cut", range(1, len(chunk(event(1)) + chunk(LAST)), 7))
@played()
async def test_what_is_not_ordinary_comes_back_wherever_it_is_cut(cut: int) -> None:
    async with site() as one:
        await one.lent()
        one.lends = False
        data = chunk(event(1)) + chunk(LAST) + chunk(b": remark\n\n") + b"0\r\n\r\n"
        one.engine.transport.write(data[:cut])
        await asyncio.sleep(0.005)
        one.engine.transport.write(data[cut:])
        await one.receive(event(0) + event(1) + LAST + b": remark\n\n")
        await one.end()
        assert one.turns[-1] == "end"


@played()
async def test_a_stream_may_go_and_come_often() -> None:
    async with site() as one:
        sent = b""
        for number in range(30):
            for data in (event(2 * number), event(2 * number + 1), b": remark\n\n"):
                one.engine.say(data)
                sent += data
                await asyncio.sleep(0)
        await one.receive(sent)
        one.engine.transport.write(b"0\r\n\r\n")
        await one.end()
        assert one.turns.count("lent") == one.turns.count("back") >= 1


@pytest.mark.parametrize("reset", [False, True])
@played()
async def test_an_engine_that_dies_is_an_error_here(reset: bool) -> None:
    async with site() as one:
        await one.lent()
        one.engine.say(event(1))
        await one.receive(event(0) + event(1))
        if reset:
            one.engine.transport.abort()
        else:
            one.engine.transport.close()
        await one.until(lambda: "error" in one.turns)
        assert one.turns == ["lent", "back", "error"]
        assert one.through.errors[0].is_loss


@played()
async def test_a_client_that_leaves_ends_its_request() -> None:
    async with site() as one:
        await one.lent()
        one.client.close()
        await one.engine.gone.wait()
        assert one.turns == ["lent", "back", "left"]


@played()
async def test_one_who_writes_to_the_client_has_the_stream_back_first() -> None:
    async with site() as one:
        await one.lent()
        one.engine.say(event(1))
        await one.receive(event(0) + event(1))
        one.lends = False
        one.through.reply.write(b": hello\n\n")
        await one.receive(b": hello\n\n")
        assert one.turns == ["lent", "back"]
        one.engine.transport.write(chunk(event(2)) + b"0\r\n\r\n")
        await one.receive(event(2))
        await one.end()
        assert one.turns == ["lent", "back", "end"]


@played()
async def test_a_half_read_chunk_is_not_lost_by_that() -> None:
    async with site() as one:
        await one.lent()
        half = len(chunk(event(1))) // 2
        one.engine.transport.write(chunk(event(1))[:half])
        await asyncio.sleep(0.01)
        one.lends = False
        one.through.reply.write(b": hello\n\n")
        await one.receive(event(0) + b": hello\n\n")
        one.engine.transport.write(chunk(event(1))[half:] + b"0\r\n\r\n")
        await one.receive(event(1))
        await one.end()


LARGE = [event(number, "x" * 60_000) for number in range(1, 200)]


@played()
async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with site() as one:
        await one.lent()
        for data in LARGE:
            one.engine.say(data)
        lent = one.through.lent
        assert lent is not None
        await one.until(lambda: lent.paused)
        assert 65_536 < lent.waiting < 200_000
        one.lends = False
        lent.stop()
        assert one.through.call.paused
        await one.receive(event(0) + b"".join(LARGE))
        one.engine.transport.write(b"0\r\n\r\n")
        await one.end()


def test_a_client_is_cut_off_whose_stream_does_not_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def __init__(self, library: ctypes.CDLL) -> None:
            self._library = library

        def br_stop(self, made: object, slot: int, returned: object) -> int:
            self._library.br_stop(made, slot, returned)
            return -errno.EINVAL

        def __getattr__(self, name: str) -> object:
            return getattr(self._library, name)

    async def main() -> None:
        async with site() as one:
            await one.lent()
            lent, library = one.through.lent, one.pump.library
            assert lent is not None
            one.pump.library = cast("ctypes.CDLL", Failing(library))
            lent.stop()
            one.pump.library = library
            assert one.pump.returns["fault"] == 1
            await one.receive(event(0))
            with pytest.raises(AssertionError, match="the connection was closed"):
                await one.line()

    play(main)
    assert "does not give a stream back, which is cut: Invalid argument" in caplog.text


@played()
async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with site(ServerLimits(write_timeout_s=0.4)) as one:
        await one.lent()
        for data in LARGE:
            one.engine.say(data)
        await one.engine.gone.wait()
        assert one.turns == ["lent", "back", "left"]


@played()
async def test_a_stream_for_which_there_are_no_descriptors_stays() -> None:
    async with site() as one:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            one.engine.say(event(0))
            await one.until(lambda: bool(one.turns))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert one.turns == ["kept"]
        one.lends = False
        one.engine.transport.write(chunk(event(1)) + b"0\r\n\r\n")
        await one.receive(event(0) + event(1))
        await one.end()
        # Both connections serve on.
        one.turns.clear()
        one.lends = True
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one.client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while await one.line():
            pass
        await one.lent()
        one.engine.transport.write(chunk(event(1)) + b"0\r\n\r\n")
        await one.receive(event(0) + event(1))
        await one.end()
        assert one.turns == ["lent", "back", "end"]

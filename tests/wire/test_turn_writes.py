"""Writes that wait for the end of the turn, and what does not let them wait."""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import cast

import pytest
from tests.wire.raw_bytes import RawConnection, engine

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.turn_writes import (
    TurnTransport,
    WriteProgress,
    WriteTurn,
    end_if_silent,
    held_by_kernel,
)


class Loop:
    """Runs what is called soon when told."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def end_turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class Recorder:
    """Takes down what a transport was asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.asked.append(data)

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        assert not self.closed
        self.asked += pieces

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return len(self.asked)

    def close(self) -> None:
        self.asked.append("close")

    def abort(self) -> None:
        self.asked.append("abort")

    def write_eof(self) -> None:
        self.asked.append("write_eof")


class Bench:
    """Some transports of one turn."""

    def __init__(self, count: int = 1) -> None:
        self.loop = Loop()
        turn = WriteTurn(cast("asyncio.AbstractEventLoop", self.loop))
        self.recorders = [Recorder() for _ in range(count)]
        self.transports = [
            TurnTransport(cast("asyncio.Transport", recorder), turn) for recorder in self.recorders
        ]

    @property
    def asked(self) -> list[object]:
        return self.recorders[0].asked


@pytest.mark.both_loops
def test_the_writes_of_a_turn_are_one_at_its_end() -> None:
    bench = Bench()
    for turn in (b"1", b"2"):
        bench.transports[0].write(b"a" + turn)
        bench.transports[0].write(b"b" + turn)
        assert b"a" + turn not in b"".join(cast("list[bytes]", bench.asked))
        bench.loop.end_turn()
    assert bench.asked == [b"a1b1", b"a2b2"]
    assert bench.loop.soon == []


@pytest.mark.parametrize("ask", ["close", "abort", "write_eof"])
def test_what_waits_goes_before_anything_else(ask: str) -> None:
    bench = Bench()
    bench.transports[0].write(b"a")
    getattr(bench.transports[0], ask)()
    bench.loop.end_turn()
    assert bench.asked == [b"a", ask]


@pytest.mark.both_loops
def test_the_size_of_the_buffer_is_that_of_what_the_socket_did_not_take() -> None:
    bench = Bench()
    bench.transports[0].write(b"a")
    assert bench.transports[0].get_write_buffer_size() == 1
    assert bench.asked == [b"a"]


def test_pieces_go_at_once_behind_what_waits_and_as_they_are() -> None:
    bench = Bench()
    large = memoryview(b"b" * 100_000)
    bench.transports[0].write(b"a")
    bench.transports[0].write_pieces([b"head", large])
    assert bench.asked == [b"a", b"head", large]
    assert bench.asked[2] is large
    bench.recorders[0].closed = True
    bench.transports[0].write_pieces([b"head", large])
    assert len(bench.asked) == 3


def test_no_more_than_some_connections_wait() -> None:
    bench = Bench(40)
    for transport in bench.transports:
        transport.write(b"a")
    assert [bool(recorder.asked) for recorder in bench.recorders] == [True] * 32 + [False] * 8
    bench.loop.end_turn()
    assert all(recorder.asked == [b"a"] for recorder in bench.recorders)


@pytest.mark.parametrize("size", [40_000, 70_000])
def test_a_writer_without_end_fills_the_socket(size: int) -> None:
    bench = Bench()
    sent = [bytes([number]) * size for number in range(4)]
    for data in sent:
        bench.transports[0].write(data)
    assert len(b"".join(cast("list[bytes]", bench.asked))) > 100_000
    bench.loop.end_turn()
    assert b"".join(cast("list[bytes]", bench.asked)) == b"".join(sent)


@pytest.mark.both_loops
def test_a_connection_lost_meanwhile_is_written_to_no_more() -> None:
    bench = Bench(2)
    for transport in bench.transports:
        transport.write(b"a")
    bench.recorders[0].closed = True
    bench.loop.end_turn()
    assert [recorder.asked for recorder in bench.recorders] == [[], [b"a"]]


# When a peer counts as stalled.


def test_a_peer_that_takes_nothing_stalls_after_the_timeout() -> None:
    writes = WriteProgress(8.0)
    assert writes.check_s == 2.0
    writes.begin(100.0)
    assert not writes.has_stalled(102.0, written=9, waiting=5)
    assert not writes.has_stalled(109.0, written=9, waiting=5)
    assert not writes.has_stalled(109.9, written=12, waiting=8)
    assert writes.has_stalled(110.0, written=12, waiting=8)


def test_a_taken_byte_or_an_empty_buffer_is_progress() -> None:
    writes = WriteProgress(8.0)
    writes.begin(100.0)
    assert not writes.has_stalled(102.0, written=9, waiting=5)
    assert not writes.has_stalled(110.0, written=9, waiting=4)
    assert not writes.has_stalled(120.0, written=9, waiting=0)
    assert not writes.has_stalled(127.0, written=9, waiting=0)
    # Another answer is waited for anew.
    writes.begin(130.0)
    assert not writes.has_stalled(131.0, written=9, waiting=0)
    assert not writes.has_stalled(138.9, written=12, waiting=3)


@pytest.mark.both_loops
def test_what_the_peer_acknowledges_is_progress() -> None:
    writes = WriteProgress(8.0)
    writes.begin(100.0)
    assert not writes.has_stalled(102.0, written=20, waiting=5, held=9)
    assert not writes.has_stalled(110.0, written=20, waiting=5, held=8)
    assert not writes.has_stalled(117.0, written=20, waiting=4, held=9)
    assert writes.has_stalled(118.0, written=20, waiting=4, held=9)


def test_a_connection_without_a_socket_holds_nothing() -> None:
    assert held_by_kernel(None) == 0
    closed = socket.socket()
    closed.close()
    assert held_by_kernel(closed) == 0


# The socket options for hosts that vanish.


linux = pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")


def options_of(connected: socket.socket) -> dict[str, int]:
    tcp = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    found = {name: connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in tcp}
    return found | {"SO_KEEPALIVE": connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


@linux
@pytest.mark.parametrize(
    ("timeout_s", "idle_s", "interval_s", "user_ms"),
    [(30.0, 15, 5, 30_000), (2.0, 1, 1, 2_000), (90.5, 45, 15, 90_500)],
)
def test_probes_take_the_second_half_of_the_time(
    timeout_s: float, idle_s: int, interval_s: int, user_ms: int
) -> None:
    with socket.socket() as connected:
        end_if_silent(connected, timeout_s)
        assert options_of(connected) == {
            "SO_KEEPALIVE": 1,
            "TCP_KEEPIDLE": idle_s,
            "TCP_KEEPINTVL": interval_s,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": user_ms,
        }


@linux
@pytest.mark.parametrize(("timeout_s", "is_set"), [(30.0, True), (0.0, False)])
@pytest.mark.both_loops
async def test_connections_to_engines_are_watched(timeout_s: float, is_set: bool) -> None:
    """A host that vanishes ends its connections in tens of seconds."""

    async def answer(connection: RawConnection) -> None:
        await connection.until(b"\r\n\r\n")
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await connection.rest()

    async def ask(endpoint: Endpoint) -> socket.socket:
        await fetch(endpoint, b"GET", b"/", [], b"", timeout_s=9.0, max_bytes=9)
        (connection,) = endpoint._idle
        connected: socket.socket = connection._transport.get_extra_info("socket")
        return connected

    async with engine(answer, tcp_timeout_s=timeout_s) as raw:
        options = options_of(await ask(raw.endpoint))
        assert bool(options["SO_KEEPALIVE"]) == is_set
        assert (options["TCP_USER_TIMEOUT"] == 30_000) == is_set
        await asyncio.sleep(0)

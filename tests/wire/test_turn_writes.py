"""Writes that wait for the end of the turn, and what does not let them wait."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from balanceroute.proxy.wire.turn_writes import TurnTransport, WriteTurn

if TYPE_CHECKING:
    import asyncio


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

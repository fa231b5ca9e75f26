"""The in-memory network in order: delays, limits, listeners, counters, the journal."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

import pytest
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.network import Network
from tests.support.virtual.recorder import Pair, Recorder, listen, on_a_pair, with_a_pair
from tests.support.virtual.runner import run

HOST, PORT = "10.0.0.1", 8000
OnAPair = Callable[..., None]
Listen = Callable[[VirtualLoop, list[Recorder]], Awaitable[Callable[[], None]]]


# Delays and limits


@with_a_pair(link=Link(latency_s=0.25))
async def test_a_connect_takes_a_round_trip_and_a_byte_one_way(pair: Pair) -> None:
    assert pair.loop.time() == 1000.0 + 3 * 0.25  # The server has it half a round trip later.
    pair.client.transport.write(b"x")
    await pair.server.until_called("data")
    assert pair.loop.time() == 1001.0
    pair.client.transport.close()
    await pair.server.until_called("eof")


@in_virtual_time(link=Link(latency_s=1.0), settle_s=5.0)
async def test_the_connecting_end_goes_on_before_the_accepting_end_exists(
    loop: VirtualLoop,
) -> None:
    made: list[Recorder] = []
    stop = await listen(loop, made)
    _, client = await loop.create_connection(Recorder, HOST, PORT)
    assert loop.time() == 1002.0
    assert not made
    client.transport.write(b"early")
    client.transport.close()
    await asyncio.sleep(2.0)
    stop()
    assert made[0].calls == ["made", "data", "eof", "lost None"]


def test_jitter_delays_segments_but_keeps_their_order() -> None:
    times: list[float] = []

    async def body(pair: Pair) -> None:
        began = pair.loop.time()
        for number in range(50):
            pair.loop.call_later(0.1 * number, pair.client.transport.write, bytes([number]))
        for number in range(50):
            await pair.server.until(lambda end, count=number: len(end.received) > count)  # type: ignore[misc]
            times.append(pair.loop.time() - began - 0.1 * number)
        assert pair.server.received == bytes(range(50))
        pair.client.transport.close()
        pair.server.transport.close()

    on_a_pair(body, link=Link(latency_s=1.0, jitter_s=0.5))
    assert 1.0 <= min(times) < 1.1
    assert 1.4 < max(times) <= 1.5
    assert len(set(times)) > 25


@with_a_pair(link=Link(latency_s=0.5, bytes_per_s=1000.0))
async def test_a_line_rate_spreads_bytes_over_time(pair: Pair) -> None:
    began = pair.loop.time()
    for _ in range(10):
        pair.client.transport.write(bytes(1000))
    await pair.server.until(lambda end: len(end.received) == 10_000)
    assert pair.loop.time() - began == pytest.approx(10.0 + 0.5)
    assert pair.server.sizes == [1000] * 10


@with_a_pair()
async def test_segments_of_one_instant_are_read_as_one(pair: Pair) -> None:
    pair.client.transport.write(b"one")
    pair.client.transport.write(b"two")
    await pair.server.until_called("data")
    assert pair.server.sizes == [6]


@with_a_pair(link=Link(split_bytes=3))
async def test_segments_are_split_into_pieces_of_drawn_sizes(pair: Pair) -> None:
    pair.client.transport.write(bytes(range(250)))
    await pair.server.until(lambda end: len(end.received) == 250)
    assert pair.server.received == bytes(range(250))
    assert set(pair.server.sizes) == {1, 2, 3}


@with_a_pair(link=Link(coalesce_s=1.0, latency_s=0.01))
async def test_segments_of_one_period_are_coalesced(pair: Pair) -> None:
    await asyncio.sleep(2.0 - pair.loop.time() % 1.0)
    for _ in range(20):
        pair.client.transport.write(b"token")
        await asyncio.sleep(0.1)
    await pair.server.until(lambda end: len(end.received) == 100)
    assert pair.server.sizes == [50, 50]


@with_a_pair(link=Link(window_bytes=1_000_000))
async def test_a_read_takes_no_more_than_asyncio_would(pair: Pair) -> None:
    pair.client.transport.write(bytes(600_000))
    await pair.server.until(lambda end: len(end.received) == 600_000)
    assert pair.server.sizes == [262_144, 262_144, 75_712]


@with_a_pair(link=Link(window_bytes=1000))
async def test_the_window_bounds_what_a_paused_reader_is_owed(pair: Pair) -> None:
    pair.server.transport.pause_reading()
    pair.client.transport.set_write_buffer_limits(high=500, low=100)
    pair.client.transport.write(bytes(1000))
    assert pair.client.transport.get_write_buffer_size() == 0
    pair.client.transport.write(bytes(500))
    assert pair.client.calls == ["made"]
    pair.client.transport.write(b"x")
    assert pair.client.calls == ["made", "pause"]
    assert pair.client.transport.get_write_buffer_size() == 501
    await asyncio.sleep(100.0)
    assert pair.server.received == b""
    assert pair.loop.network.traffic.bytes_sent == 1000
    pair.server.transport.resume_reading()
    await pair.client.until_called("resume")
    await pair.server.until(lambda end: len(end.received) == 1501)
    assert pair.server.sizes == [1000, 501]


@with_a_pair()
async def test_a_buffer_handed_to_write_may_be_reused(pair: Pair) -> None:
    block = bytearray(b"abc")
    pair.client.transport.write(block)
    pair.client.transport.write(memoryview(block)[1:])
    block[:] = b"xyz"
    await pair.server.until_called("data")
    assert pair.server.received == b"abcbc"
    with pytest.raises(TypeError, match="bytes-like"):
        pair.client.transport.write("text")  # type: ignore[arg-type]


@with_a_pair()
async def test_write_buffer_limits_are_checked(pair: Pair) -> None:
    transport = pair.client.transport
    assert transport.get_write_buffer_limits() == (16_384, 65_536)
    transport.set_write_buffer_limits(low=10)
    assert transport.get_write_buffer_limits() == (10, 40)
    with pytest.raises(ValueError, match="high"):
        transport.set_write_buffer_limits(high=1, low=2)
    transport.close()


# What a transport says


@with_a_pair()
async def test_a_transport_knows_its_addresses(pair: Pair) -> None:
    peer = pair.server.transport.get_extra_info("peername")
    assert pair.client.transport.get_extra_info("peername") == (HOST, PORT)
    assert pair.client.transport.get_extra_info("sockname") == peer
    assert pair.server.transport.get_extra_info("sockname") == (HOST, PORT)
    assert pair.client.transport.get_extra_info("cipher", "none") == "none"
    named = pair.client.transport.get_extra_info("socket")
    assert (named.getsockname(), named.getpeername()) == (peer, (HOST, PORT))
    assert (named.family, named.fileno()) == (socket.AF_INET, -1)
    assert "10.0.0.1:8000 open" in repr(pair.client.transport)


@with_a_pair()
async def test_a_transport_can_change_its_protocol(pair: Pair) -> None:
    second = Recorder()
    second.connection_made(pair.server.transport)
    pair.server.transport.set_protocol(second)
    assert pair.server.transport.get_protocol() is second
    pair.client.transport.write(b"for the second")
    pair.client.transport.close()
    await second.until_lost()
    assert pair.server.calls == ["made"]
    assert second.calls == ["made", "data", "eof", "lost None"]
    assert pair.server.transport.get_protocol() is not second  # No cycle stays behind.


# Listeners


def test_port_zero_takes_free_ports_in_order() -> None:
    async def main(loop: VirtualLoop) -> list[tuple[str, int]]:
        first = await loop.create_server(Recorder, HOST, 20_001)
        others = [await loop.create_server(Recorder, HOST, 0) for _ in range(3)]
        names = [server.sockets[0].getsockname() for server in others]
        for server in (first, *others):
            assert server.is_serving()
            server.close()
            assert not server.is_serving()
            assert server.sockets == ()
        assert loop.network.listeners == []
        return names

    assert run(main, seed=1) == [(HOST, 20_000), (HOST, 20_002), (HOST, 20_003)]


@in_virtual_time()
async def test_a_wildcard_listener_takes_every_address(loop: VirtualLoop) -> None:
    listener = await loop.create_server(Recorder, None, PORT)
    for host in ("127.0.0.1", "10.2.3.4", "::1"):
        transport, _ = await loop.create_connection(Recorder, host, PORT)
        transport.close()
    await asyncio.sleep(1.0)
    listener.close()


@in_virtual_time()
async def test_faults_of_a_wildcard_listener_hold_for_every_address(loop: VirtualLoop) -> None:
    network = loop.network
    listener = await loop.create_server(Recorder, "", PORT)
    network.rule("", PORT, Link(latency_s=1.0))
    _, client = await loop.create_connection(Recorder, "10.2.3.4", PORT)
    assert loop.time() == 1002.0
    await asyncio.sleep(2.0)
    network.kill("", PORT)
    await client.until_lost()
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(Recorder, "10.2.3.4", PORT)
    network.restore("", PORT)
    network.kill("10.2.3.4", PORT)
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(Recorder, "10.2.3.4", PORT)
    transport, _ = await loop.create_connection(Recorder, "10.2.3.5", PORT)
    transport.close()
    await asyncio.sleep(5.0)
    listener.close()


def test_a_listener_that_closes_resets_what_it_did_not_accept() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        made: list[Recorder] = []
        stop = await listen(loop, made)
        _, client = await loop.create_connection(Recorder, HOST, PORT)
        stop()
        await client.until_lost()
        assert not made
        return client.calls

    assert run(main, seed=1) == ["made", "lost ConnectionResetError"]


@in_virtual_time(check=False)
async def test_a_factory_that_fails_is_reported_and_the_listener_goes_on(loop: VirtualLoop) -> None:
    made: list[Recorder] = []

    def fail_first() -> Recorder:
        made.append(Recorder())
        if len(made) == 1:
            raise ZeroDivisionError
        return made[-1]

    listener = await loop.create_server(fail_first, HOST, PORT)
    _, first = await loop.create_connection(Recorder, HOST, PORT)
    await first.until_lost()
    assert first.calls == ["made", "lost ConnectionResetError"]
    assert [type(error.exception) for error in loop.errors] == [ZeroDivisionError]
    _, second = await loop.create_connection(Recorder, HOST, PORT)
    second.transport.close()
    await asyncio.sleep(1.0)
    assert made[1].is_lost
    listener.close()
    assert loop.network.connections() == []


def test_wait_closed_waits_for_the_accepted_connections() -> None:
    async def main(loop: VirtualLoop) -> float:
        listener = await loop.create_server(Recorder, HOST, PORT)
        transport, _ = await loop.create_connection(Recorder, HOST, PORT)
        await asyncio.sleep(1.0)
        loop.call_later(10.0, transport.close)
        listener.close()
        await listener.wait_closed()
        return loop.time()

    assert run(main, seed=1) == pytest.approx(1011.0, abs=0.01)


# Counters, journal, checks


@with_a_pair()
async def test_connections_and_bytes_are_counted(pair: Pair) -> None:
    network = pair.loop.network
    assert network.traffic.open_connections == 2
    pair.client.transport.write(b"12345")
    assert (network.traffic.bytes_sent, network.traffic.bytes_delivered) == (5, 0)
    await pair.server.until_called("data")
    assert (network.traffic.bytes_sent, network.traffic.bytes_delivered) == (5, 5)
    pair.client.transport.close()
    await pair.server.until_called("eof")
    assert network.traffic.open_connections == 1


@with_a_pair(link=Link(latency_s=1.0), journal=True)
async def test_the_journal_tells_what_happened(pair: Pair) -> None:
    pair.client.transport.write(b"12345")
    await pair.server.until_called("data")
    pair.client.transport.close()
    await pair.server.until_called("eof")
    pair.server.transport.close()
    await pair.server.until_lost()
    journal = pair.loop.network.traffic.journal
    assert journal is not None
    assert [event[1:] for event in journal] == [
        ("connect", 1, "client", 0),
        ("accept", 1, "server", 0),
        ("bytes", 1, "server", 5),
        ("closed", 1, "client", 0),
        ("eof", 1, "server", 0),
        ("closed", 1, "server", 0),
    ]
    assert journal[0].time_s == 1002.0
    assert journal[2].time_s == 1004.0


def test_an_impossible_link_is_refused() -> None:
    for bad in (
        {"latency_s": -1.0},
        {"jitter_s": -1.0},
        {"window_bytes": 0},
        {"split_bytes": 0},
        {"bytes_per_s": 0.0},
    ):
        with pytest.raises(ValueError, match="latency_s="):
            Link(**bad)


@in_virtual_time()
async def test_a_loop_has_one_network(loop: VirtualLoop) -> None:
    with pytest.raises(AssertionError, match="has a network"):
        loop.attach(Network(loop, random.Random(1)))

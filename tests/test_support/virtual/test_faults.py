"""The in-memory network out of order: faults of connects and connections, and outages."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Connect, Link
from tests.support.virtual.loop import VirtualDeadlock, VirtualLoop
from tests.support.virtual.recorder import Pair, Recorder, listen, on_a_pair, with_a_pair
from tests.support.virtual.runner import run

HOST, PORT = "10.0.0.1", 8000
OnAPair = Callable[..., None]
Listen = Callable[[VirtualLoop, list[Recorder]], Awaitable[Callable[[], None]]]


# Faults of connects


@in_virtual_time()
async def test_a_rule_refuses_connects(loop: VirtualLoop) -> None:
    stop = await listen(loop, [])
    loop.network.rule(HOST, PORT, Link(connect=Connect.REFUSE))
    with pytest.raises(ConnectionRefusedError, match=r"10\.0\.0\.1"):
        await loop.create_connection(Recorder, HOST, PORT)
    loop.network.rule(HOST, PORT, None)
    transport, _ = await loop.create_connection(Recorder, HOST, PORT)
    transport.close()
    await asyncio.sleep(1.0)
    stop()


def test_a_connect_that_hangs_meets_the_callers_timeout() -> None:
    async def main(loop: VirtualLoop) -> float:
        loop.network.rule(HOST, PORT, Link(connect=Connect.HANG))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await loop.create_connection(Recorder, HOST, PORT)
        return loop.time()

    assert run(main, seed=1) == 1005.0


def test_a_connect_that_hangs_ends_when_linux_gives_up() -> None:
    async def main(loop: VirtualLoop) -> float:
        loop.network.silence(HOST, PORT)
        with pytest.raises(TimeoutError, match="no answer"):
            await loop.create_connection(Recorder, HOST, PORT)
        return loop.time()

    assert run(main, seed=1) == pytest.approx(1127.0)


def test_a_rule_can_draw_each_connects_link() -> None:
    async def main(loop: VirtualLoop) -> list[bool]:
        rng = random.Random(5)
        stop = await listen(loop, [])
        loop.network.rule(
            HOST, PORT, lambda: Link(connect=rng.choice([Connect.ACCEPT, Connect.REFUSE]))
        )
        outcomes = []
        for _ in range(20):
            try:
                transport, _ = await loop.create_connection(Recorder, HOST, PORT)
            except ConnectionRefusedError:
                outcomes.append(False)
            else:
                outcomes.append(True)
                transport.close()
        await asyncio.sleep(1.0)
        stop()
        return outcomes

    outcomes = run(main, seed=1)
    assert set(outcomes) == {True, False}
    assert run(main, seed=2) == outcomes  # The rule draws from the caller's generator.


@in_virtual_time(link=Link(latency_s=1.0))
async def test_a_cancelled_connect_leaves_nothing(loop: VirtualLoop) -> None:
    made: list[Recorder] = []
    stop = await listen(loop, made)
    for delay_s in (0.0, 0.5, 1.0, 1.5, 2.0):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_connection(Recorder, HOST, PORT), delay_s)
    await asyncio.sleep(10.0)
    assert loop.network.connections() == []
    assert all(server.is_lost for server in made)
    stop()


@in_virtual_time()
async def test_a_connect_cancelled_at_its_last_step_closes_what_it_made(loop: VirtualLoop) -> None:
    made: list[Recorder] = []
    stop = await listen(loop, made)

    class Hasty(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connecting.cancel()

    connecting = asyncio.create_task(loop.create_connection(Hasty, HOST, PORT))
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.sleep(1.0)
    assert made[0].calls == ["made", "eof", "lost None"]
    stop()


# Faults of connections


@pytest.mark.parametrize("count", [0, 1, 7, 100])
@with_a_pair(link=lambda count: Link(reset_after_download_bytes=count))
async def test_a_connection_is_reset_after_so_many_bytes(pair: Pair, count: int) -> None:
    pair.server.transport.write(bytes(range(60)))
    pair.server.transport.write(bytes(range(60, 120)))
    await pair.client.until_lost()
    await pair.server.until_lost()
    assert pair.client.received == bytes(range(count))
    assert pair.client.calls == ["made", *(["data"] if count else []), "lost ConnectionResetError"]
    assert pair.server.calls == ["made", "lost ConnectionResetError"]


@with_a_pair(link=Link(reset_after_upload_bytes=4))
async def test_an_upload_can_be_reset_too(pair: Pair) -> None:
    pair.client.transport.write(bytes(10))
    await pair.server.until_lost()
    await pair.client.until_lost()
    assert len(pair.server.received) == 4


@with_a_pair(link=Link(stall_after_download_bytes=4, stall_s=300.0))
async def test_a_stall_delivers_nothing_until_it_is_over(pair: Pair) -> None:
    began = pair.loop.time()
    pair.server.transport.write(b"0123456789")
    pair.server.transport.close()
    await pair.client.until_called("data")
    assert pair.client.received == b"0123"
    await pair.client.until(lambda end: len(end.received) == 10)
    assert pair.loop.time() - began == pytest.approx(300.0, abs=0.01)
    await pair.client.until_lost()
    assert pair.client.calls == ["made", "data", "eof", "lost None"]


def test_a_half_open_connection_stays_so_for_ever() -> None:
    async def main(loop: VirtualLoop) -> None:
        made: list[Recorder] = []
        stop = await listen(loop, made)
        _, client = await loop.create_connection(Recorder, HOST, PORT)
        await asyncio.sleep(1.0)
        (connection,) = loop.network.connections()
        connection.stall(download=True, upload=False)
        made[0].transport.write(b"never")
        made[0].transport.abort()
        await made[0].until_lost()
        stop()
        client.transport.write(b"to whom?")
        await asyncio.sleep(86_400.0)
        assert client.calls == ["made"]
        assert loop.network.traffic.open_connections == 1
        await client.until_lost()

    with pytest.raises(VirtualDeadlock, match="until_lost"):
        run(main, seed=1)


@with_a_pair()
async def test_a_stalled_reset_arrives_when_the_stall_is_over(pair: Pair) -> None:
    (connection,) = pair.loop.network.connections()
    connection.stall(50.0)
    began = pair.loop.time()
    pair.server.transport.abort()
    await pair.client.until_lost()
    assert pair.client.calls[-1] == "lost ConnectionResetError"
    assert pair.loop.time() - began == pytest.approx(50.0)


def test_an_abort_is_a_reset_unless_told_otherwise() -> None:
    async def aborted(loop: VirtualLoop) -> list[str]:
        made: list[Recorder] = []
        stop = await listen(loop, made)
        _, client = await loop.create_connection(Recorder, HOST, PORT)
        await asyncio.sleep(1.0)
        made[0].transport.abort()
        await client.until_lost()
        stop()
        return client.calls

    assert run(aborted, seed=1) == ["made", "lost ConnectionResetError"]
    assert run(aborted, seed=1, abort_resets=False) == ["made", "eof", "lost None"]


@with_a_pair()
async def test_an_abort_after_a_close_changes_nothing(pair: Pair) -> None:
    pair.client.transport.close()
    pair.client.transport.abort()
    await pair.server.until_called("eof")


def test_what_is_on_its_way_may_be_lost_to_a_reset() -> None:
    lengths: set[int] = set()

    async def body(pair: Pair) -> None:
        for letter in (b"a", b"b", b"c", b"d"):
            pair.server.transport.write(letter)
        pair.server.transport.abort()
        pair.server.transport.write(b"e")
        await pair.client.until_lost()
        lengths.add(len(pair.client.received))

    for seed in range(30):
        on_a_pair(body, seed=seed)
    assert lengths == {0, 1, 2, 3, 4}


@with_a_pair()
async def test_bytes_that_meet_a_closed_socket_come_back_as_a_reset(pair: Pair) -> None:
    async def body(_: VirtualLoop, client: Recorder, server: Recorder) -> None:
        pair.client.transport.close()
        pair.server.transport.write(b"crossing")
        await pair.server.until_lost()
        assert pair.server.calls == ["made", "eof", "lost BrokenPipeError"]

    pair.loop.call_later(10.0, lambda: pair.server.transport.write(b"again"))
    await body(pair.loop, pair.client, pair.server)


# Outages


@in_virtual_time()
async def test_a_killed_listener_resets_and_refuses_until_restored(loop: VirtualLoop) -> None:
    made: list[Recorder] = []
    stop = await listen(loop, made)
    clients = [(await loop.create_connection(Recorder, HOST, PORT))[1] for _ in range(3)]
    clients[0].transport.pause_reading()
    await asyncio.sleep(1.0)
    made[1].transport.pause_reading()
    loop.network.kill(HOST, PORT)
    await asyncio.sleep(1.0)
    assert [server.calls[-1] for server in made] == ["lost ConnectionResetError"] * 3
    assert [client.is_lost for client in clients] == [False, True, True]
    clients[0].transport.resume_reading()
    await clients[0].until_lost()
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(Recorder, HOST, PORT)
    loop.network.restore(HOST, PORT)
    transport, _ = await loop.create_connection(Recorder, HOST, PORT)
    transport.close()
    await asyncio.sleep(1.0)
    stop()


@in_virtual_time()
async def test_a_kill_leaves_other_listeners_alone(loop: VirtualLoop) -> None:
    listeners = [await loop.create_server(Recorder, HOST, PORT + rank) for rank in range(2)]
    clients = [(await loop.create_connection(Recorder, HOST, PORT + rank))[1] for rank in range(2)]
    await asyncio.sleep(1.0)
    loop.network.kill(HOST, PORT)
    await clients[0].until_lost()
    await asyncio.sleep(1.0)
    assert clients[1].calls == ["made"]
    clients[1].transport.close()
    for listener in listeners:
        listener.close()


@in_virtual_time()
async def test_a_kill_ends_a_silence(loop: VirtualLoop) -> None:
    stop = await listen(loop, [])
    _, client = await loop.create_connection(Recorder, HOST, PORT)
    await asyncio.sleep(1.0)
    loop.network.silence(HOST, PORT)
    loop.network.kill(HOST, PORT)
    await client.until_lost()
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(Recorder, HOST, PORT)
    stop()


@in_virtual_time(link=Link(latency_s=1.0), settle_s=10.0)
async def test_a_kill_between_the_handshake_and_the_accept_is_felt(loop: VirtualLoop) -> None:
    made: list[Recorder] = []
    stop = await listen(loop, made)
    _, client = await loop.create_connection(Recorder, HOST, PORT)
    loop.network.kill("10.0.0.1", PORT)
    await client.until_lost()
    assert not made
    await asyncio.sleep(1.0)
    assert loop.network.connections() == []
    stop()


@in_virtual_time()
async def test_a_silent_listener_swallows_everything_until_restored(loop: VirtualLoop) -> None:
    made: list[Recorder] = []
    stop = await listen(loop, made)
    _, client = await loop.create_connection(Recorder, HOST, PORT)
    await asyncio.sleep(1.0)
    loop.network.silence(HOST, PORT)
    client.transport.write(bytes(200_000))
    made[0].transport.write(b"unheard")
    made[0].transport.close()
    late = asyncio.create_task(loop.create_connection(Recorder, HOST, PORT))
    await asyncio.sleep(20.0)
    assert client.calls == ["made", "pause"]
    assert made[0].received == b""
    assert not late.done()
    loop.network.restore(HOST, PORT)
    transport, _ = await late
    # TCP tries again 1, 3, 7, 15 and 31 s after the first SYN.
    assert loop.time() == pytest.approx(1000.0 + 1.0 + 31.0, abs=0.01)
    assert client.received == b"unheard"
    transport.close()
    await client.until_lost()
    # As on Linux: the reset comes after the FIN, in answer to bytes that nobody will read.
    assert client.calls[-1] == "lost BrokenPipeError"
    await asyncio.sleep(1.0)
    stop()


@with_a_pair(link=Link(window_bytes=100))
async def test_a_window_that_opened_in_a_black_hole_is_seen_afterwards(pair: Pair) -> None:
    pair.client.transport.write(bytes(200))
    await pair.server.until(lambda end: len(end.received) == 100)
    pair.loop.network.silence(HOST, PORT)  # The news of the open window is on its way.
    await asyncio.sleep(100.0)
    assert len(pair.server.received) == 100
    assert pair.client.transport.get_write_buffer_size() == 100
    pair.loop.network.restore(HOST, PORT)
    await pair.server.until(lambda end: len(end.received) == 200)
    pair.client.transport.close()
    pair.server.transport.close()

"""Random traffic with random faults, from a seed: what always holds, and that it replays exactly."""

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Connect, Link, NetworkEvent
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.recorder import Recorder
from tests.support.virtual.runner import run

HOST = "10.0.0.1"
PORTS = (8000, 8001)
SEEDS = st.integers(0, 2**32)


def draw_link(rng: random.Random, *, faults: bool) -> Link:
    def maybe(value: int) -> int | None:
        return value if faults and rng.random() < 0.1 else None

    return Link(
        latency_s=rng.choice([0.0, 1e-4, 0.1]),
        jitter_s=rng.choice([0.0, 0.01]),
        bytes_per_s=rng.choice([None, 1e5]),
        window_bytes=rng.choice([20, 1000, 65_536]),
        split_bytes=rng.choice([None, 50]),
        coalesce_s=rng.choice([0.0, 0.02]),
        connect=rng.choice([Connect.ACCEPT] * 9 + [Connect.REFUSE]) if faults else Connect.ACCEPT,
        reset_after_download_bytes=maybe(rng.randint(0, 3000)),
        reset_after_upload_bytes=maybe(rng.randint(0, 3000)),
        stall_after_download_bytes=maybe(rng.randint(0, 3000)),
        stall_after_upload_bytes=maybe(rng.randint(0, 3000)),
        stall_s=rng.choice([None, 5.0]),
    )


class Chatter(Recorder):
    """Remembers what it wrote."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(keep_open=rng.random() < 0.5)
        self.wrote = bytearray()
        self.finished = False

    def say(self, length: int) -> None:
        if not self.finished:
            words = bytes((len(self.wrote) + index) % 251 for index in range(length))
            self.wrote += words
            self.transport.write(words)

    def finish(self) -> None:
        self.finished = True
        self.transport.write_eof()


def act(rng: random.Random, end: Chatter) -> None:
    """Do one thing that an application could."""
    if "made" not in end.calls or end.is_lost:
        return
    match rng.randint(0, 19):
        case 0:
            end.transport.close()
        case 1:
            end.transport.abort()
        case 2:
            end.finish()
        case 3 | 4 | 5:
            end.transport.pause_reading()
        case 6 | 7 | 8 | 9:
            end.transport.resume_reading()
        case _:
            end.say(rng.choice([1, 100, 2000]))


def disturb(rng: random.Random, loop: VirtualLoop) -> None:
    """Do one thing that a network could."""
    port = rng.choice(PORTS)
    match rng.randint(0, 9):
        case 0:
            loop.network.kill(HOST, port)
        case 1:
            loop.network.silence(HOST, port)
        case 2 | 3 | 4 | 5:
            loop.network.restore(HOST, port)
        case _:
            connections = loop.network.connections()
            if connections and rng.random() < 0.3:
                rng.choice(connections).stall(rng.choice([None, 1.0]))
            elif connections and rng.random() < 0.3:
                rng.choice(connections).reset()


async def traffic(loop: VirtualLoop, seed: int) -> list[tuple[Chatter, Chatter]]:
    """Let clients and servers talk through a faulty network; return the pairs that met."""
    rng = random.Random(seed)
    accepted: dict[int, Chatter] = {}
    clients: list[Chatter] = []

    class Server(Chatter):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            accepted[transport.get_extra_info("peername")[1]] = self

    listeners = [await loop.create_server(lambda: Server(rng), HOST, port) for port in PORTS]
    for port in PORTS:
        loop.network.rule(HOST, port, lambda: draw_link(rng, faults=True))

    async def connect(port: int) -> None:
        try:
            async with asyncio.timeout(5.0):
                client = (await loop.create_connection(lambda: Chatter(rng), HOST, port))[1]
        except OSError:
            return
        clients.append(client)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(connect(rng.choice(PORTS)))
            await asyncio.sleep(rng.choice([0.0, 0.3]))
        for _ in range(120):
            await asyncio.sleep(rng.choice([0.0, 1e-4, 0.05, 0.3]))
            ends = [*clients, *accepted.values()]
            if ends and rng.random() < 0.9:
                act(rng, rng.choice(ends))
            else:
                disturb(rng, loop)
    for port in PORTS:
        loop.network.restore(HOST, port)
    for listener in listeners:
        listener.close()
    await asyncio.sleep(1.0)
    for end in [*clients, *accepted.values()]:
        if not end.is_lost:
            end.transport.abort()
    await asyncio.sleep(1.0)
    names = {client.transport.get_extra_info("sockname")[1]: client for client in clients}
    return [(names[port], accepted[port]) for port in accepted if port in names]


def check_calls(end: Chatter) -> None:
    """A protocol's callbacks come in the order that asyncio promises."""
    assert end.calls[0] == "made"
    assert [call for call in end.calls if call.startswith(("made", "lost"))] == [
        "made",
        end.calls[-1],
    ]
    if "eof" in end.calls:
        assert "data" not in end.calls[end.calls.index("eof") :]
    flow = [call for call in end.calls if call in {"pause", "resume"}]
    assert flow == ["pause", "resume"] * (len(flow) // 2) + ["pause"] * (len(flow) % 2)


@given(SEEDS)
@in_virtual_time("seed")
async def test_callbacks_keep_their_order_and_bytes_theirs_under_any_fault(
    loop: VirtualLoop, seed: int
) -> None:
    for client, server in await traffic(loop, seed):
        check_calls(client)
        check_calls(server)
        assert client.wrote.startswith(server.received)
        assert server.wrote.startswith(client.received)
    assert loop.network.traffic.bytes_delivered <= loop.network.traffic.bytes_sent


@given(SEEDS)
@in_virtual_time("seed")
async def test_everything_arrives_without_faults(loop: VirtualLoop, seed: int) -> None:
    rng = random.Random(seed)
    server = Chatter(rng)
    listener = await loop.create_server(lambda: server, HOST, 8000)
    loop.network.rule(HOST, 8000, draw_link(rng, faults=False))
    _, client = await loop.create_connection(lambda: Chatter(rng), HOST, 8000)
    await server.until_called("made")
    for _ in range(40):
        end = rng.choice([client, server])
        match rng.randint(0, 3):
            case 0:
                end.transport.pause_reading()
            case 1:
                end.transport.resume_reading()
            case _:
                end.say(rng.choice([1, 100, 2000]))
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.1]))
    for end in (client, server):
        end.transport.resume_reading()
    await client.until(lambda end: len(end.received) == len(server.wrote))
    client.finish()
    await server.until_called("eof")
    server.transport.close()
    await server.until_lost()
    await client.until_called("eof")
    client.transport.close()
    await client.until_lost()
    assert server.received == client.wrote
    assert client.received == server.wrote
    assert "lost None" in client.calls
    assert "lost None" in server.calls
    listener.close()


def events(seed: int) -> list[NetworkEvent]:
    """Return the journal of a run."""

    async def main(loop: VirtualLoop) -> list[NetworkEvent]:
        await traffic(loop, seed)
        assert loop.network.traffic.journal is not None
        return loop.network.traffic.journal

    return run(main, seed=seed, journal=True)


def digest(seed: int) -> str:
    """Return a digest of a journal, down to the last bit of each time."""
    return hashlib.sha256(repr(events(seed)).encode()).hexdigest()


def test_a_seed_replays_exactly_and_another_seed_differs() -> None:
    journals = [events(seed) for seed in range(5)]
    assert journals == [events(seed) for seed in range(5)]
    assert len({repr(journal) for journal in journals}) == 5
    kinds = {event.kind for journal in journals for event in journal}
    assert kinds >= {"connect", "accept", "refused", "bytes", "eof", "reset", "closed"}


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_seed_replays_exactly_in_another_process(hash_seed: str) -> None:
    program = f"import runpy; print(runpy.run_path({str(Path(__file__))!r})['digest'](7))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert result.stdout.strip() == digest(7)


async def churn(loop: VirtualLoop, count: int) -> None:
    """Make connections, 100 at a time, each with a question and an answer."""
    listener = await loop.create_server(
        lambda: Recorder(on_data=lambda end, data: end.transport.write(data)), HOST, 8000
    )

    async def exchange() -> None:
        for _ in range(count // 100):
            _, client = await loop.create_connection(Recorder, HOST, 8000)
            client.transport.write(b"question")
            await client.until_called("data")
            client.transport.close()
            await client.until_lost()

    await asyncio.gather(*(exchange() for _ in range(100)))
    await asyncio.sleep(1.0)
    assert loop.network.traffic.bytes_delivered == 2 * len(b"question") * count
    assert loop.network.traffic.open_connections == 0
    assert loop.network.connections() == []
    listener.close()


def test_connections_come_and_go_without_a_trace() -> None:
    run(lambda loop: churn(loop, 2_000), seed=1)


@pytest.mark.slow
def test_a_hundred_thousand_connections_come_and_go_without_a_trace() -> None:
    run(lambda loop: churn(loop, 100_000), seed=1)

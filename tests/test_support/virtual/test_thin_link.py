"""The model of a link, and the relay that makes one of it on real sockets."""

import asyncio
import random
from typing import Any

import pytest
from tests.support.virtual.datagrams import ThinLink, ThinLinkSettings, UdpRelay

SETTINGS = ThinLinkSettings(
    bits_per_s=8_000, delay_s=0.1, loss=0.0, queue_bytes=2_500, overhead_bytes=0
)


def test_packets_follow_each_other_at_the_rate() -> None:
    link = ThinLink(SETTINGS, random.Random(1))
    assert [link.offer(1_000, 0.0), link.offer(500, 0.0)] == pytest.approx([1.1, 1.6])
    assert link.offer(1_000, 5.0) == pytest.approx(6.1)


def test_what_finds_the_queue_full_is_dropped() -> None:
    link = ThinLink(SETTINGS, random.Random(1))
    arrivals = [link.offer(1_000, 0.0) for _ in range(4)]
    assert [arrival is None for arrival in arrivals] == [False, False, True, True]
    assert (link.carried, link.dropped, link.lost) == (2, 2, 0)
    assert link.offer(1_000, 1.0) is not None


def test_losses_are_of_the_seed() -> None:
    settings = ThinLinkSettings(loss=0.1, queue_bytes=1 << 30)

    def lost(seed: int) -> list[bool]:
        link = ThinLink(settings, random.Random(seed))
        return [link.offer(100, 0.0) is None for _ in range(2_000)]

    assert lost(1) == lost(1) != lost(2)
    assert 150 < sum(lost(1)) < 250


def test_a_relay_carries_both_ways() -> None:
    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.transport.sendto(data, addr)

    class Client(asyncio.DatagramProtocol):
        def __init__(self) -> None:
            self.got: asyncio.Queue[bytes] = asyncio.Queue()

        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.got.put_nowait(data)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server, _ = await loop.create_datagram_endpoint(Echo, local_addr=("127.0.0.1", 0))
        thin = ThinLinkSettings(delay_s=0.005, loss=0.0)
        relay = UdpRelay(server.get_extra_info("sockname")[1], seed=1, up=thin, down=thin)
        port = await relay.start()
        clients = [
            await loop.create_datagram_endpoint(Client, remote_addr=("127.0.0.1", port))
            for _ in range(2)
        ]
        for number, (transport, _) in enumerate(clients):
            transport.sendto(b"%d" % number)
        begun_s = loop.time()
        assert [await client.got.get() for _, client in clients] == [b"0", b"1"]
        assert loop.time() - begun_s >= 0.009
        assert (relay.up.carried, relay.down.carried) == (2, 2)
        relay.close()
        for transport, _ in clients:
            transport.close()
        server.close()
        await asyncio.sleep(0)

    asyncio.run(main())

"""Engines behind one name."""

import asyncio
import socket

import pytest
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.discovery.reconciler import View
from balanceroute.proxy.live.discovery.sources import DnsName
from balanceroute.proxy.live.engines.instances import Role, Target


def test_every_address_is_an_engine_and_a_name_without_addresses_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zone: list[str] = []
    told: list[View] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("d.serving", 8000)
        if not zone:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return zone

    async def main(_: VirtualLoop) -> None:
        source = DnsName(Role.DECODE, "d.serving", 8000, interval_s=2.0, resolve=resolve)
        task = asyncio.create_task(source.run(told.append))
        for addresses, urls in (
            ([], None),
            (["10.0.0.2", "10.0.0.1"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
            ([], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
            # Of both families one: an engine must not count twice.
            (["fd00::1", "10.0.0.1"], ["http://10.0.0.1:8000"]),
            (["fd00::1"], ["http://[fd00::1]:8000"]),
        ):
            zone[:] = addresses
            await asyncio.sleep(5.0)
            if urls is None:
                assert told == []
            else:
                assert list(told[-1]) == [Target(Role.DECODE, url) for url in urls]
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=1_000.0)
    # Once for each outage.
    assert caplog.messages == ["the name of engines does not resolve"] * 2


def test_the_resolver_of_the_system_is_asked() -> None:
    told: list[View] = []

    async def main() -> None:
        done = asyncio.Event()

        def tell(view: View) -> None:
            told.append(view)
            done.set()

        task = asyncio.create_task(
            DnsName(Role.PREFILL, "localhost", 8100, interval_s=60.0).run(tell)
        )
        async with asyncio.timeout(30):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert list(told[0]) in (
        [Target(Role.PREFILL, "http://127.0.0.1:8100")],
        [Target(Role.PREFILL, "http://[::1]:8100")],
    )

"""The whole proxy before engines that it knows by name, in virtual time."""

import asyncio
import random
import socket
from typing import Any

import pytest
from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.wire.http1.client import Endpoint, fetch

BODY = b'{"model":"emulated","prompt":"t1 t2 t3","max_tokens":3,"ignore_eos":true}'
HEADERS = [(b"content-type", b"application/json")]


def test_a_resolver_that_fails_for_a_minute_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is quarantined, for probes or for requests."""

    async def main(loop: VirtualLoop) -> None:
        is_down = False
        failures = 0
        usual = loop.getaddrinfo

        async def getaddrinfo(host: Any, port: Any, **options: Any) -> list[Any]:
            nonlocal failures
            if not str(host).startswith("engine-"):
                return await usual(host, port, **options)
            if is_down:
                failures += 1
                raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
            return await usual("127.0.0.1", port, **options)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        flags = {"health_interval_s": 1.0, "health_timeout_s": 0.5}
        world = World(WorldSettings(EmulationSettings(ranks=4), flags), loop, random.Random(1))
        await world.fleet.start()
        urls = [engine.url for engine in world.fleet.engines]
        front = {url: url.replace("127.0.0.1", f"engine-{i}") for i, url in enumerate(urls)}
        await world.start(front)
        await asyncio.sleep(2.5)
        endpoint = Endpoint("127.0.0.1", world.port)
        statuses = []
        for second in range(70):
            is_down = second >= 5
            answer = await fetch(
                endpoint,
                b"POST",
                b"/v1/completions",
                HEADERS,
                BODY,
                timeout_s=30.0,
                max_bytes=9_999,
            )
            statuses.append(answer.status)
            await asyncio.sleep(1.0)
        assert statuses == [200] * 70
        assert failures > 5
        instances = world.proxy.deployment.instances
        assert {prefiller.status for prefiller in instances.prefillers} == {Status.UP}
        assert {rank.status for rank in instances.ranks} == {Status.UP}
        assert sum(record.retries for record in world.ended) == 0
        endpoint.close()
        await world.close()

    run(main, seed=1, limit_s=10_000.0)

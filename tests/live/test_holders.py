"""Clients that hold connections without a request: they keep nobody out, of either listener."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.live.control.admin import CONNECTIONS

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 4}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: "
UPLOAD = HALF + b"y\r\nContent-Length: 10000000\r\n\r\n"
LIMIT = 24


@asynccontextmanager
async def held(ports: list[int], begun: bytes, count: int) -> AsyncIterator[list[int]]:
    """Hold so many connections to each port with what was begun; whatever is closed is opened again."""
    opened = [0]

    async def hold(port: int) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened[0] += 1
            try:
                writer.write(begun)
                await reader.read()
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(hold(port)) for port in ports for _ in range(count)]
    await asyncio.sleep(0.5)
    try:
        yield opened
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("begun", [b"", HALF, UPLOAD])
@served(flags={"connection_limit": LIMIT})
async def test_the_public_listener_serves_beside_those_who_hold_it(
    site: Site, begun: bytes
) -> None:
    ports = [front.server.port for front in site.world.fronts]
    async with held(ports, begun, 2 * LIMIT) as opened:
        await asyncio.sleep(1.5)
        for _ in range(20):
            answer = await site.post(COMPLETIONS, BODY)
            assert (answer.status, answer.error) == (200, None), answer.body
            await asyncio.sleep(0.25)
        assert opened[0] > 3 * LIMIT  # They were closed, and came again.


@pytest.mark.parametrize("begun", [b"", HALF, UPLOAD])
@served()
async def test_the_admin_listener_answers_beside_those_who_hold_it(
    site: Site, begun: bytes
) -> None:
    assert site.world.plane.admin is not None
    async with held([site.world.plane.admin.port], begun, 2 * CONNECTIONS):
        for _ in range(20):
            for page in ("/health", "/ready", "/metrics", "/admin/instances"):
                answer = await site.admin(page)
                assert (answer.status, answer.error) == (200, None), page
            await asyncio.sleep(0.25)


@served()
async def test_a_head_of_the_admin_listener_has_two_seconds(site: Site) -> None:
    assert site.world.plane.admin is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", site.world.plane.admin.port)
    writer.write(HALF)
    begin_s = site.loop.time()
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    assert 2.0 <= site.loop.time() - begin_s < 3.0
    writer.close()


@pytest.mark.parametrize("begun", [b"", HALF])
@served(flags={"connection_limit": LIMIT})
async def test_after_a_standstill_nobody_gives_way_whose_request_was_not_read(
    site: Site, begun: bytes
) -> None:
    """All that came meanwhile is accepted at once, before any of it is read."""
    data = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        line = b"?"
        with suppress(ConnectionError):
            while line and b"HTTP/1.1 " not in line:  # Before it is the last answer's rest.
                line = await reader.readline()
        return line[-17:]

    ports = [front.server.port for front in site.world.fronts]
    kept = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
    assert {await ask(*one) for one in kept} == {b"HTTP/1.1 200 OK\r\n"}
    await asyncio.sleep(1.0)
    site.world.stand_still(0.3)
    clients = [
        asyncio.create_task(asyncio.open_connection("127.0.0.1", port))
        for port in ports
        for _ in range(LIMIT // 2)
    ]
    opened = [*await asyncio.gather(*clients), *kept]
    asked = [asyncio.create_task(ask(*one)) for one in opened]
    async with held(ports, begun, 2 * LIMIT):
        assert set(await asyncio.gather(*asked)) == {b"HTTP/1.1 200 OK\r\n"}
    for front in site.world.fronts:
        assert front.server.limit.rejected["limit"] == 0
    for _, writer in opened:
        writer.close()
